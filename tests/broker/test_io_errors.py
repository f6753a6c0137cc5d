"""An I/O error at every operation of a broker's life: nothing acknowledged is lost, nothing is acknowledged wrongly.

Once, and from some operation on until the disk is well again. The normal run takes a sample of the operations, with a
seed that it prints; QMQ_IO_ERRORS=all takes every one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from qmq.broker.ports.effects import PulledMessages, Refused, Sent
from qmq.errors import StorageError, StorageFailed, StorageFull, SyncFailed
from tests.broker.faulted import GROUPS, World
from tests.fake_disk import FAILING, FakeDisk
from tests.faults.ledger import fresh_seed

#: By fault: how many operations it strikes in the normal run, once and for good.
SAMPLES = {
    errno.EIO: 12,
    errno.ENOSPC: 8,
    errno.EDQUOT: 8,
    errno.EROFS: 8,
    errno.EMFILE: 6,
    errno.ENFILE: 6,
}
#: Faults with which reads may fail too.
READ_ERRORS = (errno.EIO, errno.EMFILE, errno.ENFILE)
#: Faults with which a failed write has written a part.
TORN = (errno.EIO, errno.EDQUOT)
#: How many batches are sent again after the restart; the broker still knows them as repeats.
LATELY = 24


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return the directory of a killed broker: sealed segments, a checkpoint, a tail behind it, groups on the way."""
    world = World(tmp_path_factory.mktemp("killed"), FakeDisk("boot-1"))
    world.open()
    for number in range(10):
        one_round(world, number)
    world.driven.try_checkpoint()
    for number in range(3):
        one_round(world, number)
    world.driven.store.close(clean=False)
    assert not world.waiting()
    return world


def one_round(world: World, number: int) -> None:
    """Write a few batches in one turn, and pull a few times."""
    world.pull("one", timeout_ms=1_000)
    world.send("a", flush=True)
    world.send("b", flush=False)
    world.send("a", f"c.{number}", flush=number % 2 == 0)
    world.send("b", "a", flush=False, size=1_500)
    world.offer()
    world.pull("all", max_count=4)


def life(world: World) -> bool:
    """Run from start to stop while something fails, and return whether the stop was clean."""
    world.open()
    for number in range(6):
        one_round(world, number)
        if number in (1, 4):
            world.driven.try_checkpoint()
        check_reads(world)
    if world.disk.is_failing_for_good():
        world.disk.heal()
    for _ in range(3):
        world.offer()
    assert world.driven.is_broken() or not world.waiting(), "sends are taken again once the disk is well"
    assert world.driven.broker.take_damaged() == []
    world.leave()
    return world.close()


def check_reads(world: World) -> None:
    """Check that a pull brings all messages whatever reads and syncs do, unless it cannot be recorded."""
    answer = world.pull("one")
    if isinstance(answer, Refused):
        if isinstance(answer.error, SyncFailed):  # a sync of the pull log
            return
        assert answer.error.retryable
        assert world.disk.code in READ_ERRORS, answer.error
    else:
        assert isinstance(answer, PulledMessages) or world.disk.struck.total() or world.disk.code in READ_ERRORS


def check_after(world: World, clean: bool) -> None:
    """Check that every acknowledged message is there once, in order, at its receipt's place, and no refused one."""
    world.verified()
    world.disk = FakeDisk("boot-1")
    world.open()
    found = world.drain("audit")
    assert len(found) == len(set(found))
    told = Counter(body for batch in world.batches for bodies in batch.contents.values() for body in bodies)
    assert set(found) <= set(told)
    for batch in world.batches:
        there = [body for bodies in batch.contents.values() for body in bodies if body in set(found)]
        assert batch.state in ("unknown", "left") or bool(there) == (batch.state == "acknowledged"), batch
    for subject in {subject for batch in world.batches for subject in batch.contents}:
        mine = [body for batch in world.batches for body in batch.contents.get(subject, ())]
        order = [mine.index(body) for body in found if body in mine]
        assert order == sorted(order), f"{subject} is out of order"
    for group, prefix in GROUPS.items():
        got = world.drain(group)
        wanted = [
            body for body in found if not prefix or any(body in b.contents.get(prefix, ()) for b in world.batches)
        ]
        left = {body for batch in world.batches if batch.state == "left" for body in batch.contents.get(prefix, ())}
        assert set(wanted) - left <= set(got) <= set(wanted), f"group {group} has missed something"
        may_repeat = world.fell_back or not clean
        assert may_repeat or len(got) == len(set(got)), f"group {group} got something twice"
    check_repeats(world)
    assert world.close()
    world.verified()


