"""Retries and new messages of several ranks: the highest rank first, both in turn, and the share of lower ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.format.layout import LANE_ORDERED
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.test_order import Slots, texts
from tests.broker.groups.test_priorities import Lanes, numbered


def failed(driven: Lanes, subscription: int, *sent: str) -> None:
    """Send these and nack each of them, so that all are due at once."""
    driven.put(*sent)
    for _ in sent:
        driven.nack(subscription, driven.take(subscription, 1), delay_us=100_000)
    driven.advance(100)


def test_a_retry_that_another_consumer_must_have_holds_no_lower_rank_back(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one", priority_share=0), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    driven.back(one, 1, Disposition.NACK, 0)
    driven.do(driven.send_command({"a.b": [b"low 0"]}, lane=2))
    assert texts(driven.take(two)) == ["low 0"]
    driven.close()


def test_nothing_is_saved_up_for_low_ones_before_there_are_any(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.1)
    driven.put("high 0")
    assert driven.got(subscription) == ["high 0"]
    driven.put_batch("normal", 200)
    for count in (100, 10):
        assert len(driven.got(subscription, count)) == count
    driven.put_batch("low", 50)
    assert sum(body.startswith("low") for body in driven.got(subscription, 20)) <= 2
    driven.close()


@pytest.mark.parametrize("lower", ["new", "retries"])
@pytest.mark.parametrize("higher", ["new", "retries"])
@pytest.mark.parametrize("ranks", [("high", "normal"), ("high", "low"), ("normal", "low")])
@pytest.mark.parametrize("most", [1, 5])
def test_a_lower_rank_gets_its_share_of_new_messages_and_retries(
    tmp_path: Path, ranks: tuple[str, str], higher: str, lower: str, most: int
) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.2, max_attempts=1_000)
    kinds = dict(zip(ranks, (higher, lower), strict=True))
    failed(driven, subscription, *(body for rank in ranks if kinds[rank] == "retries" for body in numbered(rank, 60)))
    for rank in ranks:
        if kinds[rank] == "new":
            driven.put_batch(rank, 60)
    found = list[str]()
    while len(found) < 50:
        found += driven.got(subscription, most)
    assert abs(sum(body.startswith(ranks[1]) for body in found) - 10) <= most
    driven.close()


@pytest.mark.parametrize("most", [1, 3, 100])
def test_new_messages_come_before_retries_of_a_lower_rank_that_are_due_with_higher_ones(
    tmp_path: Path, most: int
) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0)
    failed(driven, subscription, "high 0", "normal 0", "low 0")
    driven.put("low 1", "normal 1", "high 1")
    found = list[str]()
    while some := driven.got(subscription, most):
        found += some
    assert [body.split()[0] for body in found] == ["high", "high", "normal", "normal", "low", "low"]
    driven.close()


def test_low_ones_get_their_share_of_a_batch_once(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.5)
    driven.put("low first")
    assert driven.got(subscription) == ["low first"]
    driven.put(*numbered("high", 6))
    assert driven.got(subscription) == numbered("high", 6)
    for body in ("normal 0", "normal 1"):
        driven.put(body)
        assert driven.got(subscription, 1) == [body]
    driven.put(*(f"normal {number}" for number in range(2, 9)), *numbered("low", 9))
    assert driven.got(subscription, 6) == ["low 0", *(f"normal {number}" for number in range(2, 7))]
    driven.close()


def test_a_batch_of_new_messages_ends_before_lower_ones_than_a_retry(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(priority_share=0.5)
    failed(driven, subscription, "high 0", "high 1")
    assert driven.got(subscription, 1) == ["high 0"]
    driven.put("high 2", *numbered("low", 5))
    found = list[str]()
    while some := driven.got(subscription, 100):
        found += some
    assert found.index("high 1") <= 2, "one low message has come by its share, and no more"
    driven.close()


def test_retries_and_new_messages_of_a_priority_come_first_in_turn(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join()
    failed(driven, subscription, *(f"high {number}" for number in range(3)))
    driven.put(*(f"high {number}" for number in range(3, 6)))
    found = [int(body.split()[1]) // 3 for _ in range(6) for body in driven.got(subscription, 1)]
    assert found in ([0, 1] * 3, [1, 0] * 3)
    driven.close()


def test_lanes_of_other_subjects_change_no_turns(tmp_path: Path) -> None:
    driven = Lanes(tmp_path)
    driven.put("high 0", subject="z.z")
    subscription = driven.join("a.")
    failed(driven, subscription, "normal 0")
    found = list[str]()
    for number in range(1, 5):
        driven.put(f"normal {number}")
        found += driven.got(subscription, 1)
    assert "normal 0" in found
    driven.close()


@pytest.mark.parametrize("prefixes", [("a.",), ("a.", "b."), ("a.b", "b.b")])
def test_messages_with_order_keys_do_not_starve_behind_others(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    driven = Lanes(tmp_path)
    subscription = driven.join(*prefixes)
    subjects = [f"{prefix[0]}.b" for prefix in prefixes]
    for subject in subjects:
        driven.do(driven.send_command({subject: [b"%d" % at for at in range(100)]}))
        driven.do(driven.send_command({subject: [b"k %d" % at for at in range(100)]}, lane=LANE_ORDERED))
    found = [body for _ in range(80) for body in driven.got(subscription, 1)]
    assert abs(sum(body.startswith("k") for body in found) - 40) <= 2
    driven.close()
