"""A disk whose process ends: for tests that kill an archiving run at each thing that it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qmq.storage.disk.disk import Buffer
from tests.storage.disks import HastyDisk


class Killed(BaseException):
    """The process is no more."""


class MortalDisk(HastyDisk):
    """Ends its process at the nth thing that is done to the disk; the last write is half done."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.done = 0

    def _step(self) -> None:
        self.done += 1
        if self.done > self.last:
            raise Killed

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        self._step()
        return super().open(path, flags, mode)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            self._step()
        except Killed:
            if self.done == self.last + 1:
                whole = b"".join(buffers)
                super().pwritev(fd, [whole[: len(whole) // 2]], offset)
            raise
        return super().pwritev(fd, buffers, offset)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._step()
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        self._step()
        super().mkdir(path, mode)
