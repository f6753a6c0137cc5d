"""Archiving: sealed segments of a data directory, byte for byte. A run may be killed at any moment, and repeated.

Two segments are copied at once, each by a thread: while one is synced the other is read and written. They get their
names one after another, in the order of their positions: a stream that has read one looks for nothing before it.

A run of `qmq archive`, or of the same as a job of Spark: from a data directory to wherever the archive is.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.archive.archive import MANIFEST, SEGMENTS, directory_of, manifests
from qmq.archive.data_directory import DataDirectory, is_data_directory, open_data_directory
from qmq.archive.files import Files, Progress, Reading, WritableFiles
from qmq.archive.locations import writable_files_at
from qmq.archive.lock import ArchiveLock, this_process
from qmq.archive.manifest import Manifest
from qmq.archive.segments import INDEX, MESSAGES, Index, SegmentSource
from qmq.errors import BadBytes, DirectoryInUse, InvalidOption, StorageError, StorageFull
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC
from qmq.storage.message_log.archive_receipt import ArchiveReceipt
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.message_log.sparse_index import pack_index_header

UNFINISHED: Final = "_"
#: Segments that are copied at once.
AT_ONCE: Final = 2


@dataclass(slots=True)
class Archived:
    """What a run did. Segments; bytes of message logs."""

    copied: int = 0
    copied_bytes: int = 0
    messages: int = 0
    #: Those that were there already.
    kept: int = 0
    #: Those that a broker still writes.
    left: int = 0
    #: Those that retention dropped before they could be copied.
    dropped: int = 0
    #: Files of killed runs that were removed.
    removed: int = 0
    #: Receipts that were written.
    receipts: int = 0


def archive_segments(
    source: DataDirectory,
    files: WritableFiles,
    lock: ArchiveLock,
    clock: Callable[[], int],
    progress: Callable[[int, int], None] | None = None,
) -> Archived:
    """Copy every sealed segment that is not there yet, and write receipts of those that are.

    *lock* is held; *progress* hears of bytes done and to do. Raises DirectoryInUse when another run has taken the
    archive, BadBytes, StorageFull, StorageFailed.
    """
    return _Run(source, files, lock, clock, progress).run()


class _Copy(NamedTuple):
    """A segment whose copy is made, under other names than its own, or is whole."""

    segment: SegmentSource
    path: str
    manifest: Future[Manifest]


class _Ended(Exception):
    """The run has ended: a thread that copies for it is to go no further."""


class _Run:
    def __init__(
        self,
        source: DataDirectory,
        files: WritableFiles,
        lock: ArchiveLock,
        clock: Callable[[], int],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._files = files
        self._lock = lock
        self._clock = clock
        self._progress = progress
        self._total = 0
        self._done = Archived()
        #: What threads that copy have to tell: bytes. One that is done tells of none.
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended = False
        self._copied_bytes = 0

    def run(self) -> Archived:
        there = dict(manifests(self._files))
        wanted = []
        for segment in self._source.segments:
            path = f"{directory_of(segment.store_id, segment.partition)}/{segment.base:016x}"
            manifest = there.get(path)
            if not segment.sealed:
                self._done.left += 1
            elif manifest is not None and manifest.end >= segment.end and self._vouches(segment, path, manifest):
                self._done.kept += 1
            else:
                wanted.append((path, segment))
        self._total = sum(segment.end - segment.base for _, segment in wanted)
        self._copy_all(wanted)
        self._done.removed = _remove_unfinished(self._files, self._lock)
        return self._done

    def _vouches(self, segment: SegmentSource, path: str, manifest: Manifest) -> bool:
        """Whether a copy that is there has a receipt, or is whole and gets one: another run may have been killed
        before it wrote it, and what has rotten since is copied again.
        """
        receipt = self._source.receipt(segment)
        if receipt is not None and receipt.destination == self._files.name:
            return True
        try:
            self._verify(path, manifest, lambda _: self._lock.renew())
        except BadBytes:
            return False
        self._write_receipt(segment, manifest)
        return True

    def _copy_all(self, wanted: list[tuple[str, SegmentSource]]) -> None:
        left = deque(wanted)
        try:
            self._copy_each(left, AT_ONCE)
        except StorageFull:  # there may be room for one yet
            self._ended, self._copied_bytes = False, self._done.copied_bytes
            self._copy_each(left, 1)

    def _copy_each(self, left: deque[tuple[str, SegmentSource]], at_once: int) -> None:
        """Copy segments, so many at once; *left* has those then that are not there yet, and nothing is left of them
        where the archive is full.
        """
        threads = ThreadPoolExecutor(at_once, "qmq-archive")
        begun = (self._begin(threads, segment, path) for path, segment in tuple(left))
        under_way = deque(islice(begun, at_once))
        try:
            while under_way:
                self._wait_for(under_way[0].manifest)
                under_way.extend(islice(begun, at_once - 1))
                self._finish(under_way[0])
                under_way.popleft()
                left.popleft()
                if not under_way:
                    under_way.extend(islice(begun, 1))
        except StorageFull:
            self._end(threads)
            self._remove(under_way)
            raise
        finally:
            self._end(threads)

    def _begin(self, threads: ThreadPoolExecutor, segment: SegmentSource, path: str) -> _Copy:
        manifest = threads.submit(self._copy, segment, path)
        manifest.add_done_callback(lambda _: self._told.put(0))
        return _Copy(segment, path, manifest)

    def _wait_for(self, manifest: Future[Manifest]) -> None:
        """Hear meanwhile of what was copied."""
        while not (manifest.done() and self._told.empty()):
            size = self._told.get()
            self._lock.renew()
            self._copied_bytes += size
            if size and self._progress is not None:
                self._progress(self._copied_bytes, self._total)

    def _end(self, threads: ThreadPoolExecutor) -> None:
        """Nobody copies any more, and nothing is told of."""
        self._ended = True
        threads.shutdown(cancel_futures=True)
        self._told = queue.SimpleQueue()

    def _remove(self, copies: Iterable[_Copy]) -> None:
        """What was copied of segments takes room that others need. Another run may have the archive by now."""
        with suppress(StorageError, DirectoryInUse):
            self._lock.confirm()
            for copy in copies:
                self._files.remove(_unfinished(copy.path) + MESSAGES)

    def _finish(self, copy: _Copy) -> None:
        """Give a copy that is whole its own names, and say so in the data directory."""
        try:
            manifest = copy.manifest.result()
        except (FileNotFoundError, BadBytes):
            if self._source.has(copy.segment):
                raise
            self._done.dropped += 1
            return
        self._put_in_place(copy.path, manifest)
        self._write_receipt(copy.segment, manifest)
        self._done.copied += 1
        self._done.copied_bytes += manifest.messages_bytes
        self._done.messages += manifest.messages

    def _copy(self, segment: SegmentSource, path: str) -> Manifest:
        """Copy one segment under other names, and verify the copy."""
        files = self._files
        unfinished = _unfinished(path)
        files.make_directory(path.rpartition("/")[0])
        with self._source.files.open(segment.path) as reading:
            size = min(segment.end - segment.base, reading.size())  # less of one that was cut: what is there
            crc = files.copy_in(reading, size, unfinished + MESSAGES, self._copied)
            found = _batches_in(reading, segment, self._source.files)
        index_bytes, index_crc = self._copy_index(segment, unfinished + INDEX)
        manifest = Manifest(
            store_id=segment.store_id.hex(),
            partition=segment.partition,
            base=segment.base,
            end=segment.end,
            batches=found.batches,
            messages=found.messages,
            first_stored_at_us=found.first_stored_at_us,
            last_stored_at_us=found.last_stored_at_us,
            messages_bytes=size,
            messages_crc=crc,
            index_bytes=index_bytes,
            index_crc=index_crc,
            archived_at_us=self._clock(),
        )
        self._verify(unfinished, manifest, self._checked)
        return manifest

    def _copy_index(self, segment: SegmentSource, path: str) -> tuple[int, int]:
        """The index as it is, or as a sealed one is written where there is none; gives its bytes and their crc32c."""
        if segment.index_path is not None:
            with self._source.files.open(segment.index_path) as reading:
                size = reading.size()
                return size, self._files.copy_in(reading, size, path, self._checked)
        packed = _packed(segment, segment.batches(self._source.files))
        self._files.write(path, packed)
        return len(packed), crc32c(packed)

    def _put_in_place(self, path: str, manifest: Manifest) -> None:
        """Give a copy its names, the manifest last."""
        unfinished = _unfinished(path)
        self._files.write(unfinished + MANIFEST, manifest.pack())
        self._lock.confirm()
        for suffix in (MESSAGES, INDEX, MANIFEST):
            self._files.rename(unfinished + suffix, path + suffix)

    def _copied(self, size: int) -> None:
        """A thread has copied so much."""
        if self._ended:
            raise _Ended
        self._told.put(size)

    def _checked(self, _: int) -> None:
        """A thread has read so much of its copy."""
        self._copied(0)

    def _verify(self, path: str, manifest: Manifest, progress: Progress) -> None:
        """Raise BadBytes unless the files there are what the manifest says."""
        for suffix, size, crc in (
            (MESSAGES, manifest.messages_bytes, manifest.messages_crc),
            (INDEX, manifest.index_bytes, manifest.index_crc),
        ):
            try:
                found = self._files.checksum(path + suffix, progress)
            except FileNotFoundError as error:
                raise BadBytes(f"{path + suffix} in {self._files.name} is missing; run it again") from error
            if found != (size, crc):
                raise BadBytes(
                    f"{path + suffix} in {self._files.name} has {found[0]} bytes with checksum {found[1]:08x}, "
                    f"its source {size} with {crc:08x}; run it again, and check the disks"
                )

    def _write_receipt(self, segment: SegmentSource, manifest: Manifest) -> None:
        """Say in the data directory that the copy was verified."""
        self._source.write_receipt(
            segment,
            ArchiveReceipt(
                store_id=manifest.store_id,
                partition=manifest.partition,
                base=manifest.base,
                end=manifest.end,
                messages_bytes=manifest.messages_bytes,
                messages_crc=manifest.messages_crc,
                destination=self._files.name,
                verified_at_us=self._clock(),
            ),
        )
        self._done.receipts += 1


def _unfinished(path: str) -> str:
    """What a copy is called until it is whole."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/{UNFINISHED}{name}"


