"""Batches of one broker: the window, retries, failures. The clock is a number."""

from __future__ import annotations

import logging
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.publish.dedup import Producers
from qmq.errors import (
    BadBatch,
    BadBytes,
    ConnectionLost,
    InternalError,
    InvalidOption,
    MessageTooLarge,
    Overloaded,
    ProtocolError,
    QmqError,
    RemoteError,
    SendFailed,
    SendUnknown,
    SequenceForgotten,
    StorageError,
    StorageFull,
    SyncFailed,
    TooManySubjects,
)
from qmq.format.batch import BatchLimits, check_batch
from qmq.format.build import NO_HEADER, make_header
from qmq.format.pieces import stored_runs
from qmq.net.client.producer.accumulator import Accumulator, BatchKind, SendLimits
from qmq.net.client.producer.batch import OutgoingBatch
from qmq.net.client.producer.outcomes import Outcomes
from qmq.net.client.producer.window import SendWindow
from tests.net.client.producer.test_batch import Waiting

STORE, OTHER = b"store1", b"store2"
TIMEOUT = 30.0
LOST = ConnectionLost("the connection was lost")
FULL = StorageFull("the disk is full")


class Driven:
    """A window with its accumulator, driven by hand."""

    def __init__(self, linger: float = 0.0, connected: bool = True, window: int = 64) -> None:
        self.accumulator = Accumulator(True, linger, 64 << 20)
        self.outcomes = Outcomes(b"p" * 16, self.accumulator)
        self.sending = SendWindow(self.outcomes, self.accumulator, TIMEOUT)
        self.limits = SendLimits(producer_window=window)
        self.requests = 0
        if connected:
            self.sending.connected(STORE, self.limits)

    def send(self, *bodies: bytes, subject: str = "a", now: float = 0.0) -> Waiting:
        """One batch of its own, that somebody awaits."""
        waiting = Waiting()
        self.accumulator.add_many(subject, bodies, True, waiting, now)
        self.accumulator._seal(BatchKind(True, False))
        return waiting

    def write(self, now: float = 0.0) -> tuple[int, OutgoingBatch] | None:
        self.requests += 1
        batch = self.sending.next_batch(self.requests, now, 1_000)
        return None if batch is None else (self.requests, batch)

    def written(self, now: float = 0.0) -> tuple[int, OutgoingBatch]:
        written = self.write(now)
        assert written is not None
        return written

    def store(self, request: int, now: float = 0.0, first: int = 0) -> None:
        self.sending.stored(request, 1_000, 1, 0, STORE, (first,), now)


def bytes_of(batch: OutgoingBatch) -> bytes:
    assert batch.buffers is not None
    return b"".join(batch.buffers)


def test_batches_go_out_in_order_with_rising_sequences() -> None:
    driven = Driven()
    waiting = [driven.send(b"1", b"2"), driven.send(b"3"), driven.send(b"4")]
    written = [driven.written() for _ in waiting]
    assert driven.write() is None
    assert [batch.producer_sequence for _, batch in written] == [0, 2, 3]
    for request, _ in written:
        driven.store(request)
    assert [len(each.result) for each in waiting] == [2, 1, 1]
    assert driven.accumulator.queued_bytes == 0


def test_no_more_are_in_flight_than_the_window() -> None:
    driven = Driven(window=3)
    for _ in range(5):
        driven.send(b"x")
    requests = [driven.written()[0] for _ in range(3)]
    assert driven.write() is None
    assert driven.sending.wake_at() is None
    driven.store(requests[1])
    driven.written()
    assert driven.write() is None


def test_while_answers_are_awaited_messages_gather_until_one_comes() -> None:
    driven = Driven()
    for subject in ("a", "b"):  # one by one, at once
        driven.accumulator.add_nowait(subject, b"x", NO_HEADER, True, 0.0)
        assert driven.sending.wake_at() == 0.0
        assert driven.written()[1].count == 1
    for _ in range(3):
        driven.accumulator.add_nowait("c", b"x", NO_HEADER, True, 0.0)
        assert driven.write() is None
        assert driven.sending.wake_at() is None
    driven.store(1)
    assert driven.sending.wake_at() == 0.0
    assert driven.written()[1].count == 3


