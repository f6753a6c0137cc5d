"""Kills between any two steps that the disk takes while segments are rolled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk, Operation
from tests.storage.stores import Sender, close_cleanly, open_store, positions


class Copies:
    """Copies of a directory after every step that changes it, while ``target`` is set: what a kill there leaves."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.target: Path | None = None
        self.copies: list[Path] = []
        self.disk = FakeDisk()
        self.disk.after = self._copy

    def _copy(self, operation: Operation) -> None:
        if self.target is not None:
            self.copies.append(self.target / str(len(self.copies)))
            shutil.copytree(self.source, self.copies[-1], ignore=shutil.ignore_patterns("ping"))


@pytest.mark.parametrize("together", [True, False])
def test_a_kill_between_any_two_steps_of_a_roll_leaves_no_gap(tmp_path: Path, together: bool) -> None:
    source = tmp_path / "source"
    copied = Copies(source)
    store = open_store(source, copied.disk)
    sender = Sender(store)
    sender.send("a.b", b"first")
    copied.target = tmp_path / "copies"
    for number in range(6):  # two rolls, in one write or in one each
        sender.stage(("a.b", [b"%d" % number * 25_000]))
        if not together:
            sender.write()
    sender.write()
    copied.target = None
    store.close(clean=False)
    assert len(copied.copies) > 8
    for copy in copied.copies:
        assert verify(copy, Disk()).faults == 0
        for _ in range(2):
            stored = assert_no_gap(copy)
            reopened = open_store(copy)
            assert Sender(reopened).send("a.b", b"next").runs == (("a.b", stored, 1),)
            reopened.close(clean=False)
        close_cleanly(open_store(copy))
        report = verify(copy, Disk())
        assert not report.findings, "\n".join(map(str, report.findings))
        assert not list(copy.rglob("*.tmp"))


def assert_no_gap(directory: Path) -> int:
    """Open the store and kill it: it went on where it was; returns how many batches it has."""
    store = open_store(directory)
    recovery = store.recovery
    assert not recovery.partitions[0].holes, directory
    assert not recovery.partitions[0].jumped, directory
    assert not recovery.raised_by, directory
    stored = len(positions(store))
    store.close(clean=False)
    return stored


@pytest.mark.parametrize("left", ["nothing", "junk", "a segment to be"])
def test_a_kill_between_any_two_steps_of_a_start_leaves_no_gap(tmp_path: Path, left: str) -> None:
    source = tmp_path / "source"
    store = open_store(source)
    sender = Sender(store)
    sent = 3
    for number in range(sent):
        sender.send("a.b", b"%d" % number * 100)
    end = store.partitions[0].message_log.end
    store.close(clean=False)
    (segment,) = (source / "log-0").glob("*.messages")
    if left == "junk":
        with segment.open("r+b") as file:
            file.seek(end - base_of_segment(segment))
            file.write(b"half of a batch that was being written")
    elif left == "a segment to be":
        segment.with_name(f"{end:016x}.messages.tmp").write_bytes(b"")
    copied = Copies(source)
    copied.target = tmp_path / "copies"
    open_store(source, copied.disk).close(clean=False)
    assert len(copied.copies) > 8
    for copy in copied.copies:
        assert assert_no_gap(copy) == sent
        close_cleanly(open_store(copy))
        assert not verify(copy, Disk()).findings
        assert not list(copy.rglob("*.tmp"))


@pytest.mark.parametrize("left", [0, 40, 95])
def test_a_log_that_ends_with_its_segment_goes_on_in_the_next(tmp_path: Path, left: int) -> None:
    """No room for another batch is no sign that somebody has shortened the file."""
    store = open_store(tmp_path)
    sender = Sender(store)
    overhead = len(sender.send("a.b", b"").data)
    (segment,) = (tmp_path / "log-0").glob("*.messages")
    limit = base_of_segment(segment) + segment.stat().st_size
    while limit - store.partitions[0].message_log.end > 20_000:
        sender.send("a.b", bytes(10_000))
    sender.send("a.b", bytes(limit - store.partitions[0].message_log.end - overhead - left))
    assert limit - store.partitions[0].message_log.end == left
    store.close(clean=False)
    stored = assert_no_gap(tmp_path)
    reopened = open_store(tmp_path)
    assert Sender(reopened).send("a.b", b"next").runs == (("a.b", stored, 1),)
    close_cleanly(reopened)
    assert not verify(tmp_path, Disk()).findings


def base_of_segment(path: Path) -> int:
    """The position of the file's first byte."""
    return int(path.name.partition(".")[0], 16)
