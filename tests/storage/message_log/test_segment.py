"""One segment file: its header, its name, and its sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import ForeignFile, StorageFailed, StorageFull
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import (
    Segment,
    SegmentOwner,
    base_of,
    check_header,
    list_bases,
    pack_header,
    segment_path,
)
from tests.fake_disk import FakeDisk

OWNER = SegmentOwner(b"\1\2\3\4\5\6", 3)
POSITIONS = st.integers(0, 2**64 - 1)


def test_golden_header() -> None:
    fields = (
        b"QMQSEGMT" + bytes([1, 0, 3, 0]) + OWNER.store_id + bytes(6) + (0x1122).to_bytes(8, "little")
        + (99).to_bytes(8, "little") + (0x1100).to_bytes(8, "little") + bytes(12)
    )  # fmt: skip
    assert pack_header(OWNER, 0x1122, 0x1100, 99) == fields + crc32c(fields).to_bytes(4, "little")


@given(POSITIONS, POSITIONS, st.integers(0, 65_535), st.binary(min_size=6, max_size=6))
def test_a_header_comes_back(base: int, previous_end: int, partition: int, store_id: bytes) -> None:
    owner = SegmentOwner(store_id, partition)
    assert check_header(pack_header(owner, base, previous_end, 1), Path("f"), owner, base) == previous_end


@given(st.integers(0, 63), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    header = bytearray(pack_header(OWNER, 8, 8, 1))
    header[place] ^= change
    assert check_header(bytes(header), Path("f"), OWNER, 8) is None


def test_a_newer_version_is_refused_by_name() -> None:
    header = bytearray(pack_header(OWNER, 8, 8, 1))
    header[8] = 7
    header[60:] = crc32c(bytes(header[:60])).to_bytes(4, "little")
    with pytest.raises(ForeignFile, match="f has format version 7; this QMQ reads 1: use a newer one"):
        check_header(bytes(header), Path("f"), OWNER, 8)


@pytest.mark.parametrize("data", [b"", bytes(64), b"\xff" * 64, b"QMQSEGMT"])
def test_bytes_that_are_no_header(data: bytes) -> None:
    assert check_header(data, Path("f"), OWNER, 8) is None


@pytest.mark.parametrize(
    ("owner", "base", "says"),
    [
        (SegmentOwner(b"\0\0\0\0\0\0", 3), 8, "belongs to store 010203040506, this is store 000000000000"),
        (SegmentOwner(OWNER.store_id, 4), 8, "was written as partition 3, position 0x8"),
        (OWNER, 9, "was written as partition 3, position 0x8"),
    ],
)
def test_a_whole_header_of_another_file_is_refused(owner: SegmentOwner, base: int, says: str) -> None:
    with pytest.raises(ForeignFile, match=says):
        check_header(pack_header(OWNER, 8, 8, 1), Path("f"), owner, base)


@given(POSITIONS)
def test_names_say_the_base(base: int) -> None:
    assert base_of(segment_path(Path("d"), base).name) == base


def test_other_names_are_not_segments(tmp_path: Path) -> None:
    strange = ["x.messages", "1.messages", "0" * 16, "0" * 15 + "G.messages", "A" * 16 + ".messages"]
    strange += ["0" * 16 + ".index", "0x" + "1" * 14 + ".messages", "0" * 14 + "_0.messages"]
    for name in strange:
        assert base_of(name) is None
        (tmp_path / name).write_bytes(b"")
    for base in (5, 300, 16):
        segment_path(tmp_path, base).write_bytes(b"")
    assert list_bases(Disk(), tmp_path) == [5, 16, 300]
    with pytest.raises(StorageFailed, match="cannot list"):
        list_bases(Disk(), tmp_path / "missing")


def test_a_new_segment_is_sparse_and_its_map_shows_writes(tmp_path: Path) -> None:
    segment = Segment.create(Disk(), tmp_path, OWNER, 4_096, 4_000, 1 << 20, 7)
    assert segment.previous_end(OWNER) == 4_000
    assert segment.size() == len(segment.view) == 1 << 20
    assert segment.path.stat().st_blocks * 512 < 64 << 10
    segment.write([b"abc", b"", bytearray(b"def")], 6, SEGMENT_HEADER_SIZE)
    assert bytes(segment.view[SEGMENT_HEADER_SIZE : SEGMENT_HEADER_SIZE + 7]) == b"abcdef\0"
    segment.extend(SEGMENT_HEADER_SIZE + 2)
    assert bytes(segment.view[SEGMENT_HEADER_SIZE : SEGMENT_HEADER_SIZE + 7]) == b"ab" + bytes(5)
    segment.cut(SEGMENT_HEADER_SIZE + 2)
    assert segment.size() == SEGMENT_HEADER_SIZE + 2
    assert bytes(segment.view[SEGMENT_HEADER_SIZE : SEGMENT_HEADER_SIZE + 2]) == b"ab"
    segment.close()
    segment.close()
    assert bytes(segment.view[:8]) == b"QMQSEGMT"


@pytest.mark.parametrize("operation", ["open", "pwritev", "ftruncate", "map"])
def test_a_segment_that_cannot_be_made_leaves_nothing(tmp_path: Path, operation: str) -> None:
    disk = FakeDisk("boot-1")
    disk.fail(operation, 1, 28)
    with pytest.raises(StorageFull, match=r"cannot create .*0000000000001000\.messages"):
        Segment.create(disk, tmp_path, OWNER, 4_096, 4_096, 1 << 16, 7)
    assert list(tmp_path.iterdir()) == []
    assert disk.still_open() == []


def test_errors_name_the_file(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    with pytest.raises(StorageFailed, match=r"cannot open .*0000000000000007\.messages"):
        Segment.open(disk, tmp_path, 7, 100, writable=True)
    Segment.create(disk, tmp_path, OWNER, 7, 7, 1 << 16, 7).close()
    segment = Segment.open(disk, tmp_path, 7, 100, writable=False)
    disk.fail("pread")
    with pytest.raises(StorageFailed, match=r"cannot read .*messages at position 7: Input/output error"):
        segment.previous_end(OWNER)
    segment.close()
