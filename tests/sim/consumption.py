"""Consumers at work, from a seed: they acknowledge, fail, fall silent, die and come back; connections break, frames are
lost and come twice, the clock is set, and the broker is killed or loses power at any operation.

The broker, its storage and the clients' record of what they hold are those that ship. After each history everything is
drained, and what became of every message is held against the clients' own record.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

from qmq.broker.ports.commands import Administer, Command, Disconnected, Heartbeat, Send, Subscribe
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InvalidOption
from qmq.format.ids import MessageId
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW
from tests.broker.harness import Driven, batch_of, runs_of_answer
from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, check_files
from tests.sim.order import OrderTally
from tests.sim.runs import run_one
from tests.sim.tally import Holder, Tally
from tests.sim.worker import Worker

SESSION_TIMEOUT_MS: Final = 1_000
LIMITS: Final = BrokerLimits(
    session_timeout_ms=SESSION_TIMEOUT_MS,
    reconnect_timeout_ms=100,
    producer_window=1_000,
    producer_ttl_ms=1_000_000_000,
)
SMALL: Final = {"segment_bytes": 16 << 10, "max_frame_bytes": 2_400, "reserve_bytes": 60_000}
SUBJECTS: Final = ("a.x", "a.y", "b")
#: Group, what it follows, its consumers.
GROUPS: Final[tuple[tuple[str, tuple[str, ...], int], ...]] = (("g", ("",), 3), ("h", ("a.",), 2), ("i", ("a.x",), 1))
#: The lanes of batches: priorities, and the slots of some order keys.
LANES: Final = (
    LANE_NORMAL, LANE_NORMAL, LANE_HIGH, LANE_LOW, *(LANE_ORDERED | slot for slot in (1, 1, 2, 3, 4_095)),
    LANE_ORDERED_HIGH | 1, LANE_ORDERED_LOW | 1, LANE_ORDERED_LOW | 2,
)  # fmt: skip
_ALL: Final = 1_000_000
#: The wall clock is never wrong by more.
_MOST_SET_US: Final = 3_500_000
#: Rounds without a message that are longer than any delay, and than the clock is wrong by.
_QUIET: Final = 12
#: How many of the crashes take the power.
_POWER: Final = 0.4
#: How many of the starts are not left in peace, and within how many operations.
_DISTURBED: Final = 0.25
_START_OPERATIONS: Final = 40


class _Crash(Exception):
    """The broker's process ends here."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation)
        self.operation = operation


class Batch:
    """A batch of a producer, until it is acknowledged: messages of one lane."""

    def __init__(
        self, producer: bytes, sequence: int, subject: str, messages: list[int], lane: int = LANE_NORMAL
    ) -> None:  # fmt: skip
        self.producer, self.sequence, self.subject, self.messages = producer, sequence, subject, messages
        self.lane = lane

    def data(self) -> memoryview:
        """As it is sent, each time."""
        bodies = [b"%d" % message + b"." * (message % 40) for message in self.messages]
        return batch_of({self.subject: bodies}, self.sequence, self.producer, lane=self.lane)