def _packed(segment: SegmentSource, index: Index) -> bytes:
    """The index as a sealed one is written."""
    body = index.tobytes()
    head = pack_index_header(
        SegmentOwner(segment.store_id, segment.partition),
        segment.base,
        sealed=True,
        covered=segment.end,
        count=len(index),
        body_crc=crc32c(body),
    )
    return head + body


class _Batches(NamedTuple):
    """What there is of a segment; times 0 where that is nothing."""

    batches: int
    messages: int
    first_stored_at_us: int
    last_stored_at_us: int


def _batches_in(reading: Reading, segment: SegmentSource, files: Files) -> _Batches:
    """By its index, and messages by what the batches say that they have."""
    count = messages = first = last = 0
    for batches in segment.pieces(files):
        messages += sum(_messages_at(reading, place) for place in (batches["position"] - segment.base).tolist())
        if len(batches):
            first = first if count else int(batches["stored_at_us"][0])
            last = int(batches["stored_at_us"][-1])
        count += len(batches)
    return _Batches(count, messages, first, last)


def _messages_at(reading: Reading, offset: int) -> int:
    head = reading.read(offset, BATCH_HEADER_SIZE)
    if len(head) < BATCH_HEADER_SIZE or (header := parse_header(head)).magic != BATCH_MAGIC:
        return 0
    return header.messages


