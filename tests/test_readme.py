"""README.md does what it says: its first commands and its program run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SHELL, PROGRAM = (re.search(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1] for kind in ("", "python"))  # type: ignore[index]
BIN = Path(sys.executable).parent


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a broker that runs as a user runs it."""
    command = [BIN / "qmq", "serve", "--data-dir", tmp_path / "data", "--listen", "127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        ready = re.match(r"ready on (qmq://\S+), data in ", broker.stdout.readline())
        assert ready is not None
        yield ready[1]
        broker.send_signal(signal.SIGTERM)
    assert broker.returncode == 0


def run(command: list[str | Path], server: str) -> str:
    environment = {**os.environ, "QMQ_SERVER": server}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout


def test_the_first_message_arrives(server: str) -> None:
    make, serve, *lines = [line.split("   #")[0].strip() for line in SHELL.splitlines()]
    assert make == "make env"
    assert serve == ".venv/bin/qmq serve &"
    outputs = [run(["bash", "-c", line.replace(".venv/bin", str(BIN))], server) for line in lines]
    body = re.search(r"'(.*)'", SHELL)[1]  # type: ignore[index]
    assert outputs[-1] == f"{body}\n"


def test_the_program_prints_what_it_sent(server: str) -> None:
    assert "qmq://127.0.0.1:20881" in PROGRAM
    shown = run([sys.executable, "-c", PROGRAM.replace("qmq://127.0.0.1:20881", server)], server)
    assert shown == "hotel.order.created order-4421 b'a room for two'\n"


def test_every_command_is_listed_and_every_link_leads_somewhere() -> None:
    for name in COMMANDS:
        assert f"| `qmq {name}" in README
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_target_of_make_is_named() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert len(targets) >= 7
    assert [name for name in targets if name != "help" and f"make {name}" not in README] == []
