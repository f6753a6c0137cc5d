"""What a consumer holds, against one record a message."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.groups.in_flight import Held, HeldPull, HeldRange, MessageRange

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
        st.tuples(st.sampled_from(["ack", "back"]), st.integers(0, 40), st.integers(1, 12)),
    ),
    max_size=40,
)


def ids_of(ranges: list[HeldRange]) -> list[tuple[int, int]]:
    """Each message as (first of its range, number in it)."""
    return [
        (held.messages.first, number)
        for held in ranges
        for number in range(held.messages.skip, held.messages.skip + held.messages.total)
    ]


@given(CALLS)
def test_it_is_a_record_for_each_message(calls: list[tuple[Any, ...]]) -> None:
    held, state, ids = Held(), list[str](), list[tuple[int, int]]()
    for call in calls:
        if call[0] == "pull":
            ranges = [
                HeldRange(MessageRange(7, len(ids) * 100 + number, 0, 0, count), 1, 0)
                for number, count in enumerate(call[1])
            ]
            assert held.add(ranges, 10, 0).first == len(ids)
            ids += ids_of(ranges)
            state += ["held"] * (len(ids) - len(state))
        elif call[0] == "ack":
            _, start, count = call
            pulled = state[start : start + count]
            assert held.ack([start, start + count]) == (
                pulled.count("held"),
                count - len(pulled) + pulled.count("back"),
            )
            state[start : start + count] = [{"held": "acked"}.get(one, one) for one in pulled]
        else:
            _, start, count = call
            pulled = state[start : start + count]
            got = held.give_back(start, start + count)
            if pulled != ["held"] * count:
                assert got is None
                continue
            assert got is not None
            assert ids_of(got) == ids[start : start + count]
            state[start : start + count] = ["back"] * count
        assert held.count == state.count("held")
        frontier = state.index("held") if "held" in state else len(state)
        assert held.frontier == frontier
        assert held.span == len(state) - frontier
        open_ones = [number for low, high in held.unhandled() for number in range(low, high)]
        assert open_ones == [number for number, one in enumerate(state) if one == "held"]
        assert ids_of(list(held.between(frontier, len(state)))) == ids[frontier:]
        assert held.size == 10 * len(held.pulls)
        assert all(pull.first + pull.total > frontier for pull in held.pulls)


def test_what_was_handed_back_long_ago_is_forgotten() -> None:
    held = Held()
    held.add([HeldRange(MessageRange(7, 0, 0, 0, 1_000), 1, 0)], 10, 0)
    for number in range(100):
        assert held.give_back(number, number + 1) is not None
    assert held.ack([99, 100]) == (0, 1)
    assert held.ack([0, 1]) == (0, 0), "it is below the frontier, and nobody knows any more how it was handled"


def test_what_lies_elsewhere_now_takes_its_place_and_nothing_else_moves() -> None:
    rng = random.Random(7)
    for _ in range(200):
        totals = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 8))]
        ranges = [HeldRange(MessageRange(1, 10 * at, 0, 0, total), at, 0) for at, total in enumerate(totals)]
        pull = HeldPull(100, ranges, 0, 0, isolated=False)
        expected = ids_of(ranges)
        for number in range(6):
            start = rng.randrange(sum(totals))
            end = rng.randrange(start, sum(totals)) + 1
            cut = rng.randrange(start, end)
            sizes = [size for size in (cut - start, end - cut) if size]
            new = [HeldRange(MessageRange(2, 1_000 + number, 0, size, size), 9, 1) for size in sizes]
            pull.replace(100 + start, 100 + end, new)
            expected[start:end] = ids_of(new)
            assert ids_of(pull.ranges) == expected
            assert ids_of(list(pull.between(100 + start, 100 + end))) == ids_of(new)
            assert list(pull.between(100, 100 + pull.total)) == pull.ranges