def _remove_unfinished(files: WritableFiles, lock: ArchiveLock) -> int:
    """Remove what killed runs have left: this one has finished, and no other runs."""
    left = [name for name in files.names("") if name.startswith(UNFINISHED) and name not in lock.names]
    for directory in files.names(SEGMENTS):
        names = files.names(f"{SEGMENTS}/{directory}")
        left += [f"{SEGMENTS}/{directory}/{name}" for name in names if name.startswith(UNFINISHED)]
    for path in left:
        files.remove(path)
    return len(left)


class ArchiveRun(NamedTuple):
    """What a run has: what it archives, the archive, and the hold on that."""

    source: DataDirectory
    files: WritableFiles
    lock: ArchiveLock


def archive_to(
    source: Path,
    destination: str,
    clock: Callable[[], int],
    *,
    settings: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Archived:
    """Archive the data directory *source*; *clock* gives microseconds since 1970, *settings* are Hadoop's.

    Raises InvalidOption, DirectoryInUse while another run goes on, and what ``archive_segments`` does.
    """
    with open_run(source, destination, clock, settings) as run:
        return archive_segments(run.source, run.files, run.lock, clock, progress)


@contextmanager
def open_run(
    source: Path, destination: str, clock: Callable[[], int], settings: Mapping[str, str] | None = None
) -> Iterator[ArchiveRun]:
    """Take hold of an archive, to archive a data directory, until the block ends. Raises as ``archive_to`` does."""
    if not is_data_directory(source):
        raise InvalidOption(f"{source} is no data directory: it has neither store-a nor store-b")
    with writable_files_at(destination, settings) as files:
        files.make_directory("")
        with ArchiveLock(files, clock, this_process()) as lock, lock.renewed():
            yield ArchiveRun(open_data_directory(source), files, lock)
