"""qmq/broker/delivery/order/blocked.py: which slots hold messages up, behind which message, since when and why."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import pytest

from qmq.broker.delivery.order.blocked import MOST_BLOCKED, blocked_by, counts
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered
from qmq.format.build import MessageHeader, RunContent, make_header
from qmq.format.ids import MessageId
from qmq.format.layout import LANE_ORDERED
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.test_order import Slots, numbers_of, texts
from tests.broker.test_admin import ask
from tests.fake_disk import FakeDisk

SECOND_US = 1_000_000


class Keys(Slots):
    """A broker with messages whose headers have their order keys, and the ids of these."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.ids: dict[str, str] = {}

    def put(self, *keys: str, subject: str = "a.b") -> list[str]:
        sent = []
        for key in keys:
            body = f"{key} {self.numbers[key]}"
            self.numbers[key] += 1
            run = RunContent(subject, [body.encode()], [make_header(order_key=key)], LANE_ORDERED | ord(key))
            receipt = self.send_runs(run)
            self.ids[body] = str(MessageId(self.store.store_id, receipt.partition, receipt.position))
            sent.append(body)
        return sent

    def rows(self, action: str, **fields: object) -> list[dict[str, Any]]:
        (said,) = self.do(Administer(1, self.request(), action, fields))
        assert isinstance(said, Administered)
        found: list[dict[str, Any]] = said.fields["rows"]
        return found

    def blocked(self, key: str) -> dict[str, Any]:
        """Return the row of a key's slot, where the group is asked for."""
        (row,) = [one for one in self.rows("groups", group="g")[0]["blocked"] if one["slot"] == ord(key)]
        return row

    def reason(self, key: str) -> str:
        """Return why new messages of a key wait."""
        number = self.store.subjects.lanes_of("a.b")[LANE_ORDERED | ord(key)]
        return blocked_by(self.store, self.broker.groups["g"], number)


@pytest.mark.parametrize("prefix", ["a.", "a.b", ""])
@pytest.mark.parametrize("clean", [None, True, False])
def test_a_slot_names_the_message_that_is_in_flight(tmp_path: Path, prefix: str, clean: bool | None) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", prefix)
    driven.put("k", "l", "k", "k")
    since_us = driven.now.wall_us
    assert texts(driven.take(one, 2)) == ["k 0", "l 0"]
    if clean is not None:
        driven.advance(100)
        if clean:
            driven.restart()
        else:
            driven.store.close(clean=False)
            driven.open()
    assert driven.rows("groups", group="g")[0]["blocked"] == [
        {
            "subject": "a.b", "slot": ord("k"), "waiting": 2, "waiting_subjects": ("a.b",), "reason": "in_flight",
            "consumer": "one", "since_us": since_us, "due_us": None, "attempts": 1, "failure": "",
            "message_id": driven.ids["k 0"], "order_key": "k",
        }
    ]  # fmt: skip
    assert {row["consumer"]: row["order_slots"] for row in driven.rows("consumers", group="g")} == {"one": 2}
    name = f"an earlier message of order key 'k' (slot 107, {driven.ids['k 0']})"
    assert driven.reason("k") == f"consumer one has {name} in flight since {_text(since_us)}"
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "a.b", ""])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_slot_names_the_retry_and_when_it_is_due(tmp_path: Path, prefix: str, restarts: bool) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", prefix)
    driven.put("k", "l", "k")
    driven.back(one, numbers_of(driven.take(one, 1))[0], delay_us=0)
    taken = driven.take(one, 1)
    assert texts(taken) == ["k 0"], "its second attempt"
    driven.advance(50)
    failed_us, due_us = driven.now.wall_us, driven.now.wall_us + 5 * SECOND_US
    driven.back(one, numbers_of(taken)[0], delay_us=5 * SECOND_US)
    if restarts:
        driven.restart()
    row = driven.blocked("k")
    assert row == {
        "subject": "a.b", "slot": ord("k"), "waiting": 1, "waiting_subjects": ("a.b",), "reason": "retrying",
        "consumer": None, "since_us": failed_us, "due_us": due_us, "attempts": 2, "failure": "it broke",
        "message_id": driven.ids["k 0"], "order_key": "k",
    }  # fmt: skip
    name = f"an earlier message of order key 'k' (slot 107, {driven.ids['k 0']})"
    assert driven.reason("k") == f"{name} is to be delivered again first, due {_text(due_us)}: it broke"
    driven.advance(5_000)
    one, found = driven.join("one", prefix), list[str]()
    while some := texts(taken := driven.take(one)):
        found += some
        driven.ack(one, *numbers_of(taken))
    assert [body for body in found if body[0] == "k"] == ["k 0", "k 1"]
    assert driven.reason("k") == ""
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "a.b", ""])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_retries_of_one_pull_are_told_apart(tmp_path: Path, prefix: str, order: str) -> None:
    driven, count = Keys(tmp_path), 100
    one = driven.join("one", prefix)
    for _ in range(2):
        runs = [
            RunContent("a.b", [b"x"], [make_header(order_key=f"k-{slot}")], LANE_ORDERED | slot)
            for slot in range(count)
        ]
        driven.send_runs(*runs)
    numbers = numbers_of(driven.take(one, count))
    assert len(numbers) == count
    sent_at = dict(zip(numbers, range(count), strict=True))  # all of them are of one batch
    for number in numbers if order == "ascending" else numbers[::-1]:
        driven.back(one, number, delay_us=(1 + sent_at[number]) * SECOND_US)
    rows = driven.rows("groups", group="g")[0]["blocked"]
    assert len(rows) == MOST_BLOCKED
    for row in rows:
        assert row["order_key"] == f"k-{row['slot']}"
        assert row["due_us"] == driven.now.wall_us + (1 + row["slot"]) * SECOND_US
    driven.close()