def test_full_batches_wait_for_no_answer() -> None:
    driven = Driven()
    for number in range(5):
        driven.accumulator.add_nowait("a", bytes(600_000), NO_HEADER, True, 0.0)
        assert (driven.write() is not None) == (number != 2)  # what does not fit any more seals a batch


def test_a_batch_that_was_given_up_still_counts_until_it_is_answered() -> None:
    driven = Driven(window=1)
    first = driven.send(b"1")
    request, _ = driven.written(0.0)
    driven.sending.expire(TIMEOUT)
    assert type(first.error) is SendUnknown
    second = driven.send(b"2", now=TIMEOUT)
    assert driven.write(TIMEOUT) is None
    driven.store(request, TIMEOUT)
    driven.store(driven.written(TIMEOUT)[0], TIMEOUT)
    assert len(second.result) == 1


def test_what_is_in_flight_goes_out_again_with_the_same_bytes_in_order() -> None:
    driven = Driven()
    waiting = [driven.send(b"%d" % number) for number in range(4)]
    before = [driven.written()[1] for _ in range(3)]
    bytes_before = [bytes_of(batch) for batch in before]
    driven.sending.disconnected(LOST, 0.0)
    driven.sending.connected(STORE, driven.limits)
    again = [driven.written() for _ in range(4)]
    assert [batch for _, batch in again[:3]] == before
    assert [bytes_of(batch) for _, batch in again[:3]] == bytes_before
    for request, _ in again:
        driven.store(request)
    assert all(len(each.result) == 1 for each in waiting)


def test_answers_of_an_earlier_connection_mean_nothing() -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    old, _ = driven.written()
    driven.sending.disconnected(LOST, 0.0)
    driven.sending.connected(STORE, driven.limits)
    driven.store(old)
    assert not waiting.done()
    driven.store(driven.written()[0])
    assert waiting.done()


def test_an_answer_about_other_runs_is_refused_and_the_batch_stays() -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    request, _ = driven.written()
    with pytest.raises(ProtocolError, match="1 runs has 2"):
        driven.sending.stored(request, 1, 1, 0, STORE, (1, 2), 0.0)
    assert not waiting.done()
    driven.store(request)
    assert waiting.done()


def test_a_batch_that_one_store_may_have_is_not_sent_to_another() -> None:
    driven = Driven()
    lost, fresh = driven.send(b"1"), driven.send(b"2")
    driven.written()
    driven.sending.disconnected(LOST, 0.0)
    driven.sending.connected(OTHER, driven.limits)
    assert type(lost.error) is SendUnknown
    _, batch = driven.written()
    assert batch.producer_sequence == 1
    assert driven.write() is None
    assert not fresh.done()


def test_a_refused_batch_goes_to_another_store_behind_its_last_sequence() -> None:
    driven = Driven()
    waiting = [driven.send(b"1", b"2"), driven.send(b"3")]
    driven.sending.refused(driven.written()[0], FULL, 0.0)
    driven.sending.disconnected(LOST, 0.0)
    driven.sending.connected(OTHER, driven.limits)
    driven.sending.continue_after(99)
    for sequence in (100, 102):
        request, batch = driven.written(10.0)
        assert batch.producer_sequence == sequence
        header = check_batch(memoryview(bytearray(bytes_of(batch))), BatchLimits()).header
        assert header.producer_sequence == sequence
        driven.store(request, 10.0)
    assert all(each.result is not None for each in waiting)


def test_a_named_producer_goes_on_after_its_last_sequence() -> None:
    driven = Driven()
    driven.sending.continue_after(None)
    driven.send(b"1")
    assert driven.written()[1].producer_sequence == 0
    later = Driven()
    later.sending.continue_after(41)
    later.send(b"1")
    assert later.written()[1].producer_sequence == 42
    later.sending.continue_after(7)  # it knows less: nothing to mind
    later.send(b"1")
    assert later.written()[1].producer_sequence == 43


