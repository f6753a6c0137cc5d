"""An archive of Parquet in HDFS: as one on a local disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qmq.archive.file_table import FileTable, commit, read_table
from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.errors import DirectoryInUse
from tests.archive.archives import GONE
from tests.archive.orders import rows_in
from tests.hdfs.trees import Killed, MortalFiles, beside, files_in
from tests.spark.parquet.archives import archive_to, read_from, write_days


def test_has_every_message_once(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    write_days(tmp_path, 2, 15)
    done = archive_to(tmp_path, tree)
    files = HdfsFiles(tree.name)
    assert read_from(files) == (rows_in(tmp_path), [])
    assert done.files == len([name for name in files_in(files) if name.startswith("parquet/")])
    killed = "parquet/date=2010-12-01/only_subject=a/of-a-killed-run.parquet"
    tree.make_directory(killed.rpartition("/")[0])
    tree.write(killed, b"half")
    again = archive_to(tmp_path, tree, run="again")
    assert (again.messages, again.removed) == (0, 1)
    assert killed not in files_in(files)


def test_killed_at_many_moments_and_repeated(connection: WritableHdfsFiles, tmp_path: Path) -> None:
    """What is listed is right after each, and the next run brings the rest, nothing twice."""
    write_days(tmp_path, 2, 2)
    rows, killed, partly = rows_in(tmp_path), 0, Counter[bool]()
    for last in range(1, 1_000, 2):
        tree = beside(connection)
        mortal: Any = MortalFiles(tree, last)
        try:
            archive_to(tmp_path, mortal, GONE)
        except Killed:
            killed += 1
        else:
            break
        found, damages = read_from(HdfsFiles(tree.name))
        assert (found in ([], rows), damages) == (True, [])
        partly[not found] += 1
        archive_to(tmp_path, tree, run="again")
        assert read_from(HdfsFiles(tree.name)) == (rows, [])
        assert not [name for name in files_in(tree) if "/_" in name or name.startswith("_")]
    print(f"killed {killed} times, {partly[True]} times before the table was there")
    assert killed > 4
    assert partly[True] > 2


def test_of_two_tables_one_counts(tree: WritableHdfsFiles) -> None:
    commit(tree, FileTable(1))
    with pytest.raises(DirectoryInUse, match="another run has archived"):
        commit(tree, FileTable(1, damages=()))
    assert read_table(HdfsFiles(tree.name)).number == 1
    assert tree.names("tables") == ["00000001.table"]
