"""Order by key: messages of one slot are handed out in stored order, the next one when all before are settled."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qmq.broker.delivery.order.blocked import blocked_by
from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group_state import Ledger
from qmq.broker.ports.commands import Ack, Administer, DispositionRange, HandBack, Heartbeat, Subscribe, Unsubscribe
from qmq.broker.ports.effects import Acked, Administered, HandedBack, PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.build import RunContent, make_header
from qmq.format.lanes import ORDERED_KINDS
from qmq.format.layout import LANE_HIGH, LANE_NORMAL, LANE_ORDERED
from qmq.net.protocol.types import Disposition
from tests.broker.find.test_resend import resend
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.retention.test_retention import HOUR_MS, settle

SESSION_MS = 1_000


class Session(NamedTuple):
    """A consumer on a connection of its own."""

    connection: int
    subscription: int
    name: str


class Slots(Driven):
    """A broker with messages in slots, whose bodies are "KEY NUMBER"."""

    def __init__(self, directory: Path, retention_max_ms: int = 0, **options: int) -> None:
        limits = BrokerLimits(
            session_timeout_ms=SESSION_MS if not retention_max_ms else 100 * HOUR_MS, retention_max_ms=retention_max_ms
        )
        super().__init__(directory, limits, **options)
        self.connections = 0
        self.numbers: dict[str, int] = defaultdict(int)

    def put(self, *keys: str, subject: str = "a.b", kind: int = LANE_ORDERED) -> list[str]:
        """Send one message of each key, each in a batch of its own; return the bodies. *kind*: one of ORDERED_KINDS."""
        sent = []
        for key in keys:
            sent.append(f"{key} {self.numbers[key]}")
            self.numbers[key] += 1
            slot = kind | sum(key.encode()) % 4_096
            self.do(self.send_command({subject: [sent[-1].encode()]}, lane=slot))
        return sent

    def join(self, name: str, *prefixes: str, start: str | None = None, **settings: object) -> Session:
        self.connections += 1
        nonce = name.encode().ljust(8, b"-") + b"%8d" % self.connections
        command = Subscribe(
            self.connections, self.request(), "g", prefixes or ("a.",), name, start, nonce, nonce,
            settings=tuple({"retry_delays_us": (0,), **settings}.items()),
        )  # fmt: skip
        answers = self.do(command) or self.sync_records()
        (answer,) = [one for one in answers if isinstance(one, Subscribed)]
        return Session(self.connections, answer.subscription, name)

    def take(self, who: Session, most: int = 1_000_000, expected: int | None = None) -> PulledMessages:
        command = self.pull_command(who.subscription, max_count=most, connection=who.connection, expected=expected)
        (answer,) = [one for one in self.do(command) if getattr(one, "request", None) == command.request]
        assert isinstance(answer, PulledMessages), answer
        return answer

    def ack(self, who: Session, *numbers: int) -> int:
        """Ack delivery sequences; return how many were refused."""
        pairs = tuple(one for number in numbers for one in (number, number + 1))
        request = self.request()
        (answer,) = [
            one
            for one in self.do(Ack(who.connection, request, who.subscription, pairs))
            if getattr(one, "request", None) == request
        ]
        assert isinstance(answer, Acked), answer
        return answer.refused

    def back(
        self, who: Session, number: int, disposition: Disposition = Disposition.NACK, delay_us: int | None = None
    ) -> None:
        backs = (DispositionRange(number, number + 1, disposition, delay_us, "it broke"),)
        request = self.request()
        (answer,) = [
            one
            for one in self.do(HandBack(who.connection, request, who.subscription, backs))
            if getattr(one, "request", None) == request
        ]
        assert isinstance(answer, HandedBack), answer
        assert not answer.refused

    def alive(self, *sessions: Session) -> None:
        for who in sessions:
            self.do(
                Heartbeat(who.connection, self.request(), who.name.encode().ljust(8, b"-") + b"%8d" % who.connection, 0)
            )


def texts(answer: PulledMessages) -> list[str]:
    return [body.decode() for body in bodies_of(runs_of_answer(answer))]


def numbers_of(answer: PulledMessages) -> list[int]:
    return [first + at for first, count, _ in answer.ranges for at in range(count)]


def attempts_of(answer: PulledMessages) -> list[int]:
    return [attempt for _, count, attempt in answer.ranges for _ in range(count)]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("prefix", ["a.", "a.b", ""])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_one_consumer_gets_all_of_a_key_in_order(tmp_path: Path, prefix: str, most: int, partitions: int) -> None:
    driven = Slots(tmp_path, partitions=partitions)
    one = driven.join("one", prefix)
    sent = [body for _ in range(5) for body in driven.put("k", "l", "m")]
    found = list[str]()
    while some := texts(answer := driven.take(one, most)):
        found += some
        driven.ack(one, *numbers_of(answer))
    assert found == sent
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "a.b"])
def test_a_slot_belongs_to_the_consumer_that_has_its_messages(tmp_path: Path, prefix: str) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one", prefix), driven.join("two", prefix)
    driven.put("k", "k", "k")
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    assert texts(driven.take(two)) == []
    driven.put("l")
    assert texts(driven.take(two)) == ["l 0"]
    assert texts(driven.take(one, 1)) == ["k 1"]
    driven.ack(one, *numbers_of(first))
    assert texts(driven.take(two)) == []
    driven.ack(one, 1)
    assert texts(driven.take(two)) == ["k 2"]
    driven.close()


def test_keys_are_shared_among_consumers(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    consumers = [driven.join(f"c{number}") for number in range(4)]
    driven.put(*(f"key{chr(97 + number)}" for number in range(8)))
    found = [texts(driven.take(who)) for who in consumers]
    assert [len(one) for one in found] == [2, 2, 2, 2]
    driven.close()


def test_a_waiting_pull_gets_the_slot_that_is_freed(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    driven.take(one)
    driven.put("k")
    waiting = driven.pull_command(two.subscription, timeout_ms=5_000, connection=two.connection)
    assert driven.do(waiting) == []
    said = driven.do(Ack(one.connection, driven.request(), one.subscription, (0, 1)))
    (answer,) = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert (answer.request, texts(answer)) == (waiting.request, ["k 1"])
    driven.close()


def test_a_waiting_pull_that_may_not_have_a_message_leaves_it_to_the_next(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    driven.take(one)
    for who in (two, one):
        assert driven.do(driven.pull_command(who.subscription, timeout_ms=5_000, connection=who.connection)) == []
    said = driven.do(driven.send_command({"a.b": [b"k 1"]}, lane=LANE_ORDERED | ord("k")))
    (answer,) = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert (answer.connection, texts(answer)) == (one.connection, ["k 1"])
    driven.close()


def test_a_nack_brings_back_what_follows_it_and_counts_no_attempt_of_that(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k")
    assert texts(driven.take(one, 3)) == ["k 0", "k 1", "k 2"]
    driven.put("k")
    driven.back(one, 0)
    assert driven.ack(one, 1) == 1  # it is in hand no more
    answer = driven.take(two, 1)
    assert (texts(answer), attempts_of(answer)) == (["k 0"], [2])
    assert texts(driven.take(one)) == []
    again = driven.take(two)
    assert (texts(again), attempts_of(again)) == (["k 1", "k 2"], [1, 1])
    driven.ack(two, *numbers_of(answer), *numbers_of(again))
    assert texts(driven.take(one)) == ["k 3"]
    driven.close()


def test_a_nack_with_a_delay_holds_its_slot_only(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one")
    driven.put("k", "l", "k", "l")
    assert texts(driven.take(one, 2)) == ["k 0", "l 0"]
    driven.back(one, 0, delay_us=500_000)
    assert texts(driven.take(one)) == ["l 1"]
    assert texts(driven.take(one)) == []
    driven.alive(one)
    driven.advance(600)
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


@pytest.mark.parametrize("released_too", [False, True])
def test_messages_taken_back_say_why_they_wait(tmp_path: Path, released_too: bool) -> None:
    """A client releases them as well, maybe in the same call."""
    driven = Slots(tmp_path)
    one = driven.join("one")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    backs = [DispositionRange(0, 1, Disposition.NACK, 500_000, "it broke")]
    backs += [DispositionRange(1, 2, Disposition.RELEASE, None, "")] if released_too else []
    driven.do(HandBack(one.connection, driven.request(), one.subscription, backs))
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    assert [(row.reason, row.due_us - driven.now.wall_us) for row in waiting_retries(ledger)] == [
        ("it broke", 500_000), ("an earlier message of its slot of order keys comes again first", 500_000),
    ]  # fmt: skip
    driven.close()


def waiting_retries(ledger: Ledger) -> list[RetryItem]:
    """Return the retries of a group that are not due."""
    return [retry for items in ledger.retries.scheduled() for retry in unpacked(items)]


@pytest.mark.parametrize("disposition", [Disposition.REJECT, Disposition.NACK])
def test_a_dead_message_lets_the_next_one_go_on(tmp_path: Path, disposition: Disposition) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one", max_attempts=1), driven.join("two")
    driven.put("k", "k")
    driven.take(one, 1)
    assert texts(driven.take(two)) == []
    driven.back(one, 0, disposition)
    assert texts(driven.take(two)) == ["k 1"]
    driven.close()


@pytest.mark.parametrize("pulled_later", [False, True])
def test_what_lies_behind_a_message_that_dies_of_its_last_attempt_comes_again(
    tmp_path: Path, pulled_later: bool
) -> None:
    """Its client, which cannot know how many attempts the group allows, gives none of it to the program."""
    driven = Slots(tmp_path)
    one, two = driven.join("one", max_attempts=1), driven.join("two")
    driven.put("k", "k", "l")
    pulls = [driven.take(one, 1), driven.take(one, 1)] if pulled_later else [driven.take(one)]
    assert [body for pull in pulls for body in texts(pull)] == ["k 0", "k 1"]
    assert texts(driven.take(one)) == ["l 0"]
    driven.put("k")
    driven.back(one, 0)
    again = driven.take(two)
    assert (texts(again), attempts_of(again)) == (["k 1"], [1])
    assert texts(driven.take(one)) == []
    assert driven.ack(one, 2) == 0
    driven.ack(two, 0)
    assert texts(driven.take(two)) == ["k 2"]
    driven.close()


def test_what_lies_behind_a_dead_message_waits_with_the_next_one_that_comes_again(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one", max_attempts=2)
    driven.put("k", "k", "k")
    driven.back(one, *numbers_of(driven.take(one, 1)))
    again, others = driven.take(one), driven.take(one)
    assert attempts_of(again) + attempts_of(others) == [2, 1, 1]
    dead, failed, _ = numbers_of(again) + numbers_of(others)
    backs = [DispositionRange(one, one + 1, Disposition.NACK, 500_000, "it broke") for one in (failed, dead)]
    driven.do(HandBack(one.connection, driven.request(), one.subscription, backs))
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    assert [row.due_us - driven.now.wall_us for row in waiting_retries(ledger)] == [500_000, 500_000]
    driven.close()


@pytest.mark.parametrize("disposition", [Disposition.REJECT, Disposition.FILTER])
def test_what_lies_behind_a_message_that_nobody_wants_stays_in_flight(tmp_path: Path, disposition: Disposition) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    if disposition == Disposition.REJECT:
        driven.back(one, 0, disposition)
    else:  # only the broker gives this one
        ledger = driven.broker.groups["g"].ledger
        assert ledger is not None
        ledger.hand_back(ledger.by_name["one"], [DispositionRange(0, 1, disposition, None, "")], driven.now.wall_us)
    assert driven.ack(one, 1) == 0
    driven.close()


def test_of_messages_that_fail_always_the_next_one_comes_when_each_is_dead(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one", max_attempts=3)
    driven.put("k", "l", "k", "l")
    found = list[str]()
    for _ in range(30):
        answer = driven.take(one, 1)
        for body, number in zip(texts(answer), numbers_of(answer), strict=True):
            found.append(body)
            driven.back(one, number, Disposition.NACK, 0) if body[0] == "k" else driven.ack(one, number)
    assert [body for body in found if body[0] == "k"] == ["k 0"] * 3 + ["k 1"] * 3
    assert [body for body in found if body[0] == "l"] == ["l 0", "l 1"]
    driven.close()


def test_what_is_acked_out_of_order_does_not_come_again(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2"]
    driven.ack(one, 2)
    for _ in range(3):
        driven.advance(SESSION_MS // 2)
        driven.alive(two)
    driven.put("k")
    found = list[str]()
    while some := texts(answer := driven.take(two)):
        found += some
        driven.ack(two, *numbers_of(answer))
    assert found == ["k 0", "k 1", "k 3"]
    assert isinstance(driven.do(Ack(one.connection, driven.request(), one.subscription, (0, 1)))[0], Refused)
    driven.close()


def test_a_consumer_that_leaves_gives_its_slots_back(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    driven.take(one, 1)
    driven.do(Unsubscribe(one.connection, driven.request(), one.subscription))
    assert texts(driven.take(two, 1)) == ["k 0"]
    assert texts(driven.take(two)) == ["k 1"]
    driven.close()


def test_a_lost_answer_is_repeated_and_blocks_nothing(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    answer = driven.take(one, expected=0)
    assert texts(answer) == ["k 0", "k 1"]
    again = driven.take(one, expected=0)
    assert (texts(again), attempts_of(again)) == (["k 0", "k 1"], [1, 1])
    driven.ack(one, *numbers_of(again))
    driven.put("k")
    assert texts(driven.take(two)) == ["k 2"]
    driven.close()


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_restart_owners_and_retries_are_as_before(tmp_path: Path, clean: bool) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "l", "k", "l", "m")
    answer = driven.take(one, 2)
    assert texts(answer) == ["k 0", "l 0"]
    assert texts(driven.take(two)) == ["m 0"]
    driven.back(one, 1, delay_us=500_000)
    if clean:
        driven.restart()
    else:
        driven.store.close(clean=False)
        driven.open()
    two = driven.join("two")
    driven.put("n")
    assert texts(driven.take(two)) == ["n 0"]
    driven.advance(600)
    driven.alive(two)
    assert texts(driven.take(two)) == ["l 0"]
    assert texts(driven.take(two)) == ["l 1"]
    driven.close()


def test_a_taken_over_consumer_goes_on_with_its_slots(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    driven.take(one, 1)
    one = driven.join("one")
    assert texts(driven.take(two)) == []
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


def test_a_seek_frees_all_slots(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    driven.take(one)
    fields = {"group": "g", "to": "first", "clear_retries": True}
    assert isinstance(driven.do(Administer(1, driven.request(), "seek_group", fields))[-1], Administered)
    two = driven.join("two")
    assert texts(driven.take(two)) == ["k 0", "k 1"]
    driven.close()


def test_a_redriven_letter_comes_before_what_follows_it(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one")
    driven.put("k", "k", "k")
    driven.take(one, 1)
    driven.back(one, 0, Disposition.REJECT)
    (said,) = driven.do(Administer(1, driven.request(), "dead_letters", {"group": "g"}))
    ids = [row["id"] for row in said.fields["rows"]]
    assert isinstance(
        driven.do(Administer(1, driven.request(), "redrive", {"group": "g", "ids": ids}))[-1], Administered
    )
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert texts(driven.take(one)) == ["k 1", "k 2"]
    driven.close()


def test_a_stuck_slot_leaves_the_others_and_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 20)
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    stuck = driven.take(one, 1)
    assert texts(stuck) == ["k 0"]
    for _ in range(50):
        driven.put("k", "l")
    found = list[str]()
    while some := texts(answer := driven.take(two, 7)):
        found += some
        driven.ack(two, *numbers_of(answer))
    assert found == [f"l {number}" for number in range(50)]
    driven.ack(one, *numbers_of(stuck))
    driven.put("k", "l")
    found = []
    while some := texts(answer := driven.take(two, 7)):
        found += some
        driven.ack(two, *numbers_of(answer))
    assert [body for body in found if body[0] == "k"] == [f"k {number}" for number in range(1, 52)]
    assert "l 50" in found
    driven.close()


def test_a_message_that_stays_in_flight_makes_acks_of_others_no_dearer(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one")
    driven.put("k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    for number in range(300):
        driven.put("l")
        answer = driven.take(one)
        assert texts(answer) == [f"l {number}"]
        driven.ack(one, *numbers_of(answer))
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    assert ledger.order is not None
    assert ledger.order.pulls_of(ledger.by_name["one"].number) == 1
    assert len(ledger.by_name["one"].in_flight.pulls) == 1
    driven.close()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("behind", [4, 200])
def test_forgotten_rows_of_a_freed_slot_come_in_stored_order(
    tmp_path: Path, behind: int, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows not far back are read again; those of a slot that was stuck for long are found by its subject."""
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 6)
    monkeypatch.setattr("qmq.broker.delivery.order.scan.AGAIN_ROWS", 80)
    driven = Slots(tmp_path, partitions=partitions)
    one = driven.join("one")
    driven.put("k", "m")
    first = driven.take(one, 2)
    assert texts(first) == ["k 0", "m 0"]
    two = driven.join("two")
    sent = [body for _ in range(20) for body in driven.put("k", "l", "m")]
    sent += driven.put(*["l"] * behind)
    mine = driven.take(two)
    assert texts(mine) == [body for body in sent if body[0] == "l"]
    sent += driven.put("k", "m")
    assert texts(driven.take(two)) == []
    driven.ack(one, *numbers_of(first))
    driven.do(Unsubscribe(one.connection, driven.request(), one.subscription))
    driven.ack(two, *numbers_of(mine))
    found = list[str]()
    while some := texts(answer := driven.take(two, 5)):
        found += some
        driven.ack(two, *numbers_of(answer))
    assert sorted(found) == sorted(body for body in sent if body[0] in "km")
    for key in "km":
        assert [body for body in found if body[0] == key] == [body for body in sent if body[0] == key]
    if behind < 80:
        assert found == [body for body in sent if body[0] in "km"], "they come as they were stored"
    driven.close()


