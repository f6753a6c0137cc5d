"""Fields of many records of the pull log at once: msgpack is walked in step, one field of all records after another."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.storage.store import PullPiece

Numbers = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

_HEADER_BYTES: Final = 12
#: The bytes of a whole number, by its first byte; 0 where that begins something else.
_SIZES: Final = np.zeros(256, np.int64)
_SIZES[:0x80] = 1
_SIZES[0xCC:0xD0] = (2, 3, 5, 9)
#: How far the eight bytes behind the first are shifted to the number.
_SHIFTS: Final = np.zeros(256, np.uint64)
_SHIFTS[0xCC:0xD0] = (56, 48, 32, 0)


#: The elements of a short list, by its first byte; -1 where that begins something else.
_COUNTS: Final = np.full(256, -1, np.int64)
_COUNTS[0x90:0xA0] = np.arange(16)


class PieceBytes:
    """The bytes of a file of the pull log, to be read at many offsets at once."""

    def __init__(self, piece: PullPiece) -> None:
        self.octets = piece.octets
        self.words: npt.NDArray[Any] = np.ndarray((len(self.octets) - 8,), ">u8", self.octets.data, 0, (1,))


class FieldWalk:
    """A walk over the fields of some records, from the first one on. Records that have another field than is asked for
    are left out from there on.
    """

    def __init__(self, data: PieceBytes, offsets: Offsets) -> None:
        """*offsets* are those of records."""
        self._data = data
        #: Where the records begin that are still in the walk; ``at`` is the next field of each.
        self.records = offsets
        self._at = offsets + _HEADER_BYTES

    def __len__(self) -> int:
        return len(self.records)

    def keep(self, which: npt.NDArray[Any]) -> None:
        """Go on with these records alone: a mask, or indexes."""
        self.records, self._at = self.records[which], self._at[which]

    def fork(self, which: npt.NDArray[Any] | None = None) -> FieldWalk:
        """Return another walk of these records (None: all), from here on."""
        walk = FieldWalk(self._data, self.records if which is None else self.records[which])
        walk._at = self._at if which is None else self._at[which]
        return walk

    def pass_octets(self, count: int) -> None:
        """Pass so many bytes of each record."""
        self._at = self._at + count

    def pass_numbers(self, count: int) -> None:
        """Pass so many whole numbers."""
        for _ in range(count):
            self._at = self._at + _SIZES.take(self._data.octets.take(self._at))

    def numbers(self) -> Numbers:
        """Return the next field of each, a whole number, and pass it. The value is 0 where it is none."""
        first = self._data.octets.take(self._at)
        sizes = _SIZES.take(first)
        found = self._data.words[self._at + 1].astype(np.uint64)
        found >>= _SHIFTS.take(first)
        np.copyto(found, first, where=sizes == 1)
        self._at = self._at + sizes
        return found

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how many elements the list has that comes next, and pass its header; -1 where no list comes."""
        first = self._data.octets.take(self._at)
        found = _COUNTS.take(first)
        long = np.flatnonzero(first - np.uint8(0xDC) <= 1)
        if not len(long):
            self._at = self._at + 1
        else:
            size = np.ones(len(first), np.int64)
            words = self._data.words[self._at[long] + 1].astype(np.uint64)
            is_short = first[long] == 0xDC
            found[long] = np.where(is_short, words >> np.uint64(48), words >> np.uint64(32)).astype(np.int64)
            size[long] = np.where(is_short, 3, 5)
            self._at = self._at + size
        return found
