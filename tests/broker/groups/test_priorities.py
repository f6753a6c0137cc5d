"""Priorities: a group gets what is ready of a higher priority first, and lower ones their share."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.groups.lag import ready
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.priorities import HIGH, LOW, NORMAL, PriorityShare
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.ports.commands import DispositionRange, HandBack, Subscribe
from qmq.broker.ports.effects import HandedBack, PulledMessages, Refused, Subscribed
from qmq.broker.ports.work import whole
from qmq.errors import InvalidOption
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL
from qmq.net.protocol.types import AT_MOST_ONCE, BROADCAST, Disposition
from tests.broker.harness import Driven, bodies_of, runs_of_answer

LANES = {"high": LANE_HIGH, "normal": LANE_NORMAL, "low": LANE_LOW}


class Lanes(Driven):
    """A broker, and a group with one consumer."""

    def put(self, *bodies: str, subject: str = "a.b") -> None:
        """Send each message in a batch of its own, in the lane that its first word names."""
        for body in bodies:
            self.do(self.send_command({subject: [body.encode()]}, lane=LANES[body.split()[0]]))

    def put_batch(self, lane: str, count: int) -> None:
        """Send numbered messages of one priority in one batch."""
        bodies = [body.encode() for body in numbered(lane, count)]
        self.do(self.send_command({"a.b": bodies}, lane=LANES[lane]))

    def join(
        self, *prefixes: str, consumer: str = "c", connection: int = 1, mode: str = "reliable", **settings: object
    ) -> int:
        command = Subscribe(
            connection, self.request(), "g", prefixes or ("a.",), consumer, None, mode=mode,
            settings=tuple(settings.items()),
        )  # fmt: skip
        (answer,) = self.do(command) or self.sync_records()
        assert isinstance(answer, Subscribed), answer
        return answer.subscription

    def take(self, subscription: int, most: int = 1_000_000, connection: int = 1, **limits: int) -> PulledMessages:
        command = self.pull_command(subscription, max_count=most, connection=connection, **limits)
        (answer,) = [one for one in self.do(command) if isinstance(one, PulledMessages)]
        return answer

    def got(self, subscription: int, most: int = 1_000_000, connection: int = 1) -> list[str]:
        """Pull and ack; return the bodies."""
        answer = self.take(subscription, most, connection)
        if answer.ranges:
            self.acknowledge(subscription, answer, connection)
        return texts(answer)

    def nack(self, subscription: int, answer: PulledMessages, at: int = 0, delay_us: int = 0) -> None:
        first = answer.ranges[0][0] + at
        backs = (DispositionRange(first, first + 1, Disposition.NACK, delay_us, "it broke"),)
        (said,) = [
            one for one in self.do(HandBack(1, self.request(), subscription, backs)) if isinstance(one, HandedBack)
        ]
        assert not said.refused


def texts(answer: PulledMessages) -> list[str]:
    return [body.decode() for body in bodies_of(runs_of_answer(answer))]


def numbered(priority: str, count: int) -> list[str]:
    return [f"{priority} {number}" for number in range(count)]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("prefixes", [("a.",), ("",), ("a.b",), ("a.b", "a.")])
@pytest.mark.parametrize("most", [1, 4, 100])
def test_a_higher_priority_comes_first(tmp_path: Path, prefixes: tuple[str, ...], most: int, partitions: int) -> None:
    driven = Lanes(tmp_path, partitions=partitions)
    subscription = driven.join(*prefixes, priority_share=0)
    for number in range(3):
        driven.put(f"low {number}", f"normal {number}", f"high {number}")
    found = list[str]()
    while some := driven.got(subscription, most):
        found += some
    assert found == numbered("high", 3) + numbered("normal", 3) + numbered("low", 3)
    driven.close()


def test_a_high_message_comes_before_the_rest_of_a_backlog(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0)
    driven.put(*numbered("low", 5))
    assert driven.got(subscription, 2) == ["low 0", "low 1"]
    driven.put("high 0")
    driven.put("normal 0", subject="a.c")
    assert driven.got(subscription) == ["high 0", "normal 0", "low 2", "low 3", "low 4"]
    driven.close()


def test_a_waiting_pull_is_woken_by_each_priority(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join("a.b")
    for body in ("normal 0", "high 0", "low 0", "normal 1"):
        command = driven.pull_command(subscription, timeout_ms=1_000)
        assert driven.do(command) == []
        (answer,) = [
            one
            for one in driven.do(driven.send_command({"a.b": [body.encode()]}, lane=LANES[body.split()[0]]))
            if isinstance(one, PulledMessages)
        ]
        assert texts(answer) == [body]
        driven.acknowledge(subscription, answer)
    driven.close()


@pytest.mark.parametrize("most", [1, 10, 50])
@pytest.mark.parametrize(("share", "low"), [(0, 0), (0.1, 50), (0.5, 250), (1, 499)])
def test_lower_priorities_get_their_share_of_a_flood(tmp_path: Path, most: int, share: float, low: int) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=share)
    for lane in ("high", "low"):
        driven.put_batch(lane, 1_000)
    found = list[str]()
    while len(found) < 500:
        found += driven.got(subscription, most)
    count = sum(body.startswith("low") for body in found)
    assert abs(count - low) <= most
    driven.close()


def test_the_share_is_for_normal_and_low_ones_together(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.1)
    for lane in LANES:
        driven.put_batch(lane, 2_000)
    found = list[str]()
    while len(found) < 2_000:
        found += driven.got(subscription, 1)
    counts = {lane: sum(body.startswith(lane) for body in found) for lane in LANES}
    expected = {"high": 1_800, "normal": 180, "low": 20}
    assert all(abs(counts[lane] - count) <= 2 for lane, count in expected.items())
    driven.close()


def test_nothing_is_saved_up_while_lower_priorities_do_not_wait(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.5)
    driven.put("low first")
    driven.put(*numbered("high", 20))
    assert driven.got(subscription, 10) == numbered("high", 10)
    assert driven.got(subscription, 2) == ["low first", "high 10"]
    assert driven.got(subscription, 4) == ["high 11", "high 12", "high 13", "high 14"]
    driven.put(*numbered("low", 5))
    assert driven.got(subscription, 6).count("high 15") == 1
    driven.close()


@pytest.mark.parametrize("share", [-0.1, 1.5, "much", True, None, float("nan")])
def test_a_share_outside_0_to_1_is_an_error(tmp_path: Path, share: object) -> None:
    driven = Lanes(tmp_path)
    settings = (("priority_share", share),)
    (answer,) = driven.do(Subscribe(1, driven.request(), "g", ("a.",), "c", None, settings=settings))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, InvalidOption)
    assert "priority_share must be a number from 0" in str(answer.error)
    driven.close()


def test_a_retry_keeps_its_priority(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0)
    driven.put("low 0", "high 0", "normal 0")
    answer = driven.take(subscription)
    assert texts(answer) == ["high 0", "normal 0", "low 0"]
    for at in (2, 1, 0):
        driven.nack(subscription, answer, at)
    driven.put("low 1", "normal 1", "high 1")
    found = list[str]()
    while some := driven.got(subscription, 1):
        found += some
    assert [body.split()[0] for body in found] == ["high", "high", "normal", "normal", "low", "low"]
    driven.close()


def test_a_low_retry_gets_its_share(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.1)
    driven.put("low 0")
    driven.nack(subscription, driven.take(subscription))
    driven.put(*numbered("high", 30))
    found = [body for _ in range(12) for body in driven.got(subscription, 1)]
    assert "low 0" in found
    driven.close()


def test_cursors_of_each_priority_survive_a_restart(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join("a.", "a.b", priority_share=0)
    driven.put(*numbered("low", 4), *numbered("normal", 4), *numbered("high", 4))
    assert driven.got(subscription, 6) == [*numbered("high", 4), "normal 0", "normal 1"]
    driven.restart()
    subscription = driven.join("a.", "a.b")
    assert driven.got(subscription, 4) == ["normal 2", "normal 3", "low 0", "low 1"]
    driven.store.close(clean=False)  # killed: the rest follows from the pull log
    driven.open()
    subscription = driven.join("a.", "a.b")
    driven.put("high 4")
    assert driven.got(subscription) == ["high 4", "low 2", "low 3"]
    driven.close()


def test_a_narrower_prefix_goes_on_where_each_lane_is(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    wide = driven.join("", priority_share=0)
    driven.put(*numbered("low", 3), *numbered("high", 3))
    assert driven.got(wide, 3) == numbered("high", 3)
    driven.put("normal 0")
    assert driven.got(wide, 1) == ["normal 0"]
    narrow = driven.join("a.", consumer="d", connection=2)
    driven.store.close(clean=False)
    driven.open()
    narrow = driven.join("a.", consumer="d", connection=2)
    assert driven.got(narrow, connection=2) == numbered("low", 3)
    driven.close()


@pytest.mark.parametrize("mode", [AT_MOST_ONCE, BROADCAST, "solo"])
@pytest.mark.parametrize("prefix", ["a.", "a.b", ""])
def test_other_modes_get_messages_in_stored_order(tmp_path: Path, mode: str, prefix: str) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.subscribe(prefix, group=None) if mode == "solo" else driven.join(prefix, mode=mode)
    sent = list[str]()
    for number in range(4):
        sent += [f"normal {number}", f"low {number}", f"high {number}"]
    driven.put(*sent[:1])
    found = driven.got(subscription)
    driven.put(*sent[1:])
    while some := driven.got(subscription, 2):
        found += some
    assert found == sent
    driven.close()


def test_an_at_most_once_subject_repeats_nothing_when_it_gets_a_second_lane(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join("a.b", mode=AT_MOST_ONCE)
    driven.put("normal 0", "normal 1")
    assert driven.got(subscription, 2) == ["normal 0", "normal 1"]
    driven.put("high 0")
    driven.store.close(clean=False)
    driven.open()
    subscription = driven.join("a.b", mode=AT_MOST_ONCE)
    assert not {"normal 0", "normal 1"} & set(driven.got(subscription))
    driven.close()


def test_what_lower_ranks_have_coming() -> None:
    share = PriorityShare()
    share.note_handed([10, 0, 0], 0.1)
    assert (share.coming(HIGH), share.coming(NORMAL)) == (1, 0)
    share.note_handed([0, 1, 0], 0.1)
    assert share.coming(HIGH) == 0
    share.note_handed([0, 0, 500], 0.1)
    share.note_handed([10, 20, 0], 0.1)
    assert share.coming(NORMAL) == 2
    share.none_wait(NORMAL)
    assert (share.coming(NORMAL), LOW) == (0, 2)


def test_lag_counts_each_priority(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    for prefixes in (("a.",), ("a.b",)):
        subscription = driven.join(*prefixes)
        driven.put("high 0", "low 0", "normal 0")
        work = ready(
            driven.store, driven.broker.groups["g"], NameOrder(driven.store.subjects), TimeStarts(driven.store)
        )
        assert whole(work).messages == 3
        assert driven.got(subscription) == ["high 0", "normal 0", "low 0"]
    driven.close()
