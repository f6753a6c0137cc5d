"""The contents of an archive: the segments of all stores whose manifests lie at their paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.archive.archive import archived_segments, is_archive, manifests
from qmq.archive.files import LocalFiles
from qmq.errors import BadBytes
from tests.archive.archives import archive
from tests.archive.orders import write_orders


def test_holds_segments_of_several_stores(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "archive")
    assert not is_archive(files)
    assert archived_segments(files) == []
    for seed in (1, 2):
        write_orders(tmp_path / f"data-{seed}", 20, seed=seed)
        archive(tmp_path / f"data-{seed}", tmp_path / "archive")
    assert is_archive(files)
    found = archived_segments(files)
    assert len({segment.store_id for segment in found}) == 2
    assert found == sorted(found, key=lambda segment: segment.path)


def test_what_is_unfinished_or_strange_is_not_read(tmp_path: Path) -> None:
    write_orders(tmp_path / "data", 20)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    before = archived_segments(files)
    path, _ = manifests(files)[0]
    directory, _, name = path.rpartition("/")
    files.write(f"{directory}/_{name}.manifest", b"half")
    files.write(f"{directory}/README", b"not ours")
    assert archived_segments(files) == before


def test_a_manifest_in_another_place_is_told_of(tmp_path: Path) -> None:
    write_orders(tmp_path / "data", 20)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    path, _ = manifests(files)[0]
    files.rename(f"{path}.manifest", f"{path[:-1]}x.manifest")
    with pytest.raises(BadBytes, match="put it back there"):
        manifests(files)
