"""Consumers of groups: acks, redelivery, expired sessions, windows, and starts in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.delivery.eligibility import MOST_LOOKS
from qmq.broker.error_log.error_log import Failure
from qmq.broker.groups.message_ranges import PARTITIONS
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import (
    Ack,
    Disconnected,
    DispositionRange,
    HandBack,
    Heartbeat,
    Subscribe,
    Unsubscribe,
)
from qmq.broker.ports.effects import Acked, Effect, HandedBack, PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced, UnknownSubscription
from qmq.net.protocol.types import Disposition, KnownConsumer
from tests.broker.harness import Driven, bodies_of, runs_of_answer


class Consumer:
    """A consumer as its client sees it: its messages by delivery sequence, with attempts."""

    def __init__(
        self,
        driven: Driven,
        name: str,
        *prefixes: str,
        nonce: bytes = b"n",
        connection: int = 1,
        mode: str = "reliable",
        transient: bool = False,
        start: tuple[str, int] | None = None,
        group: str = "g",
        asks: str = "follow",
        session: int = 0,
        client: bytes = b"",
        **more: object,
    ) -> None:
        self.driven, self.name, self.connection, self.nonce = driven, name, connection, nonce
        self.prefixes = prefixes or ("",)
        self.settings = tuple(more.items())
        self.mode, self.transient, self.start, self.group, self.asks = mode, transient, start, group, asks
        self.session, self.client = session, client or name.encode()
        self.got: dict[int, tuple[bytes, int]] = {}
        self.join()

    def join(self) -> None:
        driven = self.driven
        command = Subscribe(
            self.connection,
            driven.request(),
            self.group,
            self.prefixes,
            self.name,
            self.start,
            self.nonce,
            self.client,
            self.transient,
            self.settings,
            self.mode,
            asks=self.asks,
            session=self.session,
        )
        answer = driven.do(command)[-1]
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Subscribed), answer
        self.answer = answer
        assert answer.consumer_state is not None
        self.subscription, self.consumer_state = answer.subscription, answer.consumer_state
        self.expected = answer.consumer_state.ack_floor

    def pull(self, max_count: int = 1_000_000, **limits: int) -> list[bytes]:
        """Pull without waiting, and return the bodies."""
        command = self.driven.pull_command(self.subscription, max_count, connection=self.connection, **limits)
        said = self.driven.do(command._replace(expected=self.expected))
        return self.take([effect for effect in said if getattr(effect, "request", 0) == command.request])

    def take(self, answers: list[Effect]) -> list[bytes]:
        (answer,) = answers
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, PulledMessages)
        bodies = bodies_of(runs_of_answer(answer, answer.messages - sum(count for _, count, _ in answer.ranges)))
        numbers = [(first + at, attempt) for first, count, attempt in answer.ranges for at in range(count)]
        for body, (number, attempt) in zip(bodies, numbers, strict=True):
            self.got[number] = body, attempt
            self.expected = max(self.expected, number + 1)
        return bodies

    def ack(self, *numbers: int) -> int:
        """Ack these delivery sequences (none: all), and return how many were refused."""
        pairs = tuple(one for number in numbers or sorted(self.got) for one in (number, number + 1))
        (answer,) = [
            one
            for one in self.driven.do(Ack(self.connection, self.driven.request(), self.subscription, pairs))
            if not isinstance(one, PulledMessages)
        ]
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Acked)
        return answer.refused

    def back(
        self, start: int, end: int, disposition: Disposition = Disposition.NACK, delay_us: int | None = None
    ) -> None:
        back = DispositionRange(start, end, disposition, delay_us, "broke")
        for answer in self.driven.do(HandBack(self.connection, self.driven.request(), self.subscription, [back])):
            if isinstance(answer, Refused):
                raise answer.error
            if isinstance(answer, HandedBack) and answer.refused:
                raise Fenced("it is not held")


def many(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def filled(tmp_path: Path, count: int = 10, limits: BrokerLimits | None = None) -> Driven:
    driven = Driven(tmp_path, limits)
    for body in many(count):
        driven.send("a.x", body)
    return driven


def killed(driven: Driven) -> None:
    """Kill the broker's process, and start it again."""
    driven.store.close(clean=False)
    driven.wanted.clear()
    driven.reads.clear()
    driven.open()


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_what_is_acknowledged_is_not_seen_again_and_what_is_held_comes_first(tmp_path: Path, stop: object) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    assert consumer.pull(6) == many(6)
    assert consumer.ack(0, 1, 4) == 0
    stop(driven)  # type: ignore[operator]
    consumer.join()
    assert (consumer.consumer_state.ack_floor, consumer.consumer_state.next_sequence) == (2, 6)
    assert consumer.pull() == [b"2", b"3", b"5"]
    assert consumer.pull() == many(10)[6:]
    assert consumer.ack() == 0
    stop(driven)  # type: ignore[operator]
    consumer.join()
    assert consumer.pull() == []
    driven.close()


