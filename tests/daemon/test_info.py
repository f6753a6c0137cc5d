"""The broker says how it is: the facts of a running one, and the problems that show in them."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

import qmq
from qmq.broker.groups.untaken import UntakenName
from qmq.broker.ports.commands import Now
from qmq.broker.ports.metrics import Counters
from qmq.daemon import info
from qmq.daemon.info import BrokerFacts, DiskSpace, DiskSurvey, problems_of
from qmq.daemon.main import RunningBroker
from qmq.errors import StorageFull
from qmq.net.server import clock
from qmq.settings import Settings
from qmq.storage.disk.disk import Disk
from tests.broker_process import running

GIB = 1 << 30
SOUND = BrokerFacts(
    Settings(),
    "127.0.0.1",
    False,
    (DiskSpace("data", 100 * GIB, 50 * GIB, GIB),),
    Counters(),
    (),
    900_000,
    None,
    (),
    (),
    {"max_producers": 79_999, "max_subjects": 799_999},
)


async def test_a_broker_says_what_it_is_and_who_is_connected(tmp_path: Path) -> None:
    async with running(tmp_path / "data", partitions=2) as broker:
        async with (
            qmq.connect(broker.url, name="billing", app="shop") as client,
            client.subscribe("a.", group="g") as consumer,
        ):
            await client.send("a.b", b"1")
            await consumer.pull(1)
            (found,) = await client.admin.info()
        assert (found.subjects, found.groups, found.consumers) == (1, 1, 1)
        assert found.broker == broker.url.removeprefix("qmq://")
        assert found.store_id == broker.store.store_id.hex()
        assert found.settings["partitions"] == 2
        assert {"data_dir", "listen", "partitions"} <= set(found.changed_settings)
        assert "checkpoint_ms" not in found.changed_settings
        assert [disk.directory for disk in found.disks] == [str(tmp_path / "data")]
        assert found.disks[0].free_bytes
        assert found.log_bytes > 0
        assert found.checkpoint_error is None
        assert found.uptime < 60
        named = [one for one in found.connections if one.name == "billing"]
        assert [(one.app, one.client.partition("/")[0]) for one in named] == [("shop", "qmq-python")]
        assert found.connection_count == len(found.connections)
        assert [problem for problem in found.problems if not problem.code.startswith("disk_")] == []


async def test_the_client_without_asyncio_asks_too(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as broker:

        def ask() -> list[qmq.BrokerInfo]:
            with qmq.connect_sync(broker.url, name="web") as client:
                return client.admin.info()

        (found,) = await asyncio.to_thread(ask)
        assert "web" in {one.name for one in found.connections}


def test_a_sound_broker_has_no_problems() -> None:
    assert problems_of(SOUND) == []
    late_but_rare = SOUND._replace(settings=Settings(checkpoint_ms=60_000), checkpoint_age_us=100_000_000)
    assert problems_of(late_but_rare) == []


WRONG = {
    "disk_silent": SOUND._replace(disks=(DiskSpace("data", None, None, 0),)),
    "disk_full": SOUND._replace(disks=(DiskSpace("data", 100 * GIB, GIB, GIB),)),
    "disk_nearly_full": SOUND._replace(disks=(DiskSpace("data", 100 * GIB, 9 * GIB, GIB),)),
    "partition_broken": SOUND._replace(broken_partitions=(0, 3)),
    "checkpoint_failed": SOUND._replace(checkpoint_error=StorageFull("no room"), checkpoint_age_us=10**9),
    "checkpoint_late": SOUND._replace(checkpoint_age_us=10_000_001),
    "damaged": SOUND._replace(counters=Counters(holes_in_recovery=2)),
    "retention_waits": SOUND._replace(retention_holders=("billing",)),
    **{
        code: SOUND._replace(untaken=(UntakenName(code, "no group follows the subject 'a'"),))
        for code in ("not_taken", "no_consumer", "not_followed", "beside_prefix")
    },
    "unaccounted": SOUND._replace(unaccounted=("group g has 1 message in flight, and must have 2",)),
    "open_to_network": SOUND._replace(host="0.0.0.0"),
    "producers_nearly_full": SOUND._replace(used={"max_producers": 80_000, "max_subjects": 0}),
    "subjects_nearly_full": SOUND._replace(used={"max_producers": 0, "max_subjects": 800_000}),
    "texts_forgotten": SOUND._replace(forgotten_texts=1_200),
    "subject_numbers_nearly_full": SOUND._replace(subject_numbers=54_000_000),
    "clock_behind": SOUND._replace(clock_behind_us=61_000_000),
    "certificate": SOUND._replace(certificate=("error", "the certificate in c.pem has expired: renew it")),
}


@pytest.mark.parametrize("code", WRONG)
def test_a_problem_is_named(code: str) -> None:
    (problem,) = problems_of(WRONG[code])
    assert problem.code == code
    assert problem.level in ("error", "warning")
    assert len(problem.message) > 20


def test_a_disk_is_full_that_has_no_room_for_what_was_refused() -> None:
    little = SOUND._replace(disks=(DiskSpace("data", 100 * GIB, GIB + 999, GIB),))
    assert [problem.code for problem in problems_of(little)] == ["disk_nearly_full"]
    (problem,) = problems_of(little._replace(refused_bytes=1_000))
    assert (problem.code, problem.level) == ("disk_full", "error")


def test_errors_come_before_warnings() -> None:
    both = SOUND._replace(host="shop.example", broken_partitions=(0,))
    assert [problem.level for problem in problems_of(both)] == ["error", "warning"]


def test_every_problem_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "OPERATIONS.md").read_text("utf-8")
    section = page[page.index("## What is wrong") : page.index("### Why messages wait")]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == set(WRONG)


class SilentDisk(Disk):
    """A disk that does not say how much room it has until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def room(self, path: Path) -> tuple[int, int]:
        self.free.wait()
        return super().room(path)


