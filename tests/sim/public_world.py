"""The histories of ``public`` in a simulated world: the same programs and law, by a seed that repeats each step.

Brokers die within any operation of their disks, some of them with the power; what is on its way on a connection is
lost, torn or done without an answer; disks are full for a moment; consumers are killed between any two steps. All
programs use asyncio.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import qmq
from qmq.broker.ports.limits import BrokerLimits
from qmq.storage.store import StoreOptions
from tests.sim import public_record
from tests.sim.machine import Machine
from tests.sim.public import FEATURES, MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, GroupPlan, History, patch_waits, save_events
from tests.sim.public_boss import Boss
from tests.sim.public_people import DECISIONS, Crew, Worker
from tests.sim.public_record import Record
from tests.sim.stage import Client, Clock, staged
from tests.sim.wires import End, connected
from tests.sim.world import START_US, Process, World

SESSION_TIMEOUT_MS: Final = 4_000
#: Seconds for which a consumer is stopped.
_STOPPED_S: Final = 4.5
#: How many of the histories have brokers that lose power, and connections that fail.
_POWER_SHARE: Final = 0.3
_FAULTY_SHARE: Final = 0.5
#: How many of the frames that a program writes are lost, and what becomes of these.
_FRAME_FAULTS: Final = (("frame lost", 0.008), ("frame torn", 0.008), ("answer lost", 0.01), ("frame doubled", 0.008))
#: Seconds for which a broker is away; no session ends meanwhile.
_AWAY_S: Final = (0.001, 0.05, 0.3)
#: Seconds after which a broker dies that was to die within an operation.
_DIES_WITHIN_S: Final = 0.03
#: Seconds for which a disk is full, and what fails meanwhile.
_FULL_S: Final = (0.005, 0.05, 0.5)
_FULL_FAILS: Final = ("pwritev", "create", "rename", "mkdir")
#: A history takes so many seconds at most, where connections wait for answers that do not come.
_MOST_S: Final = 1_000
#: What a consumer that is killed does not do: nobody knows whether the broker has heard of it.
_NOT_KILLED_AT: Final = ("reject", "release", "release later", "not yet", "retry", "timeout")


#: What some histories of many must have had.
WORLD_FEATURES: Final = (
    *(name for name in FEATURES if "sync" not in name), "start interrupted", "killed within a record",
    "killed within an operation", "power lost", *(name for name, _ in _FRAME_FAULTS), "disk full",
    "refused by a full disk",
)  # fmt: skip


class Machines:
    """The brokers of a history."""

    def __init__(self, history: WorldHistory, count: int, settings: dict[str, Any]) -> None:
        self._history = history
        self._settings = settings
        limits = BrokerLimits(
            max_message_bytes=MAX_MESSAGE_BYTES, session_timeout_ms=SESSION_TIMEOUT_MS, producer_ttl_ms=1_000_000_000,
            retention_ms=settings.get("retention_ms", 0), retention_bytes=settings.get("retention_bytes", 0),
        )  # fmt: skip
        options = StoreOptions(
            partitions=settings["partitions"], segment_bytes=256 << 10, max_frame_bytes=MAX_FRAME_BYTES,
            reserve_bytes=200_000,
        )  # fmt: skip
        self.brokers = [
            Machine(history.world, number + 1, options, limits, settings["checkpoint_ms"] / 1_000)
            for number in range(count)
        ]
        self._generations = [1] * count
        self.url = "qmq://" + ",".join(f"world:{number + 1}" for number in range(count))

    async def start(self, number: int) -> None:
        """Start a broker, which may die while it starts."""
        machine = self.brokers[number]
        while not machine.start(in_peace=self._history.is_calm):
            self._history.count["start interrupted"] += 1
            self._lose(machine)
        generation = machine.store.groups.generation
        if generation > self._generations[number]:  # a record was being written, and the start cannot tell when
            self._generations[number] = generation
            self._history.count["killed within a record"] += 1
            self._history.power_lost()

    async def stop(self, number: int) -> None:
        await self.kill(number)

    async def kill(self, number: int) -> None:
        """Kill a broker, now or within one of its next operations; it stays away for a moment."""
        machine, world, chance = self.brokers[number], self._history.world, self._history.chance
        process = machine.process
        assert process is not None
        machine.crash_soon(chance.choice((1, 5, 30)))
        until = world.now + chance.choice((0, _DIES_WITHIN_S))
        while not process.is_killed and world.now < until:  # noqa: ASYNC110  # it runs in another loop
            await asyncio.sleep(0.001)
        self._history.count["killed within an operation"] += process.is_killed
        process.kill()
        self._lose(machine)
        await asyncio.sleep(chance.choice(_AWAY_S))

    async def fill(self, number: int) -> None:
        """Let the disk of a broker be full for a moment."""
        disk, chance = self.brokers[number].disk, self._history.chance
        for operation in _FULL_FAILS:
            disk.fail_always(operation)
        before = disk.struck.total()
        await asyncio.sleep(chance.choice(_FULL_S))
        disk.heal()
        self._history.count["disk full"] += 1
        self._history.count["refused by a full disk"] += disk.struck.total() - before

    def _lose(self, machine: Machine) -> None:
        power = self._history.loses_power and self._history.chance.random() < 0.5
        self._history.count["power lost"] += power
        if power:
            self._history.power_lost()
        machine.stopped(power=power)

    def close(self) -> None:
        """Stop all; there is no fault in their files."""
        for machine in self.brokers:
            machine.close()


class WorldHistory(History):
    """One history."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.world = World(seed)
        self.world.connect = self._connect
        self.is_calm = False
        self._clients: list[Client] = []
        self._first_bases = set[int]()
        super().__init__(seed, directory)
        self.has_threads = False
        chance = self._own_chance("faults")
        self.loses_power = chance.random() < _POWER_SHARE
        self.has_faults = self.record.has_late_frames = chance.random() < _FAULTY_SHARE
        if self.loses_power:
            self.options["durability"] = "flush"
        for plan in self.groups:  # where nobody is to be given up, nobody is out of touch for so long
            if plan.name in self.killed or not plan.is_loose:
                plan.settings["reconnect_timeout"] = 2

    @property
    def keeps_connections(self) -> bool:
        """Nobody is given up for a lost connection: here it takes no time to wait until those that were killed are."""
        return False

    def _made_brokers(self, count: int, **settings: Any) -> Any:
        return Machines(self, count, settings)

    def run_all(self) -> None:
        """Let the programs run, then others take what is left; check."""
        with staged(self.world, self.directory / "state"), patch.object(public_record, "time", Clock(self.world)):
            try:
                programs = self._client("programs", self._whole())
                while not programs.is_killed:
                    self.world.step()
                    if self.world.now > _MOST_S:
                        self.record.wrong("it does not end")
                        break
                if not self.record.wrongs:
                    self.brokers.close()
            finally:
                self.world.close()
                for client in self._clients:
                    client._close_files()
        if self.record.wrongs:
            raise AssertionError("\n".join(self.record.wrongs[:8]))

    async def _whole(self) -> None:
        for number, machine in enumerate(self.brokers.brokers):
            await self.brokers.start(number)
            self._first_bases |= {part.message_log.spans()[0].base for part in machine.store.partitions}
        await self._live()
        self.is_calm = True
        await self._drain()

    def _client(self, name: str, main: Any) -> Client:
        client = Client(self.world, name)
        client.run_main(main)
        self._clients.append(client)
        return client

    # --- what befalls brokers and connections ------------------------------------------------------------------------

    def power_lost(self) -> None:
        """Note that a broker may have forgotten what no checkpoint has, and what it has not confirmed."""
        with self.record.lock:
            for group in self.record.groups.values():  # what is in flight there is given up, also what is acknowledged
                group.change(seeks=True)
                group.changed(for_good=True)
            for sent in self.record.sent.values():
                if sent.state == "open":
                    sent.may_be_twice, sent.id, sent.sequence = True, None, None

    async def _connect(self, process: Process, factory: Callable[[], Any], port: int) -> Any:
        machine = self.brokers.brokers[port - 1]
        await asyncio.sleep(self.world.chance.random() * 0.002)
        if machine.process is None or machine.process.is_killed:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        protocol, served = factory(), machine.server.connection()
        near, far = connected(process, protocol, machine.process, served, self)
        protocol.connection_made(near)
        machine.process.call_soon(served.connection_made, far)
        return near, protocol

    def befalls(self, end: End) -> str:
        """What befalls a connection whose client is about to write; empty: nothing."""
        if self.is_calm or not self.has_faults or end.process.name == "boss":
            return ""
        luck = self.world.chance.random()
        for name, share in _FRAME_FAULTS:
            luck -= share
            if luck < 0:
                self.count[name] += 1
                self.record.note(name)
                return name
        return ""

    # --- who lives otherwise here ------------------------------------------------------------------------------------

    def _boss(self, crew: Crew, names: list[str], most: int, **more: Any) -> Boss:
        def clock() -> datetime:
            return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=START_US + int(self.world.now * 1e6))

        restarts = self._own_chance("restarts").choice((0, 1, 3))
        fills = self._own_chance("fills").choice((0, 0, 1, 3))
        return super()._boss(crew, names, most, clock=clock, restarts=restarts, fills=fills, **more)

    async def _run_boss(self, boss: Boss) -> None:
        process = self._client("boss", super()._run_boss(boss))
        while not process.is_killed:  # noqa: ASYNC110  # it runs in another loop
            await asyncio.sleep(0.001)

    def _killed(self, crew: Crew, plan: GroupPlan, number: int) -> Any:
        return KilledWorker(self, crew, plan, number)

    def killed_worker(self, crew: Crew, plan: GroupPlan, name: str, chance: Random) -> Worker:
        """Return a consumer that is to be killed."""
        options = {
            "group": plan.name, "consumer": chance.choice((None, name.replace(" ", "-"))), "tags": plan.tags or None,
            **plan.settings,
        }  # fmt: skip
        decisions = [decision for decision in DECISIONS if decision not in _NOT_KILLED_AT]
        return Worker(
            crew, name, plan.prefixes, options, lambda consumer, before: self.record.groups[plan.name], chance,
            is_sync=False, decisions=decisions,
        )  # fmt: skip

    # --- checks ------------------------------------------------------------------------------------------------------

    async def _has_settled(self, client: qmq.Client) -> bool:
        return bool(self.record.wrongs) or not any(machine.broker.delayed() for machine in self.brokers.brokers)

    async def _check_reports(self, client: qmq.Client, dead: dict[str, int]) -> None:
        """No process answers these here."""
        parts = [part for machine in self.brokers.brokers for part in machine.store.partitions]
        firsts = {part.message_log.spans()[0].base for part in parts}
        self.count["segments removed"] += len(firsts - self._first_bases)


