"""The payloads of records: made of their fields, and read. docs/FORMAT.md describes them.

The frequent kinds are of one consumer and of delivery sequences in a row; their payloads begin with a head of a fixed
size, so that a trace looks at those of a whole file as columns. What does not fit the head follows it as msgpack, and
other payloads are nothing else. In pull logs of version 2 all were msgpack, under other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, starmap
from typing import Any, Final

import msgpack

from qmq.broker.journal.record_types import PARTITIONS, RecordKind
from qmq.format.layout import (
    PULL_HANDED,
    PULL_HANDED_SIZE,
    PULL_HEAD,
    PULL_HEAD_SIZE,
    PULL_HEADED_KINDS,
    PULL_MANY,
    PULL_RANGE,
    PULL_RANGE_SIZE,
)

#: The kinds with heads as they were numbered in version 2.
OF_VERSION_2: Final = {
    2: RecordKind.LEAVE,
    3: RecordKind.PULL,
    4: RecordKind.AGAIN,
    5: RecordKind.ACK,
    6: RecordKind.BACK,
    16: RecordKind.PART,
    22: RecordKind.PASSED,
}
#: The kinds that hand messages out.
HANDED: Final = frozenset((RecordKind.PULL, RecordKind.PASSED, RecordKind.AGAIN))
_AGAIN: Final = int(RecordKind.AGAIN)  # comparing numbers is faster
_ACK: Final = int(RecordKind.ACK)

#: One packer for all records: making one takes as long as packing a record.
pack_rest: Final[Callable[[Any], bytes]] = msgpack.Packer().pack


def pack(kind: int, fields: Sequence[Any]) -> bytes:
    """Return the payload of a record with these fields, the group's number first."""
    if kind < PULL_HEADED_KINDS:
        return pack_rest(fields)
    if kind in HANDED:
        return _pack_handed(kind, fields)
    if kind == RecordKind.ACK:
        group, consumer, now_us, intervals = fields
        start, count = _span(intervals[::2], intervals[1::2])
        is_whole = len(intervals) == 2 and count < PULL_MANY
        return PULL_HEAD.pack(group, now_us, consumer, start, count) + (b"" if is_whole else pack_rest(intervals))
    group, numbers, consumer, *rest, now_us = fields
    if kind == RecordKind.BACK:
        start, count = _span([row[0] for row in rest[0]], [row[1] for row in rest[0]])
        return PULL_HEAD.pack(group, now_us, consumer, start, count) + pack_rest([numbers, *rest])
    why, *end = rest
    return PULL_HEAD.pack(group, now_us, consumer, *(end or (0,)), 0) + pack_rest([numbers, why])


def _pack_handed(kind: int, fields: Sequence[Any]) -> bytes:
    group, consumer, sequence, size, now_us, *rest = fields
    if kind == RecordKind.AGAIN:
        quarantined, retries = rest
        ranges = [retry[1:7] for retry in retries]
        more = [quarantined, *chain.from_iterable((retry[0], *retry[7:]) for retry in retries)]
    else:
        numbers, *more = rest
        ranges = [numbers[at : at + 6] for at in range(0, len(numbers), 6)]
    size = min(size, PULL_MANY)
    if len(ranges) == 1:
        log, first, run, skip, total, end = ranges[0]
        if not run and not skip and end == (first if log >= PARTITIONS else 0):
            head = PULL_HANDED.pack(group, now_us, consumer, sequence, total, size, first, log, 0)
            return head + (pack_rest(more) if more != [[]] else b"")
    count = min(sum(messages[4] for messages in ranges), PULL_MANY)
    head = PULL_HANDED.pack(group, now_us, consumer, sequence, count, size, 0, 0, len(ranges))
    return b"".join((head, *starmap(PULL_RANGE.pack, ranges), pack_rest(more) if more != [[]] else b""))


def _span(starts: Sequence[int], ends: Sequence[int]) -> tuple[int, int]:
    """Return the first of these delivery sequences, and how many it is to the end of the last; PULL_MANY: or more."""
    start = min(starts)
    return start, min(max(ends) - start, PULL_MANY)


def unpack(kind: int, payload: memoryview) -> tuple[int, list[Any]]:
    """Return the kind of a record, one of RecordKind, and its fields, the group's number first."""
    if kind < PULL_HEADED_KINDS:
        return OF_VERSION_2.get(kind, kind), msgpack.unpackb(payload, strict_map_key=False)
    if kind in HANDED:
        return kind, _unpack_handed(kind, payload)
    group, now_us, consumer, sequence, count = PULL_HEAD.unpack_from(payload)
    rest = msgpack.unpackb(payload[PULL_HEAD_SIZE:]) if len(payload) > PULL_HEAD_SIZE else []
    if kind == _ACK:
        return kind, [group, consumer, now_us, rest or [sequence, sequence + count]]
    numbers, *rest = rest
    if kind == RecordKind.PART:
        rest.append(sequence)
    return kind, [group, numbers, consumer, *rest, now_us]


def _unpack_handed(kind: int, payload: memoryview) -> list[Any]:
    group, now_us, consumer, sequence, count, size, first, log, ranges = PULL_HANDED.unpack_from(payload)
    behind = PULL_HANDED_SIZE + ranges * PULL_RANGE_SIZE
    if ranges:
        flat = list(chain.from_iterable(PULL_RANGE.iter_unpack(payload[PULL_HANDED_SIZE:behind])))
    else:
        flat = [log, first, 0, 0, count, first if log >= PARTITIONS else 0] if count else []
    more = msgpack.unpackb(payload[behind:]) if len(payload) > behind else [[]]
    if kind != _AGAIN:
        return [group, consumer, sequence, size, now_us, flat, *more]
    quarantined, *numbers = more
    several = (flat[at : at + 6] for at in range(0, len(flat), 6))
    retries = zip(numbers[::3], several, numbers[1::3], numbers[2::3], strict=True)
    return [
        group,
        consumer,
        sequence,
        size,
        now_us,
        quarantined,
        [[number, *messages, *counts] for number, messages, *counts in retries],
    ]
