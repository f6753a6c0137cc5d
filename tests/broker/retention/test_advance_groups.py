"""The number of messages that a group misses when it is moved past a segment, for any filters and cursors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.delivery.serve import blocking_reads
from qmq.broker.ports.work import whole
from qmq.broker.retention import advance_groups
from qmq.broker.retention.advance_groups import GroupAdvance
from qmq.broker.retention.references import SegmentTarget
from qmq.storage.store import subject_ranges_of
from tests.broker.harness import Driven
from tests.broker.retention.test_retention import numbers
from tests.broker.test_consuming import Consumer

FOLLOWS = (("",), ("a.",), ("a.x",), ("a.x", "b"), ("", "a.y"), ("a.", "a.x"))


@pytest.mark.parametrize("follows", FOLLOWS)
@pytest.mark.parametrize("start", ["first", "time", "sequence"])
@pytest.mark.parametrize("piece", [7, 100])
def test_missed_messages_are_those_that_the_group_would_have_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: tuple[str, ...], start: str, piece: int
) -> None:
    monkeypatch.setattr(advance_groups, "_ROWS", piece)
    rng = random.Random(str(follows) + start)
    driven = Driven(tmp_path, segment_bytes=8 << 10, max_frame_bytes=4 << 10)
    for number in range(60):
        driven.advance(1)
        driven.send(rng.choice(("a.x", "a.y", "b")), (b"%d " % number).ljust(rng.choice((10, 600)), b"."))
    driven.checkpoint()
    base, end = driven.store.partitions[0].removable()[0]
    rows = driven.store.partitions[0].old_segment(base).rows()
    inside = int(rows["stored_at_us"][len(rows) // 2])
    begin = {"first": None, "time": ("time", inside), "sequence": ("sequence", 3)}[start]
    for pulled in (0, 1, 4, 9):
        group = driven.broker.groups.get("g")
        if group is not None:
            driven.broker._changes.delete(group)
        consumer = Consumer(driven, "c", *follows, nonce=b"%d" % pulled, start=begin)
        given = set(numbers(consumer.pull(pulled))) if pulled else set()
        all_of_it = set[int]()
        group = driven.broker.groups["g"]
        had = subject_ranges_of(rows)
        driven.store.partitions[0].leave(base, had)
        moving = GroupAdvance(driven.store, SegmentTarget(0, base, end, had), rows)
        with blocking_reads(driven.store):
            took_all = whole(moving.look(group))
            assert whole(moving.move(group, may_skip=True))
            skipped = moving.skipped["g"]
            assert took_all is (skipped == 0)
            assert whole(moving.move(group, may_skip=False)), "nothing is left to move"
        assert group.skipped == skipped
        while some := numbers(consumer.pull(100)):
            all_of_it |= set(some)
        driven.store.stay()
        driven.broker._changes.delete(group)
        free = Consumer(driven, "d", *follows, nonce=b"free%d" % pulled, start=begin)
        wanted = set[int]()
        while some := numbers(free.pull(100)):
            wanted |= set(some)
        assert all_of_it | given <= wanted
        assert skipped == len(wanted - all_of_it - given), (pulled, sorted(wanted - all_of_it - given))
    driven.close()
