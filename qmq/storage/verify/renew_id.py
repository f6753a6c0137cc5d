"""Give a data directory another store id, and with it another id to each of its messages.

Two directories must not have one id: a clone that serves too gives other messages the same ids. Every file states the
id of its store, so this changes them all. The identity comes first, with the id that is next: from then on only another
call opens the directory, which finishes what an interrupted one left. Each step may be done twice: a file is written
anew beside itself, and then gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.format.batch import Header, header_crc_of, mark_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    CHECKPOINT_MAGIC,
    CHECKPOINT_VERSION,
    DERIVED_HEADER_SIZE,
    PULL_FILE_HEADER_SIZE,
    SCHEDULE_HEADER_SIZE,
    SEGMENT_HEADER_SIZE,
    STAMP_SEAL,
    STAMP_SEAL_OFFSET,
    STAMP_STORE,
    STAMP_STORE_OFFSET,
    STORE_ID_SIZE,
)
from qmq.storage.consumer_log.header import ENTRIES_SUFFIX, ORDER_SUFFIX
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk, failure, read_fully, write_atomically, write_fully
from qmq.storage.disk.envelope import pack_envelope, read_envelope
from qmq.storage.error_log.sorted_runs import SUFFIXES as RUN_SUFFIXES
from qmq.storage.key_index.key_file import SUFFIX as KEYS_SUFFIX
from qmq.storage.message_log.archive_receipt import SUFFIX as RECEIPT_SUFFIX
from qmq.storage.message_log.reader import WINDOW_BYTES, Scanner
from qmq.storage.message_log.segment import (
    ForeignSegment,
    Segment,
    SegmentOwner,
    list_bases,
)
from qmq.storage.message_log.sparse_index import SUFFIX as INDEX_SUFFIX
from qmq.storage.meta.checkpoint import checkpoint_path, list_checkpoints
from qmq.storage.meta.identity import COPY_NAMES, Identity, IdentityFile, newest, read_copies
from qmq.storage.meta.subjects import SUBJECTS_HEADER_SIZE
from qmq.storage.pull_log.kept import KEPT_SUFFIX
from qmq.storage.pull_log.records import PULL_LOG_NAME
from qmq.storage.pull_log.records import SUFFIX as PULLS_SUFFIX
from qmq.storage.types import CONSUMER_LOG_NAME, DELAYED_NAME, DUE_NAME, GROUPS_NAME, SUBJECTS_NAME
from qmq.storage.verify.repair import check_is_ours

#: Where the headers of files have the store id: after magic, version and another u16; in the registry, after magic and
#: version.
_STORE_ID_OFFSET: Final = 12
_SUBJECTS_STORE_ID_OFFSET: Final = 10
_CRC_SIZE: Final = 4
#: Files in the directory of a partition, and in that of its consumer log, that begin with the header of a derived file.
_DERIVED: Final = (INDEX_SUFFIX, KEYS_SUFFIX, ENTRIES_SUFFIX, ORDER_SUFFIX)


class RenewedId(NamedTuple):
    """The store ids before and after."""

    former: bytes
    store_id: bytes


def is_renewal_unfinished(directory: Path, disk: Disk) -> bool:
    """Return whether a call of ``renew_id`` was interrupted. Raises StorageFailed."""
    copies = read_copies(disk, directory)
    return any(copy.identity is not None for copy in copies) and bool(newest(*copies).next_store_id)


def renew_id(directory: Path, disk: Disk, now_us: int) -> RenewedId:
    """Give a data directory and its delay log a random store id, or finish what an interrupted call began.

    The directory is whole, and no broker uses it. Raises InvalidOption when there is no data directory, DirectoryInUse,
    BadBytes without a good identity, StorageFull, StorageFailed.
    """
    check_is_ours(directory, disk)
    lock = DirectoryLock.acquire(disk, directory, now_us)
    try:
        former = newest(*read_copies(disk, directory))
        store_id = former.next_store_id or disk.random(STORE_ID_SIZE)
        _renew_one(disk, directory, store_id)
    except OSError as error:
        raise failure(error, "renew the id of", directory) from error
    finally:
        lock.release()
    return RenewedId(former.store_id, store_id)


def _renew_one(disk: Disk, directory: Path, store_id: bytes) -> None:
    """Renew the id of a directory, and first that of its delay log."""
    copies = read_copies(disk, directory)
    identity = newest(*copies)
    if identity.store_id == store_id:  # an interrupted call came so far
        return
    file = IdentityFile(disk, directory, identity, COPY_NAMES[copies[1].identity is None])
    if not identity.next_store_id:
        file.change(lambda before: replace(before, next_store_id=store_id))
    delayed = directory / DELAYED_NAME
    if any(disk.exists(delayed / name) for name in COPY_NAMES):
        _renew_one(disk, delayed, store_id)
    _Renewal(disk, directory, identity, store_id).run()
    file.change(lambda before: _renewed(before, store_id))


def _renewed(identity: Identity, store_id: bytes) -> Identity:
    former = (*identity.former_store_ids, identity.store_id)
    return replace(identity, store_id=store_id, next_store_id=b"", former_store_ids=former)


class _Renewal:
    """The change of all files of one directory, except its identity and its delay log."""

    def __init__(self, disk: Disk, directory: Path, identity: Identity, store_id: bytes) -> None:
        self._disk = disk
        self._directory = directory
        self._identity = identity
        self._store_id = store_id

    def run(self) -> None:
        """Change them. Raises OSError, StorageError."""
        for number, partition in enumerate(self._identity.partitions):
            log = self._directory / partition.directory
            for base in list_bases(self._disk, log):
                self._renew_segment(log, base, number)
            rows = self._directory / CONSUMER_LOG_NAME / str(number)
            for path in (*self._files(log), *self._files(rows)):
                if path.suffix in _DERIVED:
                    self._renew_header(path, DERIVED_HEADER_SIZE, _STORE_ID_OFFSET)
                elif path.suffix == RECEIPT_SUFFIX:  # no archive has it under its new id
                    self._disk.unlink(path)
        for path in self._files(self._directory / PULL_LOG_NAME):
            if path.suffix in (PULLS_SUFFIX, KEPT_SUFFIX):
                self._renew_header(path, PULL_FILE_HEADER_SIZE, _STORE_ID_OFFSET)
        for name in (GROUPS_NAME, DUE_NAME):
            for path in self._files(self._directory / name):
                if path.suffix in RUN_SUFFIXES:
                    self._renew_header(path, SCHEDULE_HEADER_SIZE, _STORE_ID_OFFSET)
        self._renew_header(self._directory / SUBJECTS_NAME, SUBJECTS_HEADER_SIZE, _SUBJECTS_STORE_ID_OFFSET)
        for number in list_checkpoints(self._disk, self._directory):
            self._renew_checkpoint(checkpoint_path(self._directory, number))

    def _files(self, directory: Path) -> Iterator[Path]:
        """Yield all files in a directory and those below it; none if there is no such directory."""
        if not self._disk.exists(directory):
            return
        for name in self._disk.listdir(directory):
            path = directory / name
            if self._disk.kind(path) == "a directory":
                yield from self._files(path)
            else:
                yield path

    def _renew_header(self, path: Path, size: int, offset: int) -> None:
        """Write a file anew with the new id in its header, unless that is bad or missing, as it then stays."""
        if not self._disk.exists(path):
            return
        fd = self._disk.open(path, os.O_RDONLY)
        try:
            header = read_fully(self._disk, fd, size, 0)
            if len(header) == size and header[-_CRC_SIZE:] == _crc(header[:-_CRC_SIZE]):
                with self._anew(path, fd) as draft:
                    self._write_header(fd, draft, size, offset)
        finally:
            self._disk.close(fd)

    def _write_header(self, fd: int, draft: int, size: int, offset: int) -> None:
        """Write the good header of a file into the draft, with the new id at *offset*."""
        header = bytearray(read_fully(self._disk, fd, size, 0))
        header[offset : offset + STORE_ID_SIZE] = self._store_id
        header[-_CRC_SIZE:] = _crc(header[:-_CRC_SIZE])
        write_fully(self._disk, draft, [bytes(header)], 0)

    @contextmanager
    def _anew(self, path: Path, fd: int) -> Iterator[int]:
        """Give the block a copy of the file at *path*, which is open as *fd*, to be changed; it replaces the file."""
        path_of_draft = path.with_name(path.name + ".tmp")
        draft = self._disk.open(path_of_draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            size, end = self._disk.size(fd), self._disk.data_end(fd)
            for offset in range(0, end, WINDOW_BYTES):
                piece = read_fully(self._disk, fd, min(WINDOW_BYTES, end - offset), offset)
                write_fully(self._disk, draft, [piece], offset)
            self._disk.ftruncate(draft, size)  # zeros at the end take no space
            yield draft
            self._disk.fsync(draft)
        finally:
            self._disk.close(draft)
        self._disk.rename(path_of_draft, path)
        self._disk.fsync_directory(path.parent)

    def _renew_checkpoint(self, path: Path) -> None:
        opened = read_envelope(self._disk, path, CHECKPOINT_MAGIC, CHECKPOINT_VERSION)
        if opened.content is not None:
            content = {**opened.content, "store_id": self._store_id}
            write_atomically(self._disk, path, pack_envelope(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, content))

    def _renew_segment(self, log: Path, base: int, number: int) -> None:
        """Write a segment anew with the new id in its header and in the headers of all its batches that have good ones;
        all other bytes stay.
        """
        segment = Segment.open(self._disk, log, base, 0, writable=False)
        try:
            try:
                previous_end = segment.previous_end(SegmentOwner(self._identity.store_id, number))
            except ForeignSegment:  # renewed already, or of another directory: as before, it does not count
                return
            with self._anew(segment.path, segment.fd) as draft:
                if previous_end is not None:
                    self._write_header(segment.fd, draft, SEGMENT_HEADER_SIZE, _STORE_ID_OFFSET)
                self._renew_batches(segment, draft)
        finally:
            segment.close()

    def _renew_batches(self, segment: Segment, fd: int) -> None:
        secret = self._identity.secret

        def renew(header: Header, batch: memoryview) -> None:
            front = bytearray(batch[: header.data_start])
            STAMP_STORE.pack_into(front, STAMP_STORE_OFFSET, header.partition, self._store_id)
            crc = header_crc_of(memoryview(front), header.data_start)
            STAMP_SEAL.pack_into(front, STAMP_SEAL_OFFSET, crc, mark_of(secret, header.position, crc))
            write_fully(self._disk, fd, [bytes(front[:BATCH_HEADER_SIZE])], header.position - segment.base)

        scanner = Scanner(self._disk, secret, self._identity.store_id, renew)
        scanner.scan(segment, segment.base, segment.base + segment.size(), vouched=True)


def _crc(data: bytes | bytearray) -> bytes:
    return crc32c(data).to_bytes(_CRC_SIZE, "little")