def test_the_first_message_in_flight_counts(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.")
    driven.put("k", "k", "k", "k")
    first = driven.take(one, 2)
    assert texts(first) == ["k 0", "k 1"]
    driven.advance(10)
    since_us = driven.now.wall_us
    second = driven.take(one, 1)
    assert texts(second) == ["k 2"]
    assert driven.blocked("k")["message_id"] == driven.ids["k 0"]
    driven.ack(one, numbers_of(first)[0])
    assert driven.blocked("k")["message_id"] == driven.ids["k 1"]
    driven.ack(one, numbers_of(first)[1])
    row = driven.blocked("k")
    assert (row["message_id"], row["since_us"]) == (driven.ids["k 2"], since_us)
    driven.ack(one, *numbers_of(second))
    assert driven.rows("groups", group="g")[0]["blocked"] == []
    driven.close()


def test_a_release_holds_its_slot_up_without_a_failed_attempt(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.")
    driven.put("k", "k")
    driven.back(one, numbers_of(driven.take(one, 1))[0], Disposition.RELEASE, SECOND_US)
    assert (driven.blocked("k")["reason"], driven.blocked("k")["attempts"]) == ("retrying", 0)
    driven.close()


def test_a_list_of_all_groups_reads_no_messages(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", "a."), driven.join("two", "a.")
    driven.put("k", "l", "k", "l")
    driven.back(one, numbers_of(driven.take(one, 1))[0], delay_us=SECOND_US)
    since_us = driven.now.wall_us
    assert texts(driven.take(two, 1)) == ["l 0"]
    shown = [(row["slot"], row["since_us"], row["due_us"], row["message_id"], row["order_key"])
             for row in driven.rows("groups")[0]["blocked"]]  # fmt: skip
    assert shown == [(ord("k"), None, None, None, None), (ord("l"), since_us, None, None, None)]
    assert counts(driven.store, driven.broker.groups["g"]) == (2, 1, 2)
    driven.close()


def test_the_longest_blocked_come_first_and_not_more_than_some(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.b", max_unacked=1_000)
    keys = [chr(ord("A") + number) for number in range(MOST_BLOCKED + 5)]
    driven.put(*keys)
    driven.put(*keys)
    for _ in keys:
        driven.advance(1)
        assert len(texts(driven.take(one, 1))) == 1
    rows = driven.rows("groups", group="g")[0]["blocked"]
    times = [row["since_us"] for row in rows]
    assert len(rows) == MOST_BLOCKED
    assert times == sorted(times)
    assert [row["order_key"] for row in rows] == keys[:MOST_BLOCKED]
    driven.close()


@pytest.mark.parametrize("prefixes", [("a.",), ("a.b", "a.c")])
def test_what_lies_before_the_start_of_a_group_does_not_wait(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    driven = Keys(tmp_path)
    consumer = driven.join("c", *prefixes)
    driven.put("k")
    driven.put("k", "k", "k", subject="a.c")
    (first,) = numbers_of(driven.take(consumer, 1))
    driven.back(consumer, first, delay_us=SECOND_US)
    ask(driven, "seek_group", group="g", to=["sequence", 2])
    assert texts(driven.take(driven.join("c", *prefixes))) == []
    assert counts(driven.store, driven.broker.groups["g"]) == (1, 1, 1)
    driven.put("k", "k")
    assert driven.blocked("k")["waiting"] == 2, "the last of each subject"
    driven.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_message_that_is_not_in_memory_is_read_beside_the_turns(tmp_path: Path, fails: bool) -> None:
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Keys(tmp_path, disk=disk)
    one = driven.join("one", "a.")
    driven.put("k", "k")
    if fails:
        driven.back(one, numbers_of(driven.take(one, 1))[0], delay_us=SECOND_US)
    else:
        driven.take(one, 1)
    disk.forget()
    driven.auto_read = False
    command = Administer(1, driven.request(), "groups", {"group": "g"})
    assert driven.do(command) == [], "it waits for a read"
    said = []
    while driven.reads:
        said += driven.read()
    (answer,) = said
    assert isinstance(answer, Administered)
    assert answer.fields["rows"][0]["blocked"][0]["order_key"] == "k"
    driven.auto_read = True
    driven.close()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [({}, None), ({"o": []}, None), ({"o": [7]}, None), (["o"], None), ({"o": ["x" * 9_000]}, 1_024)],
)
def test_a_header_of_another_client_costs_only_its_order_key(tmp_path: Path, fields: object, shown: int | None) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.")
    header = MessageHeader(bytes(msgpack.packb(fields)), 0, 0, 0, 0, False, LANE_ORDERED | ord("k"))
    for _ in range(2):
        driven.send_runs(RunContent("a.b", [b"x"], [header], LANE_ORDERED | ord("k")))
    driven.take(one, 1)
    row = driven.blocked("k")
    assert (row["reason"], row["consumer"], row["waiting"]) == ("in_flight", "one", 1)
    assert row["message_id"] is not None
    assert row["order_key"] == (None if shown is None else "x" * shown)
    assert driven.reason("k").startswith("consumer one has an earlier message of ")
    driven.store.close(clean=True)


def _text(time_us: int) -> str:
    at = datetime.fromtimestamp(time_us / SECOND_US, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"
