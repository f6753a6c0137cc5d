"""Delayed messages whose batches are not in memory when they are due are read in a thread, and delivered then."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.broker.delay import reads as delay_reading
from qmq.broker.ports.commands import Administer, Disconnected
from qmq.broker.ports.effects import Administered, Asker, Effect, asker_of
from tests.broker.delay.test_delay import S, cancel, crash, delay, follow, pulled
from tests.broker.harness import Driven
from tests.fake_disk import FakeDisk

SMALL = {"segment_bytes": 8_192, "max_frame_bytes": 4_096}


def cold(tmp_path: Path, count: int = 60) -> tuple[Driven, FakeDisk, list[str]]:
    """Return a broker with messages due in 10 s, a batch each, none of them in memory; tests do the reads."""
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk, **SMALL)
    names = [delay(driven, "a", 10 * S, first=number)[0] for number in range(count)]
    driven.restart()
    disk.forget()
    driven.auto_read = False
    return driven, disk, names


def drain(driven: Driven) -> list[str]:
    """Return the ids of all delivered messages."""
    driven.auto_read = True
    subscription, found = follow(driven), list[str]()
    while some := pulled(driven, subscription):
        found += [name for _, name in some]
    return found


def run(driven: Driven, disk: FakeDisk) -> tuple[int, int]:
    """Tick and read until all is delivered; return the number of reads, and of those that the loop did itself."""
    reads = mine = 0
    for _ in range(500):
        before = disk.calls["pread"]
        driven.advance(1)
        mine += disk.calls["pread"] - before
        reads += len(driven.reads)
        driven.read()
        if not driven.broker.delayed():
            break
    return reads, mine


def test_the_loop_reads_no_batch_itself(tmp_path: Path) -> None:
    driven, disk, names = cold(tmp_path)
    driven.advance(10_010)
    assert len(driven.reads) == 1
    assert driven.broker.delayed() == {"a": len(names)}
    reads, mine = run(driven, disk)
    print(f"{reads} reads, {mine} by the loop")
    assert reads < len(names) // 2, "batches that lie together are read together"
    assert mine == 0
    assert drain(driven) == names
    driven.close()


def test_other_messages_go_on_during_a_read(tmp_path: Path) -> None:
    driven, disk, names = cold(tmp_path)
    driven.advance(9_000)
    disk.hot_bytes = 1_024  # messages sent now are in memory
    (new,) = delay(driven, "b", S // 2, first=1_000)
    driven.advance(1_100)
    driven.advance(1)
    assert driven.reads
    assert driven.broker.delayed().keys() == {"a"}, "one that was sent just now did not wait for the read"
    disk.hot_bytes = 0
    run(driven, disk)
    assert sorted(drain(driven)) == sorted([*names, new])
    driven.close()


def is_lookup(number: int) -> bool:
    return asker_of(number) == Asker.CANCEL


def cancel_with_reads(driven: Driven, name: str) -> bool:
    """As cancel, but do the reads of this command, and no others."""
    said = driven.do(Administer(1, driven.request(), "cancel", {"id": name}))
    others = [wanted for wanted in driven.reads if not is_lookup(wanted.number)]
    for _ in range(8):
        driven.reads = [wanted for wanted in driven.reads if is_lookup(wanted.number)]
        driven.run_reads()
        driven.finish_reads()
        said += driven.effects()
    driven.reads = others
    (answer,) = [effect for effect in said if isinstance(effect, Administered)]
    return bool(answer.fields["cancelled"])


@pytest.mark.parametrize("disconnects", [False, True])
def test_a_cancellation_waits_for_its_read_and_delays_no_other_command(tmp_path: Path, disconnects: bool) -> None:
    driven, disk, names = cold(tmp_path)
    command = Administer(1, driven.request(), "cancel", {"id": names[3]})
    before = disk.calls["pread"]
    assert driven.do(command) == []
    assert disk.calls["pread"] == before, "the loop waits for the disk"
    if disconnects:
        driven.do(Disconnected(1))
    while driven.reads:
        driven.run_reads()
        before = disk.calls["pread"]
        driven.finish_reads()
        driven.effects()
        assert disk.calls["pread"] == before, "the loop waits for the disk"
    driven.auto_read = True
    assert cancel(driven, names[3])
    driven.advance(20_000)
    run(driven, disk)
    assert sorted(drain(driven)) == sorted(name for name in names if name != names[3])
    driven.close()


def test_a_cancellation_is_answered_though_its_bytes_leave_memory_at_once(tmp_path: Path) -> None:
    driven, disk, names = cold(tmp_path)
    disk.forgets = 1.0
    assert cancel_with_reads(driven, names[0])
    driven.store.close(clean=False)


@pytest.mark.parametrize("when", ["asked", "checkpoint", "read"])
def test_a_crash_during_a_read_loses_and_doubles_nothing(tmp_path: Path, when: str) -> None:
    driven, disk, names = cold(tmp_path)
    driven.advance(10_010)
    if when == "read":
        driven.read()
        driven.advance(1)
    if when != "asked":
        driven.checkpoint()
    assert not cancel_with_reads(driven, names[0]), "it is too late"
    crash(driven)
    disk.forget()
    run(driven, disk)
    assert sorted(drain(driven)) == sorted(names)
    assert driven.broker.take_damaged() == []
    driven.close()


def test_batches_that_leave_memory_at_once_are_delivered(tmp_path: Path) -> None:
    driven, disk, names = cold(tmp_path)
    disk.forgets = 1.0
    driven.advance(10_010)
    run(driven, disk)
    disk.forgets = 0.0
    assert sorted(drain(driven)) == sorted(names)
    driven.close()


def test_waiting_ranges_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_reading, "MOST_COLD", 10)
    monkeypatch.setattr("qmq.broker.delay.delay._SLICE_ITEMS", 4)
    monkeypatch.setattr("qmq.broker.delay.delay._SLICE_SINGLES", 4)
    driven, disk, names = cold(tmp_path)
    for _ in range(20):
        driven.advance(10_010)
    deadline = driven.broker.tick(driven.now)
    assert deadline is None or deadline > driven.now.monotonic_us, "it waits for the read"
    assert len(driven.broker._delaying._reads.cold) <= 13
    run(driven, disk)
    assert sorted(drain(driven)) == sorted(names)
    driven.close()


@pytest.mark.parametrize("what", ["pread", "open"])
def test_a_failing_disk_delays_messages_and_loses_none(tmp_path: Path, what: str) -> None:
    driven, disk, names = cold(tmp_path)
    driven.advance(10_010)
    disk.fail_always(what, errno.EIO, ".messages")
    said: list[Effect] = []
    for _ in range(5):
        said += driven.read()
        driven.advance(110)
    assert driven.broker.delayed() == {"a": len(names)}
    assert driven.broker.take_damaged()
    disk.heal()
    driven.advance(110)
    run(driven, disk)
    assert sorted(drain(driven)) == sorted(names)
    driven.close()


def test_a_bad_sector_costs_only_its_messages(tmp_path: Path) -> None:
    driven, disk, names = cold(tmp_path)
    path = sorted((tmp_path / "delayed" / "log-0").glob("*.messages"))[0]
    disk.spoil(path, 4_500)
    driven.advance(10_010)
    run(driven, disk)
    found = drain(driven)
    assert disk.struck["unreadable"] > 0
    assert driven.broker.take_damaged()
    assert 0 < len(set(names) - set(found)) <= 4_096 // 150 + 2
    assert [name for name in names if name in found] == found
    disk.bad.clear()
    driven.store.close(clean=False)
