"""The locations that users name."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.archive.files import LocalFiles
from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.locations import files_at, writable_files_at
from qmq.errors import InvalidOption


def test_paths_are_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files_at("archive").name == str(tmp_path / "archive")
    assert files_at(f"file://{tmp_path}/archive").name == str(tmp_path / "archive")
    with writable_files_at("archive") as files:
        assert isinstance(files, LocalFiles)
        assert files.name == str(tmp_path / "archive")


def test_some_are_in_hdfs() -> None:
    files = files_at("hdfs://host:8020/archive/")
    assert isinstance(files, HdfsFiles)
    assert files.name == "hdfs://host:8020/archive"


def test_others_are_refused() -> None:
    with pytest.raises(InvalidOption, match="gopher://a/b is no known kind of location"):
        files_at("gopher://a/b")
    with (
        pytest.raises(InvalidOption, match="gopher://a/b is no known kind of location"),
        writable_files_at("gopher://a/b"),
    ):
        pass


@pytest.mark.parametrize(
    "location",
    [
        "gopher://me:secret@a/b", "hdfs://me:secret@host:8020/archive", "hdfs://me:secret@host",
        "hdfs://me:se/cret@host", "file://me:secret@elsewhere/a", "hdfs://me:secret@host/../a",
    ],
)  # fmt: skip
def test_no_user_and_no_password_is_shown(location: str) -> None:
    for opened in (files_at, lambda location: writable_files_at(location).__enter__()):
        with pytest.raises(InvalidOption) as caught:
            opened(location)
        assert "me" not in str(caught.value).replace("name", "").replace("NAME", "")
        assert "cret" not in str(caught.value)
