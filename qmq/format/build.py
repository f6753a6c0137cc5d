"""Make batches from messages, as a client does before it sends; cut a part out of such a batch."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from functools import lru_cache
from itertools import chain, repeat
from operator import add
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import msgpack
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import InvalidOption, MessageTooLarge
from qmq.format.batch import FEW, parse_header, stored_table
from qmq.format.hashing import HASH_FOR_ZERO, Folds, check_of, checks_of, hash_bytes, tag_bits
from qmq.format.lanes import lane_of_key_hash, priority_lane_of
from qmq.format.layout import (
    BATCH_HEADER,
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_PREFIX_SIZE,
    BATCH_VERSION,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    HAS_TAGS,
    HEADER_CRC_OFFSET,
    LANE_NORMAL,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_RUNS,
    RUN,
    RUN_DTYPE,
    RUN_SIZE,
    UNIQUE_HASH_SIZE,
)
from qmq.format.pieces import stored_runs
from qmq.format.run import cut_data
from qmq.format.source import NO_SOURCE, source_in
from qmq.format.table import sent_as, table_of, unique_field, with_field
from qmq.format.unique import HASH_FIELD, hashes_of

_PACK: Final = msgpack.Packer(autoreset=True, use_bin_type=True).pack

#: A message header is the msgpack map ``{"u": hash of the unique text, "k": [keys], "o": [order key], "t": [tags],
#: "p": {properties}}`` without its empty parts. The map's first byte depends on how many parts it has; the parts
#: follow, packed one by one.
_MAP: Final = (b"\x80", b"\x81", b"\x82", b"\x83", b"\x84", b"\x85")
_KEYS: Final = b"\xa1k"
_ORDER_KEY: Final = b"\xa1o"
_TAGS: Final = b"\xa1t"
_PROPERTIES: Final = b"\xa1p"
#: The packed bytes before a key, by the key's size: an array of one string.
_SHORT_KEYS: Final = tuple(_KEYS + _PACK(["." * size])[:-size] for size in range(1, 256))
#: The characters of a key that an error shows.
_SHOWN: Final = 40
#: The packed bytes before the key of a header that has nothing else, by the key's size.
_KEY_ONLY: Final = (b"", *(_MAP[1] + front for front in _SHORT_KEYS))
#: The same for an order key.
_ORDER_KEY_ONLY: Final = (b"", *(_MAP[1] + _ORDER_KEY + front[len(_KEYS) :] for front in _SHORT_KEYS))
#: A key of fewer ASCII letters may stand for a header that has only this key.
SHORT_KEY: Final = 256
#: The most bytes of such a header beside its key.
SHORT_KEY_OVERHEAD: Final = max(map(len, _KEY_ONLY))

#: The head of a table with the field ``unique``.
_THREE_FIELDS: Final = _MAP[3]
#: The size of a header that has only the hash of a unique text.
_HASH_ONLY_SIZE: Final = len(_MAP[1]) + len(HASH_FIELD) + UNIQUE_HASH_SIZE

#: A batch of one message without a header: the batch header before its checksum without the fields that are 0; the
#: checksum and the mark; the run; and the columns length u32 | header_size u16 | check u32.
_SINGLE_PREFIX: Final = struct.Struct("<IB3xIIII16xQ8x16sQI")
_SEAL: Final = struct.Struct("<I8x")
_SINGLE_RUN: Final = struct.Struct("<8xI4xII8x")
_SINGLE_DATA: Final = struct.Struct("<IHI")
_SINGLE_SIZE: Final = BATCH_HEADER_SIZE + RUN_SIZE
assert (_SINGLE_PREFIX.size, _SINGLE_RUN.size) == (BATCH_PREFIX_SIZE, RUN_SIZE)
_NO_STORE: Final = bytes(6)
_NO_MARK: Final = bytes(8)


#: The key of a message, or its keys; None: it has none.
Keys = str | Sequence[str] | None


class MessageHeader(NamedTuple):
    """A message's header as it is sent, with the values of its columns, and its lane; ``deliver_at`` and ``expire_at``
    are 0 for none. ``key`` is the hash of the first key, ``more_keys`` whether it has several.
    """

    packed: bytes
    tags: int
    key: int
    deliver_at: int = 0
    expire_at: int = 0
    more_keys: bool = False
    lane: int = LANE_NORMAL


NO_HEADER: Final = MessageHeader(b"", 0, 0)

#: A header, or in its place the only key of a message, if ``is_short_key`` says that it may; or the bytes of such a
#: text that is its order key, where it has nothing else. In a batch with unique texts bytes are the hash of one, where
#: the message has nothing else.
AnyHeader = MessageHeader | str | bytes


def is_short_key(key: object) -> bool:
    """Return whether a key may stand for a header that has nothing else: then it is packed with others, at once."""
    return type(key) is str and 0 < len(key) < SHORT_KEY and key.isascii()


def are_short_keys(keys: Sequence[object]) -> bool:
    """Return ``is_short_key`` for all of *keys*, of which there is at least one."""
    if set(map(type, keys)) != {str}:
        return False
    sizes = set(map(len, keys))  # type: ignore[arg-type]  # all are text
    return min(sizes) > 0 and max(sizes) < SHORT_KEY and "".join(keys).isascii()  # type: ignore[arg-type]


def shortened(header: AnyHeader) -> AnyHeader:
    """Return the short key, or the text of the short order key, that stands for a header; the header if none does."""
    if type(header) is not MessageHeader or header[1] or any(header[3:6]):
        return header
    packed = header.packed
    for fronts in (_KEY_ONLY, _ORDER_KEY_ONLY):
        for front in (fronts[1], fronts[-1]):  # the size of a longer key takes one more byte
            raw = packed[len(front) :]
            if 0 < len(raw) < SHORT_KEY and packed == fronts[len(raw)] + raw and raw.isascii():
                return raw.decode()
    return header


def make_header(
    keys: Keys = None,
    tags: Sequence[str] | None = None,
    properties: dict[str, str] | None = None,
    deliver_at: int = 0,
    expire_at: int = 0,
    lane: int = LANE_NORMAL,
    order_key: str | None = None,
) -> MessageHeader:
    """Pack keys, tags, properties and order key into a message header. A key that is given twice is packed once. *lane*
    is that of the message's priority; with an order key, the lane of both is made.

    Raises InvalidOption for values that are not text and for keys that are empty, over 1,024 bytes or more than 16,
    MessageTooLarge when the header is over 65,535 bytes.
    """
    parts = bits = hashed = 0
    packed, more_keys = b"", False
    try:
        if type(keys) is str and order_key is None and not (tags or properties or deliver_at or expire_at):
            raw = keys.encode()
            if 0 < len(raw) < SHORT_KEY:  # the common case, in a third of the time
                made = _KEY_ONLY[len(raw)] + raw, 0, hash_bytes(raw) or HASH_FOR_ZERO, 0, 0, False, lane
                return tuple.__new__(MessageHeader, made)
        if keys is not None:
            packed, hashed, more_keys = _key_part(keys) if isinstance(keys, str) else _keys_part(keys)
            if packed and order_key is None and not (tags or properties or deliver_at or expire_at):
                # in half the time of a call
                return tuple.__new__(MessageHeader, (_MAP[1] + packed, 0, hashed, 0, 0, more_keys, lane))
            parts = bool(packed)
        if order_key is not None:
            raw, lane = _order_key_part(order_key, lane)
            packed += raw
            parts += 1
        if tags:
            tags_packed, bits = _tags_part(tags if type(tags) is tuple else _tuple_of(tags))
            packed += tags_packed
            parts += 1
        if properties:
            for name, value in properties.items():
                if not (isinstance(name, str) and isinstance(value, str)):
                    raise TypeError
            packed += _PROPERTIES + _PACK(properties)
            parts += 1
    except (TypeError, AttributeError, UnicodeError):
        _refuse(keys, tags, properties, order_key)
    if not parts:
        if deliver_at or expire_at or lane:
            return MessageHeader(b"", 0, 0, deliver_at, expire_at, False, lane)
        return NO_HEADER
    if len(packed) >= MAX_HEADER_BYTES:
        raise MessageTooLarge(
            f"keys, tags and properties take {len(packed) + 1} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "put large values into the body"
        )
    return MessageHeader(_MAP[parts] + packed, bits, hashed, deliver_at, expire_at, more_keys, lane)


def with_unique(header: MessageHeader, unique: bytes) -> MessageHeader:
    """Return a header with the hash of a unique text in front. Raises MessageTooLarge when it is over 65,535 bytes."""
    packed = header.packed
    packed = _MAP[packed[0] - _MAP[0][0] + 1 if packed else 1] + HASH_FIELD + unique + packed[1:]
    if len(packed) > MAX_HEADER_BYTES:
        raise MessageTooLarge(
            f"keys, tags and properties take {len(packed)} bytes with the hash of the unique text, at most "
            f"{MAX_HEADER_BYTES} are allowed; put large values into the body"
        )
    return tuple.__new__(MessageHeader, (packed, *header[1:]))


def _order_key_part(order_key: str, priority_lane: int) -> tuple[bytes, int]:
    """Return the packed order key of a header, and its lane."""
    raw = str.encode(order_key)
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise InvalidOption(
            f"an order key has 1 to {MAX_KEY_BYTES:,} bytes as UTF-8, not {len(raw):,} as {order_key[:_SHOWN]!r}; "
            "leave an empty one out"
        )
    return _ORDER_KEY + bytes(_PACK((order_key,))), lane_of_key_hash(hash_bytes(raw), priority_lane)


@lru_cache(1_024)
def _key_part(key: str) -> tuple[bytes, int, bool]:
    """Return the packed key of a header, its hash, and False: it is the only one; remembered, because keys repeat."""
    raw = str.encode(key)
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise InvalidOption(
            f"a key has 1 to {MAX_KEY_BYTES:,} bytes as UTF-8, not {len(raw):,} as {key[:_SHOWN]!r}; leave an empty "
            "one out, and put a longer text into the properties or the body"
        )
    packed = _SHORT_KEYS[len(raw) - 1] + raw if len(raw) < 256 else _KEYS + _PACK((key,))
    return packed, hash_bytes(raw) or HASH_FOR_ZERO, False


def _keys_part(keys: object) -> tuple[bytes, int, bool]:
    """Return the packed keys of a header (none: no bytes), the hash of the first, and whether there are several."""
    if not isinstance(keys, list | tuple):
        raise TypeError
    unique = list(dict.fromkeys(keys))
    if len(unique) > MAX_KEYS:
        raise InvalidOption(f"a message has at most {MAX_KEYS} keys, not {len(unique)}; leave some out")
    parts = [_key_part(key) for key in unique]
    if len(parts) < 2:
        return parts[0] if parts else (b"", 0, False)
    return _KEYS + _PACK(unique), parts[0][1], True


def either_of(key: str | None, keys: Sequence[str] | None) -> Keys:
    """Return the one of the arguments ``key`` and ``keys`` that is given. Raises InvalidOption for both, and for a text
    as ``keys``.
    """
    if keys is None:
        return key
    if key is not None:
        raise InvalidOption(f"key={key!r:.80} and keys={keys!r:.80} are given: put all of them into keys")
    if isinstance(keys, str):
        raise InvalidOption(f"keys must be a list of str, not {keys!r:.80}; a single one is key=")
    return keys


def headers_of(
    keys: Sequence[Keys],
    count: int,
    shared: MessageHeader,
    tags: Sequence[str] | None,
    properties: dict[str, str] | None,
    order_key: str | None = None,
) -> list[MessageHeader]:
    """Return the headers of *count* messages with these keys, for each its key or a list of them; *shared* is the
    header without a key.

    Tags, properties and order key are packed once. Raises InvalidOption, also for another count of keys, and
    MessageTooLarge.
    """
    if not _is_listed(keys, count):
        raise InvalidOption(
            f"keys must be a list of {count} elements, a key or a list of keys for each body, not {keys!r:.80}"
        )
    rest, bits, deliver_at, expire_at = shared.packed[1:], shared.tags, shared.deliver_at, shared.expire_at
    lane = shared.lane
    room = MAX_HEADER_BYTES - len(shared.packed) - len(_KEYS) - 16
    front = _MAP[1 + bool(tags) + bool(properties) + (order_key is not None)]
    headers = []
    for key in keys:
        if type(key) is str and key.isascii() and 0 < len(key) < min(256, room):  # the common case
            raw = key.encode()
            packed = front + _SHORT_KEYS[len(raw) - 1] + raw + rest
            hashed = hash_bytes(raw) or HASH_FOR_ZERO
            headers.append(MessageHeader(packed, bits, hashed, deliver_at, expire_at, False, lane))
        elif key is None:
            headers.append(shared)
        else:
            priority_lane = priority_lane_of(lane)
            headers.append(make_header(key, tags, properties, deliver_at, expire_at, priority_lane, order_key))
    return headers


def _is_listed(values: object, count: int) -> bool:
    """Return whether *values* are *count* elements in an order."""
    has_order = isinstance(values, Sized) and not isinstance(values, str | bytes | bytearray | Mapping | Set)
    return has_order and len(values) == count  # type: ignore[arg-type]


def ordered_headers_of(
    order_keys: Sequence[str],
    count: int,
    keys: Sequence[Keys] | None,
    tags: Sequence[str] | None,
    properties: dict[str, str] | None,
    deliver_at: int,
    expire_at: int,
    lane: int,
) -> list[AnyHeader]:
    """Return the headers of *count* messages with these order keys, one for each, and the priority that has *lane*; for
    *keys* see ``headers_of``.

    Raises InvalidOption, also for another count of either, and MessageTooLarge.
    """
    for name, given in (("order_keys", order_keys), ("keys", keys)):
        if given is not None and not _is_listed(given, count):
            raise InvalidOption(f"{name} must be a list of {count} elements, one for each body, not {given!r:.80}")
    if None in order_keys:
        raise InvalidOption("order_keys has None: send the messages without an order key in another call")
    if keys is None and not (tags or properties or deliver_at or expire_at) and count and are_short_keys(order_keys):
        return list(map(str.encode, order_keys))
    return [
        make_header(key, tags, properties, deliver_at, expire_at, lane, order_key)
        for key, order_key in zip(repeat(None) if keys is None else keys, order_keys, strict=False)
    ]


def unique_headers_of(
    texts: Sequence[str], count: int, shared: MessageHeader, headers: Sequence[AnyHeader] | None
) -> Sequence[AnyHeader]:
    """Return *headers* (None: *shared* for each) of *count* messages with the hashes of these unique texts, one for
    each.

    Raises InvalidOption, also for another count of texts, and MessageTooLarge.
    """
    if not _is_listed(texts, count):
        raise InvalidOption(f"unique must be a list of {count} texts, one for each body, not {texts!r:.80}")
    hashes = hashes_of(texts)
    if headers is None and shared is NO_HEADER:
        return hashes
    if headers is None:
        return list(map(with_unique, repeat(shared), hashes))
    lane = priority_lane_of(shared.lane)
    return [
        with_unique(full_header(header, priority_lane=lane), hashed)
        for header, hashed in zip(headers, hashes, strict=True)
    ]


def _tuple_of(tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str):
        raise TypeError
    return tuple(tags)


@lru_cache(256)
def _tags_part(tags: tuple[str, ...]) -> tuple[bytes, int]:
    """Return the packed tags of a header, and their bits; remembered, because a program has few sets of tags."""
    return _TAGS + bytes(_PACK(tags)), tag_bits(tags)


def _refuse(keys: object, tags: object, properties: object, order_key: object) -> NoReturn:
    """Raise InvalidOption for the value that is not text. Surrogates are not text: UTF-8 cannot hold them."""

    def is_text(value: object) -> bool:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)

    if keys is not None and not all(map(is_text, keys if isinstance(keys, list | tuple) else [keys])):
        raise InvalidOption(f"keys must be str that UTF-8 can hold, in a list if there are several, not {keys!r:.80}")
    if order_key is not None and not is_text(order_key):
        raise InvalidOption(f"an order key must be a str that UTF-8 can hold, not {order_key!r:.80}")
    if tags and (isinstance(tags, str) or not isinstance(tags, Iterable) or not all(map(is_text, tags))):
        raise InvalidOption(f"tags must be a list of str that UTF-8 can hold, not {tags!r:.80}")
    raise InvalidOption(f"properties must be a dict of str to str that UTF-8 can hold, not {properties!r:.80}")


def header_bytes(header: AnyHeader) -> int:
    """Return the bytes of a header; of a short key or order key the most that they can be."""
    return len(header.packed) if type(header) is MessageHeader else len(header) + SHORT_KEY_OVERHEAD


def sizes_of_headers(headers: Sequence[AnyHeader]) -> npt.NDArray[np.int64]:
    """Return ``header_bytes`` of each header; either all of them are short keys, or short order keys, or none is."""
    if headers and type(headers[0]) is not MessageHeader:
        return np.fromiter(map(len, headers), np.int64, len(headers)) + SHORT_KEY_OVERHEAD
    return np.fromiter(map(header_bytes, headers), np.int64, len(headers))


class RunContent(NamedTuple):
    """The messages of one lane of a subject for a batch. ``headers`` is None when no message has one."""

    subject: str
    bodies: Sequence[bytes]
    headers: Sequence[MessageHeader] | None
    lane: int = LANE_NORMAL


class RunLike(Protocol):
    """The part of a run that build_batch reads: a RunContent, or another class that gathers messages."""

    @property
    def subject(self) -> str: ...
    @property
    def bodies(self) -> Sequence[bytes]: ...
    @property
    def headers(self) -> Sequence[MessageHeader] | None: ...
    @property
    def lane(self) -> int: ...


def message_bytes(run: RunLike) -> int:
    """Return the bytes of header and body of all messages of a run."""
    total = sum(map(len, run.bodies))
    return total if run.headers is None else total + sum(len(header.packed) for header in run.headers)


# ---------------------------------------------------------------------------------------------------------------------
# The batch


def build_batch(
    runs: Sequence[RunLike],
    *,
    created_at_us: int,
    producer_id: bytes,
    producer_sequence: int,
    source: bytes = NO_SOURCE,
) -> list[bytes]:
    """Return the buffers of one batch, in order; their lengths sum to its size.

    *source* is what ``new_source`` makes. Every run has messages, no two have the same subject and lane, and there are
    at most MAX_RUNS of them. Everything is filled in except position, stored_at_us, partition, store id, first
    sequences and mark.
    """
    return build_flat(
        [run.subject for run in runs],
        [len(run.bodies) for run in runs],
        runs[0].bodies if len(runs) == 1 else list(chain.from_iterable(run.bodies for run in runs)),
        _joined_headers(runs),
        created_at_us=created_at_us,
        producer_id=producer_id,
        producer_sequence=producer_sequence,
        source=source,
        lanes=[run.lane for run in runs],
    )


def build_flat(
    subjects: Sequence[str],
    counts: list[int],
    bodies: Sequence[bytes],
    headers: Sequence[AnyHeader] | None,
    *,
    created_at_us: int,
    producer_id: bytes,
    producer_sequence: int,
    lengths: bytes | None = None,
    source: bytes = NO_SOURCE,
    lanes: Sequence[int] | None = None,
    has_unique: bool = False,
) -> list[bytes]:
    """As build_batch, with the runs given as their subjects, their lanes (None: all are normal), their numbers of
    messages, and the messages of all.

    *lengths* are those of the bodies as little-endian u32, where they are known. *has_unique*: some of the headers have
    hashes of unique texts.
    """
    messages, columns, flags = _columns_of(bodies, headers, lengths, has_unique)
    if len(subjects) == 1:
        data = [b"".join([column for column, _ in columns]), b"".join(messages)]
        size = len(data[0]) + len(data[1])
        crc = crc32c(data[1], crc32c(data[0]))
        records = RUN.pack(0, lanes[0] if lanes else LANE_NORMAL, 0, 0, len(messages), 0, size, crc, 0)
    else:
        if len(subjects) > MAX_RUNS:
            raise MessageTooLarge(
                f"{len(subjects)} subjects in one batch, at most {MAX_RUNS} are allowed; send more batches"
            )
        named = name_runs(subjects, lanes)
        datas = _run_datas(messages, columns, counts)
        data = [b"".join(datas)]
        size, crc = len(data[0]), crc32c(data[0])
        records = records_of(counts, list(map(len, datas)), map(crc32c, datas), named=named)
        subjects = named.names
    table = table_of(subjects, source)
    if has_unique:
        table = with_field(table, unique_field(len(messages), crc))
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, BATCH_HEADER_SIZE + len(records) + len(table) + size, len(table),
        len(messages), len(counts), 0, 0, created_at_us, 0, _NO_STORE, producer_id, producer_sequence, crc, 0,
        _NO_MARK,
    )  # fmt: skip
    return [sealed_head(fields, records + table), *data]


def build_single(
    subject: str, body: bytes, created_at_us: int, producer_id: bytes, producer_sequence: int, source: bytes = NO_SOURCE
) -> tuple[bytes, bytes]:
    """As build_batch, for one message without a header."""
    size = len(body)
    data = _SINGLE_DATA.pack(size, 0, check_of(body, 0)) + body
    size += _SINGLE_DATA.size
    crc, table = crc32c(data), table_of((subject,), source)
    table_size = len(table)
    prefix = _SINGLE_PREFIX.pack(
        BATCH_MAGIC, BATCH_VERSION, _SINGLE_SIZE + table_size + size, table_size, 1, 1, created_at_us, producer_id,
        producer_sequence, crc,
    )  # fmt: skip
    rest = _SINGLE_RUN.pack(1, size, crc) + table
    return prefix + _SEAL.pack(crc32c(rest, crc32c(prefix))) + rest, data


def build_single_unique(
    subject: str, body: bytes, unique: bytes, created_at_us: int, producer_id: bytes, producer_sequence: int,
    source: bytes = NO_SOURCE,
) -> tuple[bytes, bytes]:  # fmt: skip
    """As build_batch, for one message that has the hash of a unique text in its header, and nothing else there."""
    message = b"".join((_MAP[1], HASH_FIELD, unique, body))
    size = len(message)
    data = _SINGLE_DATA.pack(size, _HASH_ONLY_SIZE, check_of(message, _HASH_ONLY_SIZE)) + message
    size += _SINGLE_DATA.size
    crc = crc32c(data)
    table = b"".join((_THREE_FIELDS, table_of((subject,), source)[1:], unique_field(1, crc)))
    table_size = len(table)
    prefix = _SINGLE_PREFIX.pack(
        BATCH_MAGIC, BATCH_VERSION, _SINGLE_SIZE + table_size + size, table_size, 1, 1, created_at_us, producer_id,
        producer_sequence, crc,
    )  # fmt: skip
    rest = _SINGLE_RUN.pack(1, size, crc) + table
    return prefix + _SEAL.pack(crc32c(rest, crc32c(prefix))) + rest, data


def sealed_head(fields: tuple[Any, ...], rest: bytes) -> bytes:
    """Return the header with its checksum, then *rest*: run records and table."""
    head = BATCH_HEADER.pack(*fields)
    prefix = head[:BATCH_PREFIX_SIZE]
    crc = crc32c(rest, crc32c(prefix))
    return b"".join((prefix, crc.to_bytes(4, "little"), head[HEADER_CRC_OFFSET + 4 :], rest))


def _joined_headers(runs: Sequence[RunLike]) -> Sequence[MessageHeader] | None:
    """Return the headers of all runs, one after another; None when no message has one."""
    if all(run.headers is None for run in runs):
        return None
    headers: list[MessageHeader] = []
    for run in runs:
        if run.headers is not None and len(run.headers) != len(run.bodies):
            raise ValueError(f"{len(run.headers)} headers for {len(run.bodies)} bodies of {run.subject!r}")
        headers += run.headers if run.headers is not None else repeat(NO_HEADER, len(run.bodies))
    return headers


Column = tuple[bytes, int]  # the bytes, and how many of them one message has
Values = Sequence[int] | npt.NDArray[Any]  # one of each message


def _columns_of(
    bodies: Sequence[bytes], headers: Sequence[AnyHeader] | None, lengths: bytes | None, has_unique: bool
) -> tuple[Sequence[bytes], list[Column], int]:
    """Return the messages (header and body), the columns in file order, and the flags of the optional columns."""
    count = len(bodies)
    if headers is None:
        lengths = little("I", map(len, bodies)) if lengths is None else lengths
        return bodies, [(lengths, 4), (bytes(2 * count), 2), (_checks(bodies, None), 4)], 0
    if len(headers) != count:
        raise ValueError(f"{len(headers)} headers for {count} bodies")
    kinds = set(map(type, headers))
    if kinds != {MessageHeader}:
        if len(kinds) == 1:
            of_short = _of_short_keys if str in kinds else _of_hashes if has_unique else _of_short_order_keys
            return of_short(bodies, headers, lengths)  # type: ignore[arg-type]  # all are text, or bytes
        headers = list(map(full_header, headers, repeat(has_unique)))
    packed, tags, keys, *times, more_keys, _ = zip(*headers, strict=True)
    messages = list(map(add, packed, bodies))
    sizes = list(map(len, packed))
    flags = (HAS_TAGS if any(tags) else 0) | (HAS_KEY_HASH if any(keys) else 0)
    if any(more_keys):
        flags |= HAS_MORE_KEYS
    timed = [(flag, time) for flag, time in zip((HAS_DELIVER_AT, HAS_EXPIRE_AT), times, strict=True) if any(time)]
    for flag, _ in timed:
        flags |= flag
    columns = [
        (little("I", map(len, messages)), 4),
        (little("H", sizes), 2),
        (_checks(messages, _folds(sizes, tags, (keys, *(time for _, time in timed))) if flags else sizes), 4),
    ]
    if flags & HAS_TAGS:
        columns.append((little("I", tags), 4))
    if flags & HAS_KEY_HASH:
        columns.append((little("Q", keys), 8))
    columns += [(little("Q", time), 8) for _, time in timed]
    return messages, columns, flags


def _of_short_keys(
    bodies: Sequence[bytes], keys: Sequence[str], lengths: bytes | None
) -> tuple[Sequence[bytes], list[Column], int]:
    """As _columns_of, for messages that have a short key each and nothing else in their headers."""
    sizes = set(map(len, keys))
    if len(sizes) == 1:  # as of most programs: all headers are made by one join, and taken apart by one call
        (size,) = sizes
        front = _KEY_ONLY[size]
        raws = _cut_evenly("".join(keys).encode(), size)
        packed = _cut_evenly(front.decode("latin-1").join(("", *keys)).encode("latin-1"), len(front) + size)
        header_sizes = np.full(len(keys), len(front) + size, "<u2")
    else:
        raws = list(map(str.encode, keys))
        packed = list(map(add, map(_KEY_ONLY.__getitem__, map(len, raws)), raws))
        header_sizes = np.fromiter(map(len, packed), "<u2", len(packed))
    messages = list(map(add, packed, bodies))
    hashes = np.fromiter(map(hash_bytes, raws), "<u8", len(raws))
    if not hashes.all():
        hashes[hashes == 0] = HASH_FOR_ZERO
    if lengths is None:
        lengths = little("I", map(len, messages))
    else:
        lengths = (np.frombuffer(lengths, "<u4") + header_sizes).tobytes()
    columns = [
        (lengths, 4),
        (header_sizes.tobytes(), 2),
        (_checks(messages, _folds(header_sizes, None, (hashes,))), 4),
        (hashes.tobytes(), 8),
    ]
    return messages, columns, HAS_KEY_HASH


def _cut_evenly(data: bytes, size: int) -> list[bytes]:
    """Return *data* cut into pieces of that size."""
    pieces: list[bytes] = np.frombuffer(data, f"V{size}").tolist()
    return pieces


def fold(value: int) -> int:
    """Return a u64 folded into 32 bits."""
    return (value & 0xFFFFFFFF) ^ (value >> 32)


def fold_of(header_size: int, tags: int, key: int, deliver_at: int = 0, expire_at: int = 0) -> int:
    """Return a message's columns folded into 32 bits, for its checksum: so bad bytes in a column show in cut runs too.

    An origin id is folded as well, as four u32 one after another.
    """
    return header_size ^ tags ^ fold(key) ^ fold(deliver_at) ^ fold(expire_at)


def _folds(sizes: Values, tags: Sequence[int] | None, wide: Iterable[Values]) -> Folds:
    """Return fold_of for each message; *tags* None: all are 0; *wide* are the u64 columns that the batch has."""
    if len(sizes) < FEW and not isinstance(sizes, np.ndarray):
        return list(map(fold_of, sizes, repeat(0) if tags is None else tags, *wide))
    folds = np.array(sizes, np.uint32)
    if tags is not None:
        folds ^= np.array(tags, np.uint32)
    for column in wide:
        both = np.asarray(column, np.uint64)
        folds ^= (both ^ (both >> np.uint64(32))).astype(np.uint32)
    return folds


def _checks(messages: Sequence[bytes], folds: Folds | None) -> bytes:
    """Return the messages' own checksums as bytes; *folds* None: all folds are 0."""
    if len(messages) >= FEW:
        return checks_of(messages, folds, len(messages)).tobytes()
    return little("I", map(check_of, messages, repeat(0) if folds is None else folds))


