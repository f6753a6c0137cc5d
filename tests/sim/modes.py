"""Histories of consumers (``tests.sim.consumption``) with what else a broker has: a group that gets each message once,
or never; a broadcast; and messages that are delivered later, or cancelled.

All of it goes by what the clients have sent, asked and been told.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from qmq.broker.ports.commands import Administer, Command, Pull, Send, Subscribe
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Sent, Subscribed, Unsubscribed
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.ids import MessageId
from qmq.format.pieces import read_answer
from tests.broker.harness import runs_of_answer
from tests.fake_disk import Operation
from tests.sim.consumption import Batch, Consumption, lane_name
from tests.sim.runs import run_one
from tests.sim.tally import Holder, Tally
from tests.sim.worker import SETTINGS, Worker

ONCE: Final = "once"
CAST: Final = "cast"
LATE: Final = "late"
MEMBERS: Final = ("m1", "m2")
_LATE_PRODUCER: Final = b"later" * 3 + b"!"
_DELAYS_US: Final = (1, 200_000, 900_000, 4_000_000)


class LateBatch(Batch):
    """A batch of messages that are to be delivered later."""

    def __init__(self, sequence: int, messages: list[int], delays_us: list[int], lane: int) -> None:
        super().__init__(_LATE_PRODUCER, sequence, LATE, messages, lane)
        self.delays_us = delays_us

    def data(self) -> memoryview:
        """As it is sent, each time."""
        bodies = [b"%d" % message for message in self.messages]
        run = RunContent(LATE, bodies, [make_header(deliver_at=delay) for delay in self.delays_us], self.lane)
        parts = build_batch([run], created_at_us=1, producer_id=self.producer, producer_sequence=self.sequence)
        return memoryview(bytearray(b"".join(parts)))


class CastTally(Tally):
    """What clients know of a broadcast's member, which is a group of its own."""

    #: Messages with this number and later ones were sent after it had come.
    since: int | None = None


class OnceTally:
    """What clients know of a group that gets each message once, or never."""

    def __init__(self) -> None:
        self.got: set[int] = set()
        #: So many messages may have been in answers that nobody heard; since the last crash too.
        self.unheard = self.unheard_since = 0
        self.not_before_us: dict[int, int] = {}

    def delivered(self, message: int, now_us: int) -> None:
        """It came."""
        assert message not in self.got, f"{message} came twice to a group that gets it once"
        assert now_us >= self.not_before_us.get(message, 0), f"{message} came early"
        self.got.add(message)

    def not_heard(self, pull: Pull) -> None:
        """Nobody will hear its answer."""
        self.unheard += pull.max_count
        self.unheard_since += pull.max_count


class CastWorker(Worker):
    """A member of the broadcast."""

    def _next(self, request: int, connection: int) -> Command:
        command = super()._next(request, connection)
        return command._replace(group=CAST, mode="broadcast") if isinstance(command, Subscribe) else command


class OnceWorker(Worker):
    """A consumer of the group that gets each message once: it has no place, and nothing to say of what it got."""

    once: OnceTally

    def _next(self, request: int, connection: int) -> Command:
        if self.subscription is None:
            self.connection = self.connection or connection
            start = self.connection, request, self.group, self.prefixes, self.name, None
            settings = (("max_unacked", 8), *(one for one in SETTINGS if one[0] != "max_unacked"))
            return Subscribe(*start, self.nonce, self.client, False, settings, mode="at_most_once")
        return self._pull(request)

    def _pull(self, request: int) -> Pull:
        assert self.subscription is not None
        limits = self.chance.choice((1, 2, 5)), 1, 1 << 20, self.chance.choice((0, 0, 50))
        return Pull(self.connection, request, self.subscription, *limits)

    def disconnected(self) -> None:
        """Nothing that was asked will be answered."""
        for command in self.asked.values():
            if isinstance(command, Pull):
                self.once.not_heard(command)
        super().disconnected()

    def hear(self, effect: Effect, now_us: int) -> list[tuple[int, Holder]]:
        """An answer."""
        command = self.asked.pop(effect.request, None)  # type: ignore[union-attr]
        match effect:
            case Subscribed(subscription=subscription, consumer_state=consumer_state):
                assert consumer_state is None
                self.subscription = subscription
            case PulledMessages():
                self._take(effect, now_us)
            case Refused(error=error):
                assert error.retryable, error
            case Unsubscribed():
                pass
            case _:
                raise AssertionError(effect, command)
        return []

    def _take(self, answer: PulledMessages, now_us: int) -> None:
        runs, damaged = read_answer(memoryview(b"".join(answer.buffers)))
        assert not damaged
        for body in (body for run in runs for body in run.bodies()):
            message = int(bytes(body).rstrip(b"."))
            self.once.delivered(message, now_us)
            self.got[message] = message  # type: ignore[assignment]  # only counted

    def open_sequences(self) -> list[int]:
        """It has to say nothing of any."""
        return []


