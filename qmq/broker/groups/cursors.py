"""The cursors of a group by subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: The column is never longer than this for the sake of few subjects: 128 kB.
_SHORT: Final = 16_384
#: So many subjects are few.
_FEW: Final = 64


class Cursors:
    """The next sequence of each subject, by subject number; 0 where no message was handed out yet.

    They are a column, but a dict where few of many subjects have one: thousands of groups may each follow a subject
    with a high number. A number below the column's length is in the column, any other in the dict.
    """

    __slots__ = ("column", "few")

    def __init__(self) -> None:
        self.column: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.few = dict[int, int]()

    def get(self, number: int) -> int:
        """Return the next sequence of a subject."""
        column = self.column
        return column.item(number) if number < len(column) else self.few.get(number, 0)

    def of(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Return the next sequences of these subjects: u64[len(numbers)]."""
        column, few = self.column, self.few
        if not len(numbers) or int(numbers.max()) < len(column):
            taken: npt.NDArray[np.uint64] = column[numbers]
            return taken
        found = np.zeros(len(numbers), np.uint64)
        if not few:
            inside = numbers < len(column)
            found[inside] = column[numbers[inside]]
        elif len(numbers) <= _FEW:
            found[:] = [few.get(number, 0) for number in numbers.tolist()]
        else:
            known = np.array(sorted(few.items()), np.uint64)
            places = np.minimum(known[:, 0].searchsorted(numbers.astype(np.uint64)), len(known) - 1)
            inside = known[places, 0] == numbers
            found[inside] = known[places[inside], 1]
        return found

    def items(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the subjects that have a cursor, ascending, and their cursors."""
        if self.few:
            known = np.array(sorted((number, end) for number, end in self.few.items() if end), np.uint64).reshape(-1, 2)
            return known[:, 0].astype(np.int64), known[:, 1]
        numbers = np.flatnonzero(self.column)
        return numbers, self.column[numbers]

    def set(self, number: int, sequence: int) -> None:
        """Set the cursor of a subject."""
        self.update({number: sequence})

    def update(self, sequences: Mapping[int, int]) -> None:
        """Set the cursors of a few subjects, by number."""
        for number, sequence in sequences.items():
            if number >= len(self.column) and number not in self.few:
                self._make_room(number, 1)
            if number < len(self.column):
                self.column[number] = sequence
            else:
                self.few[number] = sequence

    def put(self, numbers: npt.NDArray[Any], sequences: npt.NDArray[Any]) -> None:
        """Set the cursors of some subjects; of several of one subject the last counts."""
        if self._have_column(numbers):
            self.column[numbers] = sequences
        else:
            self.few.update(zip(numbers.tolist(), sequences.tolist(), strict=True))

    def raise_to(self, numbers: npt.NDArray[Any], sequences: npt.NDArray[Any]) -> None:
        """Set the cursors of some subjects where they lie before; of several of one subject the highest counts."""
        if self._have_column(numbers):
            np.maximum.at(self.column, numbers, sequences)
        else:
            few = self.few
            for number, sequence in zip(numbers.tolist(), sequences.tolist(), strict=True):
                few[number] = max(few.get(number, 0), sequence)

    def forget(self, numbers: npt.NDArray[np.int64]) -> bool:
        """Forget the cursors of these subjects, ascending; return whether there were any."""
        inside = numbers[: numbers.searchsorted(len(self.column))]
        known = inside[self.column[inside] != 0]
        self.column[known] = 0  # no others: a zero that is written takes the memory of a page
        keys = np.fromiter(self.few, np.int64, len(self.few))
        behind = keys[numbers.searchsorted(keys, "right") > numbers.searchsorted(keys)]
        for number in behind.tolist():
            del self.few[number]
        return bool(len(known) or len(behind))

    def packed(self) -> tuple[bytes, bytes]:
        """Return the cursors that are set: subject numbers u32, sequences u64."""
        numbers, sequences = self.items()
        return numbers.astype("<u4").tobytes(), sequences.astype("<u8").tobytes()

    def restore(self, numbers: bytes, sequences: bytes, is_forgotten: npt.NDArray[np.bool_]) -> None:
        """Take over a state from ``packed``, but for subjects that are forgotten."""
        which, values = np.frombuffer(numbers, "<u4"), np.frombuffer(sequences, "<u8")
        known = ~is_forgotten[which]
        if known.any():
            self.put(which[known], values[known])

    def _have_column(self, numbers: npt.NDArray[Any]) -> bool:
        """Return whether the column has the cursors of these subjects, once there is room for them."""
        highest = int(numbers.max(initial=0))
        if highest >= len(self.column):
            new = set(np.unique(numbers).tolist()) - self.few.keys()
            if new:
                self._make_room(highest, len(new))
        return highest < len(self.column)

    def _make_room(self, highest: int, count: int) -> None:
        """Choose where the cursors are, for so many more subjects up to that number."""
        column, few = self.column, self.few
        end = max(highest + 1, 1 + max(few, default=0))
        if end > _SHORT and count + (len(few) or int(np.count_nonzero(column))) <= _FEW:
            if len(column):
                set_there = np.flatnonzero(column)
                self.few = dict(zip(set_there.tolist(), column[set_there].tolist(), strict=True))
                self.column = np.zeros(0, np.uint64)
            return
        grown = np.zeros(max(end, 2 * len(column), 64), np.uint64)
        known = np.flatnonzero(column)  # pages that are not touched take no memory
        grown[known] = column[known]
        for number, sequence in few.items():
            grown[number] = sequence
        self.column, self.few = grown, {}
