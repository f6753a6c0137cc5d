"""The index of a segment, as readers take it: its own, whole, up to where the segment is known to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import BadBytes
from qmq.history.archive import archived_segments
from qmq.history.files import LocalFiles
from qmq.history.segments import read_index
from tests.history.archives import archive
from tests.history.orders import write_orders


def test_takes_its_own_index_only(tmp_path: Path) -> None:
    write_orders(tmp_path / "data", 60)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    segment = archived_segments(files)[0]
    path, place = str(segment.index_path), (segment.store_id, segment.partition, segment.base)
    whole = read_index(files, path, *place, segment.end)
    earlier = int(whole["position"][-1])
    assert read_index(files, path, *place, earlier)["position"].tolist() == whole["position"][:-1].tolist()
    others = [
        (bytes(6), segment.partition, segment.base, segment.end),
        (segment.store_id, 9, segment.base, segment.end),
        (segment.store_id, segment.partition, segment.base + 1, segment.end),
        (*place, segment.end + 1),
    ]
    for other in others:
        with pytest.raises(BadBytes, match="is not the index of the segment"):
            read_index(files, path, *other)


@pytest.mark.parametrize("at", [0, 20, 70, -1])
def test_a_rotten_index_is_refused(tmp_path: Path, at: int) -> None:
    write_orders(tmp_path / "data", 60)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    segment = archived_segments(files)[0]
    file = tmp_path / "archive" / str(segment.index_path)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadBytes):
        segment.batches(files)
    file.unlink()
    with pytest.raises(BadBytes, match="is missing"):
        segment.batches(files)
