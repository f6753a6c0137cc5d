"""The files of groups: the pull log, and of each group what is to be handed out again and what is dead.

    pulls/                     the pull log (pull_log.py)
    groups/<number>/retries/   runs of the error log (schedule.py), the group's number in hex
    groups/<number>/dead/      runs of the dead letters (item_log.py)

What a checkpoint says of them is in the broker's state; here is what has to be on disk before it may, and what may go
once it is.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from qmq.format.layout import RETRY_DTYPE
from qmq.storage.checkpoint import Hole
from qmq.storage.disk import Disk
from qmq.storage.item_log import ItemLog
from qmq.storage.pull_log import (
    FILE_BYTES,
    PULL_LOG_NAME,
    PullLog,
    PullRecord,
    PullSync,
    read_pull_log,
    remove_pull_files,
    rewrite_pull_log,
)
from qmq.storage.schedule import Schedule, ScheduleSync, sweep

GROUPS_NAME: Final = "groups"
#: position u64 up to which the pull log is in the checkpoint | generation u32
_CLAIM: Final = struct.Struct("<QI")

Owner = Schedule | ItemLog


class GroupSync:
    """What a checkpoint needs on disk, and what it leaves behind."""

    def __init__(
        self, files: GroupFiles, pulls: PullSync, runs: list[tuple[Owner, ScheduleSync]], kept: dict[Path, set[int]]
    ) -> None:
        self._files = files
        self.pulls = pulls
        self.runs = runs
        self.kept = kept

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
        lost: bool, now_us: int,
    ) -> None:  # fmt: skip
        """Read the pull log behind *claim* (of a checkpoint's state), and begin a new file of it.

        Unless the stop was *clean*, what is read is written again first; *lost*: unsynced records may be gone. Raises
        StorageFull, StorageFailed, ForeignFile.
        """
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        position, generation = _CLAIM.unpack(claim) if claim is not None else (0, 1)
        pulls = directory / PULL_LOG_NAME
        found = read_pull_log(disk, pulls, store_id, secret, position)
        if not clean:
            rewrite_pull_log(disk, pulls, found)
        #: What the log said behind the checkpoint, in order, and where it could not be read.
        self.records: list[PullRecord] = found.records
        self.holes: list[Hole] = found.holes
        self.notes: list[str] = found.notes
        #: Another one after each start before which records may have been lost.
        self.generation: int = generation + lost
        self._log = PullLog(disk, pulls, store_id, secret, found.end, now_us, FILE_BYTES)
        self._claimed_end = -1
        self._owners: dict[Path, Owner] = {}
        self._claimed = self._claimed_before = position
        self._kept: dict[Path, set[int]] = {}

    # --- the pull log ------------------------------------------------------------------------------------------------

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

    # --- error logs and dead letters ---------------------------------------------------------------------------------

    def retries(self, group: int) -> Schedule:
        """The error log of a group, as it is in no run: ``restore`` brings in what a checkpoint knows."""
        path = self._path(group, "retries")
        made = self._owners[path] = Schedule(self._disk, path, self._store_id, RETRY_DTYPE)
        return made

    def dead(self, group: int) -> ItemLog:
        """The dead letters of a group, likewise."""
        path = self._path(group, "dead")
        made = self._owners[path] = ItemLog(self._disk, path, self._store_id, RETRY_DTYPE)
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
        assert not self._log.staged
        pulls = self._log.begin_sync()
        runs = [(owner, owner.begin_sync()) for owner in self._owners.values()]
        kept = {path: owner.runs() for path, owner in self._owners.items()}
        return _CLAIM.pack(pulls.position, self.generation), GroupSync(self, pulls, runs, kept)

    def finish_checkpoint(self, sync: GroupSync) -> None:
        """It is written."""
        self._log.synced(sync.pulls)
        self._claimed_end = sync.pulls.position

    @property
    def is_claimed(self) -> bool:
        """All that the pull log says is in a checkpoint."""
        return self._log.broken is None and not self._log.staged and self._claimed_end == self._log.end

    def fail_checkpoint(self, sync: GroupSync, error: Exception) -> None:
        """It has failed: the next one syncs the same again, but for a pull log whose sync has failed."""
        for owner, runs in sync.runs:
            owner.sync_failed(runs)
        if sync.pulls.failed:
            self._log.broken = str(error)

    def remove_old(self, sync: GroupSync) -> None:
        """[thread] Remove what is older than the two last checkpoints. Raises StorageFailed."""
        remove_pull_files(self._disk, self._directory / PULL_LOG_NAME, self._claimed_before)
        self._claimed_before, self._claimed = self._claimed, sync.pulls.position
        for path in self._kept.keys() | sync.kept.keys():
            if self._disk.exists(path):
                sweep(self._disk, path, self._kept.get(path, set()) | sync.kept.get(path, set()))
        self._kept = sync.kept

    def close(self) -> None:
        """Close the pull log; nothing is synced."""
        self._log.close()
