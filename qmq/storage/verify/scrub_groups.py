"""Reading the files of groups again while a broker runs: runs of error logs, of dead letters and of what is delayed,
and files of the pull log that are full.

[thread] As scrub.py does it: a little at a time, through a descriptor of its own. What is bad is told of when a file is
through: only then can it be known whether the other copy of a run has it. Whoever reads a run for its items does not
need to be told: it looks at each checksum itself.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import PULL_FILE_HEADER_SIZE, PULL_RECORD_HEADER_SIZE, SCHEDULE_HEADER_SIZE
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure
from qmq.storage.error_log.sorted_runs import both_rotten, check_run_header, run_paths
from qmq.storage.verify.scrub import READ_BYTES
from qmq.storage.pull_log.records import MAX_RECORD_BYTES, pull_file_path, record_at, record_size

_CRC_SIZE: Final = 4


class GroupStep(NamedTuple):
    """What one read brought; ``is_last``: the file, or both files of the run, are through, and that is all that is bad
    in them.
    """

    size: int
    found: tuple[BadBytes, ...]
    is_last: bool


class GroupReader(Protocol):
    """Reads one file, or a run's two."""

    #: The file, or the run's first.
    path: Path

    def step(self) -> GroupStep:
        """Read on a little. Raises StorageFailed when the system refuses, for another reason than what is on disk."""

    def close(self) -> None:
        """Let go of the file."""


class _Reader:
    """A file that is read in steps; its descriptor is opened by the first."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.path = path
        self._disk = disk
        self._fd = -1
        self._reading = path
        self._found = list[BadBytes]()
        self._walk = self._walked()

    def _walked(self) -> Generator[int]:
        """The numbers of bytes that were read."""
        raise NotImplementedError

    def step(self) -> GroupStep:
        """Read on a little."""
        size = next(self._walk, None)
        return GroupStep(0, tuple(self._found), True) if size is None else GroupStep(size, (), False)

    def close(self) -> None:
        """Let go of the file."""
        self._walk.close()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _open(self, path: Path) -> bool:
        """Whether it is there."""
        self._close()
        self._reading = path
        try:
            self._fd = self._disk.open_aside(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in BAD_SECTOR:
                return False
            raise failure(error, "open", path) from error
        return True

    def _read(self, offset: int, size: int) -> bytes:
        """What the disk gives of these bytes from the first of them on."""
        buffer, done = memoryview(bytearray(size)), 0
        try:
            while done < size:
                read = self._disk.preadv_aside(self._fd, buffer[done:], offset + done)
                if read <= 0:
                    break
                done += read
        except OSError as error:
            if error.errno not in BAD_SECTOR:
                raise failure(error, "read", self._reading, offset) from error
        return bytes(buffer[:done])


class RunReader(_Reader):
    """Reads both files of a run, of so many items of *item_size* bytes."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, number: int, item_size: int, items: int) -> None:
        self._store_id = store_id
        self._number = number
        self._item_size = item_size
        self._items = items
        self._paths = run_paths(directory, number)
        super().__init__(disk, self._paths[0])

    def _walked(self) -> Generator[int]:
        bad = [np.zeros(self._items, np.bool_) for _ in self._paths]
        there = []
        for path, mine in zip(self._paths, bad, strict=True):
            there.append(self._open(path))
            if there[-1]:
                yield from self._look_at(path, mine)
            else:
                mine[:] = True
        if not any(there):
            return  # it was merged with another one meanwhile
        both = bad[0] & bad[1]
        for path, other, mine, is_there in zip(self._paths, reversed(self._paths), bad, there, strict=True):
            if not is_there:
                self._tell(f"{path} is gone; {other.name} has its items, and qmq repair makes it again")
            for start, end in _ranges(mine & ~both) if is_there else ():
                self._tell(
                    f"{path} is rotten at bytes {self._offset(start)} to {self._offset(end)}; {other.name} has what "
                    "stood there, and qmq repair mends it; see what the disk says"
                )
        for item in np.flatnonzero(both).tolist():
            self._tell(both_rotten(*self._paths, self._offset(item)))

    def _look_at(self, path: Path, bad: npt.NDArray[np.bool_]) -> Generator[int]:
        header = self._read(0, SCHEDULE_HEADER_SIZE)
        try:
            check_run_header(header, path, self._store_id, self._item_size, self._number)
        except (BadBytes, ForeignFile) as error:
            self._tell(f"{error}; what follows it is read all the same, and qmq repair mends it")
        yield len(header)
        step = READ_BYTES // self._item_size
        for start in range(0, self._items, step):
            count = min(step, self._items - start)
            data = self._read(self._offset(start), count * self._item_size)
            bad[start : start + count] = ~self._good(data, count)
            yield len(data)

    def _good(self, data: bytes, count: int) -> npt.NDArray[np.bool_]:
        good, size, view = np.zeros(count, np.bool_), self._item_size, memoryview(data)
        for item in range(min(count, len(data) // size)):
            body = view[item * size : (item + 1) * size]
            good[item] = crc32c(body[:-_CRC_SIZE]) == int.from_bytes(body[-_CRC_SIZE:], "little")
        return good

    def _offset(self, item: int) -> int:
        return SCHEDULE_HEADER_SIZE + item * self._item_size

    def _tell(self, text: str) -> None:
        self._found.append(BadBytes(text))


class PullReader(_Reader):
    """Reads a file of the pull log that ends at position *end*, where the next begins: up to the first bad place."""

    def __init__(self, disk: Disk, directory: Path, base: int, end: int, secret: bytes) -> None:
        self._base = base
        self._end = end
        self._secret = secret
        super().__init__(disk, pull_file_path(directory, base))

    def _walked(self) -> Generator[int]:
        if not self._open(self.path):
            return  # checkpoints do not need it any more
        position = self._base + PULL_FILE_HEADER_SIZE
        while position < self._end:
            view = self._view(position, READ_BYTES)
            yield len(view)
            sound = self._sound_size(view, position)
            if not sound and len(view) >= PULL_RECORD_HEADER_SIZE:  # longer than what was read, or bad
                view = self._view(position, min(record_size(view), MAX_RECORD_BYTES))
                yield len(view)
                sound = self._sound_size(view, position)
            if not sound:
                self._found.append(
                    BadBytes(
                        f"{self.path} is rotten at byte {position - self._base}, where a record was written; the next "
                        "checkpoint makes up for it; should the broker be killed before, what is not known is handed "
                        "out again; see what the disk says"
                    )
                )
                return
            position += sound

    def _view(self, position: int, size: int) -> memoryview:
        return memoryview(self._read(position - self._base, min(size, self._end - position)))

    def _sound_size(self, view: memoryview, position: int) -> int:
        """How many bytes of *view* are whole records, from its beginning on."""
        offset = 0
        while (record := record_at(view, offset, position, self._secret)) is not None:
            offset += PULL_RECORD_HEADER_SIZE + len(record.payload)
        return offset


def _ranges(chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where True stands, as [start, end)."""
    edges = np.flatnonzero(np.diff(chosen, prepend=np.False_, append=np.False_)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
