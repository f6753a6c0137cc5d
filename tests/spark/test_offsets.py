"""Offsets: what was read whatever is added; and the size of a micro-batch."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest

from qmq.archive import segments
from qmq.intervals import Intervals
from qmq_spark import offsets
from qmq_spark.offsets import Read, before, between, everything, limited, name_of, offset_of, read_of
from qmq_spark.plan import SourceSnapshot, open_source
from tests.archive.archives import archive
from tests.archive.orders import write_orders

WHOSE = (b"store!", 3)


def ranges(*pairs: tuple[int, int]) -> Intervals:
    made = Intervals()
    for start, end in pairs:
        made.add(start, end)
    return made


def told(read: Read) -> dict[str, list[tuple[int, int]]]:
    return {name_of(whose): list(own) for whose, own in read.items()}


def test_comes_back_from_json_as_it_was() -> None:
    read = {WHOSE: ranges((0, 7), (9, 1 << 62)), (b"other!", 0): ranges((5, 6))}
    offset = json.loads(json.dumps(offset_of(read)))
    assert offset == {"73746f726521-3": [0, 7, 9, 1 << 62], "6f7468657221-0": [5, 6]}
    assert told(read_of(offset)) == told(read)
    assert list(read_of(offset)) == list(read)


def test_stays_small(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are many gaps, the lowest count as read, with a warning."""
    monkeypatch.setattr(offsets, "MOST_RANGES", 3)
    read = {WHOSE: ranges(*((10 * at, 10 * at + 5) for at in range(6)))}
    with caplog.at_level(logging.WARNING):
        assert offset_of(read) == {name_of(WHOSE): [0, 35, 40, 45, 50, 55]}
    assert "below position 35 are not read" in caplog.text
    caplog.clear()
    assert len(offset_of(read)[name_of(WHOSE)]) == 6
    assert not caplog.text


def test_tells_what_lies_between() -> None:
    start, end = {WHOSE: ranges((0, 5))}, {WHOSE: ranges((0, 9), (20, 30)), (b"other!", 0): ranges((1, 2))}
    assert between(start, end) == {WHOSE: [(5, 9), (20, 30)], (b"other!", 0): [(1, 2)]}
    assert between(end, start) == {WHOSE: []}


@pytest.mark.parametrize("archived", [False, True])
def test_takes_a_share_of_each_partition_and_ends_with_all(tmp_path: Path, archived: bool) -> None:
    write_orders(tmp_path / "data", 80)
    archive(tmp_path / "data", tmp_path / "archive")
    source = open_source(str(tmp_path / ("archive" if archived else "data")))
    read: Read = {}
    for most_bytes in (1, 9_000, 30_000, None):
        more = limited(source, read, most_bytes)
        assert all(not more[whose].missing(low, high) for whose, own in read.items() for low, high in own)
        assert len(more) == 2
        read = more
    assert told(read) == told(everything(source)) == told(limited(source, read, 1))
    assert all(len(own) == 1 for own in read.values())
    assert all((own.end_from(0) > 0) is not archived for own in read.values())


def test_keeps_within_bounds(tmp_path: Path) -> None:
    write_orders(tmp_path, 40)
    source = open_source(str(tmp_path))
    bound = limited(source, {}, 12_000)
    assert told(limited(source, {}, None, bound)) == told(bound) != told(everything(source))


def test_what_comes_before_others_is_read_too(tmp_path: Path) -> None:
    """Segments of an archive arrive in any order; each is read once, some of them in parts."""
    seed = 7
    dice = random.Random(seed)
    write_orders(tmp_path / "data", 200, segment_bytes=64 << 10)
    archive(tmp_path / "data", tmp_path / "archive")
    whole = open_source(str(tmp_path / "archive"))
    segments = list(whole.segments)
    assert len(segments) >= 4, len(segments)
    dice.shuffle(segments)
    there, read, sizes = list[object](), Read(), dict[tuple[bytes, int, int], int]()
    print(f"seed {seed}")
    for segment in segments:
        there.append(segment)
        source = SourceSnapshot(whole.files, [one for one in whole.segments if one in there], may_fill=True)
        for _ in range(dice.choice([1, 3, 100])):
            end = limited(source, read, dice.choice([1, 20_000, None]))
            for (store_id, partition), spans in between(read, end).items():
                for low, high in spans:
                    for one in source.segments:
                        size = max(0, min(high, one.end) - max(low, one.base))
                        if one.partition_key == (store_id, partition) and size:
                            at = (*one.partition_key, one.base)
                            sizes[at] = sizes.get(at, 0) + size
            read = end
    end = limited(whole, read, None)
    assert told(end) == told(everything(whole))
    for segment in whole.segments:
        rest = sum(high - low for low, high in read[segment.partition_key].missing(segment.base, segment.end))
        assert sizes.get((*segment.partition_key, segment.base), 0) + rest == segment.end - segment.base


def test_tells_what_was_stored_before_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_orders(tmp_path, 30)
    source = open_source(str(tmp_path))
    assert before(source, 1) == {}
    assert told(before(source, 1 << 62)) == told(everything(source))
    stamps = sorted(int(stamp) for one in source.segments for stamp in one.batches(source.files)["stored_at_us"])
    part = before(source, stamps[15])
    starts = [
        (whose, int(row["position"]), int(row["stored_at_us"]))
        for whose, one in ((one.partition_key, one) for one in source.segments)
        for row in one.batches(source.files)
    ]
    assert all((position in part[whose]) is (stamp < stamps[15]) for whose, position, stamp in starts)
    monkeypatch.setattr(segments, "PIECE_BATCHES", 4)  # not all of them are looked at
    part = before(source, stamps[15])
    assert {stamp < stamps[15] for whose, position, stamp in starts if position in part.get(whose, ())} == {True}
