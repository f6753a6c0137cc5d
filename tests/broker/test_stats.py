"""qmq/broker/stats.py on a driven broker: counts since the start, sums of subjects, rows of groups and their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker import stats
from qmq.broker.groups.counts import COUNT_NAMES
from qmq.broker.ports.commands import Administer, Subscribe, Unsubscribe
from qmq.broker.ports.effects import Administered, StatsWanted, Subscribed
from qmq.errors import InvalidOption
from qmq.format.layout import LANE_ORDERED
from qmq.format.private import private_subject
from qmq.net.protocol.types import AT_MOST_ONCE, Disposition
from tests.broker.delay.test_delay import delay
from tests.broker.harness import Driven
from tests.broker.test_admin import ask
from tests.broker.test_cold_reads import cold
from tests.broker.test_consuming import Consumer, killed


def first_page(driven: Driven, **fields: Any) -> dict[str, Any]:
    """Return what the broker gives the daemon for the first answer."""
    (wanted,) = driven.do_whole(Administer(99, driven.request(), "stats", fields))
    assert isinstance(wanted, StatsWanted)
    return wanted.fields


def row(driven: Driven, group: str = "g") -> dict[str, Any]:
    """Return the row of a group, as a further page has it."""
    found = ask(driven, "stats", after="!")
    rows = [dict(zip(found["columns"], one, strict=True)) for one in found["groups"]]
    (wanted,) = [one for one in rows if one["group"] == group]
    return wanted


def families(driven: Driven) -> dict[str, tuple[int, int, int]]:
    return {name: (subjects, stored, received) for name, subjects, stored, received in first_page(driven)["families"]}


def test_subjects_are_summed_by_the_first_part_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "MOST_FAMILIES", 2)
    driven = Driven(tmp_path)
    assert families(driven) == {stats.OTHERS: (0, 0, 0)}
    driven.do(driven.send_command({"shop.order.a": [b"1", b"2"], "shop.mail": [b"3"], "shop": [b"4"], "log": [b"5"]}))
    driven.do(driven.send_command({"third.a": [b"6"], "fourth": [b"7", b"8"]}))
    assert families(driven) == {stats.OTHERS: (2, 3, 3), "shop": (3, 4, 4), "log": (1, 1, 1)}
    driven.restart()
    driven.do(driven.send_command({"shop.new": [b"9"], "shop.mail": [b"10"], "fifth": [b"11"]}))
    assert families(driven) == {stats.OTHERS: (3, 4, 1), "shop": (4, 6, 2), "log": (1, 1, 0)}


def test_messages_of_one_group_alone_are_in_no_sum(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"shop.order": [b"x"]}))
    number = driven.store.add_subject(private_subject("g", "shop.order"))
    driven.store.subjects.ends[number] += 1
    assert families(driven) == {stats.OTHERS: (0, 0, 0), "shop": (1, 1, 1)}


def test_gaps_do_not_count_as_messages(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a": [b"1", b"2"]}))
    (number,) = driven.store.subjects.numbers_of("a")
    driven.store.subjects.ends[number] += 10
    driven.store.subjects.skip_sequences(number, 2, 10)
    assert families(driven)["a"][:2] == (1, 2)
    Consumer(driven, "one", "a")
    assert row(driven)["ready"] == 2


def test_the_counts_of_a_group_are_of_what_happened(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"%d" % number for number in range(8)]}))
    consumer = Consumer(driven, "one", "a.", max_attempts=2)
    assert consumer.pull(6)
    consumer.ack(0, 1)
    consumer.back(2, 3, Disposition.NACK, 0)
    consumer.back(3, 4, Disposition.REJECT)
    consumer.back(4, 5, Disposition.RELEASE, 1_000_000_000)
    assert consumer.pull(1) == [b"2"]
    consumer.back(6, 7, Disposition.NACK, 0)  # its last attempt
    found = row(driven)
    assert {name: found[name] for name in COUNT_NAMES} == {
        "delivered": 6, "redelivered": 1, "acked": 2, "nacked": 2, "rejected": 1, "released": 1, "expired": 0,
        "session_expired": 0, "died": 2,
    }  # fmt: skip
    assert (found["ready"], found["in_flight"], found["in_retry"], found["dead"]) == (2, 1, 1, 2)
    driven.restart()
    found = row(driven)
    assert [found[name] for name in COUNT_NAMES] == [0] * len(COUNT_NAMES)
    assert (found["ready"], found["in_flight"], found["in_retry"], found["dead"]) == (2, 1, 1, 2)


def test_a_kill_begins_the_counts_anew(tmp_path: Path) -> None:
    """All that a start replays from the pull log happened before."""
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"1", b"2"]}))
    consumer = Consumer(driven, "one", "a.")
    consumer.pull(2)
    consumer.ack(0)
    killed(driven)
    found = row(driven)
    assert [found[name] for name in COUNT_NAMES] == [0] * len(COUNT_NAMES)
    assert found["in_flight"] == 1


@pytest.mark.parametrize("is_retry", [False, True])
def test_an_expired_message_is_not_a_rejected_one(tmp_path: Path, is_retry: bool) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a": [b"1"]}))
    consumer = Consumer(driven, "one", "a", expire_after_us=1_000_000)
    if is_retry:
        consumer.pull()
        consumer.back(0, 1, Disposition.NACK, 0)
    driven.advance(2_000)
    assert consumer.pull() == []
    found = row(driven)
    assert (found["expired"], found["rejected"], found["died"], found["dead"]) == (1, 0, 1, 1)


def test_the_oldest_is_ready_or_in_flight(tmp_path: Path) -> None:
    driven, times = Driven(tmp_path), list[int]()
    for body in (b"1", b"2", b"3"):
        driven.advance(1_000)
        driven.do(driven.send_command({"a.x": [body]}))
        times.append(driven.store.last_stored_at_us)
    consumer = Consumer(driven, "one", "a.")
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_flight_since_us"]) == (times[0], None)
    driven.advance(1_000)
    consumer.pull(2)
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_flight_since_us"]) == (times[0], driven.now.wall_us)
    consumer.ack(0)
    assert row(driven)["oldest_unacked_us"] == times[1]
    consumer.ack(1)
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_flight_since_us"]) == (times[2], None)
    consumer.pull(1)
    consumer.ack(2)
    assert row(driven)["oldest_unacked_us"] is None


@pytest.mark.parametrize("prefix", ["a.", "a.x"])
def test_the_oldest_may_be_in_retry(tmp_path: Path, prefix: str) -> None:
    driven, times = Driven(tmp_path), list[int]()
    for body in (b"1", b"2", b"3", b"4"):
        driven.advance(1_000)
        driven.do(driven.send_command({"a.x": [body]}))
        times.append(driven.store.last_stored_at_us)
    consumer = Consumer(driven, "one", prefix)
    assert row(driven)["in_retry_oldest_us"] is None
    consumer.pull(3)
    consumer.back(1, 2, Disposition.NACK, 60_000_000)
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_retry_oldest_us"]) == (times[0], times[1])
    driven.advance(1_000)
    consumer.back(0, 1, Disposition.NACK, 0)
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_retry_oldest_us"]) == (times[0], times[0])
    assert consumer.pull(1) == [b"1"]
    consumer.ack(3)
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_retry_oldest_us"]) == (times[1], times[1])
    driven.restart()
    assert (row(driven)["oldest_unacked_us"], row(driven)["in_retry_oldest_us"]) == (times[1], times[1])
    ask(driven, "seek_group", group="g", to="new", clear_retries=True)
    assert row(driven)["in_retry_oldest_us"] is None


def test_a_row_that_stays_the_same_is_true_now(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"1"]}))
    stored_us = driven.store.last_stored_at_us
    Consumer(driven, "one", "a.")
    for _ in range(3):
        driven.advance(60_000)
        found = row(driven)
        assert (found["at_us"], found["oldest_unacked_us"]) == (driven.now.wall_us, stored_us)


def test_what_came_back_untried_has_not_failed(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"1", b"2", b"3", b"4"]}))
    consumer, other = Consumer(driven, "one", "a."), Consumer(driven, "two", "a.")
    consumer.pull(3)
    other.pull(1)
    consumer.back(0, 1, Disposition.RELEASE, 0)
    consumer.back(1, 2, Disposition.NACK, 60_000_000)

    def counts() -> tuple[int, int]:
        found = row(driven)
        return found["in_retry"], found["returned"]

    assert counts() == (2, 1)
    assert row(driven)["retry_due_us"] is None, "the released one is due"
    driven.advance(31_000)
    assert counts() == (4, 3), "messages of consumers that fell silent have not failed"
    driven.restart()
    assert counts() == (4, 3)
    killed(driven)
    consumer = Consumer(driven, "three", "a.")
    while counts()[1]:
        assert consumer.pull()
        consumer.ack(*list(consumer.got)[-1:])
    assert counts() == (1, 0)
    assert row(driven)["retry_due_us"] > driven.now.wall_us
    killed(driven)
    assert counts() == (1, 0)
    driven.advance(60_000)
    consumer.join()
    consumer.pull()
    consumer.back(consumer.expected - 1, consumer.expected, Disposition.RELEASE, 0)
    assert counts() == (1, 0), "it has failed before"


def test_a_row_says_how_long_consumers_take(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"%d" % number for number in range(9)]}))
    consumer = Consumer(driven, "one", "a.")
    assert (row(driven)["held_us"], row(driven)["held_since_us"], row(driven)["last_pull_us"]) == (None, None, None)
    for number in range(3):
        consumer.pull(1)
        taken_us = driven.now.wall_us
        driven.advance(3_000)
        found = row(driven)
        assert (found["held_since_us"], found["last_pull_us"]) == (taken_us, taken_us)
        consumer.ack(number)
        assert (row(driven)["held_us"], row(driven)["held_since_us"]) == (3_000_000, None)
    consumer.pull(4)
    driven.advance(1_000)
    consumer.ack(4)
    assert row(driven)["held_since_us"] == driven.now.wall_us, "it has handled one of them"
    driven.advance(1_000)
    consumer.ack(3, 5, 6)
    assert row(driven)["held_us"] == 2_000_000, "some of them may have been handled at once"
    consumer.pull(1)
    driven.advance(9_000)
    consumer.back(7, 8, Disposition.RELEASE, 0)
    assert row(driven)["held_us"] == 2_000_000, "nobody has handled what is released"


def test_a_row_counts_the_attempts_that_failed_of_late(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"%d" % number for number in range(9)]}))
    consumer = Consumer(driven, "one", "a.")

    def lately() -> tuple[int, int]:
        found = row(driven)
        return found["failed_lately"], found["acked_lately"]

    consumer.pull(6)
    consumer.ack(0)
    assert lately() == (0, 0)
    consumer.back(1, 2, Disposition.NACK, 600_000_000)
    driven.advance(10)
    consumer.back(2, 3, Disposition.REJECT)
    consumer.back(3, 4, Disposition.RELEASE, 600_000_000)
    assert lately() == (2, 0)
    consumer.ack(4, 5)
    assert lately() == (2, 2)
    driven.advance(61_000)
    assert lately() == (0, 0)
    killed(driven)
    assert lately() == (0, 0)


def test_a_row_counts_the_sessions_that_ended_with_one_message(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"poison"]}))

    def crashes() -> tuple[int, int]:
        found = row(driven)
        return found["crashes"], found["crashed_messages"]

    for number in range(3):
        consumer = Consumer(driven, f"crashes-{number}", "a.")
        assert consumer.pull() == [b"poison"]
        assert crashes()[0] == number
        driven.advance(31_000)
        assert crashes() == (number + 1, 1)
    driven.advance(700_000)
    assert crashes() == (0, 0), "that is long ago"


def test_readers_of_an_at_most_once_group_are_consumers(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a.x": [b"1"]}))
    joined = Subscribe(1, driven.request(), "g", ("a.",), "one", None, b"n", b"c", False, (), AT_MOST_ONCE)
    (answer,) = [one for one in driven.do(joined) if isinstance(one, Subscribed)]
    assert row(driven)["consumers"] == ask(driven, "groups")["rows"][0]["consumers"] == 1
    driven.do(Unsubscribe(1, driven.request(), answer.subscription))
    assert row(driven)["consumers"] == ask(driven, "groups")["rows"][0]["consumers"] == 0


def test_of_very_many_retries_some_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "MOST_RETRIES", 4)
    driven, times = Driven(tmp_path), set[int]()
    for number in range(12):
        driven.advance(10)
        driven.do(driven.send_command({f"a.{number}": [b"x"]}))
        times.add(driven.store.last_stored_at_us)
    consumer = Consumer(driven, "one", *(f"a.{number}" for number in range(12)))
    consumer.pull()
    for number in range(12):
        consumer.back(number, number + 1, Disposition.NACK, 60_000_000 + number)
    found = row(driven)
    assert found["in_retry"] == 12
    assert found["in_retry_oldest_us"] in times


@pytest.mark.parametrize("prefixes", [("a.",), ("a.0",), ("a.0", "a."), ("",)])
@pytest.mark.parametrize("partitions", [1, 3])
def test_what_is_ready_is_right_after_every_event(tmp_path: Path, partitions: int, prefixes: tuple[str, ...]) -> None:
    """A row is kept while nothing has changed; every change shows at once."""
    driven = Driven(tmp_path, partitions=partitions)

    def agrees() -> int:
        (expected,) = ask(driven, "groups", group="g")["rows"]
        found = row(driven)
        same = "ready", "ready_exact", "in_flight", "in_retry", "dead", "delayed", "skipped", "filtered"
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
        return int(found["ready"])

    for number in range(9):
        driven.do(driven.send_command({f"a.{number % 3}": [b"x"], "b": [b"y"]}, connection=number % 2))
    consumer = Consumer(driven, "one", *prefixes)
    before = agrees()
    assert agrees() == before  # from what is kept
    driven.do(driven.send_command({"a.0": [b"new"]}))
    assert agrees() == before + 1
    consumer.pull(2)
    assert agrees() == before - 1
    driven.do(driven.send_command({"a.new": [b"new"]}))
    agrees()
    ask(driven, "seek_group", group="g", to="first")
    agrees()
    ask(driven, "seek_group", group="g", to="new")
    assert agrees() == 0
    consumer.join()
    ask(driven, "set_group", group="g", follows=["b"])
    agrees()


def test_delayed_messages_count_for_every_group_that_will_get_them(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    Consumer(driven, "one", "a.", group="g")
    Consumer(driven, "two", "", group="all", connection=2)
    Consumer(driven, "three", "a.x", group="exact", connection=3)
    Consumer(driven, "four", "a.x.", group="deeper", connection=4)
    delay(driven, "a.x", 60_000_000)
    found = {group: row(driven, group)["delayed"] for group in ("g", "all", "exact", "deeper")}
    assert found == {"g": 1, "all": 1, "exact": 1, "deeper": 0}
    assert first_page(driven)["delayed"] == 1


def test_a_deleted_group_leaves_its_counts(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a": [b"1", b"2"]}))
    consumer = Consumer(driven, "one", "a")
    consumer.pull()
    consumer.ack()
    assert row(driven)["acked"] == 2
    ask(driven, "delete_group", group="g")
    page = first_page(driven)
    assert page["groups"] == []
    ended = dict(zip(COUNT_NAMES, page["ended"], strict=True))
    assert (ended["delivered"], ended["acked"]) == (2, 2)


def test_groups_come_in_pages_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({f"a.{number}": [b"x"] for number in range(4)}))
    names = [f"g{number}" for number in range(7)]
    for number, name in enumerate(names):
        Consumer(driven, "one", "a.", f"a.{number}", group=name, connection=number)

    def pages(**fields: Any) -> list[list[str]]:
        page, found = first_page(driven, **fields), list[list[str]]()
        while True:
            found.append([one[0] for one in page["groups"]])
            if page["after"] is None:
                return found
            page = ask(driven, "stats", after=page["after"], **fields)

    assert pages(limit=3) == [names[:3], names[3:6], names[6:]]
    assert pages() == [names]
    for number in range(4):
        driven.do(driven.send_command({f"a.{number}": [b"y"]}))
    monkeypatch.setattr(stats, "MOST_WORK", 500)  # for two or three rows that are made anew
    found = pages()
    assert [name for page in found for name in page] == names
    assert len(found) > 1


def test_where_very_many_groups_change_a_row_may_be_some_seconds_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "MOST_MADE_A_SECOND", 2)
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a": [b"x"]}))
    for number in range(10):
        Consumer(driven, "one", "a", group=f"g{number}", connection=number)

    def ready() -> set[int]:
        page = first_page(driven)
        column = page["columns"].index("ready")
        return {one[column] for one in page["groups"]}

    assert ready() == {1}
    driven.do(driven.send_command({"a": [b"y"]}))
    assert ready() == {2}  # how many change all the time is not known yet
    driven.do(driven.send_command({"a": [b"z"]}))
    assert ready() == {2}
    assert row(driven, "g3")["at_us"] == driven.now.wall_us
    driven.advance(4_000)
    assert ready() == {2}
    assert row(driven, "g3")["at_us"] == driven.now.wall_us - 4_000_000
    driven.advance(1_000)
    assert ready() == {3}


def test_a_look_takes_no_memory_for_subjects_that_a_group_had_nothing_of(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({f"a.{number}": [b"x"] for number in range(100)}))
    Consumer(driven, "one", "a.")
    assert row(driven)["ready"] == 100
    cursors = driven.broker.groups["g"].cursors
    assert (len(cursors.column), cursors.few) == (0, {})


def test_wrong_fields_are_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for fields in ({"after": 1}, {"limit": "many"}, {"limit": None}):
        with pytest.raises(InvalidOption, match="stats takes"):
            ask(driven, "stats", **fields)
    assert isinstance(
        driven.do(Administer(99, driven.request(), "stats", {"after": "a", "limit": -5}))[0], Administered
    )


@pytest.mark.parametrize("prefix", ["a.", "a.x", ""])
def test_what_waits_for_an_order_key_is_counted(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    for lane in (LANE_ORDERED, LANE_ORDERED | 7) * 3:
        driven.do(driven.send_command({"a.x": [b"x"]}, lane=lane))
    one, two = Consumer(driven, "one", prefix), Consumer(driven, "two", prefix)

    def counted() -> list[int]:
        return [row(driven)[name] for name in ("ready", "blocked", "blocked_slots", "blocked_retrying")]

    assert counted() == [6, 0, 0, 0]
    one.pull(1)
    assert counted() == [5, 2, 1, 0]
    two.pull(1)
    assert counted() == [4, 4, 2, 0]
    one.back(0, 1, Disposition.NACK, 60_000_000)
    assert counted() == [4, 4, 2, 1]
    two.ack(0)
    assert counted() == [4, 2, 1, 1]
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "a.x"])
def test_the_oldest_message_is_known_also_where_its_row_has_to_be_read(tmp_path: Path, prefix: str) -> None:
    """Else no alert would tell of a group that is dead since before the broker's start."""
    driven, disk, _ = cold(tmp_path, messages=100)
    driven.auto_read = True
    driven.subscribe(prefix)
    stored_us = row(driven)["oldest_unacked_us"]
    driven.advance(1_000)
    driven.restart()
    disk.forget()
    driven.auto_read = False
    seen = row(driven)
    assert (seen["ready"], seen["oldest_unacked_us"]) == (100, stored_us)
    driven.auto_read = True
