"""The table of files: the highest number counts, and of two commits at once one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from qmq.archive import file_table
from qmq.archive.file_table import (
    FileTable,
    ListedDamage,
    ListedFile,
    ListedSegment,
    SegmentKey,
    commit,
    numbers,
    only_in_files,
    parse_table,
    path_of,
    read_table,
    second_of,
)
from qmq.archive.files import LocalFiles
from qmq.archive.segments import SegmentSource
from qmq.errors import BadBytes, DirectoryInUse, StorageFailed
from qmq.storage.disk.checksummed_json import pack_json, parse_json

STORE = "7f0000015191"
FILE = ListedFile("parquet/a", "hotel", 3, 100, 7, 1, 2)
SEGMENT = ListedSegment(STORE, 0, 1 << 61, (1 << 61) + 500, 3)
DAMAGE = ListedDamage(STORE, 0, 70, 90, None, "no batch begins here")


def with_files(table: FileTable, files: Iterable[ListedFile] = ()) -> FileTable:
    return table.with_more(files, (), ())


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert read_table(files) == FileTable()
    table = FileTable().with_more([FILE], [SEGMENT], [DAMAGE])
    commit(files, table)
    assert read_table(files) == table
    assert (table.number, table.messages) == (1, 3)
    assert table.ends() == {SegmentKey(STORE, 0, 1 << 61): SEGMENT.end}


def test_segments_go_on_and_files_come_behind() -> None:
    first = FileTable().with_more([FILE], [SEGMENT], [])
    end = SEGMENT.end + 4
    later = replace(SEGMENT, base=end, end=end + 9)
    more = first.with_more([replace(FILE, path="parquet/b")], [later, replace(SEGMENT, end=end)], [DAMAGE])
    assert [file.path for file in more.files] == ["parquet/a", "parquet/b"]
    assert more.segments == (replace(SEGMENT, end=end, messages=6), later)
    assert more.damages == (DAMAGE,)


def test_of_two_at_once_one_is_refused(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    one, other = with_files(FileTable(), [FILE]), with_files(FileTable(), [replace(FILE, path="parquet/b")])
    commit(files, one)
    with pytest.raises(DirectoryInUse, match="another run has archived"):
        commit(files, other)
    assert read_table(files) == one


def test_the_one_before_stays(tmp_path: Path) -> None:
    files, table = LocalFiles(tmp_path), FileTable()
    for _ in range(4):
        table = with_files(table)
        commit(files, table)
    assert numbers(files) == [3, 4]
    (tmp_path / "tables" / "README").write_text("not ours")
    (tmp_path / "tables" / "_00000009.table").write_text("half")
    assert read_table(files) == table


def test_what_is_rotten_is_told_of(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    commit(files, with_files(FileTable(), [FILE]))
    path = tmp_path / path_of(1)
    data = path.read_bytes()
    for at in range(len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(BadBytes, match=r"00000001\.table"):
            read_table(files)
    with pytest.raises(BadBytes, match="is the table 1; put it back"):
        parse_table(data, 2, "it")
    content = {"number": 1, "files": [{}], "segments": [], "damages": [], "base": 0, "gone": []}
    with pytest.raises(BadBytes, match="lacks a part of a table"):
        parse_table(pack_json(1, content), 1, "it")


def test_a_table_that_goes_while_it_is_read_is_looked_for_again(tmp_path: Path) -> None:
    class Fleeting(LocalFiles):
        left = 0

        def read_whole(self, path: str) -> bytes:
            if self.left:
                self.left -= 1
                raise FileNotFoundError(path)
            return super().read_whole(path)

    files = Fleeting(tmp_path)
    commit(files, with_files(FileTable()))
    files.left = 2
    assert read_table(files).number == 1
    files.left = 100
    with pytest.raises(StorageFailed, match="try again"):
        read_table(files)


def listed(first: int, behind: int) -> list[ListedFile]:
    return [replace(FILE, path=f"parquet/{number}") for number in range(first, behind)]


def test_a_large_table_is_not_written_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its changes are written until there are many; readers see no difference."""
    monkeypatch.setattr(file_table, "_LARGE", 500)
    files = LocalFiles(tmp_path)
    large = commit(files, with_files(FileTable(), listed(0, 500)))
    whole = (tmp_path / path_of(1)).stat().st_size
    table, sizes = large, list[int]()
    for number in range(20):
        segment = replace(SEGMENT, base=SEGMENT.base + number, messages=1)
        table = table.with_more(listed(5_000 + 9 * number, 5_009 + 9 * number), [segment], [DAMAGE])
        parts = [table.files[0], table.files[5]]
        merged = replace(FILE, path=f"parquet/m{number}", parts=tuple(part for one in parts for part in one.origins))
        table = commit(files, table)
        sizes.append((tmp_path / path_of(table.number)).stat().st_size)
        table = commit(files, table.with_merged([merged]))
        sizes.append((tmp_path / path_of(table.number)).stat().st_size)
        assert read_table(files) == table
        table = read_table(files) if number % 7 == 0 else table
        assert len(numbers(files)) <= 3
    assert sizes[0] < whole / 10
    assert 1 < sum(size > whole / 2 for size in sizes) < 8
    assert (len(table.files), len(table.segments), len(table.damages)) == (500 + 20 * 8, 20, 20)
    for number in numbers(files)[:-1]:
        (tmp_path / path_of(number)).unlink()
    base = table.base
    assert base is not None
    (tmp_path / second_of(base.number)).unlink()
    with pytest.raises(BadBytes, match=f"changes of {path_of(base.number)}, which is missing"):
        read_table(files)


