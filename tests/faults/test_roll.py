"""Kills between any two steps that the disk takes while segments are rolled."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from qmq.storage.disk import Buffer, Disk
from qmq.storage.verify import verify
from tests.storage.stores import Sender, close_cleanly, open_store, positions


class CopyingDisk(Disk):
    """Copies the directory after every step that changes it, while ``target`` is set: what a kill there leaves."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.target: Path | None = None
        self.copies: list[Path] = []

    def _copy(self) -> None:
        if self.target is not None:
            self.copies.append(self.target / str(len(self.copies)))
            shutil.copytree(self.source, self.copies[-1])

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        fd = super().open(path, flags, mode)
        self._copy()
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        self._copy()
        return written

    def ftruncate(self, fd: int, length: int) -> None:
        super().ftruncate(fd, length)
        self._copy()


def test_a_kill_between_any_two_steps_of_a_roll_leaves_no_gap(tmp_path: Path) -> None:
    source = tmp_path / "source"
    disk = CopyingDisk(source)
    store = open_store(source, disk)
    sender = Sender(store)
    sender.send("a.b", b"first")
    disk.target = tmp_path / "copies"
    for number in range(6):  # two rolls in one write
        sender.stage(("a.b", [b"%d" % number * 25_000]))
    sender.write()
    disk.target = None
    store.close(clean=False)
    assert len(disk.copies) > 8
    for copy in disk.copies:
        assert verify(copy, Disk()).faults == 0
        for _ in range(2):
            reopened = open_store(copy)
            recovery = reopened.recovery
            assert not recovery.partitions[0].holes, f"after {copy.name} of {len(disk.copies)} steps"
            assert not recovery.raised_by
            stored = len(positions(reopened))
            assert Sender(reopened).send("a.b", b"next").runs == (("a.b", stored, 1),)
            reopened.close(clean=False)
        close_cleanly(open_store(copy))
        report = verify(copy, Disk())
        assert not report.findings, "\n".join(map(str, report.findings))
