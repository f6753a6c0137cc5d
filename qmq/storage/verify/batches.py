"""Checking many batches at once: all checks of ``check_batch`` and of the store's stamps, by columns over a piece of
log.

Only checksums and mark are checked batch by batch, in 2 us; a check of single batches takes 20 us each. The result only
says how many batches from the start are good: a check of the next batch alone says why it is not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES, gather_lengths, numbers_by_run
from qmq.format.lanes import are_known
from qmq.format.layout import (
    BATCH_HEADER_DTYPE,
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_PREFIX_SIZE,
    BATCH_VERSION,
    ENTRY_BATCH_FLAGS,
    ENTRY_DTYPE,
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    KNOWN_FLAGS,
    LANE_NORMAL,
    MARK_SIZE,
    MAX_RUNS,
    RUN_DTYPE,
    RUN_REPLAYED,
    RUN_SIZE,
)
from qmq.format.table import TABLE_BYTES, TABLE_BYTES_A_RUN, names_of
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.message_log.segment import SegmentOwner

#: Batches below this many bytes on average are cut from a copy of the piece: slices of bytes cost half.
_SMALL_BATCH: Final = 4_096
#: Runs of this many messages and more have their lengths added up one by one.
_LONG_RUN: Final = 1_024
_TABLES_KEPT: Final = 1 << 17
_TABLE_BYTES_KEPT: Final = 256
_MAGIC_AND_SIZE: Final = struct.Struct("<I4xI")
_MARK_INPUT: Final = np.dtype([("position", "<u8"), ("header_crc", "<u4")])
_KNOWN_FLAGS: Final = np.uint16(KNOWN_FLAGS)
_KEY_FLAGS: Final = np.uint16(HAS_KEY_HASH | HAS_MORE_KEYS)
_UNKNOWN_RUN_FLAGS: Final = np.uint16(0xFFFF & ~RUN_REPLAYED)
_COLUMN_BYTES: Final = np.array(COLUMN_BYTES, np.int64)

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Columns = npt.NDArray[np.void]


class GoodPrefix(NamedTuple):
    """The good batches at the start of a piece of log: their consumer-log rows, and their bytes."""

    rows: Rows
    size: int


class BatchColumns:
    """Checks the batches of one partition."""

    def __init__(self, owner: SegmentOwner, secret: bytes, number_of: Callable[[str, int], int]) -> None:
        self._owner = owner
        self._store_id = np.void(owner.store_id)
        self._keyed = blake2b(digest_size=MARK_SIZE, key=secret)  # copied for each mark, so the key is mixed in once
        self._number_of = number_of
        self._tables: dict[bytes, tuple[int, ...]] = {}

    def good_prefix(self, view: memoryview, position: int) -> GoodPrefix:
        """Return the good batches at the start of *view*, whose first byte is at *position*; maybe none."""
        offsets = _chain(view)
        data = bytes(view[: offsets[-1]]) if len(view) < _SMALL_BATCH * len(offsets) else view
        starts = np.array(offsets, np.int64)
        heads = _records(view, starts[:-1], BATCH_HEADER_DTYPE)
        count = _first_bad(self._stamps(heads, starts, position))
        data_starts = BATCH_HEADER_SIZE + RUN_SIZE * heads["runs"].astype(np.int64) + heads["table_size"]
        count = self._sealed(data, heads[:count], offsets, data_starts.tolist())
        if not count:
            return GoodPrefix(np.empty(0, ENTRY_DTYPE), 0)
        heads, starts, data_starts = heads[:count], starts[: count + 1], data_starts[:count]
        runs = _Runs(view, data, heads, starts, data_starts)
        numbers, count = self._subjects(data, heads, offsets, data_starts.tolist(), runs)
        good = min(count, runs.first_bad())
        return GoodPrefix(_rows(heads, runs, numbers)[: runs.rows_of(good)], offsets[good])

    def _stamps(self, heads: Columns, starts: Numbers, position: int) -> Mask:
        """Return which headers are good by themselves."""
        runs, sizes = heads["runs"].astype(np.int64), heads["size"].astype(np.int64)
        table_sizes = heads["table_size"].astype(np.int64)
        good: Mask = heads["position"] == (starts[:-1] + position).astype(np.uint64)
        good &= (heads["version"] == BATCH_VERSION) & (heads["reserved"] == 0)
        good &= (heads["flags"] & ~_KNOWN_FLAGS) == 0
        good &= (heads["flags"] & _KEY_FLAGS) != HAS_MORE_KEYS
        good &= (heads["partition"] == self._owner.partition) & (heads["store_id"] == self._store_id)
        good &= (runs >= 1) & (runs <= MAX_RUNS) & (table_sizes <= TABLE_BYTES + TABLE_BYTES_A_RUN * runs)
        good &= BATCH_HEADER_SIZE + RUN_SIZE * runs + table_sizes <= sizes
        return good

    def _sealed(
        self, data: bytes | memoryview, heads: Columns, offsets: Sequence[int], data_starts: Sequence[int]
    ) -> int:
        """Return how many batches bear this store's mark and fit their two checksums."""
        header_crcs = [
            crc32c(data[offset + BATCH_HEADER_SIZE : data_start], crc32c(data[offset : offset + BATCH_PREFIX_SIZE]))
            for offset, data_start in zip(offsets, _absolute(offsets, data_starts, len(heads)), strict=False)
        ]
        count = _first_bad(np.array(header_crcs, np.uint32) == heads["header_crc"])
        count = _first_bad(self._marks(heads[:count]) == heads["mark"][:count])
        data_crcs = [
            crc32c(data[data_start:end])
            for data_start, end in zip(_absolute(offsets, data_starts, count), offsets[1:], strict=False)
        ]
        return _first_bad(np.array(data_crcs, np.uint32) == heads["data_crc"][:count])

    def _marks(self, heads: Columns) -> npt.NDArray[np.uint64]:
        inputs = np.empty(len(heads), _MARK_INPUT)
        inputs["position"], inputs["header_crc"] = heads["position"], heads["header_crc"]
        plain, size, copy = inputs.tobytes(), _MARK_INPUT.itemsize, self._keyed.copy
        marks = []
        for start in range(0, len(plain), size):
            keyed = copy()
            keyed.update(plain[start : start + size])
            marks.append(keyed.digest())
        return np.frombuffer(b"".join(marks), "<u8")

    def _subjects(
        self, data: bytes | memoryview, heads: Columns, offsets: Sequence[int], data_starts: Sequence[int], runs: _Runs
    ) -> tuple[list[int], int]:
        """Return as many subject numbers as there are runs, batch after batch, and how many batches have good tables:
        in the order of the table, or of the runs where a batch has lanes.
        """
        numbers: list[int] = []
        counts, laned = heads["runs"].tolist(), runs.laned.tolist()
        for at, (offset, data_start) in enumerate(
            zip(offsets, _absolute(offsets, data_starts, len(counts)), strict=False)
        ):
            table = bytes(data[offset + BATCH_HEADER_SIZE + RUN_SIZE * counts[at] : data_start])
            if laned[at]:
                named = self._numbers_by_run(table, runs.of_batch(at))
            else:
                named = self._tables.get(table) or self._read_table(table)
            if len(named) != counts[at]:
                return numbers, at
            numbers += named
        return numbers, len(counts)

    def _numbers_by_run(self, table: bytes, records: Columns) -> Sequence[int]:
        """Return the number of each run's subject and lane; none when the table does not fit the runs."""
        try:
            names = names_of(table)
        except BadBatch:
            return ()
        if set(records["subject"].tolist()) != set(range(len(names))) or not are_known(records["lane"]).all():
            return ()
        numbers: list[int] = numbers_by_run(names, records, self._number_of).tolist()
        return numbers

    def _read_table(self, table: bytes) -> tuple[int, ...]:
        """Return the numbers of the subjects in a table; none when it is bad."""
        try:
            named = tuple(self._number_of(name, LANE_NORMAL) for name in names_of(table))
        except BadBatch:
            return ()
        if len(self._tables) < _TABLES_KEPT and len(table) < _TABLE_BYTES_KEPT:
            self._tables[table] = named
        return named


