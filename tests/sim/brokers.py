"""Several brokers, from a seed: producers that move from one to another, consumers that pull from all at once and hand
over what fails to whoever is there, and everything that can befall brokers, clients and what lies between them.

Brokers, their storage and servers, and the whole client library are those that ship, in a world with a clock of its own
(``tests.sim.world``). After each history everything is drained, and what became of every message is held against the
clients' own record.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import qmq
from qmq.broker.error_log.error_log import unpacked
from qmq.broker.groups.message_ranges import RunPart, parts_of
from tests.sim import boss
from tests.sim.copies import Book, Copies, Holder
from tests.sim.machine import SESSION_TIMEOUT_MS, Machine
from tests.sim.people import Consuming, produce
from tests.sim.slots import Copy, broker_of
from tests.sim.stage import Client, staged
from tests.sim.wires import End, connected
from tests.sim.world import Process, World

#: Group, and its consumers.
GROUPS: Final = (("g", 2), ("h", 1))
FRAMES: Final = 1_000
#: How often (seconds, on average) something befalls brokers or clients.
_EVERY_S: Final = 0.4
#: How many of the brokers' ends take the power.
_POWER: Final = 0.4
_FRAME_FAULTS: Final = (
    ("frame lost", 0.006),
    ("frame torn", 0.003),
    ("answer lost", 0.01),
    ("frame doubled", 0.006),
    ("gone silent", 0.0007),
)
#: Rounds of a drain; each is a second or two.
_ROUNDS: Final = 200
#: How many dead letters of each group are looked at in the end.
_LETTERS: Final = 6


class Brokers:
    """One history."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.world = World(seed)
        self.world.connect = self._connect
        self.chance = self.world.chance
        self.directory = directory
        self.machines = [Machine(self.world, number + 1) for number in range(2 + seed % 2)]
        self.addresses = [f"world:{machine.number}" for machine in self.machines]
        self.url = "qmq://" + ",".join(self.addresses)
        self.book = Book(self.home_of)
        self.count = self.book.count
        self.copies = {group: Copies(group, self.book, self) for group, _ in GROUPS}
        self.is_calm = False
        self._next_at = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._clients: list[Client] = []

    # --- a history ---------------------------------------------------------------------------------------------------

    def run(self, frames: int) -> None:
        """So many frames of clients at least, one end of a broker at least; then the drain, and the checks."""
        with staged(self.world, self.directory):
            try:
                for machine in self.machines:
                    self._start(machine)
                self._begin_clients()
                while self.count["frames"] < frames or not self.count["killed"] + self.count["power lost"]:
                    self._step()
                self.drain()
                self.check()
            finally:
                self.world.close()
                for client in self._clients:
                    client._close_files()

    def _step(self) -> None:
        self.world.step()
        for machine in self.machines:
            if machine.process is not None and machine.process.is_killed:
                self._stopped(machine)
        while self._due and self._due[0][0] <= self.world.now:
            self._due.pop(0)[1]()
        if not self.is_calm and self.world.now >= self._next_at:
            self._next_at = self.world.now + self.chance.expovariate(1 / _EVERY_S)
            self._befall()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._due.append((self.world.now + seconds, call))
        self._due.sort(key=lambda due: due[0])
        alarm = self.world.processes[0] if self.world.processes else None
        if alarm is not None:
            alarm.call_later(seconds, lambda: None)

    def _befall(self) -> None:
        chance, kind = self.chance, self.chance.random()
        machine = chance.choice(self.machines)
        if kind < 0.25:
            if machine.is_up:
                machine.crash_soon(chance.choice((3, 30)))
        elif kind < 0.3:
            if machine.is_up:
                machine.crash()
                self._stopped(machine)
        elif kind < 0.45:
            self._cut_off(machine)
        elif kind < 0.6:
            self._kill_client()
        elif kind < 0.7:
            self._pause_client()
        elif kind < 0.75:
            self.count["clock set"] += 1
            machine.set_clock(chance.choice((-3_000_000, -500_000, 500_000, 3_000_000)))

    # --- what befalls brokers ----------------------------------------------------------------------------------------

    def _start(self, machine: Machine) -> None:
        if machine.is_up:
            return
        while not machine.start(in_peace=self.is_calm):
            self.count["start interrupted"] += 1
            self._lose(machine)

    def _stopped(self, machine: Machine) -> None:
        """It is away, for a moment or for long."""
        self._lose(machine)
        away_s = self.chance.choice((0.05, 0.3, 1.0, 4.0, 12.0))
        self.count["away for long"] += away_s >= SESSION_TIMEOUT_MS / 1_000
        self._later(away_s, lambda: self._start(machine))

    def _lose(self, machine: Machine) -> None:
        power = self.chance.random() < _POWER
        self.count["power lost" if power else "killed"] += 1
        machine.stopped(power=power)
        if power:
            for copies in self.copies.values():
                copies.power_lost(machine.store_id, machine.kept_at)

    def _cut_off(self, machine: Machine) -> None:
        """It runs, and nobody reaches it."""
        if not machine.is_up:
            return
        self.count["cut off"] += 1
        machine.reached_at = self.world.now + self.chance.choice((0.2, 1.0, 4.0))
        for end in machine.ends:
            if not end.is_over:
                end.cut()

    # --- what befalls clients ----------------------------------------------------------------------------------------

    def _begin_clients(self) -> None:
        for number, failover_after in enumerate((0.3, None)):
            self._producer(number, failover_after)
        for group, count in GROUPS:
            for number in range(count):
                self._consumer(f"{group}{number}", self.copies[group])
        self._again_boss()
        self._again_redriver()

    def _again_boss(self) -> None:
        self._client("boss", boss.administer(self, self.chance.getrandbits(32)), self._again_boss)

    def _again_redriver(self) -> None:
        main = boss.redrive(self, list(self.copies.values()), self.chance.getrandbits(32))
        self._client("redriver", main, self._again_redriver)

    def _producer(self, number: int, failover_after: float | None) -> None:
        main = produce(self, self.chance.getrandbits(32), failover_after)
        self._client(f"producer {number}", main, lambda: self._producer(number, failover_after))

    def _consumer(self, name: str, copies: Copies) -> None:
        consuming = Consuming(self, name, copies, self.chance.getrandbits(32))
        main = consuming.work(self.chance.choice((20, 100, 1_000)))
        self._client(name, main, lambda: self._consumer(name, copies))

    def _client(self, name: str, main: Any, again: Callable[[], None] | None) -> Client:
        """A process; where it ends another one takes its place in a moment."""
        client = Client(self.world, name)
        client.run_main(main)
        self._clients.append(client)
        if again is not None:
            client.at_end.append(lambda: self._later(self.chance.random(), lambda: None if self.is_calm else again()))
        return client

    def _alive(self) -> list[Client]:
        return [client for client in self._clients if not client.is_killed]

    def _kill_client(self) -> None:
        """At once, or at one of its next operations on files."""
        client = self.chance.choice(self._alive())
        if self.chance.random() < 0.5:
            self.count["client killed"] += 1
            client.kill()
        else:
            client.operations_left = self.chance.randrange(4)

    def _pause_client(self) -> None:
        self.count["client stopped"] += 1
        client = self.chance.choice(self._alive())
        client.paused_until = self.world.now + self.chance.choice((0.1, 1.0, 2.5, 5.0))

    # --- between them ------------------------------------------------------------------------------------------------

    async def _connect(self, process: Process, factory: Callable[[], Any], port: int) -> Any:
        machine = self.machines[port - 1]
        await asyncio.sleep(self.chance.random() * 0.002)
        if not machine.is_reached:
            if self.chance.random() < 0.2:
                await asyncio.sleep(60)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        assert machine.process is not None
        protocol, served = factory(), machine.server.connection()
        near, far = connected(process, protocol, machine.process, served, self)
        protocol.connection_made(near)
        machine.process.call_soon(served.connection_made, far)
        machine.ends = [*(end for end in machine.ends if not end.is_over), far]
        return near, protocol

    def befalls(self, end: End) -> str:
        """What befalls a connection whose client is about to write; empty: nothing."""
        self.count["frames"] += 1
        if self.is_calm:
            return ""
        luck = self.chance.random()
        for name, share in _FRAME_FAULTS:
            luck -= share
            if luck < 0:
                self.count[name] += 1
                return name
        return ""

    def _machine_of(self, store: bytes) -> Machine:
        return next(machine for machine in self.machines if machine.store_id == store)

    def power_lost_at(self, copy: Copy) -> float:
        """When its broker has lost power last."""
        return self._machine_of(copy.store).power_lost_at

    def is_away(self, store: bytes) -> bool:
        """Nobody reaches that broker now."""
        return not self._machine_of(store).is_reached

    def home_of(self, order_key: str) -> bytes:
        """The store that has the messages of a subject and order key, by the rule for it."""
        return self.machines[broker_of(self.addresses, order_key)].store_id

    def is_in_flight(self, group: str, copy: Copy, holder: Holder) -> bool:
        """Its broker is there, and would take that one's acknowledgement."""
        machine = self._machine_of(copy.store)
        if not machine.is_up:
            return False
        found = machine.broker.groups.get(group)
        if found is None or found.ledger is None:
            return False
        member = found.ledger.by_name.get(holder.consumer)
        if member is None or not member.is_there or member.epoch != holder.epoch:
            return False
        if machine.store.groups.generation != holder.generation:
            return False
        return bool(member.in_flight.holds(holder.sequence, holder.sequence + 1))

    def is_dead(self, group: str, place: tuple[str, int, int], store: bytes) -> bool:
        """A broker has a dead letter of that subject, lane and sequence."""
        machine = self._machine_of(store)
        ledger = machine.broker.groups[group].ledger
        assert ledger is not None
        subjects = machine.store.subjects
        for letter in (one for items in ledger.dead.after(0) for one in unpacked(items)):
            for part in parts_of(machine.store, machine.broker.groups[group], letter.messages):
                entry, start = (part.entry, part.start) if isinstance(part, RunPart) else (part.rows[0].item(), 0)
                if place == (subjects.name(entry[3]), subjects.lane(entry[3]), entry[0] + start):
                    return True
        return False

    # --- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Nothing fails any more: hand out and acknowledge everything."""
        self.is_calm = True
        for client in self._alive():
            client.kill()
        for machine in self.machines:
            machine.disk.before, machine.reached_at = None, 0.0
            self._start(machine)
        drains = [self._client("drain", self._drain(copies), None) for copies in self.copies.values()]
        while not all(client.is_killed for client in drains):
            self._step()
        assert not self._kept(), "something is kept still"

    def _kept(self) -> list[Path]:
        """The files of what no broker has taken."""
        return list(self.directory.glob("spool/*.spool"))

    async def _drain(self, copies: Copies) -> None:
        consuming = Consuming(self, "drain", copies, 0)
        is_redriven, left, rows = False, [], []
        for _ in range(_ROUNDS):
            await consuming.work(3, calmly=True)
            async with qmq.connect(self.url) as client:
                rows = await client.admin.groups(copies.group)
                left = [row for row in rows if row.ready or row.in_flight or row.in_retry or row.delayed]
                if not left and len(rows) == len(self.machines) and not self._kept():
                    await self._look_at_the_dead(client, copies)
                    if is_redriven:
                        return
                    is_redriven = True
                    await self._redrive_some(client, copies)
            await asyncio.sleep(1.0)
        raise AssertionError(
            f"group {copies.group} has something still: {left}, or {self._kept()}, at {len(rows)} brokers"
        )

    async def _look_at_the_dead(self, client: qmq.Client, copies: Copies) -> None:
        letters = [letter async for letter in client.admin.dead_letters(copies.group)]
        copies.check({str(letter.id): letter.reason for letter in letters})
        for letter in letters[:_LETTERS]:
            await boss.check_letter(self.book, client, str(letter.id))

    async def _redrive_some(self, client: qmq.Client, copies: Copies) -> None:
        """Have every other dead letter handed out again."""
        ids = [str(letter.id) async for letter in client.admin.dead_letters(copies.group)][::2]
        for one in ids:
            copies.redriving(one)
        self.count["redriven"] += await client.admin.redrive(copies.group, ids)

    def check(self) -> None:
        """Stop, verify."""
        for machine in self.machines:
            machine.close()


def run(seed: int, frames: int = FRAMES) -> Counter[str]:
    """One history; what happened in it, and what became of the messages of all groups. A failure says how to run it
    again.
    """
    with tempfile.TemporaryDirectory(prefix="qmq-sim-") as directory:
        history = Brokers(seed, Path(directory))
        gc.disable()  # what it finds runs code of processes, at moments that no seed knows
        try:
            history.run(frames)
        except BaseException as error:
            error.add_note(f"again: python -m tests.sim brokers {seed}")
            raise
        finally:
            gc.enable()
        return history.count
