"""Making the key index of one sealed segment, in bounded steps and bounded memory.

The hashes of the segment are read batch by batch, and sorted a million at a time; sorted parts wait in a file beside,
and are merged into the pages of the index. It is written as a whole, synced and renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
from crc32c import crc32c

from qmq.errors import StorageFailed
from qmq.format.layout import DERIVED_HEADER_SIZE, KEY_PAGE_ENTRIES, KEY_PAGE_SIZE
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.disk.disk import Disk, failure, read_fully, write_fully
from qmq.storage.key_index.key_file import (
    PARTS,
    UNFINISHED,
    Filter,
    Hashes,
    Offsets,
    keys_path,
    pack_entries,
    pack_first_page,
    sizes_of,
)
from qmq.storage.key_index.walk import WalkStep

#: Entries that are sorted at once: 12 bytes each, and three times as much while they are sorted.
PART_ENTRIES: Final = 1 << 20
#: While parts are merged, so much of each is in memory.
_MERGED_SHARE: Final = 1 / 16
_HASH_BYTES: Final = 8


def sort_entries(hashes: Hashes, offsets: Offsets) -> tuple[Hashes, Offsets]:
    """Return entries sorted by (hash, offset), each once."""
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets, kind="stable")
        hashes, offsets = hashes[order], offsets[order]
    order = np.argsort(hashes, kind="stable")
    hashes, offsets = hashes[order], offsets[order]
    first = np.ones(len(hashes), np.bool_)
    first[1:] = (hashes[1:] != hashes[:-1]) | (offsets[1:] != offsets[:-1])
    return (hashes, offsets) if first.all() else (hashes[first], offsets[first])


class _SortedPart:
    """Sorted entries: in memory, or in a file from an offset on."""

    def __init__(self, hashes: Hashes, offsets: Offsets) -> None:
        self.count = len(hashes)
        self._hashes = hashes
        self._offsets = offsets
        self._start = -1
        self.taken = 0

    def write(self, disk: Disk, fd: int, start: int) -> int:
        """Move the entries to a file; return the offset behind them. Raises OSError."""
        write_fully(disk, fd, [self._hashes.tobytes(), self._offsets.tobytes()], start)
        self._start = start
        self._hashes, self._offsets = self._hashes[:0], self._offsets[:0]
        return start + 12 * self.count

    def next(self, disk: Disk, fd: int, most: int) -> tuple[Hashes, Offsets]:
        """Return the next entries, at most *most*; the caller adds to ``taken`` how many it has used."""
        count = min(most, self.count - self.taken)
        if self._start < 0:
            part = slice(self.taken, self.taken + count)
            return self._hashes[part], self._offsets[part]
        at, behind = self._start + _HASH_BYTES * self.taken, self._start + _HASH_BYTES * self.count + 4 * self.taken
        hashes = read_fully(disk, fd, _HASH_BYTES * count, at)
        offsets = read_fully(disk, fd, 4 * count, behind)
        return np.frombuffer(hashes, np.uint64), np.frombuffer(offsets, np.uint32)


class Walk(Protocol):
    """A reader of a segment's hashes: qmq.storage.key_index.walk.SegmentWalk."""

    path: Path

    @property
    def is_done(self) -> bool: ...
    def step(self) -> WalkStep: ...
    def close(self) -> None: ...


