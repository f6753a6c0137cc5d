"""The index of a segment for readers: its own, complete, and cut at the known end of the segment."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qmq.archive import segments
from qmq.archive.archive import archived_segments
from qmq.archive.files import LocalFiles
from qmq.archive.segments import SegmentSource, index_pieces
from qmq.archive.write import _count_batches
from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, INDEX_ENTRY_SIZE
from tests.archive.archives import archive, large_index
from tests.archive.orders import write_orders


def test_takes_its_own_index_only(tmp_path: Path) -> None:
    write_orders(tmp_path / "data", 60)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    segment = archived_segments(files)[0]
    path, place = str(segment.index_path), (segment.store_id, segment.partition, segment.base)
    (whole,) = index_pieces(files, path, *place, segment.end)
    earlier = int(whole["position"][-1])
    (less,) = index_pieces(files, path, *place, earlier)
    assert less["position"].tolist() == whole["position"][:-1].tolist()
    others = [
        (bytes(6), segment.partition, segment.base, segment.end),
        (segment.store_id, 9, segment.base, segment.end),
        (segment.store_id, segment.partition, segment.base + 1, segment.end),
        (*place, segment.end + 1),
    ]
    for other in others:
        with pytest.raises(BadBytes, match="is not the index of the segment"):
            list(index_pieces(files, path, *other))


@pytest.mark.parametrize("piece", [4, 1 << 18])
@pytest.mark.parametrize("at", [0, 20, 70, -1])
def test_a_rotten_index_is_refused(tmp_path: Path, at: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "PIECE_BATCHES", piece)
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


BATCHES = 1_500_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalFiles, SegmentSource]:
    """Return a segment of many small batches: only its index of 24 MB exists."""
    return large_index(tmp_path_factory.mktemp("large"), BATCHES)


class Nothing:
    """A segment without any file."""

    is_near = True

    def size(self) -> int:
        return 0

    def read(self, offset: int, size: int) -> bytes:
        return b""

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.no_cover  # every allocation is counted already
@pytest.mark.parametrize(
    "read",
    [
        lambda segment, files: segment.batches(files, 3_000_064, 6_000_064)["position"],
        lambda segment, files: segment.outline(files)[0]["position"],
        lambda segment, files: [len(piece) for piece in segment.pieces(files)],
        lambda segment, files: range(_count_batches(Nothing(), segment, files).batches),
    ],
    ids=["batches", "outline", "pieces", "what a manifest says"],
)
def test_a_large_index_takes_little_memory(read: Callable[..., Any], large: tuple[LocalFiles, SegmentSource]) -> None:
    files, segment = large
    tracemalloc.start()
    try:
        found = read(segment, files)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{most / 1e6:.1f} MB of an index of {BATCHES * INDEX_ENTRY_SIZE / 1e6:.1f} MB")
    assert most < 16e6
    assert len(found) > 10


def test_an_outline_begins_with_the_first_and_has_some_of_all(large: tuple[LocalFiles, SegmentSource]) -> None:
    files, segment = large
    outline, is_whole = segment.outline(files)
    assert not is_whole
    assert segments.PIECE_BATCHES // 2 <= len(outline) <= segments.PIECE_BATCHES
    gaps = np.diff(outline["position"].astype(np.int64), prepend=64 - 4_800, append=segment.end)
    assert outline["position"][0] == 64
    assert gaps.max() <= 2 * 300 * BATCHES // len(outline)


def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_orders(tmp_path / "data", 60)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    for segment in archived_segments(files):
        whole = segment.batches(files)
        outline, is_whole = segment.outline(files)
        assert is_whole
        assert outline.tolist() == whole.tolist()
        with monkeypatch.context() as patch:
            patch.setattr(segments, "PIECE_BATCHES", 4)
            assert segment.batches(files).tolist() == whole.tolist()
            low, high = len(whole) // 3, 2 * len(whole) // 3
            inner = segment.batches(files, int(whole["position"][low]), int(whole["position"][high]))
            assert inner.tolist() == whole[low:high].tolist()
            assert max(map(len, segment.pieces(files))) == min(4, len(whole))


@pytest.mark.parametrize("kept", [-16, 16, 5, -5])
def test_an_index_of_another_length_is_refused(tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "PIECE_BATCHES", 4)
    write_orders(tmp_path / "data", 60)
    archive(tmp_path / "data", tmp_path / "archive")
    files = LocalFiles(tmp_path / "archive")
    segment = archived_segments(files)[0]
    file = tmp_path / "archive" / str(segment.index_path)
    data = file.read_bytes()
    file.write_bytes(data[:kept] if kept < 0 else data + bytes(kept))
    with pytest.raises(BadBytes, match="is not the index"):
        segment.batches(files)
    file.write_bytes(data[: DERIVED_HEADER_SIZE - 1])
    with pytest.raises(BadBytes):
        segment.batches(files)
