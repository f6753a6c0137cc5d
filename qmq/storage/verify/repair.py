"""Repair of a data directory that no broker uses: derived files made again from the message log, and runs of items
mended.

Verify finds the bad files. Derived ones are deleted; the directory is opened as by a broker, which makes them again and
mends all that a start mends, and is closed cleanly; verify says what is still wrong. While a segment is missing that
could be put back, nothing is changed: a start would give up its messages for good.

Runs of error logs and dead letters are made whole: each item is taken from the file that has it. An item that is rotten
in both becomes an empty one with number 0, and the rotten bytes are kept in files beside them, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.errors import InvalidOption
from qmq.storage.consumer_log.header import ENTRIES_SUFFIX, ORDER_SUFFIX
from qmq.storage.disk.disk import Disk, failure, write_fully
from qmq.storage.error_log.sorted_runs import pack_run_header, run_paths
from qmq.storage.key_index.key_file import SUFFIX as KEYS_SUFFIX
from qmq.storage.message_log.segment import SUFFIX as SEGMENT_SUFFIX
from qmq.storage.message_log.segment import list_bases, segment_path
from qmq.storage.message_log.sparse_index import SUFFIX as INDEX_SUFFIX
from qmq.storage.meta.checkpoint import GroupClaim
from qmq.storage.meta.identity import COPY_NAMES, Identity, latest, read_copies
from qmq.storage.recovery.decide import RecoveryReport
from qmq.storage.recovery.open import open_directory
from qmq.storage.store import Store
from qmq.storage.types import DELAYED_NAME, StoreOptions
from qmq.storage.verify.groups import SET_ASIDE, RunFile, good_checkpoints, group_claims, read_copy
from qmq.storage.verify.report import Finding, VerifyReport
from qmq.storage.verify.verify import Progress, verify_one

_CRC_SIZE: Final = 4


#: A file, and an offset in it.
FilePosition = tuple[Path, int]


def repair_runs(disk: Disk, directory: Path, store_id: bytes, claims: list[GroupClaim]) -> set[FilePosition]:
    """Write rotten runs that checkpoints know again; return where items could not be brought back.

    A second call changes nothing, also after a crash. Raises StorageFull, StorageFailed, ForeignFile.
    """
    lost = set[FilePosition]()
    known = {
        (name, number): (runs.slot_size, slots)
        for claim in claims
        for name, runs in claim.runs.items()
        for number, slots in runs.slots.items()
    }
    for (name, number), (slot_size, slots) in sorted(known.items()):
        paths = run_paths(directory / name, number)
        try:
            copies = [read_copy(disk, path, store_id, number, slot_size, slots) for path in paths]
            if any(copy.problem is not None or not copy.good.all() for copy in copies):
                lost |= _mend(disk, store_id, number, slot_size, paths, copies)
        except OSError as error:
            raise failure(error, "mend", error.filename or paths[0]) from error
    return lost


def _mend(
    disk: Disk, store_id: bytes, number: int, slot_size: int, paths: tuple[Path, Path], copies: list[RunFile]
) -> set[FilePosition]:
    first, second = copies
    rotten = {int(slot) for slot in (~first.good & ~second.good).nonzero()[0]}
    void = bytes(slot_size - _CRC_SIZE)
    void += crc32c(void).to_bytes(_CRC_SIZE, "little")
    data = bytearray()
    for slot, good in enumerate(first.good.tolist()):
        source = first if good else second
        data += void if slot in rotten else source.data[slot * slot_size : (slot + 1) * slot_size]
    header = pack_run_header(store_id, slot_size, number, len(first.good))
    for path, copy in zip(paths, copies, strict=True):
        if rotten and copy.exists:
            _write(disk, path.with_name(path.name + SET_ASIDE), header, copy.data)
    for path in paths:
        _write(disk, path, header, bytes(data))
    return {(path, len(header) + slot * slot_size) for path in paths for slot in rotten}


def _write(disk: Disk, path: Path, header: bytes, data: bytes) -> None:
    made = path.with_name(path.name + ".tmp")
    fd = disk.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(disk, fd, [header, data], 0)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(made, path)
    disk.fsync_directory(path.parent)


_DERIVED: Final = (ENTRIES_SUFFIX, ORDER_SUFFIX, INDEX_SUFFIX, KEYS_SUFFIX)


class Outcome(Enum):
    """The outcome of something that was wrong."""

    #: A derived file, made again as it was.
    MADE_AGAIN = "made again"
    #: Another file, which has its content again.
    MENDED = "mended"
    #: A file that was of no use any more.
    REMOVED = "removed"
    #: Bytes of the message log, or items of a run: their content is lost. No good message is lost with them.
    GIVEN_UP = "given up"
    #: Still wrong.
    LEFT = "left"


class RepairResult(NamedTuple):
    """Something that was wrong, and its outcome."""

    finding: Finding
    outcome: Outcome


@dataclass(slots=True)
class Repair:
    """All outcomes of a repair, and the notes of a start, a sentence each."""

    directory: Path
    treated: list[RepairResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Findings that are not in ``treated``: their files have too many.
    left_out: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost and nothing wrong any more."""
        return not any(treated.outcome in (Outcome.LEFT, Outcome.GIVEN_UP) for treated in self.treated)


def repair(directory: Path, disk: Disk, now_us: int, progress: Progress | None = None) -> Repair:
    """Repair a data directory and its delay log. *progress* is called with the bytes read so far, and the bytes in all.

    Raises InvalidOption when there is no data directory, DirectoryInUse while a broker uses it, and the errors of
    verify and of opening, such as StorageFull and StorageFailed.
    """
    check_is_ours(directory, disk)
    done = _repair_one(directory, disk, now_us, progress)
    delayed = directory / DELAYED_NAME
    if any(disk.exists(delayed / name) for name in COPY_NAMES):
        also = _repair_one(delayed, disk, now_us, progress)
        done.treated += also.treated
        done.notes += also.notes
        done.left_out += also.left_out
    return done


