"""Clients tell a broker at a new connection of lost acks, and of how far their consumers had come."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Heartbeat, Subscribe
from qmq.broker.ports.effects import Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced
from qmq.net.protocol.types import ConsumerState, KnownConsumer
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, killed, many

SESSION_TIMEOUT_MS = 30_000


def hello(driven: Driven, nonce: bytes, known: KnownConsumer | None, client: bytes = b"client") -> Subscribed:
    """Subscribe as consumer c of group g. Raises the error of a refusal."""
    command = Subscribe(1, driven.request(), "g", ("",), "c", None, nonce, client, known=known)
    answers = [one for one in driven.do(command) if isinstance(one, Subscribed | Refused)]
    (answer,) = answers
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Subscribed)
    return answer


def file_offset_of(answer: Subscribed) -> ConsumerState:
    assert answer.consumer_state is not None
    return answer.consumer_state


def known_of(consumer: Consumer, *handled: int, epoch: int = 0) -> KnownConsumer:
    consumer_state = consumer.consumer_state
    return KnownConsumer(consumer_state.since_us, consumer_state.generation, epoch, consumer.expected, handled)


def again(consumer: Consumer, answer: Subscribed) -> list[bytes]:
    """Return the bodies that a consumer which has come back pulls first."""
    consumer.subscription, consumer.consumer_state = answer.subscription, file_offset_of(answer)
    consumer.expected = consumer.consumer_state.ack_floor
    return consumer.pull()


def test_acknowledgements_that_were_lost_are_taken_from_what_the_client_kept(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    consumer.pull(6)
    consumer.ack(0)
    answer = hello(driven, b"another process", known_of(consumer, 0, 2, 3, 4))
    assert file_offset_of(answer).ack_floor == 2
    assert again(consumer, answer) == [b"2", b"4", b"5"]
    killed(driven)
    answer = hello(driven, b"a third one", None)
    assert again(consumer, answer) == [b"2", b"4", b"5"], "it stands in the pull log"
    driven.close()


def test_it_never_goes_past_the_end_of_the_pull_log(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    consumer.pull(4)
    answer = hello(driven, b"another", known_of(consumer, 2, 1_000))
    assert again(consumer, answer) == [b"0", b"1"]
    assert consumer.pull() == many(10)[4:]
    driven.close()


@pytest.mark.parametrize("other", [{"since_us": 1}, {"generation": 77}])
def test_what_was_kept_of_another_pull_log_or_consumer_is_passed_over(tmp_path: Path, other: dict[str, int]) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    consumer.pull(4)
    answer = hello(driven, b"another", known_of(consumer, 0, 4)._replace(**other))
    assert again(consumer, answer) == many(4)
    driven.close()


def test_what_expired_is_not_acknowledged_any_more(tmp_path: Path) -> None:
    driven = filled(tmp_path, limits=BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    consumer = Consumer(driven, "c")
    consumer.pull()
    driven.advance(SESSION_TIMEOUT_MS)
    answer = hello(driven, b"another", known_of(consumer, 0, 10))
    assert file_offset_of(answer).ack_floor == file_offset_of(answer).next_sequence == 10
    assert again(consumer, answer), "it is handed out again"
    driven.close()


def test_acknowledgements_that_were_kept_are_progress(tmp_path: Path) -> None:
    """Messages are not quarantined where a process dies after each ack."""
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    consumer.pull()
    for number in range(6):
        answer = hello(driven, b"process %d" % number, known_of(consumer, 0, number + 1))
        assert file_offset_of(answer).ack_floor == number + 1
        assert file_offset_of(answer).next_sequence == 10
    driven.close()


def test_who_was_taken_over_from_does_not_take_over_again(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    first = hello(driven, b"first", None)
    known = KnownConsumer(
        file_offset_of(first).since_us, file_offset_of(first).generation, file_offset_of(first).epoch, 0
    )
    assert file_offset_of(hello(driven, b"first", known)).epoch == file_offset_of(first).epoch, "a reconnect"
    second = hello(driven, b"second", known._replace(epoch=0))
    assert file_offset_of(second).epoch == file_offset_of(first).epoch + 1
    with pytest.raises(Fenced, match="another program"):
        hello(driven, b"first", known)
    killed(driven)
    with pytest.raises(Fenced, match="another program"):
        hello(driven, b"first", known)
    assert file_offset_of(hello(driven, b"second", None)).epoch == file_offset_of(second).epoch
    driven.close()


def test_who_has_expired_comes_back_as_another_epoch(tmp_path: Path) -> None:
    driven = filled(tmp_path, limits=BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    first = file_offset_of(hello(driven, b"first", None))
    driven.advance(SESSION_TIMEOUT_MS)
    known = KnownConsumer(first.since_us, first.generation, first.epoch, 0)
    assert file_offset_of(hello(driven, b"first", known)).epoch == first.epoch + 1
    driven.close()


def test_no_delivery_sequence_below_the_one_that_is_expected_is_given_again(tmp_path: Path) -> None:
    """A power loss may take the records of pulls that a client has seen."""
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    consumer.pull(3)
    known = known_of(consumer, epoch=7)._replace(expected=50, generation=0)
    answer = hello(driven, consumer.nonce, known)
    assert file_offset_of(answer).epoch > 7
    assert again(consumer, answer) == many(3), "what the broker knows of is held"
    assert consumer.pull() == many(10)[3:]
    assert min(number for number in consumer.got if number >= 3) == 50
    driven.close()


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_heartbeats_count_after_a_start_before_the_client_subscribes_again(tmp_path: Path, stop: object) -> None:
    """A handler may block the loop of its program for long, while the broker is started again."""
    driven = filled(tmp_path, limits=BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    consumer = Consumer(driven, "c")
    consumer.pull()
    stop(driven)  # type: ignore[operator]
    for _ in range(5):
        driven.advance(SESSION_TIMEOUT_MS // 2)
        driven.do(Heartbeat(9, driven.request(), b"c", 0))
    consumer.join()
    assert (consumer.consumer_state.ack_floor, consumer.consumer_state.next_sequence) == (0, 10)
    assert consumer.consumer_state.epoch == 1
    driven.close()