def test_a_refusal_that_can_pass_is_tried_again_with_backoff() -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    now, pauses = 0.0, []
    for _ in range(8):
        request, _ = driven.written(now)
        driven.sending.refused(request, FULL, now)
        assert driven.write(now) is None
        at = driven.sending.wake_at()
        assert at is not None
        pauses.append(at - now)
        now = at
    assert pauses[0] <= 0.05
    assert 0.5 <= pauses[-1] <= 1.0
    driven.store(driven.written(now)[0], now)
    assert waiting.result is not None


def test_after_a_refusal_batches_go_one_at_a_time_in_order() -> None:
    driven = Driven()
    for number in range(3):
        driven.send(b"%d" % number)
    written = [driven.written() for _ in range(3)]
    for request, _ in written:
        driven.sending.refused(request, FULL, 0.0)
    at = driven.sending.wake_at()
    assert at is not None
    assert at <= 0.05  # one pause for what was refused together
    request, batch = driven.written(at)
    assert batch is written[0][1]
    assert driven.write(at) is None
    assert driven.sending.wake_at() is None
    driven.store(request, at)
    for _, wanted in written[1:]:
        request, batch = driven.written(at)
        assert batch is wanted
        assert driven.write(at) is None
        driven.store(request, at)
    driven.send(b"later")
    driven.send(b"more")
    driven.written(at)
    driven.written(at)


@pytest.mark.parametrize("error", [MessageTooLarge("no"), TooManySubjects("no")])
def test_a_refusal_for_good_fails_its_batch_only(error: QmqError) -> None:
    driven = Driven()
    first, second = driven.send(b"1"), driven.send(b"2")
    requests = [driven.written()[0] for _ in range(2)]
    driven.sending.refused(requests[0], error, 0.0)
    driven.store(requests[1])
    assert type(first.error) is SendFailed
    assert first.error.failures[0].outcome == "refused"
    assert first.error.__cause__ is error
    assert second.result is not None
    assert driven.accumulator.queued_bytes == 0


def filter_parts(driven: Driven, bad: set[bytes], error: QmqError) -> list[tuple[int, bytes]]:
    """Play a broker that refuses each batch with one of these bodies; the producer sequences and bodies it stored."""
    stored = list[tuple[int, bytes]]()
    while (written := driven.write()) is not None:
        request, batch = written
        view = memoryview(bytearray(bytes_of(batch)))
        runs = stored_runs(view, check_batch(view, BatchLimits()).header)
        bodies = [body for run in runs for body in run.bodies()]
        if bad.intersection(bodies):
            driven.sending.refused(request, error, 0.0)
        else:
            stored += [(batch.producer_sequence + at, body) for at, body in enumerate(bodies)]
            driven.sending.stored(request, 1_000, 1, 0, STORE, tuple(100 * at for at in range(len(runs))), 0.0)
    return stored


REFUSALS = [InvalidOption("too late"), MessageTooLarge("too large"), TooManySubjects("too many")]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
@pytest.mark.parametrize("lost", [False, True])
def test_a_message_that_is_refused_fails_alone(error: QmqError, lost: bool) -> None:
    driven = Driven()
    accumulator, waiters = driven.accumulator, {b"w%d" % number: Waiting() for number in range(30)}
    tickets = dict[int, bytes]()
    for number in range(30):
        for subject in ("a", "b", f"single-{number}"):
            ticket = accumulator.add_nowait(subject, b"%s %d" % (subject.encode(), number), NO_HEADER, True, 0.0)
            tickets[ticket] = b"%s %d" % (subject.encode(), number)
        accumulator.add(f"awaited-{number}", b"w%d" % number, NO_HEADER, True, waiters[b"w%d" % number], 0.0)
    bad = {b"w7", b"w8", b"w29", b"single-0 0", b"single-28 28"}
    if not isinstance(error, TooManySubjects):
        bad |= {b"a 5", b"b 29"}
    if lost:
        driven.written()
        driven.sending.disconnected(LOST, 0.0)
        driven.sending.connected(STORE, driven.limits)
    flushed = Waiting()
    driven.outcomes.flush(flushed)
    stored = filter_parts(driven, bad, error)
    assert len(dict(stored)) == len(stored) == 120 - len(bad)
    if lost:
        assert max(stored)[0] < 120, "what may be on its way still must not be stored under other numbers"
    assert {body for body, one in waiters.items() if one.error is not None} == bad & waiters.keys()
    assert all(one.done() for one in waiters.values())
    assert flushed.done()
    failed = driven.outcomes.take_failure()
    assert failed is not None
    assert {tickets[one.ticket] for one in failed.failures} == bad - waiters.keys()
    assert {one.error for one in failed.failures} == {error}
    assert {one.outcome for one in failed.failures} == {"unknown" if lost else "refused"}
    assert not accumulator.unfinished
    assert accumulator.queued_bytes == 0