def check_repeats(world: World) -> None:
    """Send all again; in the end there must be one of each message."""
    for batch in world.batches[-LATELY:]:
        again = world.repeat(batch)
        assert isinstance(again, Sent), again
        if batch.state == "acknowledged":
            assert batch.sent is not None
            assert str(again._replace(request=0)) == str(batch.sent._replace(request=0))
    found = world.drain("audit")
    assert len(found) == len(set(found))
    assert {body for batch in world.batches[-LATELY:] for bodies in batch.contents.values() for body in bodies} <= set(
        found
    )


def check_errors(world: World, code: int) -> None:
    """Check that each error is of the right kind, and says what happened, to what, and what to do."""
    full = code in (errno.ENOSPC, errno.EDQUOT)
    for error in world.errors:
        assert isinstance(error, StorageError)
        assert isinstance(error, SyncFailed | (StorageFull if full else StorageFailed)), error
        assert code not in (errno.EMFILE, errno.ENFILE) or not isinstance(error, SyncFailed), "no sync has failed"
        assert error.retryable == (not isinstance(error, SyncFailed))
        assert os.strerror(code) in str(error), error
        assert str(world.directory) in str(error), error
        assert ";" in str(error), error


def run(killed: World, directory: Path, code: int, after: int, lasting: bool) -> Counter[tuple[str, int]]:
    """Run one life on a copy of the directory with one fault; return how often which operation failed."""
    world = killed.copied(directory)
    world.disk.strike(code, after, lasting=lasting)
    world.disk.tears = code in TORN
    clean = life(world)
    struck = world.disk.struck
    struck["torn", code] = world.disk.calls["torn"]
    check_errors(world, code)
    check_after(world, clean)
    shutil.rmtree(directory)
    return struck


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize(
    "code",
    # Covered lines are counted with the two commonest faults only, which is quicker.
    [code if code in (errno.EIO, errno.ENOSPC) else pytest.param(code, marks=pytest.mark.no_cover) for code in SAMPLES],
    ids=lambda code: errno.errorcode[code],
)
def test_a_life_with_an_error(killed: World, tmp_path: Path, code: int, lasting: bool) -> None:
    counting = killed.copied(tmp_path / "counting")
    assert life(counting)
    operations = counting.disk.count_failing(code)
    check_after(counting, clean=True)
    step = 1.0 if os.environ.get("QMQ_IO_ERRORS") == "all" else operations / SAMPLES[code]
    start = random.Random(fresh_seed()).random() * step
    places = [int(start + number * step) for number in range(int(operations / step))]
    struck: Counter[tuple[str, int]] = Counter()
    for after in places:
        try:
            struck += run(killed, tmp_path / str(after), code, after, lasting)
        except BaseException:
            print(f"it struck at operation {after} of {operations}")
            raise
    print(f"{errno.errorcode[code]} struck {dict(struck)}; {len(places)} of {operations} operations")
    assert struck.total() >= len(places)
    assert struck["torn", code] or not (lasting and code in TORN)
    assert {kind for kind, _ in struck} <= FAILING[code] | {"torn"}


@pytest.mark.parametrize("size", [1, 7, 500])
def test_writes_that_come_short_are_no_errors(killed: World, tmp_path: Path, size: int) -> None:
    world = killed.copied(tmp_path / "copy")
    world.disk.short = size
    clean = life(world)
    print(f"{world.disk.calls['short']} writes came short")
    assert world.disk.calls["short"] > 50
    assert clean
    assert world.errors == []
    check_after(world, clean)
