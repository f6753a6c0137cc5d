"""Key indexes of a running broker: made soon after segments are sealed, also of those sealed before, whatever fails."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import qmq
from qmq.broker.ports.commands import Now
from qmq.daemon.key_indexer import KeyIndexer
from qmq.daemon.threads import CallThread
from qmq.storage.store import Store
from tests.broker_process import running
from tests.fake_disk import FakeDisk
from tests.storage.key_index.keyed import find, send_keyed
from tests.storage.stores import Sender, checkpoint, close_cleanly, open_store, verified

TIMEOUT_S: Final = 30
SMALL: Final[dict[str, Any]] = {"segment_bytes": 128 << 10, "max_frame_bytes": 64 << 10, "max_message_bytes": 32 << 10}


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.02)


def missing(directory: Path) -> set[str]:
    """Return the sealed segments without a key index."""
    segments = sorted(path.stem for path in directory.glob("*.messages"))
    return set(segments[:-1]) - {path.stem for path in directory.glob("*.keys")}


async def test_each_segment_gets_an_index_while_the_broker_runs_and_after_a_start(tmp_path: Path) -> None:
    log = tmp_path / "log-0"
    async with running(tmp_path, **SMALL) as broker, qmq.connect(broker.url, durability="append") as client:
        for number in range(60):
            await client.send("shop.order", bytes(8_000), key=f"order-{number}")
        await until(lambda: len(list(log.glob("*.messages"))) > 3 and not missing(log))
        assert [message.key async for message in client.find("shop.", key="order-7")] == ["order-7"]
    lost = sorted(log.glob("*.keys"))[:2]
    good = {path: path.read_bytes() for path in lost}
    lost[0].unlink()
    lost[1].write_bytes(good[lost[1]][:100])
    async with running(tmp_path, **SMALL) as broker:
        await until(lambda: all(path.exists() and path.read_bytes() == good[path] for path in lost))
        async with qmq.connect(broker.url) as client:
            assert [message.key async for message in client.find("shop.", key="order-7")] == ["order-7"]
    verified(tmp_path)


async def test_the_scrub_has_a_rotten_index_made_again(tmp_path: Path) -> None:
    log = tmp_path / "log-0"
    async with running(tmp_path, **SMALL, scrub_bytes_per_s=1 << 30, scrub_round_ms=10) as broker:
        async with qmq.connect(broker.url, durability="append") as client:
            for number in range(40):
                await client.send("shop.order", bytes(8_000), key=f"order-{number}")
        await until(lambda: len(list(log.glob("*.messages"))) > 2 and not missing(log))
        path = min(log.glob("*.keys"))
        good = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(len(good) - 2_000)
            file.write(b"rotten")
        await until(lambda: path.read_bytes() == good)
    verified(tmp_path)


async def test_messages_that_wait_in_the_delay_log_are_in_indexes_too(tmp_path: Path) -> None:
    log = tmp_path / "delayed" / "log-0"
    async with running(tmp_path, **SMALL) as broker:
        async with qmq.connect(broker.url, durability="append") as client:
            for number in range(40):
                await client.send("shop.order", bytes(8_000), key=f"order-{number}", delay="1h")
        await until(lambda: len(list(log.glob("*.messages"))) > 2 and not missing(log))
        part = broker.store.partition(0x8000)
        for number in range(40):
            assert len(find(part, f"order-{number}")) == 1
    verified(tmp_path)


class Given:
    """An indexer on a store, and a clock that the test moves."""

    def __init__(self, store: Store) -> None:
        self.now_us = 1_000_000
        self.thread = CallThread("keys")
        self.indexer = KeyIndexer(store, self.thread, lambda: Now(self.now_us, self.now_us))

    async def close(self) -> None:
        await self.indexer.close()
        self.thread.stop(TIMEOUT_S)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_disk_that_takes_no_index_is_logged_once_and_tried_again(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk))
    store, part = sender.store, sender.store.partitions[0]
    sent = [send_keyed(sender, f"order-{number}", body=bytes(4_000)) for number in range(40)]
    checkpoint(store)
    disk.fail_always("open", code, ".keys.tmp")
    given = Given(store)
    with caplog.at_level(logging.WARNING, "qmq.broker"):
        await until(lambda: bool(caplog.records))
        assert [find(part, f"order-{number}") for number in range(40)] == [[one.position] for one in sent]
        sent.append(send_keyed(sender, "order-40"))  # sends go on
        checkpoint(store)
        disk.heal()
        assert not part.key_index.indexed
        await until(lambda: _moves(given) and len(part.key_index.indexed) == len(part.message_log.sealed))
    (record,) = caplog.records
    assert "could not be made, it is tried again" in record.getMessage()
    assert [find(part, f"order-{number}") for number in range(41)] == [[one.position] for one in sent]
    await given.close()
    close_cleanly(store)
    verified(tmp_path)


def _moves(given: Given) -> bool:
    given.now_us += 1_000_000
    return True


async def test_a_segment_that_is_removed_while_its_index_is_made_leaves_no_file(tmp_path: Path) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk))
    store, part = sender.store, sender.store.partitions[0]
    for number in range(40):
        send_keyed(sender, f"order-{number}", body=bytes(4_000))
    checkpoint(store)
    last = part.message_log.sealed[-1]
    entered = disk.stall("rename", f"{last.base:016x}.keys")
    given = Given(store)
    await until(entered.is_set)
    part.remove_segment(last.base)
    for _ in range(3):
        checkpoint(store)
    disk.go_on()
    await until(lambda: len(part.key_index.indexed) == len(part.message_log.sealed))
    await given.close()
    assert not list((tmp_path / "log-0").glob(f"{last.base:016x}.*"))
    close_cleanly(store)
    verified(tmp_path)
