"""The registry of subjects: numbers are places, bad bytes cost the names they hit and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.errors import BadBytes, ForeignFile, StorageFull
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.subjects import (
    FORGOTTEN,
    RECORD_SIZE,
    SUBJECTS_HEADER_SIZE,
    SubjectTable,
    pack_header,
    pack_record,
    parse_records,
)
from tests.effort import part_of
from tests.fake_disk import FakeDisk

STORE = b"store1"
LANES = st.sampled_from([LANE_NORMAL, LANE_HIGH, LANE_LOW, LANE_ORDERED, LANE_ORDERED | 77, LANE_ORDERED | 4_095])
NAMES = st.lists(st.text("abc._-9", min_size=1, max_size=20), unique=True, max_size=30)


def make(path: Path, names: list[str]) -> SubjectTable:
    table = SubjectTable.open(Disk(), path, STORE)
    for name in names:
        table.add(name)
    table.flush()
    return table


def test_numbers_are_given_in_order_and_kept(tmp_path: Path) -> None:
    table = make(tmp_path / "subjects", ["a", "b.c", "d"])
    assert [table.number(name) for name in ("a", "b.c", "d", "e")] == [0, 1, 2, None]
    length = table.length_bytes
    table.close()
    again = SubjectTable.open(Disk(), tmp_path / "subjects", STORE, length)
    assert (again.count, [again.name(n) for n in range(3)], again.length_bytes) == (3, ["a", "b.c", "d"], length)
    assert again.damaged == []
    again.close()


def test_what_the_checkpoint_does_not_know_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = make(path, ["a", "b"])
    length = table.length_bytes
    table.add("late")
    table.flush()
    table.close()
    again = SubjectTable.open(Disk(), path, STORE, length)
    assert (again.count, again.number("late"), again.cut_bytes) == (2, None, RECORD_SIZE + 4)
    assert path.stat().st_size == length
    again.close()


def test_those_under_a_prefix_are_found(tmp_path: Path) -> None:
    table = make(tmp_path / "subjects", ["a.1", "b.1", "a.2", "a.3"])
    assert table.under("a.", 0, 4).tolist() == [0, 2, 3]
    assert table.under("a.", 1, 3).tolist() == [2]
    assert table.under("", 1, 9).tolist() == [1, 2, 3]
    assert table.under("c.", 0, 4).tolist() == []
    table.close()


def test_a_number_stands_for_a_name_and_a_lane(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = SubjectTable.open(Disk(), path, STORE)
    assert [table.add("a.x"), table.add("b"), table.add("a.x", LANE_HIGH)] == [0, 1, 2]
    assert (table.has_lanes, table.lane_kinds) == (True, {LANE_NORMAL, LANE_HIGH})
    assert [table.add("c", LANE_ORDERED | 4_095), table.add("a.x", LANE_ORDERED)] == [3, 4]
    table.flush()
    again = SubjectTable.open(Disk(), path, STORE, table.length_bytes)
    for one in (table, again):
        assert one.lanes[: one.count].tolist() == [0, 0, LANE_HIGH, LANE_ORDERED | 4_095, LANE_ORDERED]
        assert (one.number("a.x"), one.number("a.x", LANE_HIGH), one.number("a.x", LANE_LOW)) == (0, 2, None)
        assert (one.number("c"), one.number("c", LANE_ORDERED | 4_095)) == (None, 3)
        assert [one.numbers_of(name) for name in ("a.x", "b", "c", "d")] == [[0, 2, 4], [1], [3], []]
        assert one.lanes_of("a.x") == {LANE_NORMAL: 0, LANE_HIGH: 2, LANE_ORDERED: 4}
        assert [one.further_lanes(name).tolist() for name in ("a.x", "b", "c", "d")] == [[2, 4], [], [], []]
        assert [one.heads(number, 9) for number in (0, 1, 2, 4)] == [[0, 1, 3], [1, 3], [3], []]
        assert one.heads(0, 2) == [0, 1]
        assert one.names_with_lanes(0, 9) == ["a.x", "c"]
        assert [one.kinds_under("a.", since) for since in (0, 3, 5)] == [
            {LANE_HIGH, LANE_ORDERED},
            {LANE_ORDERED},
            set(),
        ]
        assert one.under("a.", 0, 5).tolist() == [0, 2, 4]
        assert one.lane_kinds == {LANE_NORMAL, LANE_HIGH, LANE_ORDERED}
        assert (one.count, one.name_count) == (5, 3)
        one.close()


def test_a_forgotten_number_gives_its_name_and_lane_to_another(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = make(path, ["a", "b", "~g~a", "c"])
    table.add("a", LANE_HIGH)
    table.add("c", LANE_ORDERED)
    table.ends[:6] = table.firsts[:6] = [5, 6, 7, 8, 9, 4]
    assert (table.has_copies("a"), table.has_copies("b")) == (True, False)
    table.forget([0, 2, 5])
    assert [table.numbers_of(name) for name in ("a", "b", "~g~a", "c")] == [[4], [1], [], [3]]
    assert (table.heads(0, 9), table.under("", 0, 6).tolist()) == ([1, 3, 4], [1, 3, 4])
    assert (table.name_count, table.further_lane_count, table.forgotten_count) == (3, 0, 3)
    assert (table.has_copies("a"), table.names_with_lanes(0, 9)) == (False, ["a"])
    assert (table.kinds_under("", 0), table.kinds_under("c", 0)) == ({LANE_HIGH}, set())
    assert [table.name(number) for number in (0, 2, 4)] == [FORGOTTEN, FORGOTTEN, "a"]
    assert table.new_begin == 7
    assert [table.add("a"), table.add("c", LANE_ORDERED), table.add("~g~a")] == [6, 7, 8]
    assert table.ends[6:9].tolist() == table.firsts[6:9].tolist() == [7, 7, 7]
    assert table.kinds_under("c", 6) == {LANE_ORDERED}
    table.flush()
    again = SubjectTable.open(Disk(), path, STORE, table.length_bytes)
    for one in (table, again):
        assert [one.numbers_of(name) for name in ("a", "b", "~g~a", "c")] == [[4, 6], [1], [8], [3, 7]]
        assert one.further_lanes("a").tolist() == [6]
        assert one.heads(0, 9) == [1, 3, 4, 8]
        assert (one.name_count, one.further_lane_count, one.has_copies("a")) == (4, 2, True)
        assert np.flatnonzero(one.is_forgotten[:9]).tolist() == [0, 2, 5]
        one.close()


def test_a_lost_name_is_forgotten_too(tmp_path: Path) -> None:
    table = make(tmp_path / "subjects", ["a", "~lost-1", "b"])
    assert (table.lost, table.name_count) == ([1], 3)
    table.forget([1])
    assert (table.lost, table.name_count, table.heads(0, 9)) == ([], 2, [0, 2])
    table.close()


def test_a_registry_that_is_written_again_forgets_what_it_had_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = make(path, ["a", "b"])
    table.forget([0])
    table.add("a")
    table.flush()
    data = bytearray(path.read_bytes())
    data[data.index(b"b")] ^= 1
    path.write_bytes(data)
    table.close()
    table = SubjectTable.open(Disk(), path, STORE, len(data))
    table.restore({1: ("b", LANE_NORMAL)})
    again = SubjectTable.open(Disk(), path, STORE, table.length_bytes)
    for one in (table, again):
        assert [one.numbers_of(name) for name in ("a", "b", FORGOTTEN)] == [[2], [1], []]
        assert (one.heads(0, 9), one.forgotten_count, one.lost) == ([1, 2], 1, [])
        one.close()


def test_without_lanes_names_are_numbers(tmp_path: Path) -> None:
    table = make(tmp_path / "subjects", ["a", "b"])
    assert (table.has_lanes, table.lane_kinds, table.lane_name_count) == (False, {LANE_NORMAL}, 0)
    assert table.name_count == table.count == 2
    table.close()


def test_a_lane_that_is_none_is_damage() -> None:
    good, bad = pack_record("a", 0, LANE_LOW), pack_record("b", 1, 7)
    found = parse_records(pack_header(STORE) + good + bad + pack_record("c", 2, LANE_ORDERED))
    assert (found.names, found.lanes) == (["a", None, "c"], [LANE_LOW, 0, LANE_ORDERED])
    assert [one.number for one in found.damaged] == [1]


def test_nothing_is_written_before_flush(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = SubjectTable.open(Disk(), path, STORE)
    table.add("a")
    assert path.stat().st_size == SUBJECTS_HEADER_SIZE
    table.flush()
    assert path.read_bytes() == pack_header(STORE) + pack_record("a", 0)
    table.close()


def test_arrays_grow_and_new_subjects_begin_at_the_base(tmp_path: Path) -> None:
    table = SubjectTable.open(Disk(), tmp_path / "subjects", STORE)
    table.add("first")
    table.ends[0] = 7
    table.sequence_base = 1 << 40
    for number in range(3_000):
        table.add(f"s{number}")
    assert int(table.ends[0]) == 7
    assert int(table.ends[2_999]) == int(table.firsts[2_999]) == 1 << 40
    assert len(table.ends) == len(table.firsts) == 4_096
    table.close()


@given(records=st.lists(st.tuples(NAMES.map("".join).filter(bool), LANES), max_size=30))
@settings(max_examples=part_of(50))
def test_bytes_and_back(records: list[tuple[str, int]]) -> None:
    names, lanes = [name for name, _ in records], [lane for _, lane in records]
    packed = [pack_record(name, number, lane) for number, (name, lane) in enumerate(records)]
    data = pack_header(STORE) + b"".join(packed)
    assert parse_records(data) == (names, lanes, len(data), [])


@given(names=NAMES.filter(bool), data=st.data())
def test_one_bad_byte_costs_one_name(names: list[str], data: st.DataObject) -> None:
    whole = bytearray(pack_header(STORE) + b"".join(pack_record(name, number) for number, name in enumerate(names)))
    at = data.draw(st.integers(SUBJECTS_HEADER_SIZE, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    found = parse_records(bytes(whole))
    starts = [SUBJECTS_HEADER_SIZE]
    for name in names:
        starts.append(starts[-1] + RECORD_SIZE + len(name))
    hit = max(number for number, start in enumerate(starts[:-1]) if start <= at)
    expected: list[str | None] = list(names)
    expected[hit] = None
    if hit == len(names) - 1:  # nobody can say that a record was there
        assert (found.names, found.damaged) == (expected[:-1], [])
    else:
        assert found.names == expected
        assert [(bad.number, bad.position) for bad in found.damaged] == [(hit, starts[hit])]


@given(names=NAMES.filter(bool), cut=st.integers(1, 10_000))
@settings(max_examples=part_of(50))
def test_a_cut_file_keeps_its_whole_records(names: list[str], cut: int) -> None:
    records = [pack_record(name, number) for number, name in enumerate(names)]
    body = b"".join(records)
    body = body[: max(0, len(body) - cut)]
    found = parse_records(pack_header(STORE) + body)
    whole = 0
    while whole < len(records) and sum(map(len, records[: whole + 1])) <= len(body):
        whole += 1
    assert found.names == names[:whole]


@pytest.mark.parametrize("before", [[], ["a", "b.c"]])
def test_zeros_are_no_names(before: list[str]) -> None:
    records = b"".join(pack_record(name, number) for number, name in enumerate(before))
    assert parse_records(pack_header(STORE) + records + bytes(400)).names == before


def test_damage_before_the_checkpoint_is_told_and_can_be_restored(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = make(path, ["a", "bb", "cc"])
    length = table.length_bytes
    table.close()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"bb", b"bx"))
    table = SubjectTable.open(Disk(), path, STORE, length)
    assert [bad.number for bad in table.damaged] == [1]
    assert (table.number("bb"), table.number("bx"), table.number("cc")) == (None, None, 2)
    with pytest.raises(BadBytes, match="record of subject 1"):
        table.name(1)
    table.restore({1: ("bb", 0)})
    assert (table.name(1), table.number("bb"), table.damaged) == ("bb", 1, [])
    table.add("d")
    table.flush()
    table.close()
    assert path.read_bytes() == whole + pack_record("d", 3)


def test_a_file_shorter_than_the_checkpoint_says_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    table = make(path, ["a", "b"])
    length = table.length_bytes
    table.close()
    path.write_bytes(path.read_bytes()[:-1])
    table = SubjectTable.open(Disk(), path, STORE, length)
    assert [(bad.number, bad.position) for bad in table.damaged] == [(1, length - RECORD_SIZE - 1)]
    assert table.count == 1
    table.close()


def test_a_rotten_header_is_told_and_the_records_stand(tmp_path: Path) -> None:
    path = tmp_path / "subjects"
    make(path, ["a", "b"]).close()
    whole = path.read_bytes()
    path.write_bytes(b"\0" * SUBJECTS_HEADER_SIZE + whole[SUBJECTS_HEADER_SIZE:])
    table = SubjectTable.open(Disk(), path, STORE, len(whole))
    assert [bad.position for bad in table.damaged] == [0]
    assert [table.name(n) for n in range(2)] == ["a", "b"]
    table.close()
    assert path.read_bytes() == whole


def test_the_registry_of_another_store_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "subjects", ["a"]).close()
    with pytest.raises(ForeignFile, match="belongs to store"):
        SubjectTable.open(Disk(), tmp_path / "subjects", b"other1")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    disk = FakeDisk()
    table = SubjectTable.open(disk, tmp_path / "subjects", STORE)
    table.add("a")
    disk.full = True
    with pytest.raises(StorageFull, match="subjects"):
        table.flush()
    disk.full = False
    table.add("b")
    table.flush()
    table.close()
    again = SubjectTable.open(Disk(), tmp_path / "subjects", STORE)
    assert [again.name(n) for n in range(again.count)] == ["a", "b"]
    again.close()


def test_messages_are_counted_without_gaps(tmp_path: Path) -> None:
    table = make(tmp_path / "subjects", ["a", "b"])
    assert table.message_count(0, 10, 30) == 20
    table.gaps.add([0, 1], [15, 0], [25, 1_000])
    assert table.message_count(0, 10, 30) == 10
    assert table.message_count(1, 10, 30) == 0
    both, one = np.array([1, 0]), np.array([1])
    assert table.messages_of(both, np.array([990, 10]), np.array([1_005, 30])) == 10 + 5
    assert table.messages_of(both, np.array([2_000, 40]), np.array([1_005, 30])) == 0
    assert table.messages_of(one, np.array([990]), np.array([1_005])) == 5
    assert table.messages_of(np.array([0]), np.array([10]), np.array([30])) == 10
    assert table.messages_of(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)) == 0
    table.close()
