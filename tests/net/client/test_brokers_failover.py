"""Which broker gets what is sent. The clock is a number."""

from __future__ import annotations

from qmq.errors import ConnectionLost, StorageFull
from qmq.net.client.brokers import Failover
from qmq.net.client.producer.accumulator import Accumulator, BatchKind, SendLimits
from qmq.net.client.producer.batch import OutgoingBatch
from qmq.net.client.producer.outcomes import Outcomes
from qmq.net.client.producer.receipts import Receipts
from qmq.net.client.producer.window import SendWindow
from tests.net.client.producer.test_batch import Waiting

LOST = ConnectionLost("the connection was lost")
FULL = StorageFull("the disk is full")
STORES = [b"store1", b"store2", b"store3"]


class Driven:
    """Sends to several brokers, driven by hand."""

    def __init__(self, brokers: int = 2, failover_after: float | None = 5.0) -> None:
        self.accumulator = Accumulator(True, 0.0, 64 << 20)
        self.outcomes = Outcomes(b"p" * 16, self.accumulator)
        self.lanes = [SendWindow(self.outcomes, self.accumulator, 30.0) for _ in range(brokers)]
        self.failover = Failover(self.lanes, failover_after)
        self.requests = 0
        for number in range(brokers):
            self.connect(number)

    def connect(self, number: int, now: float = 0.0) -> None:
        self.lanes[number].connected(STORES[number], SendLimits())
        self.failover.rebalance(now)

    def lose(self, number: int, now: float) -> None:
        self.lanes[number].disconnected(LOST, now)
        self.failover.rebalance(now)

    def refuse(self, number: int, request: int, now: float) -> None:
        self.lanes[number].refused(request, FULL, now)
        self.failover.rebalance(now)

    def send(self, body: bytes = b"x") -> Waiting:
        """One batch of its own, that somebody awaits."""
        waiting = Waiting()
        self.accumulator.add_many("a", [body], True, waiting, 0.0)
        self.accumulator._seal(BatchKind(True, False))
        return waiting

    def write(self, number: int, now: float) -> tuple[int, OutgoingBatch] | None:
        self.requests += 1
        batch = self.lanes[number].next_batch(self.requests, now, 1_000)
        return None if batch is None else (self.requests, batch)

    def written(self, number: int, now: float) -> tuple[int, OutgoingBatch]:
        found = self.write(number, now)
        assert found is not None
        return found

    def store(self, number: int, request: int, now: float) -> None:
        self.lanes[number].stored(request, 1_000, 1, 0, STORES[number], (0,), now)


def receipts(waiting: Waiting) -> Receipts:
    assert isinstance(waiting.result, Receipts)
    return waiting.result


def test_new_batches_go_to_the_first_broker_only() -> None:
    driven = Driven()
    driven.send()
    assert driven.write(1, 0.0) is None
    assert driven.lanes[1].wake_at() is None
    assert driven.write(0, 0.0) is not None


def test_what_was_never_written_moves_at_once() -> None:
    driven = Driven()
    waiting = driven.send()
    driven.lose(0, 1.0)
    request, batch = driven.written(1, 1.0)
    driven.store(1, request, 1.1)
    assert not receipts(waiting)[0].maybe_duplicate
    assert not batch.maybe_duplicate


def test_what_is_unknown_goes_again_to_its_own_broker_while_new_ones_go_to_another() -> None:
    driven = Driven()
    first = driven.send()
    driven.written(0, 0.0)
    driven.lose(0, 1.0)
    driven.send(b"new")
    _, new = driven.written(1, 1.0)
    assert driven.write(1, 5.9) is None
    driven.connect(0, 5.9)
    request, again = driven.written(0, 5.9)
    assert again is not new
    driven.store(0, request, 6.0)
    assert not receipts(first)[0].maybe_duplicate


def test_what_is_unknown_for_too_long_moves_and_its_receipts_say_so() -> None:
    driven = Driven()
    waiting = driven.send()
    _, batch = driven.written(0, 0.0)
    assert batch.producer_sequence == 0
    driven.lose(0, 1.0)
    driven.failover.rebalance(5.9)
    assert driven.write(1, 5.9) is None
    driven.failover.rebalance(6.0)
    request, moved = driven.written(1, 6.0)
    assert moved is batch
    assert moved.producer_sequence == 1, "another broker may know the old number for something else"
    driven.store(1, request, 6.1)
    assert receipts(waiting)[0].maybe_duplicate


def test_what_has_moved_and_fails_is_unknown() -> None:
    driven = Driven(failover_after=0.0)
    waiting = driven.send()
    driven.written(0, 0.0)
    driven.lose(0, 1.0)
    driven.written(1, 1.0)
    driven.lanes[1].expire(40.0)
    assert waiting.error is not None
    assert {failure.outcome for failure in waiting.error.failures} == {"unknown"}


def test_without_failover_an_unknown_batch_never_moves() -> None:
    driven = Driven(failover_after=None)
    waiting = driven.send()
    driven.written(0, 0.0)
    driven.lose(0, 1.0)
    for now in (6.0, 29.0):
        driven.failover.rebalance(now)
        assert driven.write(1, now) is None
    driven.lanes[0].expire(31.0)
    assert waiting.error is not None
    assert {failure.outcome for failure in waiting.error.failures} == {"unknown"}


def test_what_is_refused_moves_at_once() -> None:
    driven = Driven()
    waiting = driven.send()
    request, _ = driven.written(0, 0.0)
    driven.refuse(0, request, 0.1)
    request, _ = driven.written(1, 0.1)
    driven.store(1, request, 0.2)
    assert not receipts(waiting)[0].maybe_duplicate


def test_where_all_refuse_it_is_tried_no_more_often_than_one_broker_would_be() -> None:
    driven = Driven(3)
    driven.send()
    tries, now = 0, 0.0
    while now < 30.0:
        driven.failover.rebalance(now)
        for number in range(3):
            written = driven.write(number, now)
            if written is not None:
                tries += 1
                driven.refuse(number, written[0], now)
        now += 0.01
    assert 20 <= tries <= 3 * 80, f"{tries} tries in 30 s"


def test_the_order_within_one_broker_is_that_of_the_calls() -> None:
    driven = Driven()
    for number in range(5):
        driven.send(b"%d" % number)
    written = [driven.written(0, 0.0) for _ in range(5)]
    driven.lose(0, 1.0)
    driven.failover.rebalance(6.0)
    moved = [driven.written(1, 6.0)[1] for _ in range(5)]
    assert moved == [batch for _, batch in written]
    sequences = [batch.producer_sequence for batch in moved]
    assert sequences == sorted(sequences)
    assert sequences[0] >= 5


def test_limits_are_those_of_the_broker_that_sends_go_to() -> None:
    driven = Driven()
    driven.lanes[1].connected(STORES[1], SendLimits(max_message_bytes=100))
    driven.accumulator.check("a", 1_000, 0)
    driven.lose(0, 1.0)
    assert driven.failover.active == 1
    assert driven.accumulator._limits.max_message_bytes == 100