class KilledWorker:
    """Starts one consumer after another, each in a process of its own, and kills each."""

    def __init__(self, history: WorldHistory, crew: Crew, plan: GroupPlan, number: int) -> None:
        self.name = f"{plan.name} killed {number}"
        #: The first process has subscribed.
        self.entered = asyncio.Event()
        self._history = history
        self._crew = crew
        self._plan = plan
        self._record: Record = crew.record
        self._chance = history._own_chance(self.name)
        self._is_over = False

    def stop(self) -> None:
        """End it: as always by a kill."""
        self._is_over = True

    async def run(self, url: str) -> None:
        """Let processes live and die until the crew is stopped."""
        self._crew.enter(self)
        try:
            while not self._is_over:
                await self._live(url)
        finally:
            self._crew.leave(self)

    async def _live(self, url: str) -> None:
        history, chance = self._history, self._chance
        worker = history.killed_worker(Crew(self._record), self._plan, self.name, Random(chance.getrandbits(32)))
        process, most = history._client(self.name, worker.run(url, {})), chance.choice((0, 1, 1, 3, 8, 20))
        until = history.world.now + (chance.choice((0.05, 0.1, 0.3)) if self.entered.is_set() else 5)
        while history.world.now < until and not self._is_over:
            await asyncio.sleep(chance.random() * 0.001)
            if worker.session is not None:
                self.entered.set()
                if len(worker.session.hands) >= most:
                    break
        if history.stops and chance.random() < 0.5:
            self._record.count["killed: SIGSTOP"] += 1
            process.paused_until = history.world.now + _STOPPED_S
            await asyncio.sleep(_STOPPED_S + chance.choice((0, 0.01, 0.1)))
        process.kill()
        self._record.count["killed: kill -9"] += 1
        self._record.count[f"killed: {worker.way.partition(' ')[0]}"] += 1
        if worker.session is not None:  # the broker may not have heard all of one that has left
            worker.session.dies()


def run(seed: int) -> Counter[str]:
    """One history, and what happened in it."""
    with patch_waits(), tempfile.TemporaryDirectory(prefix="qmq-world-") as directory:
        history = WorldHistory(seed, Path(directory))
        gc.disable()  # what it finds runs code of processes, at moments that no seed knows
        try:
            history.run_all()
        except BaseException as error:
            save_events(history)
            error.add_note(f"again: python -m tests.sim world {seed}: {history}")
            raise
        finally:
            gc.enable()
        return history.count