async def test_a_disk_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(info, "DISK_TIMEOUT_S", 0.01)
    disk = SilentDisk()
    survey = DiskSurvey(disk, (tmp_path, tmp_path), 0)

    async def asked() -> tuple[DiskSpace, ...]:
        answer: asyncio.Future[tuple[DiskSpace, ...]] = asyncio.get_running_loop().create_future()
        survey.ask(answer.set_result)
        return await answer

    try:
        assert [await asked(), await asked()] == [(DiskSpace(str(tmp_path), None, None, 0),)] * 2
        disk.free.set()
        monkeypatch.setattr(info, "DISK_TIMEOUT_S", 60)
        (space,) = await asked()
        assert space.free_bytes
    finally:
        disk.free.set()
        survey.close()


def test_a_clock_behind_the_last_message_is_a_problem() -> None:
    hour_us, wall_us = 3_600_000_000, 1_700_000_000_000_000
    assert problems_of(SOUND._replace(clock_behind_us=1_000, wall_us=wall_us)) == []
    (found,) = problems_of(SOUND._replace(clock_behind_us=hour_us, wall_us=wall_us))
    assert (found.code, found.level) == ("clock_behind", "warning")
    assert "stored at 2023-11-14 23:13 UTC, which is ahead of this machine's clock" in found.message
    (found,) = problems_of(SOUND._replace(clock_behind_us=1 << 62, wall_us=wall_us))
    assert "9999-" in found.message


async def test_a_clock_that_was_ahead_once_is_logged_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ahead_us = 10 * 365 * 86_400_000_000
    settings = Settings(data_dir=tmp_path, listen="127.0.0.1:0")

    def clock_ahead() -> Now:
        now = clock()
        return Now(now.monotonic_us, now.wall_us + ahead_us)

    for at in (clock_ahead, clock):
        assert "ahead of this machine's clock" not in caplog.text
        broker = RunningBroker(settings, clock=at)
        await broker.start()
        async with qmq.connect(broker.url) as client:
            await client.send("a", b"1")
            (found,) = await client.admin.info()
        await broker.stop()
    assert caplog.text.count("ahead of this machine's clock") == 1
    assert [problem.code for problem in found.problems if problem.code.startswith("clock")] == ["clock_behind"]
