"""Groups that begin, follow anew or are moved back while a segment is about to go: what is ready for a group is handed
out, whether the segment goes or stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.retention import retention
from qmq.format.layout import LANE_HIGH, LANE_NORMAL, LANE_ORDERED
from tests.broker.harness import Driven
from tests.broker.retention.test_retention import HOUR_MS, driven_in, numbers, settle
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, killed

COUNT = 20
LIMITS = BrokerLimits(retention_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS)
STOPS = pytest.mark.parametrize("stop", [lambda driven: None, killed, Driven.restart], ids=["goes on", "kill", "stop"])


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are looked at, and then moved, one in a turn: meanwhile others go on."""
    monkeypatch.setattr(retention, "TURN_WORK", 1)


def old(path: Path, *before: str, lane: int = LANE_NORMAL) -> Driven:
    """Return a broker with old messages of the subjects *before*, and then of a.0 and b.0 in turns; groups "holder" and
    "other" took all.
    """
    driven = driven_in(path, LIMITS)
    for subject in before:
        driven.do(driven.send_command({subject: [body(COUNT)]}, lane=lane))
    fill(driven)
    for name in ("holder", "other"):  # the latter is moved first
        consumer = Consumer(driven, name, "", group=name)
        assert len(consumer.pull(100) + consumer.pull(100)) == COUNT + len(before)
        consumer.ack()
    return driven


def fill(driven: Driven) -> None:
    for number in range(COUNT):
        driven.send(f"{'ab'[number % 2]}.0", body(number))


def body(number: int) -> bytes:
    return (b"%d " % number).ljust(900, b".")


def look(driven: Driven) -> None:
    """Go on until all groups were looked at, and the first segment is about to be chosen."""
    driven.checkpoint()
    driven.advance(HOUR_MS)
    looking = driven.broker._retention
    while looking._dropping is None or looking._dropping.groups:
        driven.advance(1)
    assert not looking._dropping.is_chosen


def choose(driven: Driven) -> None:
    """Have the segment that was looked at chosen; groups are moved behind it from now on."""
    dropping = driven.broker._retention._dropping
    assert dropping is not None
    while not dropping.is_chosen:
        driven.advance(1)
    assert driven.broker._retention._dropping is dropping


def stay(driven: Driven, holder: str = "holder") -> None:
    """Have the segment stay, since a group was moved back after it was looked at."""
    while driven.broker._retention._dropping is not None:
        driven.checkpoint()
        driven.advance(1)
    assert driven.broker.retention_holders() == [holder]


def follow(driven: Driven, *prefixes: str) -> None:
    ask(driven, "set_group", group="g", follows=list(prefixes))


def taken(driven: Driven) -> list[int]:
    """Return what group "g" gets; nothing may be ready after that."""
    consumer = Consumer(driven, "new", "", group="g", nonce=b"new", asks="look")
    found = list[int]()
    while some := numbers(consumer.pull(COUNT)):
        found += some
        consumer.ack(*consumer.got)
        consumer.got.clear()
    assert next(row for row in ask(driven, "groups", group="g")["rows"])["ready"] == 0
    return found


@STOPS
def test_what_a_group_does_not_follow_meanwhile_comes_once_it_follows_it_again(
    tmp_path: Path, stop: Callable[[Driven], None]
) -> None:
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "a.", "b.", group="g")
    follow(driven, "a.")
    assert len(consumer.pull(COUNT)) == COUNT // 2
    consumer.ack()
    look(driven)
    ask(driven, "seek_group", group="holder", to="first")
    stay(driven)
    stop(driven)
    follow(driven, "a.", "b.")
    assert taken(driven) == list(range(1, COUNT, 2))
    driven.close()


@STOPS
@pytest.mark.parametrize("prefixes", [("",), ("b.",), ("b.0",), ("a.0", "b.")])
def test_a_group_that_begins_meanwhile_gets_what_stays(
    tmp_path: Path, prefixes: tuple[str, ...], stop: Callable[[Driven], None]
) -> None:
    driven = old(tmp_path)
    look(driven)
    ask(driven, "seek_group", group="holder", to="first")
    choose(driven)
    Consumer(driven, "c", *prefixes, group="g")
    stay(driven)
    stop(driven)
    assert sorted(taken(driven)) == [number for number in range(COUNT) if number % 2 or "b" not in prefixes[0]]
    driven.close()


