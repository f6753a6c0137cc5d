"""Small files of many runs become few, whenever a run is killed; readers of the old files can continue."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from qmq.archive.file_table import FileTable, ListedFile
from qmq_spark.parquet import merge
from qmq_spark.parquet.merge import MERGED, SIZES, groups_of
from tests.archive.archives import GONE
from tests.archive.orders import rows_in
from tests.fake_disk import FakeDisk, Killed
from tests.spark.parquet.archives import archive, files_of, read, table_of, write_days

LARGEST = SIZES[-1]


def listed(path: str, size: int) -> ListedFile:
    return ListedFile(path, None, 3, size, 7, 1, 2)


def write_runs(directory: Path, first: int, behind: int) -> None:
    """Write a store that is archived after each of its runs, of one day."""
    for number in range(first, behind):
        write_days(directory / "data", 1, 1, seed=number)
        archive(directory / "data", directory / "archive", FakeDisk(), run=f"run-{number}")


def directories(table: FileTable) -> Counter[str]:
    return Counter(file.path.rpartition("/")[0] for file in table.files)


def test_what_is_alike_in_one_directory_is_merged() -> None:
    few = [listed(f"parquet/a/{number}", 5) for number in range(MERGED - 1)]
    others = [listed("parquet/b/1", 5), listed("parquet/a/large", LARGEST), listed("parquet/a/middle", SIZES[0])]
    assert groups_of(FileTable(1, (*few, *others)), set()) == []
    eighth = listed("parquet/a/8", 7)
    assert groups_of(FileTable(1, (*few, *others, eighth)), set()) == [[*few, eighth]]
    assert groups_of(FileTable(1, (*few, *others, eighth)), {"parquet/a/3"}) == []
    large = [listed(f"parquet/a/{number}", LARGEST) for number in range(50)]
    assert groups_of(FileTable(1, tuple(large)), set()) == []


def test_many_runs_leave_few_files_and_every_message_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SIZES", (6_000, 20_000, 1 << 20))
    to, most, runs = tmp_path / "archive", 0, 3 * MERGED
    write_runs(tmp_path, 0, runs)
    rows = rows_in(tmp_path / "data")
    table = table_of(to)
    most = max(directories(table).values())
    assert most <= 3 * (MERGED - 1) < runs
    assert read(to) == (rows, [])
    assert table.messages == sum(file.messages for file in table.files) == len(rows)
    merged = [file for file in table.files if file.parts]
    assert merged
    for file in merged:
        assert sum(count for _, count in file.parts) == file.messages
        assert pq.read_metadata(to / file.path).num_row_groups == 1
    assert len([part for file in table.files for part in file.origins]) == runs
    assert table_of(to) == table


def test_what_was_merged_goes_with_a_later_run(tmp_path: Path) -> None:
    write_runs(tmp_path, 0, MERGED - 1)
    before = table_of(tmp_path / "archive")
    write_days(tmp_path / "data", 1, 1, seed=50)
    done = archive(tmp_path / "data", tmp_path / "archive", run="merging")
    assert (done.merged, done.files, done.removed) == (MERGED - 1, 1, 1)  # its own file no table but one had
    assert {file.path for file in before.files} < files_of(tmp_path / "archive")
    later = archive(tmp_path / "data", tmp_path / "archive", run="later")
    assert (later.merged, later.files, later.removed) == (0, 0, MERGED - 1)
    assert files_of(tmp_path / "archive") == {file.path for file in table_of(tmp_path / "archive").files}


def test_killed_at_any_moment_and_repeated(tmp_path: Path) -> None:
    """After each step of a merging run, the table lists exactly the messages that there are."""
    write_runs(tmp_path, 0, MERGED - 1)
    write_days(tmp_path / "data", 1, 1, seed=50)
    rows = rows_in(tmp_path / "data")
    killed, unmerged = 0, Counter[bool]()
    for last in range(0, 1_000, 3):
        to = tmp_path / f"archive-{last}"
        shutil.copytree(tmp_path / "archive", to)
        try:
            archive(tmp_path / "data", to, FakeDisk().kill_at(last), GONE, run="merging")
        except Killed:
            killed += 1
        else:
            break
        found, damages = read(to)
        assert (len(found), damages) == (table_of(to).messages, [])
        assert found == [row for row in rows if row in found]
        unmerged[len(table_of(to).files) > 1] += 1
        archive(tmp_path / "data", to, FakeDisk(), run="again")
        archive(tmp_path / "data", to, FakeDisk(), run="once-more")
        assert read(to) == (rows, [])
        assert len(table_of(to).files) == 1
        assert files_of(to) == {file.path for file in table_of(to).files}
        shutil.rmtree(to)
    print(f"killed {killed} times, {unmerged[True]} times before it had merged, {unmerged[False]} times behind that")
    assert min(unmerged.values()) > 1
    assert killed > 10


@pytest.mark.parametrize("fault", ["gone", "rotten"])
def test_a_bad_file_is_not_merged_and_told_of(tmp_path: Path, fault: str) -> None:
    write_runs(tmp_path, 0, MERGED - 1)
    to = tmp_path / "archive"
    bad = to / table_of(to).files[2].path
    if fault == "gone":
        bad.unlink()
    else:
        data = bytearray(bad.read_bytes())
        data[len(data) // 3] ^= 1
        bad.write_bytes(data)
    write_days(tmp_path / "data", 1, 1, seed=50)
    done = archive(tmp_path / "data", to, run="merging")
    assert (done.merged, done.bad_files, len(table_of(to).files)) == (0, 1, MERGED)
    write_days(tmp_path / "data", 1, 1, seed=51)
    assert archive(tmp_path / "data", to, run="next").merged == MERGED - 1
    kept = {part for file in table_of(to).files if not file.parts for part, _ in file.origins}
    assert kept == {bad.name}


def test_a_merged_file_is_listed_instead_of_its_parts() -> None:
    files = tuple(listed(f"parquet/a/{name}", 5) for name in "abcd")
    whole = ListedFile("parquet/a/x", None, 6, 9, 1, 1, 2, (("b", 3), ("c", 3)))
    table = FileTable(4, files).with_merged([whole])
    assert [file.path for file in table.files] == ["parquet/a/a", "parquet/a/d", "parquet/a/x"]
    assert (table.number, table.messages) == (5, 12)
    again = ListedFile("parquet/a/y", None, 9, 9, 1, 1, 2, (("a", 3), *whole.parts))
    assert [file.path for file in table.with_merged([again]).files] == ["parquet/a/d", "parquet/a/y"]
    elsewhere = ListedFile("parquet/b/x", None, 6, 9, 1, 1, 2, (("b", 3), ("c", 3)))
    assert FileTable(4, files).with_merged([elsewhere]).files == (*files, elsewhere)
