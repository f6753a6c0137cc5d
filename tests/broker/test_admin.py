"""Administration of groups on a driven broker: counts, seek, delete, dead letters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.groups import lag
from qmq.broker.ports.commands import Administer, Disconnected, Unsubscribe
from qmq.broker.ports.effects import Administered, Effect, Refused, Unsubscribed
from qmq.errors import Fenced, InvalidOption, UnknownGroup
from qmq.net.protocol.types import Disposition
from tests.broker.delay.test_delay import delay
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, killed


def ask(driven: Driven, action: str, **fields: Any) -> dict[str, Any]:
    """Return the broker's answer. Raises the error of a refusal."""
    command = Administer(99, driven.request(), action, fields)
    said = driven.do_whole(command)
    return answered([effect for effect in said if getattr(effect, "request", None) == command.request])


def answered(answers: list[Effect]) -> dict[str, Any]:
    (answer,) = answers
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Administered)
    return answer.fields


def group_row(driven: Driven) -> dict[str, Any]:
    (row,) = ask(driven, "groups", group="g")["rows"]
    return {str(name): value for name, value in row.items()}


def counts(driven: Driven) -> tuple[int, int, int, int]:
    """Return how many messages are ready, in flight, in retry and dead."""
    row = group_row(driven)
    return row["ready"], row["in_flight"], row["in_retry"], row["dead"]


def filled(tmp_path: Path, *, partitions: int = 1, messages: int = 10) -> Driven:
    driven = Driven(tmp_path, partitions=partitions)
    for number in range(messages):
        driven.do(driven.send_command({f"a.{number % 3}": [b"%d" % number], "b": [b"b"]}, connection=number % 2))
    return driven


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("prefixes", [("a.",), ("a.0", "a.1", "a.2"), ("a.0", "a."), ("a.", "a.1")])
def test_every_message_is_in_one_place(tmp_path: Path, prefixes: tuple[str, ...], partitions: int) -> None:
    driven = filled(tmp_path, partitions=partitions)
    consumer = Consumer(driven, "one", *prefixes)
    assert counts(driven) == (10, 0, 0, 0)
    got = consumer.pull(4)
    while len(got) < 4:
        got += consumer.pull(4 - len(got))
    assert counts(driven) == (6, 4, 0, 0)
    consumer.ack(0)
    consumer.back(1, 2, Disposition.NACK, delay_us=1_000_000)
    consumer.back(2, 3, Disposition.REJECT)
    assert counts(driven) == (6, 1, 1, 1)
    driven.do(driven.send_command({"a.9": [b"new"]}))
    assert counts(driven)[0] == 6 + ("a." in prefixes)


