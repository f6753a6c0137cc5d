"""Filters over the segments that have no key index yet: mostly the one that is being written.

The log is cut into stretches of a few thousand hashes, or a few MiB; each has a filter page, as those of a key index,
in memory. A search reads only stretches that may have its hash, and what no filter covers yet.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.format.layout import KEY_FILTER_BITS, KEY_FILTER_PAGE_BITS, KEY_PAGE_CONTENT
from qmq.storage.key_index.hashes import Hashes, Positions
from qmq.storage.key_index.key_file import probes_of, probes_of_one

#: The hashes and the bytes of a stretch, about: a step of a walk is not split.
STRETCH_HASHES: Final = KEY_FILTER_PAGE_BITS // KEY_FILTER_BITS
STRETCH_BYTES: Final = 4 << 20
_FIRST_PAGES: Final = 16
#: The most pages of one segment, 32 MiB; behind what they cover it is read.
MOST_PAGES: Final = 8_192


class RecentFilters:
    """The filters of one segment, from its base on. One thread extends it; others may read it meanwhile."""

    def __init__(self, start: int) -> None:
        self._bits: npt.NDArray[np.uint8] = np.zeros((_FIRST_PAGES, KEY_PAGE_CONTENT), np.uint8)
        self._bounds = [start]
        self._hashes = 0  # in the last stretch, which is still open

    @property
    def end(self) -> int:
        """The position up to which filters cover the segment."""
        return self._bounds[-1]

    @property
    def is_full(self) -> bool:
        """Whether no more can be covered."""
        return len(self._bounds) > MOST_PAGES

    def extend(self, hashes: Hashes, positions: Positions, end: int) -> None:
        """Cover the batches up to *end*, which have these hashes, or as many of them as there is room for."""
        order = np.argsort(positions, kind="stable")
        hashes, positions = hashes[order], positions[order]
        while len(hashes) > STRETCH_HASHES:
            position = int(positions[STRETCH_HASHES])
            cut = int(positions.searchsorted(np.uint64(position)))
            if not cut:  # one batch has so many
                break
            self._add(hashes[:cut], position)
            hashes, positions = hashes[cut:], positions[cut:]
        self._add(hashes, end)

    def _add(self, hashes: Hashes, end: int) -> None:
        if self.is_full:  # what follows is not covered, either
            return
        bounds, page = self._bounds, len(self._bounds) - 2
        if page < 0 or self._hashes + len(hashes) > STRETCH_HASHES or end - bounds[page] > STRETCH_BYTES:
            page += 1
            self._hashes = 0
            if page == len(self._bits):
                self._bits = np.concatenate((self._bits, np.zeros_like(self._bits)))
        if len(hashes):
            flags = np.zeros(KEY_FILTER_PAGE_BITS, np.bool_)
            flags[probes_of(hashes)] = True
            self._bits[page] |= np.packbits(flags, bitorder="little")
        self._hashes += len(hashes)
        if page == len(bounds) - 1:
            bounds.append(end)
        else:
            bounds[-1] = end

    def stretches(self, value: int) -> tuple[list[tuple[int, int]], int]:
        """Return the ranges of positions that may have batches with this hash, ascending, adjacent ones joined; and the
        position up to which that is known.
        """
        bounds = tuple(self._bounds)  # before the bits: what is added meanwhile is behind them
        bits = self._bits
        pages = np.ones(len(bounds) - 1, np.bool_)
        for probe in probes_of_one(value):
            pages &= (bits[: len(pages), probe >> 3] & np.uint8(1 << (probe & 7))) != 0
        found: list[tuple[int, int]] = []
        for page in np.flatnonzero(pages).tolist():
            if found and found[-1][1] == bounds[page]:
                found[-1] = found[-1][0], bounds[page + 1]
            else:
                found.append((bounds[page], bounds[page + 1]))
        return found, bounds[-1]
