"""The table of a batch: a flat msgpack map, ``{"source": bytes, "subjects": [names]}``; later versions may add fields.

It is the only part of a batch that the broker unpacks, so it is read without building nested data of an untrusted
client.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgpack

from qmq.errors import BadBatch
from qmq.format.bounded_msgpack import cause_of
from qmq.format.layout import MAX_RUNS
from qmq.format.source import MOST_SOURCE_BYTES, NO_SOURCE, front_of, front_size
from qmq.names import MAX_NAME_BYTES, MAX_SUBJECT_BYTES

_PACK: Final = msgpack.Packer(autoreset=True, use_bin_type=True).pack

#: The most bytes of a table: so many, and for each run a name with its msgpack header.
TABLE_BYTES: Final = 1_024 + MOST_SOURCE_BYTES
TABLE_BYTES_A_RUN: Final = MAX_SUBJECT_BYTES + 3
TABLE_FIELDS: Final = 16
#: The last field of a table to which the broker has added how far the stamp is ahead; the value follows, u64
#: big-endian.
AHEAD_FIELD: Final = b"\xa5ahead\xcf"
AHEAD_SIZE: Final = len(AHEAD_FIELD) + 8
#: The field behind the subjects in the table of a batch that has unique texts; its value follows, 8 bytes.
UNIQUE_FIELD: Final = b"\xa6unique\xc4\x08"
_SENT_AS: Final = struct.Struct("<II")
UNIQUE_SIZE: Final = len(UNIQUE_FIELD) + _SENT_AS.size

#: Both caches have only small tables, and at most so many: a producer repeats them, and an untrusted client must not
#: fill the memory.
_CACHE_ENTRIES: Final = 4_096
_CACHED_BYTES: Final = MAX_NAME_BYTES + 16

#: The last large table is known too: pulls with small limits cut a batch of many runs many times.
_LAST_BYTES: Final = 512 << 10

#: The head of a map of two fields, and of one.
_MAP: Final = b"\x82"
_WITH_UNIQUE: Final = b"\x83"
_SOURCE_ONLY: Final = b"\x81"
_SUBJECTS: Final = b"\xa8subjects"

_tables: dict[str, bytes] = {}
_names: dict[bytes, tuple[str, ...]] = {}
_last: tuple[bytes, tuple[str, ...]] = (b"", ())


def table_of(subjects: Sequence[str], source: bytes = NO_SOURCE) -> bytes:
    """Return the table of messages from *source* that names *subjects*, in this order."""
    if len(subjects) > 1:
        return _MAP + front_of(source) + _SUBJECTS + bytes(_PACK(subjects))
    subject = subjects[0]
    rest = _tables.get(subject)
    if rest is None:
        rest = _SUBJECTS + bytes(_PACK(subjects))
        if len(_tables) >= _CACHE_ENTRIES:
            _tables.clear()
        if len(rest) <= _CACHED_BYTES:
            _tables[subject] = rest
    return _MAP + front_of(source) + rest


def unique_field(messages: int, data_crc: int) -> bytes:
    """Return the field of the table of a batch that a client sends with so many messages, some with unique texts."""
    return UNIQUE_FIELD + _SENT_AS.pack(messages, data_crc)


def sent_as(table: bytes) -> tuple[int, int] | None:
    """Return how many messages a batch with unique texts had when its client sent it, and the checksum of its data
    then; None where the table does not say that it has unique texts.
    """
    if table[:1] == _MAP:
        return None
    if table[-AHEAD_SIZE:].startswith(AHEAD_FIELD):
        table = table[:-AHEAD_SIZE]
    if not table[-UNIQUE_SIZE:].startswith(UNIQUE_FIELD):
        return None
    messages, data_crc = _SENT_AS.unpack(table[-_SENT_AS.size :])
    return messages, data_crc


def without_unique(table: bytes) -> bytes:
    """Return a table without the field ``unique``, if that is the third and last one; else as it is."""
    if table[:1] != _WITH_UNIQUE or not table[-UNIQUE_SIZE:].startswith(UNIQUE_FIELD):
        return table
    return _MAP + table[1:-UNIQUE_SIZE]


def plain_table(table: bytes, messages: int, data_crc: int) -> bytes | None:
    """Return ``without_unique`` of a table whose field says that the batch was sent like this; None for any other."""
    if table[:1] != _WITH_UNIQUE or not table.endswith(UNIQUE_FIELD + _SENT_AS.pack(messages, data_crc)):
        return None
    return _MAP + table[1:-UNIQUE_SIZE]


def is_plain_table(table: bytes | memoryview) -> bool:
    """Return whether a table, or its first byte, is that of a table with source and subjects only."""
    return table[0] == _MAP[0]


def with_field(table: bytes, field: bytes) -> bytes:
    """Return a table with one more field, a name and a value, behind the others."""
    return (table[0] + 1).to_bytes(1, "big") + table[1:] + field


def source_table(source: bytes) -> bytes:
    """Return a table that has only a source, as pieces of one run have it."""
    return _SOURCE_ONLY + front_of(source)


def names_of(table: bytes) -> tuple[str, ...]:
    """Return the subjects that a table names, all different; a caller that adds subjects checks the names.

    Raises BadBatch. Memory use is in proportion to the number of names, whatever the bytes are.
    """
    global _last
    if table == _last[0] and table:
        return _last[1]
    # Sources differ by connection, the rest repeats.
    rest = table[:1] + table[front_size(table) :]
    small = len(rest) <= _CACHED_BYTES
    if small and (known := _names.get(rest)) is not None:
        return known
    if (plain := without_unique(table)) is not table:  # its value differs by batch
        return names_of(plain)
    try:
        names = _read(table)
        "".join(names)  # raises TypeError where one is not a string
    except Exception as error:  # whatever msgpack or a wrong shape raises
        raise BadBatch(f"the table is not a flat msgpack map with a list of subjects: {cause_of(error)}") from None
    if not names:
        raise BadBatch("the table does not name a subject")
    if len(set(names)) != len(names):
        raise BadBatch("the table names a subject twice")
    if small:
        if len(_names) >= _CACHE_ENTRIES:
            _names.clear()
        _names[rest] = names
    elif len(table) <= _LAST_BYTES:
        _last = table, names
    return names


def _read(table: bytes) -> tuple[str, ...]:
    # Nested data is refused: only the headers of the map and of the list of names are read, and every other value must
    # be a scalar.
    unpacker = msgpack.Unpacker(
        raw=False,
        max_buffer_size=max(len(table), 1),
        max_str_len=TABLE_BYTES,
        max_bin_len=TABLE_BYTES,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    unpacker.feed(table)
    names: tuple[str, ...] = ()
    fields = unpacker.read_map_header()
    if fields > TABLE_FIELDS:
        raise ValueError(f"{fields} fields, at most {TABLE_FIELDS} are allowed")
    for _ in range(fields):
        if unpacker.unpack() != "subjects":
            unpacker.unpack()
            continue
        if names:
            raise ValueError("subjects stands in it twice")
        count = unpacker.read_array_header()
        if count > MAX_RUNS:
            raise ValueError(f"{count} subjects, at most {MAX_RUNS} are allowed")
        names = tuple(islice(unpacker, count))
        if len(names) != count:
            raise ValueError(f"{len(names)} of {count} subjects")
    if unpacker.tell() != len(table):
        raise ValueError(f"{len(table) - unpacker.tell()} bytes behind it")
    return names