def test_of_a_call_with_many_messages_those_that_were_refused_are_named() -> None:
    driven = Driven()
    waiting = driven.send(*(b"%d" % number for number in range(10)))
    assert sorted(body for _, body in filter_parts(driven, {b"3", b"8"}, InvalidOption("no"))) == [
        b"%d" % number for number in range(10) if number not in (3, 8)
    ]
    assert type(waiting.error) is SendFailed
    assert [failure.ticket for failure in waiting.error.failures] == [3, 8]
    assert driven.accumulator.queued_bytes == 0


def test_receipts_of_messages_whose_neighbour_was_refused() -> None:
    driven = Driven()
    waiting, bad = Waiting(), Waiting()
    driven.accumulator.add("a", b"bad", NO_HEADER, True, bad, 0.0)
    driven.accumulator.add_many("a", [b"1", b"2", b"3"], True, waiting, 0.0)
    filter_parts(driven, {b"bad"}, InvalidOption("no"))
    assert type(bad.error) is SendFailed
    assert len(waiting.result) == 3
    assert len({receipt.id for receipt in waiting.result}) > 1


def test_where_all_of_a_subject_must_fail_it_is_not_cut() -> None:
    driven = Driven()
    waiting = driven.send(*(b"%d" % number for number in range(10)))
    driven.sending.refused(driven.written()[0], TooManySubjects("no"), 0.0)
    assert type(waiting.error) is SendFailed
    assert driven.write() is None


def test_bytes_that_are_called_bad_get_a_second_try_each_time_they_go_out() -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    at = 0.0
    for error in (BadBatch("no"), FULL, BadBatch("no"), FULL):
        driven.sending.refused(driven.written(at)[0], error, at)
        assert not waiting.done()
        at += 5.0
    driven.sending.refused(driven.written(at)[0], BadBatch("no"), at)
    driven.sending.refused(driven.written(at + 5.0)[0], BadBatch("no"), at + 5.0)
    assert type(waiting.error) is SendFailed


@pytest.mark.parametrize(
    "error",
    [
        SyncFailed("fsync failed"),
        SequenceForgotten("too old"),
        StorageError("a call to the disk failed"),
        BadBytes("it was stored and cannot be read"),
        InternalError("nobody foresaw it"),
        RemoteError("from_the_future: who knows"),
    ],
)
def test_a_refusal_that_leaves_it_open_is_unknown(error: QmqError) -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    driven.sending.refused(driven.written()[0], error, 0.0)
    assert type(waiting.error) is SendUnknown


def test_once_an_answer_was_lost_a_failure_is_unknown() -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    driven.written()
    driven.sending.disconnected(LOST, 0.0)
    driven.sending.connected(STORE, driven.limits)
    driven.sending.refused(driven.written()[0], TooManySubjects("no"), 0.0)
    assert type(waiting.error) is SendUnknown


def test_tries_end_at_send_timeout_and_the_error_names_the_last_cause() -> None:
    driven = Driven()
    refused = driven.send(b"1")
    request, _ = driven.written(5.0)
    driven.sending.refused(request, FULL, 5.0)
    driven.sending.expire(5.0 + TIMEOUT - 0.01)
    assert not refused.done()
    driven.sending.expire(5.0 + TIMEOUT)
    assert type(refused.error) is SendFailed
    assert isinstance(refused.error.__cause__, StorageFull)
    assert "the disk is full" in str(refused.error)
    assert "send_timeout of 30 s" in str(refused.error)


