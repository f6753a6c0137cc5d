"""A Parquet file is put in its place completely, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from qmq.archive.files import LocalFiles, Progress
from qmq.archive.lock import ArchiveLock, this_process
from qmq.errors import StorageFailed
from qmq_spark.parquet.files import ParquetFile
from qmq_spark.parquet.put import give_names, put, unfinished
from qmq_spark.schema import SCHEMA
from tests.archive.archives import NOW_US

PATH = "parquet/date=2026-01-01/only_subject=a/run-0-0.parquet"


def made() -> ParquetFile:
    file = ParquetFile("a", SCHEMA)
    texts: dict[str, Any] = {"subject": "a", "message_id": "0" * 32, "body": b""}
    texts |= dict.fromkeys(("key", "order_key", "source", "sender", "producer", "app")) | {"priority": "normal"}
    row = {**dict.fromkeys(SCHEMA.names, 7), **texts, "keys": [], "tags": [], "properties": []}
    file.write(pa.Table.from_pylist([row], SCHEMA))
    file.finish()
    return file


def put_to(files: LocalFiles) -> Any:
    files.make_directory("")
    file = made()
    try:
        with ArchiveLock(files, lambda: NOW_US, this_process()) as lock:
            return put(files, lock, file, PATH, (("a", 1),))
    finally:
        file.close()


def test_it_has_its_name_once_that_is_given(tmp_path: Path) -> None:
    listed = put_to(LocalFiles(tmp_path))
    assert (tmp_path / unfinished(PATH)).stat().st_size == listed.size
    assert not (tmp_path / PATH).exists()
    assert (listed.path, listed.messages, listed.first_stored_at_us, listed.parts) == (PATH, 1, 7, (("a", 1),))
    give_names(LocalFiles(tmp_path), [listed])
    assert LocalFiles(tmp_path).checksum(PATH, lambda _: None) == (listed.size, listed.crc)
    assert not (tmp_path / unfinished(PATH)).exists()


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    class Forgetful(LocalFiles):
        def copy_in(self, source: Any, size: int, path: str, progress: Progress) -> int:
            return super().copy_in(source, size, path, progress) ^ 1

    with pytest.raises(StorageFailed, match="is not as it was written"):
        put_to(Forgetful(tmp_path))