def test_a_group_that_began_at_the_end_has_nothing_ready(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    assert counts(driven)[0] == 10
    ask(driven, "seek_group", group="g", to="new")
    assert counts(driven) == (0, 0, 0, 0)
    driven.do(driven.send_command({"a.1": [b"new"]}))
    assert counts(driven)[0] == 1
    consumer.join()
    assert consumer.pull() == [b"new"]
    assert counts(driven) == (0, 1, 0, 0)


def test_the_oldest_is_that_of_what_is_ready(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    times = []
    for number in range(4):
        driven.advance(1_000)
        driven.do(driven.send_command({"b": [b"no"]}))
        driven.advance(1_000)
        driven.do(driven.send_command({f"a.{number % 2}": [b"%d" % number]}))
        times.append(driven.store.last_stored_at_us)
    consumer = Consumer(driven, "one", "a.")
    for time_us in times:
        assert group_row(driven)["oldest_us"] == time_us
        assert len(consumer.pull(1)) == 1
    assert group_row(driven)["oldest_us"] is None


@pytest.mark.parametrize("prefixes", [("a.",), ("a.0", "a.")])
def test_subjects_with_messages_that_wait_are_listed(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    """It says from which sequence on no consumer had a message, and changes nothing."""
    driven = filled(tmp_path)  # a.0 has four messages, a.1 and a.2 three each
    consumer = Consumer(driven, "one", *prefixes)
    consumer.pull(5)
    before = group_row(driven)
    found = ask(driven, "waiting", group="g")
    assert found["after"] is None
    rows = {row["subject"]: (row["start"], row["end"]) for row in found["rows"]}
    assert {subject for subject in rows if not subject.startswith("a.")} == set()
    assert sum(end - start for start, end in rows.values()) == 5 == before["ready"]
    assert {end for _, end in rows.values()} <= {3, 4}
    assert group_row(driven) == before
    consumer.pull(10)
    assert ask(driven, "waiting", group="g") == {"rows": [], "after": None}
    with pytest.raises(UnknownGroup):
        ask(driven, "waiting", group="other")


def test_consumers_are_listed_by_name_with_what_they_hold(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    two, one = Consumer(driven, "two", "a."), Consumer(driven, "one", "a.", connection=2)
    two.pull(3)
    rows = ask(driven, "consumers", group="g")["rows"]
    assert [(row["consumer"], row["online"], row["in_flight"]) for row in rows] == [("one", True, 0), ("two", True, 3)]
    assert rows[0]["pulled_us"] is rows[0]["in_flight_since_us"] is None
    assert rows[1]["pulled_us"] == rows[1]["in_flight_since_us"] == driven.now.wall_us
    driven.advance(2_000)
    assert ask(driven, "consumers", group="g")["rows"][0]["silent_us"] >= 2_000_000
    assert [row["consumer"] for row in ask(driven, "consumers", group="g", after="one")["rows"]] == ["two"]
    assert one.consumer_state.consumer != two.consumer_state.consumer


@pytest.mark.parametrize(("to", "again"), [("first", 10), ("new", 0)])
def test_a_seek_drops_what_is_held_and_refuses_late_acks(tmp_path: Path, to: str, again: int) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(4)
    ask(driven, "seek_group", group="g", to=to)
    assert counts(driven) == (again, 0, 0, 0)
    with pytest.raises(Fenced):
        consumer.ack(0)
    with pytest.raises(Fenced):
        consumer.back(1, 2, Disposition.NACK)
    with pytest.raises(Fenced):
        consumer.pull()
    assert counts(driven) == (again, 0, 0, 0)
    consumer.join()
    assert len(consumer.pull()) == again


def test_a_seek_to_a_time_begins_there(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for number in range(4):
        driven.advance(1_000)
        driven.do(driven.send_command({"a.x": [b"%d" % number]}))
        if number == 1:
            middle_us = driven.store.last_stored_at_us + 1
    consumer = Consumer(driven, "one", "a.")
    consumer.pull()
    ask(driven, "seek_group", group="g", to=["time", middle_us])
    consumer.join()
    assert consumer.pull() == [b"2", b"3"]


@pytest.mark.parametrize("clears", [False, True])
def test_a_seek_keeps_retries_unless_told_otherwise(tmp_path: Path, clears: bool) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(4)
    consumer.back(1, 2, Disposition.NACK, delay_us=0)
    consumer.back(2, 3, Disposition.NACK, delay_us=60_000_000)
    consumer.back(3, 4, Disposition.REJECT)
    ask(driven, "seek_group", group="g", to="new", clear_retries=clears)
    assert counts(driven) == (0, 0, 0 if clears else 2, 1)
    consumer.join()
    assert len(consumer.pull()) == (0 if clears else 1)


def test_a_deleted_group_is_gone_with_all_it_had(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(4)
    consumer.back(1, 2, Disposition.NACK)
    consumer.back(2, 3, Disposition.REJECT)
    ask(driven, "delete_group", group="g")
    for action in ("groups", "consumers", "dead_letters", "delete_group"):
        with pytest.raises(UnknownGroup, match="'g'"):
            ask(driven, action, group="g")
    assert ask(driven, "groups")["rows"] == []
    for late in (lambda: consumer.ack(0), consumer.pull, lambda: consumer.back(0, 1)):
        with pytest.raises(UnknownGroup, match="'g' was deleted"):
            late()
    consumer.join()
    assert (len(consumer.pull()), counts(driven)) == (10, (0, 10, 0, 0))
    assert isinstance(driven.do(Unsubscribe(1, driven.request(), consumer.subscription))[0], Unsubscribed)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_made_anew_is_another_one(tmp_path: Path, restarts: bool) -> None:
    """Else acks for messages of the old group would count for messages of the new one."""
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    before = consumer.consumer_state
    ask(driven, "delete_group", group="g")
    if restarts:
        driven.restart()
    driven.advance(1)
    consumer.join()
    assert consumer.consumer_state.since_us > before.since_us


def test_a_pull_that_waits_for_a_deleted_group_ends_with_an_error(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    waiting = driven.pull_command(consumer.subscription, 10, connection=1, timeout_ms=60_000)
    assert driven.do(waiting) == []
    effects = driven.do(Administer(99, driven.request(), "delete_group", {"group": "g"}))
    (refused,) = [effect for effect in effects if getattr(effect, "request", None) == waiting.request]
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, UnknownGroup)


def test_dead_letters_are_listed_handed_out_again_and_deleted(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(10)
    for number in range(5):
        consumer.back(number, number + 1, Disposition.REJECT)
    page = ask(driven, "dead_letters", group="g", limit=3)
    assert [row["reason"] for row in page["rows"]] == ["broke"] * 3
    rest = ask(driven, "dead_letters", group="g", limit=3, after=page["after"])
    assert [row["number"] for row in [*page["rows"], *rest["rows"]]] == [1, 2, 3, 4, 5]
    assert rest["after"] is None
    rows = [*page["rows"], *rest["rows"]]
    assert len({row["id"] for row in rows}) == 5
    assert {row["subject"] for row in rows} == {"a.0", "a.1", "a.2"}
    assert ask(driven, "redrive", group="g", numbers=[rows[0]["number"], rows[3]["number"]]) == {"messages": 2}
    assert counts(driven) == (0, 5, 2, 3)
    assert len(consumer.pull()) == 2
    assert [consumer.got[number][1] for number in (10, 11)] == [1, 1]  # as if for the first time
    assert ask(driven, "delete_dead", group="g", numbers=[rows[1]["number"]]) == {"messages": 1}
    assert ask(driven, "delete_dead", group="g") == {"messages": 2}
    assert counts(driven) == (0, 7, 0, 0)


def test_dead_letters_that_go_while_they_are_listed_are_not_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(10)
    for number in range(5):
        consumer.back(number, number + 1, Disposition.REJECT)
    monkeypatch.setattr("qmq.broker.work_queue.TURN_WORK", 1)  # a letter in each turn
    listing = Administer(99, driven.request(), "dead_letters", {"group": "g"})
    said = driven.do(listing)
    for number in (1, 5):
        assert said == []
        said = driven.do(Administer(98, driven.request(), "delete_dead", {"group": "g", "numbers": [number]}))
        said = [effect for effect in said if getattr(effect, "request", None) == listing.request]
    while not said:
        driven.broker.tick(driven.now)
        said = driven.effects()
    (answer,) = said
    assert isinstance(answer, Administered)
    assert [row["number"] for row in answer.fields["rows"]] == [2, 3, 4]
    assert answer.fields["messages"] == 3


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("nonsense", {}),
        ("seek_group", {"group": "g", "to": "nowhere"}),
        ("seek_group", {"group": "g", "to": ["time"]}),
        ("seek_group", {"group": "g", "to": ["time", "x"]}),
        ("seek_group", {"group": "g", "to": ["sequence", -1]}),
        ("seek_group", {"group": "g", "to": 7}),
        ("seek_group", {"group": "g"}),
        ("groups", {"after": 7}),
        ("consumers", {"group": "g", "after": 7}),
        ("dead_letters", {"group": "g", "after": "x"}),
        ("dead_letters", {"group": "g", "limit": None}),
        ("dead_letters", {"group": "g", "limit": -1}),
        ("redrive", {"group": "g", "numbers": "all"}),
        ("redrive", {"group": "g", "numbers": [True]}),
        ("set_group", {"group": "g"}),
        ("set_group", {"group": "g", "settings": {"colour": 1}}),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, action: str, fields: dict[str, Any]) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(4)
    with pytest.raises(InvalidOption):
        ask(driven, action, **fields)
    assert counts(driven) == (6, 4, 0, 0)
    consumer.ack(0, 1, 2, 3)


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_the_last_pull_is_known_after_a_start(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = filled(tmp_path, messages=2)
    consumer = Consumer(driven, "one")
    consumer.pull(1)
    consumer.ack()
    pulled_us = driven.now.wall_us
    driven.advance(5_000)
    stop(driven)
    assert ask(driven, "consumers", group="g")["rows"][0]["pulled_us"] == pulled_us
    driven.close()


def test_a_dead_letter_that_was_delayed_has_the_id_of_its_receipt(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    consumer = Consumer(driven, "one")
    names = delay(driven, "a", 1_000_000, 1_000_000)
    driven.advance(2_000)
    assert len(consumer.pull()) == 2
    consumer.back(1, 2, Disposition.REJECT)
    (row,) = ask(driven, "dead_letters", group="g")["rows"]
    assert row["id"] == names[1]
    driven.close()


def test_what_a_client_tells_late_counts_while_the_consumer_is_what_it_was(tmp_path: Path) -> None:
    driven = filled(tmp_path, messages=4)
    consumer = Consumer(driven, "one", transient=True)
    consumer.pull(4)
    consumer_state = consumer.consumer_state
    late = {
        "group": "g",
        "consumer": "one",
        "since_us": consumer_state.since_us,
        "generation": consumer_state.generation,
    }
    for wrong in ({"since_us": 1}, {"generation": 9}, {"consumer": "two"}):
        assert ask(driven, "handled", **late | wrong, handled=[0, 4]) == {"taken": False}
    assert counts(driven)[1] == 4
    driven.do(Disconnected(1))
    killed(driven)
    for _ in range(2):
        assert ask(driven, "handled", **late, handled=[0, 1, 2, 99]) == {"taken": True}
    assert counts(driven)[1:3] == (1, 0)
    driven.advance(60_000)
    assert counts(driven)[1:3] == (0, 1), "it has expired"
    assert ask(driven, "handled", **late, handled=[1, 2]) == {"taken": False}
    assert counts(driven)[1:3] == (0, 1)
    for handled in ([1], ["x", "y"], [-1, 2], None):
        with pytest.raises(InvalidOption):
            ask(driven, "handled", **late, handled=handled)
    driven.close()


def test_where_subjects_are_too_many_to_look_up_ready_is_at_least_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = filled(tmp_path)
    driven.advance(1_000)
    consumer = Consumer(driven, "one", start=("time", driven.now.wall_us))
    assert (group_row(driven)["ready"], group_row(driven)["ready_exact"]) == (0, True)
    for number in range(3):
        driven.send(f"a.{number}", b"late")
    assert (group_row(driven)["ready"], group_row(driven)["ready_exact"]) == (3, True)
    monkeypatch.setattr(lag, "MOST_LOOKED_UP", 2)
    row = group_row(driven)
    assert row["ready"] < 3
    assert not row["ready_exact"]
    assert consumer.pull() == [b"late"] * 3
    driven.send("a.1", b"more")
    assert group_row(driven)["ready"] <= 1
    driven.close()


def test_a_consumer_whose_connection_is_gone_leaves_by_its_nonce(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "one")
    held = consumer.pull(4)
    with pytest.raises(InvalidOption, match="nonce"):
        ask(driven, "leave", group="g", consumer="one")
    with pytest.raises(UnknownGroup):
        ask(driven, "leave", group="another", consumer="one", nonce=consumer.nonce)
    assert not ask(driven, "leave", group="g", consumer="two", nonce=consumer.nonce)["left"]
    assert not ask(driven, "leave", group="g", consumer="one", nonce=b"another")["left"]
    assert counts(driven)[1] == 4
    assert ask(driven, "leave", group="g", consumer="one", nonce=consumer.nonce)["left"]
    assert counts(driven)[1] == 0
    assert not ask(driven, "leave", group="g", consumer="one", nonce=consumer.nonce)["left"]
    assert Consumer(driven, "two").pull() == held
    driven.close()
