"""`qmq archive --as parquet`: output and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.archive.orders import rows_in, write_orders
from tests.cli.commands import qmq
from tests.spark.parquet.archives import read, table_of
from tests.storage.stores import damage, open_store


def test_archives_and_sums_up(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "new" / "archive"
    write_orders(source, 20)
    rows = rows_in(source)
    first = qmq("archive", str(source), "--to", str(to), "--as", "parquet", "--json")
    assert first.exit_code == 0, first.output
    said = json.loads(first.output)
    assert said["destination"] == str(to)
    assert said["parquet"]["messages"] == len(rows) == len(read(to)[0])
    assert "copied" not in said
    assert not (to / "segments").exists()
    again = qmq("archive", str(source), "--to", f"file://{to}", "--as", "parquet")
    assert again.exit_code == 0
    kept = said["parquet"]["segments"]
    assert f"0 messages of 0 segments in 0 files of Parquet, 0 bytes, {kept} segments there already" in again.output


def test_both_forms_at_once(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 20)
    said = json.loads(qmq("archive", str(source), "--to", str(to), "--as", "both", "--json").output)
    assert said["messages"] == said["parquet"]["messages"] == table_of(to).messages == len(rows_in(source))
    lines = qmq("archive", str(source), "--to", str(to), "--as", "both").output.splitlines()
    assert [" copied (" in line for line in lines] == [True, False]


def test_bad_bytes_are_told_of_once(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_orders(source, 20)
    damage(source, sent[4], len(sent[4].data) - 1)
    first = qmq("archive", str(source), "--to", str(to), "--as", "parquet")
    assert (first.exit_code, "1 range of bad bytes left out" in first.output) == (1, True)
    assert qmq("archive", str(source), "--to", str(to), "--as", "parquet").exit_code == 0


def test_what_is_left_and_removed_is_said(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    store = open_store(source)
    try:
        killed = to / "parquet" / "date=2010-12-01" / "only_subject=a" / "of-a-killed-run.parquet"
        killed.parent.mkdir(parents=True)
        killed.write_bytes(b"half")
        said = qmq("archive", str(source), "--to", str(to), "--as", "parquet").output
    finally:
        store.close(clean=False)
    assert "1 left, which a broker still writes, 1 file of earlier runs removed that no table lists" in said
    assert not killed.exists()


def test_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_orders(tmp_path / "data", 2)
    monkeypatch.delitem(sys.modules, "qmq_spark.parquet.archive", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [name for name in sys.modules if name.startswith("qmq_spark.")]:
        monkeypatch.delitem(sys.modules, name)
    refused = qmq("archive", str(tmp_path / "data"), "--to", str(tmp_path / "archive"), "--as", "parquet")
    assert (refused.exit_code, "pip install 'qmq[arrow]'" in refused.output) == (2, True)
