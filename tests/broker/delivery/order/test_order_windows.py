"""Windows full of one slot's messages, many slots and subjects, and two keys in one slot."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.format.build import RunContent, make_header
from qmq.format.layout import LANE_ORDERED
from tests.broker.delivery.order.slots import Keys, bodies_after, numbers_of, texts


def test_a_window_full_of_a_slot_holds_up_the_slot_only(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", max_unacked=3)
    driven.put(*["k"] * 5, "l")
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2"]
    assert texts(driven.take(one)) == [], "its window is full"
    two = driven.join("two")
    assert texts(driven.take(two)) == ["l 0"]
    driven.ack(one, 0)
    assert texts(driven.take(two)) == [], "the rest is for the consumer that has the slot"
    assert texts(driven.take(one)) == ["k 3"]
    driven.ack(one, 1, 2, 3)
    assert texts(driven.take(two)) == ["k 4"]
    driven.close()


def test_a_full_window_is_opened_by_a_nack_and_the_first_comes_again(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", max_unacked=2), driven.join("two")
    driven.put(*["k"] * 4)
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    assert driven.wait(two) == []
    driven.back(one, 1, delay_us=300_000)
    driven.ack(one, 0)
    assert texts(driven.take(one)) == []
    driven.alive(one, two)
    said = driven.advance(400) + driven.do()
    assert bodies_after(said, two) == ["k 1"]
    driven.ack(two, 0)
    assert driven.drain(one, two) == ["k 2", "k 3"]
    driven.close()


def test_a_prefix_over_many_subjects_keeps_the_order_in_each(tmp_path: Path) -> None:
    driven = Keys(tmp_path, partitions=3)
    sessions = [driven.join(f"c{number}", "a.") for number in range(3)]
    sent = dict[str, list[str]]()
    for number in range(40):
        driven.numbers.clear()
        driven.numbers["k"] = 10 * number
        sent[f"a.{number}"] = driven.put("k", "k", "k", subject=f"a.{number}")
    found = driven.drain(*sessions, most=7)
    assert len(found) == 120
    for bodies in sent.values():
        assert [body for body in found if body in bodies] == bodies
    driven.close()


def test_two_keys_in_one_slot_wait_for_each_other_only(tmp_path: Path) -> None:
    lanes, keys = dict[int, str](), list[str]()
    for key in (f"key-{number}" for number in range(10_000)):
        lane = make_header(order_key=key).lane
        if lane in lanes:
            keys = [lanes[lane], key]
            break
        lanes[lane] = key
    free = next(key for key in lanes.values() if key not in keys)
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    for key in (*keys, free, keys[0]):
        header = make_header(order_key=key)
        driven.send_runs(RunContent("a.b", [key.encode()], [header], header.lane))
    assert texts(driven.take(one, 1)) == [keys[0]]
    assert texts(driven.take(two)) == [free]
    driven.ack(one, 0)
    answer = driven.take(two)
    assert texts(answer) == [keys[1], keys[0]]
    driven.ack(two, *numbers_of(answer))
    driven.close()


def test_all_4096_slots_are_shared_and_each_stays_in_order(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", max_unacked=20_000), driven.join("two")
    for turn in range(2):
        for start in range(0, 4_096, 1_024):
            driven.do(
                *(
                    driven.send_command({"a.b": [b"%d %d" % (slot, turn)]}, flush=False, lane=LANE_ORDERED | slot)
                    for slot in range(start, start + 1_024)
                )
            )
    first = driven.take(one)
    mine = texts(first)
    assert len({body.split()[0] for body in mine}) == 2_048, "half of the slots"
    driven.ack(one, *numbers_of(first))
    found = mine + driven.drain(one, two)
    assert len(found) == len(set(found)) == 8_192
    place = {body: at for at, body in enumerate(found)}
    assert all(place[f"{slot} 0"] < place[f"{slot} 1"] for slot in range(4_096))
    driven.close()


@pytest.mark.parametrize("stops", ["restart", "kill"])
def test_more_rows_than_are_remembered_are_found_again_after_a_start(
    tmp_path: Path, stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 10)
    driven = Keys(tmp_path, partitions=3)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "m")
    assert texts(driven.take(one, 2)) in (["k 0"], ["k 0", "m 0"])
    for _ in range(15):
        driven.put("k", "l", "m")
    found = [body for body in driven.drain(two) if body[0] != "l"]
    getattr(driven, stops)()
    one, two = driven.rejoin(one, two)
    driven.put("k", "l", "m")
    seen = driven.drain(two)
    assert "l 15" in seen
    found += [body for body in seen if body[0] != "l"]
    driven.leave(one)
    found += driven.drain(two)
    for key in "km":
        assert [body for body in found if body[0] == key] == [
            f"{key} {number}" for number in range(driven.numbers[key])
        ]
    driven.close()
