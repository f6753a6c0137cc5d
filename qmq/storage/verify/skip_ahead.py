"""Skip ahead in a data directory that is an older copy, so that no id is given twice.

A broker goes on where its files end. On an older copy that is where messages once were that came after the copy was
made: new messages would get their ids and sequences. So the reserves are raised, and the next start behaves as one
after loss of power does: it continues at the reserves, and notes the sequences between as gaps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import BadBytes, InvalidOption
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.identity import COPY_NAMES, Identity, IdentityFile
from qmq.storage.types import DELAYED_NAME
from qmq.storage.verify.repair import check_is_ours, identity_of, start

#: The most bytes of one skip: positions end at 2^64.
MAX_SKIP_BYTES: Final = 1 << 50


class SkippedAhead(NamedTuple):
    """The positions at which the partitions continue, and by how much the sequences of all subjects were raised."""

    positions: list[int]
    raised_by: int


def skip_ahead(directory: Path, disk: Disk, now_us: int, skip_bytes: int) -> SkippedAhead:
    """Let positions and sequences of a data directory and of its delay log continue *skip_bytes* or more behind the
    reserves, and behind everything that is there. A second call skips again.

    Raises InvalidOption for a bad size or when there is no data directory, DirectoryInUse while a broker uses it,
    BadBytes without a good identity, and the errors of opening, such as StorageFull.
    """
    if not 0 < skip_bytes <= MAX_SKIP_BYTES:
        raise InvalidOption(f"the bytes to skip must be 1 to {MAX_SKIP_BYTES} (1,024 TiB), not {skip_bytes}")
    check_is_ours(directory, disk)
    delayed = directory / DELAYED_NAME
    if any(disk.exists(delayed / name) for name in COPY_NAMES):
        _skip_one(delayed, disk, now_us, skip_bytes)  # first: the call is done once the directory itself is
    return _skip_one(directory, disk, now_us, skip_bytes)


def _skip_one(directory: Path, disk: Disk, now_us: int, skip_bytes: int) -> SkippedAhead:
    lock = DirectoryLock.acquire(disk, directory, now_us)
    try:
        found = identity_of(directory, disk)
        if found is None:
            raise BadBytes(f"{directory} has no good identity; run qmq repair, or put store-a and store-b back")
        identity = IdentityFile(disk, directory, found).change(lambda before: _behind(before, skip_bytes))
    finally:
        lock.release()
    recovery = start(directory, disk, now_us, identity, ())
    return SkippedAhead([partition.reserve for partition in identity.partitions], recovery.raised_by)


def _behind(identity: Identity, skip_bytes: int) -> Identity:
    """Return the identity of a directory that lost power with reserves that lie *skip_bytes* higher."""
    partitions = tuple(one._replace(reserve=one.reserve + skip_bytes) for one in identity.partitions)
    return replace(identity, partitions=partitions, clean=False, boot_id="")