def _repair_one(directory: Path, disk: Disk, now_us: int, progress: Progress | None) -> Repair:
    """Repair a data directory without its delay log, or a delay log."""
    before = verify_one(directory, disk, _half(progress, 0))
    wrong = list(_wrong(before, disk))
    done = Repair(directory)
    identity = None if before.absent else identity_of(directory, disk)
    if wrong and identity is not None:
        lost = repair_runs(disk, directory, identity.store_id, group_claims(good_checkpoints(disk, directory)))
        recovery = start(directory, disk, now_us, identity, {finding.file for finding in wrong if _is_derived(finding)})
        after = verify_one(directory, disk, _half(progress, 1))
        done.treated = [*_compared(disk, wrong, after, lost), *_given_up(directory, disk, identity, recovery)]
        done.notes = recovery.notes
        done.left_out = after.left_out
    else:
        done.treated = [RepairResult(finding, Outcome.LEFT) for finding in wrong]
        done.left_out = before.left_out
    return done


def _half(progress: Progress | None, pass_number: int) -> Progress | None:
    """Return the progress of one of the two times that everything is read."""
    return None if progress is None else lambda done, total: progress(done + pass_number * total, 2 * total)


def check_is_ours(directory: Path, disk: Disk) -> None:
    if not any(disk.exists(directory / name) for name in COPY_NAMES):
        raise InvalidOption(f"{directory} has neither {' nor '.join(COPY_NAMES)}: it is no data directory of QMQ")


def identity_of(directory: Path, disk: Disk) -> Identity | None:
    """Return the identity; None when no copy of it is good."""
    copies = read_copies(disk, directory)
    return latest(*copies) if any(copy.identity is not None for copy in copies) else None


def _is_derived(finding: Finding) -> bool:
    return finding.file.suffix in _DERIVED


def _wrong(report: VerifyReport, disk: Disk) -> Iterator[Finding]:
    """Yield the faults, and missing derived files, which are none."""
    for finding in report.findings:
        if finding.severity == "fault" or (_is_derived(finding) and not disk.exists(finding.file)):
            yield finding


def start(directory: Path, disk: Disk, now_us: int, identity: Identity, discarded: Collection[Path]) -> RecoveryReport:
    """Open and close the directory as a broker without clients does."""
    # Never less than the broker's: smaller files look like files that were cut.
    largest = max([StoreOptions().segment_bytes, *(_size(disk, path) for path in _segments(directory, disk, identity))])
    options = StoreOptions(segment_bytes=largest, partitions=len(identity.partitions))
    store = Store(open_directory(directory, options, disk, now_us, discarded))
    try:
        checkpoint = store.begin_checkpoint(store.state, now_us)  # the broker's part stays as it is
        checkpoint.write()
        store.finish_checkpoint(checkpoint)
        _make_key_indexes(store, discarded)
    except BaseException:
        store.close(clean=False)
        raise
    store.close(clean=True)
    return store.recovery


def _make_key_indexes(store: Store, paths: Collection[Path]) -> None:
    """Make the key indexes among *paths* again; others that are missing are made by a broker."""
    for part in store.partitions:
        for span in part.key_index.missing(part.removable()):
            builder = part.key_index.builder(span)
            try:
                while builder.path in paths and builder.step():
                    pass
            finally:
                builder.close()


def _segments(directory: Path, disk: Disk, identity: Identity) -> Iterator[Path]:
    for partition in identity.partitions:
        path = directory / partition.directory
        yield from (segment_path(path, base) for base in list_bases(disk, path))


def _size(disk: Disk, path: Path) -> int:
    try:
        fd = disk.open(path, os.O_RDONLY)
        try:
            return disk.size(fd)
        finally:
            disk.close(fd)
    except OSError as error:
        raise failure(error, "look at", path) from error


def _compared(disk: Disk, wrong: list[Finding], after: VerifyReport, lost: set[FilePosition]) -> Iterator[RepairResult]:
    left = {(finding.file, finding.position) for finding in _wrong(after, disk)}
    known = {(finding.file, finding.position) for finding in after.findings} - left
    for finding in wrong:
        key = finding.file, finding.position
        if key in left:
            outcome = Outcome.LEFT
        elif _is_derived(finding):
            outcome = Outcome.MADE_AGAIN
        elif key in lost or (finding.file.suffix == SEGMENT_SUFFIX and key in known):
            outcome = Outcome.GIVEN_UP
        else:
            outcome = Outcome.MENDED if disk.exists(finding.file) else Outcome.REMOVED
        yield RepairResult(finding, outcome)
    before = {(finding.file, finding.position) for finding in wrong}
    for finding in _wrong(after, disk):
        if (finding.file, finding.position) not in before:
            yield RepairResult(finding, Outcome.LEFT)


def _given_up(directory: Path, disk: Disk, identity: Identity, recovery: RecoveryReport) -> Iterator[RepairResult]:
    """Yield what was bad behind the checkpoint: whether it was acknowledged is unknown."""
    for partition, report in zip(identity.partitions, recovery.partitions, strict=True):
        log = directory / partition.directory
        for hole in report.holes:
            base = max((base for base in list_bases(disk, log) if base <= hole.start), default=hole.start)
            what = (
                f"{hole.end - hole.start} bytes behind the checkpoint, from position {hole.start} on, were bad or gone"
            )
            advice = "nothing: what follows is served"
            finding = Finding("fault", segment_path(log, base), hole.start - base, what, advice)
            yield RepairResult(finding, Outcome.GIVEN_UP)
