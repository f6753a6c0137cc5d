"""Create a data directory, and add partitions to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Final

from qmq.errors import InvalidOption
from qmq.format.layout import STORE_ID_SIZE
from qmq.storage.disk.disk import Disk, make_directory
from qmq.storage.meta.identity import Identity, IdentityFile, add_partitions, new_identity
from qmq.storage.pull_log.records import PULL_LOG_NAME
from qmq.storage.types import CONSUMER_LOG_NAME, DELAYED_NAME, DUE_NAME, GROUPS_NAME, StoreOptions

#: Directories in a data directory that no partition may have.
_TAKEN: Final = (CONSUMER_LOG_NAME, PULL_LOG_NAME, GROUPS_NAME, DELAYED_NAME, DUE_NAME)


def make_identity(disk: Disk, directory: Path, options: StoreOptions, now_us: int, boot_id: str) -> Identity:
    """Create the directories of the partitions, then the identity, then the rest: no other order survives a crash.

    Raises StorageError, or InvalidOption for options that do not fit.
    """
    store_id = disk.random(STORE_ID_SIZE) if options.store_id is None else options.store_id
    if len(store_id) != STORE_ID_SIZE:
        raise InvalidOption(f"store_id has {len(store_id)} bytes; give {STORE_ID_SIZE}")
    identity = new_identity(
        disk,
        store_id=store_id,
        directories=[],
        reserve_bytes=options.reserve_bytes,
        now_us=now_us,
        boot_id=boot_id,
    )
    file = IdentityFile(disk, directory, identity)
    return file.change(partial(with_partitions, disk, directory, options))


def with_partitions(disk: Disk, directory: Path, options: StoreOptions, identity: Identity) -> Identity:
    """Return the identity with the partitions that the options ask for; create the directories of new ones.

    Raises as ``make_identity``.
    """
    known = len(identity.partitions)
    if options.partitions < known:
        raise InvalidOption(
            f"{directory} has {known} partitions, partitions = {options.partitions} would leave some out; "
            f"set partitions = {known} or more"
        )
    if options.partition_dirs and len(options.partition_dirs) != options.partitions:
        raise InvalidOption(
            f"partition_dirs names {len(options.partition_dirs)} directories for {options.partitions} partitions"
        )
    names = [str(path.absolute()) for path in options.partition_dirs] or [
        identity.partitions[number].directory if number < known else f"log-{number}"
        for number in range(options.partitions)
    ]
    check_apart(disk, directory, names)
    for name in names[known:]:
        make_directory(disk, directory / name)
    partitions = tuple(
        partition._replace(directory=name) for partition, name in zip(identity.partitions, names, strict=False)
    )
    return add_partitions(disk, replace(identity, partitions=partitions), names[known:], options.reserve_bytes)


def check_apart(disk: Disk, directory: Path, names: Sequence[str]) -> None:
    """Check that each partition has a directory of its own: *names* are absolute, or relative to *directory*.

    Raises InvalidOption where two are the same directory, under any names, or one lies in the other.
    """
    paths = [(f"partition {number}", directory / name) for number, name in enumerate(names)]
    taken = [("the data directory", directory / name) for name in _TAKEN]
    for (whose, path), (others, other) in [*combinations(paths, 2), *((mine, its) for mine in paths for its in taken)]:
        mine, its = disk.resolve(path), disk.resolve(other)
        if mine == its:
            raise InvalidOption(
                f"{path} of {whose} is the same directory as {other} of {others}; give each partition a directory of "
                "its own in partition_dirs"
            )
        if mine in its.parents or its in mine.parents:
            raise InvalidOption(
                f"{path} of {whose} and {other} of {others} lie one in the other; give each partition a directory of "
                "its own in partition_dirs"
            )
