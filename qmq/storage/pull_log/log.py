"""Writing the pull log: records are staged, written with one call a turn, and synced by checkpoints.

records.py describes the bytes and reads them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from crc32c import crc32c

from qmq.errors import StorageError, StorageFull, SyncFailed
from qmq.format.layout import PULL_FILE_HEADER_SIZE, PULL_RECORD_HEADER, PULL_RECORD_HEADER_SIZE
from qmq.storage.disk.disk import WRITE_BYTES, Disk, failure, make_directory, write_fully
from qmq.storage.pull_log.records import (
    MAX_RECORD_BYTES,
    SEALED,
    list_pull_files,
    pack_pull_header,
    pull_file_generation,
    pull_file_path,
)

FILE_BYTES: Final = 4 << 20
_pack_sealed: Final = SEALED.pack
_pack_header: Final = PULL_RECORD_HEADER.pack

#: [thread] Makes the next start assume that unsynced bytes may be gone. Raises StorageFull or StorageFailed.
ForgetBoot = Callable[[], object]


def _nothing_to_forget() -> None:
    """Do nothing, where no store is."""


class PullSync:
    """The files that must be synced before a checkpoint may claim the log up to ``position``."""

    def __init__(
        self, disk: Disk, directory: Path, position: int, files: list[tuple[int, Path]], forget_boot: ForgetBoot
    ) -> None:
        self._disk = disk
        self._forget_boot = forget_boot
        self._directory = directory
        self.files = files
        self.position = position
        self.failed = False

    def run(self) -> None:
        """[thread] Sync them. Raises StorageFailed, or SyncFailed: what was written since the last sync may be lost
        then.
        """
        at = self._directory
        try:
            for fd, at in self.files:  # noqa: B007
                self._disk.fdatasync(fd)
            if self.files:
                at = self._directory
                self._disk.fsync_directory(at)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the directory was not even opened
                raise failure(error, "sync", at) from error
            self.failed = True
            # Records of a failed sync read well until they leave memory, so the next start must not trust them.
            with suppress(StorageError):  # the next checkpoint tries again
                self._forget_boot()
            raise SyncFailed(
                f"{failure(error, 'sync', at)}; no pull or acknowledgement is confirmed until the broker has "
                "been restarted and has read it again"
            ) from error


class PullLog:
    """The pull log that is written: one file, and those before it. Records are staged, then written together. All of it
    but ``PullSync.run`` belongs to one thread.
    """

    def __init__(
        self, disk: Disk, directory: Path, store_id: bytes, secret: bytes, base: int, now_us: int, file_bytes: int,
        generation: int = 1, cut: int | None = None, forget_boot: ForgetBoot = _nothing_to_forget,
    ) -> None:  # fmt: skip
        """Go on at position *base*, in a new file; if the disk has no space for it now, in the rest of the last file,
        or else with the first write that finds space. Raises StorageFailed.

        With *cut* the generation is a new one, and records from *cut* up to *base* do not count: the new file's header
        says so, and is on disk before anything else is written. *forget_boot* is called when a sync has failed.
        """
        self._disk = disk
        self._forget_boot = forget_boot
        self._directory = directory
        self._store_id = store_id
        self._seed = crc32c(secret)
        #: Returns the wall clock, for the headers of files.
        self.clock: Callable[[], int] = lambda: now_us
        self._generation = generation
        self._cut = cut  # None once a file's header has it
        self._file_bytes = file_bytes
        self._staged: list[tuple[int, bytes]] = []
        #: Stages a record, its kind and payload, for the next ``write``. No call of Python: each message has two.
        self.record: Callable[[tuple[int, bytes]], None] = self._staged.append
        #: Begin and end of each file that this process has filled.
        self.full: list[tuple[int, int]] = []
        self._began_at = base
        #: Full files, closed once a sync has covered them.
        self._full: list[tuple[int, Path]] = []
        #: Why nothing may be confirmed any more, after a failed sync.
        self.broken: str | None = None
        #: Syncs that run beside those of checkpoints.
        self._lent: list[PullSync] = []
        self._fd, self._path, self._base, self._limit = -1, pull_file_path(directory, base), base, base
        #: The position behind the last record that is written.
        self.end = base
        #: The position behind the last record known to be on disk.
        self.synced_end = base
        try:
            self._begin_file(base, 0)
        except StorageFull:
            self._go_on()

    def _go_on(self) -> None:
        """Write on in the last file, which was made with space for more: nothing behind its end passes for a record.
        Not when records were lost before this start: a header has to have the new generation first.
        """
        base = max((base for base in list_pull_files(self._disk, self._directory) if base < self.end), default=None)
        if base is None or self._cut is not None:
            return
        if pull_file_generation(self._disk, self._directory, self._store_id, base) != self._generation:
            return
        path = pull_file_path(self._directory, base)
        try:
            fd = self._disk.open(path, os.O_RDWR)
            limit = base + self._disk.size(fd)
        except OSError as error:
            raise failure(error, "open", path) from error
        if limit <= self.end:
            self._disk.close(fd)
            return
        self._fd, self._path, self._base, self._limit = fd, path, base, limit

    def _begin_file(self, base: int, needed: int) -> None:
        """Make a file with space for at least *needed* bytes of records."""
        if self._fd < 0:
            make_directory(self._disk, self._directory)
        path = pull_file_path(self._directory, base)
        size = max(self._file_bytes, PULL_FILE_HEADER_SIZE + needed)
        cut = base if self._cut is None else self._cut
        header = pack_pull_header(self._store_id, base, self.clock(), self._generation, cut)
        fd = -1
        try:
            fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._disk.allocate(fd, size)
            write_fully(self._disk, fd, [header], 0)
            if self._cut is not None:
                self._disk.fdatasync(fd)
                self._disk.fsync_directory(self._directory)
        except OSError as error:
            if fd >= 0:
                self._disk.close(fd)
                with suppress(OSError):
                    self._disk.unlink(path)
            raise failure(error, "create", path) from error
        self._fd, self._path, self._base, self._limit = fd, path, base, base + size
        self._cut = None
        self.end = base + PULL_FILE_HEADER_SIZE

    def stage(self, kind: int, payload: bytes) -> None:
        """Stage a record for the next ``write``."""
        self.record((kind, payload))

    @property
    def staged(self) -> int:
        """The number of records that are not written yet."""
        return len(self._staged)

    def settle(self) -> None:
        """Begin a checkpoint: staged records have been written. When nothing can be written any more they are dropped:
        no client got a confirmation, and the checkpoint has what they say.
        """
        if self.broken is not None:
            self._staged.clear()
        assert not self._staged

    def write(self) -> None:
        """Write all that is staged, with one call to the system if it fits one file.

        Raises StorageFull, StorageFailed or SyncFailed; what is not written stays staged, and the next write may work.
        """
        if self.broken is not None:
            raise SyncFailed(self.broken)
        staged, seed = self._staged, self._seed
        while staged:
            # As many records as the file has space for, with checksums for their positions.
            buffers: list[bytes] = []
            start, limit = self.end, self._limit
            end = start
            for kind, payload in staged:
                record = PULL_RECORD_HEADER_SIZE + len(payload)
                assert record <= MAX_RECORD_BYTES
                if end + record > limit:
                    break
                crc = crc32c(_pack_sealed(end, record, kind) + payload, seed)  # as record_crc
                buffers += (_pack_header(record, crc, kind), payload)
                end += record
            if not buffers:
                self._roll()
                continue
            data, size, offset = b"".join(buffers), end - start, start - self._base
            try:
                if size > WRITE_BYTES or self._disk.pwritev(self._fd, (data,), offset) != size:
                    write_fully(self._disk, self._fd, [data], offset)
            except OSError as error:
                raise failure(error, "write", self._path, start) from error
            self.end = end
            del staged[: len(buffers) // 2]

    def _roll(self) -> None:
        """Begin another file that has space for the next record."""
        full, base = (self._fd, self._path), self._base
        self._begin_file(self.end, PULL_RECORD_HEADER_SIZE + len(self._staged[0][1]))
        if full[0] >= 0:
            self._full.append(full)
            if base >= self._began_at:  # earlier files were read at the start
                self.full.append((base, self._base))

    def _files(self) -> list[tuple[int, Path]]:
        return [*self._full, (self._fd, self._path)] if self._fd >= 0 else []

    def begin_sync(self) -> PullSync:
        """Return the sync of all that has been written. After a failed sync it has no files: another sync would succeed
        and prove nothing.
        """
        files = [] if self.broken is not None else self._files()
        return PullSync(self._disk, self._directory, self.end, files, self._forget_boot)

    def synced(self, sync: PullSync) -> None:
        """Note that *sync* has succeeded: close the full files that it covers."""
        if self.broken is None:
            self.synced_end = max(self.synced_end, sync.position)
        while self._full and self._full[0] in sync.files and not any(self._full[0] in one.files for one in self._lent):
            self._disk.close(self._full.pop(0)[0])

    def lend_sync(self) -> PullSync:
        """Return a sync as ``begin_sync``, to run beside a checkpoint: its files stay open until ``take_back``."""
        sync = self.begin_sync()
        self._lent.append(sync)
        return sync

    def take_back(self, sync: PullSync) -> None:
        """Note that a lent sync has been run."""
        self._lent.remove(sync)

    def close(self) -> None:
        """Close all files; nothing is synced. A later write raises SyncFailed: its descriptor may be another file's."""
        for fd, _ in self._files():
            self._disk.close(fd)
        self._fd, self.broken = -1, "the broker has stopped"
        self._full.clear()