@STOPS
def test_a_group_that_is_sought_back_meanwhile_gets_what_stays(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "b.", group="g")
    assert len(consumer.pull(COUNT)) == COUNT // 2
    consumer.ack()
    look(driven)
    ask(driven, "seek_group", group="holder", to="first")
    choose(driven)
    ask(driven, "seek_group", group="g", to="first")
    stay(driven)
    stop(driven)
    assert taken(driven) == list(range(1, COUNT, 2))
    driven.close()


@pytest.mark.parametrize("lane", [LANE_NORMAL, LANE_HIGH, LANE_ORDERED | 7])
def test_a_pull_that_waits_gets_what_stays(tmp_path: Path, lane: int) -> None:
    driven = old(tmp_path, "c.0", lane=lane)
    look(driven)
    ask(driven, "seek_group", group="holder", to="first")
    choose(driven)
    consumer = Consumer(driven, "c", "c.", group="g")
    command = driven.pull_command(consumer.subscription, timeout_ms=60_000)
    assert driven.do(command) == []
    driven.advance(1)
    assert driven.broker._retention._dropping is None
    (answer,) = driven.do()
    assert numbers(consumer.take([answer])) == [COUNT]
    driven.close()


@STOPS
@pytest.mark.parametrize("start", ["new", "time"])
@pytest.mark.parametrize("prefix", ["", "b."])
@pytest.mark.parametrize("stays", [False, True])
def test_a_group_that_begins_meanwhile_at_a_time_gets_nothing_from_before(
    tmp_path: Path, prefix: str, start: str, stays: bool, stop: Callable[[Driven], None]
) -> None:
    driven = old(tmp_path)
    at = driven.store.partitions[0].consumer_log.read_entry(4)[2] if start == "time" else 0
    look(driven)
    if stays:
        ask(driven, "seek_group", group="holder", to="first")
    choose(driven)
    Consumer(driven, "c", prefix, group="g", start=("time", at) if at else "new")
    if stays:
        stay(driven)
    stop(driven)
    if start == "new":
        assert taken(driven) == []
    else:
        assert not {0, 1, 2, 3} & set(found := taken(driven))
        assert found[-1] == COUNT - 1
        assert not stays or len(found) == len([number for number in range(4, COUNT) if number % 2 or not prefix])
    driven.send("b.0", body(COUNT))
    assert taken(driven) == [COUNT]
    driven.close()


@STOPS
@pytest.mark.parametrize("moved_before", [False, True])
def test_a_segment_stays_for_a_group_that_follows_its_messages_again_meanwhile(
    tmp_path: Path, moved_before: bool, stop: Callable[[Driven], None]
) -> None:
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "a.", "b.", group="g")
    follow(driven, "a.")
    assert len(consumer.pull(COUNT)) == COUNT // 2
    consumer.ack()
    look(driven)
    choose(driven)
    dropping = driven.broker._retention._dropping
    assert dropping is not None
    while moved_before and not dropping.is_ready:
        driven.advance(1)
    follow(driven, "a.", "b.")
    if not moved_before:
        stop(driven)
    assert settle(driven, rounds=3) == []
    assert driven.broker.retention_holders() == ["g"]
    assert taken(driven) == list(range(1, COUNT, 2))
    driven.close()


@pytest.mark.parametrize("prefix", ["b.", "b.0"])
def test_a_group_gets_what_it_has_not_taken_until_it_is_moved(tmp_path: Path, prefix: str) -> None:
    driven = driven_in(tmp_path, LIMITS._replace(retention_max_ms=HOUR_MS))
    consumer = Consumer(driven, "c", prefix, group="g")
    other = Consumer(driven, "c", "c.", group="other")  # this one is moved first
    fill(driven)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    looking = driven.broker._retention
    while looking._dropping is None:
        driven.advance(1)
    assert looking._dropping.is_chosen
    assert [group.name for group in looking._dropping.groups] == ["g", "other"]
    assert numbers(consumer.pull(2)) == [1, 3]
    consumer.ack()
    gone = settle(driven)
    assert other.pull() == []
    assert sum(one.skipped.get("g", 0) for one in gone) == sum(one.messages for one in gone) // 2 - 2
    driven.close()