def _run_datas(messages: Sequence[bytes], columns: list[Column], counts: list[int]) -> list[bytes]:
    """Return the data of each run: its columns, then its payload."""
    many = len(counts) - counts.count(1)
    singles: list[bytes] = []  # each message as if it were a run of its own
    if many * 2 < len(counts):
        if len(messages) < FEW:
            rows = [b"".join([column[w * i : w * i + w] for column, w in columns]) for i in range(len(messages))]
        else:
            side_by_side = np.hstack([np.frombuffer(column, np.uint8).reshape(-1, w) for column, w in columns])
            rows = side_by_side.view(f"V{side_by_side.shape[1]}").ravel().tolist()
        singles = list(map(add, rows, messages))
        if not many:
            return singles
    datas: list[bytes] = []
    start = taken = 0
    for count in counts:
        stop = start + count
        if count > 1 or not singles:
            datas += singles[taken:start]
            datas.append(b"".join([*[column[w * start : w * stop] for column, w in columns], *messages[start:stop]]))
            taken = stop
        start = stop
    return datas + singles[taken:]


class NamedRuns(NamedTuple):
    """The different subjects of runs, as their table names them; the index of each run's, and its lane. None: each run
    has a subject of its own, and all lanes are normal.
    """

    names: Sequence[str]
    indexes: Sequence[int] | None = None
    lanes: Sequence[int] | None = None


