"""A tree of local files: writes are complete and on disk, and failures are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c

from qmq.archive.files import COPY_BYTES, LocalFiles, draft_of, local_path
from qmq.errors import InvalidOption, StorageFailed, StorageFull
from tests.fake_disk import FakeDisk


def test_copies_in_pieces(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    data = bytes(range(256)) * (COPY_BYTES // 256) + b"rest"
    (tmp_path / "source").write_bytes(data + b"more")
    told: list[int] = []
    with files.open("source") as source:
        assert files.copy_in(source, len(data), "target", told.append) == crc32c(data)
        assert source.size() == len(data) + 4
    assert (tmp_path / "target").read_bytes() == data
    assert told == [COPY_BYTES, 4]


def test_a_source_that_ends_too_early_is_told_of(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write("source", b"abc")
    with files.open("source") as source, pytest.raises(StorageFailed, match="ends at 3 of 4 bytes"):
        files.copy_in(source, 4, "target", lambda _: None)


def test_one_of_two_claims_a_name(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert files.claim("name", b"first")
    assert not files.claim("name", b"second")
    assert files.names("") == ["name"]
    assert files.read_whole("name") == b"first"
    files.remove("name")
    files.remove("name")
    assert files.claim("name", b"second")


def test_what_is_not_claimed_yet_is_nobodys(tmp_path: Path) -> None:
    assert draft_of("tables/7.table", b"\1\2") == "tables/_7.table.0102"
    assert draft_of("_lock", b"\1") == "__lock.01"
    disk = FakeDisk("boot-1")
    disk.fail("unlink")
    files = LocalFiles(tmp_path, disk)
    with pytest.raises(StorageFailed):
        files.claim("name", b"first")
    assert [name[:6] for name in files.names("")] == ["_name.", "name"]


def test_renames_onto_what_is_there(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.make_directory("a/b")
    files.write("a/b/new", b"new")
    files.write("a/b/old", b"old")
    files.rename("a/b/new", "a/b/old")
    assert files.names("a/b") == ["old"]
    assert files.read_whole("a/b/old") == b"new"
    assert files.names("nothing") == files.names("a/b/old") == []
    with pytest.raises(FileNotFoundError):
        files.open("a/b/new")


def test_what_the_system_refuses_is_said(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    files = LocalFiles(tmp_path, disk)
    files.write("a", b"a")
    for operation, doing in (("open", "open"), ("pread", "read")):
        disk.fail(operation)
        with pytest.raises(StorageFailed, match=f"cannot {doing} {tmp_path}/a"):
            files.read_whole("a")
    disk.fail_always("pwritev")
    with pytest.raises(StorageFull, match=f"cannot write {tmp_path}/b"):
        files.write("b", b"b")
    with pytest.raises(StorageFull):
        files.claim("c", b"c")
    disk.heal()
    for operation in ("unlink", "rename"):
        disk.fail(operation)
    with pytest.raises(StorageFailed, match="cannot remove"):
        files.remove("a")
    with pytest.raises(StorageFailed, match="cannot rename"):
        files.rename("a", "b")
    assert disk.still_open() == []


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("a/b", "a/b"),
        ("/a b", "/a b"),
        ("file:///a%20b", "/a b"),
        ("file://localhost/a", "/a"),
        ("hdfs://host/a", None),
    ],
)
def test_places_of_this_machine(location: str, path: str | None) -> None:
    assert local_path(location) == (None if path is None else Path(path))


def test_a_place_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidOption, match="names the machine elsewhere"):
        local_path("file://elsewhere/a")
