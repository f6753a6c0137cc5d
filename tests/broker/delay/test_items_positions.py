"""PositionSet against a set of Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.delay import items
from qmq.broker.delay.items import PositionSet

NUMBERS = st.integers(0, (1 << 64) - 3) | st.integers(0, 50)


@given(st.lists(st.tuples(st.sampled_from(["add", "extend", "discard", "pack"]), NUMBERS, st.integers(0, 20))))
def test_it_is_a_set(steps: list[tuple[str, int, int]]) -> None:
    made, known = PositionSet(), set[int]()
    for what, number, count in steps:
        stop = min(number + count, (1 << 64) - 1)
        if what == "add":
            assert made.add(number) == (number not in known)
            known.add(number)
        elif what == "extend":
            made.extend(np.arange(number, stop, dtype=np.uint64))
            known.update(range(number, stop))
        elif what == "discard":
            made.discard(number, stop)
            known -= set(range(number, stop))
        else:
            made = PositionSet.unpack(made.pack())
        assert len(made) == len(known)
        assert (number in made) == (number in known)
        assert made.within(number, stop).tolist() == sorted(n for n in known if number <= n < stop)


def test_many_are_kept_small() -> None:
    made = PositionSet()
    for number in range(3 * items._LOOSE):
        made.add(number * 7)
    assert len(made._loose) <= items._LOOSE
    assert len(made) == 3 * items._LOOSE
    assert len(made.pack()) < 8 * items._LOOSE
