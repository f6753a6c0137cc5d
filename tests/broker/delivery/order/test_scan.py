"""The choice of new messages with order keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.format.layout import LANE_HIGH
from tests.broker.delivery.order.test_order import Slots, numbers_of, texts


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
