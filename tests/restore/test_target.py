"""The broker that a restore sends to: nothing that it has is sent again, over whatever connection or process it
came.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qmq.errors import ConnectionLost, InvalidOption
from qmq.format.copies.restored import restored_batches
from qmq.net.client.address import Address, parse_url
from qmq.net.client.restore import RestoreTarget
from qmq.restore.frames import RestoreFrame
from qmq.restore.progress import RestoreProgress
from qmq.restore.target import TargetBroker
from tests.broker.transfer.test_restore import RUN
from tests.broker_process import broker_process, running_broker
from tests.format.contents import CREATED_US
from tests.format.test_private import run_of
from tests.restore.archived import told


def frame_of(*bodies: bytes) -> RestoreFrame:
    """Return a frame with a batch for each of them."""
    frame, run = RestoreFrame(), run_of(*bodies)
    for at in range(run.count):
        for batch in restored_batches([("a", run.slice(at, at + 1))], CREATED_US, 1 << 20):
            frame.add(batch)
    return frame


async def broker_at(address: Address, since: list[int] | None, give_up_s: float = 60) -> TargetBroker:
    target = await RestoreTarget.open(address)
    store = target.welcome.store_id.hex()
    return TargetBroker(address, target, RestoreProgress(RUN.hex(), [store], 0, store, since), None, give_up_s)


async def test_who_goes_on_numbers_from_behind_what_is_stored_and_sends_none_of_it(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url:
        (address,) = parse_url(url)
        first = await broker_at(address, None)
        await first.begin()
        since = first.ends
        await first.store(frame_of(b"x", b"y"))
        second = await broker_at(address, since)
        await second.begin()
        assert second.following == first.following == 2
        frame = frame_of(b"x", b"y", b"z")
        frame.without(second.found)
        assert len(frame.batches) == 1
        await second.store(frame)
        assert second.following == 3
        assert second.ends > first.ends
        await first.close()
        await second.close()
    assert sorted(one.body for one in told(tmp_path)) == [b"x", b"y", b"z"]


async def test_a_connection_that_was_lost_is_made_again_and_one_that_is_gone_given_up(tmp_path: Path) -> None:
    with broker_process(tmp_path) as process:
        (address,) = parse_url(process.url)
        broker = await broker_at(address, None, give_up_s=2)
        await broker.begin()
        await broker.store(frame_of(b"x"))
        process.kill()
        process.start()
        frame = frame_of(b"y")
        await broker.store(frame)
        assert len(frame.batches) == 1
        await broker.close()
        process.kill()
        with pytest.raises(ConnectionLost):
            await broker.store(frame_of(b"z"))
        process.start()
        assert process.stop() == 0
    assert sorted(one.body for one in told(tmp_path)) == [b"x", b"y"]


@pytest.mark.parametrize("other", [None, "elsewhere"])
async def test_another_store_at_the_address_is_not_sent_to(tmp_path: Path, other: str | None) -> None:
    if other is not None:
        async with running_broker(tmp_path / other):
            pass
    with broker_process(tmp_path / "a") as process:
        (address,) = parse_url(process.url)
        broker = await broker_at(address, None)
        await broker.begin()
        process.kill()
        process.path.rename(tmp_path / "b")
        if other is not None:
            (tmp_path / other).rename(process.path)
        process.start()
        with pytest.raises(InvalidOption, match="name the broker that has it"):
            await broker.store(frame_of(b"x"))
        await broker.close()


async def test_an_older_copy_of_the_store_is_not_sent_to(tmp_path: Path) -> None:
    with broker_process(tmp_path / "a", segment_bytes=64 << 20) as process:
        (address,) = parse_url(process.url)
        process.stop()
        shutil.copytree(process.path, tmp_path / "older")
        process.start()
        broker = await broker_at(address, None)
        await broker.begin()
        await broker.store(frame_of(b"x"))
        process.kill()
        process.path.rename(tmp_path / "b")
        (tmp_path / "older").rename(process.path)
        process.start()
        with pytest.raises(InvalidOption, match="begin it anew"):
            await broker.store(frame_of(b"y"))
        await broker.close()
