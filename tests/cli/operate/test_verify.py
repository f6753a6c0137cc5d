"""qmq/cli/operate/verify.py: output for people and for programs, and exit codes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import qmq
from qmq.cli.main import cli
from qmq.cli.operate.verify import _print_table
from qmq.daemon.main import RunningBroker
from qmq.net.server import clock
from qmq.settings import Settings
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.report import VerifyReport
from tests.broker_process import running

BODY = b"something that is easy to find"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a stopped broker with ten messages."""
    directory = tmp_path_factory.mktemp("stored") / "data"

    small = Settings(data_dir=directory, listen="127.0.0.1:0", segment_bytes=17 << 20)  # each test makes a copy

    async def fill() -> None:
        broker = RunningBroker(small)
        await broker.start()
        async with qmq.connect(broker.url) as client:
            await client.send_many("hotel.order.created", [BODY] * 10)
        await broker.stop()

    asyncio.run(fill())
    return directory


@pytest.fixture
def data(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "data"))


@pytest.fixture
def spoiled(data: Path) -> tuple[Path, Path]:
    """Return the directory with one byte of a message changed, and the changed file."""
    (segment,) = data.glob("log-0/*.messages")
    with segment.open("r+b") as file:
        at = file.read(1 << 20).index(BODY)
        file.seek(at)
        file.write(b"S")
    return data, segment


def test_a_sound_directory_ends_with_0(data: Path) -> None:
    shown = CliRunner().invoke(cli, ["verify", str(data)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "fault:" not in shown.stdout
    assert "faults 0," in shown.stdout.splitlines()[-1]


def test_a_bad_byte_is_shown_with_its_place_and_ends_with_1(spoiled: tuple[Path, Path]) -> None:
    directory, segment = spoiled
    shown = CliRunner().invoke(cli, ["verify", str(directory)])
    assert shown.exit_code == 1
    assert f"fault: {segment} at byte " in shown.stdout
    assert "faults 1," in shown.stdout.splitlines()[-1]


def test_json_is_one_object_a_finding_and_one_that_sums_up(spoiled: tuple[Path, Path]) -> None:
    directory, segment = spoiled
    shown = CliRunner().invoke(cli, ["verify", "--json", str(directory)])
    assert shown.exit_code == 1
    *findings, summary = [json.loads(line) for line in shown.stdout.splitlines()]
    (fault,) = [finding for finding in findings if finding["severity"] == "fault"]
    assert set(fault) == {"severity", "file", "position", "what", "advice"}
    assert fault["file"] == str(segment)
    assert fault["position"] == 64  # right behind the header of the segment
    assert (summary["good"], summary["faults"], summary["directory"]) == (False, 1, str(directory))
    assert summary["read"]["messages"]["files"] == 1


def test_groups_whose_messages_do_not_add_up_are_a_fault_and_a_problem(tmp_path: Path) -> None:
    directory = tmp_path / "data"

    async def miscount() -> None:
        async with running(directory) as broker, qmq.connect(broker.url) as client:
            await client.send_many("a", [b"x"] * 3)
            async with client.subscribe("a", group="g") as consumer:
                for message in await consumer.pull(3):
                    await message.ack()
            ledger = broker.broker.groups["g"].ledger
            assert ledger is not None
            ledger.totals.acked -= 2
            await client.admin.set_group("g", max_unacked=5)

    asyncio.run(miscount())
    text = "group g has 0 messages in flight, in retry and dead, and by its records it must have 2"
    shown = CliRunner().invoke(cli, ["verify", str(directory)])
    assert (shown.exit_code, shown.stdout.count(text)) == (1, 1)

    async def problems() -> list[tuple[str, str]]:
        async with running(directory) as broker, qmq.connect(broker.url) as client:
            broker.broker.checkpoint_state(clock())
            (info,) = await client.admin.info()
        return [(one.level, one.message) for one in info.problems if one.code == "unaccounted"]

    ((level, message),) = asyncio.run(problems())
    assert level == "error"
    assert text in message
    assert "qmq trace" in message


def test_a_directory_in_use_ends_with_2_and_names_who_uses_it(data: Path) -> None:
    lock = DirectoryLock.acquire(Disk(), data, 0)
    try:
        shown = CliRunner().invoke(cli, ["verify", str(data)])
    finally:
        lock.release()
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "in use by process" in shown.stderr
    assert CliRunner().invoke(cli, ["verify", str(data)]).exit_code == 0


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_what_is_no_directory_is_wrong_usage(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    shown = CliRunner().invoke(cli, ["verify", str(tmp_path / name)])
    assert shown.exit_code == 2
    assert name in shown.stderr


def test_an_empty_directory_is_no_store(tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert shown.exit_code == 1
    assert "store-a" in shown.stdout


def test_on_a_terminal_it_is_a_table() -> None:
    report = VerifyReport(Path("/data"))
    report.count("messages", 4096, 3)
    report.fault(Path("/data/log-0/00.messages"), 1_234, "the [checksum] is wrong", "keep a copy")
    report.note(Path("/elsewhere/x.tmp"), None, "a temporary file", "nothing")
    for _ in range(25):
        report.note(Path("/data/subjects"), None, "again", "nothing")
    console = Console(width=120)
    with console.capture() as capture:
        _print_table(report, console)
    lines = capture.get().splitlines()
    assert any(
        all(cell in line for cell in ("fault", " log-0/00.messages", "1,234", "the [checksum] is wrong", "keep a copy"))
        for line in lines
    )
    assert any(all(cell in line for cell in ("messages", "1", "3", "4,096")) for line in lines)
    assert "/data: 1 file read, faults 1, notes 26" in capture.get()
    assert "5 more findings not shown" in capture.get()
