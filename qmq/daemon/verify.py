"""Verify a data directory: its files (storage/verify), and whether what became of the messages of its groups adds up.

The groups are those of the last good checkpoint; records behind it are left to the next start. Consumers, retries and
dead letters are counted one by one, not by the counts that a broker keeps of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgpack

from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.passed import HELD, Unaccounted
from qmq.errors import StorageError
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log.item_file import ItemLog
from qmq.storage.error_log.timer_queue import Schedule
from qmq.storage.meta.checkpoint import CheckpointClaims, checkpoint_path
from qmq.storage.types import GROUPS_NAME
from qmq.storage.verify.groups import good_checkpoints
from qmq.storage.verify.verify import Progress, VerifyReport
from qmq.storage.verify.verify import verify as verify_files

_ADVICE: Final = (
    "keep a copy of the directory, and report it; a broker serves it, and `qmq trace ID` says what became of a message"
)


def verify(directory: Path, disk: Disk, progress: Progress | None = None) -> VerifyReport:
    """Check the data directory of a stopped broker, or a copy of any. Raises as ``verify`` of the files does."""
    report = verify_files(directory, disk, progress)
    claims = next(iter(good_checkpoints(disk, directory)), None)
    if claims is not None and "groups" in claims.state:
        _GroupAccounts(directory, disk, claims, report).check(claims.state["groups"])
    return report


class _GroupAccounts:
    """The check of the groups of one checkpoint."""

    def __init__(self, directory: Path, disk: Disk, claims: CheckpointClaims, report: VerifyReport) -> None:
        self._directory = directory
        self._disk = disk
        self._store_id = claims.store_id
        self._report = report
        self._path = checkpoint_path(directory, claims.number)

    def check(self, groups: bytes) -> None:
        """Add a fault for each group whose messages do not add up."""
        try:
            for name, (number, progress, state) in msgpack.unpackb(groups, strict_map_key=False).items():
                fields = msgpack.unpackb(progress, strict_map_key=False)
                if passed := fields.get("unaccounted", 0):
                    what = (
                        f"the cursors of group {name} have passed {passed:,} messages more or fewer than records count"
                    )
                    self._report.fault(self._path, None, what, _ADVICE)
                self._check_held(name, number, msgpack.unpackb(state, strict_map_key=False))
        except (ArithmeticError, LookupError, TypeError, ValueError, msgpack.UnpackException) as error:
            what = f"its state of groups makes no sense ({error!r:.200})"
            self._report.fault(self._path, None, what, "nothing: a start uses the checkpoint before")

    def _check_held(self, name: str, number: int, fields: dict[str, Any]) -> None:
        fields.setdefault("filtered", 0)  # where an older checkpoint has it elsewhere
        damaged, home = list[StorageError](), self._directory / GROUPS_NAME / f"{number:x}"
        schedule = Schedule(self._disk, home / "retries", self._store_id, RETRY_DTYPE, damaged)
        dead = ItemLog(self._disk, home / "dead", self._store_id, RETRY_DTYPE, damaged)
        ledger = Ledger(number, schedule, dead, lambda record: None)
        try:
            ledger.restore(fields)
            found = _counted(ledger)
        except StorageError:
            return  # the files' own check says so
        if not damaged and found != ledger.totals.held:
            wrong = Unaccounted(name, HELD, ledger.totals.held, found)
            self._report.fault(self._path, None, str(wrong), _ADVICE)


def _counted(ledger: Ledger) -> int:
    """Return how many messages are in flight, in retry and dead, counted one by one. Raises StorageError."""
    in_flight = sum(
        part.messages.total
        for member in ledger.members.values()
        for start, end in member.in_flight.unhandled()
        for part in member.in_flight.between(start, end)
    )
    return in_flight + ledger.retries.counted_in_files() + sum(map(len, ledger.dead.after(0)))