def name_runs(subjects: Sequence[str], lanes: Sequence[int] | None) -> NamedRuns:
    """Return the names of runs, whose subjects may repeat in other *lanes*."""
    if lanes is None or not any(lanes):
        return NamedRuns(subjects)
    names: dict[str, int] = {}
    indexes = [names.setdefault(subject, len(names)) for subject in subjects]
    return NamedRuns(list(names), indexes, lanes)


def full_header(header: AnyHeader, has_unique: bool = False, priority_lane: int = LANE_NORMAL) -> MessageHeader:
    """Return the header for which a short key, an order key of messages of that priority, or the hash of a unique text
    stands.
    """
    if type(header) is MessageHeader:
        return header
    if has_unique and type(header) is bytes:
        return with_unique(NO_HEADER, header)
    if type(header) is str:
        return make_header(header)
    return make_header(lane=priority_lane, order_key=bytes(header).decode())  # type: ignore[arg-type]


def _of_short_order_keys(
    bodies: Sequence[bytes], raws: Sequence[bytes], lengths: bytes | None
) -> tuple[Sequence[bytes], list[Column], int]:
    """As _columns_of, for messages that have a short order key each and nothing else in their headers."""
    packed = list(map(add, map(_ORDER_KEY_ONLY.__getitem__, map(len, raws)), raws))
    messages = list(map(add, packed, bodies))
    sizes = list(map(len, packed))
    if lengths is None:
        lengths = little("I", map(len, messages))
    else:
        lengths = (np.frombuffer(lengths, "<u4") + np.array(sizes, "<u4")).tobytes()
    return messages, [(lengths, 4), (little("H", sizes), 2), (_checks(messages, sizes), 4)], 0


