"""The check of many batches by columns agrees with the check of one batch after another."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from crc32c import crc32c

from qmq.format.batch import BatchLimits, check_batch, header_crc_of, mark_of, parse_header, stamp
from qmq.format.build import RunContent, build_batch
from qmq.format.layout import BATCH_HEADER_SIZE, LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED, RUN_SIZE
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.verify.batches import BatchColumns
from tests.storage.stores import NOW_US, PRODUCER

SECRET = b"sixteen bytes of"
OWNER = SegmentOwner(b"store1", 3)
COUNTS = [1, 2, 63, 1_023, 1_024, 1_500]


def stored(position: int, *counts: int) -> bytearray:
    """Make a stored batch with a run for each number of messages."""
    contents = [RunContent(f"s.{n}", [b"x" * (m % 7) for m in range(count)], None) for n, count in enumerate(counts)]
    return stored_runs(position, contents)


def stored_runs(position: int, contents: list[RunContent]) -> bytearray:
    """Make a stored batch of these runs."""
    parts = build_batch(contents, created_at_us=NOW_US, producer_id=PRODUCER, producer_sequence=0)
    buffer = bytearray(b"".join(parts))
    view = memoryview(buffer)
    where = {"position": position, "stored_at_us": NOW_US, "partition": 3, "store_id": OWNER.store_id, "secret": SECRET}
    checked = check_batch(view, BatchLimits())
    stamp(view, checked, first_sequences=0 if checked.run is not None else [0] * len(contents), **where)  # type: ignore[arg-type]
    return buffer


def seal(batch: bytearray) -> None:
    """Make every checksum of a batch of one run, and its mark, right."""
    header = parse_header(batch)
    data_crc = crc32c(memoryview(batch)[header.data_start :])
    struct.pack_into("<I", batch, BATCH_HEADER_SIZE + 20, data_crc)
    struct.pack_into("<I", batch, 80, data_crc)
    reseal(batch)


def reseal(batch: bytearray) -> None:
    """Make the checksum of the header, and the mark, right."""
    header = parse_header(batch)
    header_crc = header_crc_of(memoryview(batch), header.data_start)
    struct.pack_into("<I", batch, 84, header_crc)
    batch[88:96] = mark_of(SECRET, header.position, header_crc)


def good_bytes(log: bytes | bytearray, position: int) -> int:
    """Return how many bytes of batches are good, and check their rows."""
    numbers: dict[tuple[str, int], int] = {}
    columns = BatchColumns(OWNER, SECRET, lambda name, lane: numbers.setdefault((name, lane), len(numbers)))
    rows, size = columns.good_prefix(memoryview(log), position)
    assert sum(rows["batch_size"][rows["run"] == 0].tolist()) == size
    return size


@pytest.mark.parametrize("count", COUNTS)
def test_runs_short_and_long(count: int) -> None:
    one, several = stored(4_096, count), stored(4_096, count, 3, count)
    assert good_bytes(one, 4_096) == len(one)
    assert good_bytes(several, 4_096) == len(several)
    assert good_bytes(one, 4_097) == 0
    seal(one)
    assert good_bytes(one, 4_096) == len(one)


def laned(position: int, *lanes: int) -> bytearray:
    """Make a stored batch of one subject with a run for each lane."""
    return stored_runs(position, [RunContent("s", [b"x"], None, lane) for lane in lanes])


def test_lanes_of_one_subject_have_numbers_of_their_own() -> None:
    first = laned(4_096, LANE_HIGH)
    plain = stored(4_096 + len(first), 2, 1)
    log = first + plain
    log += laned(4_096 + len(log), LANE_NORMAL, LANE_ORDERED | 4_095, LANE_HIGH)
    numbers: dict[tuple[str, int], int] = {}
    columns = BatchColumns(OWNER, SECRET, lambda name, lane: numbers.setdefault((name, lane), len(numbers)))
    rows, size = columns.good_prefix(memoryview(log), 4_096)
    assert size == len(log)
    assert rows["lane"].tolist() == [LANE_HIGH, 0, 0, LANE_NORMAL, LANE_ORDERED | 4_095, LANE_HIGH]
    slot = LANE_ORDERED | 4_095
    named = [("s", LANE_HIGH), ("s.0", 0), ("s.1", 0), ("s", LANE_NORMAL), ("s", slot), ("s", LANE_HIGH)]
    assert rows["subject"].tolist() == [numbers[lane] for lane in named]


@pytest.mark.parametrize("lane", [3, 0x4000, LANE_HIGH])
def test_lanes_that_lie_though_all_checksums_fit(lane: int) -> None:
    """Neither a priority nor a slot; or that of another run of the subject."""
    bad = laned(4_096, LANE_HIGH, LANE_LOW)
    struct.pack_into("<H", bad, BATCH_HEADER_SIZE + RUN_SIZE + 2, lane)
    reseal(bad)
    assert good_bytes(bad, 4_096) == 0


def _longer(batch: bytearray, start: int, count: int) -> None:
    """The last message has a length one byte too large."""
    at = start + 4 * (count - 1)
    struct.pack_into("<I", batch, at, struct.unpack_from("<I", batch, at)[0] + 1)


def _headed(batch: bytearray, start: int, count: int) -> None:
    """The header of the first message has a length above that of the message, which is empty."""
    struct.pack_into("<H", batch, start + 4 * count, 1)


@pytest.mark.parametrize("change", [_longer, _headed])
@pytest.mark.parametrize("count", COUNTS)
def test_columns_that_lie_though_all_checksums_fit(count: int, change: Callable[[bytearray, int, int], None]) -> None:
    first = stored(4_096, 5)
    bad = stored(4_096 + len(first), count)
    change(bad, parse_header(bad).data_start, count)
    seal(bad)
    assert good_bytes(first + bad, 4_096) == len(first), "the one before it holds"
