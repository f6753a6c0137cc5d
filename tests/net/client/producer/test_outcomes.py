"""Numbers, ends and flushes of sends, whichever broker they go to."""

from __future__ import annotations

from qmq.errors import ConnectionLost
from qmq.format.build import NO_HEADER
from qmq.net.client.producer.accumulator import Accumulator
from qmq.net.client.producer.batch import OutgoingBatch
from qmq.net.client.producer.outcomes import Outcomes
from tests.net.client.producer.test_batch import Waiting


def one_batch(accumulator: Accumulator, subject: str) -> OutgoingBatch:
    accumulator.add_many(subject, [b"x"], True, Waiting(), 0.0)
    batch = accumulator.take(0.0, True)
    assert batch is not None
    return batch


def test_no_number_is_given_twice() -> None:
    outcomes = Outcomes(b"p" * 16, Accumulator(True, 0.0, 1 << 20))
    assert [outcomes.take_numbers(count) for count in (3, 1, 5)] == [0, 3, 4]
    assert outcomes.next_sequence == 9


def test_a_flush_waits_for_the_batches_of_its_time_only() -> None:
    accumulator = Accumulator(True, 0.0, 1 << 20)
    outcomes = Outcomes(b"p" * 16, accumulator)
    first, flushed = one_batch(accumulator, "a"), Waiting()
    outcomes.flush(flushed)
    later = one_batch(accumulator, "b")
    assert outcomes.is_flushing
    outcomes.ended(first)
    assert flushed.told
    assert not outcomes.is_flushing
    outcomes.ended(later)


def test_what_may_be_at_another_broker_is_unknown_when_it_fails() -> None:
    accumulator = Accumulator(True, 0.0, 1 << 20)
    outcomes = Outcomes(b"p" * 16, accumulator)
    accumulator.check("a", 1, 0)
    accumulator.add_nowait("a", b"x", NO_HEADER, True, 0.0)
    batch = accumulator.take(0.0, True)
    assert batch is not None
    batch.maybe_duplicate = True
    outcomes.fail(batch, ConnectionLost("gone"), unknown=False)
    error = outcomes.take_failure()
    assert error is not None
    assert [failure.outcome for failure in error.failures] == ["unknown"]
    assert outcomes.take_failure() is None
