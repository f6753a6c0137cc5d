"""Cases that brokers get wrong: late dispositions, owners, windows, redelivery, groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack
from qmq.broker.ports.effects import Acked, PulledMessages, Refused
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced, InvalidOption, TooManyConsumers
from qmq.net.protocol.types import DISPOSITIONS, Disposition
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.test_consuming import Consumer, filled, many

SESSION_TIMEOUT_MS = 1_000
LIMITS = BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS)


# --- late dispositions ------------------------------------------------------------------------------------------------


def test_an_ack_after_the_session_timeout_is_refused_and_the_second_one_works(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1, LIMITS)
    slow, other = Consumer(driven, "slow"), Consumer(driven, "other", connection=2)
    assert slow.pull() == [b"0"]
    driven.advance(SESSION_TIMEOUT_MS // 2)
    assert other.pull() == []  # so it is heard of
    driven.advance(SESSION_TIMEOUT_MS // 2 + 1)
    with pytest.raises(Fenced):
        slow.ack(0)
    assert other.pull() == [b"0"]
    assert other.got[0] == (b"0", 1)  # an expired session is no attempt
    with pytest.raises(Fenced):
        slow.ack(0)
    assert other.ack(0) == 0
    slow.join()
    assert slow.pull() == other.pull() == []


def test_an_ack_twice_is_harmless(tmp_path: Path) -> None:
    consumer = Consumer(filled(tmp_path, 3), "one")
    consumer.pull(2)
    assert [consumer.ack(0), consumer.ack(0), consumer.ack(0, 1), consumer.ack(0, 1)] == [0, 0, 0, 0]
    assert consumer.pull() == [b"2"]


def test_an_ack_of_what_another_consumer_holds_is_refused(tmp_path: Path) -> None:
    driven = filled(tmp_path, 2)
    one, other = Consumer(driven, "one"), Consumer(driven, "other", connection=2)
    assert (one.pull(1), other.pull(1)) == ([b"0"], [b"1"])
    assert other.ack(1) == 1  # delivery sequences are a consumer's own: it never had a second one
    with pytest.raises(Fenced):
        other.back(1, 2)
    assert (one.ack(0), other.ack(0)) == (0, 0)


def test_a_nack_after_an_ack_and_an_ack_after_a_nack_change_nothing(tmp_path: Path) -> None:
    driven = filled(tmp_path, 2)
    consumer = Consumer(driven, "one")
    consumer.pull()
    consumer.ack(0)
    consumer.back(1, 2, delay_us=0)
    for disposition in DISPOSITIONS:
        with pytest.raises(Fenced):
            consumer.back(0, 1, disposition)
        with pytest.raises(Fenced):
            consumer.back(0, 2, disposition)
    assert consumer.ack(1) == 1
    assert consumer.pull() == [b"1"]
    assert consumer.got[2] == (b"1", 2)
    assert consumer.ack(2) == 0
    assert consumer.pull() == []


# --- owners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
def test_who_comes_back_under_its_own_id_takes_over_at_once(tmp_path: Path, restarts: bool) -> None:
    driven = filled(tmp_path, 4, LIMITS)
    old = Consumer(driven, "container", nonce=b"old")
    old.pull(3)
    old.ack(1)
    if restarts:
        driven.restart()
    new = Consumer(driven, "container", nonce=b"new", connection=2)
    assert new.pull() == [b"0", b"2"]  # neither stuck nor doubled
    if not restarts:
        for late in (lambda: old.ack(0), lambda: old.back(0, 1), old.pull):
            with pytest.raises(Fenced):
                late()
    new.ack(0, 2)
    assert new.pull() == [b"3"]


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_a_clock_that_jumps_makes_nobody_expire(tmp_path: Path, jump_s: int) -> None:
    driven = filled(tmp_path, 1, LIMITS)
    consumer = Consumer(driven, "one")
    assert consumer.pull() == [b"0"]
    driven.now = driven.now._replace(wall_us=driven.now.wall_us + jump_s * 1_000_000)
    driven.advance(SESSION_TIMEOUT_MS // 2)
    assert consumer.ack(0) == 0


def test_what_one_held_that_is_forgotten_as_dead_was_recovered_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.groups.member.MAX_CONSUMERS", 2)
    driven = filled(tmp_path, 3, LIMITS)
    dead = Consumer(driven, "dead")
    assert dead.pull() == many(3)
    other = Consumer(driven, "other", connection=2)
    dead.ack(1)
    with pytest.raises(TooManyConsumers):
        Consumer(driven, "third", connection=3)
    driven.advance(SESSION_TIMEOUT_MS // 2)
    assert other.pull() == []
    driven.advance(SESSION_TIMEOUT_MS // 2 + 1)
    third = Consumer(driven, "third", connection=3)
    with pytest.raises(Fenced):
        dead.ack(0)
    assert sorted(other.pull(1) + third.pull(1)) == [b"0", b"2"]
    for consumer in (other, third):
        assert consumer.ack() == 0
    driven.restart()
    for consumer in (other, third):
        consumer.join()
        assert consumer.pull() == []


# --- windows ---------------------------------------------------------------------------------------------------------


def test_a_full_window_stops_and_reopens_by_what_is_acknowledged_with_gaps(tmp_path: Path) -> None:
    consumer = Consumer(filled(tmp_path, 30), "one", max_unacked=10)
    assert consumer.pull() == many(30)[:10]
    assert consumer.pull() == []
    consumer.ack(1, 3, 8)
    assert consumer.pull() == many(30)[10:13]
    assert consumer.pull() == []
    consumer.back(0, 1, Disposition.REJECT)
    assert consumer.pull() == [b"13"]


def test_a_rejected_bad_call_changes_nothing(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    consumer = Consumer(driven, "one")
    consumer.pull()
    for pairs in ((0,), (2, 1), (1, 1)):
        (answer,) = driven.do(Ack(1, driven.request(), consumer.subscription, pairs))
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, InvalidOption)
    for start, end in ((2, 1), (1, 1), (2, 4), (7, 9)):
        with pytest.raises((Fenced, InvalidOption)):
            consumer.back(start, end)
    assert consumer.ack(0, 1, 2) == 0
    (answer,) = driven.do(Ack(1, driven.request(), consumer.subscription, (0, 3)))
    assert isinstance(answer, Acked)


# --- redelivery ------------------------------------------------------------------------------------------------------


def test_each_of_many_nacked_at_once_comes_when_its_delay_is_over(tmp_path: Path) -> None:
    driven = filled(tmp_path, 20)
    consumer = Consumer(driven, "one")
    consumer.pull()
    delays_ms = [(number * 7 % 20 + 1) * 10 for number in range(20)]
    for number, delay_ms in enumerate(delays_ms):
        consumer.back(number, number + 1, delay_us=delay_ms * 1_000)
    came: dict[bytes, int] = {}
    for now_ms in range(0, 210, 10):
        came |= dict.fromkeys(consumer.pull(), now_ms)
        driven.advance(10)
    assert came == {b"%d" % number: delay_ms for number, delay_ms in enumerate(delays_ms)}


def test_what_comes_again_takes_no_more_of_the_window_than_it_is(tmp_path: Path) -> None:
    consumer = Consumer(filled(tmp_path, 30), "one", max_unacked_bytes=14_000)
    consumer.pull()
    for number in range(30):
        consumer.back(number, number + 1, Disposition.RELEASE)
    assert sorted(body for _ in range(30) for body in consumer.pull(1)) == sorted(many(30))


def test_exactly_max_attempts_then_dead_also_over_restarts(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    consumer = Consumer(driven, "one", max_attempts=5, retry_delays_us=(0,))
    attempts = []
    while consumer.pull():
        number = max(consumer.got)
        attempts.append(consumer.got[number][1])
        consumer.back(number, number + 1)
        driven.restart()
        consumer.join()
    assert attempts == [1, 2, 3, 4, 5]
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    assert (len(ledger.dead), ledger.retries.count) == (1, 0)


def test_a_long_poll_wakes_when_another_consumer_expires(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1, LIMITS)
    dying, waiting = Consumer(driven, "dying"), Consumer(driven, "waiting", connection=2)
    assert dying.pull() == [b"0"]
    driven.advance(SESSION_TIMEOUT_MS // 2)
    pull = driven.pull_command(waiting.subscription, 10, connection=2, timeout_ms=60_000)
    assert driven.do(pull) == []
    effects = [*driven.advance(SESSION_TIMEOUT_MS // 2 + 1), *driven.do()]
    assert waiting.take([one for one in effects if isinstance(one, PulledMessages)]) == [b"0"]


# --- long polls and idleness -----------------------------------------------------------------------------------------


def test_a_thousand_waiting_pulls_have_the_broker_do_nothing(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    waiting = [driven.subscribe(f"s{number}.", group=None, start="first") for number in range(1_000)]
    for subscription in waiting:
        assert driven.do(driven.pull_command(subscription, timeout_ms=3_600_000)) == []
    driven.advance(1)
    first_s = (driven.broker.tick(driven.now) or 0) - driven.now.monotonic_us
    assert first_s >= 3_000_000_000, "nobody looks before the first of them times out"
    sent = driven.do(driven.send_command({"s7.x": [b"it"]}))
    (woken,) = [effect for effect in sent if isinstance(effect, PulledMessages)]
    assert bodies_of(runs_of_answer(woken)) == [b"it"]


# --- groups ----------------------------------------------------------------------------------------------------------


def test_several_subjects_of_a_prefix_come_in_the_order_of_storing(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for number in range(40):
        driven.send(f"a.{number % 4}", b"%d" % number)
    consumer = Consumer(driven, "one", "a.")
    got = [body for _ in range(10) for body in consumer.pull(4)]
    assert got == many(40)


def test_consumers_of_one_group_share_and_another_group_sees_all(tmp_path: Path) -> None:
    driven = filled(tmp_path, 10)
    one, two = Consumer(driven, "one"), Consumer(driven, "two", connection=2)
    assert sorted([*one.pull(3), *two.pull(3), *one.pull(), *two.pull()]) == many(10)
    other = driven.subscribe("", group="other", connection=3)
    assert [body for run in driven.pull(other, connection=3) for body in run.bodies()] == many(10)
