"""Delayed messages that were sent one by one and fall due together become few batches, under any faults."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.broker.delay import due_batches
from qmq.broker.delay.due_batches import DueBatch
from qmq.broker.delay.items import DelayedRange
from qmq.format.layout import DELIVER_UNIT_US
from tests.broker.delay.test_delay import S, cancel, crash, delay, follow, pulled
from tests.broker.harness import START_US, Driven
from tests.fake_disk import FakeDisk
from tests.format.copies.test_due_joining import one

COUNT = 300
DUE_US = START_US + 60 * S


def sent(driven: Driven, count: int = COUNT) -> list[str]:
    """Send messages that fall due together, one a second; return their ids."""
    names = []
    for number in range(count):
        driven.now = driven.now._replace(wall_us=driven.now.wall_us + 100_003)
        names += delay(driven, f"a.{number % 3}", DUE_US, first=number)
    return names


def batches(driven: Driven) -> int:
    return sum(1 for _ in driven.store.headers_since([]))


def due(driven: Driven) -> None:
    driven.now = driven.now._replace(wall_us=DUE_US)
    driven.advance(DELIVER_UNIT_US // 1_000)


@pytest.mark.parametrize("stop", ["none", "clean", "kill"])
def test_single_messages_become_few_batches_unchanged(tmp_path: Path, stop: str) -> None:
    driven = Driven(tmp_path)
    names = sent(driven)
    if stop == "clean":
        driven.restart()
    elif stop == "kill":
        crash(driven)
    due(driven)
    assert batches(driven) <= 3
    crash(driven)
    due(driven)
    found = pulled(driven, follow(driven))
    assert dict(found) == {b"%d" % number: name for number, name in enumerate(names)}
    assert len(found) == COUNT
    assert driven.broker.delayed() == {}
    driven.close()


def test_cancelled_messages_are_left_out(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    names = sent(driven)
    gone = set(names[::7])
    for name in gone:
        assert cancel(driven, name)
    due(driven)
    assert {name for _, name in pulled(driven, follow(driven))} == set(names) - gone
    assert batches(driven) <= 3
    assert driven.broker.delayed() == {}
    driven.close()


def test_batches_of_several_and_large_ones_go_by_themselves_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_batches, "_MOST", 4)
    driven = Driven(tmp_path)
    names = list[str]()
    for number in range(12):
        names += delay(driven, "a", *[DUE_US] * (3 if number % 5 == 0 else 1))
    due(driven)
    assert [name for _, name in pulled(driven, follow(driven))] == names
    assert batches(driven) == 3 + 1 + 1 + 1
    driven.close()


def test_a_full_disk_delays_all_of_them(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk)
    names = sent(driven, 40)
    names += delay(driven, "a", *[DUE_US] * 5)
    assert cancel(driven, names.pop(42))
    disk.fail_always("pwritev", errno.ENOSPC)
    due(driven)
    assert sum(driven.broker.delayed().values()) == len(names)
    disk.heal()
    driven.advance(1_000)
    driven.advance(1_000)
    assert {name for _, name in pulled(driven, follow(driven))} == set(names)
    assert driven.broker.delayed() == {}
    driven.close()


def test_no_room_for_a_segment_delays_all_of_them(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk, segment_bytes=2_048, max_frame_bytes=1_024)
    names = sent(driven, 40)
    names += delay(driven, "a", *[DUE_US] * 5)
    disk.fail_always("open", errno.ENOSPC)
    due(driven)
    assert sum(driven.broker.delayed().values()) > 0
    disk.heal()
    for _ in range(4):
        driven.advance(1_000)
    assert {name for _, name in pulled(driven, follow(driven))} == set(names)
    assert driven.broker.delayed() == {}
    driven.close()


def test_a_batch_is_full_by_messages_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_batches, "_MOST_BYTES", 700)
    joining, part = DueBatch(1 << 30), DelayedRange(0, 0, 1, DUE_US)
    assert not joining.add(one(0, bodies=2), part)
    size = len(one(0))
    while not joining.is_full:
        assert joining.add(one(0), part)
    assert len(joining.parts) == -(-700 // size)
    joining.clear()
    assert not joining.is_full


def test_a_joined_batch_fits_a_segment() -> None:
    joining = DueBatch(1_500)
    while not joining.is_full:
        assert joining.add(one(0), DelayedRange(0, 0, 1, DUE_US))
    _, due = joining.made(b"store!")
    assert len(due.buffer) < 1_500 - 64
    assert not DueBatch(len(one(0)) * 2).add(one(0), DelayedRange(0, 0, 1, DUE_US)), "it goes by itself"
