"""Crashes: at any operation of a workload, then at any of the recovery, then of the recovery after that; a last start.

A crash is looked at on a clone of the disk, so the workload itself goes on and one run of it meets a crash at every
operation. What is known to clients at that moment is what the recovered store is held to.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fake_disk import Operation
from tests.sim.client import Client
from tests.sim.disk import SimulatedDisk
from tests.sim.life import GROUPS, Life, check_files, stop

#: At how many of the operations of a workload, of a recovery, and of the recovery after that a crash is looked at.
Chances = tuple[float, float, float]


class Crashes:
    """Looks at crashes of one history, from a seed."""

    def __init__(self, seed: int, partitions: int, chances: Chances) -> None:
        self.chance = random.Random(seed)
        self.partitions = partitions
        self.chances = chances
        #: Crashes looked at so far: in the workload, in its recovery, and in the recovery after that.
        self.count = [0, 0, 0]

    def watch(self, disk: SimulatedDisk, client: Client, beside: Callable[[], None] | None = None) -> None:
        """Look at a crash ahead of every operation from now on, then do what goes on *beside* it."""

        def before(operation: Operation) -> None:
            if self.chance.random() < self.chances[0]:
                self.crash(disk, client, operation, 0, lossy=False)
            if beside is not None:
                beside()

        disk.before = before

    def crash(self, disk: SimulatedDisk, client: Client, operation: Operation, depth: int, *, lossy: bool) -> None:
        """Crash a clone within *operation*; *lossy*: the power was lost already in the crash that is recovered from."""
        self.count[depth] += 1
        image = disk.clone(self.chance.getrandbits(32))
        image.interrupt(operation)
        power = self.chance.random() < 0.7
        if depth:
            image.struck["power lost in recovery" if power else "killed in recovery"] += 1
        else:
            image.struck["power lost" if power else "killed"] += 1
        self.go_on(self.recover(image, client.clone(), depth + 1, power=power, lossy=lossy))

    def recover(self, disk: SimulatedDisk, client: Client, depth: int = 1, *, power: bool, lossy: bool = False) -> Life:
        """Stop a disk, start it again, and hold what is there against the record."""
        lossy |= stop(disk, power=power)
        if client.served:
            check_files(disk)
        before = client.clone()

        def crash_again(operation: Operation) -> None:
            if self.chance.random() < self.chances[depth]:
                self.crash(disk, before, operation, depth, lossy=lossy)

        if depth < len(self.chances) and self.chances[depth]:
            disk.before = crash_again
        life = Life(disk, client, self.chance.getrandbits(32), self.partitions)
        disk.before = None
        client.crash(power=lossy)
        client.check(life.messages())
        return life

    def go_on(self, life: Life) -> None:
        """Repeat what was not answered, send more, give everything to the groups; stop, verify, start a last time."""
        client = life.client
        again = [batch for batch in client.batches if not batch.acknowledged]
        again += self.chance.sample(client.batches, min(2, len(client.batches)))
        life.send_batches([(batch, True) for batch in again])
        life.send()
        life.sync_all()
        assert not client.sends
        for group in GROUPS:
            while life.pull(group, most=1_000):
                pass
        client.check(life.messages())
        for group in GROUPS:
            client.check_group(group)
        life.close()
        check_files(life.disk)
        if self.chance.random() < 0.25:
            last = Life(life.disk, client.clone(), 0, self.partitions)
            last.client.check(last.messages())
            last.driven.store.close(clean=False)