class Consumption:
    """One history."""

    limits = LIMITS
    options = SMALL

    def __init__(self, seed: int, *, has_lanes: bool | None = None) -> None:
        """*has_lanes*: messages have priorities and order keys; None: in three histories of four."""
        self.chance = random.Random(seed)
        self.lanes = LANES if (seed % 4 > 0 if has_lanes is None else has_lanes) else (LANE_NORMAL,)
        self.disk = SimulatedDisk(seed)
        self.driven = Driven(DIRECTORY, self.limits, disk=self.disk, partitions=1 + seed % 2, **self.options)
        self.order = OrderTally()
        self.tallies = {group: Tally(group, self.order) for group, _, _ in GROUPS}
        self.workers: list[Worker] = []
        #: Of processes that were replaced and do not know it.
        self.ghosts: list[Worker] = []
        self.batches: dict[bytes, list[Batch]] = {bytes([number]) * 16: [] for number in (1, 2, 3)}
        self.sent: dict[str, list[int]] = {subject: [] for subject in SUBJECTS}
        self.places: dict[tuple[str, int, int], int] = {}  # by subject, lane and sequence
        self.ids: dict[str, int] = {}
        self.count = Counter[str]()
        self._set_us = 0
        self._messages = self._connections = self._lives = 0
        self._sends: dict[int, Batch] = {}
        self._administered: dict[int, dict[str, Any]] = {}
        self._produced = Counter[bytes]()
        #: The resend that has not ended, as far as is known, and the number of the last request for it.
        self.resending: dict[str, Any] = {}
        self._resend_request = 0
        for group, prefixes, count in GROUPS:
            self.workers += [self._worker(f"{group}{number}", group, prefixes) for number in range(count)]

    def _worker(self, name: str, group: str, prefixes: tuple[str, ...]) -> Worker:
        self._lives += 1
        return Worker(name, group, prefixes, self.tallies[group], self._lives, self.chance.getrandbits(32))

    # --- a history ---------------------------------------------------------------------------------------------------

    def run(self, commands: int) -> None:
        """So many commands at least, one crash at least; then the drain, and the checks."""
        while self.count["commands"] < commands or not self.count["killed"] + self.count["power lost"]:
            self.step(self.count["commands"] >= commands)
        self.drain()
        self.check()

    def step(self, is_late: bool = False) -> None:
        """One turn of the broker, and what happens around it."""
        chance, kind = self.chance, self.chance.random()
        if kind < 0.03:
            self.checkpoint()
        elif kind < 0.045 or is_late:
            self.crash_soon()
        elif kind < 0.055:
            self.set_clock()
        elif kind < 0.07:
            self.replace(chance.choice(self.workers))
        elif kind < 0.08:
            chance.choice(self.workers).silent_until_us = self.driven.now.monotonic_us + SESSION_TIMEOUT_MS * 2_000
        elif kind < 0.084:
            self.administer(chance.choice(("redrive", "seek_group")))
        elif kind < 0.088 and not self.resending:
            self.begin_resend()
        self.turn()

    def turn(self) -> None:
        """Some of the clients say something, all at once; then time passes."""
        commands = [self._send(self.chance.choice(sorted(self.batches)))] if self.chance.random() < 0.4 else []
        now_us = self.driven.now.monotonic_us
        awake = [worker for worker in [*self.workers, *self.ghosts] if worker.silent_until_us <= now_us]
        actors = self.chance.sample(awake, min(len(awake), self.chance.randrange(1, 6)))
        for worker in actors:
            commands += self._said_by(worker)
        if self.chance.random() < 0.5:
            commands += [Heartbeat(999, self.driven.request(), one.client, 0) for one in awake]
        self.do(commands)
        self.resend_on()
        for worker in actors:
            if self.chance.random() < 0.03:  # whatever is not answered by now never is
                self.cut(worker)
        self.workers = [self._worker(one.name, one.group, one.prefixes) if one.is_gone else one for one in self.workers]
        self.ghosts = [one for one in self.ghosts if not one.is_gone]
        self.advance(self.chance.choice((0, 1, 5, 30, 100)))

    def _said_by(self, worker: Worker) -> list[Command]:
        request = self.driven.request()
        if worker.subscription is not None and worker not in self.ghosts and self.chance.random() < 0.02:
            self.count["left"] += 1
            return [worker.leave(request)]
        self._connections += 1
        command = worker.act(request, self._connections)
        luck = self.chance.random()
        if luck < 0.02:
            self.count["frame lost"] += 1
            return [self._closed(worker)]
        if luck < 0.04 and not isinstance(command, Subscribe):
            self.count["frame doubled"] += 1
            return [command, command._replace(request=self.driven.request())]  # type: ignore[union-attr]
        if luck < 0.06:
            self.count["answer lost"] += 1
            return [command, self._closed(worker)]
        return [command]

    def do(self, commands: list[Command]) -> None:
        """One turn of the broker with these; it may crash in it."""
        self.count["commands"] += len(commands)
        try:
            said = self.driven.do(*commands)
        except _Crash as crash:
            self.crash(crash.operation)
            return
        self.hear(said)

    def advance(self, milliseconds: int) -> None:
        """Time passes, and the broker looks at it."""
        try:
            said = self.driven.advance(milliseconds)
        except _Crash as crash:
            self.crash(crash.operation)
            return
        self.hear(said)

    # --- what clients do ---------------------------------------------------------------------------------------------

    def _send(self, producer: bytes) -> Command:
        """The first batch that is not acknowledged, again, or another one."""
        if not self.batches[producer]:
            count = self.chance.choice((1, 1, 2, 8))
            messages = list(range(self._messages, self._messages + count))
            subject, lane = self.chance.choice(SUBJECTS), self.chance.choice(self.lanes)
            batch = Batch(producer, self._produced[producer], subject, messages, lane)
            self.count[lane_name(lane)] += count
            self._messages += count
            self._produced[producer] += count
            self.batches[producer].append(batch)
        request = self.driven.request()
        self._sends[request] = self.batches[producer][0]
        return Send(1, request, self.batches[producer][0].data(), True)

    def replace(self, worker: Worker) -> None:
        """Its process is killed, and started anew under the same name; or only cut off, and does not know."""
        self.workers[self.workers.index(worker)] = self._worker(worker.name, worker.group, worker.prefixes)
        self.count["replaced"] += 1
        if worker.subscription is not None and self.chance.random() < 0.5:
            self.count["ghosts"] += 1
            self.ghosts.append(worker)
        else:
            self.cut(worker)

    def cut(self, worker: Worker) -> None:
        """Its connection breaks."""
        if worker.connection:
            self.count["disconnected"] += 1
            self.do([self._closed(worker)])

    def _closed(self, worker: Worker) -> Disconnected:
        """Its connection is closed, by its own system or by somebody else."""
        command = Disconnected(worker.connection, by_client=self.chance.random() < 0.5)
        self.count["closed by the client"] += command.by_client
        worker.disconnected()
        return command

    def set_clock(self) -> None:
        """Somebody sets the wall clock, forward or back."""
        self.count["clock set"] += 1
        for tally in self.tallies.values():
            tally.clock_set(self.driven.now.wall_us)
        jump_us = self.chance.choice((-3_000_000, -500_000, 500_000, 3_000_000))
        if abs(self._set_us + jump_us) > _MOST_SET_US:
            jump_us = -jump_us
        self._set_us += jump_us
        self.driven.now = self.driven.now._replace(wall_us=self.driven.now.wall_us + jump_us)

    def administer(self, action: str) -> None:
        """Hand out the dead letters of a group again, or have it begin anew."""
        tally = self.chance.choice(list(self.tallies.values()))
        fields = {"group": tally.group, "to": "first", "clear_retries": True}
        self.count[action] += 1
        (tally.redriven if action == "redrive" else tally.sought)()
        self.do([Administer(1, self.driven.request(), action, fields)])

    def begin_resend(self) -> None:
        """Have a group get again what it is through with, of some subjects."""
        self.count["resend"] += 1
        prefix = self.chance.choice(("", "a.", "b"))
        run = self.chance.randbytes(16)
        self.resending = {"run": run, "prefix": prefix, "group": self.chance.choice(list(self.tallies))}

    def resend_on(self) -> None:
        """Ask how far the resend is, which goes on after a crash."""
        if not self.resending:
            return
        self.tallies[self.resending["group"]].resent()
        self._resend_request = self.driven.request()
        self.do([Administer(1, self._resend_request, "resend", dict(self.resending))])
        if self.driven.broker.wants_checkpoint():
            self.checkpoint()

    def _heard_of_resend(self, effect: Administered | Refused) -> None:
        if isinstance(effect, Administered):
            has_ended = "nothing" in effect.fields or effect.fields["done"]
            self.count["resent"] += effect.fields.get("resent", 0)
        else:
            has_ended = isinstance(effect.error, InvalidOption)  # there is no message yet
            self.count["resend refused"] += 1
        if has_ended and self.resending:
            self.tallies[self.resending["group"]].resent()
            self.resending = {}

    def hear(self, effects: list[Effect]) -> None:
        """Everybody hears what was said to him."""
        for effect in effects:
            if getattr(effect, "request", 0) == self._resend_request and isinstance(effect, Administered | Refused):
                self._heard_of_resend(effect)
            elif isinstance(effect, Sent):
                self._acknowledged(effect)
            elif isinstance(effect, Administered):
                self._administered[effect.request] = effect.fields
            else:
                for worker in [*self.workers, *self.ghosts]:
                    if effect.request in worker.asked:  # type: ignore[union-attr]
                        for message, holder in worker.hear(effect, self.driven.now.wall_us):
                            self.check_let_go(message, holder)
                        for message, holder in self.order.take_others():
                            self.count["others of the slot looked at"] += 1
                            self.check_let_go(message, holder)
                        break

    def _acknowledged(self, sent: Sent) -> None:
        batch = self._sends.pop(sent.request)
        waiting = self.batches[batch.producer]
        if batch in waiting:
            waiting.remove(batch)
            self.sent[batch.subject] += batch.messages
        assert isinstance(sent.first_sequences, int)
        for at, message in enumerate(batch.messages):
            place = batch.subject, batch.lane, sent.first_sequences + at
            assert self.places.setdefault(place, message) == message
            self.order.stored(message, *place)
            self.ids[str(MessageId(self.driven.store.store_id, sent.partition, sent.position + at))] = message

    def check_let_go(self, message: int, holder: Holder) -> None:
        """The broker would not take that one's acknowledgement any more."""
        group, name, epoch, generation, _ = holder.key
        found = self.driven.broker.groups[group].ledger
        assert found is not None
        member = found.by_name.get(name)
        if member is None or member.closed or member.epoch != epoch:
            return
        if generation == self.driven.store.groups.generation:
            in_flight = member.in_flight.holds(holder.sequence, holder.sequence + 1)
            assert not in_flight, f"{message} is held by {name} as {holder.sequence}, and was given to another"

    # --- what befalls the broker -------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Take one; it may crash in it."""
        for tally in self.tallies.values():
            tally.checkpoint_begins()
        try:
            self.driven.checkpoint()
        except _Crash as crash:
            self.crash(crash.operation)
            return
        self.count["checkpoints"] += 1
        for tally in self.tallies.values():
            tally.checkpoint_done()

    def crash_soon(self, operations: int = 6) -> None:
        """End the broker's process at one of its next operations."""
        left = self.chance.randrange(operations)

        def before(operation: Operation) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Crash(operation)

        self.disk.before = before

    def crash(self, operation: Operation) -> None:
        """The process is gone within that operation, maybe with the power; another one starts."""
        self._stop(operation)
        while True:
            if self.chance.random() < _DISTURBED:
                self.crash_soon(_START_OPERATIONS)
            try:
                self.driven.open()
            except _Crash as crash:
                self.count["start interrupted"] += 1
                self._stop(crash.operation)
            else:
                return

    def _stop(self, operation: Operation) -> None:
        self.disk.before = None
        self.disk.interrupt(operation)
        power = self.chance.random() < _POWER
        self.count["power lost" if power else "killed"] += 1
        self.disk.stop(power=power)
        for worker in [*self.workers, *self.ghosts]:
            worker.disconnected()
        self.ghosts.clear()
        self._sends.clear()
        self.driven.wanted.clear()
        self.driven.reads.clear()
        if power:
            for tally in self.tallies.values():
                tally.power_lost()
        if self.chance.random() < 0.1:
            check_files(self.disk)

    # --- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Nothing fails any more: hand out and acknowledge everything."""
        self.disk.before = None
        for worker in [*self.workers, *self.ghosts]:
            self.cut(worker)
        self.ghosts.clear()
        while waiting := [producer for producer, batches in self.batches.items() if batches]:
            self.do([self._send(producer) for producer in waiting])
        quiet = 0
        while quiet < _QUIET or self.resending:
            self.resend_on()
            quiet = 0 if self.drain_once() else quiet + 1
            self.driven.do(*[Heartbeat(999, self.driven.request(), one.client, 0) for one in self.workers])
            self.advance(800)

    def drain_once(self) -> int:
        """Everybody pulls and acknowledges; how many messages came."""
        came = 0
        for worker in self.workers:
            while worker.subscription is None or worker.backs or worker.unconfirmed:
                self._connections += 1
                self.do([worker.act(self.driven.request(), self._connections)])
            request = self.driven.request()
            command = worker._pull(request)._replace(max_count=_ALL, max_bytes=1 << 20, timeout_ms=0)
            worker.asked[request] = command
            before = len(worker.got)
            self.do([command])
            came += len(worker.got) - before
            for sequence in worker.open_sequences():
                assert worker.in_flight is not None
                worker.in_flight.ack(sequence, sequence + 1)
            while worker.subscription is not None and worker.unconfirmed:
                self._connections += 1
                self.do([worker.act(self.driven.request(), self._connections)])
        return came

    def dead(self, group: str) -> dict[int, str]:
        """The reasons of a group's dead letters, by message."""
        found: dict[int, str] = {}
        after: int | None = 0
        while after is not None:
            request = self.driven.request()
            self.do([Administer(1, request, "dead_letters", {"group": group, "after": after})])
            while request not in self._administered:  # many letters take several turns
                self.hear(self.driven.advance(0))
            fields = self._administered.pop(request)
            for row in fields["rows"]:
                assert row["id"] in self.ids, f"nobody knows {row}"
                found[self.ids[row["id"]]] = row["reason"]
            after = fields["after"]
        return found

    def check(self) -> None:
        """Hold everything against the record; stop, verify."""
        self.count.update({"behind another of the slot": self.order.behind, "with another": self.order.with_others})
        for group, prefixes, _ in GROUPS:
            dead = self.dead(group)
            self.count["dead"] += len(dead)
            self.tallies[group].check_dead(dead)
            mine = [
                message
                for subject, messages in self.sent.items()
                if any(subject.startswith(prefix) for prefix in prefixes)
                for message in messages
            ]
            self.tallies[group].check_all(mine, dead)
        self.check_alone()
        self.driven.checkpoint()
        self.driven.store.close(clean=True)
        self.disk.stop(power=False)
        check_files(self.disk)

    def check_alone(self) -> None:
        """Whoever follows alone gets each lane of each subject in stored order, whatever their priority."""
        subscription = self.driven.subscribe("", group=None, start="first")
        found: dict[tuple[str, int], int] = {}
        while True:
            said = self.driven.do(self.driven.pull_command(subscription, max_bytes=1 << 20))
            runs = [run for one in said if isinstance(one, PulledMessages) for run in runs_of_answer(one)]
            if not runs:
                break
            for run in runs:
                assert run.first_sequence >= found.get((run.subject, run.lane), 0), (run.subject, run.lane)
                found[run.subject, run.lane] = run.first_sequence + run.count
                for sequence, body in enumerate(run.bodies(), run.first_sequence):
                    message = int(bytes(body).rstrip(b"."))
                    assert self.places.get((run.subject, run.lane, sequence), message) == message
                    self.count["read alone"] += 1


def lane_name(lane: int) -> str:
    """What a history counts messages of a lane as."""
    if lane >= LANE_ORDERED:
        return "with an order key"
    return {LANE_NORMAL: "of normal priority", LANE_HIGH: "of high priority", LANE_LOW: "of low priority"}[lane]


def run(seed: int, commands: int = 1_000) -> Counter[str]:
    """One history, and what happened in it."""
    return run_one(Consumption(seed), commands, f"consumption {seed}")
