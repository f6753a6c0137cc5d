"""qmq/broker/delivery/chosen_cursors.py: a choice sees where it has moved cursors to, and nobody else before apply."""

from __future__ import annotations

import random

import numpy as np
import pytest

from qmq.broker.delivery.chosen_cursors import ChosenCursors, CursorScratch
from qmq.broker.groups.cursors import Cursors


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_sees_its_own_moves_and_the_group_none_before_it_is_applied(seed: int) -> None:
    chance, scratch = random.Random(seed), CursorScratch()
    groups = [(Cursors(), dict[int, int]()) for _ in range(2)]
    for _ in range(30):
        cursors, known = chance.choice(groups)
        chosen, moved = ChosenCursors(cursors, scratch), dict(known)
        for _ in range(chance.randrange(6)):
            if chance.random() < 0.5:
                number = chance.randrange(200)
                moved[number] = moved.get(number, 0) + chance.randrange(1, 5)
                chosen.move(number, moved[number])
            else:
                numbers = [chance.randrange(200) for _ in range(chance.randrange(1, 8))]
                values = []
                for number in numbers:
                    moved[number] = moved.get(number, 0) + chance.randrange(1, 5)
                    values.append(moved[number])
                chosen.move_several(np.array(numbers), np.array(values, np.uint64))
            if chance.random() < 0.5:
                asked = [chance.randrange(250) for _ in range(chance.randrange(6))]
                assert [chosen.get(number) for number in asked] == [moved.get(number, 0) for number in asked]
                assert chosen.of(np.array(asked, np.int64)).tolist() == [moved.get(number, 0) for number in asked]
        assert [cursors.get(number) for number in range(250)] == [known.get(number, 0) for number in range(250)]
        if chance.random() < 0.7:
            chosen.apply()
            known.update(moved)
        assert [cursors.get(number) for number in range(250)] == [known.get(number, 0) for number in range(250)]
