"""Ranges of segments as record batches: what a client would decode, in the same order; bad bytes are reported."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from qmq.archive import segments
from qmq.broker.ports.commands import Send
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq_spark import read as reading
from qmq_spark.plan import open_source
from qmq_spark.read import RangeReader, SegmentDamage, SegmentRange, Wanted
from tests.archive.archives import large_index
from tests.archive.orders import rows_in, time_of, write_orders
from tests.broker.harness import PRODUCER, START_US, Driven
from tests.spark.reads import SCHEMA, read, schema_of
from tests.storage.stores import NOW_US, Sent, damage, segment_files


@pytest.fixture
def orders(tmp_path: Path) -> list[Sent]:
    return write_orders(tmp_path, 120)


def messages_of(sent: Sent) -> int:
    return sum(count for _, _, count in sent.runs)


@pytest.mark.parametrize("window_bytes", [1_000, 8 << 20])
@pytest.mark.parametrize("part_bytes", [2_000, 1 << 20])
@pytest.mark.parametrize("piece", [3, 1 << 17])
def test_reads_what_a_client_would(
    tmp_path: Path, orders: list[Sent], monkeypatch: pytest.MonkeyPatch, window_bytes: int, part_bytes: int, piece: int
) -> None:
    monkeypatch.setattr(segments, "PIECE_BATCHES", piece)
    monkeypatch.setattr(reading, "WINDOW_BYTES", window_bytes)
    rows, damages = read(tmp_path, part_bytes=part_bytes)
    assert rows == rows_in(tmp_path)
    assert len(rows) == sum(map(messages_of, orders))
    assert damages == []
    assert len(segment_files(tmp_path)) > 1


@pytest.mark.no_cover  # every allocation is counted already
def test_a_range_of_many_batches_takes_little_memory(tmp_path: Path) -> None:
    """The segment is archived as Parquet: the beginnings of its batches are not known all at once."""
    files, segment = large_index(tmp_path, 1_500_000)
    segment_range = SegmentRange(segment, SEGMENT_HEADER_SIZE, segment.end)
    tracemalloc.start()
    try:
        behind = [behind for _, behind in segment_range.pieces(files)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{most / 1e6:.1f} MB of an index of 24.0 MB")
    assert most < 16e6
    assert behind[-1] == segment.end


@pytest.mark.parametrize("rows_at_once", [1, 7])
def test_record_batches_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    write_orders(tmp_path, 20)
    monkeypatch.setattr(reading, "ROWS", rows_at_once)
    assert read(tmp_path)[0] == rows_in(tmp_path)


def test_reads_heads_only(tmp_path: Path, orders: list[Sent], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("subject", "partition", "position", "sequence", "message_id", "stored_at")
    expected = [{name: row[name] for name in names} for row in rows_in(tmp_path)]
    assert read(tmp_path, schema=schema_of(*names))[0] == expected
    monkeypatch.setattr(reading, "_SPARSE_BYTES", 0)
    monkeypatch.setattr(reading, "_HEAD_BYTES", 100)
    assert read(tmp_path, schema=schema_of(*names))[0] == expected
    assert orders


@pytest.mark.parametrize("only_heads", [False, True])
def test_messages_that_fell_due_together_have_ids_and_times_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_heads: bool
) -> None:
    driven = Driven(tmp_path)
    for number in range(9):
        run = RunContent("a", [b"x" * 3_000], [make_header(deliver_at=START_US + 1)])
        parts = build_batch([run], created_at_us=70 + number, producer_id=PRODUCER, producer_sequence=number)
        driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    driven.advance(1_000)
    (run_read,) = driven.pull(driven.subscribe("a"))
    driven.close()
    ids = [str(run_read.id(index)) for index in range(9)]
    if only_heads:
        monkeypatch.setattr(reading, "_SPARSE_BYTES", 0)
        monkeypatch.setattr(reading, "_HEAD_BYTES", 100)
    names = ("message_id", "created_at") if only_heads else ("message_id", "created_at", "body")
    for first in (0, 70, 75, 80):
        rows, damages = read(tmp_path, Wanted(created_from=first), schema=schema_of(*names))
        assert damages == []
        # The reader of a whole batch; Spark looks at each message again.
        assert [row["message_id"] for row in rows] == ids
        assert [row["created_at"] for row in rows] == [time_of(70 + number) for number in range(9)]
    assert read(tmp_path, Wanted(created_until=70), schema=schema_of(*names))[0] == []


def test_takes_wanted_subjects_and_times(tmp_path: Path, orders: list[Sent]) -> None:
    rows = rows_in(tmp_path)
    middle = rows[len(rows) // 2]["stored_at"]
    us = NOW_US + (middle - time_of(NOW_US)).microseconds
    until = Wanted(stored_until=us)
    assert read(tmp_path, until)[0] == [row for row in rows if row["stored_at"] < middle]
    since = Wanted(stored_from=us, subjects=frozenset(("a", "hotel.order.paid")))
    assert read(tmp_path, since)[0] == [
        row for row in rows if row["stored_at"] >= middle and row["subject"] in ("a", "hotel.order.paid")
    ]
    prefix = Wanted(prefixes=("hotel.",), partitions=frozenset([1]))
    assert read(tmp_path, prefix)[0] == [row for row in rows if row["subject"][:6] == "hotel." and row["partition"]]
    assert read(tmp_path, Wanted(created_from=NOW_US + 1))[0] == []
    assert orders


@pytest.mark.parametrize(("offset", "known"), [(-1, True), (30, False), (90, True), (100, True), (9, True)])
def test_tells_of_bad_batches_and_reads_the_others(
    tmp_path: Path, orders: list[Sent], offset: int, known: bool
) -> None:
    """A byte is changed in the data, the position, the mark (which only the broker checks), a run, and the size."""
    rows = rows_in(tmp_path)
    bad = orders[50]
    damage(tmp_path, bad, offset % len(bad.data))
    found, damages = read(tmp_path)
    if offset == 90:
        assert (found, damages) == (rows, [])
        return
    span = range(bad.position, bad.position + messages_of(bad))
    assert found == [row for row in rows if row["partition"] != bad.partition or row["position"] not in span]
    (told,) = damages
    assert (told.partition, told.start, told.end) == (bad.partition, bad.position, bad.position + len(bad.data))
    assert told.messages == (messages_of(bad) if known else None)
    assert str(bad.position) in str(told)


def test_a_segment_that_is_cut_is_damaged(tmp_path: Path, orders: list[Sent]) -> None:
    first = segment_files(tmp_path)[0]
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size - 1)
    (told,) = read(tmp_path)[1]
    last = [sent for sent in orders if sent.partition == 0 and sent.position < int(segment_files(tmp_path)[1].stem, 16)]
    assert (told.start, told.end) == (last[-1].position, last[-1].position + len(last[-1].data))


def test_bytes_that_no_batch_explains_are_told_of(tmp_path: Path, orders: list[Sent]) -> None:
    """A batch that the index lacks, such as one that was a hole when the index was made."""
    rows, source = rows_in(tmp_path), open_source(str(tmp_path))
    segment = source.segments[0]
    within = [sent for sent in orders if sent.partition == segment.partition and sent.position < segment.end]
    lost = within[len(within) // 2]
    batches = segment.batches(source.files)
    found = segment._replace(found=batches[batches["position"] != lost.position], index_path=None)
    damages: list[SegmentDamage] = []
    reader = RangeReader(source.files, Wanted(), SCHEMA, damages.append)
    segment_range = SegmentRange(found, segment.base + SEGMENT_HEADER_SIZE, segment.end)
    read_rows = [row for batch in reader.record_batches(segment_range) for row in batch.to_pylist()]
    span = range(lost.position, lost.position + messages_of(lost))
    assert read_rows == [
        row
        for row in rows
        if row["partition"] == lost.partition
        and segment.base < row["position"] < segment.end
        and row["position"] not in span
    ]
    (told,) = damages
    assert (told.start, told.end, told.messages) == (lost.position, lost.position + len(lost.data), None)
    assert told.file == str(tmp_path / segment.path)
