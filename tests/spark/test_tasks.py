"""A task: it reads the messages or damages of its part, and nothing of an empty one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition

from qmq.archive.files import LocalReading
from qmq.errors import BadBytes, StorageFailed
from qmq_spark.options import read_options
from qmq_spark.plan import open_source, plan
from qmq_spark.read import Wanted
from qmq_spark.tasks import TaskPart, parts_of, read_part
from tests.archive import archives
from tests.archive.orders import rows_in, write_orders
from tests.spark.parquet.archives import archive, table_of, write_days
from tests.storage.stores import damage


def test_messages_and_damages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sent = write_orders(tmp_path, 30)
    rows = rows_in(tmp_path)
    damage(tmp_path, sent[10], len(sent[10].data) - 1)
    (ranges,) = plan(open_source(str(tmp_path)), read_options({"path": "x"}).wanted, 1 << 30)
    part = TaskPart(ranges)

    def found(**options: str) -> int:
        read = read_options({"path": str(tmp_path), **options})
        return sum(batch.num_rows for batch in read_part(read, read.schema, read.wanted, part))

    with pytest.raises(BadBytes, match="corrupt=skip"):
        found()
    with caplog.at_level(logging.WARNING, "qmq_spark"):
        assert found(corrupt="skip") == len(rows) - sum(count for _, _, count in sent[10].runs)
    assert "ranges of bad bytes skipped: 1" in caplog.text
    assert found(view="damages") == 1
    read = read_options({"path": str(tmp_path / "not looked at")})
    assert list(read_part(read, read.schema, read.wanted, TaskPart([]))) == []


def test_parts_of_an_archive_of_parquet(tmp_path: Path) -> None:
    """Damages from when it was archived are reported once, by the first task."""
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_days(source, 2, 10)
    damage(source, sent[3], len(sent[3].data) - 1)
    archive(source, to)
    read = read_options({"path": str(to), "corrupt": "skip"})
    found, table = open_source(str(to)), table_of(to)

    def rows_of(parts: list[InputPartition]) -> int:
        return sum(batch.num_rows for part in parts for batch in read_part(read, read.schema, read.wanted, part))

    parts = parts_of(found, read.wanted, 1_000)
    assert rows_of(parts) == table.messages
    assert len(parts) > len(table.files)
    damages = read_options({"path": str(to), "view": "damages"})
    rows = [
        row for part in parts for batch in read_part(damages, damages.schema, damages.wanted, part)
        for row in batch.to_pylist()
    ]  # fmt: skip
    assert [row["start"] for row in rows] == [sent[3].position]
    nothing = parts_of(found, Wanted(stored_until=1), 1_000)
    assert (len(nothing), rows_of(nothing)) == (1, 0)


def test_an_archive_of_two_forms_gives_each_message_once(tmp_path: Path) -> None:
    """One store is there as Parquet, another as segments, and more of the first as segments."""
    source, other, to = tmp_path / "data", tmp_path / "other", tmp_path / "archive"
    write_days(source, 1, 10)
    archive(source, to)
    write_orders(other, 20, seed=2)
    archives.archive(other, to)
    write_days(source, 1, 10, seed=3)
    archives.archive(source, to)
    write_days(tmp_path / "third", 1, 3, seed=4)
    archive(tmp_path / "third", to, run="third")
    read = read_options({"path": str(to)})
    parts = parts_of(open_source(str(to)), read.wanted, 4_000)
    ids = [
        row["message_id"] for part in parts for batch in read_part(read, read.schema, read.wanted, part)
        for row in batch.to_pylist()
    ]  # fmt: skip
    expected = [row["message_id"] for name in ("data", "other", "third") for row in rows_in(tmp_path / name)]
    assert sorted(ids) == sorted(expected)
    assert {bool(part.segment_ranges) for part in parts if isinstance(part, TaskPart)} == {True, False}


def test_a_disk_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 1, 10)
    archive(source, to)
    read = read_options({"path": str(to), "view": "damages"})
    parts = parts_of(open_source(str(to)), read.wanted, 1 << 30)

    def fail(*_: object) -> bytes:
        raise StorageFailed("the disk is gone")

    monkeypatch.setattr(LocalReading, "read", fail)
    (batch,) = read_part(read, read.schema, read.wanted, parts[0])
    assert batch.to_pylist()[0]["reason"] == "the disk is gone"
