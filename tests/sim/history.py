"""Random histories of a broker on a simulated disk: lives that end in every way, with a disk that fails at times."""

from __future__ import annotations

import errno
import random
from collections import Counter
from typing import Final

from qmq.errors import StorageError
from tests.sim.client import Client
from tests.sim.crashes import Chances, Crashes
from tests.sim.disk import SimulatedDisk
from tests.sim.life import Life, stop

_KINDS: Final = ("sync", "sync", "pwritev", "pwritev", "open", "create", "ftruncate", "rename", "unlink", "map")
_CODES: Final = (errno.EIO, errno.ENOSPC)


class History:
    """What happens to one store, from a seed."""

    def __init__(
        self,
        seed: int,
        partitions: int,
        chances: Chances = (0.0, 0.0, 0.0),
        *,
        faults: float = 0.0,
        ends: float = 0.0,
        failing_sync: int = 0,
    ) -> None:
        """*chances* of looking at a crash at an operation; of a *fault* and of an *end* of the broker at a step. The
        *failing_sync*-th sync fails.
        """
        self.chance = random.Random(seed)
        self.disk = SimulatedDisk(seed)
        self.client = Client()
        self.partitions = partitions
        self.crashes = Crashes(seed, partitions, chances)
        self.faults = faults
        self.ends = ends
        self._life: Life | None = None
        self._watch()
        if failing_sync:
            self.disk.fail("sync", failing_sync)
        try:
            self._life = Life(self.disk, self.client, seed, partitions)
        except StorageError:
            self._life = self._start_again(power=seed % 2 == 0)

    def run(self, steps: int) -> None:
        """Take that many steps, lose power, go on without faults, stop, verify, and start a last time."""
        self.take(steps)
        self.crashes.go_on(self.crashes.recover(self.disk, self.client, power=True))

    def take(self, steps: int) -> None:
        """Take that many steps. Nothing fails any more after them."""
        for _ in range(steps):
            assert self._life is not None
            if self.chance.random() < self.faults:
                self.disk.fail(self.chance.choice(_KINDS), self.chance.randrange(1, 5), self.chance.choice(_CODES))
            self._life.step()
            if self.chance.random() < self.ends:
                self._life = self._restart(self._life)
                self._watch()
        self.disk.heal()
        self.disk.before = None

    def fail_to_recover(self, failing_sync: int) -> None:
        """Stop, have that sync of the next start fail, stop and start again. The history is left as it is."""
        disk, client = self.disk.clone(failing_sync), self.client.clone()
        lossy = stop(disk, power=self.chance.random() < 0.5)
        disk.fail("sync", failing_sync)
        try:
            Life(disk, client.clone(), 0, self.partitions)
        except StorageError:
            disk.struck["start failed"] += 1
        power = self.chance.random() < 0.5
        self.crashes.go_on(self.crashes.recover(disk, client, power=power, lossy=lossy))

    def _watch(self) -> None:
        self.crashes.watch(self.disk, self.client, self._beside)

    def _start_again(self, *, power: bool) -> Life:
        self.disk.struck["start failed"] += 1
        return self.crashes.recover(self.disk, self.client, power=power)

    def _restart(self, life: Life) -> Life:
        """End a life for good, in any way, and begin another, perhaps after some that failed."""
        self.disk.heal()
        kind = self.chance.random()
        lossy = False
        if kind < 0.2:
            try:
                lossy = life.close()
            except StorageError:
                pass
        while self.chance.random() < 0.3:
            lossy |= stop(self.disk, power=self.chance.random() < 0.5)
            self.disk.fail("change", self.chance.randrange(1, 60))
            try:
                Life(self.disk, self.client.clone(), 0, self.partitions)
            except StorageError:
                self.disk.struck["start failed"] += 1
        self.disk.heal()
        return self.crashes.recover(self.disk, self.client, power=kind > 0.6, lossy=lossy)

    def _beside(self) -> None:
        """What another thread does between two operations of this one."""
        if self._life is not None and not self._life.is_changing_identity() and self.chance.random() < 0.1:
            self._life.beside()


def strikes_of(histories: list[History]) -> Counter[str]:
    """How often each fault struck in all of them."""
    struck = Counter[str]()
    for history in histories:
        struck.update(history.disk.struck)
    return struck


def summary(histories: list[History]) -> str:
    """How many crashes were looked at, and how often each fault struck."""
    crashes = [sum(history.crashes.count[depth] for history in histories) for depth in range(3)]
    faults = "".join(f"\n{count:8} {name}" for name, count in sorted(strikes_of(histories).items()))
    return f"{'+'.join(map(str, crashes))} crashes (in the workload, in recovery, in the next one){faults}"
