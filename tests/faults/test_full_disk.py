"""A disk that is full in earnest: a small tmpfs under a broker process, and clients that send until it is full."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from qmq.errors import StorageFull
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.free_space import PARTS
from qmq.storage.pull_log.log import FILE_BYTES
from qmq.storage.verify.verify import verify
from tests.faults import small_disks
from tests.faults.brokers import until
from tests.faults.ledger import Entry, Ledger, drain
from tests.faults.small_disks import SmallDisk, small_disk

SIZE = 32 << 20
KEPT = SIZE // PARTS
BALLAST = 8 << 20
MESSAGE = 100_000
#: For what is to be refused.
SHORT_S = 1.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small", SIZE) as mounted:
        yield mounted


async def send_one(client: qmq.Client, ledger: Ledger, size: int = MESSAGE) -> Entry:
    """Send a message; its entry says what came of it."""
    entry = ledger.open("orders.created", size)
    try:
        receipt = await client.send(entry.subject, entry.body)
    except qmq.SendFailed as error:
        (failure,) = error.failures
        assert isinstance(failure.error, StorageFull), failure
        entry.state = failure.outcome
    else:
        ledger.acknowledged([entry], [receipt])
    return entry


async def send_until_full(url: str, ledger: Ledger) -> int:
    """Send until a message is refused for want of room; how many were taken."""
    async with qmq.connect(url, send_timeout=SHORT_S) as client:
        for taken in range(2 * SIZE // MESSAGE):
            entry = await send_one(client, ledger)
            if entry.state == "refused":
                return taken
            # A slow machine: the time was up while the last try had no answer yet.
            assert entry.state in ("acknowledged", "unknown")
    raise AssertionError("the disk took more than it has room for")


async def refusal(url: str, durability: qmq.Durability) -> str:
    """What a client is told whose message is refused. A try without an answer when the time is up is none."""
    async with qmq.connect(url, durability=durability, send_timeout=SHORT_S) as client:
        for _ in range(30):
            with pytest.raises(qmq.SendFailed) as caught:
                await client.send("orders.refused", bytes(MESSAGE))
            (failure,) = caught.value.failures
            assert isinstance(failure.error, StorageFull)
            if failure.outcome == "refused":
                return str(failure.error)
    raise AssertionError("no message was refused")


async def test_a_disk_that_fills_up_refuses_sends_until_there_is_room(disk: SmallDisk) -> None:
    disk.fill("ballast", BALLAST)
    broker = disk.broker(checkpoint_ms=100)
    ledger = Ledger()
    try:
        url = await asyncio.to_thread(broker.start)
        taken = await send_until_full(url, ledger)
        assert taken * MESSAGE > SIZE - BALLAST - 2 * KEPT - FILE_BYTES
        assert disk.free() > KEPT * 3 // 4, "sends have left room"
        for durability in ("flush", "append"):
            said = await refusal(url, durability)  # type: ignore[arg-type]
            assert str(disk.path) in said
            assert "keep_free_bytes" in said
            assert "free some space" in said
        ledger.check(await drain(url, "while-full"))
        async with qmq.connect(url) as client:
            (info,) = await client.admin.info()
            assert ("disk_full", "error") in [(problem.code, problem.level) for problem in info.problems]
            assert broker.logs("partition 0 refuses sends: the disk of ")
            assert broker.log().count("partition 0 refuses sends: the disk of ") == 1
            assert "takes sends again" not in broker.log()
            waiting = asyncio.create_task(send_one(client, ledger))
            other = asyncio.create_task(send_one(client, ledger, size=200_000))
            await refusal(url, "flush")
            assert not waiting.done()
            disk.remove("ballast")
            assert {(await waiting).state, (await other).state} == {"acknowledged"}
            (info,) = await client.admin.info()
            assert "disk_full" not in [problem.code for problem in info.problems]
        assert await send_until_full(url, ledger) * MESSAGE > BALLAST - KEPT
        ledger.check(await drain(url, "full-again"))
        assert "no checkpoint could be taken" not in broker.log()
        assert broker.logs("partition 0 takes sends again")
        assert broker.stop() == 0
    finally:
        print(broker.log())
        broker.close()
    report = verify(disk.seen / "data", Disk())
    assert report.is_good, report.findings


async def test_a_disk_without_any_room_serves_reads_and_goes_on_when_there_is_some(disk: SmallDisk) -> None:
    """Others have taken even what sends leave, so no checkpoint can be taken."""
    broker = disk.broker(checkpoint_ms=50)
    ledger = Ledger()
    try:
        url = await asyncio.to_thread(broker.start)
        async with qmq.connect(url) as client:
            for _ in range(20):
                assert (await send_one(client, ledger)).state == "acknowledged"
        disk.fill("others")
        assert disk.free() == 0
        assert "free some space" in await refusal(url, "flush")
        ledger.check(await drain(url, "while-full"))
        await until(lambda: "no checkpoint could be taken" in broker.log(), "the broker tells of it")
        async with qmq.connect(url) as client:
            waiting = asyncio.create_task(send_one(client, ledger))
            await refusal(url, "flush")
            assert not waiting.done()
            disk.remove("others")
            assert (await waiting).state == "acknowledged"
        await until(lambda: "checkpoints can be taken again" in broker.log(), "checkpoints are taken again")
        disk.fill("others")
        broker.kill()
        url = await asyncio.to_thread(broker.start)  # after a kill nothing has to be written
        ledger.check(await drain(url, "killed"))
        await refusal(url, "append")
        disk.remove("others")
        assert broker.stop() == 0
        disk.fill("others")
        url = await asyncio.to_thread(broker.start)
        ledger.check(await drain(url, "stopped"))
        await refusal(url, "append")
        broker.kill()
        disk.remove("others")
        url = await asyncio.to_thread(broker.start)
        ledger.check(await drain(url, "after"))
        assert broker.stop() == 0
    finally:
        print(broker.log())
        broker.close()
    report = verify(disk.seen / "data", Disk())
    assert report.is_good, report.findings


async def test_a_namespace_serves_where_root_may_not_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_disks.os, "geteuid", lambda: 1)
    with small_disk(tmp_path / "small", SIZE) as disk:
        disk.fill("others", SIZE - 2 * KEPT)
        broker = disk.broker()
        try:
            url = await asyncio.to_thread(broker.start)
            assert await send_until_full(url, Ledger()) < 2 * KEPT // MESSAGE
            assert broker.stop() == 0
        finally:
            broker.close()
