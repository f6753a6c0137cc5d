"""A disk of which not everything is in memory: what was read or written stays there until it is forgotten."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qmq.storage.disk.disk import PAGE, Buffer
from tests.storage.faults import FaultyDisk


class ForgetfulDisk(FaultyDisk):
    """Nothing is in memory because it was written lately. ``forget`` empties the memory; with *forgets*, a question
    about pages finds them forgotten as often as that. ``bad`` holds (path, page number) of pages that can't be read.
    """

    hot_bytes = 0

    def __init__(self, seed: int = 0, forgets: float = 0.0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.forgets = forgets
        self._kept: set[tuple[str, int]] = set()
        self._mapped: dict[int, tuple[mmap.mmap, str]] = {}  # by id of a map, which is kept so that it stays its own
        self.bad: set[tuple[str, int]] = set()
        #: What happened: questions that found something missing, and pages that could not be read.
        self.struck: Counter[str] = Counter()

    def forget(self) -> None:
        """Nothing is in memory any more."""
        self._kept.clear()

    def _pages(self, path: str, offset: int, size: int) -> list[tuple[str, int]]:
        return [(path, page) for page in range(offset // PAGE, (offset + max(size, 1) - 1) // PAGE + 1)]

    def map(self, fd: int, length: int) -> mmap.mmap:
        mapped = super().map(fd, length)
        self._mapped[id(mapped)] = mapped, self._paths[fd]
        return mapped

    def residency(self, mapped: mmap.mmap, offset: int, size: int) -> bytes:
        pages = self._pages(self._mapped[id(mapped)][1], offset, size)
        if self.forgets and self._random.random() < self.forgets:
            self._kept.difference_update(pages)
        answer = bytes(page in self._kept for page in pages)
        self.struck["missing"] += 0 in answer
        return answer

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        pages = self._pages(self._paths[fd], offset, size)
        if not self.bad.isdisjoint(pages):
            self.struck["unreadable"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read = super().pread(fd, size, offset)
        self._kept.update(pages)
        return read

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        self._kept.update(self._pages(self._paths[fd], offset, written))
        return written

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._renew(path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._renew(target)

    def _renew(self, path: Path) -> None:
        """Another file of that name lies elsewhere on the disk."""
        self.bad = {page for page in self.bad if page[0] != str(path)}

    def spoil(self, path: Path, offset: int) -> None:
        """Let the page of *path* that holds *offset* be unreadable, and forgotten."""
        page = str(path), offset // PAGE
        self.bad.add(page)
        self._kept.discard(page)
