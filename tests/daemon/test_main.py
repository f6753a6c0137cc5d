"""Store, broker and server together: on disks that are full, fail or stall, with checkpoints, and when they stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

import qmq
from qmq.broker.ports.commands import Now
from qmq.daemon import main as wiring
from qmq.daemon.main import RunningBroker
from qmq.daemon.threads import CallThread
from qmq.errors import DirectoryInUse, StorageError, StorageFailed, SyncFailed
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.server.accept import CannotListen
from qmq.settings import Settings
from tests.broker_process import running
from tests.fake_disk import FakeDisk
from tests.net.frames import RawClient, batch, frame, on_uvloop, pull, sent_fields

FLUSH, APPEND = frames.FLUSH, 0


def checkpoints(disk: FakeDisk) -> int:
    """Return how many checkpoints were taken."""
    return sum(name.startswith("checkpoint") for name in disk.renamed)


def send(request: int, durability: int, body: bytes = b"x", subject: str = "a.b") -> bytes:
    payload = batch(body, subject=subject, producer=b"p" * 16, sequence=request)
    return frame(FrameKind.SEND, request, payload, flags=durability)


async def subscribe(client: RawClient, group: str = "g", prefix: str = "a.") -> int:
    client.send(frame(FrameKind.SUBSCRIBE, 900, meta={"group": group, "prefixes": [prefix], "consumer": "c"}))
    return int(frames.unpack_meta((await client.read()).meta)["subscription"])


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.001)


# --- work ------------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_what_waits_for_a_checkpoint_gets_one_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, checkpoint_ms=3_600_000) as broker, qmq.connect(broker.url) as client:
        await client.send("a.b", b"1")
        async with client.subscribe("a.", group="g") as consumer, asyncio.timeout(20):
            (message,) = await consumer.pull(1, timeout=10)
            message.ack()
            await consumer.flush()
            assert await client.admin.resend(prefix="a.", group="g") == 1
            (sealed,) = await client.admin.roll()
            assert sealed.end > 0


@pytest.mark.parametrize("durability", [FLUSH, APPEND])
@on_uvloop
async def test_sent_messages_are_stored_and_can_be_pulled(tmp_path: Path, durability: int) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=3_600_000) as broker:
        client = await RawClient.connect(broker.address)
        before = disk.calls["fdatasync"]
        client.send(send(1, durability, b"first"))
        _, _, partition, store_id, sequences = sent_fields(await client.read())
        assert (partition, store_id, sequences) == (0, broker.store.store_id, (0,))
        assert disk.calls["fdatasync"] - before == (durability == FLUSH)
        subscription = await subscribe(client)
        client.send(pull(2, subscription, timeout_ms=10_000))
        assert b"first" in bytes((await client.read()).payload)
        await client.close()


@on_uvloop
async def test_a_waiting_pull_is_answered_by_an_arrival_and_by_its_deadline(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client, other = await RawClient.connect(broker.address), await RawClient.connect(broker.address)
        subscription = await subscribe(client)
        client.send(pull(2, subscription, timeout_ms=20_000))
        other.send(send(1, FLUSH, b"arrival"))
        assert b"arrival" in bytes((await client.read()).payload)
        start = time.monotonic()
        client.send(pull(3, subscription, timeout_ms=30))
        empty = await client.read()
        assert (empty.request, len(empty.payload)) == (3, 0)
        assert time.monotonic() - start >= 0.03
        await client.close()
        await other.close()


@on_uvloop
async def test_a_restart_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.connect(broker.address)
        for request in range(1, 4):
            client.send(send(request, FLUSH * (request % 2)))
            await client.read()
        subscription = await subscribe(client)
        client.send(pull(9, subscription, count=2))
        await client.read()
        await client.close()
    async with running(tmp_path) as broker:
        report = broker.store.recovery
        assert (report.created, report.clean) == (False, True)
        assert [part.replayed_batches for part in report.partitions] == [0]
        client = await RawClient.connect(broker.address)
        client.send(send(3, FLUSH))  # a repeat: the producer is known
        assert sent_fields(await client.read())[4] == (2,)
        client.send(send(4, FLUSH))
        assert sent_fields(await client.read())[4] == (3,)
        subscription = await subscribe(client)
        client.send(pull(9, subscription, count=10))
        assert len(bytes((await client.read()).payload).split(b"QMQ")) == 3  # the group continues at its third message
        await client.close()


@on_uvloop
async def test_several_partitions_sync_each_for_itself(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, partitions=3, checkpoint_ms=3_600_000) as broker:
        client = await RawClient.connect(broker.address)
        used = set()
        for request, subject in enumerate(["a.1", "a.2", "a.3"], 1):
            client.send(send(request, FLUSH, subject=subject))
            used.add(sent_fields(await client.read())[2])
        assert used == {0, 1, 2}
        await client.close()


# --- other settings --------------------------------------------------------------------------------------------------


@on_uvloop
async def test_new_settings_count_at_once(tmp_path: Path) -> None:
    small = {"segment_bytes": "128 KiB", "max_frame_bytes": "64 KiB", "max_message_bytes": "32 KiB"}
    slow = {"checkpoint_ms": 3_600_000, "scrub_bytes_per_s": 0, "scrub_round_ms": 10}
    async with running(tmp_path, **small, **slow) as broker, qmq.connect(broker.url) as client:
        await client.send_many("a.b", [bytes(20_000)] * 40)
        taken = broker.store.checkpoints.taken
        await broker.reload({"checkpoint_ms": 10})
        await until(lambda: broker.store.checkpoints.taken > taken)
        assert broker.counters.scrub_rounds == 0
        await broker.reload({"scrub_bytes_per_s": 1 << 30})
        await until(lambda: broker.counters.scrub_rounds > 2)
        sealed = len(broker.store.partitions[0].message_log.sealed)
        assert sealed >= 4
        await broker.reload({"retention_bytes": 300_000})
        await until(lambda: len(broker.store.partitions[0].message_log.sealed) <= 2)
        await broker.reload({"scrub_bytes_per_s": 0})
        rounds = broker.counters.scrub_rounds
        await broker.reload({"retention_bytes": 0})
        await client.send_many("a.b", [bytes(20_000)] * 40)
        await client.send("a.b", b"last")
        assert len(broker.store.partitions[0].message_log.sealed) >= sealed
        assert broker.counters.scrub_rounds == rounds
        assert (broker.settings.checkpoint_ms, broker.settings.retention_bytes) == (10, 0)


@on_uvloop
async def test_retention_continues_in_a_broker_without_requests(tmp_path: Path) -> None:
    small = {"segment_bytes": "128 KiB", "max_frame_bytes": "64 KiB", "max_message_bytes": "32 KiB"}
    async with running(tmp_path, checkpoint_ms=10, **small) as broker:
        async with qmq.connect(broker.url) as client:
            await client.send_many("a.b", [bytes(20_000)] * 40)
        assert len(broker.store.partitions[0].message_log.sealed) >= 5
    async with running(tmp_path, checkpoint_ms=10, retention_bytes=300_000, **small) as broker:
        await until(lambda: len(broker.store.partitions[0].message_log.sealed) <= 2)


# --- access to files -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def others_may(directory: Path) -> list[str]:
    """Return the paths below a directory that users other than the owner may access."""
    return [str(path) for path in (directory, *directory.rglob("*")) if path.stat().st_mode & 0o77]


def open_to_others(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.usefixtures("no_umask")
@on_uvloop
async def test_other_users_may_not_read_files_of_a_broker(tmp_path: Path) -> None:
    data, disk = tmp_path / "a" / "data", tmp_path / "disk"
    small = {"segment_bytes": "128 KiB", "max_frame_bytes": "64 KiB", "max_message_bytes": "32 KiB"}
    dirs = {"partitions": 2, "partition_dirs": f"{data / 'log-0'},{disk}"}
    async with running(data, checkpoint_ms=10, **small, **dirs) as broker, qmq.connect(broker.url) as client:
        await client.send("a.b", b"later", delay=3_600)
        await client.send_many("a.b", [bytes(20_000)] * 20)
        async with client.subscribe("a.", group="g") as consumer:
            first, second, *_ = await consumer.pull(max_count=10, timeout=10)
            first.ack()
            await second.nack(delay=3_600)
        taken = broker.store.checkpoints.taken
        await client.send("a.b", b"more")
        await until(lambda: broker.store.checkpoints.taken > taken)
    kinds = {path.suffix or path.name.split("-")[0] for path in data.rglob("*") if path.is_file()}
    assert kinds >= {"lock", "store", "checkpoint", "subjects", ".messages", ".index", ".entries", ".pulls"}
    assert others_may(data) == others_may(disk) == []
    assert str(data.parent) in others_may(data.parent), "as the umask says: it is not QMQ's"


@pytest.mark.usefixtures("no_umask")
@on_uvloop
async def test_a_directory_that_others_may_read_stays_so_and_works(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, qmq.connect(broker.url) as client:
        await client.send("a.b", b"before")
    open_to_others(tmp_path)
    async with running(tmp_path) as broker, qmq.connect(broker.url) as client:
        await client.send("a.b", b"after")
        async with client.subscribe("a.", group="g") as consumer:
            assert [message.body for message in await consumer.pull(max_count=2, timeout=10)] == [b"before", b"after"]
    assert str(tmp_path) in others_may(tmp_path)


# --- disks that fail -------------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_full_disk_refuses_sends_serves_reads_and_takes_sends_again(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=3_600_000) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, FLUSH, b"before"))
        await client.read()
        disk.full = True
        client.send(send(2, APPEND, b"refused"), send(3, FLUSH, b"refused too"))
        assert {await client.error(), await client.error()} == {(2, "storage_full"), (3, "storage_full")}
        subscription = await subscribe(client)
        client.send(pull(8, subscription))
        assert b"before" in bytes((await client.read()).payload)
        disk.full = False
        client.send(send(2, FLUSH, b"after"))
        assert sent_fields(await client.read())[4] == (1,)
        await client.close()


@on_uvloop
async def test_after_a_failed_sync_nothing_more_is_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=3_600_000) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, FLUSH, b"before"))
        await client.read()
        disk.fail_always("fdatasync", errno.EIO)
        client.send(send(2, FLUSH))
        assert await client.error() == (2, "sync_failed")
        disk.heal()
        client.send(send(3, FLUSH), send(4, APPEND))
        assert [await client.error(), await client.error()] == [(3, "sync_failed"), (4, "sync_failed")]
        subscription = await subscribe(client)
        client.send(pull(8, subscription))
        assert b"before" in bytes((await client.read()).payload)
        assert "takes nothing more until a restart" in caplog.text
        await client.close()
    async with running(tmp_path) as broker:
        client = await RawClient.connect(broker.address)
        assert not broker.store.recovery.clean
        client.send(send(5, FLUSH))
        sent_fields(await client.read())
        await client.close()


@asynccontextmanager
async def stopping_as(
    stopped: AbstractContextManager[object], path: Path, **settings: Any
) -> AsyncIterator[RunningBroker]:
    """Run a broker as ``running`` does, with *stopped* around its stop."""
    broker = RunningBroker(Settings.model_validate({"data_dir": path, "listen": "127.0.0.1:0", **settings}))
    await broker.start()
    try:
        yield broker
    except BaseException:
        with suppress(StorageError):
            await broker.stop()
        raise
    with stopped:
        await broker.stop()


def _remove(path: Path) -> None:
    shutil.rmtree(path)


def _move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _replace(path: Path) -> None:
    _move(path)
    path.mkdir()


def _replace_by_copy(path: Path) -> None:
    _move(path)
    shutil.copytree(path.with_name("elsewhere"), path, ignore=shutil.ignore_patterns("ping"))


@pytest.mark.parametrize("lose", [_remove, _move, _replace, _replace_by_copy])
@pytest.mark.parametrize("lost", ["data", "data/log-0"])
@on_uvloop
async def test_nothing_is_acknowledged_once_a_checkpoint_finds_a_directory_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str, lose: Callable[[Path], None]
) -> None:
    stopped = pytest.raises(SyncFailed, match=f"{tmp_path / lost} was removed") if lost == "data" else nullcontext()
    async with stopping_as(stopped, tmp_path / "data", checkpoint_ms=10, keep_free_bytes=0) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, FLUSH, b"before"))
        await client.read()
        await until(
            lambda: broker.store.partitions[0].claimed == broker.store.partitions[0].message_log.end
        )  # by a checkpoint: none runs now
        lose(tmp_path / lost)
        client.send(send(2, FLUSH, b"lost"))  # a change, so that a checkpoint is taken
        await client.read()
        await until(lambda: bool(broker._broken))
        client.send(send(3, FLUSH), send(4, APPEND))
        assert [await client.error(), await client.error()] == [(3, "sync_failed"), (4, "sync_failed")]
        if lost != "data":
            subscription = await subscribe(client)
            client.send(pull(8, subscription))
            assert b"before" in bytes((await client.read()).payload)
        failed = broker.counters.failed_checkpoints
        await until(lambda: broker.counters.failed_checkpoints > failed + 2 or lost != "data")
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert sum("takes nothing more until a restart" in error for error in errors) == 1
        assert sum("no checkpoint could be taken" in error for error in errors) == 1
        assert all(f"{tmp_path / lost}" in error and "was removed, moved or replaced" in error for error in errors)
        await client.close()
    assert not (tmp_path / lost).exists() or lose is _replace_by_copy or not list((tmp_path / lost).iterdir())


@on_uvloop
async def test_sends_are_refused_while_free_space_is_unknown(tmp_path: Path) -> None:
    async with running(tmp_path / "data", checkpoint_ms=10) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, FLUSH, b"before"))
        await client.read()
        await until(lambda: broker.store.partitions[0].claimed == broker.store.partitions[0].message_log.end)
        _move(tmp_path / "data")
        client.send(send(2, FLUSH))
        assert await client.error() == (2, "storage_failed")
        (tmp_path / "elsewhere").rename(tmp_path / "data")
        client.send(send(2, FLUSH))
        assert (await client.read()).kind == FrameKind.SENT
        await client.close()


@on_uvloop
async def test_partitions_whose_directories_are_there_go_on(tmp_path: Path) -> None:
    async with running(tmp_path / "data", partitions=2, checkpoint_ms=10) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, FLUSH))
        partition = sent_fields(await client.read())[2]
        (segment,) = (tmp_path / "data" / f"log-{partition}").glob("*.messages")
        segment.unlink()
        client.send(send(2, FLUSH))
        await client.read()
        await until(lambda: partition in broker._broken)
        client.send(send(3, FLUSH, b"after"))
        assert sent_fields(await client.read())[2] == 1 - partition
        taken = broker.store.checkpoints.taken
        await until(lambda: broker.store.checkpoints.taken > taken)
        await client.close()


@on_uvloop
async def test_a_delay_log_that_goes_stops_delayed_messages_only(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "data", checkpoint_ms=10) as broker,
        qmq.connect(broker.url, send_timeout=10) as client,
    ):
        await client.send("a.b", b"later", delay=3_600)
        shutil.rmtree(tmp_path / "data" / "delayed")
        with suppress(qmq.SendUnknown):  # a checkpoint that ran may have seen it already
            await client.send("a.b", b"lost", delay=3_600)
        await until(lambda: bool(broker._broken))
        with pytest.raises(qmq.SendUnknown, match="delayed was removed"):
            await client.send("a.b", b"refused", delay=3_600)
        await client.send("a.b", b"now")
        taken = broker.store.checkpoints.taken
        await client.send("a.b", b"again")
        await until(lambda: broker.store.checkpoints.taken > taken)


@on_uvloop
async def test_a_sync_that_could_not_begin_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk("boot-1")
    small = {"segment_bytes": "128 KiB", "max_frame_bytes": "64 KiB", "max_message_bytes": "32 KiB"}
    async with running(tmp_path, disk, checkpoint_ms=3_600_000, **small) as broker:
        client = await RawClient.connect(broker.address)
        disk.fail_always("fsync_directory", errno.EMFILE)
        for request in range(1, 6):
            client.send(send(request, APPEND, bytes(30_000)))
            await client.read()
        client.send(send(6, FLUSH))
        tries = disk.calls["fsync_directory"]
        await until(lambda: disk.calls["fsync_directory"] > tries + 2)
        assert caplog.text.count("cannot be synced now") == 1
        assert broker.broker.waiting_for_sync() == 1
        disk.heal()
        assert (await client.read()).kind == FrameKind.SENT
        await client.close()


@on_uvloop
async def test_a_sync_that_fails_in_a_checkpoint_moves_the_subject_to_another_partition(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    async with running(tmp_path, disk, partitions=2, checkpoint_ms=10) as broker:
        client = await RawClient.connect(broker.address)
        disk.fail("fdatasync")
        client.send(send(1, APPEND, b"first"))
        partition = sent_fields(await client.read())[2]
        await until(lambda: partition in broker._broken)
        client.send(send(2, FLUSH, b"second"))
        assert sent_fields(await client.read())[2] == 1 - partition
        subscription = await subscribe(client)
        client.send(pull(8, subscription, timeout_ms=10_000))
        answer = bytes((await client.read()).payload)
        assert answer.index(b"first") < answer.index(b"second")
        await client.close()


@on_uvloop
async def test_a_disk_that_stalls_delays_only_requests_that_wait_for_it(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=3_600_000) as broker:
        client, other = await RawClient.connect(broker.address), await RawClient.connect(broker.address)
        client.send(send(1, APPEND, b"seen"))
        await client.read()
        subscription = await subscribe(other)
        disk.stall("fdatasync")
        client.send(send(2, FLUSH, b"waits"))
        other.send(pull(3, subscription))
        assert b"seen" in bytes((await other.read()).payload)
        other.send(frame(FrameKind.SEND, 4, batch(b"y", producer=b"q" * 16)))
        assert (await other.read()).kind == FrameKind.SENT
        other.send(pull(5, subscription))
        assert len((await other.read()).payload) == 0  # no message passes before it is on disk
        disk.go_on()
        assert (await client.read()).kind == FrameKind.SENT
        other.send(pull(6, subscription, timeout_ms=10_000, least=2))
        assert b"waits" in bytes((await other.read()).payload)
        await client.close()
        await other.close()


@on_uvloop
async def test_other_partitions_take_all_that_comes_while_one_stalls(tmp_path: Path) -> None:
    disk = FakeDisk()
    bounds = {"partitions": 2, "checkpoint_bytes": "256 KiB", "max_unsynced_bytes": "1 MiB"}
    async with running(tmp_path, disk, **bounds) as broker:
        client, other = await RawClient.connect(broker.address), await RawClient.connect(broker.address)
        disk.stall("fdatasync", "log-0")
        for request in range(1, 51):  # 10 MiB, ten times the limit of unsynced bytes
            client.send(send(request, APPEND, request.to_bytes() * 200_000, "a.0" if request % 2 else "a.1"))
            assert (await client.read()).kind == FrameKind.SENT
        assert disk.stalled
        assert broker.store.partitions[0].message_log.end - broker.store.partitions[0].message_log.synced < 1 << 20
        other.send(frame(FrameKind.SEND, 1, batch(b"y", subject="b.1", producer=b"q" * 16), flags=FLUSH))
        assert sent_fields(await other.read())[2] == 1
        disk.go_on()
        subscription = await subscribe(other)
        found = b""
        while len(found) < 50 * 200_000:
            other.send(pull(2, subscription, timeout_ms=10_000))
            found += bytes((await other.read()).payload)
        places = {n: found.index(n.to_bytes() * 200_000) for n in range(1, 51)}
        for subject in (0, 1):
            mine = [places[n] for n in range(1, 51) if n % 2 == subject]
            assert mine == sorted(mine)
        await client.close()
        await other.close()


@on_uvloop
async def test_a_send_that_waits_for_a_stalled_disk_ends_as_unknown(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=3_600_000) as broker:
        disk.stall("fdatasync", "log-0")
        try:
            async with qmq.connect(broker.url, send_timeout=0.5) as client:
                await client.send("a.b", b"seen", durability="append")
                with pytest.raises(qmq.SendUnknown):
                    await client.send("a.b", b"waits")
                async with client.subscribe("a.", group="g") as consumer:
                    assert [message.body for message in await consumer.pull(timeout=20)] == [b"seen"]
                    disk.go_on()
                    assert [message.body for message in await consumer.pull(timeout=20)] == [b"waits"]
        finally:
            disk.go_on()


# --- checkpoints -----------------------------------------------------------------------------------------------------


@on_uvloop
async def test_checkpoints_come_while_something_changes_and_not_else(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=10) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, APPEND))
        await client.read()
        await until(lambda: checkpoints(disk) == 1)
        await until(lambda: broker.store.partitions[0].message_log.synced == broker.store.partitions[0].message_log.end)
        # An idle broker writes nothing: connections, empty pulls and time change no saved state.
        subscription = await subscribe(client, prefix="b.")
        await until(lambda: checkpoints(disk) == 2)
        for request in range(10, 16):
            client.send(pull(request, subscription, timeout_ms=10))
            await client.read()
        assert checkpoints(disk) == 2
        client.send(send(2, APPEND))  # while a sync is awaited, a checkpoint may see the bytes and miss the answer
        await client.read()
        await until(lambda: checkpoints(disk) == 3)
        await client.close()
    assert checkpoints(disk) == 4


@on_uvloop
async def test_many_bytes_bring_a_checkpoint_before_its_time(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with running(tmp_path, disk, checkpoint_ms=3_600_000, checkpoint_bytes=65_536) as broker:
        client = await RawClient.connect(broker.address)
        client.send(send(1, APPEND, bytes(60_000)))
        await client.read()
        assert checkpoints(disk) == 0
        client.send(send(2, APPEND, bytes(60_000)))
        await client.read()
        await until(lambda: checkpoints(disk) == 1)
        await client.close()


@on_uvloop
async def test_sends_wait_while_too_much_is_not_on_disk(tmp_path: Path) -> None:
    disk = FakeDisk()
    settings = {"checkpoint_ms": 3_600_000, "checkpoint_bytes": 1 << 20, "max_unsynced_bytes": 2 << 20}
    async with running(tmp_path, disk, **settings) as broker:
        client, other = await RawClient.connect(broker.address), await RawClient.connect(broker.address)
        disk.stall("fdatasync")
        for request in range(1, 40):
            client.send(send(request, APPEND, bytes(300_000)))
        await until(lambda: broker.server._sends_held)
        held_at = broker.store.partitions[0].message_log.end
        for request in range(1, 20):
            other.send(frame(FrameKind.SUBJECTS, request))
            assert (await other.read()).kind == FrameKind.SUBJECT_LIST
        assert broker.store.partitions[0].message_log.end == held_at
        disk.go_on()
        for request in range(1, 40):
            assert (await client.read()).request == request
        await client.close()
        await other.close()


@on_uvloop
async def test_a_checkpoint_that_fails_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    caplog.set_level(logging.INFO)
    async with running(tmp_path, disk, checkpoint_ms=10, max_unsynced_bytes=1 << 20) as broker:
        client = await RawClient.connect(broker.address)
        disk.fail_always("rename")
        client.send(send(1, APPEND))
        await client.read()
        await until(lambda: "no checkpoint could be taken" in caplog.text)
        for request in range(2, 12):  # far over max_unsynced_bytes, but waiting would not help
            client.send(send(request, APPEND, bytes(300_000)))
            await client.read()
        tries = disk.calls["rename"]
        await until(lambda: disk.calls["rename"] > tries + 2)
        assert caplog.text.count("no checkpoint could be taken") == 1
        disk.heal()
        await until(lambda: "checkpoints can be taken again" in caplog.text)
        await client.close()


@on_uvloop
async def test_a_checkpoint_that_fails_unexpectedly_is_tried_again_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    async with running(tmp_path, checkpoint_ms=10) as broker:
        client = await RawClient.connect(broker.address)
        failed = 0

        def fail(now: Now) -> NoReturn:
            nonlocal failed
            failed += 1
            raise OverflowError("an integer")

        with monkeypatch.context() as patch:
            patch.setattr(broker.broker, "checkpoint_state", fail)
            client.send(send(1, APPEND))
            await client.read()
            await until(lambda: failed > 2)
        await until(lambda: "checkpoints can be taken again" in caplog.text)
        assert caplog.text.count("OverflowError: an integer") == 1
        assert broker.counters.failed_checkpoints == failed
        await client.close()


# --- the end ---------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_stop_answers_open_requests_and_ends_connections_with_an_error(tmp_path: Path) -> None:
    disk = FakeDisk()
    broker = RunningBroker(Settings(data_dir=tmp_path, listen="127.0.0.1:0"), disk)
    await broker.start()
    sender, waiting_pulls = await RawClient.connect(broker.address), await RawClient.connect(broker.address)
    subscription = await subscribe(waiting_pulls, prefix="other.")
    waiting_pulls.send(pull(5, subscription, timeout_ms=60_000))
    disk.stall("fdatasync")
    sender.send(send(1, FLUSH))
    await until(lambda: broker.broker.waiting_for_sync() == 1 and broker.broker.waiting_pulls() == 1)
    stopping = asyncio.create_task(broker.stop())
    assert await waiting_pulls.error() == (5, "broker_stopping")
    disk.go_on()
    assert sent_fields(await sender.read())[4] == (0,)
    for client in (sender, waiting_pulls):
        assert await client.error() == (0, "broker_stopping")
        assert await client.ended()
        await client.close()
    await stopping
    async with running(tmp_path) as again:
        assert again.store.recovery.clean


@on_uvloop
async def test_a_stop_does_not_wait_for_a_disk_that_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "_TIMEOUT_S", 0.3)
    disk = FakeDisk()
    broker = RunningBroker(Settings(data_dir=tmp_path, listen="127.0.0.1:0"), disk)
    await broker.start()
    client = await RawClient.connect(broker.address)
    disk.stall("fdatasync")
    client.send(send(1, FLUSH, b"kept"))
    await until(lambda: broker.broker.waiting_for_sync() == 1)
    with pytest.raises(StorageError, match="did not answer"):
        await broker.stop()
    with pytest.raises(DirectoryInUse):  # its threads may still write, so no other broker may
        RunningBroker(Settings(data_dir=tmp_path, listen="127.0.0.1:0"))
    disk.go_on()
    await until(lambda: "qmq-close" not in {thread.name for thread in threading.enumerate()})
    monkeypatch.undo()  # a loaded machine needs longer for a clean stop
    assert await client.error() == (0, "broker_stopping")
    await client.close()
    async with running(tmp_path) as again:
        assert not again.store.recovery.clean
        client = await RawClient.connect(again.address)
        subscription = await subscribe(client)
        client.send(pull(2, subscription))
        assert b"kept" in bytes((await client.read()).payload)
        await client.close()


@on_uvloop
async def test_one_broker_a_directory(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()} "):
            RunningBroker(Settings(data_dir=tmp_path, listen="127.0.0.1:0"))
    async with running(tmp_path):
        pass


# --- addresses -------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_port_in_use_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            CannotListen, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; stop the process"
        ):
            RunningBroker(Settings(data_dir=tmp_path / "data", listen=f"127.0.0.1:{port}"))
    assert not (tmp_path / "data").exists()


@on_uvloop
@pytest.mark.parametrize(
    ("listen", "hosts"), [("[::]:0", ["[::1]", "127.0.0.1"]), ("127.0.0.2:0, 127.0.0.1:0", ["127.0.0.2", "127.0.0.1"])]
)
async def test_it_serves_on_several_addresses(tmp_path: Path, listen: str, hosts: list[str]) -> None:
    async with running(tmp_path / "data", listen=listen, insecure=True) as broker:
        ports = [address[1] for address in broker.addresses]
        for host, port in zip(hosts, ports * (len(hosts) // len(ports)), strict=True):
            async with qmq.connect(broker.url.partition("://")[0] + f"://{host}:{port}") as client:
                await client.send("a", b"1")
        assert broker.shown_urls.count("://") == len(ports)


async def test_the_first_broker_to_listen_wins_and_the_other_closes_clean(tmp_path: Path) -> None:
    """Two brokers may both bind a port before either listens: the system refuses the second one only then."""
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        broker = RunningBroker(Settings(data_dir=tmp_path, listen=f"127.0.0.1:{first.getsockname()[1]}"))
        first.listen()
        with pytest.raises(CannotListen, match="Address already in use"):
            await broker.start()
    async with running(tmp_path) as again:
        assert again.store.recovery.clean


async def test_two_new_directories_have_two_store_ids_whatever_their_address_is(tmp_path: Path) -> None:
    async with running(tmp_path / "first") as first:
        port = first.address[1]
    async with running(tmp_path / "second", listen=f"127.0.0.1:{port}") as second:
        assert second.store.store_id != first.store.store_id


# --- threads ---------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_thread_makes_calls_in_order_and_returns_their_errors() -> None:
    worker = CallThread("qmq-test")
    order: list[int] = []
    await asyncio.gather(*(worker.run(lambda number=number: order.append(number)) for number in range(50)))
    assert order == list(range(50))

    def fail() -> None:
        raise StorageFailed("no disk")

    with pytest.raises(StorageFailed, match="no disk"):
        await worker.run(fail)
    await worker.run(lambda: order.append(50))
    worker.stop(10)
    assert order[-1] == 50


@on_uvloop
async def test_an_unexpected_failure_is_a_storage_error_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = CallThread("qmq-test")

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(StorageError, match="a bug"):
        await worker.run(fail)
    assert "ZeroDivisionError: a bug" in caplog.text
    worker.stop(10)
