"""Parts of a source: every byte is in one of them, they have about the same size, and none is for unwanted messages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from qmq.archive import segments
from qmq.archive.file_table import SegmentKey
from qmq.archive.keys import keys_path_of
from qmq.errors import InvalidOption, StorageFailed
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq_spark.plan import SourceView, open_source, plan
from qmq_spark.read import Wanted
from tests.archive.archives import archive
from tests.archive.orders import rows_in, write_orders
from tests.archive.test_keys import write as write_keys
from tests.spark.parquet import archives as parquet
from tests.spark.parquet.archives import write_days
from tests.spark.reads import read
from tests.storage.stores import segment_files


@pytest.mark.parametrize("part_bytes", [1, 5_000, 40_000, 1 << 30])
def test_parts_are_balanced_and_lack_nothing(tmp_path: Path, part_bytes: int) -> None:
    sent = write_orders(tmp_path, 100)
    source = open_source(str(tmp_path))
    parts = plan(source, Wanted(), part_bytes)
    largest = max(len(batch.data) for batch in sent)
    sizes = [sum(part_range.end - part_range.start for part_range in part) for part in parts]
    assert max(sizes) <= part_bytes + largest
    ranges = [part_range for part in parts for part_range in part]
    for segment in source.segments:
        own = [(at.start, at.end) for at in ranges if at.segment[1:3] == segment[1:3]]
        assert [start for start, _ in own] == [segment.base + SEGMENT_HEADER_SIZE, *(end for _, end in own[:-1])]
        assert own[-1][1] == segment.end
        assert all(before[1] == after[0] for before, after in pairwise(own))
    if part_bytes == 5_000:
        assert len(parts) > 5


@pytest.mark.parametrize("where", ["data", "archive"])
@pytest.mark.parametrize("with_indexes", [True, False])
def test_key_indexes_spare_all_but_the_batches_of_a_key(tmp_path: Path, where: str, with_indexes: bool) -> None:
    write_keys(tmp_path / "data", with_indexes=with_indexes)
    archive(tmp_path / "data", tmp_path / "archive")
    every, _ = read(tmp_path / where)
    source = open_source(str(tmp_path / where))
    whole = sum(segment.end - segment.base for segment in source.segments)
    indexed = {segment.base for segment in source.segments if (tmp_path / where / keys_path_of(segment)).exists()}
    assert (len(indexed) > 1) == (with_indexes or where == "archive")
    for keys in (["order-3"], ["order-5", "nobody's"], ["nobody's"]):
        parts = plan(source, Wanted(keys=frozenset(keys)), 1 << 30)
        rows, _ = read(tmp_path / where, wanted=Wanted(keys=frozenset(keys)))
        assert [row for row in rows if row["key"] in keys] == [row for row in every if row["key"] in keys]
        planned = [part_range for part in parts for part_range in part if part_range.segment.base in indexed]
        assert sum(part_range.end - part_range.start for part_range in planned) < whole / 4
        if keys == ["nobody's"]:
            assert planned == []


def test_times_spare_segments(tmp_path: Path) -> None:
    sent = write_orders(tmp_path, 100)
    source = open_source(str(tmp_path))
    assert plan(source, Wanted(stored_until=1), 5_000) == []
    assert plan(source, Wanted(stored_from=1 << 62), 5_000) == []
    parts = plan(source, Wanted(partitions=frozenset([1])), 5_000)
    assert {part_range.segment.partition for part in parts for part_range in part} == {1}
    assert sent


@pytest.mark.parametrize("part_bytes", [1, 5_000, 1 << 30])
def test_where_not_all_batches_are_looked_at_nothing_is_missing(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large segment of small batches."""
    write_orders(tmp_path / "data", 100)
    archive(tmp_path / "data", tmp_path / "archive")
    rows, _ = read(tmp_path / "archive")
    times = sorted({row["stored_at"] for row in rows})
    monkeypatch.setattr(segments, "PIECE_BATCHES", 5)
    for first, last in ((0, -1), (7, 9), (30, 80)):
        since, until = (int(times[at].timestamp() * 1e6 + 0.5) for at in (first, last))
        wanted = Wanted(stored_from=since, stored_until=until)
        found, damages = read(tmp_path / "archive", wanted, part_bytes=part_bytes)
        assert found == [row for row in rows if times[first] <= row["stored_at"] < times[last]]
        assert damages == []


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="neither a data directory nor an archive"):
        open_source(str(tmp_path))
    with pytest.raises(StorageFailed, match="is no directory"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(InvalidOption, match="gopher"):
        open_source("gopher://a/b")


def test_an_index_spares_the_search(tmp_path: Path) -> None:
    """Segments whose index is gone or damaged are read to find their batches, and give the same rows."""
    write_orders(tmp_path, 100)
    by_index = plan(open_source(str(tmp_path)), Wanted(), 5_000)
    assert any(part_range.segment.index_path for part in by_index for part_range in part)
    for segment in (*segment_files(tmp_path), *segment_files(tmp_path, 1)):
        segment.with_suffix(".index").write_bytes(b"rotten")
    by_search = plan(open_source(str(tmp_path)), Wanted(), 5_000)
    assert not any(part_range.segment.index_path for part in by_search for part_range in part)
    assert [[part_range[1:] for part_range in part] for part in by_search] == [
        [part_range[1:] for part_range in part] for part in by_index
    ]


def test_an_archive_of_parquet_is_read_from_its_table_and_has_no_stream(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 1, 10)
    parquet.archive(source, to)
    found = open_source(str(to))
    assert found.table is not None
    assert (found.table.messages, found.segments) == (len(rows_in(source)), [])
    with SourceView(str(to), only_segments=True) as view, pytest.raises(InvalidOption, match="a stream reads segments"):
        view.look()
    archive(source, to)
    with SourceView(str(to), only_segments=True) as view:
        assert view.look().table is None


def test_of_an_archive_of_two_forms_each_segment_is_read_once(tmp_path: Path) -> None:
    """Segments in the table of files are read from the files, the others as segments; one that continues, from both."""
    source, other, to = tmp_path / "data", tmp_path / "other", tmp_path / "archive"
    write_days(source, 1, 15)
    parquet.archive(source, to)
    table = open_source(str(to)).table
    assert table is not None
    assert plan(open_source(str(to)), Wanted(), 5_000) == []
    write_orders(other, 30, seed=3)
    archive(other, to)
    found = open_source(str(to))
    assert found.table == table
    ranges = [part_range for part in plan(found, Wanted(), 5_000) for part_range in part]
    assert {part_range.segment.store_id for part_range in ranges} == {
        one.store_id for one in open_source(str(other)).segments
    }
    write_days(source, 1, 15, seed=2)
    archive(source, to)
    assert open_source(str(to)).table is None
    parquet.archive(tmp_path / "other", to, run="later")
    write_days(tmp_path / "third", 1, 2, seed=4)
    parquet.archive(tmp_path / "third", to, run="third")
    found = open_source(str(to))
    assert found.table is not None
    ends = found.table.ends()
    left = [part_range for part in plan(found, Wanted(), 1 << 20) for part_range in part]
    assert left
    for part_range in left:
        segment = part_range.segment
        end = ends.get(SegmentKey(segment.store_id.hex(), segment.partition, segment.base), 0)
        assert part_range.start >= end
