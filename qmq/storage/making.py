"""Making a data directory, and adding partitions to one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from qmq.errors import InvalidOption
from qmq.format.layout import STORE_ID_SIZE
from qmq.storage.disk import Disk, make_directory
from qmq.storage.identity import Identity, IdentityFile, add_partitions, new_identity
from qmq.storage.opened import StoreOptions


def make_identity(disk: Disk, directory: Path, options: StoreOptions, now_us: int, boot_id: str) -> Identity:
    """Make the directories of the partitions, then the identity; all else comes later: no other order survives a crash.

    Raises StorageError, or InvalidOption for options that do not fit.
    """
    hint = options.store_id_hint
    if hint is not None and len(hint) != STORE_ID_SIZE:
        raise InvalidOption(f"store_id_hint has {len(hint)} bytes; give {STORE_ID_SIZE}: IPv4 address and port")
    identity = new_identity(
        disk,
        store_id_hint=disk.random(STORE_ID_SIZE) if hint is None else hint,
        directories=[],
        reserve_bytes=options.reserve_bytes,
        now_us=now_us,
        boot_id=boot_id,
    )
    file = IdentityFile(disk, directory, identity)
    return file.change(partial(with_partitions, disk, directory, options))


def with_partitions(disk: Disk, directory: Path, options: StoreOptions, identity: Identity) -> Identity:
    """The identity with the partitions that the options ask for; directories of new ones are made.

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
    for name in names[known:]:
        make_directory(disk, directory / name)
    partitions = tuple(
        partition._replace(directory=name) for partition, name in zip(identity.partitions, names, strict=False)
    )
    return add_partitions(disk, replace(identity, partitions=partitions), names[known:], options.reserve_bytes)
