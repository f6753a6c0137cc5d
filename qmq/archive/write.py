"""Archive the sealed segments of a data directory byte for byte. A run may be killed at any moment and repeated.

Two threads copy a segment each: while one syncs, the other reads and writes. The copies get their names in the order of
positions, so that a stream that has read one needs no earlier one.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.archive.archive import MANIFEST, SEGMENTS, directory_of, manifests
from qmq.archive.data_directory import DataDirectory, is_data_directory, open_data_directory
from qmq.archive.files import Files, LocalFiles, Progress, Reading, WritableFiles
from qmq.archive.keys import KEYS, key_file_of, keys_path_of, make_keys
from qmq.archive.locations import writable_files_at
from qmq.archive.lock import ArchiveLock, this_process
from qmq.archive.manifest import Manifest
from qmq.archive.same_bytes import check_same
from qmq.archive.segments import INDEX, MESSAGES, Index, SegmentSource
from qmq.errors import BadBytes, DirectoryInUse, InvalidOption, StorageError, StorageFull
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC
from qmq.storage.message_log.archive_receipt import ArchiveReceipt
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.message_log.sparse_index import pack_index_header

UNFINISHED: Final = "_"
#: How many segments are copied at once.
AT_ONCE: Final = 2


@dataclass(slots=True)
class Archived:
    """The counts of a run: segments, and bytes of message logs."""

    copied: int = 0
    copied_bytes: int = 0
    messages: int = 0
    #: Segments that were archived before.
    kept: int = 0
    #: Segments that a broker still writes.
    left: int = 0
    #: Segments that retention dropped before they could be copied.
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
    """Copy every sealed segment that the archive lacks, and write the receipts that are missing.

    *lock* is held; *progress* takes the bytes done and in all. Raises DirectoryInUse if another run has taken the
    archive, BadBytes, StorageFull, StorageFailed.
    """
    return _Run(source, files, lock, clock, progress).run()


class _Copy(NamedTuple):
    """A segment whose copy is being made under other names, or is complete."""

    segment: SegmentSource
    path: str
    manifest: Future[Manifest]


class _RunEnded(Exception):
    """Raised in a thread that copies, to end it because the run has ended."""


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
        #: The sizes that the copying threads have copied; a thread that has finished adds a 0.
        self._copied_sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._has_ended = False
        self._copied_bytes = 0

    def run(self) -> Archived:
        there = dict(manifests(self._files))
        wanted = []
        for segment in self._source.segments:
            path = f"{directory_of(segment.store_id, segment.partition)}/{segment.base:016x}"
            manifest = there.get(path)
            if not segment.sealed:
                self._done.left += 1
            elif manifest is not None and self._has_good_copy(segment, path, manifest):
                self._done.kept += 1
            else:
                wanted.append((path, segment))
        self._total = sum(segment.end - segment.base for _, segment in wanted)
        self._copy_all(wanted)
        self._done.removed = _remove_unfinished(self._files, self._lock)
        return self._done

    def _has_good_copy(self, segment: SegmentSource, path: str, manifest: Manifest) -> bool:
        """Return whether an existing copy goes as far as its source, and has a receipt, or is good and gets one: a
        killed run may have left it without. A damaged copy is made again. Raises ForeignFile if it is of other batches.
        """
        receipt = self._source.receipt(segment)
        if receipt is not None and receipt.destination == self._files.name and _is_receipt_of(receipt, manifest):
            return True
        try:
            same = check_same(self._source, segment, self._files, path, manifest, lambda _: self._lock.renew())
            if manifest.end < segment.end:
                return False
            self._verify(path, manifest, lambda _: self._lock.renew())
        except BadBytes:
            return False
        except FileNotFoundError:
            return not self._source.has(segment)  # else its copy is gone
        self._write_receipt(segment, *same)
        return True

    def _copy_all(self, wanted: list[tuple[str, SegmentSource]]) -> None:
        left = deque(wanted)
        try:
            self._copy_each(left, AT_ONCE)
        except StorageFull:  # there may be enough space for one
            self._has_ended, self._copied_bytes = False, self._done.copied_bytes
            self._copy_each(left, 1)

    def _copy_each(self, left: deque[tuple[str, SegmentSource]], at_once: int) -> None:
        """Copy segments, *at_once* at a time, and remove each from *left* when it is done. If the archive is full,
        remove the incomplete copies.
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
        manifest.add_done_callback(lambda _: self._copied_sizes.put(0))
        return _Copy(segment, path, manifest)

    def _wait_for(self, manifest: Future[Manifest]) -> None:
        """Wait for a copy, and report progress meanwhile."""
        while not (manifest.done() and self._copied_sizes.empty()):
            size = self._copied_sizes.get()
            self._lock.renew()
            self._copied_bytes += size
            if size and self._progress is not None:
                self._progress(self._copied_bytes, self._total)

    def _end(self, threads: ThreadPoolExecutor) -> None:
        """Stop the copying threads, and discard their reports."""
        self._has_ended = True
        threads.shutdown(cancel_futures=True)
        self._copied_sizes = queue.SimpleQueue()

    def _remove(self, copies: Iterable[_Copy]) -> None:
        """Remove incomplete copies, whose space other files need. Another run may have the archive by now."""
        with suppress(StorageError, DirectoryInUse):
            self._lock.confirm()
            for copy in copies:
                self._files.remove(_unfinished(copy.path) + MESSAGES)

    def _finish(self, copy: _Copy) -> None:
        """Rename a complete copy to its own names, and write its receipt."""
        try:
            manifest = copy.manifest.result()
        except (FileNotFoundError, BadBytes):
            if self._source.has(copy.segment):
                raise
            self._done.dropped += 1
            return
        self._put_in_place(copy.path, manifest)
        self._write_receipt(copy.segment, manifest.messages_bytes, manifest.messages_crc)
        self._done.copied += 1
        self._done.copied_bytes += manifest.messages_bytes
        self._done.messages += manifest.messages

    def _copy(self, segment: SegmentSource, path: str) -> Manifest:
        """Copy one segment under other names, and verify the copy."""
        files = self._files
        unfinished = _unfinished(path)
        files.make_directory(path.rpartition("/")[0])
        with self._source.files.open(segment.path) as reading:
            size = min(segment.end - segment.base, reading.size())  # a segment that was cut has less
            crc = files.copy_in(reading, size, unfinished + MESSAGES, self._copied)
            found = _count_batches(reading, segment, self._source.files)
        index_bytes, index_crc = self._copy_index(segment, unfinished + INDEX)
        keys_bytes, keys_crc = self._copy_keys(segment, unfinished + KEYS)
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
            keys_bytes=keys_bytes,
            keys_crc=keys_crc,
            archived_at_us=self._clock(),
        )
        self._verify(unfinished, manifest, self._verified)
        return manifest

    def _copy_index(self, segment: SegmentSource, path: str) -> tuple[int, int]:
        """Copy the index, or write one if the segment has none; return its size and crc32c."""
        if segment.index_path is not None:
            with self._source.files.open(segment.index_path) as reading:
                size = reading.size()
                return size, self._files.copy_in(reading, size, path, self._verified)
        packed = _index_bytes(segment, segment.batches(self._source.files))
        self._files.write(path, packed)
        return len(packed), crc32c(packed)

    def _copy_keys(self, segment: SegmentSource, path: str) -> tuple[int, int]:
        """Copy the key index, or make one if the segment has none that is good; return its size and crc32c."""
        files = self._source.files
        file = key_file_of(files, segment)
        if file is not None:
            try:
                with closing(file):
                    file.check_body()
                with self._source.files.open(keys_path_of(segment)) as reading:
                    return file.sizes.file_bytes, self._files.copy_in(
                        reading, file.sizes.file_bytes, path, self._verified
                    )
            except (BadBytes, FileNotFoundError):
                """It is made here."""
        with TemporaryDirectory(prefix="qmq-archive-") as name:
            made = make_keys(files, segment, Path(name))
            with LocalFiles(Path(name)).open(made.name) as reading:
                size = reading.size()
                return size, self._files.copy_in(reading, size, path, self._verified)

    def _put_in_place(self, path: str, manifest: Manifest) -> None:
        """Rename the files of a copy to their own names, the manifest last."""
        unfinished = _unfinished(path)
        self._files.write(unfinished + MANIFEST, manifest.pack())
        self._lock.confirm()
        for suffix in (MESSAGES, INDEX, KEYS, MANIFEST):
            self._files.rename(unfinished + suffix, path + suffix)

    def _copied(self, size: int) -> None:
        """Report that a thread has copied *size* bytes."""
        if self._has_ended:
            raise _RunEnded
        self._copied_sizes.put(size)

    def _verified(self, _: int) -> None:
        """Let a thread go on verifying, unless the run has ended."""
        self._copied(0)

    def _verify(self, path: str, manifest: Manifest, progress: Progress) -> None:
        """Raise BadBytes unless the files are as the manifest says."""
        for suffix, size, crc in (
            (MESSAGES, manifest.messages_bytes, manifest.messages_crc),
            (INDEX, manifest.index_bytes, manifest.index_crc),
            (KEYS, manifest.keys_bytes, manifest.keys_crc),
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

    def _write_receipt(self, segment: SegmentSource, size: int, crc: int) -> None:
        """Write into the data directory that the copy was verified, whose first *size* bytes are all of the segment."""
        self._source.write_receipt(
            segment,
            ArchiveReceipt(
                store_id=segment.store_id.hex(),
                partition=segment.partition,
                base=segment.base,
                end=segment.end,
                messages_bytes=size,
                messages_crc=crc,
                destination=self._files.name,
                verified_at_us=self._clock(),
            ),
        )
        self._done.receipts += 1


def _is_receipt_of(receipt: ArchiveReceipt, manifest: Manifest) -> bool:
    """Return whether a receipt and a manifest tell of the same bytes."""
    return (receipt.end, receipt.messages_bytes, receipt.messages_crc) == (
        manifest.end, manifest.messages_bytes, manifest.messages_crc,
    )  # fmt: skip


def _unfinished(path: str) -> str:
    """Return the name of a copy until it is complete."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/{UNFINISHED}{name}"


def _index_bytes(segment: SegmentSource, index: Index) -> bytes:
    """Return the index as that of a sealed segment is written."""
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


class _BatchCounts(NamedTuple):
    """The counts of a segment; the times are 0 if it has no batches."""

    batches: int
    messages: int
    first_stored_at_us: int
    last_stored_at_us: int


def _count_batches(reading: Reading, segment: SegmentSource, files: Files) -> _BatchCounts:
    """Count batches by the index, and messages by the headers of the batches."""
    count = messages = first = last = 0
    for batches in segment.pieces(files):
        messages += sum(_messages_at(reading, place) for place in (batches["position"] - segment.base).tolist())
        if len(batches):
            first = first if count else int(batches["stored_at_us"][0])
            last = int(batches["stored_at_us"][-1])
        count += len(batches)
    return _BatchCounts(count, messages, first, last)


def _messages_at(reading: Reading, offset: int) -> int:
    head = reading.read(offset, BATCH_HEADER_SIZE)
    if len(head) < BATCH_HEADER_SIZE or (header := parse_header(head)).magic != BATCH_MAGIC:
        return 0
    return header.messages


def _remove_unfinished(files: WritableFiles, lock: ArchiveLock) -> int:
    """Remove what killed runs have left: this run has finished, and no other one runs."""
    left = [name for name in files.names("") if name.startswith(UNFINISHED) and name not in lock.names]
    for directory in files.names(SEGMENTS):
        names = files.names(f"{SEGMENTS}/{directory}")
        left += [f"{SEGMENTS}/{directory}/{name}" for name in names if name.startswith(UNFINISHED)]
    for path in left:
        files.remove(path)
    return len(left)


class ArchiveRun(NamedTuple):
    """The parts of a run: the data directory, the archive, and the lock on it."""

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

    Raises InvalidOption, DirectoryInUse during another run, and as ``archive_segments``.
    """
    with open_run(source, destination, clock, settings) as run:
        return archive_segments(run.source, run.files, run.lock, clock, progress)


@contextmanager
def open_run(
    source: Path, destination: str, clock: Callable[[], int], settings: Mapping[str, str] | None = None
) -> Iterator[ArchiveRun]:
    """Lock an archive in the block, to archive a data directory to it. Raises as ``archive_to`` does."""
    if not is_data_directory(source):
        raise InvalidOption(f"{source} is no data directory: it has neither store-a nor store-b")
    with writable_files_at(destination, settings) as files:
        files.make_directory("")
        with ArchiveLock(files, clock, this_process()) as lock, lock.renewed():
            yield ArchiveRun(open_data_directory(source), files, lock)
