"""A group follows all that its consumers ever asked for, until `groups set` changes it; `look` adds nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.delivery.redeliver import NOT_FOLLOWED
from qmq.broker.ports.commands import Administer, Subscribe, Unsubscribe
from qmq.broker.ports.effects import PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InvalidName, InvalidOption, UnknownGroup
from qmq.format.layout import LANE_HIGH, LANE_NORMAL, LANE_ORDERED
from qmq.net.protocol.types import Disposition
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.retention.test_retention import HOUR_MS, driven_in, numbers, settle
from tests.broker.retention.test_retention import send as fill
from tests.broker.test_admin import ask, group_row
from tests.broker.test_consuming import Consumer, killed
from tests.effort import part_of

SESSION_TIMEOUT_MS = 30_000
STOPS = pytest.mark.parametrize("stop", [None, Driven.restart, killed])


def filled(tmp_path: Path, count: int = 6, **limits: Any) -> Driven:
    """Return a broker with messages of a.x and b.x in turn, one a batch; each body names its message."""
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS, **limits))
    for number in range(count):
        send(driven, number)
    return driven


def send(driven: Driven, number: int) -> None:
    subject = "ab"[number % 2]
    driven.send(f"{subject}.x", b"%s%d" % (subject.encode(), number))


def follow_only(driven: Driven, *prefixes: str, group: str = "g") -> list[str]:
    answer = ask(driven, "set_group", group=group, follows=list(prefixes))
    found: list[str] = answer["follows"]
    return found


def stopped(driven: Driven, stop: Any, *consumers: Consumer) -> None:
    """Stop and start; the consumers come back over new connections."""
    if stop is not None:
        stop(driven)
        for consumer in consumers:
            consumer.asks = "again"
            consumer.join()


def letters(driven: Driven) -> list[tuple[str, str]]:
    rows = ask(driven, "dead_letters", group="g")["rows"]
    return [(row["subject"], row["reason"]) for row in rows]


@STOPS
def test_what_is_ready_elsewhere_is_not_the_groups_any_more(tmp_path: Path, stop: Any) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c", "")
    assert consumer.pull(2) == [b"a0", b"b1"]
    assert follow_only(driven, "a.") == ["a."]
    row = group_row(driven)
    assert (row["follows"], row["ready"], row["in_flight"]) == (["a."], 2, 2)
    stopped(driven, stop, consumer)
    send(driven, 6)
    send(driven, 7)
    assert consumer.ack(0, 1) == 0  # what is in flight may still be acknowledged
    assert consumer.pull() == [b"a2", b"a4", b"a6"]
    row = group_row(driven)
    assert (row["follows"], row["ready"], row["in_flight"]) == (["a."], 0, 3)
    driven.close()


@STOPS
@pytest.mark.parametrize("asked", [("",), ("b.x", "a.x"), ("b.", "a.")])
def test_what_comes_back_of_it_is_dead_and_says_why(tmp_path: Path, stop: Any, asked: tuple[str, ...]) -> None:
    driven = filled(tmp_path, 12)
    consumer = Consumer(driven, "c", *asked)
    assert len(consumer.pull()) == 12
    mine = [number for number, (body, _) in consumer.got.items() if body.startswith(b"b")]
    consumer.back(mine[0], mine[0] + 1, delay_us=0)
    consumer.back(mine[1], mine[1] + 1, delay_us=2_000_000)
    follow_only(driven, "a.")
    consumer.back(mine[2], mine[2] + 1, Disposition.RELEASE)
    stopped(driven, stop, consumer)
    assert all(body.startswith(b"a") for body in consumer.pull(100))
    driven.advance(2_000)
    consumer.pull()
    # Messages in flight whose answer was lost become dead letters when it asks for them again.
    assert letters(driven) == [("b.x", NOT_FOLLOWED)] * (3 if stop is None else 6)
    assert group_row(driven)["in_retry"] == 0
    driven.do(Unsubscribe(1, driven.request(), consumer.subscription))  # the rest is released
    other = Consumer(driven, "d", "a.", connection=2)
    while other.pull():
        pass
    assert sorted(body for body, _ in other.got.values()) == sorted(b"a%d" % number for number in range(0, 12, 2))
    assert letters(driven) == [("b.x", NOT_FOLLOWED)] * 6
    driven.close()


def test_what_a_killed_consumer_held_is_dead_too(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c", "")
    assert len(consumer.pull()) == 6
    follow_only(driven, "a.x")
    driven.advance(SESSION_TIMEOUT_MS)
    other = Consumer(driven, "d", "a.x", connection=2)
    while other.pull():
        other.ack()
    assert [body for body, _ in other.got.values()] == [b"a0", b"a2", b"a4"]
    assert letters(driven) == [("b.x", NOT_FOLLOWED)] * 3
    driven.close()


def test_who_is_there_goes_on_with_what_is_left_of_its_own(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    everything, of_a, of_b = (
        Consumer(driven, name, prefix, connection=number)
        for number, (name, prefix) in enumerate((("all", ""), ("a", "a."), ("b", "b.x")), start=1)
    )
    waits = {
        one.name: driven.pull_command(one.subscription, 1, timeout_ms=60_000, connection=one.connection)._replace(
            expected=0
        )
        for one in (everything, of_a, of_b)
    }
    assert driven.do(*waits.values()) == []
    command = Administer(9, driven.request(), "set_group", {"group": "g", "follows": ["a.", "c."]})
    (refused,) = [one for one in driven.do(command) if isinstance(one, Refused)]
    assert refused.request == waits["b"].request
    assert isinstance(refused.error, InvalidOption)
    assert "group g does not follow 'b.x', only 'a.', 'c.'" in str(refused.error)
    commands = [driven.send_command({"a.x": [b"1"]}), driven.send_command({"b.x": [b"2"]})]
    answers = [one for one in driven.do(*commands) if isinstance(one, PulledMessages)]
    assert [one.request for one in answers] == [waits["all"].request]
    assert bodies_of(runs_of_answer(answers[0])) == [b"1"]
    answers = [one for one in driven.do(driven.send_command({"a.y": [b"3"]})) if isinstance(one, PulledMessages)]
    assert [one.request for one in answers] == [waits["a"].request]
    with pytest.raises(InvalidOption, match=r"does not follow 'b\.x'"):
        of_b.pull()
    of_b.asks = "again"
    with pytest.raises(InvalidOption, match=r"does not follow 'b\.x'"):
        of_b.join()
    assert group_row(driven)["follows"] == ["a.", "c."]
    driven.send("c.x", b"4")
    everything.expected = 1
    assert everything.pull() == [b"4"]
    of_b.asks = "follow"
    of_b.join()
    assert group_row(driven)["follows"] == ["a.", "c.", "b.x"]
    assert of_b.pull() == [b"2"]
    driven.close()


@STOPS
@pytest.mark.parametrize("again", ["", "b.", "b.x"])
@pytest.mark.parametrize("first", ["", "b."])
def test_what_is_followed_again_goes_on_where_the_group_left_it(
    tmp_path: Path, stop: Any, again: str, first: str
) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c", first, "a.")
    consumer.pull(2)
    assert consumer.ack() == 0
    driven.checkpoint()
    while consumer.pull(1) and b"b3" not in dict(consumer.got.values()):
        pass
    assert consumer.ack() == 0
    seen = {body for body, _ in consumer.got.values()}
    follow_only(driven, "a.")
    stopped(driven, stop)
    send(driven, 7)
    start = ("time", 1 << 60) if again or not first else None  # a wider one that is new has none
    consumer = Consumer(driven, "c", "a.", again, connection=2, nonce=b"m", start=start)
    while consumer.pull():
        consumer.ack()
    after = [body for body, _ in consumer.got.values()]
    assert len(set(after)) == len(after)
    assert not seen & set(after)
    assert {body for body in seen | set(after) if body.startswith(b"b")} == {b"b1", b"b3", b"b5", b"b7"}
    driven.close()


@STOPS
def test_less_goes_on_where_the_group_is_and_more_begins_at_the_first_message(tmp_path: Path, stop: Any) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c", "a.")
    assert consumer.pull(1) == [b"a0"]
    assert follow_only(driven, "a.x", "b.") == ["a.x", "b."]
    stopped(driven, stop, consumer)
    assert group_row(driven)["ready"] == 5
    driven.send("a.y", b"not followed")
    everything = Consumer(driven, "d", "", connection=2, asks="look")
    assert sorted(everything.pull()) == [b"a2", b"a4", b"b1", b"b3", b"b5"]
    assert group_row(driven)["follows"] == ["a.x", "b."]
    driven.close()


@STOPS
@pytest.mark.parametrize("lane", [LANE_NORMAL, LANE_HIGH, LANE_ORDERED | 7])
@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("asks_first", [0, 1])
@pytest.mark.parametrize("narrow", ["a.x", "a."])
def test_what_lies_within_more_begins_at_the_first_message_too(
    tmp_path: Path, stop: Any, lane: int, by_time: bool, asks_first: int, narrow: str
) -> None:
    """Whichever prefix brings a message, the cursor is the group's: what waits before it would be passed."""
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    for number in range(4):
        driven.advance(10)
        driven.do(driven.send_command({"a.x": [b"%d" % number]}, lane=lane))
    start = ("time", driven.now.wall_us - 15_000) if by_time else ("sequence", 2)
    consumers = [Consumer(driven, "c", narrow, start=start)]
    assert group_row(driven)["ready"] == 2
    consumers.append(Consumer(driven, "d", "", connection=2))
    stopped(driven, stop, *consumers)
    assert group_row(driven)["ready"] == 4
    assert consumers[asks_first].pull(3) == [b"0", b"1", b"2"]
    assert consumers[asks_first].ack() == 0
    assert consumers[1 - asks_first].pull() == [b"3"]
    assert group_row(driven)["ready"] == 0
    driven.close()


