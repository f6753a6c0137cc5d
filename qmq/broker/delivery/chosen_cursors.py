"""The cursors of a group as they will be once a pull is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.cursors import Cursors


class CursorScratch:
    """The columns in which one choice after another notes cursors, by subject number."""

    def __init__(self) -> None:
        self.values: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        #: The choice that a value is of.
        self.choices: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._last = 0

    def begin(self) -> int:
        """Return the number of a new choice; the values of those before count no more."""
        self._last += 1
        return self._last

    def upto(self, numbers: int) -> None:
        """Make room for so many subjects."""
        if len(self.values) < numbers:
            room = max(numbers, 2 * len(self.values), 64)  # pages not touched take no memory
            values, choices = np.zeros(room, np.uint64), np.zeros(room, np.int64)
            values[: len(self.values)], choices[: len(self.choices)] = self.values, self.choices
            self.values, self.choices = values, choices


class ChosenCursors:
    """The cursors of a group behind what a pull has chosen so far. The group's own do not change before ``apply``."""

    def __init__(self, cursors: Cursors, scratch: CursorScratch) -> None:
        """*scratch* is for this choice alone, until the next one begins."""
        self._cursors = cursors
        self._scratch = scratch
        self._choice = 0  # its number, once it has a value in the scratch
        self._moves: list[tuple[npt.NDArray[Any], npt.NDArray[Any]] | dict[int, int]] = []
        self._noted = 0  # so many of them are in the scratch: only who reads needs them there
        self._last: dict[int, int] = {}  # the moves of single subjects behind these

    def get(self, number: int) -> int:
        """Return the next sequence of a subject."""
        cursor = self._last.get(number)
        if cursor is not None:
            return cursor
        if self._moves:
            scratch = self._note()
            if number < len(scratch.choices) and scratch.choices.item(number) == self._choice:
                return scratch.values.item(number)
        return self._cursors.get(number)

    def of(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Return the next sequences of these subjects: u64[len(numbers)]."""
        known = self._cursors.of(numbers)
        self._end_last()
        if self._moves and len(numbers):
            scratch = self._note()
            scratch.upto(int(numbers.max()) + 1)
            chosen = scratch.choices[numbers] == self._choice
            known[chosen] = scratch.values[numbers[chosen]]
        return known

    def move(self, number: int, sequence: int) -> None:
        """Move the cursor of a subject."""
        self._last[number] = sequence

    def move_several(self, numbers: npt.NDArray[Any], sequences: npt.NDArray[Any]) -> None:
        """Move the cursors of several subjects; of several values of one subject the last counts."""
        self._end_last()
        self._moves.append((numbers, sequences))

    def _end_last(self) -> None:
        if self._last:
            self._moves.append(self._last)
            self._last = {}

    def _note(self) -> CursorScratch:
        scratch = self._scratch
        self._choice = self._choice or scratch.begin()
        for move in self._moves[self._noted :]:
            if isinstance(move, tuple):
                numbers, sequences = move
            else:
                numbers, sequences = np.array(list(move)), np.array(list(move.values()), np.uint64)
            scratch.upto(1 + int(numbers.max()))
            scratch.values[numbers] = sequences  # numpy keeps the last of several assignments
            scratch.choices[numbers] = self._choice
        self._noted = len(self._moves)
        return scratch

    def apply(self) -> None:
        """Move the group's cursors."""
        cursors = self._cursors
        for move in self._moves:
            if isinstance(move, tuple):
                cursors.put(*move)
            else:
                cursors.update(move)
        if self._last:
            cursors.update(self._last)
        self._moves, self._last, self._noted = [], {}, 0
