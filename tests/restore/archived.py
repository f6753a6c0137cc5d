"""Make archives for restores, and read from its log what a broker has of them afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qmq.archive.files import LocalFiles
from qmq.archive.lock import LockOwner, this_process
from qmq.format.batch import parse_header
from qmq.format.layout import HAS_DELIVER_AT, HAS_EXPIRE_AT, RUN_REPLAYED
from qmq.format.pieces import stored_runs
from qmq.net.client.address import parse_url
from qmq.restore.progress import RestoreProgress
from qmq.restore.run import RestoreRun
from qmq.restore.selection import RestoreSelection
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.archive.archives import archive
from tests.archive.orders import write_orders
from tests.storage.stores import close_cleanly, open_store


class Told(NamedTuple):
    """A message as a log has it."""

    id: str
    subject: str
    body: bytes
    created_at_us: int
    header: tuple[tuple[str, Any], ...]
    replayed: bool
    flags: int

    def same_as(self, other: Told) -> bool:
        """Return whether two messages are the same, restored or not."""
        return self._replace(replayed=False, flags=0) == other._replace(replayed=False, flags=0)


def orders_archive(root: Path, batches: int = 200, seed: int = 1) -> list[Told]:
    """Make an archive at *root*/archive of a stopped store at *root*/source; return its messages in the order of the
    log.
    """
    write_orders(root / "source", batches, seed, segment_bytes=256 << 10, max_frame_bytes=128 << 10)
    archive(root / "source", root / "archive")
    return told(root / "source", partitions=2)


def told(directory: Path, partitions: int = 1) -> list[Told]:
    """Return all messages of a stopped broker's log, also those of one group alone."""
    store = open_store(directory, partitions=partitions, segment_bytes=256 << 20, max_frame_bytes=16 << 20)
    found = list[Told]()
    try:
        for partition, header in store.headers_since([]):
            view = store.partitions[partition].message_log.view(header.position, header.size)
            for run in stored_runs(view, parse_header(view)):
                flags = run.flags & (HAS_DELIVER_AT | HAS_EXPIRE_AT)
                for index, body in enumerate(run.bodies()):
                    said = tuple(sorted((name, repr(value)) for name, value in run.header(index).items()))
                    replayed = bool(run.run_flags & RUN_REPLAYED)
                    found.append(Told(str(run.id(index)), run.subject, body, run.created_at_us, said, replayed, flags))
    finally:
        close_cleanly(store)
    report = verify(directory, Disk(), None)
    assert not report.faults, report.faults
    return found


def check_restored(wanted: Sequence[Told], target: Path, **options: int) -> None:
    """Check that each message of *wanted* was restored once, unchanged and marked, and no other."""
    there = told(target, **options)
    doubles = {name: count for name, count in Counter(one.id for one in there).items() if count > 1}
    assert not doubles, f"{len(doubles)} messages are there more than once, as {next(iter(doubles.items()))}"
    by_id = {one.id: one for one in there}
    missing = [one.id for one in wanted if one.id not in by_id]
    assert not missing, f"{len(missing)} of {len(wanted)} messages are not there, as {missing[0]}"
    assert len(there) == len(wanted)
    for one in wanted:
        assert by_id[one.id].same_as(one), (by_id[one.id], one)
        assert by_id[one.id].replayed
        assert not by_id[one.id].flags


def restoring(
    root: Path, url: str, disk: Disk | None = None, owner: LockOwner | None = None, **more: Any
) -> RestoreRun:
    """Return a restore of *root*/archive to the brokers at *url*; *more*: fields of RestoreSelection, options of
    RestoreRun.
    """
    own = {name: more.pop(name) for name in ("again", "give_up_s") if name in more}
    files = LocalFiles(root / "archive", disk)
    who = owner if owner is not None else this_process()
    return RestoreRun(files, RestoreSelection(**more), parse_url(url), lambda: 1_800_000_000_000_000, who, **own)


def restore(root: Path, url: str, **more: Any) -> RestoreProgress:
    """Run it once, without a running loop."""
    return asyncio.run(restoring(root, url, **more).run())
