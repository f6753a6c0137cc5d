"""Lanes in batches: runs of one subject with different priorities and slots, and the copies that keep them."""

from __future__ import annotations

import numpy as np
import pytest

from qmq.errors import BadBatch
from qmq.format.batch import BatchLimits, check_batch, check_plain, entries_of, numbers_by_run, parse_header
from qmq.format.build import (
    MessageHeader,
    RunContent,
    build_batch,
    cut_batch,
    make_header,
    unique_headers_of,
    with_unique,
)
from qmq.format.copies.due import cut_due, join_singles, single_of
from qmq.format.copies.for_group import Origin, copied_batch, private_batch
from qmq.format.copies.restored import restored_batches
from qmq.format.lanes import (
    ORDERED_KINDS,
    are_known,
    is_known,
    kind_of,
    kinds_of,
    lane_of_key_hash,
    priority_lane_of,
    priority_lanes_of,
    priority_of,
    slot_of,
)
from qmq.format.layout import (
    LANE_HIGH,
    LANE_LOW,
    LANE_NORMAL,
    LANE_ORDERED,
    LANE_ORDERED_HIGH,
    LANE_ORDERED_LOW,
    ORDER_SLOTS,
    ORDINAL_SIZE,
    RUN_SIZE,
    RUNS_HEADER,
    RUNS_HEADER_SIZE,
)
from qmq.format.pieces import StoredBatch, read_answer, stored_runs
from qmq.format.run import RunsHeader
from qmq.format.table import names_of
from qmq.format.unique import hash_of

LIMITS = BatchLimits()
#: (subject, lane, messages) by run
RUNS = [
    ("a", LANE_NORMAL, 2), ("b", LANE_HIGH, 1), ("a", LANE_LOW, 3), ("a", LANE_ORDERED | 4_095, 1),
    ("b", LANE_ORDERED | 4_095, 2),
]  # fmt: skip


def batch_of(runs: list[tuple[str, int, int]] = RUNS) -> memoryview:
    contents = [
        RunContent(subject, [b"%s-%d-%d" % (subject.encode(), lane, at) for at in range(count)], None, lane)
        for subject, lane, count in runs
    ]
    return memoryview(
        bytearray(b"".join(build_batch(contents, created_at_us=1, producer_id=bytes(16), producer_sequence=1)))
    )


def described(batch: memoryview) -> list[tuple[str, int, int]]:
    return [(run.subject, run.lane, run.count) for run in stored_runs(batch, parse_header(batch))]


def test_a_table_names_each_subject_once() -> None:
    batch = batch_of()
    checked = check_batch(batch, LIMITS)
    assert checked.names == ("a", "b")
    assert checked.runs is not None
    assert checked.runs["subject"].tolist() == [0, 1, 0, 0, 1]
    assert described(batch) == RUNS
    rows = entries_of(checked.runs, checked.header, 0, 0, np.arange(5))
    assert rows["lane"].tolist() == [lane for _, lane, _ in RUNS]


@pytest.mark.parametrize("lane", [LANE_NORMAL, LANE_HIGH, LANE_LOW, LANE_ORDERED, LANE_ORDERED | 4_095])
def test_a_run_alone_has_its_lane(lane: int) -> None:
    batch = batch_of([("a", lane, 2)])
    checked = check_batch(batch, LIMITS)
    assert checked.run is not None
    assert checked.run[1] == lane
    # only batches of normal lanes take the short way of a plain batch
    assert (check_plain(batch, len(batch), 100) is not None) == (lane == LANE_NORMAL)


def test_a_cut_batch_and_pieces_keep_lanes() -> None:
    batch = batch_of()
    cut = memoryview(b"".join(cut_batch(batch, 1, 7, 5)))
    assert described(cut) == [("a", LANE_NORMAL, 1), *RUNS[1:4]]
    check_batch(memoryview(bytearray(cut)), LIMITS)
    stored = StoredBatch(batch)
    piece = b"".join(stored.runs_piece(np.array([1, 2, 4])))
    runs, damaged = read_answer(memoryview(piece))
    assert damaged == []
    assert [(run.subject, run.lane, run.count) for run in runs] == [RUNS[1], RUNS[2], RUNS[4]]
    assert [run.bodies()[0] for run in runs] == [b"b-1-0", b"a-2-0", b"b-8191-0"]
    one, _ = stored.piece(2, 1, 3)
    runs, _ = read_answer(memoryview(b"".join(one)))
    assert [(run.subject, run.lane, run.bodies()) for run in runs] == [("a", LANE_LOW, [b"a-2-1", b"a-2-2"])]


def test_a_piece_names_only_its_subjects() -> None:
    piece = memoryview(b"".join(StoredBatch(batch_of()).runs_piece(np.array([1, 4]))))
    header = RunsHeader._make(RUNS_HEADER.unpack_from(piece))
    start = RUNS_HEADER_SIZE + (RUN_SIZE + ORDINAL_SIZE) * header.runs
    assert names_of(bytes(piece[start : start + header.table_size])) == ("b",)


