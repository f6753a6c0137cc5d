"""Memory that large answers are received into, used again when nobody looks at it any more.

To touch fresh memory for the first time costs more than to receive into it.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
import numpy.typing as npt

#: Of the answer that is handled, and of the next one.
_MOST: Final = 2
_STEP_BYTES: Final = 1 << 20
#: Of an array to which no view leads: the list's, and the call's own.
_REFERENCES: Final = 2


class Buffers:
    """Of one connection."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def room(self, size: int) -> memoryview:
        """*size* bytes, whatever is in them; theirs who hold the view, or any view of it."""
        for place in range(len(self._arrays)):
            if len(self._arrays[place]) >= size and sys.getrefcount(self._arrays[place]) == _REFERENCES:
                return self._arrays[place][:size].data
        del self._arrays[: len(self._arrays) + 1 - _MOST]
        # np.empty does not fill with zeros, which costs as much as receiving
        self._arrays.append(np.empty(-(-size // _STEP_BYTES) * _STEP_BYTES, np.uint8))
        return self._arrays[-1][:size].data

    def clear(self) -> None:
        """Keep nothing: large answers do not follow one another any more."""
        self._arrays.clear()
