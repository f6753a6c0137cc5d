"""qmq/cli/operate/repair.py: output for people and for programs, and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from qmq.cli.main import cli
from qmq.cli.operate.repair import _print_table
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.repair import Outcome, Repair, RepairResult
from qmq.storage.verify.report import Finding
from tests.storage.stops import fill
from tests.storage.stores import Sender, close_cleanly, damage, open_store


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    """Return the sender of the messages in the directory tmp_path / "data" of a stopped store."""
    sender = Sender(open_store(tmp_path / "data", segment_bytes=4 << 10, max_frame_bytes=2 << 10))
    fill(sender, 60)
    close_cleanly(sender.store)
    return sender


@pytest.fixture
def data(tmp_path: Path, sender: Sender) -> Path:
    return tmp_path / "data"


def test_nothing_to_do_ends_with_0(data: Path) -> None:
    shown = CliRunner().invoke(cli, ["repair", str(data)])
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, f"{data}: nothing to repair\n", "")


def test_what_was_made_again_is_named_and_ends_with_0(data: Path) -> None:
    shutil.rmtree(data / "consumer-log")
    shown = CliRunner().invoke(cli, ["repair", str(data)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    *lines, last = shown.stdout.splitlines()
    assert lines
    assert all(line.startswith(f"made again: {data}/consumer-log/0/") for line in lines)
    assert last == f"{data}: made again {len(lines)}"
    assert CliRunner().invoke(cli, ["verify", str(data)]).exit_code == 0


def test_what_cannot_be_mended_is_left_and_named_and_ends_with_1(data: Path, sender: Sender) -> None:
    damage(data, sender.sent[3], len(sender.sent[3].data) - 1)
    (data / "store-b").unlink()
    shown = CliRunner().invoke(cli, ["repair", str(data)])
    assert (shown.exit_code, shown.stderr) == (1, "")
    assert f"mended: {data}/store-b: " in shown.stdout
    assert f"left: {data}/log-0/" in shown.stdout
    assert "put back a good copy" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"{data}: mended 1, left 1"


def test_json_is_one_object_a_thing_and_one_that_sums_up(data: Path, sender: Sender) -> None:
    damage(data, sender.sent[0], len(sender.sent[0].data) - 1)
    (order, *_) = sorted(data.glob("consumer-log/0/*.order"))
    order.write_bytes(b"")
    shown = CliRunner().invoke(cli, ["repair", "--json", str(data)])
    assert shown.exit_code == 1
    *things, summary = [json.loads(line) for line in shown.stdout.splitlines()]
    assert all(set(thing) == {"file", "position", "what", "outcome", "advice"} for thing in things)
    found = {thing["file"]: thing for thing in things}
    assert found[str(order)]["outcome"] == "made again"
    assert found[str(order)]["advice"] is None
    (left,) = [thing for thing in things if thing["outcome"] == "left"]
    assert left["position"] == 64  # right behind the header of the segment
    assert (summary["directory"], summary["whole"], summary["made_again"], summary["left"]) == (str(data), False, 1, 1)


def test_a_directory_in_use_ends_with_2_and_names_who_uses_it(data: Path) -> None:
    lock = DirectoryLock.acquire(Disk(), data, 0)
    try:
        shown = CliRunner().invoke(cli, ["repair", str(data)])
    finally:
        lock.release()
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "in use by process" in shown.stderr


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_what_is_no_data_directory_is_wrong_usage(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    shown = CliRunner().invoke(cli, ["repair", str(tmp_path / name)])
    assert shown.exit_code == 2
    assert name in shown.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_on_a_terminal_it_is_a_table() -> None:
    done = Repair(Path("/data"), notes=["something else"], left_out=5)
    for place, outcome in enumerate(Outcome):
        finding = Finding("fault", Path("/data/log-0/00.messages"), 1_000 + place, f"bad [{place}]", "put it back")
        done.treated.append(RepairResult(finding, outcome))
    console = Console(width=120)
    with console.capture() as capture:
        _print_table(done, console)
    lines = capture.get().splitlines()
    for place, outcome in enumerate(Outcome):
        (line,) = [line for line in lines if f"bad [{place}]" in line]
        assert all(cell in line for cell in (outcome.value, "log-0/00.messages", f"1,00{place}"))
        assert ("put it back" in line) == (outcome is Outcome.LEFT)
    assert "something else" in capture.get()
    assert "/data: made again 1, mended 1, removed 1, given up 1, left 1" in capture.get()
    assert "5 more findings" in capture.get()
