"""How to open a store, and what an open data directory consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.group_files import GroupFiles
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.sparse_index import SegmentIndex
from qmq.storage.meta.checkpoint import Hole, PartitionClaim
from qmq.storage.meta.identity import IdentityFile
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.recovery.decide import RecoveryReport

SUBJECTS_NAME: Final = "subjects"
CONSUMER_LOG_NAME: Final = "consumer-log"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to open a store. Sizes in bytes."""

    segment_bytes: int = 256 << 20
    partitions: int = 1
    #: One directory a partition; empty for log-0, log-1, ... in the data directory.
    partition_dirs: tuple[Path, ...] = ()
    #: How far ahead positions are reserved.
    reserve_bytes: int = 1 << 30
    #: The largest batch that will come.
    max_frame_bytes: int = 16 << 20
    max_subjects: int = 1_000_000
    #: What batches leave free on each disk, at most a sixteenth of it.
    keep_free_bytes: int = 0
    #: The store id of a directory that is made new, 6 bytes: IPv4 and port; None for a random one.
    store_id_hint: bytes | None = None


@dataclass(slots=True)
class OpenedPartition:
    """One partition, ready."""

    log: MessageLog
    consumer: ConsumerLog
    index: SegmentIndex
    holes: list[Hole]
    #: What a checkpoint says of it for as long as its batches behind that cannot be claimed.
    claim: PartitionClaim
    #: The bases of segments that were removed, and still have files.
    left: list[int]


@dataclass(slots=True)
class OpenedStore:
    """A data directory, ready: what Store is made of."""

    disk: Disk
    directory: Path
    options: StoreOptions
    now_us: int
    lock: DirectoryLock
    identity: IdentityFile
    subjects: SubjectTable
    partitions: list[OpenedPartition]
    #: Indexes of sealed segments that could not be written yet, and the positions where those end.
    unsealed: list[tuple[SegmentIndex, int]]
    #: The files of groups.
    groups: GroupFiles
    checkpoint_number: int
    state: dict[str, bytes]
    #: The checkpoint that says so; None when there is none.
    state_path: Path | None
    last_stored_at_us: int
    report: RecoveryReport

    def close(self) -> None:
        """Close everything, changing nothing."""
        for part in self.partitions:
            part.log.close()
            part.consumer.close()
            part.index.close()
        for index, _ in self.unsealed:
            index.close()
        self.subjects.close()
        self.groups.close()
        self.lock.release()
