"""Stores that have been stopped in some way, and what every one of them must allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, Sent, check_stored, checkpoint, close_cleanly, kill, open_store, verified


def fill(sender: Sender, count: int, partitions: int = 1, size: int = 300) -> None:
    """Batches of one and of several runs, some written together."""
    for number in range(count):
        partition = number % partitions
        if number % 5 == 4:
            sender.stage(("a.x", [b"1" * size, b"2"]), (f"b.{number % 7}", [b"3"]), partition=partition)
        else:
            sender.stage((f"a.{number % 3}", [b"%d" % number, b"x" * size]), partition=partition)
        if number % 3 == 0:
            sender.write()
    sender.write()


def killed(path: Path, before: int = 40, after: int = 10, **changes: int) -> Sender:
    """A store that was killed with *after* batches behind its checkpoint."""
    sender = Sender(open_store(path, FakeDisk(), **changes))
    fill(sender, before, changes.get("partitions", 1))
    checkpoint(sender.store, {"broker": b"state"})
    fill(sender, after, changes.get("partitions", 1))
    kill(sender.store)
    return sender


def reopened(path: Path, sender: Sender, batches: list[Sent] | None = None, disk: Disk | None = None) -> Store:
    """Open again, check that exactly *batches* are there and that more can be sent, close, and verify."""
    store = open_store(path, disk if disk is not None else FakeDisk())
    kept = sender.sent if batches is None else batches
    check_stored(store, kept)
    more = Sender(store)
    more.send("a.0", b"after the stop")
    check_stored(store, [*kept, *more.sent])
    close_cleanly(store)
    verified(path)
    return store


def open_again(path: Path, **changes: Any) -> Store:
    """Open, kill and open once more."""
    store = open_store(path, FakeDisk(), **changes)
    kill(store)
    return open_store(path, FakeDisk(), **changes)
