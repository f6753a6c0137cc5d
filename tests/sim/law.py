"""Random histories of one group that has tags, expiry, priorities, order keys and several consumers, against one law:
each life of a message of the group is ready, in flight, in retry, dead, acked, filtered, skipped, dropped or deleted,
and one of these only.

A message has one life, and another one when the group is sought back before it, or when it is resent after its end.
What a pull may choose is left to the broker. What became of each message that its cursors have passed is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, Final, NamedTuple

import pytest

from qmq.broker.delivery import select, tracker
from qmq.broker.delivery.order import scan
from qmq.broker.groups import cursors
from qmq.broker.groups.group import Group
from qmq.broker.groups.passed import wrongly_held, wrongly_passed
from qmq.broker.ports.commands import (
    Ack,
    Disconnected,
    DispositionRange,
    HandBack,
    Heartbeat,
    Subscribe,
    Unsubscribe,
    Withdraw,
)
from qmq.broker.ports.effects import Acked, HandedBack, PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.retention import advance_groups
from qmq.errors import Fenced, InvalidOption
from qmq.format.build import RunContent, make_header
from qmq.format.hashing import tag_bits
from qmq.format.ids import MessageId
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW
from qmq.names import takes
from qmq.net.protocol.types import RESENT_BIT, Disposition
from tests.broker.find.test_resend import resend
from tests.broker.group_state import ledger_of, letter_of, places_of, waiting_of
from tests.broker.harness import Driven, runs_of_answer
from tests.broker.model_log import Log, Message
from tests.broker.test_admin import ask
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, check_files

SESSION_TIMEOUT_MS: Final = 1_000
NAMES: Final = ("one", "two", "three")
TAGS: Final = ("red", "green", "blue")
SUBJECTS: Final = ("a.x", "a.y", "b")
FOLLOWED: Final = ((("",), ("",), ("",)), (("a.", "b"), ("a.",), ("b",)), (("a.x", "a.y", "b"), ("a.x", "b"), ("a.y",)))
LANES: Final = {
    "plain": (LANE_NORMAL,),
    "priorities": (LANE_NORMAL, LANE_HIGH, LANE_LOW),
    "keys": (LANE_NORMAL, *(LANE_ORDERED | slot for slot in (0, 1, 2, 4_095))),
    "all": (
        LANE_NORMAL,
        LANE_HIGH,
        LANE_LOW,
        *(LANE_ORDERED | slot for slot in (0, 1, 7)),
        *(kind | slot for kind in (LANE_ORDERED_HIGH, LANE_ORDERED_LOW) for slot in (0, 7)),
    ),
}
CALLS: Final = (
    *["send"] * 8, *["pull"] * 16, *["ack"] * 8, *["nack"] * 4, *["release"] * 2, *["reject"] * 2, *["fail"] * 2,
    *["wait"] * 2, *["set"] * 2, *["join"] * 2, *["leave"] * 2, *["die"] * 2, *["restart"] * 2, *["kill"] * 2,
    *["checkpoint"] * 2, *["resend"] * 2, *["withdraw"] * 2, *["limit"] * 2, "lose", "seek", "redrive", "delete",
    "retain",
)  # fmt: skip
#: Settings of the group that a history changes.
SETTINGS: Final[dict[str, tuple[Any, ...]]] = {
    "max_attempts": (1, 3, 16),
    "max_session_expiries": (1, 2, 3),
    "max_unacked": (1, 3, 8, 100),
    "max_unacked_bytes": (1, 600, 1 << 20),
    "retry_delays_us": ([0], [0, 300_000], [1, 1_000_000]),
    "ack_deadline_us": (0, 500_000),
    "priority_share": (0, 0.5, 1),
    "reconnect_timeout_us": (0, 400_000),
}


#: Bounds of the broker that a history may lower, so that a pull of few messages comes to them.
BOUNDS: Final = (
    (select, "MAX_PIECES", 3), (select, "MOST_UNWANTED", 2), (select, "MOST_RUNS_READ", 2), (scan, "MOST_PASSED", 4),
    (scan, "AGAIN_ROWS", 6), (tracker, "_LOOKED_AT_RANGES", 1), (tracker, "MOST_RANGES_A_RECORD", 2),
    (advance_groups, "_ROWS", 2), (cursors, "_SHORT", 1), (cursors, "_FEW", 2),
)  # fmt: skip


#: Stands for any message where these are only counted.
_SOME: Final = Message("", LANE_NORMAL, 0)


class Session(NamedTuple):
    """A consumer, as one process knows it."""

    name: str
    connection: int
    subscription: int
    nonce: bytes
    prefixes: tuple[str, ...]
    in_hand: dict[int, Message]
    expected: list[int]  # one number: the delivery sequence from which on nothing has come


class Law:
    """One broker and one group."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = Random(seed)
        self.counts: Counter[str] = Counter()
        self.patch = pytest.MonkeyPatch()
        for module, name, value in BOUNDS:
            if chance.random() < 0.15:
                self.patch.setattr(module, name, value)
                self.counts[f"{name} is low"] += 1
        self.calls: list[str] = []
        #: Old messages are removed, and those that somebody needs are copied: copies have other names, so messages are
        #: only counted then.
        self.retains = chance.random() < 0.2
        limits = BrokerLimits(
            session_timeout_ms=SESSION_TIMEOUT_MS, producer_window=1_000, producer_ttl_ms=1_000_000_000,
            retention_bytes=40_000 if self.retains else 0, retention_max_ms=2_500 if self.retains else 0,
        )  # fmt: skip
        self.partitions = chance.choice([1, 1, 2])
        self.driven = Driven(
            DIRECTORY, limits, disk=SimulatedDisk(seed), segment_bytes=16 << 10, max_frame_bytes=4 << 10,
            partitions=self.partitions,
        )  # fmt: skip
        self.mix = chance.choice(sorted(LANES))
        self.lanes = LANES[self.mix]
        self.followed = chance.choice(FOLLOWED)
        self.mode = "reliable" if self.retains else chance.choice(["reliable"] * 4 + ["at_most_once"])
        self.tags: tuple[str, ...] = chance.choice([(), ("red",), ("red",), ("green", "blue")])
        self.expire_after_us = chance.choice([0, 0, 0, 800_000])
        self.log = Log()
        self.tags_of: dict[Message, tuple[str, ...]] = {}
        self.expire_at: dict[Message, int] = {}
        self.stored_us: dict[Message, int] = {}
        self.sessions: list[Session] = []
        self.connections = self.processes = 1
        #: How many lives of a message go on, or have ended as a dead letter.
        self.alive: Counter[Message] = Counter()
        #: The messages that an at-most-once group has got since it was last sought.
        self.came: set[Message] = set()
        #: The group begins with messages that were stored at this time.
        self.start_us = 0
        #: How often the life of a message has ended so.
        self.ends: Counter[str] = Counter()
        self.lives = 0
        self.last_new: dict[tuple[str, int], int] = {}
        self.join()

    # --- the broker --------------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        return self.driven.broker.groups["g"]

    @property
    def now_us(self) -> int:
        return self.driven.now.wall_us

    def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        return ask(self.driven, action, group="g", **fields)

    def row(self) -> dict[str, Any]:
        """Return what the group's row says of its messages."""
        (row,) = self.ask("groups")["rows"]
        names = "ready", "in_flight", "in_retry", "dead", "skipped", "filtered"
        return {name: row[name] for name in names}

    # --- the oracle --------------------------------------------------------------------------------------------------

    def is_followed(self, message: Message) -> bool:
        return takes(self.group.filters, message.subject)

    def state_of(self, message: Message, now_us: int) -> str:
        """Return what a pull makes of a message at a time."""
        if self.tags and not tag_bits(self.tags_of[message]) & tag_bits(self.tags):
            return "filtered"
        is_over = self.expire_at[message] and self.expire_at[message] <= now_us
        is_stale = self.expire_after_us and self.stored_us[message] <= now_us - self.expire_after_us
        return "expired" if is_over or is_stale else "wanted"

    def check(self) -> None:
        """Check that each message is in one state, and that the counts say so."""
        if self.retains:
            self.check_counts()
            return
        driven, ledger, row = self.driven, ledger_of(self.driven), self.row()
        places = places_of(driven, ledger)
        in_flight = [one[0] for place in places.values() for one in place.in_flight.values()]
        waiting = [message for one in waiting_of(driven, ledger) for message in one.messages]
        dead = list(self.dead().elements())
        holders = Counter([*in_flight, *waiting, *dead])
        for session in self.sessions:
            if session.name in places:
                in_flight_there = places[session.name].in_flight.items()
                in_hand = {number: one[0] for number, one in in_flight_there if number < session.expected[0]}
                assert session.in_hand == in_hand, "a consumer has what is in flight at it"
        ready = self.ready()
        for message in self.log.messages:
            lives = holders[message] + (message in ready)
            assert lives <= self.alive[message], f"{message} has {lives} lives in place of {self.alive[message]}"
            while lives < self.alive[message]:
                self.settled_by_broker(message)
        assert row == {
            "ready": len(ready), "in_flight": len(in_flight), "in_retry": len(waiting), "dead": len(dead),
            "filtered": self.ends["filtered"], "skipped": self.ends["skipped"],
        }, (row, len(ready), len(in_flight), len(waiting), len(dead), self.ends)  # fmt: skip
        settled = self.ends.total() + len(dead)
        assert self.lives == settled + len(ready) + len(in_flight) + len(waiting), "the states add up to all lives"
        assert ledger.totals.held == len(in_flight) + len(waiting) + len(dead), "the totals say what is held"
        if self.mode == "reliable":
            self.counts["passed is compared"] += self.group.is_comparable
            assert wrongly_passed(driven.store, self.group) is None

    def check_counts(self) -> None:
        """Check that the states add up to all lives, where it is not known which messages are in which."""
        for _ in range(10):
            row, ledger = self.row(), ledger_of(self.driven)
            assert row["in_flight"] == sum(member.in_flight.count for member in ledger.members.values())
            assert row["in_retry"] == ledger.retries.count
            assert row["dead"] == self.dead().total()
            assert wrongly_held(self.group) is None
            assert wrongly_passed(self.driven.store, self.group) is None
            if self.lives == self.ends.total() + sum(row.values()):
                return
            # What leaves is counted as skipped, and as ready as well until it is gone.
            self.counts["left meanwhile"] += 1
            self.driven.checkpoint()
            self.wait(300)
        raise AssertionError(f"the states do not add up to {self.lives} lives: {row}, {self.ends}")

    def ready(self) -> set[Message]:
        """Return the messages at and behind the group's cursors."""
        subjects, cursors, found = self.driven.store.subjects, self.group.cursors, set[Message]()
        for message in self.log.messages:
            if self.is_followed(message) and self.stored_us[message] >= self.start_us:
                number = subjects.number(message.subject, message.lane)
                assert number is not None
                if message.sequence >= cursors.get(number):
                    found.add(message)
        return found

    def letters(self) -> list[dict[str, Any]]:
        """Return the rows of all dead letters, of which an answer may have a part only."""
        rows, after = list[dict[str, Any]](), 0
        while after is not None:
            answer = self.ask("dead_letters", after=after)
            rows += answer["rows"]
            after = answer["after"]
        return rows

    def dead(self) -> Counter[Message]:
        """Return the messages of the dead letters."""
        if self.retains:
            return Counter({_SOME: len(self.letters())})
        return Counter(letter_of(row, self.log).message for row in self.letters())

    def end(self, message: Message, how: str) -> None:
        """Note that a life of a message has ended."""
        self.alive[message] -= 1
        self.ends[how] += 1

    def settled_by_broker(self, message: Message) -> None:
        """Note that a message was passed, or taken out of a retry, and that no consumer had it."""
        state = self.state_of(message, self.now_us)
        if state != "filtered":
            assert self.mode == "at_most_once", f"{message} is lost"
            assert state == "expired", f"{message} is lost"
        self.end(message, "filtered" if state == "filtered" else "skipped")
        self.counts[state] += 1

    # --- producers ---------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send a batch of some runs."""
        chance, runs, several = self.chance, list[RunContent](), list[tuple[str, int, int, tuple[str, ...], int]]()
        for _ in range(chance.choice([1, 1, 2, 4])):
            subject, lane = chance.choice(SUBJECTS), chance.choice(self.lanes)
            if any((run.subject, run.lane) == (subject, lane) for run in runs):
                continue
            headers = []
            for _ in range(chance.choice([1, 1, 2, 5, 12])):
                tags = tuple(tag for tag in TAGS if chance.random() < 0.4)
                after_us = chance.choice([0, 0, 0, -1_000_000, 200_000, 1_000_000])
                expire_at = self.now_us + after_us if after_us else 0
                several.append((subject, lane, len(headers), tags, expire_at))
                headers.append(make_header(None, tags, None, 0, expire_at))
            bodies = [b"x" * chance.choice([500, 900] if self.retains else [1, 1, 200]) for _ in headers]
            runs.append(RunContent(subject, bodies, headers, lane))
        sent = self.driven.send_runs(*runs)
        firsts = [sent.first_sequences] if isinstance(sent.first_sequences, int) else sent.first_sequences.tolist()
        begin = {(run.subject, run.lane): first for run, first in zip(runs, firsts, strict=True)}
        messages = []
        for at, (subject, lane, ordinal, tags, expire_at) in enumerate(several):
            message = Message(subject, lane, begin[subject, lane] + ordinal)
            self.tags_of[message], self.expire_at[message] = tags, expire_at
            self.stored_us[message] = sent.stored_at_us
            self.log.named[str(MessageId(self.driven.store.store_id, sent.partition, sent.position + at))] = message
            messages.append(message)
        self.log.add([messages])
        self.begin(filter(self.is_followed, messages))

    def begin(self, messages: Iterable[Message]) -> None:
        """Note that messages begin a life."""
        for message in messages:
            self.alive[message] += 1
            self.lives += 1

    # --- consumers ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Begin a process, if not all are there."""
        there = {session.name for session in self.sessions}
        free = [at for at, name in enumerate(NAMES) if name not in there]
        if free:
            self.processes += 1
            self.hello(NAMES[free[0]], b"%d" % self.processes, self.followed[free[0]])

    def hello(self, name: str, nonce: bytes, prefixes: tuple[str, ...]) -> None:
        self.connections += 1
        settings = (
            ("max_attempts", 3), ("max_session_expiries", 2), ("max_unacked", 8), ("retry_delays_us", (0, 300_000)),
            ("tags", self.tags), ("expire_after_us", self.expire_after_us),
        )  # fmt: skip
        command = Subscribe(
            self.connections, self.driven.request(), "g", prefixes, name, None, nonce, nonce, False, settings, self.mode
        )
        expected = 0
        is_new = "g" not in self.driven.broker.groups
        answer = self.driven.do(command)[-1]
        assert isinstance(answer, Subscribed), answer
        if answer.consumer_state is not None:
            expected = answer.consumer_state.ack_floor
        if is_new:
            self.begin(filter(self.is_followed, self.log.messages))
        self.sessions.append(Session(name, self.connections, answer.subscription, nonce, prefixes, {}, [expected]))

    def some_session(self) -> Session | None:
        return self.chance.choice(self.sessions) if self.sessions else None

    def pull(self, session: Session, most: int, *, withdraws: bool = False) -> bool:
        """Pull without waiting, or withdraw a pull that waits; return whether something came."""
        command = self.driven.pull_command(
            session.subscription, most, connection=session.connection, min_count=self.chance.choice([1, 1, 1, most]),
            max_bytes=self.chance.choice([4 << 20, 4 << 20, 1_000]), expected=session.expected[0],
        )  # fmt: skip
        if self.mode == "at_most_once":
            command = command._replace(timeout_ms=10, expected=None)
        if withdraws:
            command = command._replace(timeout_ms=60_000)
        pulled_us, places = self.now_us, places_of(self.driven, ledger_of(self.driven))
        in_flight = places[session.name].in_flight if session.name in places else {}
        before = {message for one in self.sessions for message in one.in_hand.values()}
        said = self.driven.do(command)
        if withdraws:
            if not any(getattr(one, "request", None) == command.request for one in said):
                self.counts["withdrawn"] += 1
                said += self.driven.do(Withdraw(command.connection, command.request))
        elif self.mode == "at_most_once":
            said += self.driven.advance(11)
        while not (answers := [one for one in said if getattr(one, "request", None) == command.request]):
            said = self.driven.advance(1)  # it goes on in another turn
        (answer,) = answers
        if isinstance(answer, Refused):
            assert isinstance(answer.error, Fenced), answer.error
            self.sessions.remove(session)
            return False
        assert isinstance(answer, PulledMessages), answer
        left_out = answer.messages - sum(one[1] for one in answer.ranges) if self.mode == "reliable" else 0
        runs = runs_of_answer(answer, left_out)
        messages = [Message(run.subject, run.lane, run.first_sequence + at) for run in runs for at in range(run.count)]
        self.counts["handed out"] += len(messages)
        for message in messages if not self.retains else ():
            assert self.state_of(message, pulled_us) == "wanted", f"{message} is {self.state_of(message, pulled_us)}"
            assert message not in before or self.alive[message] > 1, f"{message} is with another consumer"
        if self.mode == "at_most_once":
            assert not self.came.intersection(messages), "a message comes at most once"
            self.came.update(messages)
            for message in messages:
                self.end(message, "acked")
            return bool(messages)
        numbers = [(first + at, attempt) for first, count, attempt in answer.ranges for at in range(count)]
        assert len(numbers) == len(messages)
        for (number, attempt), message in zip(numbers, messages, strict=True):
            session.in_hand[number] = message
            session.expected[0] = number + 1
            if message.slot is not None and attempt < RESENT_BIT and number not in in_flight and not self.retains:
                self.check_order(session, message)
        return bool(messages)

    def check_order(self, session: Session, message: Message) -> None:
        """No earlier message of the slot is with another consumer, or is to come again."""
        for other in self.sessions:
            for one in other.in_hand.values():
                if one.slot == message.slot and other is not session:
                    raise AssertionError(f"{message} comes although {one} is with another consumer")
        waiting = [one for retry in waiting_of(self.driven, ledger_of(self.driven)) for one in retry.messages]
        places = self.log.places
        earlier = [one for one in waiting if one.slot == message.slot and places[one] < places[message]]
        assert not earlier, f"{message} comes although {earlier} are to come again"

    def ack(self, session: Session, numbers: list[int]) -> None:
        pairs = tuple(one for number in numbers for one in (number, number + 1))
        answers = self.driven.do(Ack(session.connection, self.driven.request(), session.subscription, pairs))
        (answer,) = [one for one in answers if not isinstance(one, PulledMessages)]
        if isinstance(answer, Refused):
            self.sessions.remove(session)
            return
        assert isinstance(answer, Acked)
        assert not answer.refused
        for number in numbers:
            self.end(session.in_hand.pop(number), "acked")

    def hand_back(self, session: Session, disposition: Disposition, *, fails: bool = False) -> None:
        if not session.in_hand:
            return
        number = self.chance.choice(sorted(session.in_hand))
        delay_us = self.chance.choice([None, 0, 300_000])
        backs = [DispositionRange(number, number + 1, disposition, delay_us, "broke")]
        if fails:  # as a client does: what its program has not come to is released
            later = [one for one in sorted(session.in_hand) if one > number]
            backs += [DispositionRange(one, one + 1, Disposition.RELEASE, None, "") for one in later]
        answers = self.driven.do(HandBack(session.connection, self.driven.request(), session.subscription, backs))
        (answer,) = [one for one in answers if not isinstance(one, PulledMessages)]
        if isinstance(answer, Refused):
            self.sessions.remove(session)
            return
        assert isinstance(answer, HandedBack)
        self.take_hands()

    def take_hands(self) -> None:
        """Take from the consumers' hands what is not in flight at them any more."""
        places = places_of(self.driven, ledger_of(self.driven))
        for session in self.sessions:
            place = places.get(session.name)
            in_flight = place.in_flight if place is not None else {}
            for number in set(session.in_hand) - in_flight.keys():
                del session.in_hand[number]

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self) -> None:
        """Make some call, then check the law."""
        name, session = self.chance.choice(CALLS), self.some_session()
        self.calls.append(name)
        self.counts[name] += 1
        match name:
            case "send":
                self.send()
            case "join":
                self.join()
            case "wait":
                self.wait(self.chance.choice([1, 300, 900]))
            case "set":
                self.change()
            case "restart" | "kill":
                self.restart(is_clean=name == "restart")
            case "checkpoint":
                self.driven.checkpoint()
            case "retain" if self.retains:
                self.retain()
            case "resend" if self.mode == "reliable":
                self.resend()
            case "limit":
                name = self.chance.choice(sorted(SETTINGS))
                self.calls[-1] = f"limit {name}"
                self.ask("set_group", settings={name: self.chance.choice(SETTINGS[name])})
            case "seek":
                self.seek()
            case "redrive" | "delete":
                self.some_dead(name)
            case "withdraw" if session is not None:
                self.pull(session, self.chance.choice([1, 3, 1_000]), withdraws=True)
            case "lose" if session is not None:
                self.driven.do(
                    Disconnected(session.connection, by_client=self.chance.random() < 0.5, has_read_all=True)
                )
                self.sessions.remove(session)
            case "pull" if session is not None:
                self.pull(session, self.chance.choice([1, 1, 2, 5, 1_000]))
            case "leave" if session is not None:
                self.driven.do(Unsubscribe(session.connection, self.driven.request(), session.subscription))
                self.sessions.remove(session)
            case "die" if session is not None:
                self.sessions.remove(session)
                self.wait(SESSION_TIMEOUT_MS)
            case "ack" if session is not None and session.in_hand:
                self.ack(session, sorted(session.in_hand)[: self.chance.choice([1, 3, 1_000])])
            case "nack" | "release" | "reject" | "fail" if session is not None and self.mode == "reliable":
                disposition = Disposition.NACK if name == "fail" else Disposition[name.upper()]
                self.hand_back(session, disposition, fails=name == "fail")
        self.check()

    def wait(self, milliseconds: int) -> None:
        """Let time pass; those who are there send heartbeats."""
        for _ in range(0, milliseconds, 300):
            for session in self.sessions:
                self.driven.do(Heartbeat(999, self.driven.request(), session.nonce, 0))
            self.driven.advance(min(milliseconds, 300))
        if self.mode == "reliable":
            self.take_hands()

    def retain(self) -> None:
        """Let retention remove what is old."""
        for _ in range(3):
            self.driven.checkpoint()
            self.wait(900)
            for _ in range(10):
                self.driven.advance(1)
            self.counts["segments removed"] += len(self.driven.broker.take_dropped())

    def change(self) -> None:
        """Change what the group selects."""
        tags: tuple[str, ...] = self.chance.choice([(), ("red",), ("green",), ("red", "blue")])
        expire_after_us = self.chance.choice([0, 0, 800_000])
        self.ask("set_group", settings={"tags": list(tags), "expire_after_us": expire_after_us})
        self.tags, self.expire_after_us = tags, expire_after_us

    def resend(self) -> None:
        """Hand out again what the group is through with."""
        prefix = self.chance.choice(("", "a.", "b"))
        if not any(one.subject.startswith(prefix) and self.is_followed(one) for one in self.log.messages):
            return
        lives, before = self.lives, self.dead()
        try:
            answer = resend(self.driven, prefix=prefix, group="g")
        except InvalidOption:  # all of it is gone
            assert self.retains
            return
        self.counts["resent"] += answer["resent"]
        if self.retains:
            self.lives += answer["resent"] - answer["redriven"]
            self.ends["redriven with another"] += before.total() - self.dead().total() - answer["redriven"]
            return
        waiting = Counter(one for retry in waiting_of(self.driven, ledger_of(self.driven)) for one in retry.messages)
        self.begin(one for one in waiting if not self.alive[one])
        assert self.lives == lives + answer["resent"] - answer["redriven"]
        for message, count in (before - self.dead()).items():  # several dead letters of a message become one retry
            for _ in range(count - 1):
                self.end(message, "redriven with another")

    def seek(self) -> None:
        """Set the group's cursors to the beginning, to the end, or to a time."""
        if self.retains:
            self.seek_counted()
            return
        places, waiting = (
            places_of(self.driven, ledger_of(self.driven)),
            waiting_of(self.driven, ledger_of(self.driven)),
        )
        to = self.chance.choice(["first", "new", "time"])
        clears, before = self.chance.random() < 0.5, self.ready()
        self.start_us = 0 if to == "first" else 1 + max(self.stored_us.values(), default=0)
        if to == "time" and self.stored_us:
            self.start_us = self.chance.choice(sorted(self.stored_us.values()))
        self.ask("seek_group", to={"time": ("time", self.start_us)}.get(to, to), clear_retries=clears)
        after = self.ready()
        assert after == {
            one for one in self.log.messages if self.is_followed(one) and self.stored_us[one] >= self.start_us
        }, "all that was stored since is ready"
        self.begin(after - before)
        for message in before - after:
            self.end(message, "sought past")
        for place in places.values():
            for message, *_ in place.in_flight.values():
                self.end(message, "dropped")
        for message in [message for one in waiting if clears for message in one.messages]:
            self.end(message, "dropped")
        self.came.clear()
        for session in self.sessions:
            session.in_hand.clear()

    def seek_counted(self) -> None:
        """Set the group's cursors to the beginning or to the end, where it is not known which messages are ready."""
        while self.driven.store.leaving is not None:  # it is counted as ready, and the group does not get it
            self.driven.checkpoint()
            self.driven.advance(1)
        to, clears, before = self.chance.choice(["first", "new"]), self.chance.random() < 0.5, self.row()
        self.ask("seek_group", to=to, clear_retries=clears)
        ready = self.row()["ready"] - before["ready"]
        if to == "first":
            self.lives += ready
        else:
            self.ends["sought past"] -= ready
        self.ends["dropped"] += before["in_flight"] + (before["in_retry"] if clears else 0)
        for session in self.sessions:
            session.in_hand.clear()

    def some_dead(self, name: str) -> None:
        """Redrive or delete some dead letters."""
        rows = self.letters()[:: self.chance.choice([1, 2])]
        if rows:
            numbers = [row["number"] for row in rows]
            answer = self.ask("redrive" if name == "redrive" else "delete_dead", numbers=numbers)
            assert answer == {"messages": len(rows)}
        for row in rows if name == "delete" else ():
            self.end(_SOME if self.retains else letter_of(row, self.log).message, "deleted")

    def restart(self, *, is_clean: bool) -> None:
        """Start the broker again; nothing changes by that, and the consumers come back."""
        driven, before = self.driven, self.row()
        if is_clean:
            driven.broker.stop()
            driven.restart()
        else:
            assert isinstance(driven.disk, SimulatedDisk)
            driven.disk.stop(power=False)
            driven.wanted.clear()
            driven.reads.clear()
            driven.open()
        after = self.row()
        if self.mode == "at_most_once" and not is_clean:
            self.pass_block(before, after)
        else:
            unknown = {"ready", "skipped"} if self.retains else set[str]()
            assert all(before[name] == after[name] for name in before.keys() - unknown), "a start changes nothing"
        sessions, self.sessions = self.sessions, []
        for session in sessions:
            self.hello(session.name, session.nonce, session.prefixes)
            self.sessions[-1].in_hand.update(session.in_hand)
            self.sessions[-1].expected[0] = session.expected[0]

    def pass_block(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """A crash skips what an at-most-once group may have got, and counts all of it: the rest of its blocks."""
        ready = self.ready()
        for message in self.log.messages:
            if message not in ready:
                self.alive[message] = 0
        assert before["filtered"] == after["filtered"]
        self.lives += after["skipped"] - self.ends["skipped"] - (before["ready"] - after["ready"])
        self.ends["skipped"] = after["skipped"]

    def run(self, calls: int) -> None:
        """Make so many calls; then let consumers take all that is left."""
        for _ in range(calls):
            self.call()
        for _ in range(200):
            while len(self.sessions) < len(NAMES):
                self.join()
            for session in list(self.sessions):
                while self.pull(session, 1_000):
                    if session.in_hand:
                        self.ack(session, sorted(session.in_hand))
                if session in self.sessions and session.in_hand:
                    self.ack(session, sorted(session.in_hand))
            self.check()
            row = self.row()
            if not row["ready"] and not row["in_flight"] and not row["in_retry"]:
                break
            self.wait(600)
            if self.retains:
                self.driven.checkpoint()
        assert (row["ready"], row["in_flight"], row["in_retry"]) == (0, 0, 0), f"something is left for ever: {row}"
        self.driven.checkpoint()
        self.driven.store.close(clean=True)
        assert isinstance(self.driven.disk, SimulatedDisk)
        check_files(self.driven.disk)


def run(seed: int, calls: int = 60) -> Counter[str]:
    """One history, and what happened in it."""
    law = Law(seed)
    try:
        law.run(calls)
    except Exception as error:
        error.add_note(f"again: python -m tests.sim law {seed}: {law.mode}, {law.mix}, {law.followed}, {law.calls}")
        raise
    finally:
        law.patch.undo()
    law.counts[f"{law.mode} group"] += 1
    law.counts["with retention"] += law.retains
    law.counts[f"with {law.mix}"] += 1
    return law.counts
