"""Calls to the group "g" of a real broker and to the model of one: the parts that all histories share."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from hypothesis.stateful import RuleBasedStateMachine

from qmq.broker.groups.counts import COUNT_NAMES
from qmq.broker.groups.message_life import MESSAGE_LIFE, MessageEvent, MessageState
from qmq.broker.groups.passed import wrongly_passed
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Administer, Subscribe
from qmq.broker.ports.effects import Administered, PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced, UnknownGroup
from qmq.net.protocol.types import RESENT_BIT, KnownConsumer
from qmq.storage.pull_log.records import PullRecord
from tests.broker.group_state import WrittenRecords, content, handed_of, ledger_of, letter_of
from tests.broker.harness import Driven, runs_of_answer
from tests.broker.model import Consumer, Given, Group, Handed, Refusal
from tests.broker.model_log import Log, Message
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY

SESSION_TIMEOUT_MS = 1_000
FIRST_SETTINGS = (
    ("max_attempts", 2),
    ("max_session_expiries", 2),
    ("max_unacked", 8),
    ("retry_delays_us", (0, 300_000, 2_000_000)),
    ("priority_share", 0.5),
)


#: Records that are written only where the state of a message changes.
ONLY_WITH_MESSAGES = {
    RecordKind.PULL, RecordKind.PASSED, RecordKind.AGAIN, RecordKind.ACK, RecordKind.BACK, RecordKind.REDRIVE,
    RecordKind.FORGET,
}  # fmt: skip


class Session(NamedTuple):
    """A subscription of a consumer, as one process of it knows it."""

    one: Consumer
    group: Group
    epoch: int
    nonce: bytes
    connection: int
    subscription: int
    expected: list[int]  # one number: the delivery sequence that its next pull expects
    since_us: int


#: The counts of a group's statistics that an event is in, beside PULL.
COUNTED_AS = {
    MessageEvent.ACK: ("acked",),
    MessageEvent.NACK: ("nacked",),
    MessageEvent.LAST_NACK: ("nacked", "died"),
    MessageEvent.RELEASE: ("released",),
    MessageEvent.EARLIER_BACK: ("released",),
    MessageEvent.LEAVE: ("released",),
    MessageEvent.REJECT: ("rejected", "died"),
    MessageEvent.EXPIRE: ("expired", "died"),
    MessageEvent.SESSION_EXPIRY: ("session_expired",),
    MessageEvent.LAST_SESSION_EXPIRY: ("session_expired", "died"),
}


class GroupCalls(RuleBasedStateMachine):
    """One broker, one group, and its consumers."""

    def __init__(self) -> None:
        super().__init__()
        limits = BrokerLimits(
            session_timeout_ms=SESSION_TIMEOUT_MS, producer_window=1_000, producer_ttl_ms=1_000_000_000
        )
        self.disk = SimulatedDisk(1)
        self.driven = Driven(DIRECTORY, limits, disk=self.disk, segment_bytes=16 << 10, max_frame_bytes=4 << 10)
        self.log = Log()
        #: The broker remembers few rows of slots that it has passed.
        self.forgets = False
        self.counts: Counter[str] = Counter()
        self.steps: Counter[tuple[MessageState, MessageEvent]] = Counter()
        self.records = WrittenRecords(self.driven)
        #: Those that were read since the last check.
        self.written: list[PullRecord] = []
        #: The broker and the ledger of the group when the counts of its statistics began, and the steps until then.
        self.counted: tuple[object, object, Counter[tuple[MessageState, MessageEvent]]] = None, None, Counter()
        self.group: Group | None = None
        self.sessions: list[Session] = []
        self.connections = 1

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def sent(self) -> list[Message]:
        return self.log.messages

    @property
    def now_us(self) -> int:
        return self.driven.now.wall_us

    def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        (answer,) = self.driven.do_whole(Administer(1, self.driven.request(), action, {"group": "g", **fields}))
        assert isinstance(answer, Administered), answer
        return answer.fields

    def check(self) -> None:
        """Check that consumers, messages in flight, retries and dead letters are as in the model."""
        written = {record.kind for record in self.written + self.records.take()}
        self.written.clear()
        if self.group is None:
            assert "g" not in self.driven.broker.groups
            return
        before = self.steps.copy()
        self.check_steps(written)
        (row,) = self.ask("groups")["rows"]
        self.check_statistics(row, before)
        letters = [letter_of(row, self.log) for row in self.ask("dead_letters")["rows"]]
        assert row["filtered"] == self.group.filtered
        assert content(self.driven, row, letters) == self.group.content(self.now_us)
        held = row["in_flight"] + row["in_retry"] + row["dead"]
        assert ledger_of(self.driven).totals.held == held, "the totals say what is held"
        assert wrongly_passed(self.driven.store, self.driven.broker.groups["g"]) is None
        assert not self.driven.broker.unaccounted()

    def check_steps(self, written: set[int]) -> None:
        """The table of a message's life has each change of the model since the last look, with a record that the
        broker wrote; and no record was written of a change that the model has not seen.
        """
        assert self.group is not None
        expected = set[int]()
        for (before, event, after), count in Counter(self.group.steps).items():
            state, records = MESSAGE_LIFE[before, event]
            assert state is after, (before, event)
            assert not records or written.intersection(records), (before, event, written)
            expected.update(records)
            self.steps[before, event] += count
        assert written & ONLY_WITH_MESSAGES <= expected
        self.group.steps.clear()

    def check_statistics(self, row: dict[str, Any], before: Counter[tuple[MessageState, MessageEvent]]) -> None:
        """The statistics count the changes of the model since the broker's start, and agree with the group's *row*."""
        found = self.ask("stats", after="!")
        stats = dict(zip(found["columns"], found["groups"][0], strict=True))
        same = "ready", "in_flight", "in_retry", "dead", "skipped", "filtered", "consumers", "follows"
        assert {name: stats[name] for name in same} == {name: row[name] for name in same}
        ledger = self.driven.broker.groups["g"].ledger
        if self.counted[0] is not self.driven.broker:
            self.counted = self.driven.broker, ledger, self.steps.copy()
        elif self.counted[1] is not ledger:
            self.counted = self.driven.broker, ledger, before
        since = Counter[str]()
        for (state, event), count in (self.steps - self.counted[2]).items():
            for name in COUNTED_AS.get(event, ()):
                since[name] += count
            if event is MessageEvent.PULL:
                since["delivered" if state is MessageState.READY else "redelivered"] += count
        assert {name: stats[name] for name in COUNT_NAMES if stats[name]} == dict(since)

    # --- consumers ---------------------------------------------------------------------------------------------------

    def hello(self, name: str, nonce: bytes, known: KnownConsumer | None, expected: int | None = None) -> None:
        driven = self.driven
        self.connections += 1
        command = Subscribe(
            self.connections, driven.request(), "g", ("",), name, None, nonce, nonce, name == "fleeting",
            FIRST_SETTINGS, known=known,
        )  # fmt: skip
        if self.group is None:
            self.group = Group(self.log, SESSION_TIMEOUT_MS * 1_000)
            self.group.seen, self.group.forgets = self.counts, self.forgets
            self.set_model(dict(FIRST_SETTINGS))
        answer = driven.do(command)[-1]
        try:
            now = driven.now
            one = self.group.hello(
                name, nonce, transient=name == "fleeting", monotonic_us=now.monotonic_us, now_us=now.wall_us,
                known=known,
            )  # fmt: skip
        except Refusal:
            self.counts["hello refused"] += 1
            assert isinstance(answer, Refused)
            assert isinstance(answer.error, Fenced)
            return
        assert isinstance(answer, Subscribed), answer
        consumer_state = answer.consumer_state
        assert consumer_state is not None
        assert (consumer_state.epoch, consumer_state.ack_floor) == (one.epoch, one.ack_floor)
        goes_on = consumer_state.ack_floor if expected is None or one.epoch != (known and known.epoch) else expected
        self.sessions.append(
            Session(one, self.group, one.epoch, nonce, self.connections, answer.subscription, [goes_on], one.since_us)
        )
        self.check()

    def known(self, session: Session, epoch: int, handled: tuple[int, ...] = ()) -> KnownConsumer:
        """Return what a process tells of its consumer when it joins again."""
        return KnownConsumer(session.since_us, self.driven.store.groups.generation, epoch, 0, handled)

    def is_current(self, session: Session) -> bool:
        if session.group is not self.group:
            return False
        try:
            self.group.check(session.one, session.epoch)
        except Refusal:
            return False
        return True

    def refusal(self, session: Session, answer: Any) -> bool:
        """Return whether the broker refused a call of that session, and check that it had to."""
        if self.is_current(session):
            session.one.seen_us = self.driven.now.monotonic_us
            return False
        self.counts["late calls"] += 1
        self.sessions.remove(session)
        assert isinstance(answer, Refused), answer
        assert isinstance(answer.error, Fenced if session.group is self.group else UnknownGroup), answer
        self.check()
        return True

    def handed(self) -> list[Handed]:
        """Return what the records say that were written since the last check."""
        self.written += self.records.take()
        return handed_of(self.driven, self.written)

    def given(self, answer: PulledMessages, name: str) -> list[Given]:
        """Return the messages of an answer."""
        runs = runs_of_answer(answer)
        bodies = [Message(run.subject, run.lane, run.first_sequence + at) for run in runs for at in range(run.count)]
        numbers = [(first + at, attempt % RESENT_BIT) for first, count, attempt in answer.ranges for at in range(count)]
        in_flight = ledger_of(self.driven).by_name[name].in_flight
        for first, count, attempt in answer.ranges:
            marks = {part.messages.resent for part in in_flight.between(first, first + count)}
            assert marks == {attempt >= RESENT_BIT}, "resent messages are marked, and no others"
        parts = [part for first, count, _ in answer.ranges for part in in_flight.between(first, first + count)]
        known = [(part.session_expiries, at) for at, part in enumerate(parts) for _ in range(part.messages.total)]
        return [
            Given(number, message, attempt, expired, part)
            for message, (number, attempt), (expired, part) in zip(bodies, numbers, known, strict=True)
        ]

    def set_model(self, given: dict[str, Any]) -> None:
        assert self.group is not None
        for name, value in given.items():
            if name == "retry_delays_us":
                self.group.delays_us = tuple(value)
            elif name == "tags":
                self.group.tags = frozenset(value)
            else:
                setattr(self.group, name, value)
