"""Payloads of records: read as they were made, with heads that numpy reads too, and those of older pull logs."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from qmq.broker.journal.record_bytes import HANDED, OF_VERSION_2, pack, unpack
from qmq.broker.journal.record_types import RecordKind
from qmq.format.layout import PULL_HANDED_DTYPE, PULL_HEAD_DTYPE, PULL_HEADED_KINDS, PULL_RANGE_DTYPE
from tests.format.golden_cases import RECORDS, STORED_US

LOG = 1 << 31
HEADED = [kind for kind in RecordKind if kind >= PULL_HEADED_KINDS]


def some_range(chance: random.Random) -> list[int]:
    """Return a range, mostly of one batch or of one subject."""
    log = chance.choice((5, LOG, LOG + 3, (1 << 32) - 1))
    first = chance.choice((0, 1, 300, (1 << 64) - 2))
    end = chance.choice((first, first, first + 1)) if log >= LOG else chance.choice((0, 0, 1))
    return [log, first, chance.choice((0, 0, 0, 70_000)), chance.choice((0, 0, 0, 9)), chance.choice((1, 40)), end]


def some_fields(chance: random.Random, kind: int) -> list[Any]:
    """Return fields of a record of a kind with a head."""
    first, numbers = chance.choice((0, 70_000, (1 << 64) - 100)), [chance.randrange(99) for _ in range(3)]
    ranges = [some_range(chance) for _ in range(chance.choice((1, 1, 2, 6)))]
    flat, where = [number for one in ranges for number in one], chance.choice(([], [["a.", [5]], ["", [1, 2], 3]]))
    ends = sorted(chance.sample(range(100), chance.choice((2, 2, 4))))
    intervals = [(first + end) % (1 << 64) for end in ends]
    match kind:
        case RecordKind.PULL:
            return [7, 3, first, 640, STORED_US, flat, where]
        case RecordKind.PASSED:
            return [7, chance.choice((0, 3)), first, 640, STORED_US, flat, flat[6:], 5, 6, where]
        case RecordKind.AGAIN:
            return [7, 3, first, 640, STORED_US, chance.random() < 0.5, [[8, *one, 2, 1] for one in ranges]]
        case RecordKind.ACK:
            return [7, 3, STORED_US, intervals]
        case RecordKind.BACK:
            rows = [[*pair, 1, None, 0] for pair in zip(intervals[::2], intervals[1::2], strict=True)]
            return [7, numbers, 3, rows, ["why"], STORED_US]
        case RecordKind.LEAVE:
            return [7, numbers, 3, 1, STORED_US]
    return [7, numbers, 3, 2, first, STORED_US]


@pytest.mark.parametrize("kind", HEADED)
def test_fields_are_read_as_they_were_packed(kind: RecordKind) -> None:
    chance = random.Random(kind)
    for _ in range(300):
        fields = some_fields(chance, kind)
        assert unpack(kind, memoryview(pack(kind, fields))) == (kind, fields)


@pytest.mark.parametrize("kind", HEADED)
def test_heads_are_read_as_columns(kind: RecordKind) -> None:
    chance = random.Random(kind)
    for _ in range(300):
        fields = some_fields(chance, kind)
        payload = pack(kind, fields)
        head = np.frombuffer(payload, PULL_HEAD_DTYPE, 1)[0]
        assert (head["group"], head["now_us"]) == (7, STORED_US)
        if kind in HANDED:
            handed = np.frombuffer(payload, PULL_HANDED_DTYPE, 1)[0]
            ranges = [row[1:7] for row in fields[6]] if kind == RecordKind.AGAIN else None
            ranges = ranges or [fields[5][at : at + 6] for at in range(0, len(fields[5]), 6)]
            found = np.frombuffer(payload, PULL_RANGE_DTYPE, handed["ranges"], PULL_HANDED_DTYPE.itemsize).tolist()
            assert [list(one) for one in found] == (ranges if handed["ranges"] else [])
            assert (handed["sequence"], handed["count"]) == (fields[2], sum(one[4] for one in ranges))
            if not handed["ranges"]:
                assert [handed["log"], handed["first"]] == ranges[0][:2]
        elif kind in (RecordKind.ACK, RecordKind.BACK):
            numbers = fields[3] if kind == RecordKind.ACK else [end for row in fields[3] for end in row[:2]]
            assert (head["consumer"], head["sequence"]) == (3, min(numbers))
            assert head["sequence"] + head["count"] == max(numbers)


def test_a_span_that_is_too_long_for_a_head_is_read_whole() -> None:
    for intervals in ([5, 1 << 40], [5, 4 + (1 << 32)], [5, 6, 1 << 40, 1 << 41]):
        payload = pack(RecordKind.ACK, [7, 3, STORED_US, intervals])
        assert np.frombuffer(payload, PULL_HEAD_DTYPE, 1)[0]["count"] == (1 << 32) - 1
        assert unpack(RecordKind.ACK, memoryview(payload))[1][3] == intervals


def test_what_is_frequent_has_no_more_than_its_head() -> None:
    sizes = {name: len(pack(kind, fields)) for name, (kind, fields) in RECORDS.items()}
    assert (sizes["pull-one-batch"], sizes["ack-one-interval"]) == (46, 28)


@pytest.mark.parametrize(("old", "kind"), OF_VERSION_2.items())
def test_records_of_version_2_have_the_same_fields(old: int, kind: RecordKind) -> None:
    fields = some_fields(random.Random(old), kind)
    assert unpack(old, memoryview(msgpack.packb(fields))) == (kind, fields)
