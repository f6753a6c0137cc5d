"""The files of groups: the pull log, and each group's retries and dead letters.

    pulls/                     the pull log (pull_log/records.py)
    groups/<number>/retries/   runs of the error log (timer_queue.py), the group's number in hex
    groups/<number>/dead/      runs of the dead letters (item_file.py)
    due/                       runs of what is to be delivered later (timer_queue.py); the messages are in ``delayed/``

The broker's state in a checkpoint refers to them. This module syncs what a checkpoint needs before it is written, and
removes what is not needed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from qmq.errors import StorageError
from qmq.format.layout import DELAY_DTYPE, RETRY_DTYPE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.item_file import ItemLog
from qmq.storage.error_log.sorted_runs import RunSync, sweep
from qmq.storage.error_log.timer_queue import Schedule
from qmq.storage.meta.checkpoint import GroupClaim, Runs
from qmq.storage.pull_log.kept import KEEP_NONE, KeptPullFiles, PullLogKeep
from qmq.storage.pull_log.log import ForgetBoot, PullLog, PullSync
from qmq.storage.pull_log.records import (
    PULL_LOG_NAME,
    PullRecord,
    list_pull_files,
    pull_file_path,
    read_pull_log,
    rewrite_pull_log,
)
from qmq.storage.pull_log.scan import PullLogScan
from qmq.storage.types import DUE_NAME, GROUPS_NAME, Hole

Owner = Schedule | ItemLog
AnyOwner = TypeVar("AnyOwner", Schedule, ItemLog)


class GroupSync:
    """The files that a checkpoint needs on disk, and the old ones that it lets go."""

    def __init__(
        self, files: GroupFiles, pulls: PullSync, runs: list[tuple[Owner, RunSync]], claimed_runs: dict[Path, set[int]],
        claimed: int, now_us: int,
    ) -> None:  # fmt: skip
        self._files = files
        self.pulls = pulls
        self.runs = runs
        self.claimed_runs = claimed_runs
        self.claimed = claimed
        self.now_us = now_us

    def run(self) -> None:
        """[thread] Sync the files. Raises SyncFailed, StorageFull or StorageFailed."""
        self.pulls.run()
        for _, sync in self.runs:
            sync.run()

    def clean_up(self) -> None:
        """[thread] Remove what neither the written checkpoint nor the one before needs. Raises StorageFailed."""
        self._files.remove_old(self)


class GroupFiles:
    """The files of groups of one data directory. All of it but the methods of ``GroupSync`` belongs to one thread."""

    def __init__(
        self, disk: Disk, directory: Path, store_id: bytes, secret: bytes, claim: bytes | None, *, clean: bool,
        lost: bool, now_us: int, file_bytes: int, forget_boot: ForgetBoot, keep: PullLogKeep = KEEP_NONE,
    ) -> None:  # fmt: skip
        """Read the pull log behind *claim* (of a checkpoint's state), and begin a new file of it.

        Unless the stop was *clean*, the records that were read are written again first. *lost*: unsynced records may be
        gone, and records behind a gap do not count. *forget_boot* is called when a sync of the pull log fails. Raises
        StorageFull, StorageFailed, ForeignFile.
        """
        self.disk = disk
        self._directory = directory
        self.store_id = store_id
        self.secret = secret
        self._claim = GroupClaim() if claim is None else GroupClaim.unpack(claim)
        self.pulls = pulls = directory / PULL_LOG_NAME
        found = read_pull_log(disk, pulls, store_id, secret, self._claim.position)
        if not clean:
            rewrite_pull_log(disk, pulls, found)
        cut_at = found.end
        if lost and found.holes:
            cut_at = found.holes[0].start
            found.cut(cut_at, found.end)
        self._records = found.records
        self._taken_over = False
        self._has_more = bool(found.records or found.holes)
        #: Positions [start, end) of the pull log, behind the checkpoint, that cannot be read.
        self.holes = found.holes
        #: Texts about problems of the pull log.
        self.notes: list[str] = [what for _, what in found.problems]
        self.notes += [_hole_text(disk, pulls, hole) for hole in found.holes]
        if cut_at < found.end:
            self.notes.append(_cut_text(disk, pulls, cut_at))
        #: Bytes behind the last record that are bad, or were being written.
        self.torn: int = found.torn
        is_cut = lost or bool(found.torn or found.holes)
        #: A new one after each start that may have lost records.
        self.generation: int = max(self._claim.generation, found.generation) + is_cut
        #: How many new generations there were since the checkpoint.
        self.generations_since: int = self.generation - self._claim.generation
        #: Records are missing for another reason than a power loss.
        self.is_rotten: bool = bool(found.holes) or (found.torn > 0 and not lost)
        #: The log itself, for callers that ask it often.
        self.pull_log = PullLog(
            disk, pulls, store_id, secret, found.end, now_us, file_bytes, self.generation, cut_at if is_cut else None,
            forget_boot,
        )  # fmt: skip
        #: Stages a record for the next ``write``.
        self.stage: Callable[[int, bytes], None] = self.pull_log.stage
        #: The same for a record as a tuple.
        self.record = self.pull_log.record
        #: Writes what is staged. Raises StorageFull, StorageFailed or SyncFailed; then it stays staged.
        self.write: Callable[[], None] = self.pull_log.write
        self._kept = KeptPullFiles(disk, pulls, store_id, keep)
        self._claimed_end = -1
        self._owners: dict[Path, Owner] = {}
        self._with_files = set[Path]()  # of owners that may have files: most groups have none
        self._used = set[Path]()  # directories that may have runs
        self._damaged: list[StorageError] = []
        self._claimed = self._claimed_before = self._claim.position
        self._claimed_runs = {directory / name: set(runs.slots) for name, runs in self._claim.runs.items()}

    # --- the pull log ------------------------------------------------------------------------------------------------

    def take_records(self) -> list[PullRecord]:
        """Return the records behind the checkpoint, in order; the caller takes them over. Until then checkpoints claim
        what the one before did.
        """
        records, self._records, self._taken_over = self._records, [], True
        return records

    @property
    def staged(self) -> int:
        """The number of records that are not written yet."""
        return self.pull_log.staged

    def use_clock(self, clock: Callable[[], int]) -> None:
        """Take the wall clock, in microseconds, from *clock*."""
        self.pull_log.clock = clock

    def begin_sync(self) -> PullSync:
        """Return a sync of what is written, to run before the next checkpoint; ``end_sync`` must follow."""
        return self.pull_log.lend_sync()

    def end_sync(self, sync: PullSync, error: Exception | None) -> None:
        """Note that the sync has been run, with that outcome."""
        self.pull_log.take_back(sync)
        if sync.failed:
            self.pull_log.broken = str(error)

    @property
    def broken(self) -> bool:
        """Whether nothing more may be confirmed, because a sync of the pull log has failed."""
        return self.pull_log.broken is not None

    def take_damaged(self) -> list[StorageError]:
        """Return the errors about rotten or unreadable error logs and dead letters since the last call."""
        damaged = self._damaged[:]
        self._damaged.clear()
        return damaged

    # --- for the scrub -----------------------------------------------------------------------------------------------

    def run_names(self) -> list[tuple[Path, int]]:
        """Return directory and number of every run that has items left."""
        owners = [(path, self._owners.get(path)) for path in self._with_files]
        return [(path, number) for path, owner in owners if owner is not None for number in owner.runs()]

    def run_size(self, path: Path, number: int) -> tuple[int, int] | None:
        """Return the bytes of a slot and the number of slots of a run; None once it has no items left."""
        owner = self._owners.get(path)
        slots = owner.runs().get(number) if owner is not None else None
        return None if owner is None or slots is None else (owner.slot_size, slots)

    def scan_pulls(self, since_us: int) -> PullLogScan:
        """Return a reader, for a thread, of what is written of the pull log, also of the files that are kept for it,
        from about *since_us* on.
        """
        return PullLogScan(self.disk, self.pulls, self.store_id, self.secret, self.pull_log.end, since_us)

    def full_pull_files(self) -> list[tuple[int, int]]:
        """Return where each full file of the pull log begins and ends."""
        return self.pull_log.full

    # --- error logs and dead letters ---------------------------------------------------------------------------------

    def retries(self, group: int) -> Schedule:
        """Return the error log of a group, empty: ``restore`` loads what a checkpoint has."""
        path = self._path(group, "retries")
        return self._own(path, Schedule(self.disk, path, self.store_id, RETRY_DTYPE, self._damaged))

    def dead(self, group: int) -> ItemLog:
        """Return the dead letters of a group, empty, as ``retries`` does."""
        path = self._path(group, "dead")
        return self._own(path, ItemLog(self.disk, path, self.store_id, RETRY_DTYPE, self._damaged))

    def delayed(self) -> Schedule:
        """Return the schedule of delayed messages, empty, as ``retries`` does."""
        path = self._directory / DUE_NAME
        return self._own(path, Schedule(self.disk, path, self.store_id, DELAY_DTYPE, self._damaged))

    def _own(self, path: Path, owner: AnyOwner) -> AnyOwner:
        self._owners[path] = owner
        owner.gets_files = partial(self._with_files.add, path)
        return owner

    def forget(self, group: int) -> None:
        """Forget a deleted group: its files go once no checkpoint has them."""
        for name in ("retries", "dead"):
            self._owners.pop(self._path(group, name), None)

    def _path(self, group: int, name: str) -> Path:
        return self._directory / GROUPS_NAME / f"{group:x}" / name

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def begin_checkpoint(self) -> tuple[bytes, GroupSync]:
        """Return the part of the checkpoint's state, and the sync that it needs. Staged records have been written."""
        self.pull_log.settle()
        pulls = self.pull_log.begin_sync()
        synced = pulls.position if self.pull_log.broken is None else self.pull_log.synced_end
        owners = {
            path: owner
            for path in self._with_files
            if (owner := self._owners.get(path)) is not None and owner.has_files
        }
        self._with_files.intersection_update(owners)
        runs = [(owner, owner.begin_sync()) for owner in owners.values()]
        if self._taken_over:
            known = {
                str(path.relative_to(self._directory)): Runs(owner.slot_size, owner.runs())
                for path, owner in owners.items()
                if owner.runs()
            }
            claim = GroupClaim(pulls.position, synced, self.generation, known)
        else:  # the records behind the last checkpoint were not taken over
            claim = self._claim if self._has_more else self._claim._replace(position=pulls.position, synced=synced)
        claimed_runs = {self._directory / name: set(one.slots) for name, one in claim.runs.items()}
        return claim.pack(), GroupSync(self, pulls, runs, claimed_runs, claim.position, self.pull_log.clock())

    def finish_checkpoint(self, sync: GroupSync) -> None:
        """Note that the checkpoint is written."""
        self.pull_log.synced(sync.pulls)
        self.pull_log.full = [span for span in self.pull_log.full if span[1] > self._claimed_before]
        self._claimed_end = sync.pulls.position

    @property
    def is_claimed(self) -> bool:
        """Whether all records of the pull log are in a checkpoint."""
        return self.pull_log.broken is None and not self.pull_log.staged and self._claimed_end == self.pull_log.end

    def fail_checkpoint(self, sync: GroupSync, error: BaseException) -> None:
        """Note that a checkpoint has failed: the next one syncs the same again, but not a pull log whose sync
        failed.
        """
        for owner, runs in sync.runs:
            owner.sync_failed(runs)
        if sync.pulls.failed:
            self.pull_log.broken = str(error)

    def remove_old(self, sync: GroupSync) -> None:
        """[thread] Remove what is older than the two last checkpoints. Raises StorageFailed."""
        self._kept.retire(self._claimed_before, sync.now_us)
        self._claimed_before, self._claimed = self._claimed, sync.claimed
        for path in self._used | self._claimed_runs.keys() | sync.claimed_runs.keys():
            known = self._claimed_runs.get(path, set()) | sync.claimed_runs.get(path, set())
            if self.disk.exists(path):
                owner = self._owners.get(path)
                sweep(self.disk, path, known, owner.unclaimed if owner is not None else set)
            (self._used.add if known else self._used.discard)(path)
        self._claimed_runs = sync.claimed_runs

    def close(self) -> None:
        """Close the pull log; nothing is synced."""
        self.pull_log.close()


def _cut_text(disk: Disk, directory: Path, cut: int) -> str:
    base = _file_of(disk, directory, cut)
    return (
        f"{pull_file_path(directory, base)} lost records in a power loss, from byte {cut - base} on: what consumers "
        "pulled, acked, nacked or released since is not known, and is handed out again"
    )


def _file_of(disk: Disk, directory: Path, position: int) -> int:
    return max((base for base in list_pull_files(disk, directory) if base <= position), default=position)


def _hole_text(disk: Disk, directory: Path, hole: Hole) -> str:
    base = _file_of(disk, directory, hole.start)
    return (
        f"{pull_file_path(directory, base)} has no good record at bytes {hole.start - base} to {hole.end - base}: "
        "groups are set back to there, and get again what they got since; settings, seeks and deletions in these "
        "bytes are lost"
    )
