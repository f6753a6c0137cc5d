"""Batches of delayed messages that fall due, made of stored batches; the messages keep their ids as origin ids.

A stored batch is cut to the messages that are due. They keep subject, header, body, time of creation, tags and key; the
column deliver_at is left out.

Messages that were sent one by one and fall due together become one batch. Each keeps header, body, tags, keys, expiry,
and its time of creation and source, which are columns where they differ. In a column that only some of them had, the
others have 0, which means none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES, CheckedBatch, Header, header_crc_of, parse_header, runs_of, stored_table
from qmq.format.build import NamedRuns, name_runs, records_of, sealed_head
from qmq.format.hashing import check_of, checks_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    BEFORE_CHECK_COLUMN_BYTES,
    DELAY_END_US,
    DELIVER_UNIT_US,
    FIXED_COLUMN_BYTES,
    HAS_CREATED_AT,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    HAS_ORIGIN_ID,
    HAS_SOURCE,
    HAS_TAGS,
    MESSAGE_ID,
    MESSAGE_ID_SIZE,
    OPTIONAL_COLUMNS,
    RUN,
    RUN_DTYPE,
    RUN_SIZE,
    SENT_FLAGS,
)
from qmq.format.pieces import bad_messages, stored_runs, stored_runs_between
from qmq.format.run import Run, column_offsets, cut_data, folds_of
from qmq.format.source import source_in, with_producer
from qmq.format.table import names_of, table_of

#: length u32 | header_size u16
_LENGTHS: Final = struct.Struct("<IH")
_DTYPES: Final = {HAS_TAGS: "<u4", HAS_KEY_HASH: "<u8", HAS_EXPIRE_AT: "<u8"}

Columns = dict[int, npt.NDArray[Any]]


class SingleBatch(NamedTuple):
    """A stored batch of one message, whose checksums are right."""

    subject: str
    lane: int
    flags: int
    position: int
    created_at_us: int
    columns: bytes
    payload: bytes
    source: bytes


def single_of(batch: memoryview) -> SingleBatch | None:
    """Return the only message of the batch at the start of *batch*; None when it has several or bad bytes."""
    header = parse_header(batch)
    start, flags = header.data_start, header.flags
    if header.messages != 1 or header.runs != 1 or flags & ~SENT_FLAGS or header.version != BATCH_VERSION:
        return None
    if not start < header.size <= len(batch) or header_crc_of(batch, start) != header.header_crc:
        return None
    data, width = bytes(batch[start : header.size]), COLUMN_BYTES[flags]
    if crc32c(data) != header.data_crc or len(data) < width:
        return None
    length, header_size = _LENGTHS.unpack_from(data)
    if length != len(data) - width or header_size > length:
        return None
    table = stored_table(batch, header)
    source = with_producer(source_in(table), header.producer_id)
    name, lane = names_of(table)[0], RUN.unpack_from(batch, BATCH_HEADER_SIZE)[1]
    return SingleBatch(name, lane, flags, header.position, header.created_at_us, data[:width], data[width:], source)


def join_singles(singles: list[SingleBatch], store_id: bytes, partition: int) -> Due:
    """Return these messages as one batch, in their order within each subject and lane. Their ids name *partition*."""
    numbers: dict[tuple[str, int], int] = {}
    subjects = [numbers.setdefault((one.subject, one.lane), len(numbers)) for one in singles]
    counts = [len(singles)]
    if len(numbers) > 1:
        order = sorted(range(len(singles)), key=subjects.__getitem__)
        singles = [singles[at] for at in order]
        counts = np.bincount(subjects).tolist()
    lengths, sizes, columns = _columns_of(singles)
    created = [one.created_at_us for one in singles]
    if min(created) != max(created):
        columns[HAS_CREATED_AT] = np.array(created, "<u8")
    origins = b"".join([MESSAGE_ID.pack(store_id, partition, one.position) for one in singles])
    columns[HAS_ORIGIN_ID] = np.frombuffer(origins, "V16")
    sources: dict[bytes, int] = {}
    records = [sources.setdefault(one.source, len(sources)) for one in singles]
    if len(sources) > 1:
        columns[HAS_SOURCE] = np.array(records, "<u4")
    payloads = [one.payload for one in singles]
    checks = checks_of(payloads, _folds(sizes, columns), len(singles))
    datas = _datas([lengths, sizes, checks, *(columns[flag] for flag in sorted(columns))], payloads, counts)
    flags = sum(columns) | (HAS_MORE_KEYS if any(one.flags & HAS_MORE_KEYS for one in singles) else 0)
    named = name_runs([subject for subject, _ in numbers], [lane for _, lane in numbers])
    table = table_of(named.names, b"".join(sources))
    return Due(*_built(flags, named, table, counts, datas, min(created), store_id), 0)


def _columns_of(singles: list[SingleBatch]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Columns]:
    """Return lengths, header sizes, and the optional columns that any of the messages has, except deliver_at."""
    count, by_flags = len(singles), dict[int, list[int]]()
    for at, one in enumerate(singles):
        by_flags.setdefault(one.flags, []).append(at)
    lengths, sizes, columns = np.zeros(count, "<u4"), np.zeros(count, "<u2"), Columns()
    for flags, places in by_flags.items():
        joined = b"".join([singles[at].columns for at in places])
        rows = np.frombuffer(joined, np.uint8).reshape(len(places), COLUMN_BYTES[flags])
        lengths[places] = _column(rows, 0, "<u4")
        sizes[places] = _column(rows, 4, "<u2")
        offsets = [offset for offset, _ in column_offsets(flags, 1)][3:]
        for (flag, _), offset in zip(_there(flags), offsets, strict=True):
            if flag != HAS_DELIVER_AT:
                column = columns.setdefault(flag, np.zeros(count, _DTYPES[flag]))
                column[places] = _column(rows, offset, _DTYPES[flag])
    return lengths, sizes, columns


def _there(flags: int) -> Iterable[tuple[int, int]]:
    return [(flag, size) for flag, size in OPTIONAL_COLUMNS if flags & flag]


def _column(rows: npt.NDArray[np.uint8], offset: int, dtype: str) -> npt.NDArray[Any]:
    size = int(dtype[2:])
    return np.ascontiguousarray(rows[:, offset : offset + size]).view(dtype).ravel()


def _folds(sizes: npt.NDArray[Any], columns: Columns) -> npt.NDArray[Any]:
    """Return build.fold_of for each message."""
    folds = sizes.astype("<u4")
    for column in columns.values():
        folds ^= np.bitwise_xor.reduce(column.view("<u4").reshape(len(sizes), -1), axis=1)
    return folds


def _datas(columns: list[npt.NDArray[Any]], payloads: list[bytes], counts: list[int]) -> list[bytes]:
    """Return the data of each run: its columns, then its payload."""
    ends = [0, *accumulate(counts)]
    return [
        b"".join([*(column[start:stop].tobytes() for column in columns), *payloads[start:stop]])
        for start, stop in pairwise(ends)
    ]


def _built(
    flags: int, named: NamedRuns, table: bytes, counts: list[int], datas: list[bytes], created_at_us: int,
    store_id: bytes,
) -> tuple[bytearray, CheckedBatch]:  # fmt: skip
    data = b"".join(datas)
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas), named=named)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), sum(counts), len(counts), 0, 0, created_at_us, 0,
        store_id, DUE_PRODUCER, 0, crc32c(data), 0, bytes(8),
    )  # fmt: skip
    buffer = bytearray(sealed_head(fields, records + table) + data)
    return buffer, _checked(buffer, named)


def _checked(buffer: bytearray, named: NamedRuns) -> CheckedBatch:
    made = parse_header(memoryview(buffer))
    if made.runs == 1:
        return CheckedBatch(made, tuple(named.names), RUN.unpack_from(buffer, BATCH_HEADER_SIZE), None)
    runs = np.frombuffer(memoryview(buffer), RUN_DTYPE, made.runs, BATCH_HEADER_SIZE)
    return CheckedBatch(made, tuple(named.names), None, runs)


#: The producer of batches of due messages; no client has this id, since theirs are random or hashes.
DUE_PRODUCER: Final = b"qmq: falling due"

#: The deliver_at of one message.
_TIME: Final = struct.Struct("<Q")

Times = npt.NDArray[np.uint64]


class Due(NamedTuple):
    """A batch of due messages, ready to be stamped, and how many messages had too many bad bytes for it."""

    buffer: bytearray
    checked: CheckedBatch
    lost: int


def due_times(batch: memoryview, header: Header, stored_at_us: int) -> Times:
    """Return when each message of the batch at the start of *batch* falls due, rounded up: u64[messages]."""
    if header.messages == 1:
        (time,) = _TIME.unpack_from(batch, header.data_start + COLUMN_BYTES[header.flags & (HAS_DELIVER_AT - 1)])
        time += stored_at_us if time < DELAY_END_US else 0
        return np.array([-(-time // DELIVER_UNIT_US) * DELIVER_UNIT_US], np.uint64)
    columns = [run.column(HAS_DELIVER_AT) for run in stored_runs(batch, header)]
    times = np.concatenate([column for column in columns if column is not None])
    due = np.where(times < DELAY_END_US, times + np.uint64(stored_at_us), times)
    unit = np.uint64(DELIVER_UNIT_US)
    rounded: Times = (due + unit - np.uint64(1)) // unit * unit
    return rounded


def runs_between(batch: memoryview, start: int, stop: int, most: int) -> tuple[int, int]:
    """Return how many runs of the batch at the start of *batch* have some of the messages [start, stop), by ordinal, at
    most *most*; and which message follows those that these have. Raises BadBatch when the header is wrong.
    """
    if parse_header(batch).runs == 1:
        return 1, stop
    header = _sound_header(batch)
    ends = np.cumsum(runs_of(batch, header)["count"], dtype=np.int64)
    first, last = np.searchsorted(ends, (start, stop - 1), side="right").tolist()
    if last - first < most:
        return last - first + 1, stop
    return most, int(ends[first + most - 1])


def cut_due(batch: memoryview, start: int, stop: int, partition: int) -> Due | None:
    """Return messages [start, stop), by ordinal, of the batch at the start of *batch* as a batch of their own.

    Their ids name *partition*. None when none of them is sound. Raises BadBatch when the header is wrong.
    """
    header = _sound_header(batch)
    if header.messages == 1:
        single = _cut_single(batch, header, partition)
        if single is not None:
            return single
    parts, lost = list[Run](), 0
    for run in stored_runs_between(batch, header, start, stop):
        first, last = max(start - run.ordinal, 0), min(stop - run.ordinal, run.count)
        for part in _sound_parts(run.slice(first, last)):
            if isinstance(part, int):
                lost += part
            else:
                parts.append(part)
    if not parts:
        return None
    joined = [(lane, _joined(runs, partition)) for lane, runs in _by_lane(parts).items()]
    flags = (header.flags & ~HAS_DELIVER_AT) | HAS_ORIGIN_ID
    return Due(*_build(header, flags, joined, parts[0].packed_source()), lost)


def _sound_header(batch: memoryview) -> Header:
    """Return the header of the batch at the start of *batch*. Raises BadBatch when it is wrong."""
    header = parse_header(batch)
    if header_crc_of(batch, header.data_start) != header.header_crc:
        raise BadBatch(f"the header of the delayed batch at position {header.position} is rotten: it is left out")
    return header


def _cut_single(batch: memoryview, header: Header, partition: int) -> Due | None:
    """Return the batch of one message, as most are, without numpy; None when its bytes are not those that were
    written.
    """
    start, flags = header.data_start, header.flags
    data = bytes(batch[start : header.size])
    if crc32c(data) != header.data_crc:
        return None
    before = COLUMN_BYTES[flags & (HAS_DELIVER_AT - 1)]
    end = COLUMN_BYTES[flags]
    fold = int.from_bytes(data[4:6], "little")
    origin = MESSAGE_ID.pack(header.store_id, partition, header.position)
    kept = data[FIXED_COLUMN_BYTES:before] + data[before + 8 : end] + origin
    for place in range(0, len(kept), 4):
        fold ^= int.from_bytes(kept[place : place + 4], "little")
    payload = data[end:]
    made = data[:BEFORE_CHECK_COLUMN_BYTES] + check_of(payload, fold).to_bytes(4, "little") + kept + payload
    stored = stored_table(batch, header)
    names = names_of(stored)
    source = with_producer(source_in(stored), header.producer_id)
    table = table_of(names, source)  # without the field that the broker added
    crc = crc32c(made)
    record = RUN.pack(0, RUN.unpack_from(batch, BATCH_HEADER_SIZE)[1], 0, 0, 1, 0, len(made), crc, 0)
    size = BATCH_HEADER_SIZE + RUN_SIZE + len(table) + len(made)
    fields = (
        header.magic, header.version, 0, (flags & ~HAS_DELIVER_AT) | HAS_ORIGIN_ID, size, len(table), 1, 1, 0, 0,
        header.created_at_us, 0, header.store_id, DUE_PRODUCER, 0, crc, 0, bytes(8),
    )  # fmt: skip
    buffer = bytearray(sealed_head(fields, record + table) + made)
    checked = CheckedBatch(parse_header(memoryview(buffer)), names, RUN.unpack(record), None)
    return Due(buffer, checked, 0)


def _sound_parts(run: Run) -> list[Run | int]:
    """Return the parts of a run whose messages fit their checksums, and how many messages do not."""
    bad = bad_messages(run)
    if bad is None:
        return [run.count]
    if not bad:
        return [run]
    parts = list[Run | int]()
    last = 0
    for index in [*bad, run.count]:
        if index > last:
            parts.append(run.slice(last, index))
        last = index + 1
    return [*parts, len(bad)]


def _by_lane(parts: list[Run]) -> dict[tuple[str, int], list[Run]]:
    found = dict[tuple[str, int], list[Run]]()
    for part in parts:
        found.setdefault((part.subject, part.lane), []).append(part)
    return found


def _joined(parts: list[Run], partition: int) -> tuple[int, bytes]:
    """Return how many messages these are, and their data: columns with checksums made anew, then the payload."""
    flags = parts[0].flags
    count = sum(part.count for part in parts)
    origins = b"".join(
        MESSAGE_ID.pack(part.store_id, partition, part.position + part.ordinal + index)
        for part in parts
        for index in range(part.count)
    )
    kept = [cut_data(part.data, flags, part.count, 0, part.count) for part in parts]
    columns = [b"".join(column) for column in zip(*kept, strict=True)]
    order = [0, *(flag for flag, _ in OPTIONAL_COLUMNS if flags & flag)]
    lengths, sizes, _, *optional, payload = columns
    assert len(optional) == len(order) - 1
    folds = np.concatenate([folds_of(part) for part in parts])
    folds ^= np.bitwise_xor.reduce(np.frombuffer(origins, "<u4").reshape(count, -1), axis=1)
    if flags & HAS_DELIVER_AT:
        times = np.frombuffer(optional.pop(order.index(HAS_DELIVER_AT) - 1), "<u4")
        folds ^= np.bitwise_xor.reduce(times.reshape(count, -1), axis=1)
    ends = np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64).tolist()
    view = memoryview(payload)
    checks = checks_of(map(view.__getitem__, map(slice, [0, *ends[:-1]], ends)), folds, count)
    return count, b"".join([lengths, sizes, checks.tobytes(), *optional, origins, payload])


def _build(
    header: Header, flags: int, joined: list[tuple[tuple[str, int], tuple[int, bytes]]], source: bytes
) -> tuple[bytearray, CheckedBatch]:
    named = name_runs([subject for (subject, _), _ in joined], [lane for (_, lane), _ in joined])
    counts = [count for _, (count, _) in joined]
    datas = [data for _, (_, data) in joined]
    table, data = table_of(named.names, source), b"".join(datas)
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas), named=named)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = list(header)
    for name, value in (
        ("flags", flags), ("size", size), ("table_size", len(table)), ("messages", sum(counts)), ("runs", len(counts)),
        ("producer_id", DUE_PRODUCER), ("producer_sequence", 0), ("data_crc", crc32c(data)), ("header_crc", 0),
        ("mark", bytes(8)),
    ):  # fmt: skip
        fields[Header._fields.index(name)] = value
    buffer = bytearray(sealed_head(tuple(fields), records + table) + data)
    return buffer, _checked(buffer, named)


def origins_of(batch: memoryview) -> list[tuple[bytes, int, npt.NDArray[np.uint64]]]:
    """Return the origin ids of a batch of due messages: for each store id and partition the positions, u64.

    Raises BadBatch when the batch has no origin ids.
    """
    header = parse_header(batch)
    found = list[tuple[bytes, int, npt.NDArray[np.uint64]]]()
    for run in stored_runs(batch, header):
        column = run.column(HAS_ORIGIN_ID)
        if column is None:
            raise BadBatch(f"the batch at {header.position} has no origin ids")
        parts = column.view([("store", "V8"), ("position", ">u8")])
        for store in np.unique(parts["store"]):
            store_id, partition = bytes(store)[:6], int.from_bytes(bytes(store)[6:], "big")
            found.append((store_id, partition, parts["position"][parts["store"] == store].astype(np.uint64)))
    return found


assert len(DUE_PRODUCER) == 16
assert dict(OPTIONAL_COLUMNS)[HAS_ORIGIN_ID] == MESSAGE_ID_SIZE
