"""README.md does what it says: its first commands and its program run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory where the block finds what it finds in a checkout whose environment is made."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(BIN.parent)
    return tmp_path


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def pasted(block: str, checkout: Path, **environment: str) -> tuple[list[str], float]:
    """What the block prints when it is pasted into a shell as it stands, and how long it takes. What it leaves in the
    background is stopped.
    """
    began = time.monotonic()
    with subprocess.Popen(
        ["bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=checkout,
        env={**os.environ, **environment},
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        try:
            shell.stdin.write(block)
            shell.stdin.close()
            shell.wait(timeout=90)
            took = time.monotonic() - began
        finally:
            with suppress(ProcessLookupError):  # where nothing is left
                os.killpg(shell.pid, signal.SIGTERM)
        return shell.stdout.read().splitlines(), took  # to the end: the broker has ended too


def test_the_first_block_pasted_into_a_shell_ends_with_its_message(checkout: Path) -> None:
    address = free_address()
    printed, _ = pasted(SHELL, checkout, QMQ_LISTEN=address, QMQ_SERVER=f"qmq://{address}")
    body = re.search(r"'(.*)'", SHELL)[1]  # type: ignore[index]
    assert printed.count(body) == 1
    assert "1 acknowledged" in printed
    assert f"ready on qmq://{address}, data in ./qmq-data" in printed


def test_the_first_block_ends_without_a_broker_too(checkout: Path) -> None:
    address = free_address()
    block = SHELL.replace("--wait 30", "--wait 0.5")
    assert block != SHELL
    printed, took = pasted(block, checkout, QMQ_LISTEN="nowhere", QMQ_SERVER=f"qmq://{address}")
    assert any("nowhere" in line for line in printed)
    assert len([line for line in printed if f"{address}: Connection refused" in line]) == 3
    assert took < 60


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
