"""Verify, for the files of groups: the pull log, and the runs of error logs and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import SCHEDULE_HEADER_SIZE
from qmq.storage.disk.disk import BAD_SECTOR, Disk, read_around
from qmq.storage.error_log.sorted_runs import check_run_header, run_number, run_paths
from qmq.storage.meta.checkpoint import (
    GROUP_STATE,
    KEPT,
    CheckpointClaims,
    GroupClaim,
    list_checkpoints,
    read_checkpoint,
)
from qmq.storage.meta.identity import Identity
from qmq.storage.pull_log.kept import KEPT_SUFFIX, kept_file_path
from qmq.storage.pull_log.records import (
    PULL_LOG_NAME,
    SUFFIX,
    check_pull_file,
    list_pull_files,
    pull_file_generation,
    pull_file_path,
    read_pull_log,
)
from qmq.storage.types import DUE_NAME, GROUPS_NAME
from qmq.storage.verify.report import VerifyReport

#: The suffix of files with the bytes of a rotten run that repair keeps.
SET_ASIDE: Final = ".set-aside"

_PULLS_ADVICE: Final = "nothing but a restart: groups are set back to there, and get again what they got since"
_OTHER_COPY: Final = "run qmq repair: the other copy has it"
_BOTH: Final = "run qmq repair: it takes out rotten items; which messages they named, or why, is lost"
_CRC_SIZE: Final = 4


class RunFile(NamedTuple):
    """One file of a run: the bytes of its slots (those at the end may be missing), which slots are good, the problem of
    its header, and whether it exists. Slots have items, and behind these their reasons.
    """

    data: bytes
    good: npt.NDArray[np.bool_]
    problem: str | None
    exists: bool


def group_claims(checkpoints: Sequence[CheckpointClaims]) -> list[GroupClaim]:
    """Return the part about groups of each checkpoint that has one. Raises BadBytes."""
    return [GroupClaim.unpack(one.state[GROUP_STATE]) for one in checkpoints if GROUP_STATE in one.state]


def good_checkpoints(disk: Disk, directory: Path) -> list[CheckpointClaims]:
    """Return the good ones of the checkpoints that are kept, the last one first. Raises StorageFailed."""
    numbers = list_checkpoints(disk, directory)[:KEPT]
    return [claims for number in numbers if (claims := read_checkpoint(disk, directory, number).claims) is not None]


class GroupsCheck:
    """One check of the files of groups; *claims* are those of the checkpoints, the last one first."""

    def __init__(
        self, disk: Disk, directory: Path, report: VerifyReport, identity: Identity, claims: Sequence[GroupClaim]
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._report = report
        self._identity = identity
        self._claims = claims

    def run(self) -> None:
        """Fill the report. Raises OSError and StorageError."""
        self._check_pulls()
        self._check_kept_pulls()
        for age, claim in enumerate(self._claims):
            for name, runs in claim.runs.items():
                known = self._claims[0].runs[name].slots if age and name in self._claims[0].runs else {}
                for number, slots in runs.slots.items():
                    if number not in known:
                        self._check_run(self._directory / name, number, runs.slot_size, slots, is_fault=not age)
        self._look_for_foreign_files()

    # --- the pull log ------------------------------------------------------------------------------------------------

    def _check_pulls(self) -> None:
        """Check the pull log from where the older checkpoint needs it; what the newer one has as synced must be
        good.
        """
        directory = self._directory / PULL_LOG_NAME
        claimed = self._claims[0].synced if self._claims else 0
        start = min((claim.position for claim in self._claims), default=0)
        bases = list_pull_files(self._disk, directory)
        if not self._claims and bases:
            start = bases[0]  # no checkpoint is good: a start reads all files
        found = read_pull_log(self._disk, directory, self._identity.store_id, self._identity.secret, start)
        for index, base in enumerate(bases):
            self._report.count("pulls", self._size(pull_file_path(directory, base)), 0 if index else len(found.records))
        passed = self._passed(directory, bases)
        for hole in found.holes:
            base = max((base for base in bases if base <= hole.start), default=hole.start)
            what = f"{hole.end - hole.start} bytes are no record, or gone"
            is_fault = hole.start < claimed and base not in passed
            self._report.add(is_fault, pull_file_path(directory, base), hole.start - base, what, _PULLS_ADVICE)
        for base, problem in found.problems:
            is_fault = base < claimed and base not in passed
            self._report.add(is_fault, pull_file_path(directory, base), 0, problem, _PULLS_ADVICE)
        before = max((base for base in bases if base < claimed), default=None)
        # A start reads the records between the claims. Where there are none, the last file is there all the same, but
        # for one whose sync has failed: nothing that it holds is missed.
        is_needed = claimed > start or (bool(claimed) and claimed == self._claims[0].position)
        if is_needed and before is None:
            path = pull_file_path(directory, claimed)
            self._report.fault(path, None, f"the records before position {claimed} are missing", _PULLS_ADVICE)
        elif before is not None and found.end < claimed:
            what = f"the last record ends {claimed - found.end} bytes before what the checkpoint knows"
            self._report.fault(pull_file_path(directory, before), max(0, found.end - before), what, _PULLS_ADVICE)

    def _check_kept_pulls(self) -> None:
        """Check the files of the pull log that are kept for traces: no start needs them."""
        directory = self._directory / PULL_LOG_NAME
        bases = list_pull_files(self._disk, directory, KEPT_SUFFIX)
        live = [base for base in list_pull_files(self._disk, directory) if bases and base > bases[-1]]
        for base, end in zip_longest(bases, [*bases[1:], *live[:1]]):
            path = kept_file_path(directory, base)
            self._report.count("kept pulls", self._size(path))
            identity = self._identity
            for what in check_pull_file(self._disk, path, base, end, identity.store_id, identity.secret):
                self._report.note(path, None, what, "nothing: only traces read it, and they lack these events")

    def _passed(self, directory: Path, bases: list[int]) -> set[int]:
        """Return the files behind which a start has begun another generation: it knew of their bad records, and has
        handed out again what those may have said.
        """
        passed, newest = set[int](), [1]
        generations = [pull_file_generation(self._disk, directory, self._identity.store_id, base) for base in bases]
        for index, base in enumerate(bases):
            newest.append(generations[index] or newest[-1])
            if any(later is not None and later > newest[-1] for later in generations[index + 1 :]):
                passed.add(base)
        return passed

    def _size(self, path: Path) -> int:
        fd = self._disk.open(path, 0)
        try:
            return self._disk.size(fd)
        finally:
            self._disk.close(fd)

    # --- runs --------------------------------------------------------------------------------------------------------

    def _check_run(self, directory: Path, number: int, slot_size: int, slots: int, *, is_fault: bool) -> None:
        paths = run_paths(directory, number)
        copies = [read_copy(self._disk, path, self._identity.store_id, number, slot_size, slots) for path in paths]
        for path, copy, other in zip(paths, copies, reversed(copies), strict=True):
            self._report.count("runs", len(copy.data), slots)
            if copy.problem is not None:
                self._report.add(is_fault, path, 0 if copy.exists else None, copy.problem, _OTHER_COPY)
            bad = np.flatnonzero(~copy.good) if copy.exists else np.flatnonzero(~copy.good & ~other.good)
            for slot in bad.tolist():
                both = not other.good[slot]
                what = f"item {slot} is rotten, in both copies" if both else f"item {slot} is rotten"
                position = SCHEDULE_HEADER_SIZE + slot * slot_size
                self._report.add(is_fault, path, position, what, _BOTH if both else _OTHER_COPY)

    # --- foreign files -----------------------------------------------------------------------------------------------

    def _look_for_foreign_files(self) -> None:
        known = {
            path
            for claim in self._claims
            for name, runs in claim.runs.items()
            for number in runs.slots
            for path in run_paths(self._directory / name, number)
        }
        for name in self._names(self._directory / PULL_LOG_NAME):
            stem = name.removesuffix(SUFFIX).removesuffix(KEPT_SUFFIX)
            if stem == name or len(stem) != 16 or not _is_hex(stem):
                self._report_foreign(self._directory / PULL_LOG_NAME / name)
        for path in [*self._files(self._directory / GROUPS_NAME, 2), *self._files(self._directory / DUE_NAME, 0)]:
            if path in known:
                continue
            if path.name.endswith(SET_ASIDE):
                what = "has the bytes of a run with rotten items, from before a repair"
                self._report.note(path, None, what, "delete it when you do not want to look at it")
            elif run_number(path.name.removesuffix(".tmp")) is not None:
                self._report.note(path, None, "is known to no checkpoint", "nothing: it is removed, or written again")
            else:
                self._report_foreign(path)

    def _files(self, directory: Path, depth: int) -> list[Path]:
        """Return the files in the directories *depth* levels below; report other files on the way."""
        found = []
        for name in self._names(directory):
            path = directory / name
            if not depth:
                found.append(path)
            elif path.is_dir():
                found += self._files(path, depth - 1)
            else:
                self._report_foreign(path)
        return found

    def _names(self, directory: Path) -> list[str]:
        return sorted(self._disk.listdir(directory)) if self._disk.exists(directory) else []

    def _report_foreign(self, path: Path) -> None:
        self._report.note(path, None, "is a foreign file", "nothing: it is not QMQ's, and is left alone")


def read_copy(disk: Disk, path: Path, store_id: bytes, number: int, slot_size: int, slots: int) -> RunFile:
    """Read one file of a run. Raises OSError, ForeignFile for a newer version."""
    size = SCHEDULE_HEADER_SIZE + slots * slot_size
    try:
        fd = disk.open(path, 0)
    except OSError as error:
        if error.errno not in BAD_SECTOR and not isinstance(error, FileNotFoundError):
            raise
        return RunFile(b"", np.zeros(slots, np.bool_), "is missing", False)
    try:
        whole, lost = read_around(disk, fd, size, 0)
    finally:
        disk.close(fd)
    problem = f"{lost} bytes cannot be read" if lost else None
    try:
        found = check_run_header(whole[:SCHEDULE_HEADER_SIZE], path, store_id, slot_size, number)
        if found != slots:
            problem = f"says that it has {found} slots, the checkpoint knows {slots}"
    except BadBytes as error:
        problem = str(error)
    data = whole[SCHEDULE_HEADER_SIZE:]
    return RunFile(data, good_slots(data, slot_size, slots), problem, True)


def good_slots(data: bytes, slot_size: int, slots: int) -> npt.NDArray[np.bool_]:
    """Return which slots of a file of a run fit their checksums; missing ones do not."""
    good = np.zeros(slots, np.bool_)
    view = memoryview(data)
    for slot in range(min(slots, len(data) // slot_size)):
        body = view[slot * slot_size : (slot + 1) * slot_size]
        good[slot] = crc32c(body[:-_CRC_SIZE]) == int.from_bytes(body[-_CRC_SIZE:], "little")
    return good


def _is_hex(stem: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in stem)
