"""Room that is kept free on the disks, so that what follows from earlier sends can be written while sends are refused.

Checkpoints with their cursors, rows, names of subjects and, once there are any, acknowledgements need some. Were sends
to take it, a full disk would keep consumers from getting on, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq.errors import StorageFull
from qmq.storage.disk.disk import Disk, failure

#: At most so much of a disk is kept free: one part of so many.
PARTS: Final = 16
#: It is measured again when so much of what is kept may have been used since.
_AGAIN_PARTS: Final = 8


class Room:
    """The room for one partition's batches: on the disk that they go to, and on that of the data directory."""

    __slots__ = ("_directories", "_disk", "_keep_bytes", "_left")

    def __init__(self, disk: Disk, directories: tuple[Path, ...], keep_bytes: int) -> None:
        """*keep_bytes* are kept free on each disk, and at most a sixteenth of it; 0: nothing is looked at."""
        self._disk = disk
        self._directories = directories
        self._keep_bytes = keep_bytes
        self._left = -1  # what may be written before it is measured again

    def take(self, size: int) -> None:
        """*size* bytes are about to be written. Raises StorageFull when too little would be left, StorageFailed."""
        if self._keep_bytes:
            self._left -= size
            if self._left < 0:
                self._measure(size)

    def measure_again(self) -> None:
        """Others write to the disks as well: measure with the next call of ``take``."""
        self._left = -1

    def _measure(self, size: int) -> None:
        left = self._keep_bytes
        for directory in self._directories:
            try:
                free, total = self._disk.room(directory)
            except OSError as error:
                raise failure(error, "see how much is free on the disk of", directory) from error
            kept = min(self._keep_bytes, total // PARTS)
            if free - size < kept:
                raise StorageFull(
                    f"the disk of {directory} has {free} bytes free, and keep_free_bytes keeps {kept} for checkpoints "
                    "and acknowledgements; free some space: sends are taken again as soon as there is room"
                )
            left = min(left, free - size - kept, kept // _AGAIN_PARTS)
        self._left = left
