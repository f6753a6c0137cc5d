"""Remembered producers against a plain dict of all batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.ports.commands import Connected, Disconnected, Send, Unanswered
from qmq.broker.ports.effects import Refused, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.publish.dedup import Producers, RememberedBatch
from qmq.errors import BadBatch, SequenceForgotten, TooManyProducers
from qmq.format.source import NO_ADDRESS
from tests.broker.harness import Driven, batch_of, bodies_of

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


def id_of(name: str) -> bytes:
    return name.encode() * 16


def test_producers_are_forgotten_after_their_time() -> None:
    known = producers(most=2)
    known.remember(id_of("a"), 0, 1, 1, 0, 1, now_us=0)
    known.remember(id_of("b"), 0, 1, 1, 0, 2, now_us=10)
    known.expire(HOUR_US - 1)
    assert len(known) == 2
    known.expire(HOUR_US)
    assert len(known) == 1


def test_beyond_the_limit_the_one_that_is_idle_for_longest_without_a_connection_goes() -> None:
    known = producers(most=3)
    for connection, name in enumerate("abc"):
        known.attach(connection, id_of(name))
        known.remember(id_of(name), 0, 1, 1, 0, 1, now_us=connection)
    known.attach(3, id_of("d"))
    with pytest.raises(TooManyProducers, match="max_producers"):
        known.lookup(id_of("d"), 0, 1, 1)
    for connection in (2, 1):  # c goes before b
        known.disconnected(connection)
    assert known.lookup(id_of("d"), 0, 1, 1) is None
    known.remember(id_of("d"), 0, 1, 1, 0, 1, now_us=10)
    assert list(known.by_id) == [id_of(name) for name in "abd"]
    known.attach(4, id_of("b"))  # it is back
    known.disconnected(1)  # its connection before has ended already
    with pytest.raises(TooManyProducers):
        known.lookup(id_of("e"), 0, 1, 1)
    known.attach(3, id_of("e"))  # a connection has one producer
    known.remember(id_of("e"), 0, 1, 1, 0, 1, now_us=11)
    assert list(known.by_id) == [id_of(name) for name in "abe"]


MINUTE_US = 60_000_000


@pytest.mark.parametrize("is_restored", [False, True])
def test_what_comes_again_of_a_producer_that_may_have_been_forgotten_is_refused(is_restored: bool) -> None:
    known = producers(most=1)
    for number, name in enumerate("abc"):
        known.remember(id_of(name), 0, 1, 1, 0, 1, now_us=number * MINUTE_US)
    if is_restored:
        packed, known = known.packed({}, 3 * MINUTE_US), producers(most=1)
        known.restore(packed, 3 * MINUTE_US)
    assert list(known.by_id) == [id_of("c")]
    for written_us in (0, 2 * MINUTE_US):  # a minute before, for clocks: b's batch came at one minute
        with pytest.raises(SequenceForgotten, match="may have forgotten this one"):
            known.lookup(id_of("a"), 0, 1, 1, written_us)
    assert known.lookup(id_of("a"), 0, 1, 1, 2 * MINUTE_US + 1) is None, "written after all that is forgotten"
    assert known.lookup(id_of("a"), 1, 1, 1) is None, "it does not come again"
    assert known.lookup(id_of("c"), 0, 1, 1, 0) == RememberedBatch(0, 1), "it is known"
    known.expire(HOUR_US + MINUTE_US)
    assert known.lookup(id_of("a"), 0, 1, 1, 0) is None, "nobody sends again after so long"


def test_with_a_lower_limit_the_oldest_are_forgotten_at_the_start() -> None:
    known = producers(most=3)
    for number, name in enumerate("abc"):
        known.remember(id_of(name), 0, 1, 1, 0, 1, now_us=number)
    fewer = producers(most=1)
    fewer.restore(known.packed({}, 9), 9)
    assert list(fewer.by_id) == [id_of("c")]
    with pytest.raises(SequenceForgotten):
        fewer.lookup(id_of("b"), 0, 1, 1, 0)


def test_a_broker_refuses_what_a_client_sends_again_that_it_may_have_forgotten(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(max_producers=2))

    def sent(connection: int, sequence: int, producer: str) -> Sent | Refused:
        batch = batch_of({"a": [b"%d" % sequence]}, sequence, id_of(producer))
        (said,) = driven.do(Send(connection, driven.request(), batch, False))
        assert isinstance(said, Sent | Refused)
        return said

    assert isinstance(sent(1, 0, "p"), Sent)
    driven.do(Disconnected(1))
    for connection, producer in ((2, "q"), (3, "r"), (4, "s")):
        assert isinstance(sent(connection, 0, producer), Sent)
        driven.do(Disconnected(connection))
    driven.do(Connected(5, NO_ADDRESS, unanswered=Unanswered(id_of("p"), 2, 1_000)))
    for sequence in (0, 1):
        refused = sent(5, sequence, "p")
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, SequenceForgotten)
    assert isinstance(sent(5, 2, "p"), Sent), "it is new"
    assert sorted(bodies_of(driven.pull(driven.subscribe("a")))) == [b"0", b"0", b"0", b"0", b"2"]
    driven.close()


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
