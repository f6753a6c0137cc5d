"""Decide how to open a data directory: ``facts_of`` collects the facts, ``decide`` turns them into a plan.

``decide`` is pure. Recovery calls it twice, since it cannot read the tails of the logs before it knows the checkpoint.
The first plan (tail WHOLE) says whether to open the directory, from which checkpoint, and whether to write tails again.
The second, one for each partition, knows the tail of that partition and says what to do with it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from qmq.storage.disk.disk import Disk, failure
from qmq.storage.disk.envelope import FileState
from qmq.storage.meta.checkpoint import PREFIX, CheckpointFile
from qmq.storage.meta.identity import IdentityCopy
from qmq.storage.types import CONSUMER_LOG_NAME, SUBJECTS_NAME, Hole


class Tail(enum.Flag):
    """The state of a partition behind the checkpoint's position."""

    #: Valid batches, or none, and then nothing but zeros or the end of the file.
    WHOLE = 0
    #: Bad bytes that stay, because valid batches follow them.
    HOLES = enum.auto()
    #: No header explains some of the bad bytes: the subjects of their messages are unknown.
    BLIND = enum.auto()
    #: Bytes that are no batch follow the last valid batch.
    JUNK = enum.auto()
    #: The log ends before the checkpoint's position: bytes that were on disk are gone.
    SHORT = enum.auto()
    #: The last segment was cut, as if another had followed, or a foreign file is where the log would continue.
    SEVERED = enum.auto()


class Facts(NamedTuple):
    """The facts about a data directory that recovery depends on."""

    identity_a: FileState
    identity_b: FileState
    #: Whether the directory has logs, checkpoints or a registry.
    populated: bool
    checkpoint: FileState
    checkpoint_before: FileState
    #: The last stop was clean: everything had been synced.
    clean: bool
    #: The machine has not been restarted since the directory was last opened.
    same_boot: bool
    tail: Tail


class Action(enum.Enum):
    """The action on the directory."""

    CREATE = "create"
    OPEN = "open"
    REFUSE_UNKNOWN = "refuse: a file has a format version that this QMQ does not read"
    REFUSE_LOST = "refuse: the identity is lost"


class RecoverySource(enum.Enum):
    """The point where recovery begins."""

    CHECKPOINT = "the checkpoint"
    CHECKPOINT_BEFORE = "the checkpoint before"
    WHOLE_LOG = "the whole log"


class Plan(NamedTuple):
    """The steps of recovery."""

    action: Action
    source: RecoverySource
    #: Write the valid batches behind the checkpoint again and sync them: a page whose sync failed still reads well.
    rewrite: bool
    #: Cut the bytes after the last valid batch.
    cut: bool
    #: Report the bad bytes, and name them in the next checkpoint.
    record_holes: bool
    #: Continue at the reserve: clients may have seen positions that are gone now.
    jump: bool
    #: Raise every subject's sequences past those that clients may have seen and that are gone now.
    raise_sequences: bool


def decide(facts: Facts) -> Plan:
    """Return the plan for these facts."""
    action = _action(facts)
    if action is not Action.OPEN:
        return Plan(action, RecoverySource.WHOLE_LOG, False, False, False, False, False)
    if facts.checkpoint is FileState.GOOD:
        source = RecoverySource.CHECKPOINT
    elif facts.checkpoint_before is FileState.GOOD:
        source = RecoverySource.CHECKPOINT_BEFORE
    else:
        source = RecoverySource.WHOLE_LOG
    lost = (not facts.clean and not facts.same_boot) or bool(facts.tail & (Tail.SHORT | Tail.SEVERED))
    return Plan(
        action,
        source,
        rewrite=not facts.clean,
        cut=Tail.JUNK in facts.tail,
        record_holes=bool(facts.tail & (Tail.HOLES | Tail.BLIND | Tail.SHORT)),
        jump=lost,
        raise_sequences=lost or Tail.BLIND in facts.tail,
    )


def _action(facts: Facts) -> Action:
    identities = (facts.identity_a, facts.identity_b)
    if FileState.UNKNOWN in (*identities, facts.checkpoint, facts.checkpoint_before):
        return Action.REFUSE_UNKNOWN
    if FileState.GOOD in identities:
        return Action.OPEN
    if identities == (FileState.MISSING, FileState.MISSING) and not facts.populated:
        return Action.CREATE
    return Action.REFUSE_LOST


def facts_of(
    disk: Disk,
    directory: Path,
    copies: tuple[IdentityCopy, IdentityCopy],
    checkpoints: list[CheckpointFile],
    boot_id: str,
) -> Facts:
    """Return the facts from *copies* and *checkpoints* of a directory, with tails WHOLE. Raises StorageFailed."""
    found = [copy.identity for copy in copies if copy.identity is not None]
    identity = max(found, key=lambda identity: identity.generation, default=None)
    states = [file.state for file in checkpoints] + [FileState.MISSING] * 2
    return Facts(
        identity_a=copies[0].state,
        identity_b=copies[1].state,
        populated=_is_populated(disk, directory),
        checkpoint=states[0],
        checkpoint_before=states[1],
        clean=identity is not None and identity.clean,
        same_boot=identity is not None and bool(boot_id) and identity.boot_id == boot_id,
        tail=Tail.WHOLE,
    )


def _is_populated(disk: Disk, directory: Path) -> bool:
    names = _names_in(disk, directory)
    ours = (SUBJECTS_NAME, CONSUMER_LOG_NAME)
    if any(name in ours or name.startswith(PREFIX) for name in names):
        return True
    return any(_holds_files(disk, directory / name) for name in names if name.startswith("log-"))


def _holds_files(disk: Disk, path: Path) -> bool:
    try:
        return bool(disk.listdir(path))
    except NotADirectoryError:
        return False
    except OSError as error:
        raise failure(error, "list", path) from error


def _names_in(disk: Disk, path: Path) -> list[str]:
    try:
        return disk.listdir(path)
    except OSError as error:
        raise failure(error, "list", path) from error


@dataclass(slots=True)
class PartitionReport:
    """The report on one partition."""

    partition: int
    #: Bad or lost bytes behind the checkpoint.
    holes: list[Hole] = field(default_factory=list)
    #: Bad or lost bytes before it, found while the consumer log was rebuilt.
    damaged: list[Hole] = field(default_factory=list)
    cut_bytes: int = 0
    replayed_batches: int = 0
    replayed_messages: int = 0
    rewritten_bytes: int = 0
    #: Bytes before the checkpoint that were read to rebuild the consumer log.
    rebuilt_bytes: int = 0
    jumped: bool = False


@dataclass(slots=True)
class RecoveryReport:
    """The report on how a store was opened."""

    created: bool
    clean: bool
    #: The machine may have lost power: positions and sequences continue past the reserve.
    power_loss: bool
    source: RecoverySource
    #: The last checkpoint is rotten or makes no sense, so an older one was used, or none.
    lost_checkpoint: bool = False
    #: The number by which sequences were raised.
    raised_by: int = 0
    partitions: list[PartitionReport] = field(default_factory=list)
    #: Notes for the operator, a sentence each.
    notes: list[str] = field(default_factory=list)

    @property
    def may_lack_messages(self) -> bool:
        """Whether messages that were visible before may be gone, or have other sequences."""
        is_damaged = any(one.holes or one.damaged or one.jumped for one in self.partitions)
        return self.power_loss or self.lost_checkpoint or bool(self.raised_by) or is_damaged
