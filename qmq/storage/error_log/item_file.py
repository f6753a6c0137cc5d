"""Items by number, listed and taken out one by one: the dead letters of a group.

The newest are in memory and in checkpoints; when there are many they become a run (sorted_runs.py), in the order of
their numbers. The checkpoint has the numbers that were taken out. Each checkpoint drops runs that have no items left,
and merges a few neighbours that have few left: so the files are in proportion to the items, whichever are taken out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import StorageError
from qmq.intervals import Intervals
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.items import Form, Items, pack_items, unpack_items
from qmq.storage.error_log.sorted_runs import RunClaim, RunOwner, SortedRun

#: Items in memory before they become a run.
MEMORY_ITEMS: Final = 4_096
#: Items in memory that are given at once.
_BLOCK: Final = 256
#: The most runs that a checkpoint merges into one: half a MiB is read for each.
MERGED_RUNS: Final = 8


class NumberedRun(NamedTuple):
    """A run of items with numbers in [first, end). Some numbers are missing where runs were merged."""

    first: int
    end: int
    run: SortedRun

    @property
    def is_whole(self) -> bool:
        """Whether no number is missing."""
        return self.run.items == self.end - self.first


class ItemLogClaim(NamedTuple):
    """The state of an item log in a checkpoint: its runs, the items in no run, and the numbers taken out."""

    next_number: int
    next_run: int
    #: Run number, items, slots, number of the first item, and number behind the last one.
    runs: list[tuple[int, int, int, int, int]]
    in_memory: bytes
    taken_out: list[tuple[int, int]]


class ItemLog(RunOwner):
    """The items of one owner. All of it but ``RunSync.run`` belongs to one thread."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, form: Form, damaged: list[StorageError]) -> None:
        """Make an empty log; see RunOwner."""
        super().__init__(disk, directory, store_id, form, damaged)
        self._memory: Items = np.empty(0, self._memory_form)  # the first _held are the items in memory, by number
        self._held = 0
        self._runs: list[NumberedRun] = []
        self._taken_out = Intervals()  # all numbers below the next one that were taken out
        self._untidy = False  # items were taken out since the last tidying
        self._next_number = 1
        self._spill_at = MEMORY_ITEMS

    def _all_runs(self) -> list[SortedRun]:
        return [one.run for one in self._runs]

    def __len__(self) -> int:
        """Return the number of items that were not taken out."""
        return self._next_number - 1 - self._taken_out.size

    def add(self, items: Items) -> None:
        """Add items, with the next numbers. When they are too many for memory and no run can be written (a full disk),
        they stay there, and writing is tried again after some more.
        """
        items = items.copy()
        items["number"] = np.arange(self._next_number, self._next_number + len(items))
        self._next_number += len(items)
        self._hold(items)
        if self._held >= self._spill_at:
            try:
                self._spill()
            except StorageError as error:
                self._damaged.append(error)
                self._spill_at = self._held + MEMORY_ITEMS // 8

    @property
    def _in_memory(self) -> Items:
        return self._memory[: self._held]

    def _hold(self, items: Items) -> None:
        """Put items behind those in memory: into room for more of them, since joining arrays of items is slow."""
        end = self._held + len(items)
        if end > len(self._memory):
            grown = np.empty(max(end, 2 * len(self._memory)), self._memory_form)
            grown[: self._held] = self._in_memory
            self._memory = grown
        self._memory[self._held : end] = items
        self._held = end

    def _forget(self) -> None:
        """Forget the items in memory."""
        self._memory, self._held = self._memory[:0].copy(), 0

    def _spill(self) -> None:
        self._drop_taken_out()
        if self._held > MEMORY_ITEMS // 2:
            self._runs.append(self._run_of(self._in_memory))
            self._forget()
        self._spill_at = MEMORY_ITEMS

    def _run_of(self, items: Items) -> NumberedRun:
        """Make a run of items. Raises StorageFull or StorageFailed."""
        numbers = items["number"]
        return NumberedRun(int(numbers[0]), int(numbers[-1]) + 1, self._add_run(items))

    def _drop_taken_out(self) -> None:
        """Drop items in memory that were taken out."""
        left = self._left(self._in_memory).copy()
        self._forget()
        self._hold(left)

    def _left_in(self, one: NumberedRun) -> int:
        return sum(end - start for start, end in self._taken_out.missing(one.first, one.end))

    def _tidy(self) -> None:
        """Drop runs that have no items left; merge neighbours that have less than half of theirs left."""
        self._untidy = False
        self._drop_taken_out()
        left = [(one, count) for one in self._runs if (count := self._left_in(one))]
        self._runs = [one for one, _ in left]
        for at in range(len(left)):
            items, total, end = 0, 0, at
            while end < min(len(left), at + MERGED_RUNS) and (end == at or total + left[end][1] <= MEMORY_ITEMS):
                items, total, end = items + left[end][0].run.items, total + left[end][1], end + 1
            if items > 2 * total:
                try:
                    self._merge(at, end)
                    self._untidy = True  # more runs may be merged
                except StorageError as error:
                    self._damaged.append(error)
                return

    def _merge(self, at: int, end: int) -> None:
        """Make one run of the runs [at, end). Raises StorageFull or StorageFailed."""
        blocks = [block for one in self._runs[at:end] for block in self._blocks(one)]
        items = np.concatenate(blocks) if blocks else np.empty(0, self._memory_form)
        first, last = self._runs[at].first, self._runs[end - 1].end
        self._runs[at:end] = [self._run_of(items)] if len(items) else []
        there = set(items["number"].tolist())
        for start, stop in self._taken_out.missing(first, last):
            for number in range(start, stop):
                if number not in there:  # it was rotten in both files, which was reported
                    self._taken_out.add(number, number + 1)

    def after(self, number: int) -> Iterator[Items]:
        """Yield the items with a higher number that were not taken out, ascending, in blocks. Items may be added, taken
        out, and move from memory to a run meanwhile: none of those that stay is passed. Raises StorageFailed.
        """
        run, start = None, 0  # the run that is read, and its items that were
        while True:
            at = bisect_right(self._runs, number + 1, key=attrgetter("end"))
            if at == len(self._runs):
                low = int(np.searchsorted(self._in_memory["number"], number, "right"))
                block = self._in_memory[low : low + _BLOCK].copy()
                if not len(block):
                    return
            else:
                if self._runs[at] is not run:
                    run = self._runs[at]
                    start = max(0, number + 1 - run.first) if run.is_whole else 0
                if start >= run.run.items:
                    number = run.end - 1
                    continue
                block = run.run.read(start)
                start += len(block)
                block = block[block["number"] > max(number, 0)]  # rotten items have the number 0
            if len(block):
                number = int(block["number"][-1])
                yield self._left(block)

    def _blocks(self, one: NumberedRun) -> Iterator[Items]:
        """Yield the items of a run that were not taken out. Raises StorageFailed."""
        start = 0
        while start < one.run.items:
            block = one.run.read(start)
            start += len(block)
            yield self._left(block[block["number"] > 0])

    def _left(self, items: Items) -> Items:
        taken_out = self._taken_out
        if not taken_out.size:
            return items
        return items[[number not in taken_out for number in items["number"].tolist()]]

    @property
    def next_number(self) -> int:
        """The number of the next item that is added."""
        return self._next_number

    def skip_to(self, number: int) -> None:
        """Give the next item that number: the items with the numbers before it are lost."""
        start, count = self._next_number, number - self._next_number
        if count > 0:
            self._next_number = number
            self._taken_out.add(start, number)

    def has(self, number: int) -> bool:
        """Return whether the item of that number was added and not taken out."""
        return 0 < number < self._next_number and number not in self._taken_out

    def take_out(self, start: int, end: int) -> int:
        """Take out the items with numbers [start, end); return how many there were."""
        taken = self._taken_out.add(start, min(end, self._next_number))
        self._untidy |= taken > 0
        return taken

    def claim(self) -> ItemLogClaim:
        """Return the state for a checkpoint, which has to claim the runs that there are now."""
        if self._untidy:
            self._tidy()
        runs = [(one.run.number, one.run.items, one.run.slots, one.first, one.end) for one in self._runs]
        in_memory = pack_items(self._in_memory, self._form)
        return ItemLogClaim(self._next_number, self._next_run, runs, in_memory, list(self._taken_out))

    def restore(self, claim: ItemLogClaim) -> None:
        """Take over the state that ``claim`` returned."""
        self._next_number, self._next_run = claim.next_number, claim.next_run
        self._runs = [
            NumberedRun(first, end, self._run(RunClaim(number, items, 0, slots)))
            for number, items, slots, first, end in claim.runs
        ]
        self._hold(unpack_items(claim.in_memory, self._form))
        for start, end in claim.taken_out:
            self._taken_out.add(start, end)