def test_an_unanswered_batch_is_unknown_at_send_timeout() -> None:
    driven = Driven()
    waiting = driven.send(b"1")
    driven.written(0.0)
    driven.sending.expire(TIMEOUT)
    assert type(waiting.error) is SendUnknown
    assert "did not answer" in str(waiting.error)


def test_messages_never_written_fail_as_not_sent_when_nothing_moves() -> None:
    driven = Driven(connected=False)
    early, late = driven.send(b"1", now=0.0), driven.send(b"2", now=10.0)
    gathered = Waiting()
    driven.accumulator.add("a", b"3", NO_HEADER, True, gathered, 20.0)
    driven.sending.last_error = Overloaded("too many connections")
    driven.sending.expire(TIMEOUT)
    assert type(early.error) is SendFailed
    assert "too many connections" in str(early.error)
    assert not late.done()
    driven.sending.expire(TIMEOUT + 10.0)
    assert late.done()
    assert not gathered.done()
    driven.sending.expire(TIMEOUT + 20.0)
    assert type(gathered.error) is SendFailed
    assert driven.accumulator.queued_bytes == 0


@pytest.mark.parametrize("order_key", [None, "order-1"])
def test_a_message_that_joins_others_that_wait_has_its_own_time(order_key: str | None) -> None:
    driven, header = Driven(connected=False), make_header(order_key=order_key)
    driven.accumulator.broker_of = lambda order_key: 0
    early, late = Waiting(), Waiting()
    driven.accumulator.add("a", b"1", header, True, early, 0.0)
    driven.sending.expire(1.0)
    driven.accumulator.add("a", b"2", header, True, late, TIMEOUT - 1.0)
    driven.sending.expire(TIMEOUT)
    assert type(early.error) is SendFailed
    assert not late.done()
    driven.sending.connected(STORE, driven.limits)
    driven.store(driven.written(TIMEOUT)[0], TIMEOUT)
    assert late.result is not None


def test_messages_gather_for_linger_also_beside_a_look_at_the_time() -> None:
    driven = Driven(linger=5.0)
    for now in range(5):
        driven.accumulator.add_nowait("a", b"x", NO_HEADER, True, float(now))
        driven.sending.expire(float(now))
        assert driven.write(float(now)) is None
    assert driven.written(5.0)[1].count == 5


def test_a_long_queue_does_not_time_out_while_it_moves() -> None:
    driven = Driven(window=1)
    waiting = [driven.send(b"x", now=0.0) for _ in range(10)]
    for number in range(10):
        now = 20.0 * number
        driven.sending.expire(now)
        driven.store(driven.written(now)[0], now)
    assert all(each.result is not None for each in waiting)


def test_flush_waits_for_present_messages_and_hurries_them() -> None:
    driven = Driven(linger=5.0)
    flushed, later = Waiting(), Waiting()
    driven.outcomes.flush(flushed)
    assert flushed.told
    driven.accumulator.add_nowait("a", b"1", NO_HEADER, True, 0.0)
    assert driven.write(0.0) is None
    assert driven.sending.wake_at() == 5.0
    driven.outcomes.flush(later)
    request, _ = driven.written(0.0)
    driven.accumulator.add_nowait("a", b"2", NO_HEADER, True, 0.0)
    driven.store(request)
    assert later.told


def test_failures_of_messages_without_a_waiter_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven()
    assert driven.outcomes.take_failure() is None
    tickets = [driven.accumulator.add_nowait("a", b"1", NO_HEADER, True, 0.0) for _ in range(3)]
    with caplog.at_level(logging.ERROR, "qmq.client"):
        driven.sending.refused(driven.written()[0], TooManySubjects("no"), 0.0)
    assert "3 messages of send_nowait were not stored: no" in caplog.text
    error = driven.outcomes.take_failure()
    assert error is not None
    assert [failure.ticket for failure in error.failures] == tickets
    assert driven.outcomes.take_failure() is None