@STOPS
@pytest.mark.parametrize("narrow", ["a.b.", "a.b.x"])
@pytest.mark.parametrize("lane", [LANE_NORMAL, LANE_HIGH, LANE_ORDERED | 7])
def test_more_that_begins_now_passes_nothing_that_waits(tmp_path: Path, stop: Any, narrow: str, lane: int) -> None:
    """The member of a broadcast begins with what comes; what it followed before must not be passed."""
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    driven.do(driven.send_command({"a.b.x": [b"before"], "a.c": [b"before"]}, lane=lane))
    driven.advance(10)
    narrow_one = Consumer(driven, "m", narrow, mode="broadcast")
    driven.advance(10)
    for number in range(3):
        driven.do(driven.send_command({"a.b.x": [b"%d" % number]}, lane=lane))
    wide_one = Consumer(driven, "m", "a.", mode="broadcast", connection=2)
    driven.do(driven.send_command({"a.b.x": [b"3"], "a.c": [b"c"]}, lane=lane))
    stopped(driven, stop, narrow_one, wide_one)
    assert sorted(wide_one.pull()) == [b"0", b"1", b"2", b"3", b"c"]
    driven.close()


def test_more_begins_now_where_nothing_waits(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    first = Consumer(driven, "m", "a.b.", mode="broadcast")
    driven.send("a.b.x", b"0")
    driven.send("a.c", b"before")
    assert first.pull() == [b"0"]
    assert first.ack() == 0
    second = Consumer(driven, "m", "a.", mode="broadcast", connection=2)
    driven.send("a.c", b"c")
    assert second.pull() == [b"c"]
    driven.close()


def test_accounts_heed_that_what_lies_within_more_begins_earlier(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for number in range(4):
        driven.send("a.x", b"%d" % number)
    consumer = Consumer(driven, "c", "a.x", start=("sequence", 2))
    assert consumer.pull(1) == [b"2"]
    Consumer(driven, "d", "", connection=2)
    driven.checkpoint()  # compares them
    assert consumer.pull() == [b"3"]
    driven.checkpoint()
    driven.close()


def test_who_waits_is_given_what_more_begins_with(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c", "a.", start=("time", 1 << 60))
    waits = driven.pull_command(consumer.subscription, timeout_ms=60_000)
    assert driven.do(waits) == []
    said = driven.do(Subscribe(2, driven.request(), "g", ("",), "d", None)) + driven.do()
    assert consumer.take([one for one in said if isinstance(one, PulledMessages)]) == [b"a0", b"a2", b"a4"]
    driven.close()


def test_looking_neither_makes_a_group_nor_widens_one(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    with pytest.raises(UnknownGroup, match=r"no group 'g'.*solo consumer"):
        Consumer(driven, "looks", "", asks="look")
    assert ask(driven, "groups")["rows"] == []
    Consumer(driven, "c", "a.")
    with pytest.raises(InvalidOption, match=r"does not follow 'b\.', only 'a\.'"):
        Consumer(driven, "looks", "b.", connection=2, asks="look")
    for prefix in ("", "a.", "a.x"):
        looks = Consumer(driven, "looks", prefix, connection=2, asks="look", transient=True)
        assert looks.pull() == [b"a0", b"a2", b"a4"]
        driven.do(Unsubscribe(2, driven.request(), looks.subscription))
        row = group_row(driven)
        assert (row["follows"], row["ready"] + row["in_retry"], row["in_flight"]) == (["a."], 3, 0)
    consumer = Consumer(driven, "c", "a.", connection=3)
    assert consumer.pull() == [b"a0", b"a2", b"a4"]
    assert {attempt for _, attempt in consumer.got.values()} == {1}
    driven.close()


@pytest.mark.parametrize("asks", ["often", "", None, 3, ["look"]])
def test_what_a_subscription_cannot_ask_is_refused(tmp_path: Path, asks: Any) -> None:
    driven = filled(tmp_path)
    (answer,) = driven.do(Subscribe(1, driven.request(), "g", ("",), "c", None, asks=asks))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, InvalidOption)
    (answer,) = driven.do(Subscribe(1, driven.request(), None, ("",), "c", None, asks="look"))
    assert isinstance(answer, Refused)
    assert ask(driven, "groups")["rows"] == []
    driven.close()


def test_who_comes_back_to_a_group_that_nobody_narrowed_is_followed_as_before(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c", "a.")
    ask(driven, "delete_group", group="g")
    consumer.asks = "again"
    consumer.join()
    Consumer(driven, "d", "b.", connection=2, asks="again")
    assert group_row(driven)["follows"] == ["a.", "b."]
    driven.close()


@pytest.mark.parametrize(
    ("follows", "error"),
    [([], InvalidOption), ("a.", InvalidOption), ([3], InvalidName), (["a..b"], InvalidName), ({}, InvalidOption)],
)
def test_what_no_group_can_follow_changes_nothing(tmp_path: Path, follows: Any, error: type[Exception]) -> None:
    driven = filled(tmp_path)
    Consumer(driven, "c", "")
    with pytest.raises(error):
        ask(driven, "set_group", group="g", follows=follows, settings={"max_attempts": 3})
    with pytest.raises(InvalidOption):
        ask(driven, "set_group", group="g", follows=["a."], settings={"max_attempts": 0})
    with pytest.raises(InvalidOption):
        ask(driven, "set_group", group="g")
    row = group_row(driven)
    assert (row["follows"], row["settings"]["max_attempts"]) == ([""], 16)
    driven.close()


def test_there_is_a_most_of_what_a_group_follows_and_has_followed(tmp_path: Path) -> None:
    driven = filled(tmp_path, max_prefixes=4)
    Consumer(driven, "c", "a.x")
    with pytest.raises(InvalidOption, match="at most 4 are allowed"):
        follow_only(driven, *"bcdef")
    for number in range(7):
        follow_only(driven, f"s{number}")
    with pytest.raises(InvalidOption, match="at most 8 are kept"):
        follow_only(driven, "s7")
    assert follow_only(driven, "s0", "a.x") == ["s0", "a.x"]
    driven.close()


@STOPS
@pytest.mark.parametrize("again", ["", "a."])
def test_where_the_group_left_it_may_be_gone_meanwhile(tmp_path: Path, stop: Any, again: str) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS))
    consumer = Consumer(driven, "c", "")
    driven.send("b.x", b"held 1")
    driven.send("b.x", b"held 2")
    assert len(consumer.pull()) == 2
    fill(driven, 30)
    follow_only(driven, "c.")
    driven.advance(2 * HOUR_MS)
    fill(driven, 10, first=30)
    assert settle(driven), "nothing was dropped"
    stopped(driven, stop)
    kept = driven.subscribe("a.", group=None, start="first")
    left = numbers(bodies_of(driven.pull(kept)))
    assert left[-10:] == list(range(30, 40))
    assert len(left) < 40
    consumer = Consumer(driven, "c", "c.", asks="again")
    if stop is not None:
        assert consumer.pull() == []  # its messages in flight were copied forward, and become dead letters too
        assert [reason for _, reason in letters(driven)] == [NOT_FOLLOWED] * 2
    assert follow_only(driven, "c.", again)[-1] == again
    other = Consumer(driven, "d", again, connection=2)
    assert numbers(other.pull()) == left
    driven.close()


def test_a_broadcast_is_narrowed_as_a_whole_and_a_member_alone(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    one, two = (Consumer(driven, name, connection=n, mode="broadcast") for n, name in enumerate(("one", "two"), 1))
    follow_only(driven, "a.", "b.")
    follow_only(driven, "a.", group="g@two")
    for number in range(4):
        send(driven, number)
    assert (len(one.pull()), two.pull()) == (4, [b"a0", b"a2"])
    follow_only(driven, "")
    send(driven, 5)
    assert (one.pull(), two.pull()) == ([b"b5"], [b"b1", b"b3", b"b5"])  # on from where each was
    driven.close()


@pytest.mark.parametrize("stop", [Driven.restart, killed])
@pytest.mark.parametrize("seed", range(4))
def test_an_at_most_once_group_that_follows_again_is_given_nothing_twice(tmp_path: Path, seed: int, stop: Any) -> None:
    driven, chance = filled(tmp_path, 0), random.Random(seed)
    got = list[bytes]()
    number = 0

    def subscribed(asks: str) -> int:
        command = Subscribe(1, driven.request(), "g", ("",), "c", None, mode="at_most_once", asks=asks)
        answer = driven.do(command)[-1]
        assert isinstance(answer, Subscribed), answer
        return answer.subscription

    subscription = subscribed("follow")
    for _ in range(60):
        match chance.randrange(6):
            case 0 | 1:
                for _ in range(3):
                    send(driven, number)
                    number += 1
            case 2 | 3:
                command = driven.pull_command(subscription, chance.randrange(1, 4))
                for one in driven.do(command):
                    if isinstance(one, PulledMessages) and one.request == command.request:
                        got += bodies_of(runs_of_answer(one))
            case 4:
                follow_only(driven, *chance.choice([("a.",), ("",), ("b.", "a.x")]))
            case _:
                stop(driven)
                subscription = subscribed(chance.choice(["again", "follow"]))
    assert got
    assert len(set(got)) == len(got)
    driven.close()


@pytest.mark.parametrize("seed", range(part_of(12)))
def test_narrowing_and_widening_loses_nothing_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    """Once all is followed again and dead letters are redriven, each message has been acked once."""
    driven, chance = (
        Driven(tmp_path, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS), partitions=1 + seed % 2),
        random.Random(seed),
    )
    sent, acked = list[bytes](), list[bytes]()
    consumer = Consumer(driven, "c", *chance.choice([("",), ("a.", "b.", "c"), ("a.x", "b.x", "c")]))

    def pull(most: int) -> None:
        follows = tuple(group_row(driven)["follows"])
        try:
            bodies = consumer.pull(most)
        except InvalidOption:  # nothing is left of what it asked for
            return
        for body in bodies:
            assert body.decode().startswith(follows), "it is not followed"
        for number, (body, _) in list(consumer.got.items()):
            match chance.randrange(4):
                case 0:
                    consumer.back(number, number + 1, delay_us=chance.choice([0, 0, 500_000]))
                case 1:
                    continue
                case _:
                    assert consumer.ack(number) == 0
                    acked.append(body)
            del consumer.got[number]

    for step in range(80):
        match chance.randrange(10):
            case 0 | 1 | 2:
                subject = chance.choice(["a.x", "a.y", "b.x", "c"])
                sent.append(f"{subject} {len(sent)}".encode())
                driven.send(subject, sent[-1])
            case 3 | 4 | 5 | 6:
                pull(chance.randrange(1, 6))
            case 7:
                several = [("a.",), ("",), ("b.", "a.x"), ("c", "a."), ("a.x",), ("a.y", "c", "b.")]
                follow_only(driven, *chance.choice(several))
            case 8:
                driven.advance(1_000)
            case _:
                chance.choice([Driven.restart, killed, Driven.checkpoint])(driven)
                consumer.asks, consumer.nonce = chance.choice(["again", "again", "follow"]), b"%d" % step
                consumer.got.clear()
                try:
                    consumer.join()
                except InvalidOption:  # nothing is left of what it asked for
                    consumer.asks, consumer.prefixes = "follow", chance.choice([("",), ("a.", "c"), ("b.x", "a.x")])
                    consumer.join()
    follow_only(driven, "")
    consumer.asks, consumer.prefixes = "follow", ("",)
    consumer.join()
    for _ in range(100):
        driven.advance(1_000)
        if rows := ask(driven, "dead_letters", group="g")["rows"]:
            assert {row["reason"] for row in rows} == {NOT_FOLLOWED}
            retry_all(driven)
        pull(100)
        if sorted(acked) == sorted(sent):
            break
    assert sorted(acked) == sorted(sent)
    driven.close()


def retry_all(driven: Driven) -> None:
    """Redrive the dead letters."""
    driven.do(Administer(1, driven.request(), "redrive", {"group": "g"}))
    driven.advance(0)
