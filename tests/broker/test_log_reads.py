"""Reads of the log: segments, positions of batches, bytes; bounded, and only what is visible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qmq.broker import log_reads
from qmq.broker.ports.commands import Disconnected, ListBatches, ListSegments, ReadLog
from qmq.broker.ports.effects import BatchList, Effect, LogBytes, Refused, SegmentList, Sent
from qmq.errors import BadBytes, InvalidOption, Overloaded, StorageFailed
from qmq.format.layout import INDEX_DTYPE, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from tests.broker.harness import Driven
from tests.broker.test_cold_reads import cold
from tests.fake_disk import FakeDisk
from tests.storage.stores import segment_files


def filled(path: Path, batches: int = 30, disk: Disk | None = None) -> tuple[Driven, list[int]]:
    """Return a broker with some segments, and the positions of its batches."""
    driven = Driven(
        path, disk=disk if disk is not None else FakeDisk(), segment_bytes=16 << 10, max_frame_bytes=8 << 10
    )
    places = [driven.send("a", b"x" * 500, b"y" * 500).position for _ in range(batches)]
    return driven, places


def listed(driven: Driven, position: int = 0, partition: int = 0) -> SegmentList:
    (answer,) = driven.do(ListSegments(1, driven.request(), partition, position))
    assert isinstance(answer, SegmentList), answer
    return answer


def batches(driven: Driven, start: int, end: int) -> list[int]:
    """Return the positions of all batches, over several requests."""
    found: list[int] = []
    after: int | None = start
    while after is not None:
        (answer,) = driven.do(ListBatches(1, driven.request(), 0, after, end))
        assert isinstance(answer, BatchList), answer
        found += np.frombuffer(answer.records, INDEX_DTYPE)["position"].tolist()
        after = answer.after
    return found


def bytes_at(driven: Driven, position: int, size: int) -> bytes:
    (answer,) = driven.do(ReadLog(1, driven.request(), 0, position, size))
    assert isinstance(answer, LogBytes), answer
    return bytes(answer.data)


def test_segments_and_batches_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven, places = filled(tmp_path)
    monkeypatch.setattr(log_reads, "ROWS_AT_ONCE", 7)
    files = segment_files(tmp_path)
    answer = listed(driven)
    assert (answer.partitions, answer.more) == (1, False)
    assert [base for base, _, _ in answer.rows] == [int(path.stem, 16) for path in files]
    assert [sealed for _, _, sealed in answer.rows] == [True] * (len(files) - 1) + [False]
    assert len(files) > 2
    assert answer.rows[-1][1] == driven.store.partitions[0].message_log.end
    assert listed(driven, answer.rows[0][1]).rows == answer.rows[1:]
    assert listed(driven, answer.rows[0][1] - 1).rows == answer.rows
    assert batches(driven, 0, 1 << 63) == places
    assert batches(driven, places[3], places[20]) == places[3:20]
    for path, (base, end, _) in zip(files, answer.rows, strict=True):
        assert bytes_at(driven, base, 1 << 20) == path.read_bytes()[: end - base]
        assert bytes_at(driven, base + SEGMENT_HEADER_SIZE, 10) == path.read_bytes()[SEGMENT_HEADER_SIZE:][:10]
    assert bytes_at(driven, driven.store.partitions[0].message_log.end, 10) == b""
    assert bytes_at(driven, 5, 10) == b""
    driven.close()


def test_many_segments_come_in_several_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven, _ = filled(tmp_path)
    whole = listed(driven).rows
    monkeypatch.setattr(log_reads, "SEGMENTS_AT_ONCE", 1)
    found: list[tuple[int, int, bool]] = []
    while len(found) < len(whole):
        answer = listed(driven, found[-1][1] if found else 0)
        assert answer.more == (len(found) < len(whole) - 1)
        found += answer.rows
    assert found == whole
    driven.close()


def test_what_may_not_be_seen_yet_is_not_there(tmp_path: Path) -> None:
    driven, places = filled(tmp_path, 3)
    end = driven.store.partitions[0].message_log.end
    driven.auto_sync = False
    driven.do(driven.send_command({"a": [b"not on disk"]}))
    assert driven.store.partitions[0].message_log.end > end
    assert listed(driven).rows[-1][1] == end
    assert bytes_at(driven, end, 100) == b""
    assert bytes_at(driven, end - 10, 100) == segment_files(tmp_path)[-1].read_bytes()[: end - places[0] + 64][-10:]
    assert batches(driven, 0, 1 << 63) == places
    driven.auto_sync = True
    assert any(isinstance(effect, Sent) for effect in driven.sync())
    assert bytes_at(driven, end, 4) == b"QMQb"
    driven.close()


def test_a_few_reads_run_and_some_wait_and_no_more_are_taken(tmp_path: Path) -> None:
    driven, places = filled(tmp_path)
    driven.auto_read = False
    said: list[Effect] = []
    for number in range(log_reads.MAX_WAITING + 1):
        said += driven.do(ReadLog(1, 1_000 + number, 0, places[0], 100))
    (refused,) = said
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Overloaded)
    assert len(driven.fetches) == log_reads.RUNNING
    driven.do(ReadLog(2, 5, 0, places[0], 100))
    assert len(driven.fetches) == log_reads.RUNNING
    driven.do(Disconnected(1))
    driven.fetch()
    assert driven.effects() == []
    driven.fetch()
    answers = driven.effects()
    assert [(answer.connection, answer.request) for answer in answers if isinstance(answer, LogBytes)] == [(2, 5)]
    driven.auto_read = True
    assert len(bytes_at(driven, places[0], 100)) == 100
    driven.close()


def test_rows_that_are_not_in_memory_are_read_first(tmp_path: Path) -> None:
    driven, disk, bodies = cold(tmp_path, messages=60)
    driven.auto_read = True
    driven.restart()
    assert len(batches(driven, 0, 1 << 63)) == len(bodies)
    disk.forget()
    driven.auto_read = False
    assert driven.do(ListBatches(1, 700, 0, 0, 1 << 63)) == []
    driven.do(ListBatches(2, 701, 0, 0, 1 << 63))
    driven.do(Disconnected(2))
    assert len(driven.reads) == 2
    driven.auto_read = True
    answers = driven.read()
    assert [answer.request for answer in answers if isinstance(answer, BatchList)] == [700]
    driven.close()


def test_what_the_disk_does_not_give_is_an_error(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven, places = filled(tmp_path, 3, disk)
    disk.fail("pread")
    (answer,) = driven.do(ReadLog(1, driven.request(), 0, places[0], 100))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, StorageFailed)
    assert len(bytes_at(driven, places[0], 100)) == 100
    driven.close()


def test_a_segment_that_is_removed_meanwhile_is_an_error(tmp_path: Path) -> None:
    driven, places = filled(tmp_path)
    driven.auto_read = False
    driven.do(ReadLog(1, 7, 0, places[0], 100))
    first = segment_files(tmp_path)[0]
    away = first.rename(tmp_path / "away")
    driven.fetch()
    (answer,) = driven.effects()
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, BadBytes)
    away.rename(first)
    driven.auto_read = True
    driven.close()


def test_partitions_that_are_not_there(tmp_path: Path) -> None:
    driven, _ = filled(tmp_path, 1)
    for command in (ListSegments(1, 5, 1, 0), ListBatches(1, 5, 1, 0, 9), ReadLog(1, 5, 0x8000, 0, 9)):
        (answer,) = driven.do(command)
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, InvalidOption)
    driven.close()
