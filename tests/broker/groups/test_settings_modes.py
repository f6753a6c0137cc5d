"""The modes of groups: which fit together, and how broadcasts and their members live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker.ports.commands import Administer, Subscribe, Unsubscribe
from qmq.broker.ports.effects import Administered, Refused
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import GroupMismatch, InvalidOption, UnknownGroup
from qmq.net.protocol.types import MODES
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, killed, many

DAY_MS = 86_400_000


def ask(driven: Driven, action: str, **fields: Any) -> dict[str, Any]:
    (answer,) = driven.do(Administer(1, driven.request(), action, fields))
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Administered)
    return answer.fields


def names(driven: Driven) -> list[tuple[str, str]]:
    return [(row["group"], row["mode"]) for row in ask(driven, "groups")["rows"]]


def refused(driven: Driven, mode: Any, group: str | None = "g") -> Exception | None:
    (answer,) = driven.do(Subscribe(1, driven.request(), group, ("",), "c", None, mode=mode))
    return answer.error if isinstance(answer, Refused) else None


@pytest.mark.parametrize("stop", [killed, None])
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_a_group_has_one_mode_for_good(tmp_path: Path, first: str, second: str, stop: Any) -> None:
    driven = filled(tmp_path, 1)
    assert refused(driven, first) is None
    if stop is not None:
        stop(driven)
    error = refused(driven, second)
    assert (error is None) is (first == second)
    if error is not None:
        assert isinstance(error, GroupMismatch)
        assert f"'g' is {first}" in str(error)
    ask(driven, "delete_group", group="g")
    assert refused(driven, second) is None
    driven.close()


@pytest.mark.parametrize("mode", ["often", "", None, 3, ["reliable"]])
def test_an_unknown_mode_is_refused(tmp_path: Path, mode: Any) -> None:
    driven = filled(tmp_path, 1)
    assert isinstance(refused(driven, mode), InvalidOption)
    assert isinstance(refused(driven, "broadcast", None), InvalidOption)
    assert names(driven) == []
    driven.close()


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_each_member_of_a_broadcast_gets_all_messages_since_it_joined(tmp_path: Path, stop: Any) -> None:
    driven = filled(tmp_path, 3)
    one = Consumer(driven, "one", mode="broadcast")
    driven.send("a.x", b"new")
    two = Consumer(driven, "two", connection=2, mode="broadcast")
    driven.send("a.x", b"newer")
    assert (one.pull(), two.pull()) == ([b"new", b"newer"], [b"newer"])
    assert names(driven) == [("g@one", "broadcast"), ("g@two", "broadcast")]
    one.ack()
    driven.do(Unsubscribe(2, driven.request(), two.subscription))
    stop(driven)
    driven.send("a.x", b"newest")
    one.join()
    two.join()
    assert (one.pull(), two.pull(), two.pull()) == ([b"newest"], [b"newer"], [b"newest"])
    driven.close()


def test_a_broadcast_is_changed_as_a_whole_and_a_member_alone(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    one, two = (
        Consumer(driven, name, connection=n, mode="broadcast") for n, name in enumerate(("one", "two"), start=1)
    )
    ask(driven, "set_group", group="g", settings={"max_attempts": 5})
    ask(driven, "set_group", group="g@two", settings={"max_session_expiries": 7})
    rows = ask(driven, "groups")["rows"]
    assert [(row["settings"]["max_attempts"], row["settings"]["max_session_expiries"]) for row in rows] == [
        (5, 3),
        (5, 7),
    ]
    ask(driven, "seek_group", group="g", to="first")
    one.join()
    two.join()
    assert (one.pull(), two.pull()) == (many(3), many(3))
    ask(driven, "delete_group", group="g@one")
    assert names(driven) == [("g@two", "broadcast")]
    ask(driven, "delete_group", group="g")
    with pytest.raises(UnknownGroup):
        ask(driven, "delete_group", group="g")
    assert names(driven) == []
    driven.close()


@pytest.mark.parametrize("stop", [Driven.restart, killed, None])
def test_a_member_that_is_away_for_a_week_is_deleted(tmp_path: Path, stop: Any) -> None:
    driven = filled(tmp_path, 1, BrokerLimits(session_timeout_ms=30_000))
    for number, name in enumerate(("away", "expired", "there"), start=1):
        Consumer(driven, name, connection=number, mode="broadcast")
    gone = Consumer(driven, "gone", connection=4, mode="broadcast", transient=True)
    driven.do(Unsubscribe(1, driven.request(), 1), Unsubscribe(4, driven.request(), gone.subscription))
    driven.advance(0)
    assert [name for name, _ in names(driven)] == ["g@away", "g@expired", "g@there"]
    driven.advance(60_000)  # the sessions of the others expire
    if stop is not None:
        stop(driven)
    there = Consumer(driven, "there", connection=3, mode="broadcast")
    driven.send("a.x", b"new")
    assert there.pull() == [b"new"]
    driven.advance(7 * DAY_MS - 60_001)
    assert len(names(driven)) == 3
    driven.advance(1)
    assert [name for name, _ in names(driven)] == ["g@expired", "g@there"]
    driven.advance(60_000)
    assert [name for name, _ in names(driven)] == ["g@there"]
    there.join()
    assert there.pull() == [b"new"]
    driven.close()


def test_members_that_end_together_are_deleted_a_few_at_a_time(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    for number in range(1, 41):
        member = Consumer(driven, f"c{number}", connection=number, mode="broadcast")
        driven.do(Unsubscribe(number, driven.request(), member.subscription))
    driven.now = driven.now._replace(wall_us=driven.now.wall_us + 7 * DAY_MS * 1_000)
    left = [len(driven.broker.groups)]
    deadline_us = driven.now.monotonic_us
    while deadline_us == driven.now.monotonic_us:  # the next tick is due at once
        deadline_us = driven.broker.tick(driven.now) or 0
        left.append(len(driven.broker.groups))
    assert left == [40, 24, 8, 0]
    driven.close()


@pytest.mark.parametrize("stop", [Driven.restart, killed, None])
def test_a_killed_member_with_a_made_up_id_is_deleted_after_a_few_session_timeouts(tmp_path: Path, stop: Any) -> None:
    driven = filled(tmp_path, 1, BrokerLimits(session_timeout_ms=30_000))
    _, made_up = (
        Consumer(driven, f"made-up-{number}", connection=number, mode="broadcast", transient=True) for number in (1, 2)
    )
    driven.send("a.x", b"new")
    assert made_up.pull() == [b"new"]
    if stop is not None:
        stop(driven)
    driven.advance(30_000)  # their sessions have expired
    if stop is not None:
        stop(driven)
    driven.advance(60_000)
    assert len(names(driven)) == 2
    made_up.join()  # its connection was lost for a while
    assert made_up.pull() == [b"new"]
    driven.advance(29_999)
    assert len(names(driven)) == 2
    driven.advance(1)
    assert [name for name, _ in names(driven)] == ["g@made-up-2"]
    driven.advance(89_999)  # its session has expired again
    assert len(names(driven)) == 1
    driven.advance(1)
    assert names(driven) == []
    driven.close()


def test_a_member_with_a_made_up_id_stays_after_a_seek(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    made_up = Consumer(driven, "made-up", mode="broadcast", transient=True)
    ask(driven, "seek_group", group="g", to="first")
    driven.advance(1_000)
    made_up.join()
    assert made_up.pull() == many(3)
    driven.do(Unsubscribe(1, driven.request(), made_up.subscription))
    driven.advance(0)
    assert names(driven) == []
    driven.close()


def test_the_time_of_a_member_counts_from_its_last_leave(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    for _ in range(5):
        member = Consumer(driven, "one", mode="broadcast")
        driven.do(Unsubscribe(1, driven.request(), member.subscription))
        driven.advance(2 * DAY_MS)
    driven.advance(5 * DAY_MS - 1)
    assert len(names(driven)) == 1
    driven.advance(1)
    assert names(driven) == []
    assert driven.broker.tick(driven.now) is None
    driven.close()


def test_there_is_no_deadline_without_broadcasts(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    assert driven.broker.tick(driven.now) is None
    consumer = Consumer(driven, "one", mode="broadcast")
    ask(driven, "delete_group", group="g")
    del consumer
    driven.advance(60_000)
    assert driven.broker.tick(driven.now) is None
    driven.close()
