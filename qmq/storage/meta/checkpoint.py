"""Read and write checkpoints: how far each log is good and on disk. Files ``checkpoint-<n>``, of which two stay.

Each is an envelope (see envelope.py) with magic ``QMQCHECK`` around a map:

    number, created_at_us, store_id, sequence_base (of the identity when it was taken), last_stored_at_us
    partitions   list of {position, segments: [[base, end], ...], holes: [[start, end], ...],
                 journal: [base, rows, crc32c] of the consumer log's file for the current segment, or nil,
                 removed: [[start, end], ...] of segments that were removed}
    subjects     {length_bytes, count, forgotten: pairs of u32, the numbers [start, end) that are forgotten,
                 forgotten_end, ends: u64[n], firsts: u64[n] of the n others, gaps: bytes (see gaps.py)}
    state        map of name to bytes, given by the broker
    state_files  map of name to [number, size, crc32c] for parts of it that have a file (see state_files.py), or none

Everything before a partition's position is on disk and was good when written, but for the holes; consumer log and
registry cover it. The last segment ends at the position as far as the checkpoint knows.

The state ``group_files`` is a ``GroupClaim``: how far the checkpoint covers the pull log, and the runs it knows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import CHECKPOINT_MAGIC, CHECKPOINT_VERSION, OLDEST_CHECKPOINT_VERSION
from qmq.storage.disk.disk import Disk, failure, write_atomically
from qmq.storage.disk.envelope import FileState, pack_envelope, read_envelope
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.state_files import StatePart, read_files, remove_files
from qmq.storage.types import Hole, SegmentSpan

PREFIX: Final = "checkpoint-"
KEPT: Final = 2


@dataclass(frozen=True, slots=True)
class PartitionClaim:
    """The claim of a checkpoint about one partition."""

    position: int
    segments: tuple[SegmentSpan, ...]
    holes: tuple[Hole, ...]
    #: (base, rows, crc32c) of the consumer log's file for the current segment.
    journal: tuple[int, int, int] | None
    #: The positions of segments that were removed.
    removed: tuple[Hole, ...] = ()

    def is_removed(self, base: int) -> bool:
        """Return whether a segment at *base* was removed."""
        return any(start <= base < end for start, end in self.removed)


@dataclass(frozen=True, slots=True)
class SubjectsClaim:
    """The claim of a checkpoint about the subjects: ends and firsts are u64 columns, of the numbers that are not
    forgotten.
    """

    length_bytes: int
    count: int
    ends: bytes
    firsts: bytes
    gaps: bytes
    #: Which numbers are forgotten, as ``pack_numbers`` packs them; and the sequence behind all that they had.
    forgotten: bytes = b""
    forgotten_end: int = 0

    def forgotten_count(self) -> int:
        """Return how many numbers are forgotten. Raises ValueError where the bytes make no sense."""
        borders = np.frombuffer(self.forgotten, "<u4").astype(np.int64)
        if len(borders) % 2 or (np.diff(borders, append=self.count + 1) <= 0).any():
            raise ValueError("forgotten numbers")
        return int((borders[1::2] - borders[::2]).sum())

    def forgotten_numbers(self) -> npt.NDArray[np.uint32]:
        """Return the numbers that are forgotten, ascending."""
        return np.flatnonzero(self._is_forgotten()).astype(np.uint32)

    def columns(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return ends and firsts of all numbers: u64[count] each, 0 where one is forgotten."""
        known = ~self._is_forgotten()
        ends, firsts = np.zeros(self.count, np.uint64), np.zeros(self.count, np.uint64)
        ends[known], firsts[known] = np.frombuffer(self.ends, "<u8"), np.frombuffer(self.firsts, "<u8")
        return ends, firsts

    def _is_forgotten(self) -> npt.NDArray[np.bool_]:
        borders, steps = np.frombuffer(self.forgotten, "<u4"), np.zeros(self.count + 1, np.int8)
        steps[borders[::2]], steps[borders[1::2]] = 1, -1
        found: npt.NDArray[np.bool_] = np.cumsum(steps[:-1], dtype=np.int8) > 0
        return found


