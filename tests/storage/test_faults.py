"""Random sends, checkpoints, failures, kills and losses of power: whatever happens, the promises hold.

What was written survives kill -9; what was synced survives loss of power; what was refused never comes back; no
position and no sequence is given twice; ``qmq verify`` finds nothing after each recovery.
"""

from __future__ import annotations

import errno
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from qmq.errors import StorageError, SyncFailed
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, Sent, check_stored, checkpoint, open_store, positions, verified

PARTITIONS = 2


class World:
    """One data directory, what was sent into it, and what anybody has seen."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root = path
        self.boot = 0
        self.stored: list[Sent] = []
        self.synced: list[Sent] = []
        self.seen_positions: set[tuple[int, int]] = set()
        self.seen_ends: dict[str, int] = {}
        self.path = path / "life-0"
        self.disk = FakeDisk("boot-0")
        self.disk.track(self.path)
        self.open()

    def open(self) -> None:
        self.store: Store = open_store(self.path, self.disk, partitions=PARTITIONS)
        self.sender = Sender(self.store)

    def send(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            names = self.random.sample([f"s.{n}" for n in range(12)], self.random.randrange(1, 4))
            runs = [(name, [b"x" * self.random.randrange(1, 1_500)] * self.random.randrange(1, 4)) for name in names]
            # A subject stays in its partition, as the broker has it: a failed write then takes back the last sequences.
            partition = int(names[0][2:]) % PARTITIONS
            mine = [run for run in runs if int(run[0][2:]) % PARTITIONS == partition]
            self.sender.stage(*mine, partition=partition)

    def write(self) -> None:
        staged = list(self.sender.staged)
        self.sender.write()
        for sent in staged:
            assert (sent.partition, sent.position) not in self.seen_positions
            self.seen_positions.add((sent.partition, sent.position))
            for name, first, count in sent.runs:
                assert first >= self.seen_ends.get(name, 0), (name, first, self.seen_ends[name])
                self.seen_ends[name] = first + count
        self.stored += staged

    def sync(self) -> None:
        partition = self.random.randrange(PARTITIONS)
        end = self.store.end(partition)
        self.store.sync(partition)
        self.store.mark_synced(partition, end)
        self.synced += [sent for sent in self.stored if sent.partition == partition and sent not in self.synced]

    def checkpoint(self) -> None:
        checkpoint(self.store)
        self.synced = list(self.stored)

    def refuse(self) -> None:
        """What a broker does after an error: the other partitions are written, what failed is taken back."""
        for partition in range(PARTITIONS):
            with suppress(StorageError):
                self.store.write(partition)
            self.store.publish(partition, self.store.end(partition))
        there = set(positions(self.store))
        kept = [sent for sent in self.sender.staged if (sent.partition, sent.position) in there]
        self.sender.staged = [sent for sent in self.sender.staged if sent not in kept]
        self.sender.take_back()
        self.stored += kept
        for sent in kept:
            self.seen_positions.add((sent.partition, sent.position))
            for name, first, count in sent.runs:
                self.seen_ends[name] = max(self.seen_ends.get(name, 0), first + count)

    def step(self) -> None:
        if self.random.random() < 0.15:
            operation = self.random.choice(["pwritev", "open", "ftruncate", "map", "fsync", "rename", "fdatasync"])
            self.disk.fail(operation, self.random.randrange(1, 5), self.random.choice([errno.ENOSPC, errno.EIO]))
        try:
            action = self.random.random()
            if action < 0.7:
                self.send()
                self.write()
            elif action < 0.85:
                self.sync()
            else:
                self.checkpoint()
        except SyncFailed:
            self.refuse()
            self.restart(power=False)
        except StorageError:
            self.refuse()
        self.disk.heal()
        check_stored(self.store, self.stored)

    def restart(self, *, power: bool) -> None:
        """Kill it, with or without the power, and open what is left; maybe kill it in recovery, too."""
        self.store.close(clean=False)
        if power:
            self.boot += 1
            old, self.path = self.path, self.root / f"life-{self.boot}"
            self.disk.without_power(old, self.path)
            shutil.rmtree(old)
        self.disk = self.next_disk(power=power)
        self.recover(power=power)
        verified_copy = self.root / "copy"
        checkpoint(self.store)
        shutil.copytree(self.path, verified_copy)
        (verified_copy / "lock").unlink()
        verified(verified_copy)
        shutil.rmtree(verified_copy)

    def next_disk(self, *, power: bool) -> FakeDisk:
        disk = FakeDisk(f"boot-{self.boot}")
        if power:
            disk.track(self.path, synced=True)
        else:
            disk.go_on_from(self.disk)
        return disk

    def recover(self, *, power: bool) -> None:
        if self.random.random() < 0.5:
            disk = self.disk
            operation = self.random.choice(["pwritev", "open", "ftruncate", "map", "fsync", "rename", "fdatasync"])
            disk.fail(operation, self.random.randrange(1, 20))
            try:
                open_store(self.path, disk, partitions=PARTITIONS).close(clean=False)
            except StorageError:
                pass
            self.disk = self.next_disk(power=False)
        self.open()
        found = set(positions(self.store))
        if power:
            assert {(sent.partition, sent.position) for sent in self.synced} <= found
            self.stored = [sent for sent in self.stored if (sent.partition, sent.position) in found]
        check_stored(self.store, self.stored)
        self.synced = list(self.stored)
        for name, end in self.seen_ends.items():
            number = self.store.subject_number(name)
            if number is not None:
                assert int(self.store.ends[number]) >= end


@pytest.mark.parametrize("seed", range(12))
def test_the_promises_hold(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    for _ in range(40):
        world.step()
        fate = world.random.random()
        if fate < 0.05:
            world.restart(power=True)
        elif fate < 0.15:
            world.restart(power=False)
    world.disk.heal()
    world.restart(power=True)
    for _ in range(3):
        world.disk.heal()
        world.send()
        world.write()
    checkpoint(world.store)
    world.store.close(clean=True)
    verified(world.path)
    store = open_store(world.path, Disk(), partitions=PARTITIONS)
    check_stored(store, world.stored)
    store.close(clean=False)
