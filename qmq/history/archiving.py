"""Archiving: sealed segments of a data directory, byte for byte. A run may be killed at any moment, and repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from crc32c import crc32c

from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC
from qmq.history.archive import MANIFEST, SEGMENTS, directory_of, manifests
from qmq.history.archive_lock import LOCK, ArchiveLock
from qmq.history.data_directory import DataDirectory
from qmq.history.files import Files, Reading, WritableFiles
from qmq.history.manifest import Manifest
from qmq.history.segments import INDEX, MESSAGES, Index, SegmentSource
from qmq.storage.index import pack_index_header
from qmq.storage.segment import Owner

UNFINISHED: Final = "_"


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
    #: Files of killed runs that were removed.
    removed: int = 0


def archive_segments(
    source: DataDirectory,
    files: WritableFiles,
    lock: ArchiveLock,
    clock: Callable[[], int],
    progress: Callable[[int, int], None] | None = None,
) -> Archived:
    """Copy every sealed segment that is not there yet. *lock* is held; *progress* hears of bytes done and to do.

    Raises DirectoryInUse when another run has taken the archive, BadBytes, StorageFull, StorageFailed.
    """
    done = Archived()
    there = dict(manifests(files))
    wanted = []
    for segment in source.segments:
        path = f"{directory_of(segment.store_id, segment.partition)}/{segment.base:016x}"
        if not segment.sealed:
            done.left += 1
        elif path in there and there[path].end >= segment.end:
            done.kept += 1
        else:
            wanted.append((path, segment))
    total = sum(segment.end - segment.base for _, segment in wanted)

    def copied(size: int) -> None:
        done.copied_bytes += size
        lock.renew()
        if progress is not None:
            progress(done.copied_bytes, total)

    for path, segment in wanted:
        manifest = _archive(source.files, segment, files, path, lock, clock, copied)
        done.copied += 1
        done.messages += manifest.messages
    done.removed = _remove_unfinished(files)
    return done


def _archive(
    source: Files,
    segment: SegmentSource,
    files: WritableFiles,
    path: str,
    lock: ArchiveLock,
    clock: Callable[[], int],
    copied: Callable[[int], None],
) -> Manifest:
    """Copy one segment under other names, then give it its own, the manifest last."""
    directory, _, name = path.rpartition("/")
    files.make_directory(directory)
    unfinished = f"{directory}/{UNFINISHED}{name}"
    index = segment.batches(source)
    packed = _packed(segment, index)
    reading = source.open(segment.path)
    try:
        size = min(segment.end - segment.base, reading.size())  # less of one that was cut: what is there is archived
        crc = files.copy_in(reading, size, unfinished + MESSAGES, copied)
        messages = _messages_in(reading, segment, index)
    finally:
        reading.close()
    stamps = index["stored_at_us"]
    manifest = Manifest(
        store_id=segment.store_id.hex(),
        partition=segment.partition,
        base=segment.base,
        end=segment.end,
        batches=len(index),
        messages=messages,
        first_stored_at_us=int(stamps[0]) if len(stamps) else 0,
        last_stored_at_us=int(stamps[-1]) if len(stamps) else 0,
        messages_bytes=size,
        messages_crc=crc,
        index_bytes=len(packed),
        index_crc=crc32c(packed),
        archived_at_us=clock(),
    )
    files.write(unfinished + INDEX, packed)
    files.write(unfinished + MANIFEST, manifest.pack())
    lock.confirm()
    for suffix in (MESSAGES, INDEX, MANIFEST):
        files.rename(unfinished + suffix, path + suffix)
    return manifest


def _packed(segment: SegmentSource, index: Index) -> bytes:
    """The index as a sealed one is written: equal byte for byte to that of the data directory where there is one."""
    body = index.tobytes()
    head = pack_index_header(
        Owner(segment.store_id, segment.partition),
        segment.base,
        sealed=True,
        covered=segment.end,
        count=len(index),
        body_crc=crc32c(body),
    )
    return head + body


def _messages_in(reading: Reading, segment: SegmentSource, index: Index) -> int:
    """How many messages the batches say that they have."""
    count = 0
    for position in index["position"].astype(np.int64).tolist():
        head = reading.read(position - segment.base, BATCH_HEADER_SIZE)
        if len(head) == BATCH_HEADER_SIZE and (header := parse_header(head)).magic == BATCH_MAGIC:
            count += header.messages
    return count


def _remove_unfinished(files: WritableFiles) -> int:
    """Remove what killed runs have left: this one has finished, and no other runs."""
    left = [name for name in files.names("") if name.startswith(UNFINISHED) and name != LOCK]
    for directory in files.names(SEGMENTS):
        names = files.names(f"{SEGMENTS}/{directory}")
        left += [f"{SEGMENTS}/{directory}/{name}" for name in names if name.startswith(UNFINISHED)]
    for path in left:
        files.remove(path)
    return len(left)
