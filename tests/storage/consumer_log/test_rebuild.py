"""Derived files that are deleted and made again from the message log are equal byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from qmq.format.build import RunContent
from qmq.format.layout import LANE_HIGH, LANE_NORMAL, LANE_ORDERED
from qmq.storage.consumer_log import active, subject_order
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, check_stored, checkpoint, close_cleanly, kill, open_store

PARTITIONS = 3


def fill(sender: Sender, batches: int, seed: int) -> None:
    """Send batches of one run and of many, over 40 lanes of 14 subjects, some of them late, to all partitions."""
    random = np.random.default_rng(seed)
    for number in range(batches):
        count = 1 if number % 2 else int(random.integers(2, 12))
        subjects = random.permutation(10 + number % 30)[:count].tolist()
        runs = [
            RunContent(
                f"city{n // 3}.order",
                [bytes(int(random.integers(0, 400)))] * int(random.integers(1, 5)),
                None,
                (LANE_NORMAL, LANE_HIGH, LANE_ORDERED | n)[n % 3],
            )
            for n in subjects
        ]
        sender.stage(*runs, partition=int(random.integers(0, PARTITIONS)))
        sender.write()


def derived(directory: Path) -> dict[str, bytes]:
    """Return the consumer log and the indexes of sealed segments."""
    found = {str(path.relative_to(directory)): path.read_bytes() for path in directory.glob("consumer-log/*/*")}
    for log in directory.glob("log-*"):
        *sealed, _ = sorted(log.glob("*.index"))
        found |= {str(path.relative_to(directory)): path.read_bytes() for path in sealed}
    return found


def reopen(directory: Path) -> None:
    close_cleanly(open_store(directory, FakeDisk(), partitions=PARTITIONS))


def check_made_again(directory: Path) -> None:
    """Delete all files, then some at a time."""
    wanted = derived(directory)
    assert sum(name.endswith(".order") for name in wanted) > PARTITIONS
    shutil.rmtree(directory / "consumer-log")
    for path in directory.glob("log-*/*.index"):
        path.unlink()
    reopen(directory)
    assert derived(directory) == wanted
    for suffix in (".order", ".entries", ".index"):
        for name in [name for name in wanted if name.endswith(suffix)][::2]:
            (directory / name).unlink()
        reopen(directory)
        assert derived(directory) == wanted, suffix
    report = verify(directory, Disk())
    assert [str(finding) for finding in report.findings] == []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (active, subject_order):
        monkeypatch.setattr(module, "BLOCK_ROWS", 16)
    monkeypatch.setattr("qmq.storage.consumer_log.partition_index.BLOCK_ROWS", 16)


def test_several_partitions_and_mixed_batches(tmp_path: Path, small_blocks: None) -> None:
    directory = tmp_path / "data"
    store = open_store(directory, FakeDisk(), partitions=PARTITIONS)
    sender = Sender(store)
    fill(sender, 150, seed=1)
    checkpoint(store)
    fill(sender, 150, seed=2)
    close_cleanly(store)
    check_made_again(directory)
    store = open_store(directory, FakeDisk(), partitions=PARTITIONS)
    check_stored(store, sender.sent)
    close_cleanly(store)


def test_after_a_cut_tail(tmp_path: Path, small_blocks: None) -> None:
    """After a kill between checkpoints, with a batch cut short, recovery makes what a rebuild makes."""
    directory = tmp_path / "data"
    store = open_store(directory, FakeDisk(), partitions=PARTITIONS)
    sender = Sender(store)
    fill(sender, 100, seed=3)
    checkpoint(store)
    fill(sender, 200, seed=4)
    torn = sender.send("late.subject", b"x" * 300, b"y" * 300, partition=1)
    kill(store)
    path = max((directory / "log-1").glob("*.messages"))
    os.truncate(path, torn.position - int(path.stem, 16) + len(torn.data) - 100)
    store = open_store(directory, FakeDisk(), partitions=PARTITIONS)
    assert store.recovery.partitions[1].cut_bytes > 0
    check_stored(store, sender.sent[:-1])
    sender.sent.pop()
    again = Sender(store)
    fill(again, 60, seed=5)
    check_stored(store, sender.sent + again.sent)
    close_cleanly(store)
    check_made_again(directory)


def test_without_any_checkpoint(tmp_path: Path) -> None:
    """When only the message log and the identity are left, the registry is made again too, in the order of the log."""
    directory = tmp_path / "data"
    store = open_store(directory, FakeDisk(), partitions=PARTITIONS)
    sender = Sender(store)
    fill(sender, 200, seed=6)
    kill(store)
    for path in directory.glob("checkpoint-*"):
        path.unlink()
    (directory / "subjects").unlink()
    shutil.rmtree(directory / "consumer-log")
    store = open_store(directory, FakeDisk(), partitions=PARTITIONS)
    check_stored(store, sender.sent)
    close_cleanly(store)
    check_made_again(directory)
