"""examples/demo.py, packer.py and processes.py as people run them: twice on one directory, stopped in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify

ROOT = Path(__file__).parent.parent.parent


def start_demo(data_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.demo", "--data-dir", str(data_dir), *arguments]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_demo(data_dir: Path, *arguments: str) -> tuple[int, str, str]:
    with start_demo(data_dir, *arguments) as demo:
        out, err = demo.communicate(timeout=120)
    return demo.returncode, out, err


def row(shown: str, label: str) -> list[str]:
    (line,) = [line for line in shown.splitlines() if line.strip().startswith(label)]
    return line.strip().removeprefix(label).split()


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    for run, stored in ((1, "2,025"), (2, "4,050")):
        exit_code, out, err = run_demo(tmp_path / "data", "--handling-ms", "0")
        assert (exit_code, err) == (0, "")
        assert f"Run {run}\n" in "\n".join(line.rstrip() for line in out.splitlines()) + "\n"
        assert row(out, "sent, on disk")[0] == "2,025"
        for group, count in (("fulfilment  ", "2,025"), ("cancellations  ", "326")):
            cells = row(out, group)
            assert cells[0] == count
            assert cells[-3:] == ["0", "0", "0"]  # missing, doubled, changed
        packed = [int(row(out, f"packer-{number}")[0].replace(",", "")) for number in (1, 2, 3, 4)]
        assert sum(packed) == 2_025
        assert row(out, "stored, ")[-1] == stored
        assert "all is right" in " ".join(out.split())
        assert "of earlier runs" not in out
        assert "kill -9 of packer-3" in out
        assert "kill -9 of the broker" in out
        told = " ".join(out.split())
        assert "fulfilment: " in told
        assert " at attempt 2" in told
        assert told.count("0 ready, 0 in flight, 0 in retry, 0 dead") == 2
    assert verify(tmp_path / "data", Disk()).is_good


def test_a_run_that_is_stopped_takes_its_broker_with_it(tmp_path: Path) -> None:
    with start_demo(tmp_path / "data", "--handling-ms", "100") as demo:
        assert demo.stdout is not None
        assert "serves on qmq://" in demo.stdout.readline()
        while "handled" not in demo.stdout.readline():
            pass
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert verify(tmp_path / "data", Disk()).is_good  # would say that it is in use

    exit_code, out, _ = run_demo(tmp_path / "data", "--handling-ms", "0")
    assert exit_code == 0
    assert "Run 2" in out
    assert "of earlier runs" in out


def test_a_broker_that_does_not_start_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    exit_code, out, err = run_demo(tmp_path / "data")
    assert exit_code == 1
    assert "demo: the broker did not start" in out
    assert "Traceback" not in out + err
    assert err.startswith("qmq: ")
