"""What a checkpoint claims of derived files is on disk, also where a start has made them again: the power may go at any
operation, after processes that were killed at any other, and after syncs that failed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from qmq.errors import StorageError
from qmq.storage.store import Store
from qmq.storage.verify.verify import verify
from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.storage.stores import NOW_US, Sender, checkpoint, options

#: Thousands of directories are verified, and other tests cover the same lines.
pytestmark = pytest.mark.no_cover

DIRECTORY: Final = Path("/data")
SUFFIXES: Final = (".entries", ".order", ".index")
#: So many ways in which the same loss of power may strike.
WAYS: Final = 3


def opened(disk: SimulatedDisk) -> Store:
    return Store.open(DIRECTORY, options(segment_bytes=4 << 10, max_frame_bytes=2 << 10), disk, NOW_US)


def filled(disk: SimulatedDisk) -> Sender:
    """Return the sender of a store with three segments; the last one is being written, and a checkpoint knows it."""
    sender = Sender(opened(disk))
    roll(sender)
    roll(sender)
    checkpoint(sender.store)
    return sender


def roll(sender: Sender) -> None:
    log = sender.store.partitions[0].message_log
    segments = len(log.sealed)
    while len(log.sealed) == segments:
        sender.send("a.x", b"x" * 600)
        sender.send("b", b"y" * 20, b"z")


def go_on(store: Store) -> None:
    """Store a batch, and take a checkpoint."""
    Sender(store).send("a.x", b"x")
    checkpoint(store)


def check(disk: SimulatedDisk, *, power: bool) -> None:
    """A stopped store has no fault."""
    disk.stop(power=power)
    report = verify(DIRECTORY, disk)
    assert report.is_good, "\n".join(map(str, report.findings))


def check_loss_of_power(disk: SimulatedDisk, seed: int = 0) -> None:
    for way in range(WAYS):
        check(disk.clone(seed * WAYS + way), power=True)


def losing_power(disk: SimulatedDisk, work: Callable[[], object]) -> int:
    """Do some work, and look at a loss of power ahead of each of its operations and behind the last; return how many
    these were.
    """
    operations = 0

    def before(operation: Operation) -> None:
        nonlocal operations
        operations += 1
        for way in range(WAYS):
            image = disk.clone(operations * WAYS + way)
            image.interrupt(operation)
            check(image, power=True)

    disk.before = before
    work()
    disk.before = None
    check_loss_of_power(disk)
    return operations


def derived(disk: SimulatedDisk, suffix: str) -> list[Path]:
    """The files of that kind, by segment."""
    directories = DIRECTORY / "log-0", DIRECTORY / "consumer-log/0"
    paths = [directory / name for directory in directories for name in disk.files.listdir(directory)]
    return sorted(path for path in paths if path.suffix == suffix)


@pytest.mark.parametrize("which", [*((suffix, 0) for suffix in SUFFIXES), (".entries", 2)])
def test_a_start_makes_a_file_again(which: tuple[str, int]) -> None:
    """At any time there is the one before, or the new one as a whole, or none."""
    disk = SimulatedDisk(1)
    filled(disk)
    disk.stop(power=False)
    path = derived(disk, which[0])[which[1]]
    disk.files.unlink(path)

    def work() -> None:
        store = opened(disk)
        assert which[0] == ".order" or path in derived(disk, which[0])
        go_on(store)

    assert losing_power(disk, work) > 20
    assert path in derived(disk, which[0])


@pytest.mark.parametrize("which", [(".index", 0), (".entries", 2)])
def test_a_start_goes_on_without_a_file_that_it_cannot_open(which: tuple[str, int]) -> None:
    disk = SimulatedDisk(1)
    filled(disk)
    disk.stop(power=False)
    path = derived(disk, which[0])[which[1]]
    disk.fail_always("open", errno.EIO, path.name)
    store = opened(disk)
    disk.heal()
    assert losing_power(disk, lambda: go_on(store)) > 10
    assert path in derived(disk, which[0])


def test_the_next_checkpoint_brings_what_a_full_disk_kept_from_a_start() -> None:
    disk = SimulatedDisk(1)
    filled(disk)
    disk.stop(power=False)
    path = derived(disk, ".entries")[-1]
    disk.files.unlink(path)
    disk.fail_always("pwritev", errno.ENOSPC, ".entries")
    store = opened(disk)
    disk.heal()
    assert path not in derived(disk, ".entries")
    assert losing_power(disk, lambda: go_on(store)) > 10
    assert path in derived(disk, ".entries")


def test_a_start_removes_what_another_was_making() -> None:
    disk = SimulatedDisk(1)
    filled(disk)
    disk.stop(power=False)
    for suffix in SUFFIXES:
        path = derived(disk, suffix)[0]
        disk.files.rename(path, path.with_name(path.name + ".tmp"))
    store = opened(disk)
    assert not derived(disk, ".tmp")
    go_on(store)
    check_loss_of_power(disk)


def test_a_process_is_killed_while_it_takes_a_checkpoint() -> None:
    """What it wrote and did not sync is in memory only; the next process finds it there, and its checkpoint claims
    it.
    """
    disk = SimulatedDisk(1)
    sender = filled(disk)
    roll(sender)
    killed = 0

    def before(operation: Operation) -> None:
        nonlocal killed
        killed += 1
        image = disk.clone(killed)
        image.interrupt(operation)
        check(image, power=False)
        go_on(opened(image))
        check_loss_of_power(image, killed)

    disk.before = before
    checkpoint(sender.store)
    assert killed > 15


def test_a_checkpoint_fails_at_any_sync_and_the_process_is_killed() -> None:
    number = 0
    while True:
        number += 1
        disk = SimulatedDisk(number)
        sender = filled(disk)
        roll(sender)
        disk.fail("sync", number)
        try:
            checkpoint(sender.store)
        except StorageError:
            check(disk, power=False)
            go_on(opened(disk))
            check_loss_of_power(disk, number)
        else:
            break
    assert number > 10
