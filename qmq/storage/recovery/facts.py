"""What can be seen of a data directory before anything in it is read: what recovery decides by."""

from __future__ import annotations

from pathlib import Path

from qmq.storage.disk.disk import Disk, failure
from qmq.storage.disk.envelope import FileState
from qmq.storage.meta.checkpoint import PREFIX, CheckpointFile
from qmq.storage.meta.identity import IdentityCopy
from qmq.storage.opened import CONSUMER_LOG_NAME, SUBJECTS_NAME
from qmq.storage.recovery.decide import Facts, Tail


def facts_of(
    disk: Disk,
    directory: Path,
    copies: tuple[IdentityCopy, IdentityCopy],
    checkpoints: list[CheckpointFile],
    boot_id: str,
) -> Facts:
    """What *copies* and *checkpoints* of a directory say, of tails nothing yet. Raises StorageFailed."""
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
