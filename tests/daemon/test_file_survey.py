"""qmq/daemon/file_survey.py: the bytes of files by kind, and the messages that are in no archive."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import qmq
from qmq.daemon import file_survey
from qmq.daemon.file_survey import KINDS, FileSurvey, LogSegments, SurveyedFiles, kinds_of, outermost
from qmq.net.server import clock
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.archive_receipt import ArchiveReceipt, write_receipt
from tests.broker_process import running


def test_files_count_by_their_kind(tmp_path: Path) -> None:
    files = {
        "log-0/00.messages": ("message_log", 3), "log-0/00.index": ("indexes", 1), "log-0/00.keys": ("key_indexes", 1),
        "consumer-log/0/00.entries": ("consumer_log", 2), "consumer-log/0/00.order": ("consumer_log", 1),
        "pulls/00.pulls": ("pull_log", 4), "groups/0/retries/1-a": ("error_log", 1),
        "delayed/log-0/00.messages": ("delay_log", 5), "due/1-a": ("delay_log", 1), "store-a": ("other", 1),
    }  # fmt: skip
    expected = dict[str, int]()
    for name, (kind, blocks) in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (4_096 * blocks))
        expected[kind] = expected.get(kind, 0) + path.stat().st_blocks * 512
    (tmp_path / "log-0" / "link.messages").symlink_to(tmp_path / "store-a")
    assert kinds_of([tmp_path]) == expected
    assert set(expected) == set(KINDS)
    with (tmp_path / "log-0" / "01.messages").open("wb") as file:
        file.truncate(1 << 30)  # room ahead takes nothing
    assert kinds_of([tmp_path])["message_log"] < 1 << 20
    assert kinds_of([tmp_path / "missing"]) == {}


def test_no_directory_counts_twice(tmp_path: Path) -> None:
    inner, other = tmp_path / "data" / "disk", tmp_path / "data2"
    assert outermost([inner, tmp_path / "data", other, other]) == [tmp_path / "data", other]


async def test_an_archive_is_behind_by_what_has_no_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_survey, "REST_US", 0)
    monkeypatch.setattr(file_survey, "REST_TIMES", 0)
    async with running(tmp_path / "data") as broker, qmq.connect(broker.url) as client:

        async def look() -> qmq.ArchiveStats | None:
            (found,) = await client.admin.stats()
            assert found.file_bytes["message_log"] > 0
            return found.archive

        log = broker.store.partitions[0].message_log

        def archived(base: int, end: int, verified_us: int) -> None:
            receipt = ArchiveReceipt(
                broker.store.store_id.hex(), 0, base, end, end - base, 0, "/backup/archive", verified_us
            )
            write_receipt(Disk(), log.directory, receipt)

        await client.send("a", b"1")
        assert await look() is None, "nobody archives"
        first_us = broker.store.last_stored_at_us
        broker.store.partitions[0].seal()
        await client.send("a", b"2")
        second_us = broker.store.last_stored_at_us
        base, end = log.sealed[0]
        archived(base, end, 7_000_000)
        found = await look()
        assert found is not None
        assert (found.unarchived_segments, found.verified_at.timestamp()) == (1, 7)
        assert 0 < found.unarchived_bytes == log.end - log.current.base - 64
        assert found.oldest is not None
        assert round(found.oldest.timestamp() * 1e6) == second_us > first_us
        await client.send("a", b"3")
        archived(log.current.base, log.end, 8_000_000)  # of a stopped broker: a segment that grows afterwards
        found = await look()
        assert found is not None
        assert (found.unarchived_bytes, found.unarchived_segments, found.oldest) == (0, 0, None)
        await client.send("a", b"4")
        found = await look()
        assert found is not None
        assert found.oldest is not None
        assert round(found.oldest.timestamp() * 1e6) == broker.store.last_stored_at_us
        assert found.verified_at.timestamp() == 8


async def test_a_look_is_good_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_survey, "REST_TIMES", 0)
    now = clock()
    looks = list[None]()

    def logs() -> list[LogSegments]:
        looks.append(None)
        return []

    survey = FileSurvey(Disk(), [tmp_path], logs, lambda: now)
    try:
        for _ in range(3):
            await asked(survey)
        assert len(looks) == 1
        now = now._replace(monotonic_us=now.monotonic_us + file_survey.REST_US)
        assert await asked(survey) == await asked(survey)
        assert len(looks) == 2
    finally:
        survey.close()


async def test_a_directory_that_does_not_answer_keeps_no_statistics_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_survey, "TIMEOUT_S", 0.01)
    stuck = threading.Event()

    def never(directories: list[Path]) -> dict[str, int]:
        stuck.wait(60)
        return {"message_log": 1}

    monkeypatch.setattr(file_survey, "kinds_of", never)
    survey = FileSurvey(Disk(), [tmp_path], list, clock)
    try:
        assert await asked(survey) is None
        assert await asked(survey) is None, "at once"
    finally:
        stuck.set()
        survey.close()


async def asked(survey: FileSurvey) -> SurveyedFiles | None:
    outcome: asyncio.Future[SurveyedFiles | None] = asyncio.get_running_loop().create_future()
    survey.ask(outcome.set_result)
    return await outcome
