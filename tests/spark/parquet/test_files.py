"""The files of a day: large subjects alone, the others together, and few files for however many subjects."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qmq.errors import StorageFailed, StorageFull
from qmq_spark.parquet import files as parquet_files
from qmq_spark.parquet.files import NO_SUBJECT, DayFiles, ParquetFile, directory_of
from qmq_spark.schema import SCHEMA


def batch_of(subject: str, count: int, first: int = 0, body: bytes = b"x" * 100) -> pa.RecordBatch:
    row = {
        "subject": subject,
        "lane": 0,
        "priority": "normal",
        "partition": 0,
        "message_id": "00",
        "key": None,
        "keys": [],
        "tags": ["new"],
        "properties": [("a", "b")],
        "created_at": 7,
        "body": body,
    }
    rows = [{**row, "position": at, "sequence": at, "stored_at": 1_000 + at} for at in range(first, first + count)]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


class Made:
    """The finished files: (subject, rows) of each."""

    def __init__(self) -> None:
        self.files: list[tuple[str | None, pa.Table]] = []
        self.stamps: list[tuple[int, int]] = []

    def __call__(self, file: ParquetFile) -> None:
        table = pq.read_table(file.path)
        assert table.num_rows == file.messages
        assert table.nbytes > 0
        self.files.append((file.subject, table))
        self.stamps.append((file.first_stored_at_us, file.last_stored_at_us))

    @property
    def subjects(self) -> list[str | None]:
        return [subject for subject, _ in self.files]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits to some kilobytes."""
    monkeypatch.setattr(parquet_files, "GATHERED_BYTES", 40_000)
    monkeypatch.setattr(parquet_files, "OWN_BYTES", 8_000)


def write(*batches: pa.RecordBatch) -> Made:
    made = Made()
    files = DayFiles(SCHEMA, made)
    for batch in batches:
        files.add(batch)
    files.finish()
    return made


@pytest.mark.usefixtures("small")
def test_a_large_subject_has_a_file_of_its_own() -> None:
    made = write(batch_of("b", 3), batch_of("a", 3, 3), batch_of("large", 300), batch_of("large", 1, 900))
    assert sorted(made.subjects, key=str) == [None, "large"]
    by_subject = dict(made.files)
    assert by_subject["large"]["position"].to_pylist() == [*range(300), 900]
    assert by_subject[None].select(["subject", "position"]).to_pylist() == [
        {"subject": subject, "position": at} for subject, at in zip("aaabbb", [3, 4, 5, 0, 1, 2], strict=True)
    ]
    assert dict(zip(made.subjects, made.stamps, strict=True))["large"] == (1_000, 1_900)


@pytest.mark.usefixtures("small")
def test_many_small_subjects_share_one() -> None:
    made = write(*(batch_of(f"subject-{number % 500}", 2, number) for number in range(2_000)))
    assert made.subjects == [None]
    assert made.files[0][1].num_rows == 4_000


@pytest.mark.usefixtures("small")
def test_few_are_open_at_once_and_none_is_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files written last stay open; if little is written together, one file stays open for it."""
    monkeypatch.setattr(parquet_files, "MOST_OPEN", 3)
    made = write(*(batch_of(f"large-{number}", 300) for number in range(9)), batch_of("small", 1))
    assert sorted(made.subjects, key=str) == [None, *(f"large-{number}" for number in range(9))]
    monkeypatch.setattr(parquet_files, "FILE_BYTES", 1)
    again = write(*(batch_of("large", 300, at) for at in range(0, 900, 300)))
    assert again.subjects == ["large"] * 3
    assert [table["position"][0].as_py() for _, table in again.files] == [0, 300, 600]


@pytest.mark.usefixtures("small")
def test_what_is_no_name_of_a_sender_has_no_directory() -> None:
    """The name could be too long for a directory, or have a meaning there."""
    made = write(batch_of("~group~hotel", 300), batch_of(NO_SUBJECT, 300), batch_of("hotel.order-1", 300))
    assert sorted(made.subjects, key=str) == [None, "hotel.order-1"]
    assert directory_of("2010-12-01", None) == f"date=2010-12-01/only_subject={NO_SUBJECT}"
    assert directory_of("2010-12-01", "hotel.order-1") == "date=2010-12-01/only_subject=hotel.order-1"


def test_all_that_a_message_has_comes_back() -> None:
    batch = batch_of("a", 5, body=bytes(range(256)))
    ((_, table),) = write(batch).files
    assert table.cast(SCHEMA).to_pylist() == batch.to_pylist()


def test_row_groups_tell_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "GROUP_ROWS", 10)
    file = ParquetFile(None, SCHEMA)
    file.write(pa.Table.from_batches([batch_of("a", 10), batch_of("b", 5, 10)]))
    file.finish()
    metadata = pq.read_metadata(file.path)
    found = [metadata.row_group(number).column(0).statistics for number in range(metadata.num_row_groups)]
    assert [(one.min, one.max) for one in found] == [("a", "a"), ("b", "b")]
    column = metadata.row_group(0).column(0)
    assert (column.compression, column.path_in_schema) == ("ZSTD", "subject")
    file.close()


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageFailed)])
@pytest.mark.parametrize("step", ["write", "finish"])
def test_a_disk_that_fails_says_where(
    code: int, kind: type[Exception], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, data: bytes) -> int:
        raise OSError(code, os.strerror(code))

    file, messages = ParquetFile("a", SCHEMA), pa.Table.from_batches([batch_of("a", 10)])
    if step == "finish":
        file.write(messages)
    with monkeypatch.context() as patch:
        patch.setattr(parquet_files._Unnamed, "write", fail)
        with pytest.raises(kind, match="TMPDIR"):
            file.finish() if step == "finish" else file.write(messages)
    file.close()


def test_what_fails_meanwhile_is_said_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, messages: pa.Table) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(ParquetFile, "write", fail)
    monkeypatch.setattr(parquet_files, "GATHERED_BYTES", 1)
    files = DayFiles(SCHEMA, Made())
    files.add(batch_of("a", 10))
    with pytest.raises(StorageFull, match="no room"):
        files.add(batch_of("a", 10))
    with pytest.raises(StorageFull, match="no room"):
        files.finish()
    files.close()


def test_nothing_is_left_of_files_that_were_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    files = DayFiles(SCHEMA, Made())
    monkeypatch.setattr(parquet_files, "GATHERED_BYTES", 1)
    files.add(batch_of("a", 10))
    assert list(tmp_path.iterdir()) == []
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
