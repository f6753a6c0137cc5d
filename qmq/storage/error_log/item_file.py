"""Items by number, listed and taken out one by one: the dead letters of a group.

The newest are in memory and in checkpoints; when there are many they become a run (``runs.py``
draws it), in the order of their numbers, which have no gaps within a run. What was taken out stands in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from qmq.errors import StorageError
from qmq.intervals import Intervals
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.sorted_runs import Items, Run, RunClaim, RunOwner, seal

#: So many items are in memory before they become a run.
MEMORY_ITEMS: Final = 4_096


class ItemLogClaim(NamedTuple):
    """What a checkpoint says: runs with the number of their first item, items in none, and what was taken out."""

    next_number: int
    next_run: int
    runs: list[tuple[int, int, int]]  # run number, items, number of the first item
    kept: bytes
    gone: list[tuple[int, int]]


class ItemLog(RunOwner):
    """The items of one owner. Belongs to one thread, but for ``RunSync.run``."""

    def __init__(
        self, disk: Disk, directory: Path, store_id: bytes, dtype: np.dtype[Any], damaged: list[StorageError]
    ) -> None:
        """As of every owner of runs."""
        super().__init__(disk, directory, store_id, dtype, damaged)
        self._kept: list[Items] = []  # one each
        self._runs: list[tuple[int, Run]] = []  # number of the first item
        self._gone = Intervals()
        self._next_number = 1
        self._spill_at = MEMORY_ITEMS

    def _all_runs(self) -> list[Run]:
        return [run for _, run in self._runs]

    def __len__(self) -> int:
        """How many items there are that were not taken out."""
        return len(self._kept) + sum(run.items for _, run in self._runs) - self._gone.size

    def add(self, items: Items) -> None:
        """Put items in, with the next numbers. When they are too many for memory and no run can be written (a full
        disk), they stay there, and after some more it is tried again.
        """
        items = items.copy()
        items["number"] = np.arange(self._next_number, self._next_number + len(items))
        seal(items)
        self._next_number += len(items)
        self._kept += [items[at : at + 1] for at in range(len(items))]
        if len(self._kept) >= self._spill_at:
            try:
                self._spill()
            except StorageError as error:
                self._damaged.append(error)
                self._spill_at = len(self._kept) + MEMORY_ITEMS // 8

    def _spill(self) -> None:
        items = np.concatenate(self._kept)
        self._runs.append((int(items["number"][0]), self._add_run(items)))
        self._kept, self._spill_at = [], MEMORY_ITEMS

    def after(self, number: int) -> Iterator[Items]:
        """The items with a higher number that were not taken out, ascending, in blocks. Raises StorageFailed."""
        for first, run in self._runs:
            start = max(0, number + 1 - first)
            while start < run.items:
                block = run.read(start)
                start += len(block)
                yield self._left(block[block["number"] > 0])
        if self._kept:
            block = np.concatenate(self._kept)
            yield self._left(block[block["number"] > number])

    def _left(self, items: Items) -> Items:
        gone = self._gone
        if not gone.size:
            return items
        return items[[number not in gone for number in items["number"].tolist()]]

    @property
    def next_number(self) -> int:
        """The number of the item that is put in next."""
        return self._next_number

    def skip_to(self, number: int) -> None:
        """The next item gets that number: what had the numbers up to it is not known any more."""
        start, count = self._next_number, number - self._next_number
        if count > 0:
            self.add(np.zeros(count, self._dtype))
            self._gone.add(start, number)

    def has(self, number: int) -> bool:
        """Whether the item of that number was put in and not taken out."""
        return 0 < number < self._next_number and number not in self._gone

    def take_out(self, start: int, end: int) -> int:
        """The items with numbers [start, end) are gone; returns how many of them were there."""
        return self._gone.add(start, min(end, self._next_number))

    def claim(self) -> ItemLogClaim:
        """For a checkpoint."""
        runs = [(run.number, run.items, first) for first, run in self._runs]
        kept = b"".join(item.tobytes() for item in self._kept)
        return ItemLogClaim(self._next_number, self._next_run, runs, kept, list(self._gone))

    def restore(self, claim: ItemLogClaim) -> None:
        """Take over what ``claim`` gave."""
        self._next_number, self._next_run = claim.next_number, claim.next_run
        self._runs = [(first, self._run(RunClaim(number, items, 0))) for number, items, first in claim.runs]
        kept = np.frombuffer(claim.kept, self._dtype)
        self._kept = [kept[at : at + 1] for at in range(len(kept))]
        for start, end in claim.gone:
            self._gone.add(start, end)
