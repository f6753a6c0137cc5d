"""What is seen of a data directory before anything in it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import FileState
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import read_copies
from qmq.storage.recovery.decide import Facts, facts_of
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, checkpoint, close_cleanly, kill, open_store


def seen(path: Path, boot_id: str = "") -> Facts:
    disk = Disk()
    checkpoints = [read_checkpoint(disk, path, number) for number in list_checkpoints(disk, path)[:2]]
    return facts_of(disk, path, read_copies(disk, path), checkpoints, boot_id)


def test_an_empty_directory(tmp_path: Path) -> None:
    facts = seen(tmp_path)
    assert {facts.identity_a, facts.identity_b, facts.checkpoint, facts.checkpoint_before} == {FileState.MISSING}
    assert (facts.populated, facts.clean, facts.same_boot) == (False, False, False)


@pytest.mark.parametrize(
    ("name", "populated"),
    [
        ("subjects", True),
        ("checkpoint-7", True),
        ("consumer-log/0/x", True),
        ("log-0/0000.messages", True),
        ("log-0/", False),  # made before the identity, which a crash may have kept from the disk
        ("log-9", False),
        ("notes.txt", False),
        ("lost+found/", False),
    ],
)
def test_what_makes_a_directory_one_with_data(tmp_path: Path, name: str, populated: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"x")
    assert seen(tmp_path).populated is populated


def test_a_store_that_was_stopped_and_one_that_was_killed(tmp_path: Path) -> None:
    store = open_store(tmp_path, FakeDisk())
    Sender(store).send("a", b"1")
    checkpoint(store)
    checkpoint(store)
    kill(store)
    boot_id = FakeDisk().boot_id()
    facts = seen(tmp_path, boot_id)
    assert {facts.identity_a, facts.identity_b, facts.checkpoint, facts.checkpoint_before} == {FileState.GOOD}
    assert (facts.populated, facts.clean, facts.same_boot) == (True, False, True)
    assert not seen(tmp_path, "another").same_boot
    assert not seen(tmp_path, "").same_boot
    close_cleanly(open_store(tmp_path, FakeDisk()))
    assert seen(tmp_path, boot_id).clean