def test_a_base_that_is_no_base_is_told_of(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    table = commit(files, with_files(FileTable(), listed(0, 2_500)))
    for number in range(2):
        table = commit(files, with_files(table, listed(9_000 + number, 9_001 + number)))
    content = parse_json((tmp_path / path_of(3)).read_bytes(), 1, "it", "")
    (tmp_path / path_of(3)).write_bytes(pack_json(1, {**content, "base": 2}))
    with pytest.raises(BadBytes, match="is not a whole table"):
        read_table(files)


def rotten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])


@pytest.mark.parametrize("lose", [rotten, Path.unlink])
def test_a_base_that_is_lost_is_read_from_its_second_and_told_of(
    tmp_path: Path, lose: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    files = LocalFiles(tmp_path)
    table = commit(files, with_files(FileTable(), listed(0, 2_500)))
    for number in range(3):
        table = commit(files, with_files(table, listed(9_000 + number, 9_001 + number)))
    assert (tmp_path / second_of(1)).read_bytes() == (tmp_path / path_of(1)).read_bytes()
    lose(tmp_path / path_of(1))
    assert read_table(files) == table
    (told,) = caplog.messages
    assert path_of(1) in told
    assert "Its second copy was read" in told
    caplog.clear()
    mended = commit(files, with_files(read_table(files), listed(9_100, 9_101)))
    caplog.clear()
    mended = commit(files, with_files(mended, listed(9_200, 9_201)))
    assert read_table(files) == mended
    assert not caplog.messages, "nothing rests on what was lost any more"
    assert mended.base is not None
    assert mended.base.number == 5
    assert numbers(files) == [5, 6]


def test_where_both_are_rotten_the_base_is_told_of(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    table = commit(files, with_files(FileTable(), listed(0, 2_500)))
    commit(files, with_files(table, listed(9_000, 9_001)))
    rotten(tmp_path / path_of(1))
    rotten(tmp_path / second_of(1))
    with pytest.raises(BadBytes, match=r"00000001\.second"):
        read_table(files)


def test_tells_what_is_in_files_alone() -> None:
    archived = SegmentSource(bytes.fromhex(STORE), 0, SEGMENT.base, SEGMENT.end, "path", None, None)
    table = FileTable().with_more([], [SEGMENT], [])
    assert only_in_files(table, [archived]) == []
    assert only_in_files(table, [archived._replace(end=SEGMENT.end - 1)]) == [SEGMENT]
    assert only_in_files(table, []) == [SEGMENT]
    assert only_in_files(FileTable(), [archived]) == []
