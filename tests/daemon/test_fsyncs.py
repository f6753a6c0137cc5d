"""Syncs for senders: asynchronous or in a thread, with the same result."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from qmq.daemon.fsyncs import Fsyncs
from qmq.errors import QmqError, SyncFailed
from qmq.storage.disk.aio import AioSyncs
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store, StoreOptions

TIMEOUT_S = 60.0


async def outcome(syncing: Fsyncs) -> QmqError | None:
    future: asyncio.Future[QmqError | None] = asyncio.get_running_loop().create_future()
    syncing.sync(0, future.set_result)
    async with asyncio.timeout(TIMEOUT_S):
        return await future


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the syncs that were started asynchronously."""
    found: list[int] = []
    begin = AioSyncs.begin

    def noted(aside: AioSyncs, fd: int, number: int) -> None:
        begin(aside, fd, number)
        found.append(number)

    monkeypatch.setattr(AioSyncs, "begin", noted)
    return found


async def test_the_system_does_it_where_it_is_one_file(tmp_path: Path, begun: list[int]) -> None:
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    syncing = Fsyncs(store, [0])
    assert await outcome(syncing) is None
    held = store.partitions[0].message_log.begin_sync()
    assert held is not None
    waiting = asyncio.ensure_future(outcome(syncing))  # for example a checkpoint's sync is running
    await asyncio.sleep(0)
    assert begun == [0]
    store.partitions[0].message_log.end_sync(None)
    assert await waiting is None
    assert begun == [0], "a thread has waited for the other one, and done it"
    syncing.close(TIMEOUT_S)
    store.close(clean=False)


async def test_the_thread_decides_about_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    syncing = Fsyncs(store, [0])
    finished = AioSyncs.finished

    def failed(aside: AioSyncs) -> list[tuple[int, OSError | None]]:
        return [(number, OSError(errno.EIO, "rotten")) for number, _ in finished(aside)]

    monkeypatch.setattr(AioSyncs, "finished", failed)
    error = await outcome(syncing)
    assert isinstance(error, SyncFailed)
    assert "rotten" in str(error)
    assert isinstance(await outcome(syncing), SyncFailed)
    syncing.close(TIMEOUT_S)
    store.close(clean=False)


async def test_a_thread_does_syncs_that_the_system_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    syncing = Fsyncs(store, [0])

    def refused(aside: AioSyncs, fd: int, number: int) -> None:
        raise OSError(errno.EAGAIN, "not now")

    monkeypatch.setattr(AioSyncs, "begin", refused)
    assert await outcome(syncing) is None
    assert await outcome(syncing) is None
    syncing.close(TIMEOUT_S)
    store.close(clean=False)