class _Runs:
    """The runs of several batches, one after another."""

    def __init__(
        self, view: memoryview, data: bytes | memoryview, heads: Columns, starts: Numbers, data_starts: Numbers
    ) -> None:
        self._view = view
        self._data = data
        self._heads = heads
        self._counts = heads["runs"].astype(np.int64)
        #: The index of each batch's first run, and of the end of the last batch's.
        self._firsts: Numbers = np.concatenate(([0], np.cumsum(self._counts)))
        self.batch: Numbers = np.repeat(np.arange(len(heads)), self._counts)
        self.within: Numbers = np.arange(len(self.batch)) - self._firsts[self.batch]
        offsets = starts[self.batch] + BATCH_HEADER_SIZE + RUN_SIZE * self.within
        self.records = _records(view, offsets, RUN_DTYPE)
        #: Whether each batch has a run with a lane: then its runs may share subjects.
        self.laned: Mask = np.logical_or.reduceat(self.records["lane"] != 0, self._firsts[:-1])
        self._base: Numbers = starts[:-1] + data_starts
        self._data_sizes: Numbers = np.diff(starts) - data_starts

    def of_batch(self, at: int) -> Columns:
        """Return the records of one batch."""
        return self.records[self._firsts[at] : self._firsts[at + 1]]

    def rows_of(self, batches: int) -> int:
        """Return how many runs the first *batches* have."""
        return int(self._firsts[batches])

    def first_bad(self) -> int:
        """Return the first batch whose runs are bad; the number of batches when there is none."""
        records, firsts = self.records, self._firsts[:-1]
        subjects, counts = records["subject"].astype(np.int64), records["count"].astype(np.int64)
        sizes, offsets = records["size"].astype(np.int64), records["offset"].astype(np.int64)
        before = np.cumsum(sizes) - sizes
        unknown_flags = records["flags"] & _UNKNOWN_RUN_FLAGS
        good: Mask = (unknown_flags | records["reserved"]) == 0
        good &= (counts > 0) & (subjects < self._counts[self.batch])
        good &= offsets == before - before[firsts][self.batch]
        payloads = sizes - counts * _COLUMN_BYTES[self._heads["flags"]][self.batch]
        good &= payloads >= 0
        good &= self._are_different(subjects)
        batches: Mask = np.logical_and.reduceat(good, firsts)
        batches &= np.add.reduceat(sizes, firsts) == self._data_sizes
        batches &= np.add.reduceat(counts, firsts) == self._heads["messages"]
        count = _first_bad(batches)
        rows = self.rows_of(count)
        starts = (self._base[self.batch] + offsets)[:rows]
        right = self._crcs(starts, sizes[:rows]) == records["crc"][:rows]
        right &= self._lengths_fit(starts, counts[:rows], payloads[:rows])
        bad = _first_bad(right)
        return count if bad == rows else int(self.batch[bad])

    def _are_different(self, subjects: Numbers) -> Mask:
        """Return False for each run that has the same subject and lane as another run of its batch."""
        if len(subjects) == len(self._heads):
            return np.ones(len(subjects), np.bool_)
        keys = (self.batch * (MAX_RUNS + 1) + subjects) << 16 | self.records["lane"].astype(np.int64)
        _, inverse, times = np.unique(keys, return_inverse=True, return_counts=True)
        return np.asarray(times[inverse] == 1)

    def _crcs(self, starts: Numbers, sizes: Numbers) -> npt.NDArray[np.uint32]:
        """Return the checksum of each run; a batch's only run has the checksum of the data, which was found right."""
        crcs = self._heads["data_crc"][self.batch[: len(starts)]].astype(np.uint32)
        several = np.flatnonzero(self._counts[self.batch[: len(starts)]] > 1)
        if len(several):
            spans = zip(starts[several].tolist(), (starts + sizes)[several].tolist(), strict=True)
            crcs[several] = [crc32c(self._data[start:end]) for start, end in spans]
        return crcs

    def _lengths_fit(self, starts: Numbers, counts: Numbers, payloads: Numbers) -> Mask:
        """Return for each run whether its lengths add up to its payload, and no header is longer than its message."""
        good: Mask = np.ones(len(starts), np.bool_)
        few = np.flatnonzero(counts < _LONG_RUN)
        if len(few):
            lengths, header_sizes = gather_lengths(self._view, starts[few], counts[few])
            heads = np.cumsum(counts[few]) - counts[few]
            good[few] = np.add.reduceat(lengths, heads) == payloads[few]
            good[few] &= np.logical_and.reduceat(header_sizes <= lengths, heads)
        for run in np.flatnonzero(counts >= _LONG_RUN).tolist():
            start, count = int(starts[run]), int(counts[run])
            column = np.frombuffer(self._view, "<u4", count, start)
            header_column = np.frombuffer(self._view, "<u2", count, start + 4 * count)
            good[run] = int(column.sum(dtype=np.uint64)) == payloads[run] and not (header_column > column).any()
        return good


