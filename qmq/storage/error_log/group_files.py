"""The files of groups: the pull log, and of each group what is to be handed out again and what is dead.

    pulls/                     the pull log (pull_records.py)
    groups/<number>/retries/   runs of the error log (schedule.py), the group's number in hex
    groups/<number>/dead/      runs of the dead letters (item_log.py)
    due/                       runs of what is to be delivered later (schedule.py); the messages are in ``delayed/``

What a checkpoint says of them is in the broker's state; here is what has to be on disk before it may, and what may go
once it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from qmq.errors import StorageError
from qmq.format.layout import DELAY_DTYPE, RETRY_DTYPE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.item_file import ItemLog
from qmq.storage.error_log.sorted_runs import RunSync, sweep
from qmq.storage.error_log.timer_queue import Schedule
from qmq.storage.meta.checkpoint import DUE_NAME, GROUPS_NAME, GroupClaim, Hole, Runs
from qmq.storage.pull_log.log import PullLog, PullSync
from qmq.storage.pull_log.records import (
    PULL_LOG_NAME,
    PullRecord,
    list_pull_files,
    pull_file_path,
    read_pull_log,
    remove_pull_files,
    rewrite_pull_log,
)
from qmq.storage.verify.scrub_groups import GroupReader, PullReader, RunReader

Owner = Schedule | ItemLog


class GroupSync:
    """What a checkpoint needs on disk, and what it leaves behind."""

    def __init__(
        self, files: GroupFiles, pulls: PullSync, runs: list[tuple[Owner, RunSync]], kept: dict[Path, set[int]],
        claimed: int,
    ) -> None:  # fmt: skip
        self._files = files
        self.pulls = pulls
        self.runs = runs
        self.kept = kept
        self.claimed = claimed

    def run(self) -> None:
        """[thread] Sync all of it. Raises SyncFailed, StorageFull or StorageFailed."""
        self.pulls.run()
        for _, sync in self.runs:
            sync.run()

    def clean_up(self) -> None:
        """[thread] The checkpoint is written: remove what neither it nor the one before needs. Raises StorageFailed."""
        self._files.remove_old(self)


class GroupFiles:
    """Of one data directory. Belongs to one thread, but for what ``GroupSync`` does."""

    def __init__(
        self, disk: Disk, directory: Path, store_id: bytes, secret: bytes, claim: bytes | None, *, clean: bool,
        lost: bool, now_us: int, file_bytes: int,
    ) -> None:  # fmt: skip
        """Read the pull log behind *claim* (of a checkpoint's state), and begin a new file of it.

        Unless the stop was *clean*, what is read is written again first; *lost*: unsynced records may be gone, and what
        came after one that is does not count. Raises StorageFull, StorageFailed, ForeignFile.
        """
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        self._secret = secret
        self._claim = GroupClaim() if claim is None else GroupClaim.unpack(claim)
        pulls = directory / PULL_LOG_NAME
        found = read_pull_log(disk, pulls, store_id, secret, self._claim.position)
        if not clean:
            rewrite_pull_log(disk, pulls, found)
        cut_at = found.end
        if lost and found.holes:
            cut_at = found.holes[0].start
            found.cut(cut_at, found.end)
        self._records = found.records
        self._told = False
        self._has_more = bool(found.records or found.holes)
        #: Positions of the pull log, behind the checkpoint, that cannot be read: [start, end) each.
        self.holes = found.holes
        #: What else there is to say of it.
        self.notes: list[str] = [what for _, what in found.problems]
        self.notes += [_told(disk, pulls, hole) for hole in found.holes]
        if cut_at < found.end:
            self.notes.append(_told_of_cut(disk, pulls, cut_at))
        #: So many bytes behind the last record are bad, or were being written.
        self.torn: int = found.torn
        is_cut = lost or bool(found.torn or found.holes)
        #: Another one after each start before which records may have been lost.
        self.generation: int = max(self._claim.generation, found.generation) + is_cut
        #: How often that was since the checkpoint.
        self.generations_since: int = self.generation - self._claim.generation
        #: Records are missing that were there, and not because the power failed.
        self.is_rotten: bool = bool(found.holes) or (found.torn > 0 and not lost)
        self._log = PullLog(
            disk, pulls, store_id, secret, found.end, now_us, file_bytes, self.generation, cut_at if is_cut else None
        )
        self._claimed_end = -1
        self._owners: dict[Path, Owner] = {}
        self._used = set[Path]()  # directories that may have runs
        self._damaged: list[StorageError] = []
        self._claimed = self._claimed_before = self._claim.position
        self._kept = {directory / name: set(runs.items) for name, runs in self._claim.runs.items()}

    # --- the pull log ------------------------------------------------------------------------------------------------

    def take_records(self) -> list[PullRecord]:
        """What the log said behind the checkpoint, in order: whoever takes it keeps it. Until then checkpoints claim
        what the one before did.
        """
        records, self._records, self._told = self._records, [], True
        return records

    def stage(self, kind: int, payload: bytes) -> None:
        """Have a record written by the next ``write``."""
        self._log.stage(kind, payload)

    @property
    def staged(self) -> int:
        """How many records are not written yet."""
        return self._log.staged

    def write(self) -> None:
        """Write what is staged. Raises StorageFull, StorageFailed or SyncFailed; then it stays staged."""
        self._log.write()

    def begin_sync(self) -> PullSync:
        """What is written is to be on disk before the next checkpoint has it there; ``end_sync`` must follow."""
        return self._log.lend_sync()

    def end_sync(self, sync: PullSync, error: Exception | None) -> None:
        """It was run, with that outcome."""
        self._log.take_back(sync)
        if sync.failed:
            self._log.broken = str(error)

    @property
    def broken(self) -> bool:
        """Nothing more may be confirmed: a sync of the pull log has failed."""
        return self._log.broken is not None

    def take_damaged(self) -> list[StorageError]:
        """What was rotten in error logs and dead letters, or refused by the system, since the last call."""
        damaged = self._damaged[:]
        self._damaged.clear()
        return damaged

    # --- the scrub ---------------------------------------------------------------------------------------------------

    def scrubbed(self) -> list[Callable[[], GroupReader | None]]:
        """What there is to be read again: each gives a reader, None once nobody needs it any more."""
        runs = [
            partial(self._run_reader, path, owner, number)
            for path, owner in self._owners.items()
            for number in owner.runs()
        ]
        return [*runs, *(partial(self._pull_reader, *span) for span in self._log.full)]

    def _run_reader(self, path: Path, owner: Owner, number: int) -> GroupReader | None:
        items = owner.runs().get(number)
        if items is None or self._owners.get(path) is not owner:
            return None
        return RunReader(self._disk, path, self._store_id, number, owner.item_size, items)

    def _pull_reader(self, base: int, end: int) -> GroupReader | None:
        if (base, end) not in self._log.full:
            return None
        return PullReader(self._disk, self._directory / PULL_LOG_NAME, base, end, self._secret)

    # --- error logs and dead letters ---------------------------------------------------------------------------------

    def retries(self, group: int) -> Schedule:
        """The error log of a group, as it is in no run: ``restore`` brings in what a checkpoint knows."""
        path = self._path(group, "retries")
        made = self._owners[path] = Schedule(self._disk, path, self._store_id, RETRY_DTYPE, self._damaged)
        return made

    def dead(self, group: int) -> ItemLog:
        """The dead letters of a group, likewise."""
        path = self._path(group, "dead")
        made = self._owners[path] = ItemLog(self._disk, path, self._store_id, RETRY_DTYPE, self._damaged)
        return made

    def delayed(self) -> Schedule:
        """When delayed messages fall due, likewise."""
        path = self._directory / DUE_NAME
        made = self._owners[path] = Schedule(self._disk, path, self._store_id, DELAY_DTYPE, self._damaged)
        return made

    def forget(self, group: int) -> None:
        """The group is deleted: its files go when no checkpoint knows them any more."""
        for name in ("retries", "dead"):
            self._owners.pop(self._path(group, name), None)

    def _path(self, group: int, name: str) -> Path:
        return self._directory / GROUPS_NAME / f"{group:x}" / name

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def begin_checkpoint(self) -> tuple[bytes, GroupSync]:
        """What the checkpoint's state has to say, and what it needs. All that is staged has been written."""
        self._log.settle()
        pulls = self._log.begin_sync()
        synced = pulls.position if self._log.broken is None else self._log.synced_end
        owners = {path: owner for path, owner in self._owners.items() if owner.has_files}
        runs = [(owner, owner.begin_sync()) for owner in owners.values()]
        if self._told:
            known = {
                str(path.relative_to(self._directory)): Runs(owner.item_size, owner.runs())
                for path, owner in owners.items()
                if owner.runs()
            }
            claim = GroupClaim(pulls.position, synced, self.generation, known)
        else:  # nobody has taken over what the last one left
            claim = self._claim if self._has_more else self._claim._replace(position=pulls.position, synced=synced)
        kept = {self._directory / name: set(one.items) for name, one in claim.runs.items()}
        return claim.pack(), GroupSync(self, pulls, runs, kept, claim.position)

    def finish_checkpoint(self, sync: GroupSync) -> None:
        """It is written."""
        self._log.synced(sync.pulls)
        self._log.full = [span for span in self._log.full if span[1] > self._claimed_before]
        self._claimed_end = sync.pulls.position

    @property
    def is_claimed(self) -> bool:
        """All that the pull log says is in a checkpoint."""
        return self._log.broken is None and not self._log.staged and self._claimed_end == self._log.end

    def fail_checkpoint(self, sync: GroupSync, error: BaseException) -> None:
        """It has failed: the next one syncs the same again, but for a pull log whose sync has failed."""
        for owner, runs in sync.runs:
            owner.sync_failed(runs)
        if sync.pulls.failed:
            self._log.broken = str(error)

    def remove_old(self, sync: GroupSync) -> None:
        """[thread] Remove what is older than the two last checkpoints. Raises StorageFailed."""
        remove_pull_files(self._disk, self._directory / PULL_LOG_NAME, self._claimed_before)
        self._claimed_before, self._claimed = self._claimed, sync.claimed
        for path in self._used | self._kept.keys() | sync.kept.keys():
            known = self._kept.get(path, set()) | sync.kept.get(path, set())
            if self._disk.exists(path):
                owner = self._owners.get(path)
                sweep(self._disk, path, known, owner.unclaimed if owner is not None else set)
            (self._used.add if known else self._used.discard)(path)
        self._kept = sync.kept

    def close(self) -> None:
        """Close the pull log; nothing is synced."""
        self._log.close()


def _told_of_cut(disk: Disk, directory: Path, cut: int) -> str:
    base = _file_of(disk, directory, cut)
    return (
        f"{pull_file_path(directory, base)} lost records with the power from byte {cut - base} on: what consumers "
        "pulled, acknowledged or handed back since is not known, and is handed out again"
    )


def _file_of(disk: Disk, directory: Path, position: int) -> int:
    return max((base for base in list_pull_files(disk, directory) if base <= position), default=position)


def _told(disk: Disk, directory: Path, hole: Hole) -> str:
    base = _file_of(disk, directory, hole.start)
    return (
        f"{pull_file_path(directory, base)} has no good record at bytes {hole.start - base} to {hole.end - base}: "
        "groups are set back to there, and are handed again what they were given since; what these bytes said of "
        "settings, seeks or deletions is lost"
    )