def pack_numbers(are_in: npt.NDArray[np.bool_]) -> bytes:
    """Return the numbers for which *are_in* is set, as pairs of u32 [start, end), ascending, never adjacent."""
    steps = np.diff(are_in.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(steps).astype("<u4").tobytes()


@dataclass(frozen=True, slots=True)
class CheckpointClaims:
    """The content of a checkpoint."""

    number: int
    created_at_us: int
    store_id: bytes
    sequence_base: int
    last_stored_at_us: int
    partitions: tuple[PartitionClaim, ...]
    subjects: SubjectsClaim
    #: All of it when it was read; when it is written, without the parts in *state_files*.
    state: dict[str, bytes]
    state_files: tuple[StatePart, ...] = ()


class CheckpointFile(NamedTuple):
    """One checkpoint as it was read: ``claims`` is set when the state is GOOD; then the reason says which parts of the
    broker's state are left out, as their files are bad.
    """

    number: int
    state: FileState
    claims: CheckpointClaims | None
    reason: str


def checkpoint_path(directory: Path, number: int) -> Path:
    """Return the path of checkpoint *number*."""
    return directory / f"{PREFIX}{number}"


def list_checkpoints(disk: Disk, directory: Path) -> list[int]:
    """Return the numbers of all checkpoints in *directory*, latest first. Raises StorageFailed."""
    try:
        names = disk.listdir(directory)
    except OSError as error:
        raise failure(error, "list", directory) from error
    digits = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    return sorted((int(number) for number in digits if number.isascii() and number.isdecimal()), reverse=True)


def read_checkpoint(disk: Disk, directory: Path, number: int) -> CheckpointFile:
    """Read checkpoint *number*. Raises StorageFailed when the system refuses to read it."""
    path = checkpoint_path(directory, number)
    opened = read_envelope(disk, path, CHECKPOINT_MAGIC, CHECKPOINT_VERSION, OLDEST_CHECKPOINT_VERSION)
    if opened.content is None:
        return CheckpointFile(number, opened.state, None, opened.reason)
    try:
        files, wrong = read_files(disk, directory, opened.content.get("state_files", {}))
        return CheckpointFile(number, FileState.GOOD, _from_content(opened.content, tuple(files)), wrong)
    except ForeignFile as error:
        return CheckpointFile(number, FileState.UNKNOWN, None, str(error))
    except (BadBytes, KeyError, TypeError, ValueError) as error:
        return CheckpointFile(number, FileState.ROTTEN, None, f"{path} lacks a field: {error!r}")


def write_checkpoint(disk: Disk, directory: Path, claims: CheckpointClaims, kept_files: set[str] | None = None) -> None:
    """[thread] Write a checkpoint, on disk when this returns, and remove those older than the one before.

    Of the files with parts of the state only *kept_files* and its own stay (None: all do). Everything that it claims
    must be on disk already. Raises StorageFull or StorageFailed; the older checkpoints stay.
    """
    content = {
        "number": claims.number,
        "created_at_us": claims.created_at_us,
        "store_id": claims.store_id,
        "sequence_base": claims.sequence_base,
        "last_stored_at_us": claims.last_stored_at_us,
        "partitions": [
            {
                "position": claim.position,
                "segments": claim.segments,
                "holes": claim.holes,
                "journal": claim.journal,
                "removed": claim.removed,
            }
            for claim in claims.partitions
        ],
        "subjects": {
            "length_bytes": claims.subjects.length_bytes,
            "count": claims.subjects.count,
            "forgotten": claims.subjects.forgotten,
            "forgotten_end": claims.subjects.forgotten_end,
            "ends": claims.subjects.ends,
            "firsts": claims.subjects.firsts,
            "gaps": claims.subjects.gaps,
        },
        "state": claims.state,
    }
    for file in claims.state_files:
        file.write(disk, directory)
    if claims.state_files:
        content["state_files"] = {file.name: file.claim() for file in claims.state_files}
    buffers = pack_envelope(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, content)
    write_atomically(disk, checkpoint_path(directory, claims.number), buffers)
    for number in list_checkpoints(disk, directory)[KEPT:]:
        with suppress(OSError):  # a file that stays does no harm, and the next checkpoint tries again
            disk.unlink(checkpoint_path(directory, number))
    if kept_files is not None:
        remove_files(disk, directory, kept_files | {file.file_name for file in claims.state_files})


def _from_content(content: dict[str, Any], files: tuple[StatePart, ...]) -> CheckpointClaims:
    subjects = _subjects(content["subjects"])
    known_bytes = 8 * (subjects.count - subjects.forgotten_count())
    if len(subjects.ends) != known_bytes or len(subjects.firsts) != known_bytes:
        raise ValueError("subjects")
    Gaps.unpack(subjects.gaps)
    state = {str(name): bytes(blob) for name, blob in content["state"].items()}
    state |= {file.name: file.part for file in files}
    if GROUP_STATE in state:
        GroupClaim.unpack(state[GROUP_STATE])
    return CheckpointClaims(
        number=int(content["number"]),
        created_at_us=int(content["created_at_us"]),
        store_id=bytes(content["store_id"]),
        sequence_base=int(content["sequence_base"]),
        last_stored_at_us=int(content["last_stored_at_us"]),
        partitions=tuple(_partition(partition) for partition in content["partitions"]),
        subjects=subjects,
        state=state,
        state_files=files,
    )


def _subjects(content: dict[str, Any]) -> SubjectsClaim:
    return SubjectsClaim(
        length_bytes=int(content["length_bytes"]),
        count=int(content["count"]),
        ends=bytes(content["ends"]),
        firsts=bytes(content["firsts"]),
        gaps=bytes(content["gaps"]),
        forgotten=bytes(content.get("forgotten", b"")),  # version 2 lacks both
        forgotten_end=int(content.get("forgotten_end", 0)),
    )


def _partition(content: dict[str, Any]) -> PartitionClaim:
    journal = content["journal"]
    if journal is not None:
        base, rows, crc = journal
        journal = (int(base), int(rows), int(crc))
    return PartitionClaim(
        position=int(content["position"]),
        segments=tuple(SegmentSpan(int(base), int(end)) for base, end in content["segments"]),
        holes=tuple(Hole(int(start), int(end)) for start, end in content["holes"]),
        journal=journal,
        removed=tuple(Hole(int(start), int(end)) for start, end in content["removed"]),
    )


#: The name of the GroupClaim in a checkpoint's state.
GROUP_STATE: Final = "group_files"


class Runs(NamedTuple):
    """The runs of one directory: the number of slots of each run, by its number, and the size of a slot."""

    slot_size: int
    slots: dict[int, int]


class GroupClaim(NamedTuple):
    """The claim of a checkpoint about the files of groups: it covers the pull log before ``position``, and the pull log
    before ``synced`` is on disk; the two differ after a sync that failed. ``generation`` is that of the pull log.
    ``runs`` go by their directories, relative to that of the store.
    """

    position: int = 0
    synced: int = 0
    generation: int = 1
    runs: dict[str, Runs] = {}  # noqa: RUF012  (never changed)

    def pack(self) -> bytes:
        """Return the claim as bytes of the state."""
        runs = {name: [size, items] for name, (size, items) in self.runs.items()}
        packed: bytes = msgpack.packb([self.position, self.synced, self.generation, runs])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> GroupClaim:
        """Return the claim that ``pack`` packed. Raises BadBytes."""
        try:
            position, synced, generation, runs = msgpack.unpackb(packed, strict_map_key=False)
            found = {_text(name): Runs(_count(size), _counts(items)) for name, (size, items) in runs.items()}
            return cls(_count(position), _count(synced), _count(generation), found)
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise BadBytes(f"the claim of a checkpoint about the files of groups makes no sense: {error}") from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _counts(values: Any) -> dict[int, int]:
    return {_count(number): _count(items) for number, items in values.items()}


def _text(value: Any) -> str:
    if type(value) is not str or value.startswith("/") or ".." in value:
        raise ValueError(f"{value!r:.40} is no directory of a store")
    return value