def _rows(heads: Columns, runs: _Runs, numbers: list[int]) -> Rows:
    """Return the consumer-log rows of batches; *numbers* are what ``BatchColumns._subjects`` returns."""
    records, batch = runs.records, runs.batch
    rows = np.empty(len(records), ENTRY_DTYPE)
    rows["first_sequence"] = records["first_sequence"]
    rows["position"] = heads["position"][batch]
    rows["stored_at_us"] = heads["stored_at_us"][batch]
    within = np.where(runs.laned[batch], runs.within, records["subject"])
    named = np.minimum(within - runs.within + np.arange(len(records)), len(numbers) - 1)
    rows["subject"] = np.array(numbers, np.uint32)[named] if numbers else 0
    rows["count"] = records["count"]
    rows["run"] = runs.within
    rows["lane"] = records["lane"]
    rows["runs"] = heads["runs"][batch]
    rows["flags"] = records["flags"] | (heads["flags"][batch] & np.uint16(ENTRY_BATCH_FLAGS)) << np.uint16(8)
    rows["run_size"] = records["size"]
    rows["batch_size"] = heads["size"][batch]
    return rows


def _chain(view: memoryview) -> list[int]:
    """Return where batches seem to begin that lie back to back in *view*, and where the last one ends."""
    offsets, offset, end = [0], 0, len(view)
    unpack, least = _MAGIC_AND_SIZE.unpack_from, BATCH_HEADER_SIZE + RUN_SIZE
    while offset + least <= end:
        magic, size = unpack(view, offset)
        offset += size
        if magic != BATCH_MAGIC or size < least or offset > end:
            break
        offsets.append(offset)
    return offsets


def _records(view: memoryview, offsets: Numbers, dtype: np.dtype[Any]) -> Columns:
    """Return the records at *offsets*, unaligned: every byte offset is looked at as the start of one."""
    if not len(offsets):
        return np.empty(0, dtype)
    return np.asarray(np.ndarray((len(view) - dtype.itemsize + 1,), dtype, view, 0, (1,))[offsets])


def _absolute(offsets: Sequence[int], data_starts: Sequence[int], count: int) -> list[int]:
    return [offset + start for offset, start in zip(offsets[:count], data_starts[:count], strict=True)]


def _first_bad(good: Mask) -> int:
    """Return the index of the first False; the length when there is none."""
    return len(good) if good.all() else int(good.argmin())