def test_failures_that_wait_for_flush_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.producer.outcomes.MAX_FAILURES", 4)
    driven = Driven()
    for _ in range(3):
        for _ in range(3):
            driven.accumulator.add_nowait("a", b"1", NO_HEADER, True, 0.0)
        driven.sending.refused(driven.written()[0], TooManySubjects("no"), 0.0)
    error = driven.outcomes.take_failure()
    assert error is not None
    assert len(error.failures) == 4
    assert "9 messages" in str(error)
    assert driven.outcomes.take_failure() is None


def test_abandon_fails_all_batches_as_refused_or_unknown() -> None:
    driven = Driven(window=1)
    unknown, sealed, gathered = driven.send(b"1"), driven.send(b"2"), Waiting()
    driven.written()
    driven.accumulator.add("a", b"3", NO_HEADER, True, gathered, 0.0)
    driven.sending.abandon(ConnectionLost("closed"))
    assert type(unknown.error) is SendUnknown
    assert type(sealed.error) is type(gathered.error) is SendFailed
    assert not driven.sending.has_waiting()
    assert driven.accumulator.queued_bytes == 0


def test_silence_is_counted_from_the_last_answer() -> None:
    driven = Driven()
    assert driven.sending.silent_since() is None
    driven.send(b"1")
    driven.send(b"2")
    first, _ = driven.written(1.0)
    driven.written(2.0)
    assert driven.sending.silent_since() == 1.0
    driven.store(first, 8.0)
    assert driven.sending.silent_since() == 8.0
    driven.sending.disconnected(LOST, 0.0)
    assert driven.sending.silent_since() is None
    driven.sending.connected(STORE, driven.limits)
    driven.written(50.0)
    assert driven.sending.silent_since() == 50.0


def test_while_bytes_move_nobody_is_silent_and_no_time_passes_for_what_is_sent_or_waits() -> None:
    driven = Driven()
    sent = driven.send(b"1")
    driven.written(0.0)
    for second in range(1, 101):
        driven.sending.moved(float(second), 1.0)
        driven.sending.expire(float(second))
    assert driven.sending.silent_since() == 100.0
    assert driven.sending.was_slow
    waiting = driven.send(b"2", now=100.0)
    driven.sending.disconnected(LOST, 100.0)
    assert not driven.sending.was_slow
    driven.sending.expire(100.0 + TIMEOUT - 0.1)
    assert not sent.done()
    driven.sending.expire(100.0 + TIMEOUT)
    assert type(sent.error) is SendUnknown
    assert type(waiting.error) is SendFailed


def test_bytes_that_move_for_ever_do_not_outlast_the_brokers_memory_of_a_producer() -> None:
    driven = Driven()
    driven.sending.connected(STORE, SendLimits(most_moved_s=50.0))
    sent = driven.send(b"1")
    driven.written(0.0)
    for second in range(1, 101):
        driven.sending.moved(float(second), 1.0)
    driven.sending.expire(50.0 + TIMEOUT - 0.1)
    assert not sent.done()
    driven.sending.expire(50.0 + TIMEOUT)
    assert sent.done()


