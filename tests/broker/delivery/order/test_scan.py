"""The choice of new messages with order keys."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from qmq.broker.delivery.order.scan import OrderedScan
from qmq.broker.groups.message_ranges import Rows
from qmq.format.build import RunContent
from qmq.format.layout import LANE_HIGH, LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW, ORDER_SLOTS
from qmq.storage.store import Store
from tests.broker.delivery.order.test_order import Slots, numbers_of, texts
from tests.broker.test_admin import ask


@pytest.mark.parametrize("clean", [True, False])
def test_slots_whose_messages_were_handed_out_leave_room_for_others(tmp_path: Path, clean: bool) -> None:
    """After a start, a scan reads again from the first message that is left: the slots of those behind it are done."""
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    assert texts(driven.take(one)) == ["k 0"]
    driven.put("k", "l", "m")
    for _ in range(2):
        answer = driven.take(two)
        driven.ack(two, *numbers_of(answer))
    if clean:
        driven.restart()
    else:
        driven.store.close(clean=False)
        driven.open()
    two = driven.join("two")
    driven.put("n")
    assert texts(driven.take(two)) == ["n 0"]
    driven.close()


def test_a_pull_that_begins_with_lower_ranks_gets_its_part_of_the_slots_once(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one", priority_share=0.5), driven.join("two")
    for number in range(4):
        driven.do(driven.send_command({"a.b": [b"high %d" % number]}, lane=LANE_HIGH))
        assert texts(driven.take(one, 1)) == [f"high {number}"]
    driven.put("k", "l", "m", "n")
    assert texts(driven.take(one)) == ["k 0", "l 0"]
    assert texts(driven.take(two)) == ["m 0", "n 0"]
    driven.close()


def test_slots_without_messages_of_a_priority_take_no_room_of_others(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one", priority_share=0)
    driven.join("two")
    driven.put("b", kind=LANE_ORDERED_HIGH)
    driven.put("a")
    driven.put("c", kind=LANE_ORDERED_LOW)
    assert texts(driven.take(one)) == ["b 0", "a 0"], "its part is two of three"
    driven.close()


def test_slots_that_a_consumer_has_already_take_no_room(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one", priority_share=0.5)
    driven.join("two")
    driven.put("k")
    assert texts(driven.take(one)) == ["k 0"]
    for number in range(4):
        driven.do(driven.send_command({"a.b": [b"high %d" % number]}, lane=LANE_HIGH))
        assert texts(driven.take(one, 1)) == [f"high {number}"]
    driven.put("k", "l", "m", "n")
    assert texts(driven.take(one)) == ["k 1", "l 0"], "one beside its own"
    driven.close()


def test_consumers_of_many_slots_get_them_in_few_ranges(tmp_path: Path) -> None:
    """Slots that lie side by side in each batch go to one consumer, also after many pulls."""
    driven = Slots(tmp_path)
    consumers = [driven.join(f"c{number}") for number in range(4)]
    chance = random.Random(1)
    for _ in range(60):
        slots = sorted(chance.sample(range(ORDER_SLOTS), 400))
        driven.send_runs(*(RunContent("a.b", [b"%d" % slot], None, LANE_ORDERED | slot) for slot in slots))
    counts, left = list[int](), 60 * 400
    for turn in range(1_000):
        if not left:
            break
        who = consumers[turn % 4]
        answer = driven.take(who, 1_500)
        left -= len(numbers_of(answer))
        if answer.ranges:
            ledger = driven.broker.groups["g"].ledger
            assert ledger is not None
            counts.append(len(ledger.by_name[who.name].in_flight.pulls[-1].ranges))
        driven.ack(who, *numbers_of(answer))
    assert not left
    assert np.median(counts) < 40, "about one range of each batch that was looked at"
    driven.close()


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param("bdefgha", "b 0,d 0,e 0,a 0", id="the others lie in the longest stretch"),
        pytest.param("habdefg", "h 0,e 0,f 0,g 0", id="a stretch is cut, not without the first"),
        pytest.param("efgabdh", "e 0,f 0,g 0,h 0", id="a stretch is cut behind what has room"),
    ],
)
def test_a_consumer_gets_the_slot_that_waits_longest_and_stretches_of_others(
    tmp_path: Path, waiting: str, expected: str
) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("c")
    assert texts(driven.take(one)) == ["c 0"]
    driven.put(*waiting)
    assert ",".join(texts(driven.take(two))) == expected
    driven.close()


def test_a_pull_for_few_messages_gets_those_that_wait_longest(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    driven.join("one")
    two = driven.join("two")
    driven.put(*"hagbfced")
    assert texts(driven.take(two, 1)) == ["h 0"]
    assert texts(driven.take(two, 3)) == ["a 0", "g 0", "b 0"]
    driven.close()


def test_what_another_consumer_has_is_not_passed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgotten rows are read again, and those between them were handed out meanwhile."""
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 4)
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("m")
    first = driven.take(two)
    driven.put(*"mkmkmkmkmkmk")
    assert texts(driven.take(one)) == [f"k {number}" for number in range(6)]
    scan = driven.broker.groups["g"].scan
    assert isinstance(scan, OrderedScan)
    assert scan.has_more()
    driven.ack(two, *numbers_of(first))
    assert texts(driven.take(two)) == [f"m {number}" for number in range(1, 7)]
    scan = driven.broker.groups["g"].scan
    assert isinstance(scan, OrderedScan)
    assert not scan.has_more()
    driven.close()


def test_a_slot_that_is_looked_up_by_its_subjects_begins_where_the_group_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than are looked up in one go lie before the start: they were read again and again."""
    for name, value in (("MOST_PASSED", 4), ("AGAIN_ROWS", 0), ("_SLOT_ROWS", 2)):
        monkeypatch.setattr(f"qmq.broker.delivery.order.scan.{name}", value)
    look_up, looks = Store.subject_rows, list[int]()

    def counted(store: Store, number: int, sequence: int, limit: int) -> list[tuple[int, Rows]]:
        looks.append(number)
        assert len(looks) < 100
        return look_up(store, number, sequence, limit)

    monkeypatch.setattr(Store, "subject_rows", counted)
    driven = Slots(tmp_path)
    driven.put("k")
    consumer = driven.join("c")
    (first,) = numbers_of(driven.take(consumer))
    driven.back(consumer, first, delay_us=100_000)
    for subject in ("a.c", "a.d") * 2:
        driven.put(*"kkkkkk", subject=subject)
    ask(driven, "seek_group", group="g", to=["sequence", 10])
    consumer = driven.join("c")
    assert texts(driven.take(consumer)) == []
    driven.advance(200)
    again = driven.take(consumer)
    assert texts(again) == ["k 0"]
    driven.ack(consumer, *numbers_of(again))
    assert texts(driven.take(consumer)) == ["k 17", "k 18", "k 23", "k 24"]
    assert 0 < len(looks) < 8, "nothing before the start"
    driven.close()
