"""However many messages a dropped segment concerns, each turn of the broker does a bounded part of the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.journal.record_types import InFlightRange
from qmq.broker.publish.publish import Intake
from qmq.broker.retention.advance_groups import GroupAdvance
from qmq.broker.retention.copy import CopyRead
from qmq.broker.retention.references import SegmentTarget
from qmq.broker.retention.retention import Dropped
from tests.broker.harness import Driven
from tests.broker.retention.test_carry_forward import LIMITS
from tests.broker.retention.test_retention import HOUR_MS, driven_in, send
from tests.broker.test_consuming import Consumer

#: The most work of one turn, as the modules bound it: groups that follow one prefix each;
#: pointers into the segment that are looked at; bytes that are appended, beside the last run of these.
MOST_MOVED = 100
MOST_FOUND = 256
MOST_BYTES = 4 << 20
#: The most bytes of a batch of copies beside its messages.
HEAD_BYTES = 512


class Turns:
    """Counts the work of each turn."""

    def __init__(self) -> None:
        self.counts = [0]

    def add(self, count: int) -> None:
        self.counts[-1] += count

    @property
    def most(self) -> int:
        return max(self.counts)

    @property
    def busy(self) -> int:
        """Return the turns with work."""
        return sum(count > 0 for count in self.counts)


def let_one_go(driven: Driven, *counted: Turns) -> list[Dropped]:
    """Run turn by turn until a segment has been dropped."""
    driven.checkpoint()
    driven.advance(HOUR_MS)
    driven.auto_read = False
    for _ in range(2_000):
        for turn in (lambda: driven.advance(10), driven.read, driven.checkpoint):
            for turns in counted:
                turns.counts.append(0)
            turn()
        if gone := driven.broker.take_dropped():
            driven.auto_read = True
            return gone
    raise AssertionError("nothing goes")


def count(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, size: Callable[..., int]) -> Turns:
    """Count the calls of a method, each with the size that *size* returns for its arguments."""
    turns, plain = Turns(), getattr(kind, name)

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        turns.add(size(*given))
        return plain(self, *given, **named)

    monkeypatch.setattr(kind, name, counted)
    return turns


def test_so_many_groups_are_moved_in_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = driven_in(tmp_path)
    send(driven, 20)
    for number in range(350):
        driven.subscribe("a.", group=f"g{number}", start="first")
    moved = count(monkeypatch, GroupAdvance, "_apply", lambda *_: 1)
    (gone,) = let_one_go(driven, moved)
    assert len(gone.skipped) == 350
    assert sum(moved.counts) == 350
    assert moved.most <= MOST_MOVED
    assert moved.busy >= 4
    driven.close()


def test_a_group_that_follows_much_counts_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = driven_in(tmp_path)
    send(driven, 20)
    for number in range(30):
        driven.subscribe(*(f"a.{subject}" for subject in range(50)), group=f"g{number}", start="first")
    moved = count(monkeypatch, GroupAdvance, "_apply", lambda group, *_: len(group.filters))
    (gone,) = let_one_go(driven, moved)
    assert len(gone.skipped) == 30
    assert sum(moved.counts) == 30 * 50
    assert moved.most <= 2 * MOST_MOVED + 50
    driven.close()


def test_so_much_is_carried_forward_in_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep 600 messages of 20 kB in flight, none next to another."""
    size = 20_000
    driven = driven_in(tmp_path, LIMITS, segment_bytes=32 << 20, max_frame_bytes=1 << 20)
    send(driven, 1_200, size=size)
    driven.store.partitions[0].seal()
    consumer = Consumer(driven, "c", "a.", max_unacked=2_000, max_unacked_bytes=1 << 30)
    while len(consumer.got) < 1_200:
        assert consumer.pull(1_200 - len(consumer.got))
    consumer.ack(*range(0, 1_200, 2))
    found = count(monkeypatch, CopyRead, "__init__", lambda *given: len(given[-1]))
    stored = count(monkeypatch, Intake, "append", lambda buffer, *_: len(buffer))
    (gone,) = let_one_go(driven, found, stored)
    assert gone.carried == 600
    assert sum(stored.counts) > 600 * size
    assert stored.most <= MOST_BYTES + size + MOST_FOUND * HEAD_BYTES
    assert stored.busy >= 3
    assert 0 < found.most <= MOST_FOUND
    driven.close()


def test_what_lies_around_a_carried_message_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every second message of one pull in flight, so that one range becomes 1,000."""
    driven = driven_in(tmp_path, LIMITS, segment_bytes=1 << 20, max_frame_bytes=1 << 19)
    driven.do(driven.send_command({"a": [b"x" * 50] * 2_000}))
    driven.store.partitions[0].seal()
    consumer = Consumer(driven, "c", "a")
    assert len(consumer.pull(2_000)) == 2_000
    consumer.ack(*range(0, 2_000, 2))
    parts = count(monkeypatch, InFlightRange, "part", lambda *_: 1)
    looks = count(monkeypatch, SegmentTarget, "touches", lambda *_: 1)
    (gone,) = let_one_go(driven, parts, looks)
    assert gone.carried == 1_000
    assert sum(parts.counts) <= 10 * 1_000
    assert sum(looks.counts) <= 2 * 1_000 + MOST_FOUND, "when it is found, and once more at the end"
    driven.close()
