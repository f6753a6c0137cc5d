"""Reasons of items: kept beside them, shared, read from the other file where one is rotten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qmq.errors import StorageError
from qmq.format.layout import REASON_BYTES, RETRY_DTYPE, RETRY_SIZE, SCHEDULE_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import item_file, sorted_runs, timer_queue
from qmq.storage.error_log.item_file import ItemLog
from qmq.storage.error_log.items import (
    LOST_REASON,
    RETRY_ITEMS,
    Items,
    pack_items,
    reason_in,
    seal,
    to_slots,
    unpack_items,
)
from qmq.storage.error_log.sorted_runs import run_paths
from qmq.storage.error_log.timer_queue import Schedule

STORE = b"store!"
#: Empty, short, as long as one slot has room for, one byte longer, and the longest.
REASONS = [b"", b"broke", b"x" * (RETRY_SIZE - 6), b"y" * (RETRY_SIZE - 5), b"z" * REASON_BYTES]


def items_of(reasons: list[bytes]) -> Items:
    items = np.zeros(len(reasons), RETRY_ITEMS)
    items["number"] = items["due_us"] = np.arange(1, len(reasons) + 1)
    items["reason"] = reasons
    return items


def reasons_in(items: Items) -> list[bytes]:
    reasons: list[bytes] = items["reason"].tolist()
    return reasons


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", 20)
    monkeypatch.setattr(timer_queue, "MOST_BLOCKS", 1 << 40)
    monkeypatch.setattr(item_file, "MEMORY_ITEMS", 20)
    monkeypatch.setattr(sorted_runs, "BLOCK_ITEMS", 7)


@pytest.mark.parametrize("reasons", [[], [b""], REASONS, REASONS * 40, [b"order %d" % at for at in range(300)]])
def test_packed_items_keep_their_reasons(reasons: list[bytes]) -> None:
    again = unpack_items(pack_items(items_of(reasons), RETRY_DTYPE), RETRY_DTYPE)
    assert reasons_in(again) == reasons
    assert again["number"].tolist() == list(range(1, len(reasons) + 1))


@pytest.mark.parametrize("data", [b"", b"\1\0\0", b"\2\0\0\0" + bytes(RETRY_SIZE), b"\0\0\0\0" + bytes(RETRY_SIZE - 1)])
def test_bytes_that_are_no_items_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # numpy's for bytes that are no whole slots
        unpack_items(data, RETRY_DTYPE)


def test_thousands_of_items_with_one_reason_take_little_more_than_items_without() -> None:
    size = len(to_slots(items_of([b"z" * REASON_BYTES] * 10_000), RETRY_DTYPE))
    assert size < 10_000 * RETRY_SIZE * 1.05


def made(tmp_path: Path, damaged: list[StorageError]) -> Schedule:
    return Schedule(Disk(), tmp_path / "s", STORE, RETRY_DTYPE, damaged)


def test_retries_keep_their_reasons_in_runs_and_in_checkpoints(tmp_path: Path) -> None:
    reasons = (REASONS + [b"order %d is not there" % at for at in range(10)]) * 4
    schedule, damaged = made(tmp_path, []), list[StorageError]()
    for at in range(0, len(reasons), 9):  # a run, and some in memory
        part = items_of(reasons[at : at + 9])
        part["number"] += at
        part["due_us"] += at
        schedule.push(part)
    assert schedule.runs()
    assert len(schedule.claim().kept) > RETRY_SIZE
    claim = schedule.claim()
    again = made(tmp_path, damaged)
    again.restore(claim)
    assert reasons_in(np.concatenate(list(again.all()))) == reasons_in(np.concatenate(list(schedule.all())))
    assert reasons_in(again.pop(1_000, 1_000)) == reasons
    assert damaged == []


def test_dead_letters_keep_their_reasons_when_runs_are_merged(tmp_path: Path) -> None:
    damaged = list[StorageError]()
    reasons = [b"order %d is not there" % (at // 3) for at in range(200)]
    log = ItemLog(Disk(), tmp_path / "d", STORE, RETRY_DTYPE, damaged)
    for at in range(0, 200, 10):
        log.add(items_of(reasons[at : at + 10]))
    for number in range(1, 201):
        if number % 10:
            log.take_out(number, number + 1)
    for _ in range(20):
        claim = log.claim()
    again = ItemLog(Disk(), tmp_path / "d", STORE, RETRY_DTYPE, damaged)
    again.restore(claim)
    assert len(again.runs()) < 5
    for number in (10, 100, 200):
        assert reasons_in(next(again.after(number - 1)))[0] == reasons[number - 1]
    assert [reason for items in again.after(0) for reason in reasons_in(items)] == reasons[9::10]
    assert damaged == []


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_a_rotten_reason_is_read_from_the_other_file(tmp_path: Path, copies: tuple[int, ...], slot: int) -> None:
    schedule, damaged = made(tmp_path, []), list[StorageError]()
    schedule.push(items_of([b"", b"z" * REASON_BYTES] * 11))  # the reason takes the four slots behind the items
    for copy in copies:
        path = run_paths(tmp_path / "s", 0)[copy]
        data = bytearray(path.read_bytes())
        data[SCHEDULE_HEADER_SIZE + (22 + slot) * RETRY_SIZE + 9] ^= 1
        path.write_bytes(data)
    again = made(tmp_path, damaged)
    again.restore(schedule.claim())
    found = again.pop(1_000, 1_000)
    assert found["number"].tolist() == list(range(1, 23)), "no item is lost with its reason"
    assert set(reasons_in(found)) == {b"", LOST_REASON if copies == (0, 1) else b"z" * REASON_BYTES}
    assert bool(damaged) is (0 in copies)


@pytest.mark.parametrize("number", [1, 21, 26, 1 << 31])
def test_an_item_that_names_no_reason_has_a_lost_one(tmp_path: Path, number: int) -> None:
    """Such an item fits its checksum, so the numbers in it come from another program."""
    schedule = made(tmp_path, [])
    schedule.push(items_of([b"z" * REASON_BYTES] * 22))
    for path in run_paths(tmp_path / "s", 0):
        data = bytearray(path.read_bytes())
        rows = np.frombuffer(data, RETRY_DTYPE, 22, SCHEDULE_HEADER_SIZE).copy()
        rows["reason"][5] = number
        data[SCHEDULE_HEADER_SIZE : SCHEDULE_HEADER_SIZE + rows.nbytes] = seal(rows).tobytes()
        path.write_bytes(data)
    again = made(tmp_path, [])
    again.restore(schedule.claim())
    assert reasons_in(again.pop(1_000, 1_000))[5] == LOST_REASON


@pytest.mark.parametrize("lost", range(4))
def test_a_reason_with_a_lost_slot_is_lost(lost: int) -> None:
    """Whatever its bytes are: a slot that fits no checksum may hold those of another reason."""
    slots = np.frombuffer(to_slots(items_of([b"z" * REASON_BYTES]), RETRY_DTYPE), RETRY_DTYPE)
    assert reason_in(slots, 1, set()) == b"z" * REASON_BYTES
    assert reason_in(slots, 1, {1 + lost}) == LOST_REASON