class Modes(Consumption):
    """One history."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.once = OnceTally()
        self.sent[LATE] = []
        self._late: list[LateBatch] = []
        self._late_sequence = 0
        #: Names of delayed messages by number; what was asked to be cancelled; of that what was, and what was not.
        self._names: dict[int, str] = {}
        self._cancels: dict[int, int] = {}
        self._doubtful: set[int] = set()
        self._cancelled: set[int] = set()
        #: The first message that was sent after the last crash.
        self._first_since = 0
        for name in MEMBERS:
            self.tallies[f"{CAST}@{name}"] = CastTally(f"{CAST}@{name}")
            self.workers.append(self._worker(name, f"{CAST}@{name}", ("",)))
        self.workers += [self._worker(f"{ONCE}{number}", ONCE, ("", "a.x")[:number]) for number in (1, 2)]

    def _worker(self, name: str, group: str, prefixes: tuple[str, ...]) -> Worker:
        if group == ONCE:
            self._lives += 1
            worker = OnceWorker(name, group, prefixes, Tally(ONCE), self._lives, self.chance.getrandbits(32))
            worker.once = self.once
            return worker
        if group.startswith(CAST):
            self._lives += 1
            return CastWorker(name, group, prefixes, self.tallies[group], self._lives, self.chance.getrandbits(32))
        return super()._worker(name, group, prefixes)

    # --- what clients do ---------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """As any, and maybe something is to be delivered later, or not at all."""
        commands: list[Command] = []
        if self.chance.random() < 0.25:
            commands.append(self._send_late())
        if self.chance.random() < 0.1 and self._names:
            commands.append(self._cancel())
        if commands:
            self.do(commands)
        super().turn()

    def _send_late(self) -> Command:
        """The first batch that is not acknowledged, again, or another one."""
        chance = self.chance
        is_new = not self._late
        if is_new:
            messages = list(range(self._messages, self._messages + chance.choice((1, 1, 4))))
            self._messages += len(messages)
            delays_us, lane = [chance.choice(_DELAYS_US) for _ in messages], chance.choice(self.lanes)
            self._late.append(LateBatch(self._late_sequence, messages, delays_us, lane))
            self.count[f"late {lane_name(lane)}"] += len(messages)
            self._late_sequence += len(messages)
            self.count["late"] += len(messages)
        batch = self._late[0]
        for message, delay_us in zip(batch.messages, batch.delays_us, strict=True):
            self._not_before(message, self.driven.now.wall_us + delay_us, is_new=is_new)
        request = self.driven.request()
        self._sends[request] = batch
        return Send(1, request, batch.data(), True)

    def _not_before(self, message: int, due_us: int, *, is_new: bool) -> None:
        """Sent again it may be due sooner, where the clock was set back meanwhile; the first time counts otherwise."""
        for tally in self.tallies.values():
            letter = tally.letter(message)
            letter.not_before_us = due_us if is_new else min(due_us, letter.not_before_us)
        before_us = due_us if is_new else self.once.not_before_us.get(message, 0)
        self.once.not_before_us[message] = min(due_us, before_us)

    def _cancel(self) -> Command:
        message = self.chance.choice(sorted(self._names))
        request = self.driven.request()
        self._cancels[request] = message
        self._doubtful.add(message)
        return Administer(1, request, "cancel", {"id": self._names.pop(message)})

    def _said_by(self, worker: Worker) -> list[Command]:
        said = super()._said_by(worker)
        if isinstance(worker, OnceWorker) and len(said) == 2 and isinstance(said[1], Pull):
            self.once.not_heard(said[1])  # that came twice: one of the answers is nobody's
        return said

    def set_clock(self) -> None:
        """Somebody sets the wall clock, forward or back: what was due by then has fallen due."""
        due = self.once.not_before_us
        self.once.not_before_us = {one: us for one, us in due.items() if us > self.driven.now.wall_us}
        super().set_clock()

    def hear(self, effects: list[Effect]) -> None:
        """Everybody hears what was said to him."""
        rest = []
        for effect in effects:
            if isinstance(effect, Administered) and effect.request in self._cancels:
                self._heard_of_cancel(self._cancels.pop(effect.request), bool(effect.fields["cancelled"]))
            else:
                rest.append(effect)
        super().hear(rest)
        for worker in self.workers:
            if isinstance(worker.tally, CastTally) and worker.tally.since is None and worker.subscription is not None:
                worker.tally.since = self._messages

    def _heard_of_cancel(self, message: int, was_in_time: bool) -> None:
        self._doubtful.discard(message)
        self.count["cancelled" if was_in_time else "cancelled too late"] += 1
        if was_in_time:
            self._cancelled.add(message)
        else:
            self.sent[LATE].append(message)

    def _acknowledged(self, sent: Sent) -> None:
        batch = self._sends[sent.request]
        if not isinstance(batch, LateBatch):
            super()._acknowledged(sent)
            return
        del self._sends[sent.request]
        if batch in self._late:
            self._late.remove(batch)
            for ordinal, message in enumerate(batch.messages):
                name = MessageId(self.driven.store.store_id, sent.partition, sent.position + ordinal)
                self._names[message] = str(name)
                self.ids[str(name)] = message

    # --- what befalls the broker -------------------------------------------------------------------------------------

    def crash(self, operation: Operation) -> None:
        """The process is gone within that operation."""
        self.driven.read_outcomes.clear()  # of blocks that it has synced
        super().crash(operation)
        self._cancels.clear()
        self.once.unheard_since, self._first_since = 0, self._messages

    # --- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Nothing fails any more: send, hand out and acknowledge everything."""
        self.disk.before = None
        while self._late:
            self.do([self._send_late()])
        super().drain()

    def check(self) -> None:
        """Hold everything against the record; stop, verify."""
        self.sent[LATE] += self._names
        self._learn_places()
        for name in MEMBERS:
            self._check_member(f"{CAST}@{name}")
        self._check_once()
        got = self.once.got.union(*(_delivered(tally) for tally in self.tallies.values()))
        assert not got & self._cancelled, f"{got & self._cancelled} came, though they were cancelled in time"
        super().check()

    def _learn_places(self) -> None:
        """Which message is which, of those that were delivered later: by one who follows alone."""
        subscription = self.driven.subscribe(LATE, group=None, start="first")
        while True:
            said = self.driven.do(self.driven.pull_command(subscription))
            runs = [run for one in said if isinstance(one, PulledMessages) for run in runs_of_answer(one)]
            if not runs:
                return
            for run in runs:
                for sequence, body in enumerate(run.bodies(), run.first_sequence):
                    message = int(bytes(body))
                    assert message not in self._cancelled, f"{message} was cancelled in time, and is there"
                    assert self.places.setdefault((LATE, run.lane, sequence), message) == message

    def _check_member(self, group: str) -> None:
        """A member of the broadcast has been given whatever was sent since it came."""
        tally = self.tallies[group]
        assert isinstance(tally, CastTally)
        dead = self.dead(group)
        tally.check_dead(dead)
        since = self._messages if tally.since is None else tally.since
        mine = [message for messages in self.sent.values() for message in messages if message >= since]
        self.count["sent to members"] += len(mine)
        tally.check_all(mine, dead)

    def _check_once(self) -> None:
        """What is missing was in an answer that nobody heard, or was skipped at a crash, which the group tells of."""
        request = self.driven.request()
        self.do([Administer(1, request, "groups", {"group": ONCE})])
        skipped = self._administered.pop(request)["rows"][0]["skipped"]
        missing = {message for messages in self.sent.values() for message in messages} - self.once.got
        self.count.update({"once: got": len(self.once.got), "once: missing": len(missing), "once: skipped": skipped})
        assert len(missing) <= skipped + self.once.unheard, f"{len(missing)} are missing, {skipped} are told of"
        late = set(self.sent[LATE])
        lost = {message for message in missing - late if message >= self._first_since}
        assert len(lost) <= self.once.unheard_since, f"{lost} were sent after the last crash, and never came"


def _delivered(tally: Tally) -> set[int]:
    return {message for message, letter in tally.letters.items() if letter.deliveries}


def run(seed: int, commands: int = 1_000) -> Counter[str]:
    """One history, and what happened in it."""
    return run_one(Modes(seed), commands, f"modes {seed}")
