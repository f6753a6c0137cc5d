"""The subjects in the order of their names, so that those under a prefix are found without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import StorageError
from qmq.format.private import PRIVATE, is_private
from qmq.storage.store import SubjectTable

#: So many new subjects are put into the order one by one; more are sorted in together.
_FEW: Final = 64


class NameOrder:
    """The order of the names of one store; it catches up with new subjects when it is asked."""

    def __init__(self, subjects: SubjectTable) -> None:
        self._subjects = subjects
        self._order: list[int] = []  # numbers
        self._numbers: npt.NDArray[np.int64] = np.empty(0, np.int64)  # the same
        self._spans: dict[str, tuple[int, int]] = {}  # where the subjects of a prefix lie in it

    def under(self, prefix: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the subjects that a prefix takes, in the order of names: i64[n]. Subjects that are
        private to one group are left out.
        """
        order = self._caught_up()
        if prefix:
            low, high = self.span(prefix)
            return self._numbers[low:high]
        high = bisect_left(order, PRIVATE, key=self._name)
        lost = [number for number in order[high:] if not is_private(self._name(number))]
        return np.concatenate((self._numbers[:high], np.array(lost, np.int64))) if lost else self._numbers[:high]

    def span(self, prefix: str) -> tuple[int, int]:
        """Return where the subjects of a prefix, which is not empty, begin and end in the order."""
        order = self._caught_up()
        span = self._spans.get(prefix)
        if span is None:
            low = bisect_left(order, prefix, key=self._name)
            high = bisect_left(order, prefix[:-1] + chr(ord(prefix[-1]) + 1), low, key=self._name)
            span = self._spans[prefix] = low, high
        return span

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The numbers of all subjects in the order of their names."""
        self._caught_up()
        return self._numbers

    def _caught_up(self) -> list[int]:
        order, count = self._order, self._subjects.count
        if len(order) == count:
            return order
        if count - len(order) <= _FEW:
            for number in range(len(order), count):
                insort(order, number, key=self._name)
        else:
            order.extend(range(len(order), count))
            order.sort(key=self._name)
        self._numbers = np.array(order, np.int64)
        self._spans.clear()
        return order

    def _name(self, number: int) -> str:
        try:
            return self._subjects.name(number)
        except StorageError:
            return ""
