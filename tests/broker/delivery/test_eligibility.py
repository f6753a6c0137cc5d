"""Where consumers of a group follow different prefixes, a retry goes to one that follows its subject."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.delivery import eligibility
from qmq.broker.delivery.eligibility import _REMEMBERED, MOST_LOOKS, eligibility_of
from qmq.broker.delivery.encode import RangeLookup
from qmq.broker.error_log import error_log
from qmq.broker.error_log.error_log import Failure
from qmq.broker.journal.record_types import InFlightRange, MessageRange
from qmq.broker.ports.commands import HandOver
from qmq.broker.ports.effects import PulledMessages
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.copies.for_group import private_batch
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, answered, numbers_of, texts
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, killed
from tests.fake_disk import FakeDisk
from tests.format.test_private import run_of

SESSION_TIMEOUT_MS = 30_000


def filled(tmp_path: Path, count: int = 6) -> Driven:
    """Return a broker with messages of a.x and b.x in turn, one a batch; each body names its message."""
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    for number in range(count):
        subject = "ab"[number % 2]
        driven.send(f"{subject}.x", b"%s%d" % (subject.encode(), number))
    return driven


def bodies(consumer: Consumer) -> list[bytes]:
    return [body for body, _ in consumer.got.values()]


@pytest.mark.parametrize("delay_us", [0, 2_000_000])
def test_a_message_that_comes_back_goes_to_who_follows_its_subject(tmp_path: Path, delay_us: int) -> None:
    driven = filled(tmp_path)
    of_a, of_b = Consumer(driven, "a", "a.", connection=1), Consumer(driven, "b", "b.", connection=2)
    assert of_b.pull() == [b"b1", b"b3", b"b5"]
    of_b.back(1, 2, delay_us=delay_us)
    driven.advance(2_000)
    assert of_a.pull() == [b"a0", b"a2", b"a4"]
    assert of_a.pull() == []
    assert of_b.pull() == [b"b3"]
    assert of_b.got[3] == (b"b3", 2)
    assert of_a.ack() == of_b.ack(0, 2, 3) == 0
    driven.close()


@pytest.mark.parametrize("stop", [None, Driven.restart, killed])
@pytest.mark.parametrize("subjects", [("",), ("a.x", "b.x"), ("a.", "b.")])
def test_what_one_who_follows_all_held_is_shared_out(tmp_path: Path, stop: object, subjects: tuple[str, ...]) -> None:
    driven = filled(tmp_path, 40)
    everything = Consumer(driven, "all", *subjects, connection=1)
    of_a = Consumer(driven, "a", "a.", connection=2)
    of_b = Consumer(driven, "b", "b.x", connection=3)
    assert len(everything.pull()) == 40
    everything.back(0, 40, delay_us=0)
    assert of_a.pull(7) == [b"a%d" % number for number in range(0, 14, 2)]
    if stop is not None:
        stop(driven)  # type: ignore[operator]
        of_a.join()
        of_b.join()
        assert of_a.pull(7) == [b"a%d" % number for number in range(0, 14, 2)]
    assert of_b.pull() == [b"b%d" % number for number in range(1, 40, 2)]
    while of_a.pull(5):
        pass
    assert bodies(of_a) == [b"a%d" % number for number in range(0, 40, 2)]
    assert of_a.ack() == of_b.ack() == 0
    assert of_a.pull() == of_b.pull() == []
    driven.close()


def test_who_waits_is_woken_by_its_own_only(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    of_a, of_b = Consumer(driven, "a", "a.", connection=1), Consumer(driven, "b", "b.", connection=2)
    other = Consumer(driven, "b2", "b.", connection=3)
    assert len(of_a.pull()) == len(of_b.pull()) == 3
    waits = driven.pull_command(of_a.subscription, timeout_ms=60_000, connection=1)._replace(expected=3)
    assert driven.do(waits) == []
    of_b.back(0, 1, delay_us=0)
    assert driven.advance(0) == []
    after_us = driven.broker.tick(driven.now)
    assert after_us is not None
    assert after_us > driven.now.monotonic_us, "it looks in vain, again and again"
    assert other.pull() == [b"b1"]
    of_a.back(1, 2, delay_us=1_000_000)
    said = driven.advance(1_000) + driven.do()
    assert of_a.take([one for one in said if isinstance(one, PulledMessages)]) == [b"a2"]
    driven.close()


def test_what_goes_out_alone_goes_to_who_follows_it(tmp_path: Path) -> None:
    driven = filled(tmp_path, 20)
    of_a, of_b = Consumer(driven, "a", "a.", connection=1), Consumer(driven, "b", "b.", connection=2)
    assert len(of_b.pull()) == 10
    driven.advance(SESSION_TIMEOUT_MS // 2)
    assert len(of_a.pull(2)) == 2
    driven.advance(SESSION_TIMEOUT_MS // 2 + 1)  # b is silent
    assert len(of_a.pull(1)) == 1, "it need not be done before it gets more"
    assert of_a.ack() == 0
    assert of_a.pull() == [b"a%d" % number for number in range(6, 20, 2)]
    assert of_a.ack(*range(3, 10)) == 0
    assert of_a.pull() == []
    again = Consumer(driven, "b2", "b.", connection=3)
    for number in range(1, 20, 2):
        assert again.pull() == [b"b%d" % number]
        assert again.ack() == 0
        again.got.clear()
    driven.close()


@pytest.mark.parametrize("alone", [False, True])
def test_nobody_waits_behind_what_only_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(error_log, "LOADED_ITEMS", 8)
    driven = filled(tmp_path, 102)
    of_a, of_b = Consumer(driven, "a", "a.", connection=1), Consumer(driven, "b", "b.", connection=2)
    assert len(of_b.pull()) == 51
    for number in range(50):
        of_b.back(number, number + 1, delay_us=0)
    assert len(of_a.pull()) == 51
    of_a.back(50, 51, delay_us=0)
    if alone:
        driven.advance(SESSION_TIMEOUT_MS + 1)
        of_a, number = Consumer(driven, "a2", "a.", connection=3), 0
    waits = driven.pull_command(of_a.subscription, timeout_ms=60_000, connection=of_a.connection)
    said = driven.do(waits._replace(expected=of_a.expected))
    for _ in range(20):
        said += driven.advance(100)
    assert of_a.take([one for one in said if isinstance(one, PulledMessages)])[-1][:1] == b"a"
    driven.advance(2_000)
    again = Consumer(driven, "b2", "b.", connection=4)
    for _ in range(60):
        again.pull()
        again.ack()
        driven.advance(100)
    assert sorted(int(body[1:]) for body in bodies(again)) == list(range(1, 101 + 2 * alone, 2))
    driven.close()


def test_what_was_handed_over_goes_by_the_subject_that_it_was_sent_to(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    others = run_of(b"from elsewhere")
    mine = Consumer(driven, "mine", others.subject, connection=1)
    of_b = Consumer(driven, "b", "b.", connection=2)
    batch = memoryview(bytearray(private_batch(others, 0, "g", b"q" * 16, 0)))
    driven.do(HandOver(9, driven.request(), batch, "g", 1, Disposition.NACK, 0, "broke"))
    assert len(of_b.pull()) == 3
    assert of_b.pull() == []
    assert mine.pull() == [b"from elsewhere"]
    driven.close()


def test_what_is_not_in_memory_is_read_first(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk, segment_bytes=64 << 10, max_frame_bytes=32 << 10)
    for number in range(12):
        subject = "ab"[number % 2]
        driven.send(f"{subject}.x", b"%s%d" % (subject.encode(), number) + bytes(3_000))
    everything = Consumer(driven, "all", "", connection=1)
    of_b = Consumer(driven, "b", "b.", connection=2)
    while everything.pull(4):
        pass
    everything.back(0, 12, delay_us=0)
    disk.forget()
    got = [body[:2] for _ in range(6) for body in of_b.pull(2)]
    assert got == [b"b1", b"b3", b"b5", b"b7", b"b9", b"b1"]
    driven.close()


def test_a_wider_prefix_takes_what_narrower_ones_of_its_group_do(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    wide = Consumer(driven, "wide", "a.", connection=1)
    Consumer(driven, "narrow", "a.x", "a.x.y.", connection=2)
    subscriptions = driven.broker._delivery.subscriptions
    assert eligibility_of(driven.store, subscriptions.get(1, wide.subscription)) is None
    Consumer(driven, "other", "b.", connection=3)
    share = eligibility_of(driven.store, subscriptions.get(1, wide.subscription))
    assert share is not None
    number = driven.store.subjects.number("b.x")
    assert number is not None
    assert share.ranges(RangeLookup(driven.store, driven.broker.groups["g"]), MessageRange(number, 0, 0, 0, 3)) == [
        (3, False)
    ]
    driven.close()


def test_pieces_of_one_retry_are_chosen_again(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    consumer = Consumer(driven, "c")
    consumer.pull()
    group = driven.broker.groups["g"]
    assert group.ledger is not None
    found = group.ledger.retries
    number = found.add(MessageRange(0, 0, 0, 0, 9), 1, 0, False, Failure("broke", 1, 0, 5, 5))
    found.take([(number, InFlightRange(MessageRange(0, 0, 0, 3, 3), 1, 0))])
    for _ in range(2):
        assert [one.in_flight.messages for one in found.choose(3)] == [MessageRange(0, 0, 0, 0, 3)]
    assert found.count == 6
    assert [one.in_flight.messages for one in found.choose(100)] == [
        MessageRange(0, 0, 0, 0, 3),
        MessageRange(0, 0, 0, 6, 3),
    ]
    driven.store.close(clean=False)


def test_retries_of_a_slot_come_though_many_wait_before_the_first_that_may(tmp_path: Path) -> None:
    """The first of a slot was delayed, so that it is the last one in memory: all before it are looked up, once."""
    driven = Keys(tmp_path)
    of_a = driven.join("a", "a.", max_unacked=10_000)
    of_b = driven.join("b", "b.")
    driven.put(*["k"] * (MOST_LOOKS + 6))
    numbers = [number for _ in range(MOST_LOOKS + 6) for number in numbers_of(driven.take(of_a, 1))]
    driven.back(of_a, numbers[0])  # the others go back with it
    first = driven.take(of_a, 1)
    assert texts(first) == ["k 0"]
    driven.back(of_a, numbers_of(first)[0], delay_us=100_000)
    driven.advance(200)
    driven.alive(of_a, of_b)
    said = driven.wait(of_a, max_count=1)
    for _ in range(3):
        said += driven.do()
    assert answered(said) == {of_a.connection: ["k 0"]}
    driven.close()


@pytest.mark.parametrize("remembered", [_REMEMBERED, 1])
def test_what_fits_of_many_retries_is_handed_out_whatever_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    monkeypatch.setattr(eligibility, "_REMEMBERED", remembered)
    driven = Keys(tmp_path)
    everything = driven.join("all", "", max_unacked=10_000)
    of_a = driven.join("a", "a.")
    for number in range(MOST_LOOKS + 16):
        driven.do(driven.send_command({"a.s": [b"a%d" % number], "b.s": [b"b%d" % number]}))
        assert len(numbers_of(driven.take(everything, 2))) == 2
    driven.leave(everything)
    driven.advance(0)
    command = driven.pull_command(of_a.subscription, connection=of_a.connection)
    assert answered(driven.do(command)) == {of_a.connection: ["a0"]}, "its look-ups are spent"
    driven.close()
