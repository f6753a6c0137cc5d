"""Making batches: what a client does before it sends."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgpack
from crc32c import crc32c

from qmq.format.hashing import key_hash, tag_bits
from qmq.format.layout import (
    BATCH_HEADER,
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_PREFIX_SIZE,
    BATCH_VERSION,
    HAS_KEY_HASH,
    HAS_TAGS,
    HEADER_CRC_OFFSET,
    RUN,
    RUN_SIZE,
)

#: One part of the header of a message, packed: ``{"k": [keys], "t": [tags], "p": {properties}}``, what is empty left out.
_PACK: Final = msgpack.Packer(autoreset=True, use_bin_type=True).pack

_NO_STORE: Final = bytes(6)
_NO_MARK: Final = bytes(8)
_TABLES: dict[str, bytes] = {}
_TABLES_MAX: Final = 4_096


class MessageHeader(NamedTuple):
    """A message's header as it travels, with what the columns say of it."""

    packed: bytes
    tags: int
    key: int


NO_HEADER: Final = MessageHeader(b"", 0, 0)


def make_header(
    key: str | None = None, tags: Sequence[str] | None = None, properties: dict[str, str] | None = None
) -> MessageHeader:
    """Pack key, tags and properties into a message header."""
    fields: dict[str, object] = {}
    if key is not None:
        fields["k"] = (key,)
    if tags:
        fields["t"] = tuple(tags)
    if properties:
        fields["p"] = properties
    if not fields:
        return NO_HEADER
    return MessageHeader(_PACK(fields), tag_bits(tags) if tags else 0, key_hash(key) if key is not None else 0)


class RunContent(NamedTuple):
    """The messages of one subject that go into a batch. ``headers`` is None when no message has one."""

    subject: str
    bodies: Sequence[bytes]
    headers: Sequence[MessageHeader] | None


def message_bytes(run: RunContent) -> int:
    """Bytes of header and body of all messages of a run."""
    total = sum(map(len, run.bodies))
    return total if run.headers is None else total + sum(len(header.packed) for header in run.headers)


def build_batch(
    runs: Sequence[RunContent], *, created_at_us: int, producer_id: bytes, producer_sequence: int
) -> list[bytes]:
    """The buffers of one batch, in order; their lengths sum to its size. Every run has another subject and a message.

    All but position, stored_at_us, partition, store id, first sequences and mark is filled in.
    """
    flags = _flags_of(runs)
    buffers: list[bytes] = []
    records = bytearray()
    offset = count = data_crc = 0
    for number, run in enumerate(runs):
        columns, payload = _run_parts(run, flags)
        size = len(columns) + len(payload)
        crc = crc32c(payload, crc32c(columns))
        records += RUN.pack(number, 0, 0, 0, len(run.bodies), offset, size, crc, 0)
        if len(runs) > 1:
            data_crc = crc32c(payload, crc32c(columns, data_crc))
        else:
            data_crc = crc
        buffers += (columns, payload)
        offset += size
        count += len(run.bodies)
    head = _head(runs, records, flags, offset, count, created_at_us, producer_id, producer_sequence, data_crc)
    if len(buffers) > 8:
        return [head, b"".join(buffers)]
    return [head, *buffers]


def _flags_of(runs: Sequence[RunContent]) -> int:
    flags = 0
    for run in runs:
        for header in run.headers or ():
            if header.tags:
                flags |= HAS_TAGS
            if header.key:
                flags |= HAS_KEY_HASH
    return flags


def _run_parts(run: RunContent, flags: int) -> tuple[bytes, bytes]:
    """Columns and payload of one run."""
    bodies, headers = run.bodies, run.headers
    if headers is None:
        messages = bodies
        crcs = array("I", map(crc32c, messages))
        header_sizes = bytes(2 * len(messages))
    else:
        messages = [header.packed + body for header, body in zip(headers, bodies, strict=True)]
        sizes = [len(header.packed) for header in headers]
        seeds = sizes if not flags else [seed_of(n, h.tags, h.key) for n, h in zip(sizes, headers, strict=True)]
        crcs = array("I", map(crc32c, messages, seeds))
        header_sizes = little("H", sizes)
    columns = [little("I", map(len, messages)), header_sizes, _swapped(crcs)]
    if flags & HAS_TAGS:
        columns.append(little("I", [header.tags for header in headers] if headers else [0] * len(bodies)))
    if flags & HAS_KEY_HASH:
        columns.append(little("Q", [header.key for header in headers] if headers else [0] * len(bodies)))
    return b"".join(columns), b"".join(messages)


def seed_of(header_size: int, tags: int, key: int) -> int:
    """What a message's crc32c starts from: its columns folded, so that a rotten column shows in a cut run too."""
    return header_size ^ tags ^ (key & 0xFFFFFFFF) ^ (key >> 32)


def little(typecode: str, values: object) -> bytes:
    """The integers as little-endian bytes."""
    return _swapped(array(typecode, values))  # type: ignore[call-overload]  # any iterable of ints


def _swapped(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _head(
    runs: Sequence[RunContent],
    records: bytearray,
    flags: int,
    data_size: int,
    count: int,
    created_at_us: int,
    producer_id: bytes,
    producer_sequence: int,
    data_crc: int,
) -> bytes:
    table = _table([run.subject for run in runs])
    head = bytearray(BATCH_HEADER_SIZE)
    size = BATCH_HEADER_SIZE + RUN_SIZE * len(runs) + len(table) + data_size
    BATCH_HEADER.pack_into(
        head, 0, BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), count, len(runs), 0, 0, created_at_us,
        0, _NO_STORE, producer_id, producer_sequence, data_crc, 0, _NO_MARK,
    )  # fmt: skip
    head += records
    head += table
    crc = crc32c(head[BATCH_HEADER_SIZE:], crc32c(head[:BATCH_PREFIX_SIZE]))
    head[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = crc.to_bytes(4, "little")
    return bytes(head)


def _table(subjects: list[str]) -> bytes:
    if len(subjects) > 1:
        return bytes(_PACK({"subjects": subjects}))
    table = _TABLES.get(subjects[0])
    if table is None:
        if len(_TABLES) >= _TABLES_MAX:
            _TABLES.clear()
        table = _TABLES[subjects[0]] = _PACK({"subjects": subjects})
    return table
