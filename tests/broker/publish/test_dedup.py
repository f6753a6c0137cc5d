"""Remembered producers against a plain dict of all batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import Sent
from qmq.broker.publish.dedup import Producers, RememberedBatch
from qmq.errors import BadBatch, SequenceForgotten, TooManyProducers
from tests.broker.harness import Driven, batch_of

ME = b"m" * 16
HOUR_US = 3_600_000_000


def producers(window: int = 4, most: int = 3) -> Producers:
    return Producers(window, most, HOUR_US)


def test_a_repeat_is_recognised_and_the_next_batch_is_new() -> None:
    known = producers()
    assert known.lookup(ME, 0, 10, 77) is None
    known.remember(ME, 0, 10, 77, 1, 4_096, 0)
    assert known.lookup(ME, 0, 10, 77) == RememberedBatch(1, 4_096)
    assert known.lookup(ME, 10, 1, 77) is None


@pytest.mark.parametrize(("first", "messages", "crc"), [(0, 10, 78), (0, 9, 77), (5, 10, 77), (0, 1, 77)])
def test_other_bounds_or_bytes_are_refused(first: int, messages: int, crc: int) -> None:
    known = producers()
    known.remember(ME, 0, 10, 77, 0, 0, 0)
    with pytest.raises(BadBatch, match="overlap"):
        known.lookup(ME, first, messages, crc)


def test_a_refused_batch_may_come_after_later_ones() -> None:
    known = producers()
    known.remember(ME, 0, 1, 1, 0, 100, 0)
    known.remember(ME, 2, 1, 3, 0, 300, 0)
    assert known.lookup(ME, 1, 1, 2) is None
    known.remember(ME, 1, 1, 2, 0, 400, 0)
    assert known.lookup(ME, 1, 1, 2) == RememberedBatch(0, 400)
    assert known.lookup(ME, 3, 1, 4) is None


def test_a_batch_older_than_the_window_is_refused() -> None:
    known = producers(window=4)
    for number in range(5):
        known.remember(ME, number, 1, number, 0, number * 100, 0)
    with pytest.raises(SequenceForgotten, match="last 4 batches"):
        known.lookup(ME, 0, 1, 0)
    assert known.lookup(ME, 1, 1, 1) == RememberedBatch(0, 100)


def test_forget_takes_back_the_last_batch() -> None:
    known = producers()
    known.remember(ME, 0, 5, 1, 0, 100, 0)
    known.remember(ME, 5, 5, 2, 0, 200, 0)
    known.forget(ME, 5)
    assert known.lookup(ME, 5, 5, 2) is None
    assert known.last(ME) == (4, RememberedBatch(0, 100))
    known.forget(ME, 0)
    assert known.last(ME) is None
    assert len(known) == 0


def test_forget_keeps_what_the_window_dropped_out_of_reach() -> None:
    known = producers(window=1)
    known.remember(ME, 0, 1, 1, 0, 100, 0)
    known.remember(ME, 1, 1, 2, 0, 200, 0)
    known.forget(ME, 1)
    with pytest.raises(SequenceForgotten):
        known.lookup(ME, 0, 1, 1)
    assert known.lookup(ME, 1, 1, 2) is None


def test_producers_over_the_limit_are_refused_until_some_expire() -> None:
    known = producers(most=2)
    known.remember(b"a" * 16, 0, 1, 1, 0, 1, now_us=0)
    known.remember(b"b" * 16, 0, 1, 1, 0, 2, now_us=10)
    with pytest.raises(TooManyProducers, match="max_producers"):
        known.lookup(b"c" * 16, 0, 1, 1)
    known.expire(HOUR_US - 1)
    assert len(known) == 2
    known.expire(HOUR_US)
    assert len(known) == 1
    assert known.lookup(b"c" * 16, 0, 1, 1) is None


def test_a_send_renews_the_time() -> None:
    known = producers()
    known.remember(b"a" * 16, 0, 1, 1, 0, 1, now_us=0)
    known.remember(b"b" * 16, 0, 1, 1, 0, 2, now_us=10)
    known.remember(b"a" * 16, 1, 1, 1, 0, 3, now_us=20)
    known.expire(HOUR_US + 15)
    assert known.last(b"b" * 16) is None
    assert known.last(b"a" * 16) == (1, RememberedBatch(0, 3))


@given(
    window=st.integers(1, 5),
    new_window=st.integers(1, 6),
    batches=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), max_size=20),
)
def test_restored_producers_answer_as_before(window: int, new_window: int, batches: list[tuple[int, int]]) -> None:
    known = producers(window=window)
    told: dict[bytes, list[tuple[int, int, int]]] = {}
    for position, (who, messages) in enumerate(batches):
        name = bytes([who]) * 16
        first = sum(entry[1] for entry in told.get(name, []))
        known.remember(name, first, messages, position, 0, position, position)
        told.setdefault(name, []).append((first, messages, position))
    restored = producers(window=new_window)
    restored.restore(known.packed({}, 50), 1_000)
    for name, entries in told.items():
        for first, messages, position in entries[-min(window, new_window) :]:
            assert restored.lookup(name, first, messages, position) == RememberedBatch(0, position)
        for first, messages, position in entries[: -min(window, new_window)]:
            with pytest.raises(SequenceForgotten):
                restored.lookup(name, first, messages, position)
        end = sum(entry[1] for entry in entries)
        assert restored.lookup(name, end, 1, 99) is None
        assert restored.last(name) == (end - 1, RememberedBatch(0, entries[-1][2]))


def test_many_producers_are_stored_soon_after_the_machine_boots(tmp_path: Path) -> None:
    """A large state is written only now and then; the first time it must be, however little the monotonic clock
    shows.
    """
    driven = Driven(tmp_path)
    for number in range(600):
        driven.do(Send(1, driven.request(), batch_of({"a": [b"x"]}, 0, number.to_bytes(16)), True))
    assert driven.now.monotonic_us < 30_000_000
    for _ in range(2):
        driven.restart()
        told = driven.do(Send(1, driven.request(), batch_of({"a": [b"x"]}, 0, number.to_bytes(16)), True))
        assert [type(effect) for effect in told] == [Sent]
    assert driven.store.subjects.ends[0] == 600
    driven.close()
