"""A set of numbers below 2^64, 8 bytes each: which delayed messages are cancelled, or delivered already."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]

#: So many are kept beside the sorted array before it is made anew.
_LOOSE: Final = 1_024


class Places:
    """Sorted when it is looked at."""

    def __init__(self) -> None:
        self._sorted: Numbers = np.empty(0, np.uint64)
        self._loose: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._loose)

    def __contains__(self, number: int) -> bool:
        return number in self._loose or bool(len(self.within(number, number + 1, settle=False)))

    def add(self, number: int) -> bool:
        """Add one; False when it was there."""
        if number in self:
            return False
        self._loose.add(number)
        if len(self._loose) > max(_LOOSE, len(self._sorted) // 8):
            self._settle()
        return True

    def extend(self, numbers: Numbers) -> None:
        """Add many."""
        self._settle()
        self._sorted = np.union1d(self._sorted, numbers)

    def within(self, start: int, stop: int, *, settle: bool = True) -> Numbers:
        """Those in [start, stop), ascending."""
        if settle:
            self._settle()
        low, high = np.searchsorted(self._sorted, np.array([start, stop], np.uint64)).tolist()
        return self._sorted[low:high]

    def discard(self, start: int, stop: int) -> None:
        """Take those in [start, stop) away."""
        if not len(self):
            return
        self._settle()
        low, high = np.searchsorted(self._sorted, np.array([start, stop], np.uint64)).tolist()
        if low < high:
            self._sorted = np.delete(self._sorted, np.s_[low:high])

    def pack(self) -> bytes:
        """For a checkpoint."""
        self._settle()
        return zlib.compress(np.diff(self._sorted, prepend=np.uint64(0)).astype("<u8").tobytes(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> Places:
        """What ``pack`` gave."""
        made = cls()
        made._sorted = np.cumsum(np.frombuffer(zlib.decompress(packed), "<u8"), dtype=np.uint64)
        return made

    def _settle(self) -> None:
        if self._loose:
            loose = np.array(sorted(self._loose), np.uint64)
            self._loose.clear()
            self._sorted = np.union1d(self._sorted, loose)
