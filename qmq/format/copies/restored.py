"""Messages of an archive as batches for a broker: copies under their old ids, marked as replayed.

They keep lane, header, body, key, tags and time of creation. Delay and expiry are left out: they were about a time that
is over, and a restore wants the messages now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import MessageTooLarge
from qmq.format.batch import COLUMN_BYTES, header_crc_of, parse_header
from qmq.format.build import name_runs, records_of, sealed_head
from qmq.format.hashing import check_of, checks_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    BEFORE_CHECK_COLUMN_BYTES,
    FIXED_COLUMN_BYTES,
    HAS_CREATED_AT,
    HAS_DELIVER_AT,
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    HAS_ORIGIN_ID,
    HAS_SOURCE,
    HAS_TAGS,
    HEADER_CRC_OFFSET,
    MESSAGE_ID,
    MESSAGE_ID_SIZE,
    RUN,
    RUN_REPLAYED,
    RUN_SIZE,
    SOURCE_SIZE,
)
from qmq.format.run import Run
from qmq.format.source import NO_SOURCE
from qmq.format.table import TABLE_BYTES_A_RUN, table_of

#: Bytes of a batch beside its runs, and of a run beside its data.
_A_BATCH: Final = BATCH_HEADER_SIZE + 64
_A_RUN: Final = RUN_SIZE + TABLE_BYTES_A_RUN
_PRODUCER_OFFSET: Final = 56
_PRODUCER: Final = 24
#: The flags that a batch of restored messages has as well.
_KEPT: Final = HAS_TAGS | HAS_KEY_HASH | HAS_CREATED_AT | HAS_MORE_KEYS | HAS_SOURCE
_ID: Final = np.dtype([("place", "V8"), ("position", ">u8")])

#: A run, and the subject that its messages get.
Part = tuple[str, Run]


class RestoredBatch(NamedTuple):
    """A batch to send, complete except for its producer; ``first`` is the id of its first message, 16 bytes."""

    buffer: bytearray
    messages: int
    first: bytes


def restored_batches(parts: Sequence[Part], created_at_us: int, most_bytes: int) -> Iterator[RestoredBatch]:
    """Yield the verified messages of runs of one batch as batches of at most *most_bytes* each, in their order.

    Raises MessageTooLarge when one message takes more.
    """
    for some in _fitting(parts, most_bytes):
        by_lane = dict[tuple[str, int], list[Run]]()
        for subject, run in some:
            by_lane.setdefault((subject, run.lane), []).append(run)
        yield _batch(by_lane, created_at_us)


def numbered(batch: bytearray, producer_id: bytes, producer_sequence: int) -> None:
    """Write producer id and producer sequence into a batch, in place."""
    batch[_PRODUCER_OFFSET : _PRODUCER_OFFSET + _PRODUCER] = producer_id + producer_sequence.to_bytes(8, "little")
    with memoryview(batch) as view:
        crc = header_crc_of(view, parse_header(view).data_start)
    batch[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = crc.to_bytes(4, "little")


def ids_of(run: Run) -> npt.NDArray[np.void]:
    """Return the ids of a run's messages, origin ids of copies: a record array of place V8 and position >u8."""
    column = run.column(HAS_ORIGIN_ID)
    if column is not None:
        return column.view(_ID)
    place = run.store_id + run.partition.to_bytes(2, "big")
    ids = np.frombuffer(bytearray((place + bytes(8)) * run.count), _ID)
    first = run.position + run.ordinal
    ids["position"] = np.arange(first, first + run.count, dtype=np.uint64)
    return ids


def id_ranges_of(ids: npt.NDArray[np.void]) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield ids of ``ids_of`` as store id, partition, and ranges [start, stop) of consecutive positions."""
    places, positions = ids["place"].astype("V8").view("<u8"), ids["position"].astype(np.uint64)
    goes_on = (places[1:] == places[:-1]) & (positions[1:] == positions[:-1] + np.uint64(1))
    heads = [0, *(np.flatnonzero(~goes_on) + 1).tolist()]
    lasts = [*(head - 1 for head in heads[1:]), len(ids) - 1]
    columns = positions[heads].tolist(), positions[lasts].tolist()
    for place, start, last in zip(ids["place"][heads].tolist(), *columns, strict=True):
        yield place[:6], int.from_bytes(place[6:], "big"), start, last + 1


# ---------------------------------------------------------------------------------------------------------------------


def _size_of(run: Run) -> int:
    """Return the most bytes that a run's messages take when sent."""
    return len(run.data) + (0 if run.flags & HAS_ORIGIN_ID else MESSAGE_ID_SIZE * run.count) + _A_RUN


def _fitting(parts: Sequence[Part], most_bytes: int) -> Iterator[list[Part]]:
    """Yield the same messages in groups that fit into *most_bytes*."""
    most_bytes -= len(parts[0][1].packed_source()) if parts else 0
    some, left = list[Part](), most_bytes - _A_BATCH
    for subject, whole in parts:
        for run in _slices(whole, most_bytes - _A_BATCH):
            size = _size_of(run)
            if some and size > left:
                yield some
                some, left = [], most_bytes - _A_BATCH
            some.append((subject, run))
            left -= size
    if some:
        yield some


