"""Ends, firsts and gaps of subjects from rows, against a plain model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.format.layout import ENTRY_DTYPE
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.recovery.sequences import SequenceReplay, rows_in_order
from tests.effort import part_of
from tests.fake_disk import FakeDisk

STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 5)), max_size=40)


def table_of(path: Path, count: int) -> SubjectTable:
    table = SubjectTable.open(FakeDisk(), path / "subjects", b"store1")
    for number in range(count):
        table.add(f"s{number}")
    return table


def row(first: int, subject: int, count: int, position: int = 0, stamp: int = 0) -> tuple[int, ...]:
    return (first, position, stamp, subject, count, 0, 0, 1, 0, 10, 100)


@settings(max_examples=part_of(80))
@given(STEPS, st.integers(0, 5), st.integers(1, 7), st.sampled_from([0, 100]))
def test_against_a_model(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, int, int]],
    known: int,
    chunk: int,
    raise_by: int,
) -> None:
    """Steps are (subject, sequences left out, messages). Subjects below *known* had 10 messages before."""
    table = table_of(tmp_path_factory.mktemp("subjects"), 5)
    ends = dict.fromkeys(range(known), 10)
    table.ends[:known] = 10
    firsts: dict[int, int] = {}
    stored: dict[int, set[int]] = {subject: set(range(10)) for subject in ends}
    rows = []
    for subject, left_out, count in steps:
        first = ends.get(subject, 0) + left_out
        rows.append(row(first, subject, count))
        firsts.setdefault(subject, 0 if subject < known else first)
        ends[subject] = first + count
        stored.setdefault(subject, set()).update(range(first, first + count))
    replay = SequenceReplay(table, known)
    for start in range(0, len(rows), chunk):
        replay.add(np.array(rows[start : start + chunk], ENTRY_DTYPE))
    replay.finish(raise_by)
    for subject in range(5):
        end = int(table.ends[subject])
        assert end == ends.get(subject, 0) + raise_by
        if subject in firsts:
            assert int(table.firsts[subject]) == firsts[subject]
        if subject in stored:
            first = int(table.firsts[subject])
            assert table.message_count(subject, first, end) == len(stored[subject])
    table.close()


def test_a_damaged_batch_keeps_its_sequences(tmp_path: Path) -> None:
    table = table_of(tmp_path, 4)
    table.ends[:3] = 10
    replay = SequenceReplay(table, 3)
    replay.add(np.array([row(15, 0, 2)], ENTRY_DTYPE))
    replay.add_lost(0, 10, 15)  # there are batches behind it
    replay.add_lost(1, 10, 14)  # it was the last
    replay.add_lost(3, 0, 6)  # it was the only one
    replay.finish(0)
    assert table.ends[:4].tolist() == [17, 14, 10, 6]
    assert [table.message_count(number, 0, int(table.ends[number])) for number in range(3)] == [12, 10, 10]
    assert int(table.firsts[3]) == 6
    table.close()


def test_rows_that_the_checkpoint_could_not_claim_leave_its_gaps(tmp_path: Path) -> None:
    """Subject 0 had 10 messages, of which 4 to 7 and 9 were not claimed; 4, 5 and 9 are there."""
    table = table_of(tmp_path, 1)
    table.ends[0] = 10
    table.gaps.add([0, 0], [4, 9], [8, 10])
    replay = SequenceReplay(table, 1)
    replay.add(np.array([row(4, 0, 2), row(9, 0, 1), row(12, 0, 3)], ENTRY_DTYPE))
    replay.add(np.array([row(15, 0, 1)], ENTRY_DTYPE))
    replay.finish(0)
    assert int(table.ends[0]) == 16
    assert [n for n in range(16) if table.gaps.missing(0, n, n + 1)] == [6, 7, 10, 11]
    table.close()


def test_nothing_to_do(tmp_path: Path) -> None:
    table = table_of(tmp_path, 0)
    SequenceReplay(table, 0).finish(1_000)
    assert len(table.gaps) == 0
    table.close()


@settings(max_examples=part_of(40))
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 5), st.integers(1, 4))
def test_rows_of_several_partitions_come_as_they_were_stored(
    tmp_path_factory: pytest.TempPathFactory, partitions: list[int], skipped: int, logs_count: int
) -> None:
    path = tmp_path_factory.mktemp("logs")
    logs = [ConsumerLog.open(FakeDisk(), path / "c" / str(number), number, b"store1") for number in range(logs_count)]
    for log in logs:
        log.load([], 0)
        log.roll(0)
    stamps: list[list[int]] = [[] for _ in logs]
    for stamp, partition in enumerate(partitions):
        if partition < logs_count:
            logs[partition].append(row(stamp, 0, 1, 64 + stamp, stamp))  # type: ignore[arg-type]
            stamps[partition].append(stamp)
    for log in logs:
        log.publish(2**62)
    starts = [min(skipped, log.visible_row) for log in logs]
    found = [stamp for rows in rows_in_order(logs, starts) for stamp in rows["stored_at_us"].tolist()]
    assert found == sorted(stamp for mine, start in zip(stamps, starts, strict=True) for stamp in mine[start:])
    for log in logs:
        log.close()


def test_pieces_of_several_partitions_are_cut_where_rows_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.storage.recovery.sequences._CHUNK_ROWS", 3)
    logs = [ConsumerLog.open(FakeDisk(), tmp_path / "c" / str(number), number, b"store1") for number in range(2)]
    for log in logs:
        log.load([], 0)
        log.roll(0)
    for stamp in range(50):
        logs[0 if stamp % 7 else 1].append(row(stamp, 0, 1, 64 + stamp, stamp))  # type: ignore[arg-type]
    for log in logs:
        log.publish(2**62)
    assert [s for rows in rows_in_order(logs, [0, 0]) for s in rows["stored_at_us"].tolist()] == list(range(50))
    for log in logs:
        log.close()