def _of_hashes(
    bodies: Sequence[bytes], hashes: Sequence[bytes], lengths: bytes | None
) -> tuple[Sequence[bytes], list[Column], int]:
    """As _columns_of, for messages that have a unique text each and nothing else in their headers."""
    packed = _packed_hashes(b"".join(hashes))
    messages = list(map(add, packed, bodies))
    sizes = [_HASH_ONLY_SIZE] * len(hashes)
    if lengths is None:
        lengths = little("I", map(len, messages))
    else:
        lengths = (np.frombuffer(lengths, "<u4") + np.uint32(_HASH_ONLY_SIZE)).tobytes()
    return messages, [(lengths, 4), (little("H", sizes), 2), (_checks(messages, sizes), 4)], 0


def _packed_hashes(hashes: bytes) -> list[bytes]:
    """Return the headers that have these hashes and nothing else."""
    count, front = len(hashes) // UNIQUE_HASH_SIZE, _MAP[1] + HASH_FIELD
    headers = np.empty((count, _HASH_ONLY_SIZE), np.uint8)
    headers[:, : len(front)] = np.frombuffer(front, np.uint8)
    headers[:, len(front) :] = np.frombuffer(hashes, np.uint8).reshape(count, UNIQUE_HASH_SIZE)
    packed: list[bytes] = headers.view(f"V{_HASH_ONLY_SIZE}").ravel().tolist()
    return packed