def test_new_numbers_go_by_the_table_and_by_the_runs_of_a_batch_with_lanes() -> None:
    numbers = dict[tuple[str, int], int]()

    def number_of(name: str, lane: int) -> int:
        return numbers.setdefault((name, lane), len(numbers))

    for runs in ([("x", LANE_NORMAL, 1), ("y", LANE_NORMAL, 1)], RUNS):
        checked = check_batch(batch_of(runs), LIMITS)
        assert checked.runs is not None
        by_run = numbers_by_run(checked.names, checked.runs, number_of)
        assert by_run.tolist() == [numbers[subject, lane] for subject, lane, _ in runs]
    assert [name for name, _ in numbers] == ["x", "y", "a", "b", "a", "a", "b"]


def test_lanes_are_priorities_and_slots() -> None:
    known = {LANE_NORMAL, LANE_HIGH, LANE_LOW, *range(LANE_ORDERED, LANE_ORDERED_LOW + ORDER_SLOTS)}
    assert {lane for lane in range(1 << 16) if is_known(lane)} == known
    assert set(np.flatnonzero(are_known(np.arange(1 << 16, dtype=np.uint16))).tolist()) == known
    assert {kind_of(lane) for lane in known} == {LANE_NORMAL, LANE_HIGH, LANE_LOW, *ORDERED_KINDS}
    lanes = np.array(sorted(known), np.uint16)
    assert kinds_of(lanes).tolist() == [kind_of(lane) for lane in lanes.tolist()]
    assert priority_lanes_of(lanes).tolist() == [priority_lane_of(lane) for lane in lanes.tolist()]
    assert [priority_of(lane) for lane in (0, 1, 2)] == ["normal", "high", "low"]
    assert [priority_of(kind | 9) for kind in ORDERED_KINDS] == ["normal", "high", "low"]
    assert {lane_of_key_hash(number << 7, LANE_LOW) for number in range(1 << 12)} <= known
    assert slot_of(lane_of_key_hash(7, LANE_HIGH)) == slot_of(lane_of_key_hash(7)) == 7


def test_order_keys_with_unique_texts_keep_their_priority() -> None:
    shared = make_header(lane=LANE_HIGH)._replace(lane=LANE_ORDERED_HIGH)
    (header,) = unique_headers_of(["text"], 1, shared, [b"order-1"])
    assert header == with_unique(make_header(lane=LANE_HIGH, order_key="order-1"), hash_of("text"))
    assert isinstance(header, MessageHeader)
    assert kind_of(header.lane) == LANE_ORDERED_HIGH


def test_two_runs_of_a_subject_need_two_lanes() -> None:
    with pytest.raises(BadBatch, match="same subject and lane"):
        check_batch(batch_of([("a", LANE_HIGH, 1), ("a", LANE_HIGH, 2), ("b", LANE_NORMAL, 1)]), LIMITS)


# --- copies ----------------------------------------------------------------------------------------------------------

DELAYED = [("a", LANE_NORMAL), ("a", LANE_HIGH), ("b", LANE_HIGH), ("a", LANE_ORDERED | 4_095)]


def delayed_batch(lanes: list[tuple[str, int]]) -> memoryview:
    header = make_header(None, deliver_at=1_000_000)
    contents = [RunContent(subject, [b"body"], [header], lane) for subject, lane in lanes]
    parts = build_batch(contents, created_at_us=1, producer_id=bytes(16), producer_sequence=1)
    return memoryview(bytearray(b"".join(parts)))


def test_due_messages_keep_their_lanes() -> None:
    batch = delayed_batch(DELAYED)
    due = cut_due(batch, 0, 4, 0x8000)
    assert due is not None
    assert described(memoryview(due.buffer)) == [(subject, lane, 1) for subject, lane in DELAYED]
    singles = [single_of(delayed_batch([one])) for one in (*DELAYED, DELAYED[1])]
    joined = join_singles([one for one in singles if one is not None], b"store1", 0x8000)
    assert sorted(described(memoryview(joined.buffer))) == sorted(
        (subject, lane, 1 + (lane == LANE_HIGH and subject == "a")) for subject, lane in DELAYED
    )
    one = cut_due(delayed_batch(DELAYED[3:]), 0, 1, 0x8000)
    assert one is not None
    assert one.checked.run is not None
    assert one.checked.run[1] == LANE_ORDERED | 4_095


def test_copies_for_a_group_and_restored_ones_keep_their_lanes() -> None:
    batch = batch_of()
    runs = stored_runs(batch, parse_header(batch))
    for run in runs:
        copied = memoryview(copied_batch(run, "g", 1, Origin(1, 0)))
        assert described(copied) == [(f"~g~{run.subject}", run.lane, run.count)]
        one = memoryview(private_batch(run, 0, "g", bytes(16), 1))
        assert described(one) == [(f"~g~{run.subject}", run.lane, 1)]
    (restored,) = restored_batches([(run.subject, run) for run in runs], 1, 1 << 20)
    assert described(memoryview(restored.buffer)) == RUNS
    (restored,) = restored_batches([("all", run) for run in runs], 1, 1 << 20)  # all into one subject
    assert sorted(described(memoryview(restored.buffer))) == [
        ("all", LANE_NORMAL, 2), ("all", LANE_HIGH, 1), ("all", LANE_LOW, 3), ("all", LANE_ORDERED | 4_095, 3)
    ]  # fmt: skip
