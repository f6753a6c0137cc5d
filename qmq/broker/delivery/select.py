"""The choice of new messages for a pull: by cursors, limits, tags and expiry.

The choice goes by entries of the consumer log (one a run) and ends at the end of a run where the limits allow. Few rows
are handled as tuples, many as numpy columns. The bytes of messages are not read, but for tags, expiries and runs that
are cut.

A choice changes nothing: it says what becomes of each message and where the cursors are then, and ``apply`` moves them
there when the pull is recorded. A message is looked at once: where its tags or its expiry count, that decides whether
the pull gets it. So a cursor passes nothing of which the choice does not say what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.chosen_cursors import ChosenCursors, CursorScratch
from qmq.broker.delivery.encode import FEW_ROWS, PIECE_BYTES, answer_bytes, entry_bytes, parts_of_rows, piece_bytes
from qmq.broker.delivery.filters import EXPIRED, FILTERED, MATCHED, MessageFilter, StateRange
from qmq.broker.delivery.order.scan import OrderedScan
from qmq.broker.groups.group import SubjectFilter, Subscription
from qmq.broker.groups.message_ranges import MessageParts, Rows, RunPart, WholeRuns, chosen_of
from qmq.broker.groups.priorities import RANKS
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.ports.commands import Now
from qmq.errors import QmqError, StorageError
from qmq.format.batch import COLUMN_BYTES, EntryRow
from qmq.format.lanes import ORDERED_KINDS
from qmq.format.layout import ENTRY_HAS_EXPIRE_AT, ENTRY_HAS_SOURCE
from qmq.format.pieces import StoredBatch
from qmq.format.source import MOST_SOURCE_BYTES
from qmq.storage.store import ColdRead, KnownBad, NotInMemory, Store

FIRST_CHUNK_ROWS: Final = 64
CHUNK_ROWS: Final = 8_192
#: Rows of one subject that are searched for the next batches to read.
AHEAD_ROWS: Final = 1_024
#: Rows without a wanted message that one pull may pass before it goes on in the next turn.
PASS_ROWS: Final = 1 << 20
#: Pieces of one answer, at most one a batch; the first of a batch costs about 30 us to make.
MAX_PIECES: Final = 1_024
#: Messages that one pull may filter, or find expired, before it goes on in the next turn; and runs that it may read for
#: that (about 5 us each).
MOST_UNWANTED: Final = 1 << 17
MOST_RUNS_READ: Final = 1 << 13
#: The newest rows that are looked at one by one.
NEWEST_ROWS: Final = 8
#: Rows are also looked at one by one where so many of that size would fill the pull.
LARGE_ROWS: Final = 16
_NO_SETTINGS: Final = ResolvedSettings()
_NO_TIME: Final = Now(0, 0)


class PullSelection:
    """The messages chosen for one pull of a group. Nothing changes before ``apply``."""

    # Defaults are class attributes, since most pulls do not change them: that makes a selection cheap.
    #: Messages that the pull gets.
    count = 0
    #: Messages that the cursors have passed: those of ``parts``, filtered and skipped ones.
    passed = 0
    passed_rows = 0
    #: Messages without a tag of the group, and expired ones of a group that has no dead letters.
    filtered = skipped = 0
    #: The pull gets no more.
    full = False
    #: Whether more messages are ready, but not on disk.
    awaits_sync = False
    #: The read without which no more can be chosen; the choice does not wait for the disk.
    wanted: ColdRead | None = None
    #: The error of damaged files, where no more can be chosen for it.
    failed: StorageError | None = None
    #: Slots that the consumer may have were left to others.
    left_slots = False
    #: The rank of the retries that the pull gets instead of new messages, and the most of them.
    retries: tuple[int, int] | None = None
    _filter: MessageFilter | None = None
    _scan: OrderedScan | None = None
    _idle: tuple[int, ...] = ()
    _cold: int | None = None  # the partition of the run at which the choice stopped for a read
    _bytes = 0
    _unwanted = 0  # filtered, skipped and expired messages
    _given = 0  # messages of ``parts``
    _sized = (-1, -1, -1)  # the run of which _sizes are known
    _sizes: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def __init__(
        self, store: Store, subscription: Subscription, max_count: int, max_bytes: int, need: int,
        now: Now = _NO_TIME, scratch: CursorScratch | None = None,
    ) -> None:  # fmt: skip
        """With fewer than *need* messages, a run is cut rather than left for the next pull. *scratch* is for one choice
        at a time.
        """
        self._store = store
        self._subscription = subscription
        self._group = group = subscription.group
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._need = self._least = need
        self._now = now
        settings = _NO_SETTINGS if group.ledger is None else group.ledger.settings
        self._settings = settings
        self._chooses = bool(settings.tags or settings.expire_after_us)  # else only runs with expiries are looked at
        #: The messages that the consumer is given, in order: those that the pull gets, and expired ones.
        self.parts: MessageParts = []
        #: The expired ones among them, as intervals of their numbers in ``parts``.
        self.expired: list[tuple[int, int]] = []
        #: The messages that were looked at one by one, and passed: those of ``parts`` among them, filtered and skipped
        #: ones.
        self.looked_at: MessageParts = []
        self._begun: list[tuple[SubjectFilter, int]] = []
        #: The cursors, of the filters that were chosen from the row cursors and ``passed``, and the scan of order keys,
        #: as they will be.
        self.cursors = ChosenCursors(group.cursors, scratch or CursorScratch())
        self._row_cursors: dict[SubjectFilter, list[int]] = {}
        self._passed_exact: dict[SubjectFilter, int] = {}
        #: The filter that was chosen from last.
        self.stopped_at = subscription.filters[0]
        #: How many messages of each rank were chosen.
        self.by_rank = [0] * RANKS

    @cached_property
    def _marked(self) -> list[int]:
        """The partitions that have bad bytes."""
        return self._store.marked()

    # --- choosing ----------------------------------------------------------------------------------------------------

    def take_some(self, rank: int, filters: Iterable[SubjectFilter], most: int) -> None:
        """Choose up to *most* messages of filters of one rank, until the pull is full."""
        before, max_count, need = self.count, self._max_count, self._need
        is_cut = most < max_count - before
        if is_cut:
            self._max_count = before + most
            self._need = max(need, self._max_count)  # so that a longer run is cut
        for subject_filter in filters:
            if not subject_filter.reading:
                self.take(subject_filter)
                if self.full:
                    break
        if is_cut:
            self._max_count, self._need = max_count, need
            can_go_on = self.wanted is None and self.failed is None
            self.full = self.full and not (can_go_on and self.count == before + most and self._bytes < self._max_bytes)
        self.by_rank[rank] += self.count - before

    def take(self, subject_filter: SubjectFilter) -> None:
        """Choose the ready messages of a filter, until there are no more, the pull is full, or a read is needed."""
        self.stopped_at = subject_filter
        self._begun.append((subject_filter, len(self.parts)))
        try:
            if subject_filter.exact:
                self._take_exact(subject_filter)
            elif subject_filter.kind in ORDERED_KINDS:
                self._take_ordered(subject_filter.kind)
            elif len(subject_filter.row_cursors) == 1:
                self._take_at_cursor(subject_filter)
            else:
                self._take_at_cursors(subject_filter)
            if self._cold is not None:
                self.wanted = self._read_on(subject_filter, self._cold)
        except NotInMemory as missing:
            self.wanted = missing.read
        except StorageError as error:
            self.failed = error
        if self.wanted is not None or self.failed is not None:
            self.full = True

    def _take_ordered(self, kind: int) -> None:
        ledger = self._group.ledger
        if ledger is None or ledger.order is None:
            return
        if self._scan is None:
            for followed in self._group.filters.values():  # messages for other consumers may have to come first
                followed.find_lanes(self._store)
            known = self._group.scan
            self._scan = known.copy() if isinstance(known, OrderedScan) else OrderedScan(self._group, self._store)
        self._scan.take(self, ledger.order, kind, self._subscription, ledger.consumers_there())

    def take_ordered(self, partitions: npt.NDArray[np.int64], rows: Rows) -> int:
        """Choose from rows of slots, in order; return how many have no messages left."""
        taken = self._take_rows(None, partitions, rows)
        if self._cold is not None:
            partition, self._cold = self._cold, None
            mine = np.flatnonzero(np.broadcast_to(partitions, len(rows)) == partition)
            self.wanted = self._read_from(partition, chosen_of([rows], mine[mine >= taken]), onward=False)
        return taken

    @property
    def most(self) -> int:
        """The most messages that the pull may get beside those that were chosen."""
        return self._max_count - self.count

    @property
    def lacks(self) -> bool:
        """Whether the pull has less than it waits for."""
        return self.count < self._least

    def leave_slots(self) -> None:
        """Note that slots that the consumer may have were left to others."""
        self.left_slots = True

    def save_nothing(self, rank: int) -> None:
        """Note that no messages of ranks lower than *rank* wait: they have nothing coming."""
        self._idle = (*self._idle, rank)

    def pass_rows(self, count: int) -> None:
        """Count rows that were read; a pull that has read too many goes on in the next turn."""
        self.passed_rows += count
        self.full = self.full or self.passed_rows > PASS_ROWS

    def _read_on(self, subject_filter: SubjectFilter, partition: int) -> ColdRead:
        """Return the read of the run at which the choice stopped, and of what the next pulls will want behind it."""
        store = self._store
        if subject_filter.exact:
            number = subject_filter.subject(store)
            assert number is not None
            parts = store.subject_rows(number, self.cursors.get(number), AHEAD_ROWS)
            rows = next(rows for where, rows in parts if where == partition)
        else:
            log = store.partitions[partition].consumer_log
            rows = log.rows(self.row_cursors(subject_filter)[partition], CHUNK_ROWS)
            matches = subject_filter.matches(store)
            index = None if matches is None else np.flatnonzero(matches[rows["subject"]])
            rows, _, _ = self._unhandled(subject_filter, rows, index)
        return self._read_from(partition, rows, onward=not subject_filter.exact)

    def _read_from(self, partition: int, rows: Rows, *, onward: bool) -> ColdRead:
        """Return the read of the first of these rows whose batch is not in memory, and of those behind it."""
        page_cache = self._store.partitions[partition].page_cache
        positions, sizes = rows["position"].astype(np.int64), rows["batch_size"].astype(np.int64)
        first = page_cache.count(positions, sizes)
        first = 0 if first == len(rows) else first
        return page_cache.read(positions[first:], sizes[first:], onward=onward)

    def taken(self) -> list[tuple[SubjectFilter, list[RunPart | WholeRuns]]]:
        """Return the choice by filter, without filters that have nothing in it."""
        ends = [*[start for _, start in self._begun[1:]], len(self.parts)]
        return [
            (subject_filter, self.parts[start:end])
            for (subject_filter, start), end in zip(self._begun, ends, strict=True)
            if end > start
        ]

    def row_cursors(self, subject_filter: SubjectFilter) -> list[int]:
        """Return the row cursors of a filter, as they will be."""
        known = self._row_cursors.get(subject_filter)
        if known is None:
            known = self._row_cursors[subject_filter] = list(subject_filter.row_cursors)
        return known

    def apply(self) -> None:
        """Move the group's cursors behind all that was chosen or passed."""
        self.cursors.apply()
        for subject_filter, rows in self._row_cursors.items():
            subject_filter.row_cursors[:] = rows
        if self._scan is not None:
            self._scan.apply()
            self._free_slots()
        for subject_filter, row in self._passed_exact.items():
            subject_filter.passed = row
        for rank in self._idle:
            self._group.share.none_wait(rank)
        if self.passed:
            self._group.dirty = True

    def _free_slots(self) -> None:
        """Note that slots are free for consumers of other subjects, where messages before theirs were left out."""
        group = self._group
        several = group.subscriptions.values()
        if self.passed > self.count and any(len(one.filters) < len(group.filters) for one in several):
            assert group.ledger is not None
            assert group.ledger.order is not None
            group.ledger.order.is_freed = True

    def _take_at_cursor(self, subject_filter: SubjectFilter) -> None:
        store, row_cursors = self._store, self.row_cursors(subject_filter)
        part, chunk = store.partitions[0], FIRST_CHUNK_ROWS
        matches = subject_filter.matches(store)
        for entry in part.newest_entries(row_cursors[0], NEWEST_ROWS):
            if matches is None or matches[entry[3]]:
                if entry[7] != 1:
                    break
                cursor = self.cursors.get(entry[3])
                if not self._take_entry(subject_filter, 0, entry, cursor, is_sound=True):
                    return
            row_cursors[0] += 1
        while not self.full:
            row = row_cursors[0]
            left = part.consumer_log.visible_row - row
            if left <= 0:
                return
            entry = part.consumer_log.read_entry(row)
            is_large = entry[4] * LARGE_ROWS >= self._max_count - self.count
            if entry[7] == 1 and (left <= FEW_ROWS or is_large):  # the runs of a batch go together
                if matches is None or matches[entry[3]]:
                    cursor = self.cursors.get(entry[3])
                    if not self._take_entry(subject_filter, 0, entry, cursor):
                        return
                row_cursors[0] = row + 1
                continue
            rows = self._whole_batches(0, row, min(left, chunk))
            row_cursors[0] = row + self._take_rows(subject_filter, np.zeros(1, np.int64), rows)
            chunk = min(chunk * 8, CHUNK_ROWS)
            if self.passed_rows > PASS_ROWS:
                self.full = True

    def _take_at_cursors(self, subject_filter: SubjectFilter) -> None:
        """Choose from several partitions, merged by stamp: the order in which batches were appended."""
        store, row_cursors = self._store, self.row_cursors(subject_filter)
        chunk = FIRST_CHUNK_ROWS
        while not self.full:
            heads, numbers, limit = [], [], np.uint64(2**64 - 1)
            for partition, row in enumerate(row_cursors):
                rows = self._whole_batches(partition, row, chunk)
                if not len(rows):
                    continue
                heads.append(rows)
                numbers.append(np.full(len(rows), partition, np.int64))
                if row + len(rows) < store.partitions[partition].consumer_log.visible_row:
                    limit = min(limit, rows["stored_at_us"][-1])
            if not heads:
                return
            stamps, partitions = np.concatenate([rows["stored_at_us"] for rows in heads]), np.concatenate(numbers)
            order = np.argsort(stamps, kind="stable")
            order = order[: int(np.searchsorted(stamps[order], limit, "right"))]
            merged, partitions = chosen_of(heads, order), partitions[order]
            passed = self._take_rows(subject_filter, partitions, merged)
            for partition, rows_taken in enumerate(
                np.bincount(partitions[:passed], minlength=len(row_cursors)).tolist()
            ):
                row_cursors[partition] += rows_taken
            chunk = min(chunk * 8, CHUNK_ROWS)
            if self.passed_rows > PASS_ROWS:
                self.full = True

    def _whole_batches(self, partition: int, row: int, limit: int) -> Rows:
        """Return about *limit* rows from *row* on, up to the end of a batch, so that it can be sent as it lies.

        Of a batch with more rows than the answer may have messages, return no more than that tells.
        """
        part = self._store.partitions[partition]
        rows = part.consumer_log.rows(row, limit)
        if not len(rows):
            return rows
        last = rows[-1]
        run, runs = int(last["run"]), int(last["runs"])
        if run + 1 == runs:
            return rows
        if run + 1 < len(rows):
            return rows[: len(rows) - run - 1]  # leave the last batch for the next chunk
        limit = max(len(rows), self._max_count - self.count + 1)
        return part.consumer_log.rows(row, min(len(rows) + runs - run - 1, limit))

    def _take_exact(self, subject_filter: SubjectFilter) -> None:
        number = subject_filter.subject(self._store)
        if number is None:
            return
        cursors = self.cursors
        if not cursors.get(number):
            cursor = self._group.cursor(self._store, subject_filter, number)
            if cursor is None:
                return
            if cursor:
                cursors.move(number, cursor)  # the group begins there
        cursor = cursors.get(number)
        newest = self._newest_of(subject_filter, number)
        for partition, entry in newest or subject_filter.arrived:
            if entry[0] > cursor or not self._take_entry(
                subject_filter, partition, entry, cursor, is_sound=bool(newest)
            ):
                break  # the subject has an earlier row, or the pull is full
            cursor = max(cursor, entry[0] + entry[4])
        chunk = FEW_ROWS
        while not self.full and cursors.get(number) < int(self._store.subjects.ends[number]):
            parts = self._store.subject_rows(number, cursors.get(number), chunk)
            for partition, rows in parts:
                if len(rows) > FEW_ROWS:
                    if self._take_rows(subject_filter, np.full(len(rows), partition, np.int64), rows) < len(rows):
                        return  # the rest of these rows comes first
                    continue
                for entry in rows.tolist():
                    if not self._take_entry(subject_filter, partition, entry, cursors.get(number)):
                        return  # the pull is full
            if not parts:
                break
            chunk = min(chunk * 16, CHUNK_ROWS)
        if not self.full:
            self._passed_exact[subject_filter] = self._store.partitions[0].consumer_log.visible_row

    def _newest_of(self, subject_filter: SubjectFilter, number: int) -> list[tuple[int, EntryRow]]:
        """Return the rows of one subject among all rows that it was not read in, where these are few and the newest."""
        partitions = self._store.partitions
        if len(partitions) > 1:
            return []
        entries = partitions[0].newest_entries(subject_filter.passed, NEWEST_ROWS)
        return [(0, entry) for entry in entries if entry[3] == number]

    def _take_entry(
        self, subject_filter: SubjectFilter, partition: int, entry: EntryRow, cursor: int, *, is_sound: bool = False
    ) -> bool:  # fmt: skip
        """Choose from one row of a subject with that cursor, which the filter takes; return True when none of its
        messages is left. *is_sound*: its batch is in memory, without bad bytes.
        """
        first, count = entry[0], entry[4]
        self.passed_rows += 1
        if not cursor and subject_filter.start.kind == "sequence" and entry[3] < subject_filter.start.subjects:
            cursor = subject_filter.start.value
        start = cursor - first if cursor > first else 0
        if start >= count:
            return True
        page_cache = self._store.partitions[partition].page_cache
        if not (is_sound or page_cache.has(entry[1], entry[10], self._now.monotonic_us)):
            self._cold, self.full = partition, True
            return False
        part = RunPart(partition, entry, start, count)
        if self._chooses or entry[8] & ENTRY_HAS_EXPIRE_AT:
            return self._take_by_state([part]) == 1
        return self._take_run(part, is_sound)

    def _take_run(self, part: RunPart, is_sound: bool = False) -> bool:
        """Choose messages of one run, in memory; return True when all of them are chosen."""
        partition, entry, start, stop = part
        count = stop - start
        size = entry_bytes(entry)
        if not is_sound and self._marked:
            size += piece_bytes(entry) * self._marks(partition, entry)
        if count <= self._max_count - self.count and size <= self._max_bytes - self._bytes:
            self.parts.append(part)
            self.passed += count
            self.cursors.move(entry[3], entry[0] + stop)
            self._add(count, size)
            return True
        self.full = True
        if self.count < self._need:
            self._cut(part)
        return False

    def _take_rows(self, subject_filter: SubjectFilter | None, partitions: npt.NDArray[np.int64], rows: Rows) -> int:
        """Choose from many rows; return how many have no messages left. *partitions* has one entry a row, or one.
        Without a filter, they are rows that filters of the group take.
        """
        asked = len(rows)
        index: npt.NDArray[np.intp] | None = None
        matches = None
        if subject_filter is not None and not subject_filter.exact:
            matches = subject_filter.matches(self._store)
        if matches is not None:
            index = np.flatnonzero(matches[rows["subject"]])
        rows, starts, index = self._unhandled(subject_filter, rows, index)
        self.passed_rows += asked
        if not len(rows):
            return asked
        if self._chooses or (rows["flags"] & ENTRY_HAS_EXPIRE_AT).any():
            taken = self._take_rows_by_state(partitions, index, rows, starts)
        else:
            is_short = index is not None and asked != len(rows)
            taken = self._take_fitting(partitions, index, rows, starts, is_short=is_short)
        return asked if taken == len(rows) else _at(index, taken)

    def _take_fitting(
        self, partitions: npt.NDArray[np.int64], index: npt.NDArray[np.intp] | None, rows: Rows,
        starts: npt.NDArray[np.int64] | None, *, is_short: bool = False,
    ) -> int:  # fmt: skip
        """Choose from rows as many as fit; return how many have no messages left. With *is_short* others were left out
        between them.
        """
        counts = rows["count"].astype(np.int64)
        if starts is not None:
            counts -= starts
        totals = np.cumsum(counts)
        sizes = np.cumsum(self._answer_bytes(_row_partitions(partitions, index, len(rows)), rows))
        fits = min(
            int(np.searchsorted(totals, self._max_count - self.count, "right")),
            int(np.searchsorted(sizes, self._max_bytes - self._bytes, "right")),
        )
        if fits < len(rows) or is_short:
            fits = self._cut_at_batch(rows, totals, fits)
        ready = self._count_at_hand(partitions, index, rows[:fits]) if fits else 0
        if ready:
            skipped = None if starts is None else starts[:ready]
            total = int(totals[ready - 1])
            self._take_whole(_row_partitions(partitions, index, ready), rows[:ready], skipped, total)
            self._add(total, int(sizes[ready - 1]))
        if ready == len(rows):
            return ready
        self.full = True
        if ready == fits and self.count < self._need:
            partition = int(partitions[0 if len(partitions) == 1 else _at(index, fits)])
            entry = rows[fits].item()
            if self._store.partitions[partition].page_cache.has(entry[1], entry[10], self._now.monotonic_us):
                start = 0 if starts is None else int(starts[fits])
                self._cut(RunPart(partition, entry, start, entry[4]))
            else:
                self._cold = partition
        return ready

    # --- tags and expiry ---------------------------------------------------------------------------------------------

    def _take_rows_by_state(
        self, partitions: npt.NDArray[np.int64], index: npt.NDArray[np.intp] | None, rows: Rows,
        starts: npt.NDArray[np.int64] | None,
    ) -> int:  # fmt: skip
        """Choose from rows whose tags or expiries count; return how many have no messages left."""
        ready = self._count_at_hand(partitions, index, rows)
        cold, self._cold = self._cold, None
        taken = 0
        if ready:
            skipped = None if starts is None else starts[:ready]
            row_partitions = _row_partitions(partitions, index, ready)
            taken = self._take_by_state(parts_of_rows(row_partitions, rows[:ready], skipped))
        if taken == ready < len(rows) and not self.full:
            self._cold = cold
        self.full = self.full or taken < len(rows)
        return taken

    def _take_by_state(self, candidates: Iterable[RunPart | WholeRuns]) -> int:
        """Choose from messages by their states, in order, until the pull is full; return how many of their runs have no
        messages left.
        """
        ended, message_filter = 0, self._message_filter()
        for candidate in candidates:
            passed = MessageParts()
            for state_range in message_filter.state_ranges([candidate]):
                passed += self._take_range(state_range, message_filter)
                if self.full:
                    break
            ended += sum(map(_ended_in, passed))
            if self.full:
                self.looked_at += passed
                break
            self.looked_at.append(candidate)
        return ended

    def _message_filter(self) -> MessageFilter:
        if self._filter is None:
            buries = self._subscription.member is not None
            self._filter = MessageFilter(self._store, self._settings, self._now.wall_us, buries=buries)
        return self._filter

    def _take_range(self, state_range: StateRange, message_filter: MessageFilter) -> MessageParts:
        """Choose or pass messages of one state; return which, in order: not all where the pull is full."""
        state, part, count = state_range
        if state == MATCHED:
            before = len(self.parts)
            if not isinstance(part, RunPart):
                self._take_fitting(np.array([part.partition]), None, part.rows, None)
            elif count == part.entry[4]:
                self._take_run(part)
            elif self._cut(part) < count:
                self.full = True
            self.full = self.full or len(self.parts) >= MAX_PIECES
            return self.parts[before:]
        if state == FILTERED:
            self.filtered += count
        elif state == EXPIRED:
            self.expired.append((self._given, self._given + count))
            self._given += count
            self.parts.append(part)
        else:
            self.skipped += count
        self.passed += count
        if isinstance(part, RunPart):
            self.cursors.move(part.entry[3], part.entry[0] + part.stop)
        else:
            self.cursors.move_several(part.rows["subject"], part.rows["first_sequence"] + part.rows["count"])
        self._unwanted += count
        is_much = self._unwanted >= MOST_UNWANTED or message_filter.runs_read >= MOST_RUNS_READ
        self.full = self.full or is_much or len(self.parts) >= MAX_PIECES
        return [part]

    def _answer_bytes(self, row_partitions: npt.NDArray[np.int64], rows: Rows) -> npt.NDArray[np.int64]:
        """Return how many bytes each row adds to the answer at most; known bad bytes make for more pieces."""
        sizes = answer_bytes(rows)
        for partition in self._marked:
            mine = np.flatnonzero(np.broadcast_to(row_partitions, len(rows)) == partition)
            positions, batches = rows["position"][mine].astype(np.int64), rows["batch_size"][mine].astype(np.int64)
            most = PIECE_BYTES + (MOST_SOURCE_BYTES if (rows["flags"][mine] & ENTRY_HAS_SOURCE).any() else 0)
            sizes[mine] += most * self._store.partitions[partition].message_log.unreadable.count_in(
                positions, positions + batches
            )
        return sizes

    def _marks(self, partition: int, entry: EntryRow) -> int:
        """Return how many bad ranges are known in a run's batch."""
        return (
            len(self._store.partitions[partition].message_log.unreadable.within(entry[1], entry[1] + entry[10]))
            if self._marked
            else 0
        )

    def _count_at_hand(self, partitions: npt.NDArray[np.int64], index: npt.NDArray[np.intp] | None, rows: Rows) -> int:
        """Return how many rows come before the first whose batch would have to be read."""
        positions, sizes = rows["position"].astype(np.int64), rows["batch_size"].astype(np.int64)
        row_partitions = _row_partitions(partitions, index, len(rows))
        ready, now_us = len(rows), self._now.monotonic_us
        if len(row_partitions) == 1:
            ready = self._store.partitions[int(row_partitions[0])].page_cache.count(positions, sizes, now_us)
            self._cold = int(row_partitions[0]) if ready < len(rows) else None
            return ready
        for partition, part in enumerate(self._store.partitions):
            mine = np.flatnonzero(row_partitions == partition)
            found = positions[mine], sizes[mine], now_us
            count = part.page_cache.count(*found) if len(mine) else 0
            if count < len(mine) and mine[count] < ready:
                ready, self._cold = int(mine[count]), partition
        return ready

    def _cut_at_batch(self, rows: Rows, totals: npt.NDArray[np.int64], fits: int) -> int:
        """Return how many rows to take, at most *fits*: only whole batches where these are enough and at least half of
        what fits, and rows of at most MAX_PIECES batches.
        """
        positions = rows["position"][: fits + 1]
        heads = np.flatnonzero(positions[1:] != positions[:-1]) + 1  # where batches begin, without the first
        if fits < len(rows) and len(heads):
            start = int(heads[-1])
            count = self.count + int(totals[start - 1])
            if count >= self._need and 2 * count >= self.count + int(totals[fits - 1]):
                fits = start
        if len(heads) > MAX_PIECES and not (rows["runs"][:fits] == 1).all():
            fits = min(fits, int(heads[MAX_PIECES - 1]))
        return fits

    def _unhandled(
        self, subject_filter: SubjectFilter | None, rows: Rows, index: npt.NDArray[np.intp] | None
    ) -> tuple[Rows, npt.NDArray[np.int64] | None, npt.NDArray[np.intp] | None]:
        """Return the rows (of *index*) with messages at or past the cursors, and how many of each lie before these."""
        if index is not None:
            rows = chosen_of([rows], index)
        floor = self.cursors.of(rows["subject"])
        if subject_filter is not None:
            floor = self._group.started(subject_filter, rows["subject"], floor)
        else:
            floor = self._group.started_in_slots(self._store, rows["subject"], floor)
        firsts = rows["first_sequence"]
        if not (floor > firsts).any():
            return rows, None, index
        fresh = np.flatnonzero(floor < firsts + rows["count"])
        index = fresh if index is None else index[fresh]
        rows, floor = chosen_of([rows], fresh), floor[fresh]
        starts = np.maximum(floor, rows["first_sequence"]) - rows["first_sequence"]
        return rows, (starts.astype(np.int64) if starts.any() else None), index

    def _take_whole(
        self, row_partitions: npt.NDArray[np.int64], rows: Rows, starts: npt.NDArray[np.int64] | None, total: int
    ) -> None:
        self.passed += total
        # Of several rows of one subject the last has the highest sequences.
        self.cursors.move_several(rows["subject"], rows["first_sequence"] + rows["count"])
        if starts is None and len(row_partitions) == 1:
            self.parts.append(WholeRuns(int(row_partitions[0]), rows))
        else:
            self.parts += parts_of_rows(row_partitions, rows, starts)

    def _cut(self, part: RunPart) -> int:
        """Take as much of one run as fits, at least one message when nothing was chosen yet; return how many. The run
        is in memory.
        """
        partition, entry, start, stop = part
        first, number, count = entry[0], entry[3], entry[4]
        stop = min(stop, start + self._max_count - self.count)
        try:
            sizes = self._sizes_of(partition, entry)[start:stop]
        except KnownBad:
            if self.count:
                return 0  # the sizes of its sound messages are not known, so it goes alone
            sizes = np.full(stop - start, entry[9] // count, np.int64)
        except QmqError:
            sizes = np.zeros(stop - start, np.int64)  # unreadable: it is not sent, and the cursor passes it
        room = self._max_bytes - self._bytes
        pieces = np.minimum(np.arange(1, len(sizes) + 1), 1 + self._marks(partition, entry))
        sizes = np.cumsum(sizes) + piece_bytes(entry) * pieces
        if stop - start == count and entry[7] == 1:
            sizes[-1] = max(sizes[-1], entry[10])  # the whole batch goes as it lies
        fit = int(np.searchsorted(sizes, room, "right"))
        if not self.count:
            fit = max(fit, 1)
        if fit:
            self.parts.append(RunPart(partition, entry, start, start + fit))
            self.passed += fit
            self.cursors.move(number, first + start + fit)
            self._add(fit, int(sizes[fit - 1]))
        return fit

    def _sizes_of(self, partition: int, entry: EntryRow) -> npt.NDArray[np.int64]:
        """Return the bytes of each message of a run, in memory; those of the last run are kept."""
        run = partition, entry[1], entry[5]
        if self._sized != run:
            batch = StoredBatch(self._store.partitions[partition].message_log.view(entry[1], entry[10]))
            self._sizes = batch.lengths(entry[5]).astype(np.int64) + COLUMN_BYTES[batch.header.flags]
            self._sized = run
        return self._sizes

    def _add(self, count: int, size: int) -> None:
        self.count += count
        self._given += count
        self._bytes += size
        if self.count >= self._max_count or self._bytes >= self._max_bytes:
            self.full = True


def _ended_in(part: RunPart | WholeRuns) -> int:
    """Return how many runs end in a part."""
    return len(part.rows) if isinstance(part, WholeRuns) else int(part.stop == part.entry[4])


def _row_partitions(
    partitions: npt.NDArray[np.int64], index: npt.NDArray[np.intp] | None, count: int
) -> npt.NDArray[np.int64]:
    """Return the partition of each of the first *count* rows, or one for all."""
    if len(partitions) == 1:
        return partitions
    return partitions[:count] if index is None else partitions[index[:count]]


def _at(index: npt.NDArray[np.intp] | None, number: int) -> int:
    return number if index is None else int(index[number])
