"""Items in the order in which they fall due, most of them on disk: the error logs of groups, and what is delayed.

A schedule takes items in any order and gives them back by (due_us, number). The newest are in memory; beyond a bound
they go into a run, in that order (runs.py draws it).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from qmq.errors import StorageError
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.sorted_runs import Items, RunClaim, RunOwner, SortedRun, seal

#: Items that may be in memory only: more become a run. With more items altogether a run is a part of them in RUNS, so
#: that runs grow in number with the logarithm of it.
MEMORY_ITEMS: Final = 8_192
MAX_MEMORY_ITEMS: Final = 65_536
RUNS: Final = 32
#: What cannot be read now, though it may be there, is tried again after this.
_AGAIN_US: Final = 1_000_000
_UNKNOWN: Final = -1
#: So many blocks of runs are read for one ``pop``, or a few more: whoever calls it has others wait meanwhile.
MOST_BLOCKS: Final = 8


class ScheduleClaim(NamedTuple):
    """What a checkpoint says of a schedule: no run from ``next_run`` on was made, and ``kept`` are items in none."""

    next_run: int
    runs: list[RunClaim]
    kept: bytes


class Schedule(RunOwner):
    """The items of one owner. Belongs to one thread, but for ``RunSync.run``."""

    def __init__(
        self, disk: Disk, directory: Path, store_id: bytes, dtype: np.dtype[Any], damaged: list[StorageError]
    ) -> None:
        """As of every owner of runs."""
        super().__init__(disk, directory, store_id, dtype, damaged)
        self._heap: list[tuple[int, int, bytes]] = []
        self._runs: list[SortedRun] = []
        self._heads: list[tuple[int, int, int]] = []  # due, number, index of the run
        self._blocks_read = 0
        self._spill_at = 0  # so many items in memory, after a run could not be written

    def _all_runs(self) -> list[SortedRun]:
        return self._runs

    def __len__(self) -> int:
        """How many items there are, as far as the files can be read."""
        return len(self._heap) + sum(run.items - run.taken for run in self._runs)

    def restore(self, claim: ScheduleClaim) -> None:
        """Take over what ``claim`` gave."""
        self._runs = [self._run(RunClaim(*run)) for run in claim.runs]
        self._next_run = claim.next_run
        self._find_heads()
        self.push(np.frombuffer(claim.kept, self._dtype))

    def push(self, items: Items) -> None:
        """Take items; their checksums are made here. When they are too many for memory and no run can be written (a
        full disk), they stay there, and after some more it is tried again.
        """
        items = seal(items.copy())
        step, data = self._dtype.itemsize, items.tobytes()
        for at, (due_us, number) in enumerate(zip(items["due_us"].tolist(), items["number"].tolist(), strict=True)):
            heapq.heappush(self._heap, (due_us, number, data[at * step : (at + 1) * step]))
        if len(self._heap) > max(min(max(MEMORY_ITEMS, len(self) // RUNS), MAX_MEMORY_ITEMS), self._spill_at):
            try:
                self._spill()
            except StorageError as error:
                self._damaged.append(error)
                self._spill_at = len(self._heap) + MEMORY_ITEMS // 8

    def _spill(self) -> None:
        """Put all that is in memory into a run. Raises StorageFull or StorageFailed; then all stays as it is."""
        self._heap.sort()
        items = np.frombuffer(b"".join(item for _, _, item in self._heap), self._dtype)
        self._runs.append(self._add_run(items))
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
        """When the next item of a run is due, and its number; None when none is left. Where it cannot be read now, the
        number is _UNKNOWN, and it is tried again at *again_us*.
        """
        try:
            head = run.head()
        except StorageError as error:
            self._damaged.append(error)
            return again_us, _UNKNOWN
        return None if head is None else (int(head["due_us"]), int(head["number"]))

    def next_due_us(self) -> int | None:
        """When the first item falls due; None when there is none."""
        return min((heads[0][0] for heads in (self._heap, self._heads) if heads), default=None)

    def is_due(self, now_us: int) -> bool:
        """Whether ``pop`` may find something."""
        heap, heads = self._heap, self._heads
        return bool((heap and heap[0][0] <= now_us) or (heads and heads[0][0] <= now_us))

    def pop(self, now_us: int, limit: int) -> Items:
        """At most *limit* items that are due, in order, as far as they can be read now, of MOST_BLOCKS blocks."""
        found, until = list[bytes](), self._blocks_read + MOST_BLOCKS
        while len(found) < limit and self._blocks_read < until:
            in_memory = self._heap[0][:2] if self._heap else None
            on_disk = self._heads[0][:2] if self._heads else None
            if in_memory is not None and (on_disk is None or in_memory < on_disk):
                if in_memory[0] > now_us:
                    break
                found.append(heapq.heappop(self._heap)[2])
            elif on_disk is not None and on_disk[0] <= now_us:
                found += self._pop_run(now_us)
            else:
                break
        return np.frombuffer(b"".join(found), self._dtype)

    def _pop_run(self, now_us: int) -> list[bytes]:
        """The first item of the first run; none when that was not known until now."""
        _, number, at = self._heads[0]
        run, found = self._runs[at], list[bytes]()
        before = run.blocks_read
        if number != _UNKNOWN:
            head = run.head()
            assert head is not None
            found.append(head.tobytes())
            run.taken += 1
        key = self._key(run, now_us + _AGAIN_US)
        self._blocks_read += run.blocks_read - before
        if key is None:
            heapq.heappop(self._heads)
        else:
            heapq.heapreplace(self._heads, (*key, at))
        return found

    def all(self) -> Iterator[Items]:
        """All items, in no order, as far as they can be read; they stay. Reads files."""
        yield np.frombuffer(b"".join(item for _, _, item in self._heap), self._dtype)
        for run in self._runs:
            start = run.taken
            while (start := max(start, run.taken)) < run.items:  # some may be taken while others are looked at
                try:
                    items = run.read(start)
                except StorageError as error:
                    self._damaged.append(error)
                    break
                start += len(items)
                yield items[items["number"] != 0]

    def clear(self) -> None:
        """All items are gone."""
        self._heap, self._runs, self._heads = [], [], []

    def claim(self) -> ScheduleClaim:
        """For a checkpoint: what each run has left, and the items that are in none."""
        runs = [RunClaim(run.number, run.items, run.taken) for run in self._runs if run.taken < run.items]
        return ScheduleClaim(self._next_run, runs, b"".join(item for _, _, item in self._heap))
