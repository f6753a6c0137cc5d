"""Runs of error logs and dead letters made whole again: each item is taken from whichever of the two files has it.

An item that is rotten in both becomes one with number 0, which stands for nothing, and the items are kept as they were
in files beside them: whoever wants to may look what can be told of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from crc32c import crc32c

from qmq.storage.disk.disk import Disk, failure, write_fully
from qmq.storage.error_log.sorted_runs import pack_run_header, run_paths
from qmq.storage.meta.group_claim import GroupClaim
from qmq.storage.verify.groups import SET_ASIDE, Copy, read_copy

_CRC_SIZE: Final = 4


#: A file, and a byte of it.
Place = tuple[Path, int]


def repair_runs(disk: Disk, directory: Path, store_id: bytes, claims: list[GroupClaim]) -> set[Place]:
    """Write again what is rotten of the runs that checkpoints know; returns where items could not be brought back.

    Doing it again, after a crash too, changes nothing more. Raises StorageFull, StorageFailed, ForeignFile.
    """
    lost = set[Place]()
    known = {
        (name, number): (runs.item_size, items)
        for claim in claims
        for name, runs in claim.runs.items()
        for number, items in runs.items.items()
    }
    for (name, number), (item_size, items) in sorted(known.items()):
        paths = run_paths(directory / name, number)
        try:
            copies = [read_copy(disk, path, store_id, number, item_size, items) for path in paths]
            if any(copy.problem is not None or not copy.good.all() for copy in copies):
                lost |= _mend(disk, store_id, number, item_size, paths, copies)
        except OSError as error:
            raise failure(error, "mend", error.filename or paths[0]) from error
    return lost


def _mend(
    disk: Disk, store_id: bytes, number: int, item_size: int, paths: tuple[Path, Path], copies: list[Copy]
) -> set[Place]:
    first, second = copies
    rotten = {int(item) for item in (~first.good & ~second.good).nonzero()[0]}
    void = bytes(item_size - _CRC_SIZE)
    void += crc32c(void).to_bytes(_CRC_SIZE, "little")
    data = bytearray()
    for item, good in enumerate(first.good.tolist()):
        source = first if good else second
        data += void if item in rotten else source.data[item * item_size : (item + 1) * item_size]
    header = pack_run_header(store_id, item_size, number, len(first.good))
    for path, copy in zip(paths, copies, strict=True):
        if rotten and copy.exists:
            _write(disk, path.with_name(path.name + SET_ASIDE), header, copy.data)
    for path in paths:
        _write(disk, path, header, bytes(data))
    return {(path, len(header) + item * item_size) for path in paths for item in rotten}


def _write(disk: Disk, path: Path, header: bytes, data: bytes) -> None:
    made = path.with_name(path.name + ".tmp")
    fd = disk.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(disk, fd, [header, data], 0)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(made, path)
    disk.fsync_directory(path.parent)
