"""Delayed messages that fall due: batches made of stored ones, under the ids that those have.

A batch that was stored to be delivered later is cut to the messages that are due. They keep subject, header, body, time
of creation, tags and key; the column deliver_at is left out, and origin_id says which messages they are.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES, CheckedBatch, Header, header_crc_of, parse_header
from qmq.format.build import records_of, sealed_head
from qmq.format.hashing import check_of, checks_of
from qmq.format.layout import (
    BATCH_HEADER,
    BATCH_HEADER_SIZE,
    BEFORE_CHECK_COLUMN_BYTES,
    DELAY_END_US,
    DELIVER_UNIT_US,
    FIXED_COLUMN_BYTES,
    HAS_DELIVER_AT,
    HAS_ORIGIN_ID,
    MESSAGE_ID,
    MESSAGE_ID_SIZE,
    OPTIONAL_COLUMNS,
    RUN,
    RUN_DTYPE,
    RUN_SIZE,
)
from qmq.format.pieces import bad_messages, stored_runs
from qmq.format.run import Run, cut_data, folds_of
from qmq.format.table import names_of, table_of

#: The producer of what falls due: no client is called that, as theirs are random or hashes.
DUE_PRODUCER: Final = b"qmq: falling due"

#: deliver_at of one message.
_TIME: Final = struct.Struct("<Q")

Times = npt.NDArray[np.uint64]


class Due(NamedTuple):
    """A batch of messages that are due, ready to be stamped, and how many messages were too rotten for it."""

    buffer: bytearray
    checked: CheckedBatch
    lost: int


def due_times(batch: memoryview, header: Header, stored_at_us: int) -> Times:
    """When each message of a batch that *batch* begins with falls due, rounded up: u64[messages]."""
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


def cut_due(batch: memoryview, start: int, stop: int, partition: int) -> Due | None:
    """The messages with ordinals [start, stop) of the stored batch that *batch* begins with, as a batch of their own.
    Their ids name *partition*. None when none of them is sound. Raises BadBatch when the header lies.
    """
    header = parse_header(batch)
    if header_crc_of(batch, header.data_start) != header.header_crc:
        raise BadBatch(f"the header of the delayed batch at position {header.position} is rotten: it is left out")
    if header.messages == 1:
        single = _cut_single(batch, header, partition)
        if single is not None:
            return single
    parts, lost = list[Run](), 0
    for run in stored_runs(batch, header):
        first, last = max(start - run.ordinal, 0), min(stop - run.ordinal, run.count)
        if first >= last:
            continue
        for part in _sound_parts(run.slice(first, last)):
            if isinstance(part, int):
                lost += part
            else:
                parts.append(part)
    if not parts:
        return None
    joined = [(subject, _joined(runs, partition)) for subject, runs in _by_subject(parts).items()]
    flags = (header.flags & ~HAS_DELIVER_AT) | HAS_ORIGIN_ID
    return Due(*_build(header, flags, joined), lost)


def _cut_single(batch: memoryview, header: Header, partition: int) -> Due | None:
    """A batch of one message, as most are, without numpy; None when it is not what was written."""
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
    names = names_of(bytes(batch[BATCH_HEADER_SIZE + RUN_SIZE : start]))
    table = table_of(names)  # without what the broker has added
    crc = crc32c(made)
    record = RUN.pack(0, 0, 0, 0, 1, 0, len(made), crc, 0)
    size = BATCH_HEADER_SIZE + RUN_SIZE + len(table) + len(made)
    fields = (
        header.magic, header.version, 0, (flags & ~HAS_DELIVER_AT) | HAS_ORIGIN_ID, size, len(table), 1, 1, 0, 0,
        header.created_at_us, 0, header.store_id, DUE_PRODUCER, 0, crc, 0, bytes(8),
    )  # fmt: skip
    buffer = bytearray(sealed_head(fields, record + table) + made)
    checked = CheckedBatch(parse_header(memoryview(buffer)), names, RUN.unpack(record), None)
    return Due(buffer, checked, 0)


def _sound_parts(run: Run) -> list[Run | int]:
    """The stretches of a run whose messages fit their checksums, and how many messages lie between."""
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


def _by_subject(parts: list[Run]) -> dict[str, list[Run]]:
    found = dict[str, list[Run]]()
    for part in parts:
        found.setdefault(part.subject, []).append(part)
    return found


def _joined(parts: list[Run], partition: int) -> tuple[int, bytes]:
    """How many messages these are, and their data: columns with checksums made anew, and payload."""
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


def _build(header: Header, flags: int, joined: list[tuple[str, tuple[int, bytes]]]) -> tuple[bytearray, CheckedBatch]:
    names = [subject for subject, _ in joined]
    counts = [count for _, (count, _) in joined]
    datas = [data for _, (_, data) in joined]
    table, data = table_of(names), b"".join(datas)
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas))
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = list(header)
    for name, value in (
        ("flags", flags), ("size", size), ("table_size", len(table)), ("messages", sum(counts)), ("runs", len(names)),
        ("producer_id", DUE_PRODUCER), ("producer_sequence", 0), ("data_crc", crc32c(data)), ("header_crc", 0),
        ("mark", bytes(8)),
    ):  # fmt: skip
        fields[Header._fields.index(name)] = value
    buffer = bytearray(sealed_head(tuple(fields), records + table) + data)
    made = parse_header(bytes(buffer[: BATCH_HEADER.size]))
    if made.runs == 1:
        run = RUN.unpack_from(buffer, BATCH_HEADER_SIZE)
        return buffer, CheckedBatch(made, tuple(names), run, None)
    runs = np.frombuffer(memoryview(buffer), RUN_DTYPE, made.runs, BATCH_HEADER_SIZE)
    return buffer, CheckedBatch(made, tuple(names), None, runs)


def origins_of(batch: memoryview) -> list[tuple[bytes, int, npt.NDArray[np.uint64]]]:
    """Which messages those of a batch of due ones are: for each store id and partition their positions, u64.

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
