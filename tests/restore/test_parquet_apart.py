"""A Parquet file that does not fit its checksum is read apart: what ends a process there ends no other."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c

from qmq.archive.files import LocalFiles
from qmq.errors import BadBytes
from qmq.restore import parquet_apart
from qmq.restore.parquet_apart import ParquetApart, RowGroup, checksum_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two row groups with checksums of pages."""
    table = pa.table({"number": list(range(20_000)), "body": [b"%d" % number * 9 for number in range(20_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10_000, write_page_checksum=True, compression="zstd")
    return tmp_path / "a.parquet"


def test_a_good_file_is_read_whole(path: Path) -> None:
    reading = LocalFiles(path.parent).open(path.name)
    assert checksum_of(reading, reading.size()) == crc32c(path.read_bytes())
    with ParquetApart(reading, reading.size()) as apart:
        groups = apart.groups()
        assert groups == [RowGroup(10_000, 4), RowGroup(10_000, groups[1].start)]
        found = [pa.Table.from_batches(list(apart.batches(number, ["number"]))) for number in (0, 1)]
    assert pa.concat_tables(found)["number"].to_pylist() == list(range(20_000))


def test_a_bad_page_ends_its_group_and_no_other(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with ParquetApart(LocalFiles(path.parent).open(path.name), len(data)) as apart:
        with pytest.raises(BadBytes):
            list(apart.batches(0, ["body"]))
        assert sum(batch.num_rows for batch in apart.batches(1, ["body"])) == 10_000


def test_bytes_that_are_no_file_are_bad() -> None:
    class Noise:
        is_near = True

        def size(self) -> int:
            return 64

        def read(self, offset: int, size: int) -> bytes:
            return bytes(64)[offset : offset + size]

        def close(self) -> None: ...

    with ParquetApart(Noise(), 64) as apart, pytest.raises(BadBytes, match="Parquet magic bytes not found"):
        apart.groups()


def test_a_process_that_dies_is_bad_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = parquet_apart._PROGRAM.replace("import json, sys", "import json, os, sys").replace(
        "        writer.write_batch(batch)", "        writer.write_batch(batch); sys.stdout.buffer.flush(); os.abort()"
    )
    monkeypatch.setattr(parquet_apart, "_PROGRAM", dying)
    reading = LocalFiles(path.parent).open(path.name)
    with ParquetApart(reading, reading.size()) as apart:
        batches = apart.batches(0, ["number"])
        assert next(batches).num_rows == 4_096, "what came before counts"
        with pytest.raises(BadBytes, match="ended a process with -6"):
            list(batches)
    monkeypatch.setattr(parquet_apart, "_PROGRAM", "import os; os.abort()")
    with ParquetApart(reading, reading.size()) as apart, pytest.raises(BadBytes, match="ended a process with -6"):
        apart.groups()