class KeyIndexBuilder:
    """[thread] Makes the key index of one segment. Call ``step`` until it returns False, then ``close``."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        owner: DerivedHeader,
        walk: Walk,
        *,
        part_entries: int = PART_ENTRIES,
        check_room: Callable[[int], None] = lambda size: None,
    ) -> None:
        """*owner* is the header of the file but for count and body_crc; *walk* reads the segment from its start.
        *part_entries* are sorted at once. *check_room* raises StorageFull where so many bytes may not be written.
        """
        self._check_room = check_room
        self._part_entries = part_entries
        self._disk = disk
        self._owner = owner
        self._walk = walk
        self.path = keys_path(directory, owner.base)
        self._temporary = self.path.with_name(self.path.name + UNFINISHED)
        self._parts_path = self.path.with_suffix(PARTS)
        self._fd = self._parts_fd = -1
        self._left: list[Path] = []  # files to remove at the end
        self._parts_end = 0
        self._parts: list[_SortedPart] = []
        self._gathered: list[tuple[Hashes, Offsets]] = []
        self._count = 0
        self._steps = self._stepped()

    @property
    def base(self) -> int:
        """The base of the segment."""
        return self._owner.base

    def step(self) -> bool:
        """Read a megabyte of the segment, or write as much of the index; return False once it is there, on disk.

        Raises StorageFull or StorageFailed; the index can be made later then, by another builder.
        """
        try:
            return next(self._steps, False)
        except OSError as error:
            raise failure(error, "write", error.filename or self._temporary) from error

    def close(self) -> None:
        """Close all files; remove those that are not whole."""
        self._steps.close()
        self._walk.close()
        for fd in (self._fd, self._parts_fd):
            if fd >= 0:
                self._disk.close(fd)
        self._fd = self._parts_fd = -1
        for path in self._left:
            with suppress(OSError):
                self._disk.unlink(path)
        self._left.clear()

    def _stepped(self) -> Generator[bool]:
        while not self._walk.is_done:
            found = self._walk.step()
            if found.unread:
                raise StorageFailed(
                    f"the disk cannot read {found.unread} bytes of {self._walk.path}; check the disk, "
                    "then run qmq verify"
                )
            if len(found.hashes):
                self._gathered.append((found.hashes, (found.positions - np.uint64(self.base)).astype(np.uint32)))
                self._count += len(found.hashes)
                if self._count >= self._part_entries:
                    self._sort_gathered()
            yield True
        self._sort_gathered()
        yield True
        yield from self._written()

    def _sort_gathered(self) -> None:
        if not self._gathered:
            return
        hashes, offsets = (np.concatenate(column) for column in zip(*self._gathered, strict=True))
        self._gathered, self._count = [], 0
        if self._parts:
            self._spill(self._parts[-1])
        self._parts.append(_SortedPart(*sort_entries(hashes, offsets)))

    def _spill(self, part: _SortedPart) -> None:
        self._check_room(12 * part.count)
        if self._parts_fd < 0:
            self._parts_fd = self._create(self._parts_path)
        self._parts_end = part.write(self._disk, self._parts_fd, self._parts_end)

    def _create(self, path: Path) -> int:
        fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._left.append(path)
        return fd

    def _written(self) -> Iterator[bool]:
        disk, count = self._disk, sum(part.count for part in self._parts)
        sizes = sizes_of(count)
        header = self._owner._replace(rows=count)
        self._check_room(sizes.file_bytes)
        self._fd = self._create(self._temporary)
        bits = Filter(sizes.filter_pages)
        pages, crc = 1, crc32c(pack_first_page(header)[DERIVED_HEADER_SIZE:])
        for hashes, offsets in _in_pages(self._merged()):
            bits.add(hashes)
            data = pack_entries(hashes, offsets, pages)
            write_fully(disk, self._fd, [data], pages * KEY_PAGE_SIZE)
            crc = crc32c(data, crc)
            pages += -(-len(hashes) // KEY_PAGE_ENTRIES)
            yield True
        data = bits.pack(pages)
        header = header._replace(body_crc=crc32c(data, crc))
        write_fully(disk, self._fd, [data], pages * KEY_PAGE_SIZE)
        write_fully(disk, self._fd, [pack_first_page(header)], 0)
        yield True
        disk.fsync(self._fd)
        disk.close(self._fd)
        self._fd = -1
        disk.rename(self._temporary, self.path)
        self._left.remove(self._temporary)
        disk.fsync_directory(self.path.parent)

    def _merged(self) -> Iterator[tuple[Hashes, Offsets]]:
        """Yield all entries by (hash, offset), in pieces. Offsets of a part are above those of the parts before it."""
        parts, most = [part for part in self._parts if part.count], max(1, int(self._part_entries * _MERGED_SHARE))
        while parts:
            windows = [part.next(self._disk, self._parts_fd, most) for part in parts]
            lasts = [int(hashes[-1]) for hashes, _ in windows]
            bound = min(lasts)
            bounding = lasts.index(bound)
            taken = []
            for number, (part, (hashes, offsets)) in enumerate(zip(parts, windows, strict=True)):
                # Entries of this hash that the bounding part still has come before those of later parts.
                side: Literal["left", "right"] = "right" if number <= bounding else "left"
                end = int(hashes.searchsorted(np.uint64(bound), side))
                taken.append((hashes[:end], offsets[:end]))
                part.taken += end
            hashes, offsets = (np.concatenate(column) for column in zip(*taken, strict=True))
            order = np.argsort(hashes, kind="stable")
            yield hashes[order], offsets[order]
            parts = [part for part in parts if part.taken < part.count]


def _in_pages(pieces: Iterator[tuple[Hashes, Offsets]]) -> Iterator[tuple[Hashes, Offsets]]:
    """Yield the same entries in pieces of whole pages, but for the last."""
    rest_hashes, rest_offsets = np.empty(0, np.uint64), np.empty(0, np.uint32)
    for piece_hashes, piece_offsets in pieces:
        hashes, offsets = np.concatenate((rest_hashes, piece_hashes)), np.concatenate((rest_offsets, piece_offsets))
        whole = len(hashes) // KEY_PAGE_ENTRIES * KEY_PAGE_ENTRIES
        if whole:
            yield hashes[:whole], offsets[:whole]
        rest_hashes, rest_offsets = hashes[whole:], offsets[whole:]
    if len(rest_hashes):
        yield rest_hashes, rest_offsets
