"""Most-once groups on disks that rot, fill up, fail and lose power: no message is ever delivered twice, and what is
missing is counted as skipped.
"""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.effects import PulledMessages, Refused, Subscribed
from qmq.errors import StorageError, StorageFull
from qmq.storage.verify.verify import verify
from tests.broker.delivery.test_at_most_once import joined, joining, skipped, taken
from tests.broker.faulted import FaultedBroker
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.startup.test_rewind import spoil
from tests.broker.test_consuming import filled, killed, many
from tests.broker.test_rotten_records import records
from tests.fake_disk import FakeDisk, Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, check_files

#: Blocks are small, so that there are many.
BLOCK = 2
COUNT = 24
SMALL = {"segment_bytes": 16 << 10, "max_frame_bytes": 8 << 10, "reserve_bytes": 64 << 10}


def given(driven: Driven, subscription: int, max_count: int = 3) -> list[bytes]:
    """Return the messages of the answer to one pull, if there is one."""
    command = driven.pull_command(subscription, max_count=max_count)
    answers = [one for one in driven.do(command) if isinstance(one, PulledMessages | Refused)]
    return [body for one in answers if isinstance(one, PulledMessages) for body in bodies_of(runs_of_answer(one))]


def check_once(driven: Driven, got: list[bytes], sent: list[bytes]) -> None:
    """Go on after a start: no message comes twice, and missing ones are counted."""
    subscription = joined(driven, "a.", max_unacked=BLOCK)
    while bodies := given(driven, subscription, 1_000):
        got += bodies
    twice = [body for body, times in Counter(got).items() if times > 1]
    assert not twice, f"delivered twice: {twice}"
    assert skipped(driven) >= len(set(sent) - set(got))


@pytest.mark.parametrize("behind", [0, 6])
@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("prefix", ["a.", "a.x"])
def test_a_rotten_reserve(tmp_path: Path, copies: tuple[int, ...], prefix: str, behind: int) -> None:
    driven = filled(tmp_path, COUNT)
    subscription = joined(driven, prefix, max_unacked=BLOCK)
    driven.checkpoint()
    got = taken(driven, subscription, 5)
    *_, first, second = records(driven, RecordKind.RESERVE)
    assert bytes(first.payload) == bytes(second.payload)
    if behind:
        got += taken(driven, subscription, behind)
        assert len(records(driven, RecordKind.RESERVE)) >= 4
    driven.store.close(clean=False)
    files = {spoil(tmp_path, (first, second)[copy], 150) for copy in copies}
    killed(driven)
    told = "\n".join(driven.store.recovery.notes)
    if behind or copies == (0,):
        assert all(f"{file} has no good record at bytes " in told for file in files)
    before = len(got)
    check_once(driven, got, many(COUNT))
    # The other copy says where to go on; without any, nothing says which messages were delivered.
    assert (len(got) > before) == (len(copies) == 1)
    driven.send("a.x", b"new")
    assert taken(driven, joined(driven, prefix)) == [b"new"]
    driven.close()


def test_on_a_full_disk_nothing_is_handed_out_unreserved(tmp_path: Path) -> None:
    disk = FakeDisk()
    driven = filled(tmp_path, COUNT)
    driven.store.close(clean=False)
    driven.disk = disk
    killed(driven)
    subscription = joined(driven, "a.", max_unacked=BLOCK)
    got, refused = taken(driven, subscription, 2), 0
    disk.full = True
    disk.use_up_allocated()  # the allocated space is used up too
    for _ in range(6):
        (answer,) = driven.do(driven.pull_command(subscription, max_count=3))
        if isinstance(answer, Refused):
            assert isinstance(answer.error, StorageFull)
            refused += 1
        else:
            assert isinstance(answer, PulledMessages)
            got += bodies_of(runs_of_answer(answer))
    assert refused >= 5
    disk.full = False
    got += taken(driven, subscription, 3)
    killed(driven)
    check_once(driven, got, many(COUNT))
    driven.close()


def lived(driven: Driven, got: list[bytes]) -> None:
    """Run a short life of a group; refused commands are not repeated."""
    said = driven.do(joining(driven, "a.", max_unacked=BLOCK)) or driven.advance(100)
    if not said or isinstance(said[-1], Refused):
        return  # no client knows that there is a group
    assert isinstance(said[-1], Subscribed)
    for step in range(6):
        got += given(driven, said[-1].subscription)
        if step == 2:
            with suppress(StorageError):
                driven.checkpoint()


def started(driven: Driven) -> None:
    driven.store.close(clean=False)
    driven.wanted.clear()
    driven.reads.clear()
    driven.open()


def test_power_is_lost_at_each_operation() -> None:
    disk = SimulatedDisk(7)
    driven = Driven(DIRECTORY, disk=disk, **SMALL)
    for body in many(COUNT):
        driven.send("a.x", body)
    driven.checkpoint()
    crashes, got = list[tuple[SimulatedDisk, Operation, list[bytes]]](), list[bytes]()

    def crash(operation: Operation) -> None:
        crashes.append((disk.clone(len(crashes)), operation, list(got)))

    disk.before = crash
    lived(driven, got)
    disk.before = None
    assert got == many(18)
    struck = Counter[str]()
    for clone, operation, seen in crashes:
        if len(struck) % 2:
            clone.interrupt(operation)
        clone.stop(power=True)
        again = Driven(DIRECTORY, disk=clone, **SMALL)
        again.now = driven.now
        check_once(again, list(seen), many(COUNT))
        again.checkpoint()
        again.store.close(clean=True)
        check_files(clone)
        struck[operation.kind] += 1
    print(f"power was lost at {dict(struck)}; {dict(disk.struck)}")
    assert struck["fdatasync"] >= 5
    assert struck["pwritev"] >= 5


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_each_operation_fails(tmp_path: Path, code: int, lasting: bool) -> None:
    def filled_on(path: Path) -> tuple[FakeDisk, FaultedBroker]:
        disk = FakeDisk("boot-1")
        driven = FaultedBroker(path, disk)
        for body in many(COUNT):
            driven.send("a.x", body)
        return disk, driven

    disk, driven = filled_on(tmp_path / "counting")
    before = disk.count_failing(code)
    lived(driven, [])
    operations = disk.count_failing(code) - before
    assert operations > 20
    struck = Counter[tuple[str, int]]()
    for after in range(operations):
        disk, driven = filled_on(tmp_path / f"{after}")
        disk.strike(code, after, lasting=lasting)
        got = list[bytes]()
        lived(driven, got)
        assert len(set(got)) == len(got)
        disk.heal()
        struck += disk.struck
        started(driven)
        check_once(driven, got, many(COUNT))
        driven.try_checkpoint()
        driven.store.close(clean=True)
        assert verify(tmp_path / f"{after}", disk).is_good
    print(f"struck: {dict(struck)}")
    assert struck.total() >= operations
