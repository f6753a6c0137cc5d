"""Ranges of messages found in a segment's own rows are those that the broker finds, for parts of any size."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.error_log.error_log import RetryItem
from qmq.broker.groups.message_ranges import prefix_of
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.retention.copy import CopiedBatch, CopyRead, CopyRequest, UnreadableMessages
from qmq.broker.retention.references import FoundLetter, SegmentTarget
from qmq.format.batch import parse_header
from qmq.format.pieces import stored_runs
from qmq.storage.store import subject_ranges_of
from tests.broker.harness import Driven
from tests.broker.retention.test_carry_forward import named


@pytest.mark.parametrize("follows", [("a.",), ("",), ("a.x",), ("b", "a.y")])
@pytest.mark.parametrize("seed", range(3))
def test_copies_and_remaining_ranges_make_up_the_range_in_order(
    tmp_path: Path, follows: tuple[str, ...], seed: int
) -> None:
    rng = random.Random(seed)
    driven = Driven(tmp_path, segment_bytes=8 << 10, max_frame_bytes=4 << 10)
    for number in range(120):
        contents: dict[str, Any] = {
            name: [b"%d%d" % (number, at) + bytes(rng.choice((1, 90))) for at in range(rng.randrange(1, 5))]
            for name in rng.sample(("a.x", "a.y", "b", "c"), rng.randrange(1, 4))
        }
        driven.do(driven.send_command(contents))
    driven.checkpoint()
    driven.subscribe(*follows)
    group = driven.broker.groups["g"]
    command = driven.pull_command(1, max_count=rng.randrange(100, 400))
    driven.do(command)
    assert group.ledger is not None
    (member,) = group.ledger.members.values()
    ranges = [one.messages for pull in member.in_flight.pulls for one in pull.ranges]
    base, end = driven.store.partitions[0].message_log.sealed[0]
    old = driven.store.partitions[0].old_segment(base)
    target = SegmentTarget(0, base, end, subject_ranges_of(old.rows()))
    driven.store.may_wait(True)
    cut = [part for one in ranges for part in _cut(rng, one) if target.touches(part)]
    assert cut
    letters = [FoundLetter(RetryItem(1, 1, one, 1, 0, False, 0, 0, 1, "")) for one in cut]
    requests = [CopyRequest(letter, _matches(driven, letter.messages)) for letter in letters]
    copy_read = CopyRead(old, target, driven.store.partitions[0].message_log.sealed[1].base, "g", requests)
    assert not copy_read.step()
    for (found, pieces), messages in zip(copy_read.made, cut, strict=True):
        assert found.messages == messages
        got = list[tuple[str, bytes]]()
        for piece in pieces:
            assert not isinstance(piece, UnreadableMessages)
            if isinstance(piece, CopiedBatch):
                (run,) = stored_runs(memoryview(piece.batch), parse_header(memoryview(piece.batch)))
                got += [(str(run.id(at)), run.body(at)) for at in range(piece.messages)]
            else:
                assert not target.touches(piece)
                got += [(name, body) for name, _, body in named(driven, group, piece)]
        assert got == [(name, body) for name, _, body in named(driven, group, messages)]
    driven.store.may_wait(False)
    driven.close()


def _cut(rng: random.Random, messages: MessageRange) -> list[MessageRange]:
    places = sorted({0, messages.total, *(rng.randrange(messages.total) for _ in range(3))})
    return [messages.part(start, end) for start, end in pairwise(places)]


def _matches(driven: Driven, messages: MessageRange) -> Any:
    group = driven.broker.groups["g"]
    following = group.filter_of(prefix_of(messages)) if prefix_of(messages) else None
    return None if following is None else following.matches(driven.store)
