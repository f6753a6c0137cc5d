"""Checks of key indexes: against the log, by verify, and page by page, by the scrub."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import BadBytes
from qmq.format.layout import KEY_PAGE_SIZE
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure
from qmq.storage.key_index.build import sort_entries
from qmq.storage.key_index.hashes import Hashes, Positions, hashes_in
from qmq.storage.key_index.key_file import Filter, KeyFile, Offsets, is_page, keys_path
from qmq.storage.types import Hole

#: Pages that one step of the scrub reads.
_STEP_PAGES: Final = 16


class KeyCheck:
    """Compares the key index of one segment with the batches given to ``expect``; ``finish`` says what is wrong."""

    def __init__(self, disk: Disk, directory: Path, owner: DerivedHeader) -> None:
        """*owner* is the header that the file has to have, but for count and body_crc."""
        self._disk = disk
        self._directory = directory
        self._owner = owner
        self._hashes: list[Hashes] = []
        self._positions: list[Positions] = []
        self.path = keys_path(directory, owner.base)
        self.size = self.entries = 0

    def exists(self) -> bool:
        """Return whether there is a file."""
        return self._disk.exists(self.path)

    def expect(self, batches: memoryview, position: int) -> None:
        """Take good batches, the first at *position*."""
        found = hashes_in(batches, position)
        self._hashes.append(found.hashes)
        self._positions.append(found.positions)

    def finish(self, holes: list[Hole]) -> str | None:
        """Return what is wrong with the file; None when nothing is. The file may have entries of batches in *holes*:
        they were good when it was made. Raises OSError.
        """
        try:
            file = KeyFile.open(self._disk, self._directory, self._owner)
        except BadBytes as error:
            return str(error)
        try:
            self.size, self.entries = file.sizes.file_bytes, file.count
            return self._compared(file, holes)
        except BadBytes as error:
            return str(error)
        finally:
            file.close()

    def _compared(self, file: KeyFile, holes: list[Hole]) -> str | None:
        hashes, offsets = file.all_entries()
        bits = Filter(file.sizes.filter_pages)
        bits.add(hashes)
        if file.filter_bytes() != bits.pack(1 + file.sizes.entry_pages):
            return "its filter is not that of its entries"
        file.check_body()
        wanted_hashes, wanted = self._wanted()
        positions = offsets.astype(np.uint64) + np.uint64(self._owner.base)
        kept = np.ones(len(hashes), np.bool_)
        for hole in holes:
            kept &= (positions < hole.start) | (positions >= hole.end)
        if np.array_equal(hashes[kept], wanted_hashes) and np.array_equal(offsets[kept], wanted):
            return None
        return f"its {int(kept.sum())} entries are not the {len(wanted)} of the batches of its segment"

    def _wanted(self) -> tuple[Hashes, Offsets]:
        if not self._hashes:
            return np.empty(0, np.uint64), np.empty(0, np.uint32)
        positions = np.concatenate(self._positions) - np.uint64(self._owner.base)
        return sort_entries(np.concatenate(self._hashes), positions.astype(np.uint32))


class KeyStep(NamedTuple):
    """The result of one read of the scrub; ``is_last``: the file is done."""

    size: int
    is_good: bool
    is_last: bool


class KeyReader:
    """[thread] Reads a key index from end to end. Call ``step`` until it is the last, then ``close``."""

    def __init__(self, disk: Disk, directory: Path, owner: DerivedHeader) -> None:
        self._disk = disk
        self._owner = owner
        self._directory = directory
        self._fd = -1
        self._next = 1
        self.path = keys_path(directory, owner.base)

    def step(self) -> KeyStep:
        """Read a little further. Raises StorageFailed when the system refuses, for another reason than the state of the
        file.
        """
        try:
            return self._step()
        except (BadBytes, FileNotFoundError):
            return KeyStep(0, False, True)
        except OSError as error:
            if error.errno in BAD_SECTOR:
                return KeyStep(0, False, True)
            raise failure(error, "read", self.path) from error

    def _step(self) -> KeyStep:
        if self._fd < 0:
            KeyFile.open(self._disk, self._directory, self._owner).close()
            self._fd = self._disk.open_uncached(self.path)
        size, offset = _STEP_PAGES * KEY_PAGE_SIZE, self._next * KEY_PAGE_SIZE
        data = bytearray(size)
        read = self._disk.preadv_uncached(self._fd, memoryview(data), offset)
        for start in range(0, read, KEY_PAGE_SIZE):
            if not is_page(bytes(data[start : min(start + KEY_PAGE_SIZE, read)]), self._next):
                return KeyStep(read, False, True)
            self._next += 1
        return KeyStep(read, True, read < size)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1
