"""The source of messages: the address, token, program and producer that sent them; the first field of a batch's table.

The client leaves a slot of a fixed size for the address and the sender, which the broker fills when it stamps the
batch. A source is one record, or several one after another in a batch of copies that came from several batches:

    address 16 bytes (IPv6, or IPv4 mapped into it; zeros: unknown) | port u16 | sender_size u8 | app_size u8 |
    producer_size u8 (0 or 16) | sender (UTF-8, zeros behind) | app (UTF-8) | producer id

A batch that a client sent has its producer id in its header; in copies and pieces the record has it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from qmq.errors import BadBatch
from qmq.format.layout import PRODUCER_ID_SIZE

_RECORD: Final = struct.Struct("<16sHBBB")
_RECORD_SIZE: Final = _RECORD.size
_ADDRESS: Final = struct.Struct("<16sH")
#: The bytes of address and port, which the broker stamps.
ADDRESS_SIZE: Final = _ADDRESS.size
#: The stamp of a batch that came over no connection.
NO_ADDRESS: Final = bytes(ADDRESS_SIZE)
#: The most bytes of a program's name, and of a sender's.
MAX_APP_BYTES: Final = 64
MAX_SENDER_BYTES: Final = 48
#: The most bytes of a record, and of the field in a batch that a client sends.
MAX_RECORD_BYTES: Final = _RECORD.size + MAX_SENDER_BYTES + MAX_APP_BYTES + PRODUCER_ID_SIZE
MAX_SENT_BYTES: Final = 9 + MAX_RECORD_BYTES - PRODUCER_ID_SIZE
#: The most bytes of the sources of a batch of copies.
MOST_SOURCE_BYTES: Final = 2_048

_FIELD: Final = b"\xa6source"
#: Where the slot begins in a table that a client sends: behind the head of the map, the field's name and a bin 8 head.
SLOT_OFFSET: Final = 1 + len(_FIELD) + 2
_SENDER_SIZE_OFFSET: Final = ADDRESS_SIZE
_PRODUCER_SIZE_OFFSET: Final = ADDRESS_SIZE + 2
_IPV4: Final = bytes(10) + b"\xff\xff"


class Source(NamedTuple):
    """Where a message came from: ``address`` with the port, the ``sender`` (a token's name), the ``producer`` as hex,
    and the program (``app``). Each is None where it is unknown.
    """

    address: str | None
    sender: str | None
    producer: str | None
    app: str | None


#: The source of a message about which nothing is known.
UNKNOWN_SOURCE: Final = Source(None, None, None, None)


def new_source(app: str = "", sender_bytes: int = 0) -> bytes:
    """Return the source as a client sends it, with *sender_bytes* for the sender; *app* is cut to MAX_APP_BYTES."""
    name = app.encode(errors="replace")[:MAX_APP_BYTES].decode(errors="ignore").encode()
    return _RECORD.pack(bytes(16), 0, sender_bytes, len(name), 0) + bytes(sender_bytes) + name


NO_SOURCE: Final = new_source()


def stamp_of(packed_address: bytes, port: int, sender: str = "") -> bytes:
    """Return what the broker stamps into batches of a connection; the address has 4 or 16 bytes, the sender at most
    MAX_SENDER_BYTES.
    """
    address = _IPV4 + packed_address if len(packed_address) == 4 else packed_address
    return _ADDRESS.pack(address, port) + sender.encode()


def has_room(view: memoryview, table_start: int, stamp: bytes) -> bool:
    """Return whether the sender of *stamp* fits into the slot of the batch whose table begins there."""
    return len(stamp) - ADDRESS_SIZE <= view[table_start + SLOT_OFFSET + _SENDER_SIZE_OFFSET]


def stamp_source(view: memoryview, table_start: int, stamp: bytes) -> None:
    """Write *stamp* into the slot of the batch whose table begins there, in place; it must have room."""
    at = table_start + SLOT_OFFSET
    if len(stamp) == ADDRESS_SIZE:
        view[at : at + ADDRESS_SIZE] = stamp
        return
    size = view[at + ADDRESS_SIZE]
    view[at : at + _RECORD_SIZE + size] = _front_of_record(stamp, size, view[at + ADDRESS_SIZE + 1])


def stamped_front(table: bytes, stamp: bytes) -> bytes | None:
    """Return what ``stamp_source`` writes from SLOT_OFFSET on into each batch with that table; None where the sender
    has no room.
    """
    if len(stamp) == ADDRESS_SIZE:
        return stamp
    size = table[SLOT_OFFSET + _SENDER_SIZE_OFFSET]
    if len(stamp) - ADDRESS_SIZE > size:
        return None
    return _front_of_record(stamp, size, table[SLOT_OFFSET + ADDRESS_SIZE + 1])


@lru_cache(4_096)
def _front_of_record(stamp: bytes, sender_size: int, app_size: int) -> bytes:
    """Return the record of a batch that a client sent, stamped, up to the end of its sender."""
    sizes = bytes((sender_size, app_size, 0))
    return stamp[:ADDRESS_SIZE] + sizes + stamp[ADDRESS_SIZE:].ljust(sender_size, b"\0")


@lru_cache(256)
def front_of(source: bytes) -> bytes:
    """Return the field with its value, as it lies in a table behind the head of the map."""
    size = len(source)
    head = b"\xc4" + size.to_bytes(1, "big") if size < 256 else b"\xc5" + size.to_bytes(2, "big")
    return _FIELD + head + source


def front_size(table: bytes) -> int:
    """Return the bytes of a table up to the end of its source. Raises BadBatch where it does not begin with one."""
    if table[1:8] == _FIELD:
        kind = table[8:9]
        if kind == b"\xc4" and len(table) > 9 and (end := 10 + table[9]) <= len(table):
            return end
        if kind == b"\xc5" and len(table) > 10 and (end := 11 + int.from_bytes(table[9:11], "big")) <= len(table):
            return end
    raise BadBatch("the first field of the table is not the source of the messages")


def source_in(table: bytes) -> bytes:
    """Return the source in a table. Raises BadBatch."""
    return table[(10 if table[8:9] == b"\xc4" else 11) : front_size(table)]


def check_sent(source: bytes) -> None:
    """Check the source of a batch that a client sends: the broker's part is zeros. Raises BadBatch."""
    if len(source) >= _RECORD.size:
        address, port, sender_size, app_size, producer_size = _RECORD.unpack_from(source)
        if len(source) == _RECORD.size + sender_size + app_size and not producer_size:
            if app_size > MAX_APP_BYTES or sender_size > MAX_SENDER_BYTES:
                raise BadBatch(f"the app has at most {MAX_APP_BYTES} bytes, the sender {MAX_SENDER_BYTES}")
            if port or any(address) or any(source[_RECORD.size : _RECORD.size + sender_size]):
                raise BadBatch("only the broker writes the address and the sender of a batch; send zeros")
            return
    raise BadBatch("the sizes in the source of the messages do not add up")


def records_in(source: bytes) -> list[bytes]:
    """Return the records of a source one by one. Raises BadBatch."""
    found, at = list[bytes](), 0
    while at < len(source):
        end = at + _RECORD.size
        if end <= len(source):
            end += sum(source[at + ADDRESS_SIZE : end])
        if end > len(source) or source[at + _PRODUCER_SIZE_OFFSET] not in (0, PRODUCER_ID_SIZE):
            raise BadBatch("the sizes in the source of the messages do not add up")
        found.append(source[at:end])
        at = end
    return found


def with_producer(source: bytes, producer_id: bytes) -> bytes:
    """Return the source with the producer id, for a copy or a piece; one that has it, or is unknown, as it is."""
    if len(source) < _RECORD.size or source[_PRODUCER_SIZE_OFFSET]:
        return source
    size = bytes((len(producer_id),))
    return source[:_PRODUCER_SIZE_OFFSET] + size + source[_PRODUCER_SIZE_OFFSET + 1 :] + producer_id


@lru_cache(1_024)
def sources_of(source: bytes) -> tuple[Source, ...]:
    """Return the sources that the records say; one of them is unknown where the bytes are none."""
    try:
        return tuple(map(_read, records_in(source))) or (UNKNOWN_SOURCE,)
    except BadBatch:
        return (UNKNOWN_SOURCE,)


def packed(source: Source) -> bytes:
    """Return a source as a record with the producer, for a copy; without what is none."""
    sender = (source.sender or "").encode()[:MAX_SENDER_BYTES]
    app = (source.app or "").encode()[:MAX_APP_BYTES]
    producer = bytes.fromhex(source.producer or "").ljust(PRODUCER_ID_SIZE, b"\0")
    return _parsed(source.address) + bytes((len(sender), len(app), len(producer))) + sender + app + producer


def _read(record: bytes) -> Source:
    address, port, sender_size, app_size, _ = _RECORD.unpack_from(record)
    sender, app = _RECORD.size + sender_size, _RECORD.size + sender_size + app_size
    return Source(
        _shown(address, port) if any(address) else None,
        record[_RECORD.size : sender].rstrip(b"\0").decode(errors="replace") or None,
        record[app:].hex() if any(record[app:]) else None,
        record[sender:app].decode(errors="replace") or None,
    )


def _shown(address: bytes, port: int) -> str:
    if address.startswith(_IPV4):
        return f"{'.'.join(map(str, address[12:]))}:{port}"
    from ipaddress import IPv6Address

    return f"[{IPv6Address(address)}]:{port}"


def _parsed(text: str | None) -> bytes:
    from ipaddress import ip_address

    host, _, port = (text or "").rpartition(":")
    try:
        return stamp_of(ip_address(host.strip("[]")).packed, int(port))
    except (ValueError, struct.error):
        return NO_ADDRESS
