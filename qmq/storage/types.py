"""Types and file names that every part of storage uses. This module imports nothing of storage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

#: The registry of subjects.
SUBJECTS_NAME: Final = "subjects"
#: The directory of the consumer logs.
CONSUMER_LOG_NAME: Final = "consumer-log"
#: The directory with the files of the groups.
GROUPS_NAME: Final = "groups"
#: The delay log: a data directory within the data directory.
DELAYED_NAME: Final = "delayed"
#: The directory of the timer queue: when delayed messages fall due.
DUE_NAME: Final = "due"


class Hole(NamedTuple):
    """Positions [start, end) whose bytes are bad, or were lost."""

    start: int
    end: int


class SegmentSpan(NamedTuple):
    """The positions [base, end) of a segment, its header included."""

    base: int
    end: int


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to open a store. Sizes are in bytes."""

    segment_bytes: int = 256 << 20
    partitions: int = 1
    #: One directory for each partition; empty for log-0, log-1, ... in the data directory.
    partition_dirs: tuple[Path, ...] = ()
    #: How far ahead positions are reserved.
    reserve_bytes: int = 1 << 30
    #: The size of the largest batch that clients may send.
    max_frame_bytes: int = 16 << 20
    max_subjects: int = 1_000_000
    #: The free space that batches leave on each disk, at most a sixteenth of it.
    keep_free_bytes: int = 0
    #: How long, and up to how many bytes, files of the pull log are kept that no start reads; 0: they are removed.
    pull_log_keep_us: int = 0
    pull_log_keep_bytes: int = 0
    #: The store id of a new data directory, 6 bytes; None for a random one.
    store_id: bytes | None = None
