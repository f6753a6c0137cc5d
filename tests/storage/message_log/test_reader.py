"""Reading segments again: whole batches are found at any position, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.errors import StorageFailed
from qmq.format.batch import BatchLimits, Header, check_batch, mark_of, parse_header, stamp
from qmq.format.build import RunContent, build_batch
from qmq.format.layout import BATCH_MAGIC, SEGMENT_HEADER_SIZE
from qmq.storage.message_log import reader
from qmq.storage.message_log.reader import Scanner, ScanResult, candidates
from qmq.storage.message_log.segment import Segment, SegmentOwner
from qmq.storage.types import Hole
from tests.effort import part_of
from tests.fake_disk import FakeDisk, Operation

OWNER = SegmentOwner(b"store1", 0)
SECRET = b"sixteen bytes of"
BASE = 1_000_000
FIRST = BASE + SEGMENT_HEADER_SIZE
CAPACITY = 1 << 20


def batch_at(position: int, body: bytes, secret: bytes = SECRET) -> bytes:
    parts = build_batch([RunContent("a.b", [body], None)], created_at_us=1, producer_id=bytes(16), producer_sequence=0)
    buffer = bytearray(b"".join(parts))
    checked = check_batch(memoryview(buffer), BatchLimits())
    stamp(
        memoryview(buffer), checked, position=position, stored_at_us=7, partition=0, store_id=OWNER.store_id,
        secret=secret, first_sequences=3,
    )  # fmt: skip
    return bytes(buffer)


def log_of(bodies: list[bytes]) -> tuple[bytearray, list[tuple[int, int]]]:
    """Return the bytes of a segment from its base on, and (position, size) of its batches."""
    data, places = bytearray(SEGMENT_HEADER_SIZE), []
    for body in bodies:
        batch = batch_at(BASE + len(data), body)
        places.append((BASE + len(data), len(batch)))
        data += batch
    return data, places


def scan_bytes(
    path: Path, data: bytes, *, rewrite_from: int | None = None, disk: FakeDisk | None = None, start: int = BASE
) -> tuple[ScanResult, list[tuple[int, int]]]:
    """Scan a segment with *data*; return the result and (position, size) of every batch that was fed."""
    disk = disk if disk is not None else FakeDisk("boot-1")
    segment = Segment.create(disk, path, OWNER, BASE, BASE, CAPACITY, 1)
    segment.write([data[SEGMENT_HEADER_SIZE:]], len(data) - SEGMENT_HEADER_SIZE, SEGMENT_HEADER_SIZE)
    fed: list[tuple[int, int]] = []

    def feed(header: Header, batch: memoryview) -> None:
        assert parse_header(batch) == header
        assert len(batch) >= header.size
        fed.append((header.position, header.size))

    try:
        found = Scanner(disk, SECRET, OWNER.store_id, feed).scan(segment, start, BASE + CAPACITY, rewrite_from)
    finally:
        segment.close()
    assert found.batches == len(fed)
    return found, fed


def test_a_whole_log(tmp_path: Path) -> None:
    data, places = log_of([b"x" * size for size in (0, 1, 5_000, 20)])
    found, fed = scan_bytes(tmp_path, data)
    assert fed == places
    assert found == ScanResult(BASE + len(data), batches=4)


def test_an_empty_segment(tmp_path: Path) -> None:
    assert scan_bytes(tmp_path, bytes(SEGMENT_HEADER_SIZE)) == (ScanResult(FIRST), [])


def test_a_scan_begins_at_the_given_position(tmp_path: Path) -> None:
    data, places = log_of([b"x"] * 5)
    _, fed = scan_bytes(tmp_path, data, start=places[3][0])
    assert fed == places[3:]


def damage_data(data: bytearray, place: int, size: int) -> None:
    data[place + size - 1] ^= 1


def damage_header(data: bytearray, place: int, size: int) -> None:
    data[place + 40] ^= 1


def damage_size(data: bytearray, place: int, size: int) -> None:
    data[place + 11] ^= 0x7F


def erase(data: bytearray, place: int, size: int) -> None:
    data[place : place + size] = bytes(size)


@pytest.mark.parametrize("change", [damage_data, damage_header, damage_size, erase])
@pytest.mark.parametrize("bad", [{1}, {0}, {1, 2}, {0, 2}])
def test_bad_batches_with_good_ones_after_them_are_holes(
    tmp_path: Path, change: Callable[[bytearray, int, int], None], bad: set[int]
) -> None:
    data, places = log_of([b"x" * 100, b"y" * 3_000, b"z", b"last"])
    for number in bad:
        change(data, places[number][0] - BASE, places[number][1])
    found, fed = scan_bytes(tmp_path, data)
    assert fed == [place for number, place in enumerate(places) if number not in bad]
    assert found.end == BASE + len(data)
    bytes_bad = sum(places[number][1] for number in bad)
    assert sum(hole.end - hole.start for hole in found.holes) == bytes_bad
    assert found.blind_bytes == (0 if change is damage_data else bytes_bad)
    assert len(found.damaged) == (len(bad) if change is damage_data else 0)
    assert [parse_header(prefix).position for prefix in found.damaged] == [
        places[number][0] for number in sorted(bad) if change is damage_data
    ]
    if bad == {1, 2}:
        assert found.holes == [Hole(places[1][0], places[3][0])]


@settings(max_examples=part_of(60))
@given(st.lists(st.binary(max_size=400), min_size=1, max_size=6), st.data())
def test_whole_batches_are_found_between_overwritten_bytes(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[bytes], choice: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("segment")
    data, places = log_of(bodies)
    before = bytes(data)
    start = choice.draw(st.integers(SEGMENT_HEADER_SIZE, len(data) - 1))
    junk = choice.draw(st.binary(min_size=1, max_size=300))
    data[start : start + len(junk)] = junk
    changed = [data[place - BASE :][:size] != before[place - BASE :][:size] for place, size in places]
    whole = [place for place, bad in zip(places, changed, strict=True) if not bad]
    found, fed = scan_bytes(path, data)
    assert fed == whole
    last = whole[-1][0] + whole[-1][1] if whole else FIRST
    assert found.end >= last
    covered = sum(size for _, size in whole) + sum(hole.end - hole.start for hole in found.holes)
    assert covered == found.end - FIRST


@pytest.mark.parametrize("kept", [1, 50, 140, 160, 3_000])
def test_a_torn_end_is_junk_not_a_hole(tmp_path: Path, kept: int) -> None:
    data, places = log_of([b"x", b"y" * 4_000])
    found, fed = scan_bytes(tmp_path, data[: places[1][0] - BASE + kept])
    assert fed == places[:1]
    assert (found.end, found.holes) == (places[1][0], [])
    assert 0 < found.junk_bytes <= kept


def test_a_rotten_batch_with_a_good_header_at_the_end_stays(tmp_path: Path) -> None:
    data, places = log_of([b"x", b"y" * 4_000])
    data[-3_000] ^= 1
    found, fed = scan_bytes(tmp_path, data)
    assert fed == places[:1]
    assert found.holes == [Hole(places[1][0], BASE + len(data))]
    assert (found.end, found.junk_bytes, len(found.damaged)) == (BASE + len(data), 0, 1)


@pytest.mark.parametrize("behind", [0, 3_000], ids=["the end", "zeros"])
def test_a_rotten_end_stands_when_it_ends_with_zeros_and_its_zeros_are_not_blind(tmp_path: Path, behind: int) -> None:
    data, places = log_of([b"x", b"y" * 100 + bytes(900)])
    data[-950] ^= 1
    found, fed = scan_bytes(tmp_path, data + bytes(behind))
    assert fed == places[:1]
    assert found.holes == [Hole(places[1][0], BASE + len(data))]
    assert (found.end, found.junk_bytes, found.blind_bytes) == (BASE + len(data), 0, 0)
    assert [parse_header(prefix).position for prefix in found.damaged] == [places[1][0]]


def test_junk_behind_a_rotten_end_is_cut(tmp_path: Path) -> None:
    data, places = log_of([b"x", b"y" * 100])
    data[-50] ^= 1
    found, _ = scan_bytes(tmp_path, data + b"junk" * 50)
    assert found.holes == [Hole(places[1][0], BASE + len(data))]
    assert (found.junk_bytes, found.blind_bytes) == (200, 0)


def test_batches_larger_than_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_BYTES", 1_000)
    data, places = log_of([b"x" * size for size in (10, 5_000, 100, 900, 3_000, 700, 1)])
    assert scan_bytes(tmp_path, data)[1] == places


@pytest.mark.parametrize("window", [300, 1_000, 4_096])
def test_a_search_goes_over_the_borders_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(reader, "WINDOW_BYTES", window)
    monkeypatch.setattr(reader, "_FIRST_SEARCH_BYTES", 100)
    for size in range(2_900, 3_100, 7):
        path = tmp_path / str(size)
        path.mkdir()
        data, places = log_of([b"a", b"b" * size, b"c", b"d" * 50])
        erase(data, places[1][0] - BASE, places[1][1])
        assert scan_bytes(path, data)[1] == [places[0], *places[2:]]


def test_a_body_that_is_full_of_magics_is_searched_fast_and_in_vain(tmp_path: Path) -> None:
    data, places = log_of([b"QMQb" * 50_000, b"after"])
    damage_header(data, places[0][0] - BASE, places[0][1])
    found, fed = scan_bytes(tmp_path, data)
    assert fed == places[1:]
    assert found.foreign == 0


def test_a_batch_within_a_body_is_not_taken_for_one(tmp_path: Path) -> None:
    outer = batch_at(FIRST, bytes(1_000))
    data_start = len(outer) - 1_000
    inner = batch_at(FIRST + data_start + 100, b"forged", secret=b"guessed by them.")
    body = bytes(100) + inner + bytes(900 - len(inner))
    data = bytearray(SEGMENT_HEADER_SIZE) + batch_at(FIRST, body)
    after = batch_at(BASE + len(data), b"after")
    data += after
    damage_header(data, SEGMENT_HEADER_SIZE, len(outer))
    found, fed = scan_bytes(tmp_path, data)
    assert fed == [(BASE + len(data) - len(after), len(after))]
    assert found.foreign == 1  # the header was right but for the mark


def test_batches_of_another_store_are_not_ours(tmp_path: Path) -> None:
    data = bytearray(SEGMENT_HEADER_SIZE) + batch_at(FIRST, b"x", secret=b"another store's.")
    found, fed = scan_bytes(tmp_path, data)
    assert (fed, found.end, found.foreign) == ([], FIRST, 1)


def test_valid_batches_are_written_again_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_BYTES", 2_000)
    data, places = log_of([b"x" * 700] * 8)
    damage_data(data, places[4][0] - BASE, places[4][1])
    writes: list[tuple[int, int]] = []

    def note(operation: Operation) -> None:
        if operation.kind == "pwritev":
            _, buffers, offset = operation.arguments
            writes.append((BASE + offset, sum(map(len, buffers))))

    disk = FakeDisk("boot-1")
    disk.after = note
    found, _ = scan_bytes(tmp_path, data, rewrite_from=places[2][0], disk=disk)
    again = [write for write in writes[2:] if write[0] >= FIRST]
    covered = {place for start, size in again for place in range(start, start + size)}
    expected = {place for start, size in [*places[2:4], *places[5:]] for place in range(start, start + size)}
    assert covered == expected
    assert found.rewritten_bytes == len(expected)
    assert (tmp_path / f"{BASE:016x}.messages").read_bytes()[SEGMENT_HEADER_SIZE : len(data)] == data[64:]


@pytest.mark.parametrize("operation", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_named(tmp_path: Path, operation: str) -> None:
    data, _ = log_of([b"x"])
    disk = FakeDisk("boot-1")
    disk.fail(operation, 1 if operation == "preadv" else 3)
    with pytest.raises(StorageFailed, match=rf"cannot read or write again .*messages at position {BASE}: "):
        scan_bytes(tmp_path, data, rewrite_from=0, disk=disk)
    assert disk.still_open() == []


@given(st.binary(max_size=200), st.integers(0, 2**63), st.lists(st.integers(0, 190), max_size=4))
def test_candidates_are_the_places_that_say_where_they_are(noise: bytes, position: int, places: list[int]) -> None:
    data = bytearray(noise)
    for place in places:
        if place + 32 <= len(data):
            data[place : place + 4] = BATCH_MAGIC.to_bytes(4, "little")
            data[place + 24 : place + 32] = (position + place).to_bytes(8, "little")
    says = [(data[place : place + 4], data[place + 24 : place + 32]) for place in range(len(data) - 31)]
    right = [(b"QMQb", (position + place).to_bytes(8, "little")) for place in range(len(says))]
    expected = [position + place for place in range(len(says)) if says[place] == right[place]]
    assert candidates(memoryview(data), position) == expected


def test_the_mark_is_keyed() -> None:
    assert mark_of(SECRET, 1, 2) != mark_of(bytes(16), 1, 2)
