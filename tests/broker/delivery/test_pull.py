"""The pull path: which pull gets which messages when, and pulls that wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker import subject_list
from qmq.broker.ports.commands import Disconnected, ListSubjects, Subscribe, Unsubscribe, Withdraw
from qmq.broker.ports.effects import PulledMessages, Refused, SubjectList, Unsubscribed
from qmq.errors import (
    BrokerStopping,
    InvalidName,
    InvalidOption,
    Overloaded,
    QmqError,
    TooManyConsumers,
    TooManyGroups,
    UnknownSubscription,
)
from tests.broker.harness import BrokerLimits, Driven, bodies_of, runs_of_answer
from tests.broker.test_consuming import Consumer


def many(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def test_two_groups_see_all_one_group_shares(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    first, second = driven.subscribe("a", group="g"), driven.subscribe("a", group="g", connection=2)
    other = driven.subscribe("a.", "a", group="h")
    driven.send("a", *many("m", 10))
    got = bodies_of(driven.pull(first, max_count=4)) + bodies_of(driven.pull(second, max_count=3, connection=2))
    got += bodies_of(driven.pull(first))
    assert got == many("m", 10)
    assert bodies_of(driven.pull(other)) == many("m", 10)
    driven.close()


@pytest.mark.parametrize("max_count", [1, 2, 3, 7, 100])
def test_every_message_once_in_order_whatever_the_limit(tmp_path: Path, max_count: int) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("")
    sent = []
    for number in range(6):
        contents = {f"s.{name}": many(f"{number}.{name}.", name + 1) for name in range(number % 3 + 1)}
        driven.do(driven.send_command(contents))
        sent += [body for bodies in contents.values() for body in bodies]
    got: list[bytes] = []
    while runs := driven.pull(subscription, max_count=max_count):
        assert sum(run.count for run in runs) <= max_count
        got += bodies_of(runs)
    assert got == sent
    driven.close()


def test_whole_batches_go_as_they_lie(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for number in range(5):
        driven.do(driven.send_command({"a": many(f"{number}a", 3), "b": many(f"{number}b", 2)}))
    subscription = driven.subscribe("")
    (answer,) = driven.do(driven.pull_command(subscription))
    assert isinstance(answer, PulledMessages)
    assert len(answer.buffers) == 1  # five neighbours, one slice
    assert answer.messages == 25
    driven.close()


def test_max_bytes_bounds_an_answer_but_never_to_nothing(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[bytes(1_000)] * 20)
    subscription = driven.subscribe("a")
    (answer,) = driven.do(driven.pull_command(subscription, max_bytes=5_000))
    assert isinstance(answer, PulledMessages)
    assert 1 <= answer.messages <= 5
    assert answer.size <= 5_000 + 352
    (answer,) = driven.do(driven.pull_command(subscription, max_bytes=1))
    assert isinstance(answer, PulledMessages)
    assert answer.messages == 1
    driven.close()


def test_an_exact_subject_and_a_prefix_of_one_group_share(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    exact, prefix = driven.subscribe("a.x"), driven.subscribe("a.", connection=2)
    driven.do(driven.send_command({"a.x": many("x", 5), "a.y": many("y", 5)}))
    got = bodies_of(driven.pull(exact, max_count=2))
    assert got == many("x", 2)
    rest = bodies_of(driven.pull(prefix, connection=2))
    assert sorted(rest) == sorted(many("x", 5)[2:] + many("y", 5))
    assert driven.pull(exact) == []
    driven.close()


def test_a_prefix_takes_subjects_created_later_from_their_beginning(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a.old", b"before")
    subscription = driven.subscribe("a.", start="new")
    driven.send("a.new", b"1")
    driven.send("b.new", b"other")
    driven.send("a.old", b"2")
    assert bodies_of(driven.pull(subscription)) == [b"1", b"2"]
    driven.close()


@pytest.mark.parametrize("prefix", ["a", "", "a."])
def test_start_by_time_sequence_first_last(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    subject = "a.b" if prefix == "a." else "a"
    stamps = [driven.send(subject, body).stored_at_us for body in many("m", 6)]

    def begin(group: str, start: str | tuple[str, int]) -> list[bytes]:
        return bodies_of(driven.pull(driven.subscribe(prefix, group=group, start=start)))

    assert begin("first", "first") == many("m", 6)
    assert begin("new", "new") == []
    assert begin("time", ("time", stamps[4])) == many("m", 6)[4:]
    assert begin("between", ("time", stamps[2] + 1 if stamps[3] > stamps[2] + 1 else stamps[3])) == many("m", 6)[3:]
    assert begin("late", ("time", stamps[5] + 1_000)) == []
    assert begin("sequence", ("sequence", 4)) == many("m", 6)[4:]
    assert begin("beyond", ("sequence", 100)) == []
    driven.close()


def test_a_group_goes_on_after_a_restart(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    prefix, exact = driven.subscribe("", group="p"), driven.subscribe("a", group="e")
    driven.send("a", *many("m", 10))
    assert bodies_of(driven.pull(prefix, max_count=3)) == many("m", 3)
    assert bodies_of(driven.pull(exact, max_count=5)) == many("m", 5)
    driven.restart()
    prefix, exact = driven.subscribe("", group="p"), driven.subscribe("a", group="e")
    assert bodies_of(driven.pull(prefix)) == many("m", 10)[3:]
    assert bodies_of(driven.pull(exact)) == many("m", 10)[5:]
    driven.close()


def test_a_group_takes_subjects_created_while_nobody_was_there(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    number = driven.subscribe("a.", start="new")
    driven.do(Unsubscribe(1, driven.request(), number))
    driven.restart()
    driven.send("a.new", b"1")
    assert bodies_of(driven.pull(driven.subscribe("a.", start="new"))) == [b"1"]
    driven.close()


def test_solo_starts_at_the_end_and_leaves_nothing(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", b"before")
    solo = driven.subscribe("a", group=None)
    driven.send("a", b"after")
    assert bodies_of(driven.pull(solo)) == [b"after"]
    assert bodies_of(driven.pull(driven.subscribe("", group=None, start="first"))) == [b"before", b"after"]
    assert driven.broker.checkpoint_state(driven.now)["groups"] == b"\x80"
    driven.close()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_waiting_pull_is_answered_by_an_arrival(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for prefix in ("a.b", "a.", ""):
        subscription = driven.subscribe(prefix, group=f"g{len(prefix)}")
        pull = driven.pull_command(subscription, timeout_ms=10_000)
        assert driven.do(pull) == []
    said = driven.do(driven.send_command({"other": [b"o"]}, flush=False))
    assert [runs_of_answer(effect)[0].subject for effect in said if isinstance(effect, PulledMessages)] == ["other"]
    said = driven.do(driven.send_command({"a.b": [b"x"]}, flush=False))
    answers = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert [bodies_of(runs_of_answer(answer)) for answer in answers] == [[b"x"], [b"x"]]
    assert driven.broker.waiting_pulls() == 0
    driven.close()


def test_the_one_that_waits_longest_is_served_first(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    pulls = []
    for connection in (1, 2, 3):
        subscription = driven.subscribe("a", connection=connection)
        pulls.append(driven.pull_command(subscription, max_count=1, timeout_ms=10_000, connection=connection))
        driven.do(pulls[-1])
    answered = []
    for body in many("m", 3):
        said = driven.do(driven.send_command({"a": [body]}, flush=False))
        answered += [effect.connection for effect in said if isinstance(effect, PulledMessages)]
    assert answered == [1, 2, 3]
    driven.close()


def test_one_arrival_of_many_serves_many(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for connection in (1, 2, 3):
        subscription = driven.subscribe("a", connection=connection)
        driven.do(driven.pull_command(subscription, max_count=2, timeout_ms=10_000, connection=connection))
    said = driven.do(driven.send_command({"a": many("m", 5)}, flush=False))
    answers = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert [answer.messages for answer in answers] == [2, 2, 1]
    assert [body for answer in answers for body in bodies_of(runs_of_answer(answer))] == many("m", 5)
    driven.close()


def test_min_count_waits_and_takes_nothing_meanwhile(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    waiting = driven.subscribe("a")
    driven.do(driven.pull_command(waiting, min_count=3, timeout_ms=1_000))
    driven.send("a", b"1", b"2")
    assert driven.broker.waiting_pulls() == 1
    other = driven.subscribe("a", connection=2)
    assert bodies_of(driven.pull(other, max_count=1, connection=2)) == [b"1"]
    said = driven.do(driven.send_command({"a": [b"3", b"4"]}, flush=False))
    (answer,) = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert bodies_of(runs_of_answer(answer)) == [b"2", b"3", b"4"]
    driven.close()


def test_min_count_cuts_a_run_when_it_must(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for number in range(3):
        driven.send("a", *many(f"{number}.", 4))
    subscription = driven.subscribe("a")
    assert len(bodies_of(driven.pull(subscription, max_count=6))) == 4  # cut at a run's end
    assert len(bodies_of(driven.pull(subscription, max_count=6, min_count=6, timeout_ms=1_000))) == 6
    driven.close()


def test_at_the_deadline_a_pull_gets_what_is_there(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a")
    driven.do(driven.pull_command(subscription, min_count=3, timeout_ms=1_000))
    driven.send("a", b"1")
    assert driven.advance(999) == []
    (answer,) = driven.advance(1)
    assert bodies_of(runs_of_answer(answer)) == [b"1"]
    driven.do(driven.pull_command(subscription, timeout_ms=500))
    (answer,) = driven.advance(500)
    assert isinstance(answer, PulledMessages)
    assert answer.messages == 0
    driven.close()


def test_tick_names_the_next_deadline(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    assert driven.broker.tick(driven.now) is None
    subscription = driven.subscribe("a")
    session_timeout_us = driven.limits.session_timeout_ms * 1_000
    assert driven.broker.tick(driven.now) == driven.now.monotonic_us + session_timeout_us
    driven.do(driven.pull_command(subscription, timeout_ms=700), driven.pull_command(subscription, timeout_ms=300))
    assert driven.broker.tick(driven.now) == driven.now.monotonic_us + 300_000
    driven.advance(300)
    assert driven.broker.tick(driven.now) == driven.now.monotonic_us + 400_000
    driven.close()


def test_withdraw_answers_at_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    pull = driven.pull_command(driven.subscribe("a"), timeout_ms=1_000)
    driven.do(pull)
    (answer,) = driven.do(Withdraw(1, pull.request))
    assert answer == PulledMessages(1, pull.request, [], 0, 0)
    assert driven.do(Withdraw(1, pull.request)) == []
    assert driven.advance(2_000) == []
    driven.close()


def test_a_lost_connection_takes_its_pulls_along(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    gone, stays = driven.subscribe("a", connection=1), driven.subscribe("a", connection=2)
    driven.do(driven.pull_command(gone, timeout_ms=1_000))
    driven.do(driven.pull_command(stays, timeout_ms=1_000, connection=2))
    driven.do(Disconnected(1))
    said = driven.do(driven.send_command({"a": [b"1"]}, flush=False))
    assert [effect.connection for effect in said if isinstance(effect, PulledMessages)] == [2]
    driven.close()


def test_unsubscribe_ends_its_pulls(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a")
    pull = driven.pull_command(subscription, timeout_ms=1_000)
    driven.do(pull)
    said = driven.do(Unsubscribe(1, 77, subscription))
    assert said == [PulledMessages(1, pull.request, [], 0, 0), Unsubscribed(1, 77)]
    (refused,) = driven.do(driven.pull_command(subscription))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, UnknownSubscription)
    driven.close()


def test_a_broker_that_stops_answers_waiting_pulls(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a")
    driven.do(driven.pull_command(subscription, timeout_ms=1_000))
    driven.broker.stop()
    said = driven.do(driven.pull_command(subscription), driven.send_command({"a": [b"1"]}))
    assert len(said) == 3
    assert all(isinstance(effect, Refused) and isinstance(effect.error, BrokerStopping) for effect in said)
    driven.close()


# --- bounds and bad input --------------------------------------------------------------------------------------------


def refusal(driven: Driven, command: object) -> type[QmqError]:
    (refused,) = driven.do(command)
    assert isinstance(refused, Refused), refused
    return type(refused.error)


def test_what_is_out_of_bounds_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(max_groups=2, max_waiting_pulls=2, max_consumers_per_connection=4))
    subscription = driven.subscribe("a", group="one")
    driven.subscribe("a", group="two")
    assert refusal(driven, Subscribe(1, 50, "three", ("a",), "c", None)) is TooManyGroups
    driven.subscribe("a", group=None)
    driven.subscribe("a", group=None)
    assert refusal(driven, Subscribe(1, 51, "one", ("a",), "c", None)) is TooManyConsumers
    driven.do(*[driven.pull_command(subscription, timeout_ms=1_000) for _ in range(2)])
    assert refusal(driven, driven.pull_command(subscription, timeout_ms=1_000)) is Overloaded
    driven.close()


def test_a_wider_prefix_can_not_begin_later_than_what_it_takes_in(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.subscribe("a.x")
    driven.send("a.x", b"1")
    for prefix in ("a.", ""):
        assert refusal(driven, Subscribe(1, driven.request(), "g", (prefix,), "c", "new")) is InvalidOption
    driven.send("a.x", b"2")
    assert bodies_of(driven.pull(driven.subscribe("a."))) == [b"1", b"2"]
    driven.close()


def test_a_group_follows_so_many_prefixes_and_no_more(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(max_prefixes=3, max_groups=1))
    assert refusal(driven, Subscribe(1, 50, "g", ("a", "b", "c", "d"), "c", None)) is InvalidOption
    assert driven.broker.checkpoint_state(driven.now)["groups"] == b"\x80"  # it was not made
    driven.subscribe("a", "b", group="g")
    driven.subscribe("b", "c", group="g")
    assert refusal(driven, Subscribe(1, 51, "g", ("d",), "c", None)) is InvalidOption
    assert refusal(driven, Subscribe(1, 52, None, ("a", "b", "c", "d"), "c", None)) is InvalidOption
    driven.close()


@pytest.mark.parametrize(
    ("group", "prefixes", "consumer", "error"),
    [
        ("g", (), "c", InvalidOption),
        ("g", ("a..b",), "c", InvalidName),
        ("g", (".",), "c", InvalidName),
        ("../g", ("a",), "c", InvalidName),
        ("~g", ("a",), "c", InvalidName),
        ("g", ("~g",), "c", InvalidName),
        ("g", ("a",), "", InvalidName),
        ("g", ("a" * 201,), "c", InvalidName),
        (["g"], ("a",), "c", InvalidName),
        (7, ("a",), "c", InvalidName),
        ("g", (["a"],), "c", InvalidName),
        ("g", ("a",), {}, InvalidName),
    ],
)
def test_bad_subscriptions_are_refused(
    tmp_path: Path, group: Any, prefixes: tuple[Any, ...], consumer: Any, error: type[QmqError]
) -> None:
    driven = Driven(tmp_path)
    assert refusal(driven, Subscribe(1, 1, group, prefixes, consumer, None)) is error
    driven.close()


@pytest.mark.parametrize(("max_count", "min_count", "max_bytes"), [(0, 0, 1), (1, 2, 1), (1, 1, 0)])
def test_bad_pulls_are_refused(tmp_path: Path, max_count: int, min_count: int, max_bytes: int) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a")
    pull = driven.pull_command(subscription, max_count=max_count, min_count=min_count, max_bytes=max_bytes)
    assert refusal(driven, pull) is InvalidOption
    driven.close()


def test_subjects_are_listed_in_pages(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({f"s.{number}": [b"x"] * (number + 1) for number in range(5)}))
    driven.send("t", b"x")
    (page,) = driven.do(ListSubjects(1, 1, "s.", 0, 3))
    assert page == SubjectList(1, 1, [(f"s.{one}", 0, one + 1, one + 1, 0, 0, 0, 0) for one in range(3)], 3)
    (page,) = driven.do(ListSubjects(1, 1, "s.", 3, 3))
    assert isinstance(page, SubjectList)
    assert [row[0] for row in page.rows] == ["s.3", "s.4"]
    assert page.after is None
    driven.close()


def test_a_list_looks_at_so_many_subjects_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_list, "_MOST_LOOKED_AT", 3)
    monkeypatch.setattr(subject_list, "_SUBJECTS", 3)
    driven = Driven(tmp_path)
    driven.do(driven.send_command({name: [b"x"] for name in ("a.0", "a.1", "a.2", "a.3", "s.0", "s.1", "a.4")}))
    pages = [driven.do(ListSubjects(1, 1, "s.", after, 2))[0] for after in (0, 3, 6)]
    assert pages == [
        SubjectList(1, 1, [], 3),
        SubjectList(1, 1, [("s.0", 0, 1, 1, 0, 0, 0, 0), ("s.1", 0, 1, 1, 0, 0, 0, 0)], 6),
        SubjectList(1, 1, [], None),
    ]
    (page,) = driven.do(ListSubjects(1, 1, "s.1", 0, 2))
    assert page == SubjectList(1, 1, [("s.1", 0, 1, 1, 0, 0, 0, 0)], None), "a single one is not looked for"
    assert (
        driven.do(ListSubjects(1, 1, "s.1", 6, 2))
        == driven.do(ListSubjects(1, 1, "s.2", 0, 2))
        == [SubjectList(1, 1, [], None)]
    )
    driven.close()


def test_a_thousand_subjects_of_a_prefix_none_starves(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("s.")
    names = [f"s.{number}" for number in range(1_000)]
    driven.do(driven.send_command({"s.big": many("big", 5_000)}))
    driven.do(driven.send_command({name: [name.encode()] for name in names}))
    driven.do(driven.send_command({"s.big": many("late", 5_000)}))
    got: list[bytes] = []
    while runs := driven.pull(subscription, max_count=2_000):
        got += bodies_of(runs)
    assert got == many("big", 5_000) + [name.encode() for name in names] + many("late", 5_000)
    driven.close()


def test_the_same_subscription_again_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """A client does this after a lost connection, as often as it likes; its messages stay in flight."""
    driven = Driven(tmp_path, BrokerLimits(max_consumers_per_connection=2))
    driven.send("a", b"1")
    consumer = Consumer(driven, "c", "a")
    assert consumer.pull() == [b"1"]
    consumers = list[int]()
    for _ in range(5):
        waits = driven.pull_command(consumer.subscription, timeout_ms=60_000)._replace(expected=consumer.expected)
        assert driven.do(waits) == []
        before, consumer_state = consumer.subscription, consumer.consumer_state
        consumer.join()
        assert consumer.consumer_state.epoch == consumer_state.epoch
        consumer.expected = consumer.consumer_state.next_sequence
        assert refusal(driven, Unsubscribe(1, driven.request(), before)) is UnknownSubscription
        consumers.append(consumer.subscription)
    assert len(set(consumers)) == 5
    Consumer(driven, "another", "a")
    assert refusal(driven, Subscribe(1, driven.request(), "g", ("a",), "third", None, b"n")) is TooManyConsumers
    consumer.expected = consumer.consumer_state.ack_floor
    assert consumer.pull() == [b"1"]
    driven.close()