def test_what_a_group_follows_again_too_late_is_counted_as_missed(tmp_path: Path) -> None:
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "a.", "b.", group="g")
    follow(driven, "a.")
    assert len(consumer.pull(COUNT)) == COUNT // 2
    consumer.ack()
    driven.broker.set_retention(0, HOUR_MS, 0, needs_archive=False)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    looking = driven.broker._retention
    while looking._dropping is None or not looking._dropping.is_ready:
        driven.advance(1)
    follow(driven, "a.", "b.")
    gone = settle(driven)
    left = taken(driven)
    assert left == list(range(left[0], COUNT, 2))
    assert sum(one.skipped["g"] for one in gone if one.skipped) == COUNT // 2 - len(left) > 0
    driven.close()


@pytest.mark.parametrize("follows", [("a.", "b."), ("a.", "b.", "")])
def test_what_a_group_follows_again_and_gives_out_too_late_is_carried_forward(
    tmp_path: Path, follows: tuple[str, ...]
) -> None:
    """The walk over what refers to the segment has ended, and then a consumer is given messages of it."""
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "a.", "b.", group="g")
    follow(driven, "a.")
    assert len(consumer.pull(COUNT)) == COUNT // 2
    consumer.ack()
    driven.broker.set_retention(0, HOUR_MS, 0, needs_archive=False)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    looking = driven.broker._retention
    while looking._dropping is None or not looking._dropping.is_ready:
        driven.advance(1)
    follow(driven, *follows)
    given = consumer.pull(2)
    assert numbers(given) == [1, 3]
    assert sum(dropped.carried for dropped in settle(driven)) == 2
    consumer.back(COUNT // 2, COUNT // 2 + 2, delay_us=0)
    assert consumer.pull(2) == given
    driven.close()


def test_what_begins_earlier_with_a_wider_prefix_is_counted_as_missed(tmp_path: Path) -> None:
    driven = old(tmp_path)
    Consumer(driven, "c", "b.0", group="g", start=("sequence", COUNT))
    driven.broker.set_retention(0, HOUR_MS, 0, needs_archive=False)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    looking = driven.broker._retention
    while looking._dropping is None or not looking._dropping.is_ready:
        driven.advance(1)
    (following,) = driven.broker.groups["g"].filters.values()
    follow(driven, "b.", "b.0")
    assert following.start.kind == "first"
    gone = settle(driven)
    left = taken(driven)
    assert sum(dropped.skipped["g"] for dropped in gone if dropped.skipped) == COUNT // 2 - len(left) > 0
    driven.close()


@STOPS
def test_a_subject_that_gets_another_lane_loses_nothing_of_what_stayed(
    tmp_path: Path, stop: Callable[[Driven], None]
) -> None:
    """A group that does not heed priorities reads the rows of all lanes from then on."""
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "b.0", group="g", mode="broadcast", start=("sequence", 0))
    assert len(consumer.pull(COUNT)) == COUNT // 2
    consumer.ack()
    look(driven)
    ask(driven, "seek_group", group="g@c", to="first")
    stay(driven, "g@c")
    stop(driven)
    driven.do(driven.send_command({"b.0": [body(COUNT)]}, lane=LANE_HIGH))
    consumer = Consumer(driven, "c", "b.0", group="g", mode="broadcast", nonce=b"new")
    found = list[int]()
    while some := numbers(consumer.pull(COUNT)):
        found += some
    assert found == [*range(1, COUNT, 2), COUNT]
    driven.close()


def test_a_subject_that_gets_its_second_lane_meanwhile_reads_no_rows_that_have_gone(tmp_path: Path) -> None:
    """A filter of one subject reads rows from then on, and the group had been moved past these before."""
    driven = old(tmp_path)
    consumer = Consumer(driven, "c", "a.0", group="exact", mode="broadcast", start="first")
    assert len(consumer.pull(100)) == COUNT // 2
    consumer.ack()
    look(driven)
    choose(driven)
    dropping = driven.broker._retention._dropping
    assert dropping is not None
    while dropping.groups:
        driven.advance(1)
    driven.do(driven.send_command({"a.0": [b"high"]}, lane=LANE_HIGH))
    assert ask(driven, "groups", group="exact@c")["rows"][0]["ready"] == 1  # it looks for lanes
    while not driven.store.partitions[0].consumer_log.first_row:
        driven.checkpoint()
        driven.advance(1)
    first = driven.store.partitions[0].consumer_log.first_row
    (base,) = driven.broker.groups["exact@c"].filters.values()
    assert base.row_cursors[0] >= first
    assert ask(driven, "groups", group="exact@c")["rows"][0]["ready"] == 1
    assert consumer.pull(100) == [b"high"]
    driven.close()
