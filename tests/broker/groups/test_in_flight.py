"""Messages in flight at a consumer, against one record for each message."""

from __future__ import annotations

import random
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.groups.in_flight import InFlight
from qmq.broker.journal.record_types import InFlightRange, MessageRange

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
        st.tuples(st.sampled_from(["ack", "back"]), st.integers(0, 40), st.integers(1, 12)),
    ),
    max_size=40,
)


def ids_of(ranges: list[InFlightRange]) -> list[tuple[int, int]]:
    """Return each message as (first of its range, number in it)."""
    return [
        (in_flight.messages.first, number)
        for in_flight in ranges
        for number in range(in_flight.messages.skip, in_flight.messages.skip + in_flight.messages.total)
    ]


@given(CALLS)
def test_it_equals_one_record_for_each_message(calls: list[tuple[Any, ...]]) -> None:
    in_flight, state, ids, pulls = InFlight(), list[str](), list[tuple[int, int]](), list[range]()
    for call in calls:
        if call[0] == "pull":
            ranges = [
                InFlightRange(MessageRange(7, len(ids) * 100 + number, 0, 0, count), 1, 0)
                for number, count in enumerate(call[1])
            ]
            assert in_flight.add(ranges, 10, 0).first == len(ids)
            ids += ids_of(ranges)
            pulls.append(range(len(state), len(ids)))
            state += ["in_flight"] * (len(ids) - len(state))
        elif call[0] == "ack":
            _, start, count = call
            pulled = state[start : start + count]
            assert in_flight.ack([start, start + count]) == (
                pulled.count("in_flight"),
                count - len(pulled) + pulled.count("back"),
            )
            state[start : start + count] = [{"in_flight": "acked"}.get(one, one) for one in pulled]
        else:
            _, start, count = call
            pulled = state[start : start + count]
            got = in_flight.give_back(start, start + count)
            if pulled != ["in_flight"] * count:
                assert got is None
                continue
            assert got is not None
            assert ids_of(got) == ids[start : start + count]
            state[start : start + count] = ["back"] * count
        assert in_flight.count == state.count("in_flight")
        ack_floor = state.index("in_flight") if "in_flight" in state else len(state)
        assert in_flight.ack_floor == ack_floor
        kept = [pull for pull in pulls if "in_flight" in state[pull.start : pull.stop]]
        assert [range(pull.first, pull.first + pull.total) for pull in in_flight.pulls] == kept
        assert in_flight.span == min(sum(map(len, kept)), len(state) - ack_floor)
        open_ones = [number for low, high in in_flight.unhandled() for number in range(low, high)]
        assert open_ones == [number for number, one in enumerate(state) if one == "in_flight"]
        left = [ids[number] for pull in kept for number in pull if number >= ack_floor]
        assert ids_of(list(in_flight.between(ack_floor, len(state)))) == left
        assert in_flight.size == 10 * len(kept)
        again = InFlight.restored(msgpack.unpackb(msgpack.packb(in_flight.packed()), use_list=True))
        assert again.packed() == in_flight.packed()
        assert (again.size, again.span, again.unhandled()) == (in_flight.size, in_flight.span, in_flight.unhandled())


def test_a_message_that_stays_in_flight_keeps_no_pulls_behind_it() -> None:
    """Each checkpoint writes what is in flight, and a handler may take hours."""
    in_flight = InFlight()
    for number in range(50_000):
        in_flight.add([InFlightRange(MessageRange(7, number, 0, 0, 1), 1, 0)], 100, 0)
        if number:
            assert in_flight.ack([number, number + 1]) == (1, 0)
    assert (in_flight.count, in_flight.size, in_flight.span) == (1, 100, 1)
    assert len(msgpack.packb(in_flight.packed())) < 100
    assert in_flight.ack([0, 1]) == (1, 0)
    assert in_flight.ack_floor == 50_000


def test_messages_handed_back_long_ago_are_forgotten() -> None:
    in_flight = InFlight()
    in_flight.add([InFlightRange(MessageRange(7, 0, 0, 0, 1_000), 1, 0)], 10, 0)
    for number in range(100):
        assert in_flight.give_back(number, number + 1) is not None
    assert in_flight.ack([99, 100]) == (0, 1)
    assert in_flight.ack([0, 1]) == (0, 0), "it is below the ack floor, and nobody knows any more how it was handled"


def test_replace_changes_only_the_ranges_of_the_copies() -> None:
    rng = random.Random(7)
    for _ in range(200):
        totals = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 8))]
        ranges = [InFlightRange(MessageRange(1, 10 * at, 0, 0, total), at, 0) for at, total in enumerate(totals)]
        pull = InFlight(100).add(ranges, 0, 0)
        expected = ids_of(ranges)
        for number in range(6):
            start = rng.randrange(sum(totals))
            end = rng.randrange(start, sum(totals)) + 1
            cut = rng.randrange(start, end)
            sizes = [size for size in (cut - start, end - cut) if size]
            new = [InFlightRange(MessageRange(2, 1_000 + number, 0, size, size), 9, 1) for size in sizes]
            pull.replace(100 + start, 100 + end, new)
            expected[start:end] = ids_of(new)
            assert ids_of(pull.ranges) == expected
            assert ids_of(list(pull.between(100 + start, 100 + end))) == ids_of(new)
            assert list(pull.between(100, 100 + pull.total)) == pull.ranges
