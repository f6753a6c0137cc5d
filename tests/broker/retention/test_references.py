"""References into a segment, by position or by sequence."""

from __future__ import annotations

import numpy as np
import pytest

from qmq.broker.error_log.error_log import RetryItem, packed
from qmq.broker.groups.message_ranges import PARTITIONS
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.retention.references import SegmentTarget
from qmq.storage.store import SubjectRanges

BASE = 1 << 60
HAD = SubjectRanges(
    np.array([1, 1, 4], np.uint32), np.array([10, 30, 5], np.uint64), np.array([20, 35, 6], np.uint64)
)  # fmt: skip
TARGET = SegmentTarget(2, BASE, BASE + 100, HAD)


@pytest.mark.parametrize(
    ("messages", "touches"),
    [
        (MessageRange(PARTITIONS + 2, BASE, 0, 0, 1), True),
        (MessageRange(PARTITIONS + 2, BASE + 99, 0, 50, 1), True),
        (MessageRange(PARTITIONS + 2, BASE + 100, 0, 0, 1), False),
        (MessageRange(PARTITIONS + 2, BASE - 1, 0, 0, 1), False),
        (MessageRange(PARTITIONS + 1, BASE, 0, 0, 1), False),
        (MessageRange(PARTITIONS + 2 + (3 << 16), BASE + 7, 0, 0, 1), True),
        (MessageRange(1, 9, 0, 0, 1), False),
        (MessageRange(1, 9, 0, 0, 2), True),
        (MessageRange(1, 0, 0, 19, 1), True),
        (MessageRange(1, 20, 0, 0, 10), False),
        (MessageRange(1, 20, 0, 0, 11), True),
        (MessageRange(1, 34, 0, 0, 1), True),
        (MessageRange(1, 35, 0, 0, 100), False),
        (MessageRange(0, 10, 0, 0, 100), False),
        (MessageRange(4, 5, 0, 0, 1), True),
        (MessageRange(5, 5, 0, 0, 1), False),
    ],
)
def test_touches_and_touched_agree(messages: MessageRange, touches: bool) -> None:
    assert TARGET.touches(messages) is touches
    retry = RetryItem(7, 1, messages, 1, 0, False, 0, 0, 1, "")
    assert TARGET.touched(packed([retry, retry._replace(number=0)])) == ([retry] if touches else [])


def test_a_segment_without_messages_has_none_by_sequence() -> None:
    empty = SubjectRanges(np.empty(0, np.uint32), np.empty(0, np.uint64), np.empty(0, np.uint64))
    target = TARGET._replace(had=empty)
    retry = RetryItem(7, 1, MessageRange(0, 10, 0, 0, 100), 1, 0, False, 0, 0, 1, "")
    assert target.touched(packed([retry])) == []
    assert not target.touches(retry.messages)