def _slices(run: Run, most_bytes: int) -> Iterator[Run]:
    """Yield a run cut into parts that fit. Raises MessageTooLarge."""
    if _size_of(run) <= most_bytes:
        yield run
        return
    columns = COLUMN_BYTES[run.flags] + MESSAGE_ID_SIZE
    ends = np.cumsum(run.lengths().astype(np.int64) + columns)
    start = before = 0
    while start < run.count:
        stop = int(np.searchsorted(ends, before + most_bytes - _A_RUN, "right"))
        if stop == start:
            raise MessageTooLarge(
                f"message {run.id(start)} of {run.subject!r} takes more than the {most_bytes} bytes that the broker "
                "allows for a batch; raise its max_frame_bytes"
            )
        yield run.slice(start, stop)
        start, before = stop, int(ends[stop - 1])


def _batch(by_lane: dict[tuple[str, int], list[Run]], created_at_us: int) -> RestoredBatch:
    named = name_runs([subject for subject, _ in by_lane], [lane for _, lane in by_lane])
    several = list(by_lane.values())
    flags = (several[0][0].flags & _KEPT) | HAS_ORIGIN_ID
    datas = [_data_of(runs) for runs in several]
    counts = [sum(run.count for run in runs) for runs in several]
    crcs = [crc32c(data) for data in datas]
    if len(several) == 1:
        data, crc = datas[0], crcs[0]
        records = RUN.pack(0, several[0][0].lane, RUN_REPLAYED, 0, counts[0], 0, len(data), crc, 0)
    else:
        data = b"".join(datas)
        crc = crc32c(data)
        records = records_of(counts, list(map(len, datas)), crcs, RUN_REPLAYED, named)
    table = table_of(named.names, several[0][0].packed_source() or NO_SOURCE)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), sum(counts), len(several), 0, 0, created_at_us, 0,
        bytes(6), bytes(16), 0, crc, 0, bytes(8),
    )  # fmt: skip
    buffer = bytearray(sealed_head(fields, records + table))
    buffer += data
    return RestoredBatch(buffer, sum(counts), MESSAGE_ID.pack(*several[0][0].id(0)))


def _data_of(runs: list[Run]) -> bytes:
    """Return the data of all messages of some runs: columns with checksums made anew, then the payload."""
    if len(runs) == 1 and runs[0].count == 1:
        return _single(runs[0])
    columns = [b"".join(column) for column in zip(*map(_columns_of, runs), strict=True)]
    return b"".join(columns)


def _single(run: Run) -> bytes:
    """Return the data of a run of one message, without numpy, because many runs have one."""
    data, flags = bytes(run.data), run.flags
    kept = data[FIXED_COLUMN_BYTES : COLUMN_BYTES[flags & (HAS_DELIVER_AT - 1)]]
    if flags & HAS_CREATED_AT:
        kept += run.created_us(0).to_bytes(8, "little")
    kept += MESSAGE_ID.pack(*run.id(0))
    if flags & HAS_SOURCE:
        kept += data[COLUMN_BYTES[flags] - SOURCE_SIZE : COLUMN_BYTES[flags]]
    fold = int.from_bytes(data[4:6], "little")
    for place in range(0, len(kept), 4):
        fold ^= int.from_bytes(kept[place : place + 4], "little")
    payload = data[COLUMN_BYTES[flags] :]
    return data[:BEFORE_CHECK_COLUMN_BYTES] + check_of(payload, fold).to_bytes(4, "little") + kept + payload


def _columns_of(run: Run) -> tuple[bytes, ...]:
    """Return lengths, header sizes, checksums, tags, key hashes and times of creation (or nothing), ids, sources (or
    nothing), and payload.
    """
    if run.count == 1:
        return _cut(_single(run), run.flags)
    lengths, sizes = run.lengths(), run.header_sizes()
    tags, keys, created = run.column(HAS_TAGS), run.column(HAS_KEY_HASH), run.column(HAS_CREATED_AT)
    origins, sources = ids_of(run).tobytes(), run.column(HAS_SOURCE)
    folds = sizes.astype(np.uint32)
    for narrow in (tags, sources):
        if narrow is not None:
            folds ^= narrow
    for column in (keys, created):
        if column is not None:
            folds ^= np.bitwise_xor.reduce(column.view("<u4").reshape(run.count, 2), axis=1)
    folds ^= np.bitwise_xor.reduce(np.frombuffer(origins, "<u4").reshape(run.count, 4), axis=1)
    payload = run.payload
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    checks = checks_of(map(payload.__getitem__, map(slice, [0, *ends[:-1]], ends)), folds, run.count)
    return (
        lengths.tobytes(), sizes.tobytes(), checks.tobytes(), b"" if tags is None else tags.tobytes(),
        b"" if keys is None else keys.tobytes(), b"" if created is None else created.tobytes(), origins,
        b"" if sources is None else sources.tobytes(), bytes(payload),
    )  # fmt: skip


def _cut(data: bytes, flags: int) -> tuple[bytes, ...]:
    """Return the columns of one message from its data."""
    parts, start = list[bytes](), 0
    optional = 4 * bool(flags & HAS_TAGS), 8 * bool(flags & HAS_KEY_HASH), 8 * bool(flags & HAS_CREATED_AT)
    for size in (4, 2, 4, *optional, MESSAGE_ID_SIZE, SOURCE_SIZE * bool(flags & HAS_SOURCE)):
        parts.append(data[start : start + size])
        start += size
    return (*parts, data[start:])
