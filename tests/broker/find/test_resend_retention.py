"""Resent messages outlive their segments, marked as they were, and a resend takes none of a segment that goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.groups.resends import ResendCounts
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import PulledMessages
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.layout import RUN_REPLAYED
from qmq.net.protocol.types import RESENT_BIT
from tests.broker.find.test_resend import counts, fields_of, handled, resend
from tests.broker.group_state import ledger_of
from tests.broker.harness import runs_of_answer
from tests.broker.retention.test_retention import HOUR_MS, driven_in, numbers, send, settle
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, killed

LIMITS = BrokerLimits(retention_max_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS)


def taken(consumer: Consumer) -> dict[int, bool]:
    """Take and ack all messages; return for each number whether it is marked as replayed."""
    driven, found = consumer.driven, dict[int, bool]()
    while True:
        command = driven.pull_command(consumer.subscription, 7)._replace(expected=consumer.expected)
        (answer,) = [one for one in driven.do(command) if isinstance(one, PulledMessages)]
        if not answer.ranges:
            return found
        marks = [attempt >= RESENT_BIT for _, count, attempt in answer.ranges for _ in range(count)]
        bodies = [(body, run.run_flags & RUN_REPLAYED) for run in runs_of_answer(answer) for body in run.bodies()]
        for mark, (body, flag) in zip(marks, bodies, strict=True):
            (number,) = numbers([body])
            assert number not in found, "it came twice"
            found[number] = mark or bool(flag)
        consumer.expected = answer.ranges[-1][0] + answer.ranges[-1][1]
        driven.acknowledge(consumer.subscription, answer)


@pytest.mark.parametrize("subjects", [1, 3])
@pytest.mark.parametrize("is_killed", [False, True])
def test_resent_messages_outlive_their_segments(tmp_path: Path, subjects: int, is_killed: bool) -> None:
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 60, subjects=subjects)
    consumer = handled(driven)
    assert counts(resend(driven, prefix="a.", group="g")) == ResendCounts(resent=60)
    driven.advance(2 * HOUR_MS)
    send(driven, 5, first=60, subjects=subjects)
    dropped = settle(driven)
    assert sum(one.carried for one in dropped) > 30
    assert sum(one.lost for one in dropped) == 0
    if is_killed:
        killed(driven)
    consumer.join()
    assert taken(consumer) == {number: number < 60 for number in range(65)}
    assert ledger_of(driven).retries.is_empty
    driven.close()


def test_a_resend_takes_no_messages_of_a_segment_that_goes(tmp_path: Path) -> None:
    """The segment is chosen and its references are found, so no others may come."""
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 60)
    consumer = handled(driven)
    driven.advance(2 * HOUR_MS)
    send(driven, 5, first=60)
    driven.checkpoint()
    for _ in range(1_000):
        if driven.store.offered_sequence(0):
            break
        driven.advance(100)
    offered = driven.store.offered_sequence(0)
    assert 0 < offered < 60
    command = Administer(9, driven.request(), "resend", {"run": b"r" * 16, "prefix": "a.", "group": "g"})
    answers = [*driven.do(command), *(one for _ in range(20) for one in driven.advance(0))]  # no checkpoint drops it
    assert int(driven.store.subjects.firsts[0]) == 0
    (answer,) = [one for one in answers if getattr(one, "request", None) == command.request]
    assert counts(fields_of(answer)) == ResendCounts(resent=60 - offered, waiting=5, gone=offered)
    settle(driven)
    consumer.join()
    assert sorted(taken(consumer)) == list(range(offered, 65))
    assert ask(driven, "dead_letters", group="g")["rows"] == []
    driven.close()


def test_what_is_gone_is_counted(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, LIMITS)
    send(driven, 60)
    handled(driven)
    first_id = resend(driven, prefix="a.", group="g", dry_run=True)
    assert first_id["resent"] == 60
    driven.advance(2 * HOUR_MS)
    send(driven, 5, first=60)
    settle(driven)
    first = int(driven.store.subjects.firsts[0])
    assert first > 30
    answer = counts(resend(driven, sequences=[["a.0", 0, 60]], group="g"))
    assert answer == ResendCounts(resent=60 - first, gone=first)
    driven.close()