def records_of(
    counts: list[int], sizes: list[int], crcs: Iterable[int], run_flags: int = 0, named: NamedRuns | None = None
) -> bytes:
    """Return the run records of a batch, as a client fills them in."""
    records = np.zeros(len(counts), RUN_DTYPE)
    records["flags"] = run_flags
    if named is None or named.indexes is None or named.lanes is None:
        records["subject"] = np.arange(len(counts))
    else:
        records["subject"], records["lane"] = named.indexes, named.lanes
    records["count"] = counts
    records["size"] = sizes
    records["offset"][1:] = np.cumsum(sizes[:-1])
    records["crc"] = np.fromiter(crcs, np.uint32, len(counts))
    return records.tobytes()


def little(typecode: str, values: object) -> bytes:
    """Return the integers as little-endian bytes."""
    column = array(typecode, values)  # type: ignore[call-overload]  # any iterable of ints
    if sys.byteorder == "big":
        column.byteswap()
    return bytes(column.tobytes())


def cut_batch(batch: memoryview, start: int, stop: int, producer_sequence: int) -> list[bytes]:
    """Return the buffers of a batch with messages [start, stop), by ordinal, of a batch that a client built.

    *producer_sequence* is that of the first of them.
    """
    header = parse_header(batch)
    subjects, lanes, counts, datas = list[str](), list[int](), list[int](), list[bytes]()
    for run in stored_runs(batch, header):
        first, end = max(start - run.ordinal, 0), min(stop - run.ordinal, run.count)
        if first < end:
            subjects.append(run.subject)
            lanes.append(run.lane)
            counts.append(end - first)
            datas.append(b"".join(cut_data(run.data, header.flags, run.count, first, end)))
    named = name_runs(subjects, lanes)
    data, sent = b"".join(datas), stored_table(batch, header)
    table = table_of(named.names, source_in(sent))
    if sent_as(sent) is not None:
        table = with_field(table, unique_field(sum(counts), crc32c(data)))
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas), named=named)
    fields = header._replace(
        size=BATCH_HEADER_SIZE + len(records) + len(table) + len(data), table_size=len(table), messages=sum(counts),
        runs=len(counts), producer_sequence=producer_sequence, data_crc=crc32c(data), header_crc=0,
    )  # fmt: skip
    return [sealed_head(tuple(fields), records + table), data]