def test_a_lost_answer_is_given_again(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    assert consumer.pull(4) == many(4)
    consumer.expected = 0
    assert consumer.pull(3) == many(3)
    consumer.expected = 2
    assert consumer.pull() == [b"2", b"3"]
    assert consumer.pull() == many(10)[4:]
    driven.close()


def test_what_is_handed_back_comes_again_to_anyone(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    one, two = Consumer(driven, "one", connection=1), Consumer(driven, "two", connection=2)
    assert one.pull(5) == many(5)
    one.back(1, 3)
    one.back(4, 5, Disposition.RELEASE)
    assert two.pull(3) == [b"4"]
    assert two.got == {0: (b"4", 1)}
    assert two.pull(3) == [b"5", b"6", b"7"]
    driven.advance(4_999)
    assert two.pull(3) == [b"8", b"9"]
    driven.advance(1)
    assert two.pull(1) == [b"1"]
    assert two.pull(5) == [b"2"]
    assert [two.got[number] for number in (6, 7)] == [(b"1", 2), (b"2", 2)]
    assert two.pull() == []
    with pytest.raises(Fenced):
        one.back(1, 2)
    assert one.ack(1) == 1
    assert one.ack(0, 3) == 0
    driven.close()


def test_a_waiting_pull_wakes_when_a_retry_falls_due_and_when_another_leaves(tmp_path: Path) -> None:
    driven = filled(tmp_path, 4)
    one, two = Consumer(driven, "one", connection=1), Consumer(driven, "two", connection=2)
    assert one.pull() == many(4)
    waiting = driven.pull_command(two.subscription, timeout_ms=60_000, connection=2)._replace(expected=0)
    assert driven.do(waiting) == []
    one.back(0, 1)
    assert driven.advance(4_999) == []
    said = driven.advance(1) + driven.do()
    assert two.take(said) == [b"0"]
    waiting = driven.pull_command(two.subscription, timeout_ms=60_000, connection=2)._replace(expected=1)
    assert driven.do(waiting) == []
    said = driven.do(Unsubscribe(1, driven.request(), one.subscription))
    assert two.take([one for one in said if isinstance(one, PulledMessages)]) == [b"1", b"2", b"3"]
    driven.close()


def test_who_is_silent_expires_and_who_beats_does_not(tmp_path: Path) -> None:
    driven = filled(tmp_path, 10)
    one, two = Consumer(driven, "one", connection=1), Consumer(driven, "two", connection=2)
    assert one.pull(4) == many(4)
    for _ in range(10):
        driven.advance(20_000)
        driven.do(Heartbeat(9, driven.request(), b"one", 0), Heartbeat(9, driven.request(), b"two", 0))
    assert two.pull() == many(10)[4:]
    two.ack()
    driven.advance(20_000)
    driven.do(Heartbeat(9, driven.request(), b"two", 0))
    driven.advance(10_000)
    again = []
    while bodies := two.pull():
        again += bodies
        two.ack()
    assert again == many(4)
    with pytest.raises(Fenced):
        one.ack(0)
    with pytest.raises(Fenced):
        one.pull()
    one.join()
    assert one.consumer_state.epoch == 2
    assert one.pull() == []
    driven.close()


def test_a_window_stops_only_its_consumer(tmp_path: Path) -> None:
    driven = filled(tmp_path, 30)
    one = Consumer(driven, "one", connection=1, max_unacked=5)
    two = Consumer(driven, "two", connection=2)
    assert one.pull() == many(5)
    waiting = driven.pull_command(one.subscription, timeout_ms=60_000, connection=1)._replace(expected=5)
    assert driven.do(waiting) == []
    assert two.pull(3) == many(8)[5:]
    said = driven.do(Ack(1, driven.request(), one.subscription, (1, 3)))
    assert one.take([effect for effect in said if isinstance(effect, PulledMessages)]) == [b"8", b"9"]
    driven.close()


def test_messages_that_are_gone_are_passed_and_those_behind_them_come(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    consumer = Consumer(driven, "one")
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    gone = MessageRange(PARTITIONS, 1 << 60, 0, 0, 1, 1 << 60)
    for _ in range(2):
        ledger.retries.add(gone, 2, 0, False, Failure("", 1, 0, 1, 1))
    driven.do(driven.send_command({"a": [b"1"]}))
    assert [*consumer.pull(), *consumer.pull()] == [b"1"]
    assert ledger.retries.count == 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_messages_of_subjects_that_a_start_numbers_otherwise_stay_what_they_are(
    tmp_path: Path, checkpoint: bool
) -> None:
    driven = Driven(tmp_path, partitions=3)
    names = [f"s{number}" for number in range(6)]
    for name in names:
        driven.change_producer()
        driven.send(name, name.encode(), name.encode() + b"'")
    if checkpoint:
        driven.checkpoint()
    consumers = [Consumer(driven, name, name, connection=at) for at, name in enumerate(names, 1)]
    for consumer, name in zip(consumers, names, strict=True):
        assert consumer.pull() == [name.encode(), name.encode() + b"'"]
    killed(driven)
    for consumer, name in zip(consumers, names, strict=True):
        consumer.got.clear()
        consumer.join()
        consumer.expected = consumer.consumer_state.ack_floor
        assert consumer.pull() == [name.encode(), name.encode() + b"'"]
    driven.close()


def unread(driven: Driven, sequence: int) -> None:
    """Mark the batch of a message as unreadable."""
    assert driven.store.partitions[0].message_log.unreadable.add(
        driven.store.partitions[0].consumer_log.read_entry(sequence)[1], 1
    )


def test_a_pull_goes_on_behind_what_it_was_to_have_again_and_cannot_be_read(tmp_path: Path) -> None:
    driven = filled(tmp_path, 4)
    consumer = Consumer(driven, "c")
    assert consumer.pull(2) == many(2)
    unread(driven, 0)
    unread(driven, 1)
    consumer.expected = 0  # its answer was lost
    assert consumer.pull(10) == many(4)[2:], "all in one pull, without waiting"


@pytest.mark.parametrize("gone", [1, 3])
def test_what_goes_out_alone_and_cannot_be_read_keeps_nobody_from_the_rest(tmp_path: Path, gone: int) -> None:
    driven = filled(tmp_path, 3)
    first = Consumer(driven, "a")
    assert first.pull(gone) == many(gone)
    for sequence in range(gone):
        unread(driven, sequence)
    driven.advance(40_000)  # an expired session: each goes out alone from now on
    second = Consumer(driven, "b", nonce=b"m", connection=2)
    assert second.pull(10, min_count=1) == many(3)[gone:]
    assert second.ack() == 0


def test_one_answer_looks_for_so_many_retries_at_most(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({f"a.{number}": [b"%d" % number] for number in range(200)}))
    consumer = Consumer(driven, "c")
    assert len(consumer.pull()) == 200
    backs = [DispositionRange(number, number + 1, Disposition.NACK, 0, "broke") for number in range(200)]
    driven.do(HandBack(consumer.connection, driven.request(), consumer.subscription, backs))
    came = [consumer.pull() for _ in range(4)]
    assert [len(messages) for messages in came[:3]] == [MOST_LOOKS + 1] * 3
    assert sorted(int(body) for messages in came for body in messages) == list(range(200))
    driven.close()


def test_a_late_subscribe_takes_nothing_over(tmp_path: Path) -> None:
    """A connection broke and its frame arrives seconds later: the client has long subscribed again, or left."""
    driven = filled(tmp_path, 4)
    first = Consumer(driven, "c", nonce=b"2", session=2)
    late = Subscribe(3, driven.request(), "g", ("",), "c", None, b"1", b"c", session=1)
    assert first.pull() == many(4)
    for is_there in (True, False):
        (refused,) = driven.do(late)
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, Fenced)
        if is_there:
            assert first.ack() == 0
            driven.do(Unsubscribe(1, driven.request(), first.subscription))
    assert driven.broker.groups["g"].consumers_there() == 0
    Consumer(driven, "c", nonce=b"1", session=1, client=b"another")
    Consumer(driven, "c", nonce=b"3", connection=2, session=3)
    killed(driven)
    Consumer(driven, "c", nonce=b"1", connection=4, session=1)  # nothing arrives of what was sent to a broker before
    driven.close()


def test_whoever_is_refused_as_a_consumer_leaves_no_subscription(tmp_path: Path) -> None:
    """Another program has taken over: the first one counts as no consumer, and no number of its own gets messages."""
    driven = filled(tmp_path, 4)
    first = Consumer(driven, "c", connection=1)
    state = first.consumer_state
    second = Consumer(driven, "c", nonce=b"other", connection=2)
    known = KnownConsumer(state.since_us, state.generation, state.epoch, 0)
    again = Subscribe(3, driven.request(), "g", ("",), "c", None, b"n", b"c", known=known)
    (refused,) = driven.do(again)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Fenced)
    said = driven.do(driven.pull_command(second.subscription + 1, connection=3))
    assert [type(one.error) for one in said if isinstance(one, Refused)] == [UnknownSubscription]
    driven.do(Disconnected(3, by_client=True))
    assert driven.broker.groups["g"].consumers_there() == 1
    assert second.pull() == many(4)
    driven.close()
