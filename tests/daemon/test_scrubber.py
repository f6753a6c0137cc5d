"""The scrub of a running broker: finds damage that no pull has read, and reports it once."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import Any, Final

import pytest

import qmq
from qmq.broker.damage import LogRate
from qmq.daemon.main import RunningBroker
from qmq.format.layout import RETRY_SIZE, SCHEDULE_HEADER_SIZE
from tests.broker_process import running
from tests.fake_disk import FakeDisk
from tests.storage.stores import segment_files

TIMEOUT_S: Final = 20
SMALL: Final[dict[str, Any]] = {
    "segment_bytes": 128 << 10,
    "max_frame_bytes": 64 << 10,
    "max_message_bytes": 32 << 10,
    "scrub_bytes_per_s": 1 << 30,
    "scrub_round_ms": 10,
}


async def fill(url: str, count: int = 400) -> list[bytes]:
    """Send batches of one message of 1 KiB each."""
    bodies = [b"%04d" % number + b"." * 1_020 for number in range(count)]
    async with qmq.connect(url, durability="append") as client:
        for body in bodies:
            await client.send("a.b", body)
    return bodies


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


async def rounds(broker: RunningBroker, count: int = 2) -> None:
    """Wait until the scrub has begun again and finished a round."""
    target = broker.counters.scrub_rounds + count
    async with asyncio.timeout(TIMEOUT_S):
        while broker.counters.scrub_rounds < target:  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.005)


def place_in(file: Path, body: bytes) -> int:
    return file.read_bytes().index(body)


async def test_damage_that_no_pull_has_read_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qmq.broker")
    async with running(tmp_path, FakeDisk(), **SMALL) as broker:
        bodies = await fill(broker.url)
        files = segment_files(tmp_path)[:-1]
        assert len(files) >= 3
        await rounds(broker)
        assert broker.counters.damaged == {}
        bad = [bodies[5], bodies[6], bodies[250]]
        for body in bad:
            (file,) = [file for file in files if body in file.read_bytes()]
            flip(file, place_in(file, body) + 500)
        await rounds(broker, 3)
        assert broker.counters.damaged == {"scrub": 3}
        lines = [record.getMessage() for record in caplog.records if "are not served" in record.getMessage()]
        assert len(lines) == 3
        assert all("the checksum of the data is wrong" in line for line in lines)
        assert sum(str(files[0]) in line for line in lines) == 2
        assert "3 bad places since the start: 3 by scrub)" in lines[-1]
        async with qmq.connect(broker.url) as client, client.subscribe("a.", group="g") as consumer:
            got = [message.body for _ in range(2) for message in await consumer.pull(1_000, timeout=0)]
            assert got == [body for body in bodies if body not in bad]
            assert consumer.damaged == 0  # it was not even sent
    assert broker.counters.scrubbed_bytes > 400_000
    assert "in all: 3 bad places since the start: 3 by scrub" in caplog.text


def runs(directory: Path) -> list[Path]:
    """Return the first file of each sorted run of an error log."""
    return sorted(directory.glob("groups/*/retries/*.a"))


async def test_a_run_of_an_error_log_is_read_again_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.storage.error_log.timer_queue.MEMORY_ITEMS", 30)
    async with running(tmp_path, FakeDisk(), **SMALL) as broker, qmq.connect(broker.url) as client:
        await client.send_many("a.b", [b"%d" % number for number in range(50)])
        async with client.subscribe("a.", group="g") as consumer:
            for message in await consumer.pull(50):
                await message.nack(delay=3_600)
            await rounds(broker)
            assert broker.counters.damaged == {}
            (first,) = runs(tmp_path)
            for path in (first, first.with_suffix(".b")):
                flip(path, SCHEDULE_HEADER_SIZE + 3 * RETRY_SIZE + 5)
            flip(first, SCHEDULE_HEADER_SIZE + 9 * RETRY_SIZE + 5)
            await rounds(broker, 3)
    assert broker.counters.damaged == {"scrub": 2}
    assert f"{first} is rotten at bytes {SCHEDULE_HEADER_SIZE + 9 * RETRY_SIZE} to " in caplog.text
    assert f"{first} and {first.stem}.b are both rotten at byte {SCHEDULE_HEADER_SIZE + 3 * RETRY_SIZE}" in caplog.text


async def test_only_some_of_many_damages_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.daemon.main._LOGGED_AT_ONCE", 3)
    monkeypatch.setattr("qmq.daemon.main._LOGGED_EVERY_US", 3_600_000_000)
    async with running(tmp_path, FakeDisk(), **SMALL) as broker:
        bodies = await fill(broker.url)
        file = segment_files(tmp_path)[0]
        for body in bodies[:20]:
            flip(file, place_in(file, body) + 500)
        await rounds(broker, 3)
        assert broker.counters.damaged == {"scrub": 20}
        assert caplog.text.count("are not served") == 3


def test_a_rate_is_kept_and_nothing_is_saved_up_beyond_its_burst() -> None:
    rate = LogRate(3, 1_000)
    assert [rate.may_log(5_000) for _ in range(5)] == [True, True, True, False, False]
    assert [rate.may_log(now) for now in (5_999, 6_000, 6_000, 6_999, 8_500, 8_500)] == [
        False, True, False, False, True, True,
    ]  # fmt: skip
    assert [rate.may_log(1_000_000) for _ in range(4)] == [True, True, True, False]


async def test_a_file_that_is_gone_or_cut_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, FakeDisk(), **SMALL) as broker:
        bodies = await fill(broker.url)
        first, second, *_ = segment_files(tmp_path)
        first.rename(tmp_path / "elsewhere")
        cut = next(body for body in bodies[::-1] if body in second.read_bytes())
        os.truncate(second, place_in(second, cut) + 100)
        await rounds(broker, 3)
        assert broker.counters.damaged == {"scrub": 2}
        assert f"{first} is missing" in caplog.text
        assert f"{second} at offset" in caplog.text
        assert "the file is shorter than it was" in caplog.text
        async with qmq.connect(broker.url) as client, client.subscribe("a.", group="g") as consumer:
            got = [message.body for message in await consumer.pull(1_000, timeout=0)]
            assert got == [body for body in bodies if body != cut]  # mapped segments are still served


async def test_a_disk_that_refuses_to_read_is_no_rot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk("boot-1")
    async with running(tmp_path, disk, **SMALL) as broker:
        await fill(broker.url, 200)
        disk.fail_always("preadv", errno.EMFILE)
        await rounds(broker, 3)
        assert broker.counters.damaged == {}
        assert caplog.text.count("could not be scrubbed") >= 1
        disk.heal()
        before = broker.counters.scrubbed_bytes
        await rounds(broker, 2)
        assert broker.counters.scrubbed_bytes > before
        open_files = len(disk.still_open())
        await rounds(broker, 5)
        assert len(disk.still_open()) <= open_files + 1


async def test_a_new_broker_does_not_wait_a_round_for_its_first_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.daemon.scrubber._EMPTY_US", 1_000)
    async with running(tmp_path, FakeDisk(), **(SMALL | {"scrub_round_ms": 3_600_000})) as broker:
        await fill(broker.url, 200)
        await rounds(broker, 1 - broker.counters.scrub_rounds)


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with running(tmp_path, FakeDisk(), **(SMALL | {"scrub_bytes_per_s": 0})) as broker:
        await fill(broker.url, 200)
    assert (broker.counters.scrubbed_bytes, broker.counters.scrub_rounds) == (0, 0)


async def test_the_rate_is_bounded(tmp_path: Path) -> None:
    """By the broker's clock, no more was read than the rate allows."""
    async with running(tmp_path, FakeDisk(), **(SMALL | {"scrub_bytes_per_s": 1 << 20})) as broker:
        await fill(broker.url, 300)
        loop = asyncio.get_running_loop()
        begun, before = loop.time(), broker.counters.scrubbed_bytes
        async with asyncio.timeout(TIMEOUT_S):
            while broker.counters.scrubbed_bytes - before < 256 << 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        read, took = broker.counters.scrubbed_bytes - before, loop.time() - begun
        assert read <= (1 << 20) * took + (128 << 10)