class SpreadSlots(Slots):
    """Slots with messages in two partitions: each message lies where the first message of its batch has put it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, partitions=2)
        self.leads = {
            self.send_runs(RunContent(f"z.{number}", [b"z"], None)).partition: f"z.{number}" for number in range(9)
        }

    def put_in(self, partition: int, *keys: str) -> None:
        for key in keys:
            body = f"{key} {self.numbers[key]}"
            self.numbers[key] += 1
            lead = RunContent(self.leads[partition], [b"z"], None)
            sent = self.send_runs(lead, RunContent("a.b", [body.encode()], None, LANE_ORDERED | ord(key)))
            assert sent.partition == partition


def test_rows_that_are_read_again_come_behind_older_ones_of_other_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 4)
    driven = SpreadSlots(tmp_path)
    one = driven.join("one")
    driven.put_in(1, "l")
    first = driven.take(one)
    assert texts(first) == ["l 0"]
    two, three = driven.join("two"), driven.join("three")
    driven.put_in(1, "l", "m", "k")
    driven.put_in(0, "k")
    driven.put_in(1, "l", "l", "l", "l")
    mine = driven.take(two)
    assert texts(mine) == ["m 0"], "k is left to three; the rows of l are forgotten, those of k are not"
    driven.ack(one, *numbers_of(first))
    driven.ack(two, *numbers_of(mine))
    for gone in (one, three):
        driven.do(Unsubscribe(gone.connection, driven.request(), gone.subscription))
    assert texts(driven.take(two)) == ["l 1", "k 0", "k 1", *(f"l {number}" for number in range(2, 6))]
    driven.close()


def test_rows_of_a_forgotten_slot_that_come_in_another_partition_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 4)
    driven = SpreadSlots(tmp_path)
    one = driven.join("one")
    driven.put_in(1, "l")
    first = driven.take(one)
    two = driven.join("two")
    driven.put_in(1, *"lllll")
    assert texts(driven.take(two)) == []
    driven.put_in(0, "l")
    assert texts(driven.take(two)) == []
    driven.ack(one, *numbers_of(first))
    driven.do(Unsubscribe(one.connection, driven.request(), one.subscription))
    assert texts(driven.take(two)) == [f"l {number}" for number in range(1, 7)]
    driven.close()


def test_forgotten_rows_that_retention_drops_hold_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 6)
    driven = Slots(tmp_path, retention_max_ms=HOUR_MS, segment_bytes=8 << 10, max_frame_bytes=4 << 10)
    one = driven.join("one", max_attempts=3)
    driven.put("k")
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    two = driven.join("two")
    driven.put(*["k", "l"] * 30)
    mine = driven.take(two)
    assert texts(mine) == [f"l {number}" for number in range(30)]
    driven.ack(two, *numbers_of(mine))
    driven.advance(2 * HOUR_MS)
    driven.put(*["k", "l"] * 60)
    assert settle(driven), "no segment was dropped"
    driven.ack(one, *numbers_of(first))
    found = list[str]()
    while some := texts(answer := driven.take(two, 5)):
        found += some
        driven.ack(two, *numbers_of(answer))
    assert set(found) >= {f"{key} {number}" for key in "kl" for number in range(31, 90)}
    assert "k 1" not in found, "it is gone"
    driven.close()


def test_groups_and_consumers_say_what_holds_a_slot_up(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "l", "l", "l")
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.back(one, 0, delay_us=5_000_000)
    assert texts(driven.take(two, 1)) == ["l 0"]

    def rows(action: str) -> list[dict[str, Any]]:
        (said,) = driven.do(Administer(1, driven.request(), action, {"group": "g"}))
        assert isinstance(said, Administered)
        return said.fields["rows"]

    by_reason = {row["reason"]: row for row in rows("groups")[0]["blocked"]}
    assert [(reason, row["slot"], row["waiting"], row["consumer"]) for reason, row in sorted(by_reason.items())] == [
        ("in_flight", ord("l"), 2, "two"), ("retrying", ord("k"), 1, None),
    ]  # fmt: skip
    assert {row["consumer"]: row["order_slots"] for row in rows("consumers")} == {"one": 0, "two": 1}
    group, numbers = driven.broker.groups["g"], driven.store.subjects.lanes_of("a.b")
    assert "to be delivered again first" in blocked_by(driven.store, group, numbers[LANE_ORDERED | ord("k")])
    assert "consumer two has an earlier" in blocked_by(driven.store, group, numbers[LANE_ORDERED | ord("l")])
    driven.ack(two, 0)
    assert blocked_by(driven.store, group, numbers[LANE_ORDERED | ord("l")]) == ""
    driven.close()


def test_order_keys_and_priorities_live_beside_each_other(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one", priority_share=0)
    driven.put("k")
    driven.do(driven.send_command({"a.b": [b"high 0"]}, lane=LANE_HIGH))
    driven.do(driven.send_command({"a.b": [b"normal 0"]}))
    assert texts(driven.take(one))[0] == "high 0"
    driven.close()


def test_messages_of_other_tags_hold_nothing_up(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one", tags=("eu",)), driven.join("two")
    for number, tag in enumerate(("eu", "us", "eu", "us")):
        driven.send_runs(
            RunContent("a.b", [b"k %d" % number], [make_header(tags=[tag])], LANE_ORDERED | ord("k")),
        )
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    assert texts(driven.take(two)) == []
    driven.ack(one, *numbers_of(first))
    assert texts(driven.take(two)) == ["k 2"]
    assert texts(driven.take(one)) == []
    driven.close()


def test_expired_messages_hold_nothing_up(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    for number, expire_us in enumerate((0, 100_000, 0)):
        header = make_header(expire_at=expire_us)
        driven.send_runs(RunContent("a.b", [b"k %d" % number], [header], LANE_ORDERED | ord("k")))
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    driven.alive(one, two)
    driven.advance(200)
    assert texts(driven.take(two)) == []
    driven.ack(one, *numbers_of(first))
    assert texts(driven.take(two)) == ["k 2"]
    (said,) = driven.do(Administer(1, driven.request(), "dead_letters", {"group": "g"}))
    assert [row["reason"] for row in said.fields["rows"]] == ["expired"]
    driven.close()


def test_a_retry_that_expires_lets_the_next_one_go_on(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    header = make_header(expire_at=100_000)
    driven.send_runs(RunContent("a.b", [b"k 0"], [header], LANE_ORDERED | ord("k")))
    driven.numbers["k"] = 1
    driven.put("k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.back(one, 0, delay_us=200_000)
    assert texts(driven.take(two)) == []
    driven.alive(one, two)
    driven.advance(300)
    assert texts(driven.take(two)) == ["k 1"]
    driven.close()


def test_resent_messages_come_in_order_and_before_what_follows(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k")
    driven.ack(one, *numbers_of(driven.take(one)))
    driven.put("k")
    resend(driven, prefix="a.", group="g")
    driven.alive(one, two)
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    assert texts(driven.take(two)) == []
    driven.ack(one, *numbers_of(first))
    found = list[str]()
    while some := texts(answer := driven.take(two)):
        found += some
        driven.ack(two, *numbers_of(answer))
    assert found == ["k 1", "k 2", "k 3"]
    driven.close()


@pytest.mark.parametrize("kind", [LANE_ORDERED, LANE_NORMAL])
def test_a_wider_prefix_takes_what_lies_before_a_sequence_that_a_narrower_one_was_set_to(
    tmp_path: Path, kind: int
) -> None:
    driven = Slots(tmp_path)
    driven.join("narrow")
    for number in range(3):
        driven.do(driven.send_command({"a.b": [b"k %d" % number]}, lane=kind | (7 if kind == LANE_ORDERED else 0)))
    driven.do(Administer(9, driven.request(), "seek_group", {"group": "g", "to": ("sequence", 3)}))
    assert texts(driven.take(driven.join("narrow"))) == []
    wide = driven.join("wide", "", start="first")
    (said,) = driven.do(Administer(9, driven.request(), "groups", {"group": "g"}))
    ready = said.fields["rows"][0]["ready"]
    assert (texts(driven.take(wide)), ready) == (["k 0", "k 1", "k 2"], 3)
    driven.close()


SUBJECTS = ("a.b", "a.c", "c.d")
_ALL = ("a.", "c.d")
#: What the consumers of a group follow.
FOLLOWED: tuple[dict[str, tuple[str, ...]], ...] = (
    {"one": _ALL, "two": _ALL, "three": _ALL},
    {"one": ("",), "two": ("",), "three": ("",)},
    {"one": ("a.b", "a.c", "c.d"), "two": ("a.b", "a.c", "c.d"), "three": ("a.b", "a.c", "c.d")},
    {"one": ("a.b",), "two": ("a.c", "c."), "three": ("a.b", "c.")},
    {"one": ("a.",), "two": ("c.",), "three": ("a.", "c.")},
)


class Model:
    """The messages that consumers have, and those that are settled."""

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.in_hand: dict[str, dict[int, str]] = defaultdict(dict)
        self.settled: dict[str, set[int]] = defaultdict(set)

    def owners(self, key: str) -> set[str]:
        return {name for name, mine in self.in_hand.items() if any(body.split()[0] == key for body in mine.values())}

    def given(self, name: str, answer: PulledMessages) -> None:
        for body, number in zip(texts(answer), numbers_of(answer), strict=True):
            key, place = body.split()
            assert self.owners(key) <= {name}, f"{body} of {name} is in other hands too"
            mine = {int(one.split()[1]) for one in self.in_hand[name].values() if one.split()[0] == key}
            assert int(place) not in self.settled[key], f"{body} was settled"
            before = set(range(int(place))) - self.settled[key] - mine
            assert not before, f"{body} came before {before}"
            self.in_hand[name][number] = body

    def settle(self, name: str, number: int) -> None:
        key, place = self.in_hand[name].pop(number).split()
        self.settled[key].add(int(place))

    def back(self, name: str, number: int) -> None:
        """The rest of its slot goes back, too. (Each key of the test has a slot of its own.)"""
        key, place = self.in_hand[name].pop(number).split()
        for one, body in list(self.in_hand[name].items()):
            if body.split()[0] == key and int(body.split()[1]) > int(place):
                del self.in_hand[name][one]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("partitions", [1, 3])
def test_random_histories_keep_one_owner_a_key_and_its_order(
    tmp_path: Path, seed: int, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 6)
    monkeypatch.setattr("qmq.broker.delivery.order.scan.AGAIN_ROWS", 10 if seed % 2 else 100_000)
    chance, driven, model = random.Random(seed), Slots(tmp_path, partitions=partitions), Model()
    settings = {"max_attempts": 4, "max_unacked": 12, "max_session_expiries": 100}
    prefixes = chance.choice(FOLLOWED)

    def join(name: str) -> Session:
        return driven.join(name, *prefixes[name], **settings)

    sessions = {name: join(name) for name in prefixes}
    keys = ["k", "l", "m", "n", "o"]
    for _ in range(300):
        luck, name = chance.random(), chance.choice(list(sessions))
        who, mine = sessions[name], model.in_hand[name]
        if luck < 0.3:
            for key in chance.choices(keys, k=chance.choice((1, 1, 3, 8))):
                kind = chance.choice((LANE_ORDERED, *ORDERED_KINDS)) if seed % 2 else LANE_ORDERED
                (body,) = driven.put(key, subject=chance.choice(SUBJECTS), kind=kind)
                model.sent[key].append(int(body.split()[1]))
        elif luck < 0.6:
            model.given(name, driven.take(who, chance.choice((1, 2, 5, 100))))
        elif luck < 0.8 and mine:
            number = chance.choice(list(mine)) if chance.random() < 0.3 else min(mine)
            assert not driven.ack(who, number)
            model.settle(name, number)
        elif luck < 0.87 and mine:
            number = chance.choice(list(mine))
            kind = chance.choice((Disposition.NACK, Disposition.RELEASE, Disposition.REJECT))
            is_dead = kind is Disposition.REJECT
            if kind is Disposition.NACK:
                in_flight = driven.broker.groups["g"].ledger.by_name[name].in_flight
                (found,) = in_flight.between(number, number + 1)
                is_dead = found.attempt >= 4
            driven.back(who, number, kind, chance.choice((0, 0, 300_000)) if kind is Disposition.NACK else None)
            (model.settle if is_dead else model.back)(name, number)
        elif luck < 0.9:
            if chance.random() < 0.5:
                driven.do(Unsubscribe(who.connection, driven.request(), who.subscription))
                model.in_hand[name].clear()
            sessions[name] = join(name)  # a takeover, or a new start
            if not driven.broker.groups["g"].ledger.by_name[name].in_flight.count:
                model.in_hand[name].clear()
        elif luck < 0.93:
            driven.store.close(clean=False)
            driven.open()
            sessions = {name: join(name) for name in sessions}
            for name in sessions:
                if not driven.broker.groups["g"].ledger.by_name[name].in_flight.count:
                    model.in_hand[name].clear()
        elif luck < 0.95:
            silent = chance.choice(list(sessions))
            for _ in range(3):
                driven.alive(*(one for other, one in sessions.items() if other != silent))
                driven.advance(SESSION_MS // 2)
            model.in_hand[silent].clear()
            sessions[silent] = join(silent)
        else:
            driven.alive(*sessions.values())
            driven.advance(200)
        driven.alive(*sessions.values())
    for _ in range(400):
        driven.alive(*sessions.values())
        driven.advance(300)
        for name, who in sessions.items():
            for number in sorted(model.in_hand[name]):
                driven.ack(who, number)
                model.settle(name, number)
            model.given(name, driven.take(who))
        if all(model.settled[key] >= set(numbers) for key, numbers in model.sent.items()):
            break
    for key, numbers in model.sent.items():
        assert model.settled[key] == set(numbers), key
    driven.close()


@pytest.mark.parametrize("seed", range(6))
def test_slots_behind_messages_without_a_tag_of_the_group_keep_their_order(tmp_path: Path, seed: int) -> None:
    chance, driven = random.Random(seed), Slots(tmp_path)
    sessions = [driven.join(name, "", tags=("t",), max_unacked=100) for name in ("one", "two", "three")]
    sent, came = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for number in range(120):
        key, is_wanted = chance.choice("klmnopqr"), chance.random() < 0.3
        sent_body, header = f"{key} {number}".encode(), make_header(tags=["t"] if is_wanted else ["other"])
        driven.send_runs(RunContent(chance.choice(SUBJECTS), [sent_body], [header], LANE_ORDERED | ord(key)))
        if is_wanted:
            sent[key].append(number)
        if chance.random() < 0.2:
            answer = driven.take(who := chance.choice(sessions), chance.choice((1, 2, 3, 5)))
            for body in texts(answer):
                came[body.split()[0]].append(int(body.split()[1]))
            driven.ack(who, *numbers_of(answer))
    for _ in range(200):
        answer = driven.take(who := chance.choice(sessions), chance.choice((1, 2, 3, 5)))
        for body in texts(answer):
            came[body.split()[0]].append(int(body.split()[1]))
        driven.ack(who, *numbers_of(answer))
    assert came == sent
    driven.checkpoint()
    driven.close()
