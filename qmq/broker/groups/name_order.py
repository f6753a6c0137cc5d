"""The subjects in the order of their names, so that those under a prefix are found without looking at all of them.

The order has each name once, with the number of its first lane. Further lanes are found by the names that have some.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.work import PIECE, Work, whole
from qmq.format.private import PRIVATE
from qmq.storage.store import SubjectTable

#: New names that are sorted in at once: some 4 ms.
_NAMES: Final = 1_000
_NAME_WORK: Final = 3
#: The most names of one part of the order.
_PART: Final = 2_048


class _SortedNames:
    """Names in their order, each with a number: in parts, so that a new one moves few others."""

    def __init__(self) -> None:
        self._names: list[list[str]] = [[]]
        self._numbers: list[array[int]] = [array("q")]
        self._firsts: list[str] = []  # of the parts but the first one
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, name: str, number: int) -> None:
        """Sort a new name in."""
        part = bisect_right(self._firsts, name)
        names, numbers = self._names[part], self._numbers[part]
        place = bisect_left(names, name)
        names.insert(place, name)
        numbers.insert(place, number)
        self._count += 1
        if len(names) > _PART:
            half = len(names) // 2
            self._names[part : part + 1] = [names[:half], names[half:]]
            self._numbers[part : part + 1] = [numbers[:half], numbers[half:]]
            self._firsts.insert(part, names[half])

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        part = bisect_right(self._firsts, name)
        names = self._names[part]
        place = bisect_left(names, name)
        if names[place : place + 1] == [name]:
            del names[place], self._numbers[part][place]
            self._count -= 1

    def under(self, prefix: str) -> Iterator[tuple[list[str], npt.NDArray[np.int64]]]:
        """Yield the names under a prefix and their numbers, in some parts; "" takes all that are not private."""
        low, high = prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else PRIVATE
        begin = bisect_right(self._firsts, low)
        end = bisect_right(self._firsts, high) + 1
        several = list(zip(self._names[begin:end], self._numbers[begin:end], strict=True))  # whatever is split later
        for names, numbers in several:
            place = slice(bisect_left(names, low), bisect_left(names, high))
            yield names[place], np.array(numbers[place], np.int64)


class NameOrder:
    """The order of the names of one store. New names are sorted in when it is used, or before that in pieces."""

    def __init__(self, subjects: SubjectTable) -> None:
        self._subjects = subjects
        self._all = _SortedNames()
        self._seen = 0  # it has the names whose first number lies below
        self._with_lanes = _SortedNames()

    def _catch_up(self) -> int:
        """Sort in some new names; return how much work it was."""
        subjects = self._subjects
        if self._seen < subjects.count:
            heads = subjects.heads(self._seen, _NAMES)
            self._seen = heads[-1] + 1 if len(heads) == _NAMES else subjects.count
            lost = set(subjects.lost)
            for head, name in zip(heads, subjects.names_of(heads), strict=True):
                if name is not None and head not in lost:
                    self._all.add(name, head)
            return 1 + _NAME_WORK * len(heads)
        new = subjects.names_with_lanes(len(self._with_lanes), _NAMES)
        for name in new:
            self._with_lanes.add(name, 0)
        return _NAME_WORK * len(new)

    def caught_up(self) -> Work[None]:
        """Sort in all new names."""
        while self._is_behind():
            yield self._catch_up()

    def forget(self, names: Iterable[str]) -> None:
        """Take over that some names are forgotten, or have another first number."""
        for name in names:
            self._all.remove(name)
            numbers = self._subjects.numbers_of(name)
            if numbers and numbers[0] < self._seen:
                self._all.add(name, numbers[0])
            if not self._subjects.other_lanes(name):
                self._with_lanes.remove(name)

    def _is_behind(self) -> bool:
        subjects = self._subjects
        return self._seen < subjects.count or len(self._with_lanes) < subjects.lane_name_count

    def under(self, prefix: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the subjects that a prefix takes, of all lanes: i64[n]. Subjects that are private to
        one group are left out.
        """
        pieces = list(self.pieces(prefix))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def pieces(self, prefix: str) -> Iterator[npt.NDArray[np.int64]]:
        """Return the same as ``under``, piece by piece; subjects that are new meanwhile may be among them."""
        whole(self.caught_up())
        return _joined(self._parts(prefix))

    def _parts(self, prefix: str) -> Iterator[npt.NDArray[np.int64]]:
        subjects = self._subjects
        for _, numbers in self._all.under(prefix):
            yield numbers
        if not prefix and subjects.lost:
            yield np.array(subjects.lost, np.int64)
        for names, _ in self._with_lanes.under(prefix):
            yield from map(subjects.further_lanes, names)


def _joined(parts: Iterator[npt.NDArray[np.int64]]) -> Iterator[npt.NDArray[np.int64]]:
    """Join small parts to pieces."""
    found, total = list[npt.NDArray[np.int64]](), 0
    for part in parts:
        found.append(part)
        total += len(part)
        if total >= PIECE:
            yield np.concatenate(found)
            found, total = [], 0
    if total:
        yield np.concatenate(found)
