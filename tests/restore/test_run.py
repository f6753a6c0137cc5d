"""Restores to brokers: every message is restored once, whatever is repeated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.archive.files import LocalFiles
from qmq.archive.lock import ArchiveLock, this_process
from qmq.errors import ConnectionLost, DirectoryInUse, InvalidOption, UnknownGroup
from qmq.restore import run
from qmq.restore.frames import RestoreFrame
from qmq.restore.target import TargetBroker
from tests.archive.archives import GONE, NOW_US
from tests.broker_process import running_broker
from tests.restore.archived import check_restored, orders_archive, restoring


async def test_every_message_comes_once_under_its_id_and_marked(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path)
    async with running_broker(tmp_path / "target") as url:
        first = await restoring(tmp_path, url).run()
        again = await restoring(tmp_path, url).run()
        assert first.counts.restored == len(wanted) == again.counts.restored
        async with qmq.connect(url) as client, client.subscribe("", group="g") as consumer:
            message = (await consumer.pull(max_count=1, timeout=30))[0]
            assert message.replayed
            assert message.id in {one.id for one in wanted}
            message.ack()
    check_restored(wanted, tmp_path / "target")


async def test_what_was_archived_since_comes_when_it_is_run_again(tmp_path: Path) -> None:
    early = orders_archive(tmp_path, 30)
    assert early
    async with running_broker(tmp_path / "target") as url:
        await restoring(tmp_path, url).run()
        (tmp_path / "source").rename(tmp_path / "before")
        wanted = early + orders_archive(tmp_path, 30, seed=2)
        progress = await restoring(tmp_path, url).run()
        assert progress.counts.restored == len(wanted)
    check_restored(wanted, tmp_path / "target")


async def test_once_more_is_asked_for(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 30)
    async with running_broker(tmp_path / "target") as url:
        await restoring(tmp_path, url).run()
        assert (await restoring(tmp_path, url, again=True).run()).counts.restored == len(wanted)
        async with qmq.connect(url) as client:
            assert sum([info.messages async for info in client.subjects()]) == 2 * len(wanted)


async def test_a_group_gets_it_and_nobody_else(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 60)
    async with running_broker(tmp_path / "target") as url, qmq.connect(url) as client:
        with pytest.raises(UnknownGroup):
            await restoring(tmp_path, url, group="g").run()
        async with client.subscribe("hotel.", group="g") as mine, client.subscribe("", group="h") as other:
            await restoring(tmp_path, url, group="g").run()
            await restoring(tmp_path, url, group="g").run()
            got = list[qmq.Message]()
            while len(got) < len(wanted):
                got += await mine.pull(max_count=1_000, timeout=30)
                for message in got:
                    message.ack()
            assert sorted((one.id, one.subject, one.body) for one in got) == sorted(
                (one.id, one.subject, one.body) for one in wanted
            )
            assert {(one.replayed, one.attempt) for one in got} == {(True, 1)}
            await mine.flush()
            assert not await mine.pull(timeout=0)
            assert not await other.pull(timeout=0)
            assert not [info async for info in client.subjects()]


async def test_all_become_one_subject(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 60)
    async with running_broker(tmp_path / "target") as url:
        await restoring(tmp_path, url, to_subject="again.orders").run()
    check_restored([one._replace(subject="again.orders") for one in wanted], tmp_path / "target")


async def test_of_several_brokers_one_has_it_whoever_is_named_first(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 60)
    async with running_broker(tmp_path / "a") as a, running_broker(tmp_path / "b") as b:
        with pytest.raises(ConnectionLost, match="begins only if all"):
            await restoring(tmp_path, f"{a},qmq://127.0.0.1:1").run()
        first = await restoring(tmp_path, f"{a},{b}").run()
        second = await restoring(tmp_path, f"{b},{a}").run()
        third = await restoring(tmp_path, b).run()
        assert first.counts == second.counts == third.counts
        async with qmq.connect(b) as client:
            assert not [info async for info in client.subjects()]
    check_restored(wanted, tmp_path / "a")


async def test_each_broker_has_its_own_when_they_are_named_one_by_one(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 30)
    async with running_broker(tmp_path / "a") as a, running_broker(tmp_path / "b") as b:
        await restoring(tmp_path, a).run()
        await restoring(tmp_path, b).run()
        with pytest.raises(InvalidOption, match="one at a time"):
            await restoring(tmp_path, f"{a},{b}").run()
    check_restored(wanted, tmp_path / "a")
    check_restored(wanted, tmp_path / "b")


async def test_two_at_once_are_refused_and_who_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    wanted = orders_archive(tmp_path, 30)
    async with running_broker(tmp_path / "target") as url:
        await restoring(tmp_path, url).run()
        (path,) = (tmp_path / "archive" / "restores").glob("*.progress")
        files = LocalFiles(tmp_path / "archive")
        lock = f"restores/{path.stem}.lock"
        with (
            ArchiveLock(files, lambda: NOW_US, this_process(), lock),
            pytest.raises(DirectoryInUse, match="is held by process"),
        ):
            await restoring(tmp_path, url).run()
        ArchiveLock(files, lambda: NOW_US, GONE, lock).__enter__()
        await restoring(tmp_path, url).run()
    check_restored(wanted, tmp_path / "target")


@pytest.mark.parametrize("slow", ["begin", "store", "frames"])
async def test_the_lock_is_renewed_while_others_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A broker, or an archive with nothing to restore for a long time."""
    wanted, renewed = orders_archive(tmp_path, 30), threading.Semaphore(0)
    plain_renew, plain_call, plain_frames = ArchiveLock.renew, getattr(TargetBroker, slow, None), run.frames_of

    def renew(lock: ArchiveLock) -> None:
        renewed.release()
        plain_renew(lock)

    def wait() -> bool:
        return all(renewed.acquire(timeout=10) for _ in range(5))

    async def call(*given: Any) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, wait)
        assert plain_call is not None
        await plain_call(*given)

    def frames(*given: Any) -> Iterator[RestoreFrame]:
        assert wait()
        yield from plain_frames(*given)

    monkeypatch.setattr(run, "_RENEW_EVERY_S", 0.001)
    monkeypatch.setattr(ArchiveLock, "renew", renew)
    if slow == "frames":
        monkeypatch.setattr(run, "frames_of", frames)
    else:
        monkeypatch.setattr(TargetBroker, slow, call)
    async with running_broker(tmp_path / "target") as url:
        assert (await restoring(tmp_path, url).run()).counts.restored == len(wanted)