class World:
    """A broker behind a bad network: it drops connections, loses answers, refuses for a while, or some for good.

    Where it refuses some for good, what was on its way on a connection that is gone may still arrive.
    """

    def __init__(self, seed: int, refuses: bool, *, drops: bool = True, guilty: bool = False) -> None:
        self.random = random.Random(seed)
        self.refuses = refuses
        self.driven = Driven(window=4)
        self.producers = Producers(4, 10, 1 << 60)
        self.stored: list[bytes] = []  # bodies, in the order of the log
        self.towards: deque[tuple[int, bytes]] = deque()
        self.answers: deque[tuple[int, int | QmqError]] = deque()
        self.late: list[bytes] = []
        self.drops, self.guilty = drops, guilty
        self.full = False
        self.now = 0.0
        self.places: dict[int, int] = {}  # position: index of the first body in stored

    def step(self) -> None:
        self.now += 0.02
        kind = self.random.random()
        if kind < 0.02:
            if not self.drops:
                return
            if self.guilty:
                self.late += [batch for _, batch in self.towards if self.random.random() < 0.5]
            self.towards.clear()
            self.answers.clear()
            self.driven.sending.disconnected(LOST, 0.0)
            self.driven.sending.connected(STORE, self.driven.limits)
        elif kind < 0.06:
            self.full = self.refuses and not self.full
        elif self.late and kind < 0.08:
            self.take(0, self.late.pop(self.random.randrange(len(self.late))))
        elif kind < 0.4:
            written = self.driven.write(self.now)
            if written is not None:
                self.towards.append((written[0], bytes_of(written[1])))
        elif kind < 0.7:
            if self.towards:
                self.take(*self.towards.popleft())
        elif self.answers:
            request, position = self.answers.popleft()
            if isinstance(position, QmqError):
                self.driven.sending.refused(request, position, self.now)
            else:
                self.driven.sending.stored(request, position, 1, 0, STORE, (self.places[position],), self.now)

    def take(self, request: int, batch: bytes) -> None:
        view = memoryview(bytearray(batch))
        checked = check_batch(view, BatchLimits())
        header = checked.header
        bounds = header.producer_id, header.producer_sequence, header.messages, header.data_crc
        start = header.data_start + 10 * header.messages
        payload = bytes(view[start:])
        bodies = [payload[at : at + 6] for at in range(0, len(payload), 6)]
        answer: int | QmqError
        try:
            known = self.producers.lookup(*bounds)
            if known is not None:
                answer = known.position
            elif self.full:
                answer = FULL
            elif self.guilty and any(map(is_guilty, bodies)):
                answer = InvalidOption("guilty")
            else:
                answer = 1_000 * (len(self.places) + 1)
                self.places[answer] = len(self.stored)
                self.stored += bodies
                self.producers.remember(*bounds, 0, answer, 0)
        except QmqError as error:
            answer = error
        if request:
            self.answers.append((request, answer))


def is_guilty(body: bytes) -> bool:
    return int(body) % 5 == 0


@given(st.integers(0, 1 << 32), st.booleans(), st.booleans())
def test_no_innocent_message_is_lost_or_doubled_where_others_are_refused(seed: int, refuses: bool, drops: bool) -> None:
    world = World(seed, refuses, drops=drops, guilty=True)
    sent: list[tuple[list[bytes], Waiting]] = []
    for number in range(0, 240, 8):
        bodies = [b"%06d" % (number + i) for i in range(8)]
        sent.append((bodies, world.driven.send(*bodies, now=world.now)))
        for _ in range(10):
            world.step()
    world.full = world.refuses = False
    for _ in range(20_000):
        if not world.driven.accumulator.unfinished and not world.late:
            break
        world.step()
    assert len(set(world.stored)) == len(world.stored)
    assert not any(map(is_guilty, world.stored))
    for bodies, waiting in sent:
        failed = {failure.ticket: failure for failure in waiting.error.failures}
        for at, body in enumerate(bodies):
            if is_guilty(body):
                assert at in failed
            elif not drops or at not in failed:
                assert at not in failed
                assert body in world.stored
            else:  # the broker has forgotten whether it has it
                assert failed[at].outcome == "unknown"


@given(st.integers(0, 1 << 32), st.booleans())
def test_no_send_makes_two_messages(seed: int, refuses: bool) -> None:
    world = World(seed, refuses)
    sent: list[tuple[list[bytes], Waiting]] = []
    number = 0
    for _ in range(300):
        if world.random.random() < 0.1:
            count = world.random.randrange(1, 4)
            bodies = [b"%06d" % (number + i) for i in range(count)]
            number += count
            sent.append((bodies, world.driven.send(*bodies, now=world.now)))
        world.step()
    world.full = world.refuses = False
    for _ in range(3_000):
        if not world.driven.accumulator.unfinished:
            break
        world.step()
    assert len(set(world.stored)) == len(world.stored) == number
    for bodies, waiting in sent:
        assert [world.stored[receipt.sequence] for receipt in waiting.result] == bodies
    if not refuses:
        assert world.stored == sorted(world.stored)
