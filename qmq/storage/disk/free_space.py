"""Free space that sends may not use up, so that the broker can write on while it refuses sends.

Checkpoints, rows, names of subjects and acks need some space. If sends used it up, a full disk would stop consumers
too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq.errors import StorageFull
from qmq.storage.disk.disk import Disk, failure

#: At most a sixteenth of a disk is kept free.
PARTS: Final = 16
#: Measure again when an eighth of the reserved space may have been used.
_AGAIN_PARTS: Final = 8
#: More bytes than anybody writes.
_UNMEASURED: Final = 1 << 62


class FreeSpace:
    """The space for one partition's batches, on the disk of the partition and on that of the data directory."""

    __slots__ = ("_directories", "_disk", "_keep_bytes", "full", "left", "refused_bytes")

    def __init__(self, disk: Disk, directories: tuple[Path, ...], keep_bytes: int) -> None:
        """*keep_bytes* stay free on each disk, but at most a sixteenth of it; with 0 nothing is measured."""
        self._disk = disk
        self._directories = directories
        self._keep_bytes = keep_bytes
        #: The bytes that may be written before the next measurement; a writer that needs less counts them off itself.
        self.left = -1 if keep_bytes else _UNMEASURED
        #: The last refusal, until there is room for as many bytes as were refused; None: nothing is refused.
        self.full: StorageFull | None = None
        self.refused_bytes = 0

    def take(self, size: int) -> None:
        """Count *size* bytes that are about to be written. Raises StorageFull when too little would be left,
        StorageFailed.
        """
        self.left -= size
        if self.left < 0:
            room, reserved = self._measured(size)
            if self.refused_bytes - size <= room:
                self.full, self.refused_bytes = None, 0
            self.left = min(room, reserved // _AGAIN_PARTS) if self._keep_bytes else _UNMEASURED

    def refuse(self, error: StorageFull, size: int) -> None:
        """Note that *size* bytes could not be written."""
        self.full, self.refused_bytes = error, max(self.refused_bytes, size)
        self.left = -1  # the next write comes to ``take``

    def measure_again(self) -> None:
        """Measure at the next ``take``, since others write to the disks too."""
        if self._keep_bytes:
            self.left = -1

    def check(self, size: int) -> None:
        """[thread] Return if *size* bytes may be written that are no batch, such as those of a derived file. Raises as
        ``take``.
        """
        if self._keep_bytes:
            self._measured(size)

    def _measured(self, size: int) -> tuple[int, int]:
        """Return how many bytes there is room for behind the next *size*, and how many are reserved, on the disk with
        the least.
        """
        room = least = _UNMEASURED
        for directory in self._directories:
            try:
                free, total = self._disk.room(directory)
            except OSError as error:
                raise failure(error, "see how much is free on the disk of", directory) from error
            reserved = min(self._keep_bytes, total // PARTS)
            if free - size < reserved and self._keep_bytes:
                raise StorageFull(
                    f"the disk of {directory} has {free} bytes free, and keep_free_bytes keeps {reserved} for "
                    "checkpoints and acknowledgements; free some space: sends are taken again as soon as there is room"
                )
            room, least = min(room, free - size - reserved), min(least, reserved)
        return room, least
