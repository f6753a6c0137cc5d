"""The sparse index: one record a batch, derived, written after the batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import StorageFull
from qmq.format.layout import DERIVED_HEADER, DERIVED_HEADER_SIZE, ENTRY_DTYPE, INDEX_DTYPE, INDEX_ENTRY
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.message_log.sparse_index import BUFFER_RECORDS, SegmentIndex, derive_index, index_path, is_sealed_index
from tests.fake_disk import FakeDisk

OWNER = SegmentOwner(b"\1\2\3\4\5\6", 3)


def records_of(path: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = np.fromfile(path, INDEX_DTYPE, offset=DERIVED_HEADER_SIZE).tolist()
    return found


def make(path: Path, count: int, disk: FakeDisk | None = None) -> tuple[SegmentIndex, list[tuple[int, int]]]:
    index = SegmentIndex(disk or FakeDisk("boot-1"), path, OWNER, 64)
    expected = [(128 + 10 * number, 1_000 + number) for number in range(count)]
    for record in expected:
        index.append(*record)
    return index, expected


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2**40)), max_size=30))
def test_one_record_a_batch(batches: list[tuple[int, int]]) -> None:
    rows = np.zeros(sum(runs for runs, _ in batches), ENTRY_DTYPE)
    place = 0
    for number, (runs, stamp) in enumerate(batches):
        rows["position"][place : place + runs] = 100 + number
        rows["stored_at_us"][place : place + runs] = stamp
        place += runs
    assert derive_index(rows).tolist() == [(100 + number, stamp) for number, (_, stamp) in enumerate(batches)]


@pytest.mark.parametrize("count", [0, 1, 1_000, BUFFER_RECORDS, 2 * BUFFER_RECORDS + 5])
def test_a_sealed_file_has_all_records(tmp_path: Path, count: int) -> None:
    index, expected = make(tmp_path, count)
    assert not is_sealed_index(FakeDisk(), tmp_path, OWNER, 64, 9_999)
    index.seal(9_999)
    path = index_path(tmp_path, 64)
    assert records_of(path) == expected
    header = DERIVED_HEADER.unpack(path.read_bytes()[:DERIVED_HEADER_SIZE])
    assert header[:5] == (b"QMQINDEX", 1, 3, OWNER.store_id, 1)
    assert header[6:9] == (64, 9_999, count)
    assert header[10] == crc32c(path.read_bytes()[DERIVED_HEADER_SIZE:])
    assert is_sealed_index(FakeDisk(), tmp_path, OWNER, 64, 9_999)


def test_records_come_singly_or_in_bulk(tmp_path: Path) -> None:
    index, expected = make(tmp_path, 10)
    more = np.array([(5_000 + number, 9_000 + number) for number in range(100)], INDEX_DTYPE)
    index.extend(more)
    index.append(7_000, 10_000)
    index.seal(8_000)
    assert records_of(index_path(tmp_path, 64)) == [*expected, *more.tolist(), (7_000, 10_000)]


def test_a_wrong_index_is_made_again(tmp_path: Path) -> None:
    index, _ = make(tmp_path, 10)
    index.seal(9_999)
    path = index_path(tmp_path, 64)
    good = path.read_bytes()
    disk = FakeDisk()
    assert not is_sealed_index(disk, tmp_path, OWNER, 64, 10_000)
    assert not is_sealed_index(disk, tmp_path, SegmentOwner(OWNER.store_id, 4), 64, 9_999)
    for bad in (b"", good[:-1], good + b"x", good[:50], good[:20] + b"\x07" + good[21:]):
        path.write_bytes(bad)
        assert not is_sealed_index(disk, tmp_path, OWNER, 64, 9_999)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not is_sealed_index(disk, tmp_path, OWNER, 64, 9_999)
    assert is_sealed_index(disk, tmp_path, OWNER, 64, 9_999, check=False)
    path.unlink()
    assert not is_sealed_index(disk, tmp_path, OWNER, 64, 9_999)


def test_a_disk_that_takes_nothing_loses_nothing(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.fail_always("pwritev")
    index, expected = make(tmp_path, 3 * BUFFER_RECORDS, disk)
    index.extend(np.array([(10**6, 10**9)], INDEX_DTYPE))
    with pytest.raises(StorageFull, match=r"0000000000000040\.index"):
        index.seal(10**7)
    disk.heal()
    index.append(10**6 + 1, 10**9 + 1)
    index.seal(10**7)
    assert records_of(index_path(tmp_path, 64)) == [*expected, (10**6, 10**9), (10**6 + 1, 10**9 + 1)]
    assert is_sealed_index(disk, tmp_path, OWNER, 64, 10**7)
    assert disk.still_open() == []


@pytest.mark.parametrize("operation", ["open", "pwritev", "fdatasync"])
@pytest.mark.parametrize("nth", [1, 2])
def test_sealing_can_be_tried_again(tmp_path: Path, operation: str, nth: int) -> None:
    disk = FakeDisk("boot-1")
    index, expected = make(tmp_path, 50, disk)
    disk.fail(operation, nth, 28)
    try:
        index.seal(9_999)
    except StorageFull:
        index.seal(9_999)
    disk.heal()
    assert records_of(index_path(tmp_path, 64)) == expected
    assert is_sealed_index(disk, tmp_path, OWNER, 64, 9_999)


def test_a_record_is_sixteen_bytes() -> None:
    assert INDEX_ENTRY.pack(1, 2) == np.array([(1, 2)], INDEX_DTYPE).tobytes()
