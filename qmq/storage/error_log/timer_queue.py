"""Items in the order in which they fall due, most of them on disk: the retries of groups, and delayed messages.

Items come in any order and are taken out by (due_us, number). The newest are in memory; beyond a bound they become a
run, in that order (sorted_runs.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import StorageError
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.items import (
    Form,
    Items,
    fixed_part,
    pack_items,
    reasons_of,
    unpack_items,
    with_reasons,
)
from qmq.storage.error_log.sorted_runs import RunClaim, RunOwner, SortedRun

#: Items in memory before they become a run; when there are more than RUNS times as many in all, a run is 1/RUNS of
#: them, so that the number of runs grows with the logarithm of the items.
MEMORY_ITEMS: Final = 8_192
MAX_MEMORY_ITEMS: Final = 65_536
RUNS: Final = 32
#: Items that cannot be read now, but may be good, are read again after this.
_AGAIN_US: Final = 1_000_000
_UNKNOWN: Final = -1
#: The most blocks of runs that one ``pop`` reads, or a few more: it makes others wait.
MOST_BLOCKS: Final = 8


_Kept = tuple[int, int, bytes, bytes]  # due time, number, the item's row on disk, its reason


class ScheduleClaim(NamedTuple):
    """The state of a schedule in a checkpoint: runs from ``next_run`` on do not exist, ``kept`` are items in no run."""

    next_run: int
    runs: list[RunClaim]
    kept: bytes


class Schedule(RunOwner):
    """The items of one owner. All of it but ``RunSync.run`` belongs to one thread."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, form: Form, damaged: list[StorageError]) -> None:
        """Make an empty schedule; see RunOwner."""
        super().__init__(disk, directory, store_id, form, damaged)
        self._no_items = np.empty(0, self._memory_form)
        self._heap: list[_Kept] = []
        self._runs: list[SortedRun] = []
        self._heads: list[tuple[int, int, int]] = []  # due, number, index of the run
        self._blocks_read = 0
        self._spill_at = 0  # the items in memory to try again at, after a run could not be written

    def _all_runs(self) -> list[SortedRun]:
        return self._runs

    def __len__(self) -> int:
        """Return the number of items, as far as the files can be read."""
        return len(self._heap) + sum(run.items - run.taken for run in self._runs)

    def restore(self, claim: ScheduleClaim) -> None:
        """Take over the state that ``claim`` returned."""
        self._runs = [self._run(RunClaim(*run)) for run in claim.runs]
        self._next_run = claim.next_run
        self._find_heads()
        self._hold(unpack_items(claim.kept, self._form))

    def push(self, items: Items) -> None:
        """Add items. When they are too many for memory and no run can be written (a full disk), they stay there, and
        writing is tried again after some more.
        """
        self._hold(items)
        if len(self._heap) > max(min(max(MEMORY_ITEMS, len(self) // RUNS), MAX_MEMORY_ITEMS), self._spill_at):
            try:
                self._spill()
            except StorageError as error:
                self._damaged.append(error)
                self._spill_at = len(self._heap) + MEMORY_ITEMS // 8

    def _hold(self, items: Items) -> None:
        """Put items into memory."""
        step, data = self._form.itemsize, fixed_part(items, self._form).tobytes()
        several = zip(items["due_us"].tolist(), items["number"].tolist(), reasons_of(items), strict=True)
        for at, (due_us, number, reason) in enumerate(several):
            heapq.heappush(self._heap, (due_us, number, data[at * step : (at + 1) * step], reason))

    def _spill(self) -> None:
        """Make a run of all items in memory. Raises StorageFull or StorageFailed; then all stays as it is."""
        self._heap.sort()
        self._runs.append(self._add_run(self._items(self._heap)))
        self._heap, self._spill_at = [], 0
        self._find_heads()

    def _find_heads(self) -> None:
        kept = list[SortedRun]()
        self._heads = []
        for run in self._runs:
            key = self._key(run, 0)
            if key is not None:
                self._heads.append((*key, len(kept)))
                kept.append(run)
        self._runs = kept
        heapq.heapify(self._heads)

    def _key(self, run: SortedRun, again_us: int) -> tuple[int, int] | None:
        """Return due time and number of the next item of a run; None when none is left. If it cannot be read now, the
        number is _UNKNOWN, and the time is *again_us*, to try again.
        """
        try:
            head = run.head()
        except StorageError as error:
            self._damaged.append(error)
            return again_us, _UNKNOWN
        return None if head is None else (int(head["due_us"][0]), int(head["number"][0]))

    def next_due_us(self) -> int | None:
        """Return when the first item falls due; None when there is none."""
        return min((heads[0][0] for heads in (self._heap, self._heads) if heads), default=None)

    def is_due(self, now_us: int) -> bool:
        """Return whether ``pop`` may return items."""
        heap, heads = self._heap, self._heads
        return bool((heap and heap[0][0] <= now_us) or (heads and heads[0][0] <= now_us))

    def pop(self, now_us: int, limit: int) -> Items:
        """Return at most *limit* due items, in order, as far as they can be read now, from MOST_BLOCKS blocks."""
        found, until = list[_Kept](), self._blocks_read + MOST_BLOCKS
        while len(found) < limit and self._blocks_read < until:
            in_memory = self._heap[0][:2] if self._heap else None
            on_disk = self._heads[0][:2] if self._heads else None
            if in_memory is not None and (on_disk is None or in_memory < on_disk):
                if in_memory[0] > now_us:
                    break
                found.append(heapq.heappop(self._heap))
            elif on_disk is not None and on_disk[0] <= now_us:
                found += self._pop_run(now_us)
            else:
                break
        return self._items(found)

    def _items(self, kept: list[_Kept]) -> Items:
        if not kept:
            return self._no_items
        rows = np.frombuffer(b"".join(row for _, _, row, _ in kept), self._form)
        return with_reasons(rows, [reason for *_, reason in kept])

    def _pop_run(self, now_us: int) -> list[_Kept]:
        """Return the first item of the first run; none when it could not be read before."""
        _, number, at = self._heads[0]
        run, found = self._runs[at], list[_Kept]()
        before = run.blocks_read
        if number != _UNKNOWN:
            head = run.head()
            assert head is not None
            found.append((int(head["due_us"][0]), number, fixed_part(head, self._form).tobytes(), reasons_of(head)[0]))
            run.taken += 1
        key = self._key(run, now_us + _AGAIN_US)
        self._blocks_read += run.blocks_read - before
        if key is None:
            heapq.heappop(self._heads)
        else:
            heapq.heapreplace(self._heads, (*key, at))
        return found

    def some_in_memory(self, most: int) -> Items:
        """Return up to *most* of the items in memory, about those that fall due first; they stay."""
        return self._items(self._heap[:most])

    def all(self) -> Iterator[Items]:
        """Yield all items, in no order, as far as they can be read; they stay. Reads files."""
        yield self._items(self._heap)
        for run in self._runs:
            start = run.taken
            while (start := max(start, run.taken)) < run.items:  # items may be taken out during the iteration
                try:
                    items = run.read(start)
                except StorageError as error:
                    self._damaged.append(error)
                    break
                start += len(items)
                yield items[items["number"] != 0]

    def clear(self) -> None:
        """Drop all items."""
        self._heap, self._runs, self._heads = [], [], []

    def claim(self) -> ScheduleClaim:
        """Return the state for a checkpoint: what each run has left, and the items that are in none."""
        runs = [RunClaim(run.number, run.items, run.taken, run.slots) for run in self._runs if run.taken < run.items]
        return ScheduleClaim(self._next_run, runs, pack_items(self._items(self._heap), self._form))
