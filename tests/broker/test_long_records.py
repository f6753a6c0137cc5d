"""Pulls and acks that are too long for one record of the pull log go into several, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.delivery import tracker
from qmq.broker.groups import group_state
from qmq.broker.journal import record_types
from qmq.broker.ports.commands import Ack
from qmq.broker.ports.effects import Acked, PulledMessages
from qmq.format.layout import PULL_RECORD_HEADER_SIZE
from qmq.storage.pull_log.records import MAX_RECORD_BYTES
from tests.broker.harness import Driven, bodies_of, runs_of_answer

#: More prefixes than one range may name, so each range of messages is named by itself.
PREFIXES = [f"p{number}." for number in range(9)]
COUNT, PART = 400, 64


def test_a_record_has_room_for_so_many() -> None:
    largest = len(tracker.msgpack.packb([1 << 31, 1 << 62, 1 << 16, 1 << 31, 1 << 31, 1 << 62])) - 1
    prefixes = 1_000 * (255 + 100)
    assert PULL_RECORD_HEADER_SIZE + record_types.MOST_RANGES_A_RECORD * largest + prefixes < MAX_RECORD_BYTES


def test_a_pull_of_very_many_ranges_and_its_acks_outlive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tracker, group_state):
        monkeypatch.setattr(module, "MOST_RANGES_A_RECORD", PART)
    driven = Driven(tmp_path)
    for number in range(COUNT):
        driven.do(*(driven.send_command({name: [b"%d" % number]}) for name in ("p8.a", "x")))
    every = [b"%d" % number for number in range(COUNT)]
    subscription = driven.subscribe(*PREFIXES, group="g")
    (answer,) = driven.do(driven.pull_command(subscription))
    assert isinstance(answer, PulledMessages), answer
    assert answer.ranges == ((0, COUNT, 1),)
    assert bodies_of(runs_of_answer(answer)) == every
    odd = tuple(end for number in range(1, COUNT, 2) for end in (number, number + 1))
    assert driven.do(Ack(1, driven.request(), subscription, odd))[0] == Acked(1, driven.requests, 0)
    # After a stop without a checkpoint, a start reads all from the records.
    driven.store.close(clean=False)
    driven.open()
    subscription = driven.subscribe(*PREFIXES, group="g")
    (answer,) = driven.do(driven.pull_command(subscription)._replace(expected=0))
    assert isinstance(answer, PulledMessages), answer
    assert bodies_of(runs_of_answer(answer)) == every[::2]
    driven.close()
