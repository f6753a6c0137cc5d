"""fsck for a data directory: it reads every file from end to end, compares them with each other, and writes nothing.

A fault is something bad that a checkpoint claims, or a file that the store needs. What a stop may leave behind is a
note: an unfinished tail behind the checkpoint, derived files that lag or are missing, a temporary file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from qmq.errors import BadBytes, DirectoryInUse, ForeignFile
from qmq.names import PING_NAME
from qmq.storage.consumer_log.header import base_of
from qmq.storage.disk.dir_lock import LOCK_NAME, holder_of
from qmq.storage.disk.disk import Disk, failure, read_whole
from qmq.storage.disk.envelope import FileState
from qmq.storage.key_index.key_file import PARTS, UNFINISHED
from qmq.storage.key_index.key_file import SUFFIX as KEYS_SUFFIX
from qmq.storage.message_log.archive_receipt import SUFFIX as RECEIPT_SUFFIX
from qmq.storage.message_log.archive_receipt import parse_receipt
from qmq.storage.message_log.segment import SUFFIX as SEGMENT_SUFFIX
from qmq.storage.message_log.segment import SegmentOwner, is_of, list_bases, segment_path
from qmq.storage.message_log.sparse_index import SUFFIX as INDEX_SUFFIX
from qmq.storage.meta import identity as identities
from qmq.storage.meta.checkpoint import (
    KEPT,
    PREFIX,
    CheckpointClaims,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
)
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.identity import COPY_NAMES, Identity, PartitionIdentity, read_copies
from qmq.storage.meta.subjects import RegistryContent, check_header, parse_records
from qmq.storage.pull_log.records import PULL_LOG_NAME
from qmq.storage.types import CONSUMER_LOG_NAME, DELAYED_NAME, DUE_NAME, GROUPS_NAME, SUBJECTS_NAME
from qmq.storage.verify.groups import GroupsCheck, group_claims
from qmq.storage.verify.report import Count, Finding, VerifyReport
from qmq.storage.verify.segments import PartitionCheck
from qmq.storage.verify.sequences import SequenceCheck, in_stored_order

__all__ = ["Count", "Finding", "VerifyReport", "verify"]

#: Called with the bytes that have been read, and the bytes in all.
Progress = Callable[[int, int], None]

_LEAVE: Final = "nothing: it is not QMQ's, and is left alone"
_REPLACED: Final = "nothing: the next start writes it again"
_ARCHIVED_AGAIN: Final = "nothing: the next run of qmq archive writes it again"
_MOVE: Final = "move it away; if there was a file of that name, put that back; then verify again"
_RESTORE: Final = "put back a good copy of the file; without it the next start reads the whole log"


def verify(directory: Path, disk: Disk, progress: Progress | None = None) -> VerifyReport:
    """Check the data directory of a stopped broker, or a copy of any, with its delay log.

    Raises DirectoryInUse while a broker uses it, also when one starts meanwhile; StorageFailed when the system refuses
    to read something; ForeignFile for a newer version.
    """
    report = verify_one(directory, disk, progress)
    delayed = directory / DELAYED_NAME
    if disk.exists(delayed):
        if _is_being_made(disk, delayed):
            report.note(delayed, None, "is empty: it was being made", _REPLACED)
        else:
            verify_one(delayed, disk, progress, report)
    return report


def _is_being_made(disk: Disk, directory: Path) -> bool:
    """Return whether a stop came before the directory had any file that it needs."""
    names = disk.listdir(directory)
    return not any(name in (*COPY_NAMES, SUBJECTS_NAME, CONSUMER_LOG_NAME) or _is_checkpoint(name) for name in names)


def verify_one(
    directory: Path, disk: Disk, progress: Progress | None, report: VerifyReport | None = None
) -> VerifyReport:
    """Check a directory without its delay log; findings are added to *report*, if it is given."""
    _check_free(disk, directory)
    report = VerifyReport(directory) if report is None else report
    try:
        _Verification(disk, directory, report, progress).run()
    except OSError as error:
        raise failure(error, "read", error.filename or directory) from error
    _check_free(disk, directory)
    return report


def _check_free(disk: Disk, directory: Path) -> None:
    holder = holder_of(disk, directory)
    if holder is not None:
        raise DirectoryInUse(f"{directory} is in use by {holder}; stop it, or take a copy of the directory")


class _Verification:
    """One verification of a directory."""

    def __init__(self, disk: Disk, directory: Path, report: VerifyReport, progress: Progress | None) -> None:
        self._disk = disk
        self._directory = directory
        self._report = report
        self._progress = progress
        self._done = self._total = 0
        self._claims: CheckpointClaims | None = None
        self._good_checkpoints: list[CheckpointClaims] = []  # the last one first
        self._claims_path = directory
        self._names: list[str] = []
        self._numbers: dict[tuple[str, int], int] = {}  # by name and lane

    def run(self) -> None:
        """Fill the report. Raises OSError and StorageError."""
        names = self._disk.listdir(self._directory)
        if not self._are_files(self._directory, filter(_is_file_name, names)):
            return
        identity = self._check_identity()
        if identity is None or not self._are_all_files(identity):
            return
        self._check_checkpoints(identity)
        self._read_subjects(identity)
        self._look_for_foreign_files(names, identity)
        self._check_logs(identity)
        self._check_groups(identity)

    # --- kinds --------------------------------------------------------------------------------------------------------

    def _are_all_files(self, identity: Identity) -> bool:
        """Return whether everything with the name of a data file is a file; report the others."""
        whole = True
        for number, partition in enumerate(identity.partitions):
            for directory in (self._path_of(partition), self._directory / CONSUMER_LOG_NAME / str(number)):
                if self._disk.exists(directory):
                    whole &= self._are_files(directory, filter(_is_log_file_name, self._disk.listdir(directory)))
        for name in (PULL_LOG_NAME, GROUPS_NAME, DUE_NAME):
            if self._disk.exists(self._directory / name):
                whole &= self._are_files(self._directory, [name], or_directories=True)
        return whole

    def _are_files(self, directory: Path, names: Iterable[str], *, or_directories: bool = False) -> bool:
        """Return whether these names in *directory* are files, with *or_directories* also directories of files; report
        the others. Opening a FIFO may take for ever.
        """
        whole = True
        for path in (directory / name for name in names):
            try:
                kind = self._disk.kind(path)
            except FileNotFoundError:  # a dangling link
                continue
            if kind == "a directory" and or_directories:
                whole &= self._are_files(path, self._disk.listdir(path), or_directories=True)
            elif kind != "a file":
                self._report.fault(path, None, f"is {kind}, not a file: nothing else was read", _MOVE)
                self._report.absent.append(path)
                whole = False
        return whole

    # --- small files -------------------------------------------------------------------------------------------------

    def _check_identity(self) -> Identity | None:
        a, b = read_copies(self._disk, self._directory)
        found = [copy.identity for copy in (a, b) if copy.identity is not None]
        for name, copy, other in ((COPY_NAMES[0], a, b), (COPY_NAMES[1], b, a)):
            path = self._directory / name
            if copy.identity is not None:
                self._report.count("identity", 0, 1)
            elif copy.state is FileState.UNKNOWN:
                raise ForeignFile(copy.reason)
            elif copy.state is FileState.MISSING and other.identity is not None and other.identity.generation <= 1:
                self._report.note(path, None, "is missing: the directory was being made", _REPLACED)
            else:
                advice = "nothing but a restart: the other copy is enough" if found else "put back a copy of the file"
                self._report.fault(path, None, copy.reason, advice)
        if not found:
            return None
        try:
            identity = identities.newest(a, b)
        except BadBytes as error:
            self._report.fault(self._directory / COPY_NAMES[1], None, str(error), "put the right one in its place")
            return None
        if identity.next_store_id:
            self._report.fault(
                self._directory / COPY_NAMES[0], None, identities.RENEWAL_UNFINISHED, "run qmq repair --new-id again"
            )
            return None
        if len({copy.generation for copy in found}) > 1:
            what = "is one generation behind: a write was interrupted"
            older = min((a, b), key=lambda copy: copy.identity.generation if copy.identity is not None else 0)
            self._report.note(self._directory / COPY_NAMES[older is b], None, what, _REPLACED)
        elif len(found) == 2 and found[0] != found[1]:
            self._report.fault(
                self._directory / COPY_NAMES[1], None, "differs from store-a, of the same generation", _RESTORE
            )
        return identity

    def _check_checkpoints(self, identity: Identity) -> None:
        for age, number in enumerate(list_checkpoints(self._disk, self._directory)):
            path = checkpoint_path(self._directory, number)
            found = read_checkpoint(self._disk, self._directory, number)
            if found.state is FileState.UNKNOWN:
                raise ForeignFile(found.reason)
            if found.claims is None:
                self._report.fault(path, None, found.reason, "delete it: the one before counts then")
                continue
            self._report.count("checkpoint", len(read_whole(self._disk, path)), 1)
            if found.reason:
                self._report.fault(path, None, found.reason, "nothing: a start reads the logs in its place")
            if age >= KEPT:
                self._report.note(path, None, "is older than the two that are kept", "nothing: it is deleted")
            problem = _contradiction(found.claims, number, identity)
            if problem:
                self._report.fault(path, None, problem, "delete it: the one before counts then")
                continue
            if self._claims is None:
                self._claims, self._claims_path = found.claims, path
            self._good_checkpoints.append(found.claims)

    def _read_subjects(self, identity: Identity) -> None:
        path = self._directory / SUBJECTS_NAME
        claim = self._claims.subjects if self._claims is not None else None
        try:
            data = read_whole(self._disk, path)
        except FileNotFoundError:
            self._report.add(claim is not None, path, None, "is missing", _RESTORE)
            data = b""
        else:
            try:
                check_header(data, identity.store_id, path)
            except ForeignFile as error:
                self._report.fault(path, 0, str(error), _RESTORE)
            except BadBytes as error:
                self._report.add(claim is not None, path, 0, str(error), _RESTORE)
        length = len(data) if claim is None else claim.length_bytes
        records = parse_records(data[:length])
        self._report.count("subjects", len(data), len(records.names))
        for bad in records.damaged:
            what = f"from subject {bad.number} on: {bad.reason}"
            self._report.add(claim is not None, path, bad.position, what, _RESTORE)
        if claim is not None and data and (records.end != length or len(records.names) != claim.count):
            what = f"has {len(records.names)} subjects in {records.end} bytes, the checkpoint knows {claim.count}"
            self._report.fault(path, records.end, f"{what} in {length}", _RESTORE)
        if len(data) > records.end and (claim is None or records.end == length):
            what = f"{len(data) - records.end} bytes that no checkpoint knows"
            self._report.note(path, records.end, what, "nothing: the next start cuts them and reads them from the log")
        self._take_names(path, records)

    def _take_names(self, path: Path, records: RegistryContent) -> None:
        claim = self._claims.subjects if self._claims is not None else None
        forgotten = frozenset(claim.forgotten_numbers().tolist() if claim is not None else ())
        for number, (name, lane) in enumerate(zip(records.names, records.lanes, strict=True)):
            self._names.append(name if name is not None else f"(damaged {number})")
            if name is None or number in forgotten:
                continue
            if claim is not None and (name, lane) in self._numbers:
                what = f"subject {number} has the name and lane of subject {self._numbers[name, lane]}, {name}"
                self._report.fault(path, None, what, "keep a copy of the directory and report it")
            self._numbers[name, lane] = number  # without a checkpoint the later one counts
        if self._claims is not None:  # below, a subject in the log gets a number of its own
            missing = self._claims.subjects.count - len(self._names)
            self._names += [f"(lost {len(self._names) + n})" for n in range(missing)]

    def _number_of(self, name: str, lane: int) -> int:
        number = self._numbers.get((name, lane))
        if number is None:
            number = self._numbers[name, lane] = len(self._names)
            self._names.append(name)
        return number

    def _check_groups(self, identity: Identity) -> None:
        try:
            claims = group_claims(self._good_checkpoints[:KEPT])
        except BadBytes as error:
            self._report.fault(self._claims_path, None, str(error), "keep a copy of the directory and report it")
            return
        GroupsCheck(self._disk, self._directory, self._report, identity, claims).run()

    # --- logs --------------------------------------------------------------------------------------------------------

    def _check_logs(self, identity: Identity) -> None:
        claims = self._claims
        shared = self._shared_directories(identity)
        checks = []
        for number, partition in enumerate(identity.partitions):
            path = self._path_of(partition)
            claim = claims.partitions[number] if claims is not None and number < len(claims.partitions) else None
            if not self._disk.exists(path):
                self._report.add(claim is not None, path, None, "is missing", "mount its disk or put it back")
                self._report.absent.append(path)
                continue
            self._total += self._bytes_in(path)
            checks.append(
                PartitionCheck(
                    self._disk,
                    self._report,
                    directory=path,
                    consumer_directory=self._directory / CONSUMER_LOG_NAME / str(number),
                    owner=SegmentOwner(identity.store_id, number),
                    secret=identity.secret,
                    claim=claim,
                    number_of=self._number_of,
                    progress=self._advance,
                    shared=path in shared,
                )
            )
        gaps = Gaps.unpack(claims.subjects.gaps) if claims is not None else Gaps()
        is_whole = len(checks) == len(identity.partitions)
        sequences = SequenceCheck(
            self._report, self._names, gaps, lambda: is_whole and not any(check.holes for check in checks)
        )
        for stored in in_stored_order([check.batches() for check in checks]):
            sequences.add(stored)
        if claims is not None:
            self._check_claims(claims, sequences)

    def _shared_directories(self, identity: Identity) -> set[Path]:
        """Report the directories that several partitions have, and return their paths."""
        numbers: dict[Path, list[int]] = {}
        for number, partition in enumerate(identity.partitions):
            numbers.setdefault(self._disk.resolve(self._path_of(partition)), []).append(number)
        shared = set()
        for several in numbers.values():
            if len(several) == 1:
                continue
            path = self._path_of(identity.partitions[several[0]])
            shared |= {self._path_of(identity.partitions[number]) for number in several}
            bases = list_bases(self._disk, path) if self._disk.exists(path) else []
            for number in several[1:]:
                owner = SegmentOwner(identity.store_id, number)
                own = [segment_path(path, base).name for base in bases if is_of(self._disk, path, owner, base)]
                what = f"is the directory of partition {several[0]} and of partition {number}"
                advice = (
                    f"move those of partition {number} to a directory of its own, each with its .index, and name that "
                    f"in partition_dirs: {', '.join(own) or 'there are none'}"
                )
                self._report.fault(path, None, what, advice)
        return shared

    def _check_claims(self, claims: CheckpointClaims, sequences: SequenceCheck) -> None:
        if sequences.last_claimed_us > claims.last_stored_at_us:
            what = f"knows stamps up to {claims.last_stored_at_us}, its log has {sequences.last_claimed_us}"
            self._report.fault(self._claims_path, None, what, "delete it: the one before counts then")
        sequences.check_claims(self._claims_path, *claims.subjects.columns())

    def _path_of(self, partition: PartitionIdentity) -> Path:
        return self._directory / partition.directory  # an absolute path stays as it is

    def _bytes_in(self, directory: Path) -> int:
        total = 0
        for name in self._disk.listdir(directory):
            if name.endswith(SEGMENT_SUFFIX):
                fd = self._disk.open(directory / name, os.O_RDONLY)
                total += self._disk.size(fd)
                self._disk.close(fd)
        return total

    def _advance(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    # --- foreign files -----------------------------------------------------------------------------------------------

    def _look_for_foreign_files(self, names: list[str], identity: Identity) -> None:
        own = {*COPY_NAMES, LOCK_NAME, SUBJECTS_NAME, CONSUMER_LOG_NAME, PULL_LOG_NAME, GROUPS_NAME}
        own |= {DELAYED_NAME, DUE_NAME, PING_NAME}
        own |= {Path(partition.directory).parts[0] for partition in identity.partitions}
        for name in names:
            whole = name.removesuffix(".tmp")
            if name not in own and not _is_checkpoint(name):
                self._report_foreign_file(self._directory / name, whole in own or _is_checkpoint(whole))
        for number, partition in enumerate(identity.partitions):
            for directory in (self._path_of(partition), self._directory / CONSUMER_LOG_NAME / str(number)):
                if self._disk.exists(directory):
                    self._look_into(directory)

    def _look_into(self, directory: Path) -> None:
        for name in self._disk.listdir(directory):
            known = name.endswith(PARTS) or _is_log_file_name(name.removesuffix(UNFINISHED))
            if not known or name.endswith((UNFINISHED, PARTS)):
                self._report_foreign_file(directory / name, known)
            elif name.endswith(RECEIPT_SUFFIX):
                self._check_receipt(directory / name)

    def _check_receipt(self, path: Path) -> None:
        """Note a bad receipt. It is no fault: its segment just counts as not archived."""
        data = read_whole(self._disk, path)
        try:
            parse_receipt(data, path)
        except BadBytes:
            self._report.note(path, None, "is no receipt, or a rotten one", _ARCHIVED_AGAIN)
        else:
            self._report.count("receipt", len(data), 1)

    def _report_foreign_file(self, path: Path, is_own: bool) -> None:
        if is_own:
            self._report.note(path, None, "was left by a write that was interrupted", _REPLACED)
        else:
            self._report.note(path, None, "is a foreign file", _LEAVE)


def _is_checkpoint(name: str) -> bool:
    """Return whether a file name is that of a checkpoint."""
    number = name.removeprefix(PREFIX)
    return number != name and number.isascii() and number.isdecimal()


def _is_file_name(name: str) -> bool:
    """Return whether a file of the data directory itself has this name."""
    return name in (*COPY_NAMES, LOCK_NAME, SUBJECTS_NAME) or _is_checkpoint(name)


def _is_log_file_name(name: str) -> bool:
    """Return whether a file of a partition, or of its consumer log, has this name."""
    stem, dot, suffix = name.partition(".")
    known = dot + suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX, KEYS_SUFFIX, RECEIPT_SUFFIX) and _is_base(stem)
    return known or base_of(name) is not None


def _is_base(stem: str) -> bool:
    return len(stem) == 16 and all(digit in "0123456789abcdef" for digit in stem)


def _contradiction(claims: CheckpointClaims, number: int, identity: Identity) -> str | None:
    """Return what is wrong with a checkpoint whose bytes are good; None when nothing is."""
    if claims.number != number:
        return f"says that it is number {claims.number}"
    if claims.store_id != identity.store_id:
        return f"belongs to store {claims.store_id.hex()}, not {identity.store_id.hex()}"
    if len(claims.partitions) > len(identity.partitions):
        return f"knows {len(claims.partitions)} partitions, the store has {len(identity.partitions)}"
    if claims.sequence_base > identity.sequence_base:
        return f"has sequence base {claims.sequence_base}, above the store's {identity.sequence_base}"
    for partition, claim in enumerate(claims.partitions):
        reserve = identity.partitions[partition].reserve
        ends = [span.end for span in claim.segments]
        bases = [span.base for span in claim.segments]
        if claim.position > reserve:
            return f"puts partition {partition} at {claim.position}, above its reserve {reserve}"
        if any(base > end for base, end in claim.segments) or any(
            base < end for base, end in zip(bases[1:], ends[:-1], strict=True)
        ):
            return f"has segments of partition {partition} that overlap"
        if ends and ends[-1] != claim.position:
            return f"puts partition {partition} at {claim.position}, its last segment ends at {ends[-1]}"
        if claim.journal is not None and claim.journal[0] not in bases:
            return f"has rows of a segment of partition {partition} that it does not name"
    return None
