"""docs/production.md: its commands run as they stand there, in their order, and its alerts name what there is.

Paths of a server (/var/lib/qmq, /etc, /backup) become paths below a temporary directory. `systemctl` acts on a broker
that the test runs. Of commands for containers and clusters the test runs the part that is a command of QMQ, and checks
that the files they name are there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.net.client.admin.broker_info import BrokerInfo
from qmq.net.client.admin.results import GroupInfo
from tests.broker_process import BrokerProcess

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "production.md").read_text("utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
#: Commands that change the machine; tests/test_packaging.py installs QMQ into a new environment.
OF_THE_MACHINE = (
    "ln --symbolic",
    "python3 -m venv",
    "/opt/qmq/bin/python -m pip install",
    "useradd",
    "install --directory --mode=0750 --owner=root --group=qmq",  # for a user that is made there
    "install --mode=0640 --owner=root --group=qmq",
    "journalctl",
    "podman",
    "kubectl",
)


class Machine:
    """A server as the page describes it, below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "var/lib/qmq/data"
        (root / "backup").mkdir()
        self.data.parent.mkdir(parents=True)
        self.broker = BrokerProcess(
            self.data, segment_bytes="128 KiB", max_frame_bytes="64 KiB", max_message_bytes=4096
        )
        self.broker.start()
        self.other: BrokerProcess | None = None

    def close(self) -> None:
        self.broker.close()
        if self.other is not None:
            self.other.close()

    def run(self, line: str) -> str:
        """Run one line of the page, as far as that can be; return what it prints."""
        if line.startswith("systemctl "):
            return self._systemctl(line.split()[1:])
        words = shlex.split(line)
        if line.startswith(OF_THE_MACHINE):
            if "exec" not in words:
                return ""
            words = words[words.index("qmq", words.index("exec") + 2) :]
        words = [
            re.sub(r"^/(var/lib|etc|backup)", rf"{self.root}/\1", word).removeprefix("/opt/qmq/bin/") for word in words
        ]
        server = self.broker.url
        if words[:2] == ["qmq", "restore"]:  # to a new broker
            self.other = BrokerProcess(self.root / "new")
            server = self.other.start()
        if words[0] == "qmq":
            words[0] = str(BIN / "qmq")
        environment = {**os.environ, "QMQ_SERVER": server}
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def _systemctl(self, words: list[str]) -> str:
        match words:
            case ["daemon-reload"] | ["enable", "--now", "qmq"]:
                pass
            case ["stop", "qmq"]:
                assert self.broker.stop() == 0
            case ["start", "qmq"]:
                self.broker.start()
            case ["restart", "qmq"]:
                assert self.broker.stop() == 0
                self.broker.start()
            case ["reload", "qmq"]:
                self.broker.send_signal(signal.SIGHUP)
            case _:
                pytest.fail(f"systemctl {words}")
        return ""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def test_its_commands_run_one_after_another(machine: Machine) -> None:
    lines = "\n".join(f"order {number} {'x' * 400}" for number in range(400))
    produce = [str(BIN / "qmq"), "produce", "shop.order"]
    environment = {**os.environ, "QMQ_SERVER": machine.broker.url}
    subprocess.run(produce, env=environment, input=lines, text=True, capture_output=True, timeout=60, check=True)
    printed = {line: machine.run(line) for line in COMMANDS}
    assert "400" in printed["qmq restore --from /backup/archive --yes"]
    assert (machine.root / "etc/systemd/system/qmq.service").read_bytes() == (ROOT / "ops/qmq.service").read_bytes()
    shutil.copytree(machine.root / "backup/qmq", machine.root / "older")
    older = BrokerProcess(machine.root / "older")
    try:
        older.start()
        assert older.logs("after a stop that was clean"), "a copy of a stopped broker is exact"
    finally:
        older.close()


def test_commands_for_containers_name_files_that_are_there() -> None:
    named = {word for line in COMMANDS for word in shlex.split(line) if word.startswith("ops/")}
    assert named == {f"ops/{name}" for name in ("qmq.toml", "qmq.service", "Containerfile", "kubernetes.yaml")}
    assert all((ROOT / name).is_file() for name in named)


def test_its_program_shows_the_state_of_a_broker(machine: Machine) -> None:
    environment = {**os.environ, "QMQ_SERVER": machine.broker.url}
    consume = [BIN / "qmq", "consume", "shop.", "--group", "billing", "--timeout", "0"]
    subprocess.run(consume, env=environment, capture_output=True, timeout=60, check=True)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(machine.data) in done.stdout
    assert re.search(r"^billing 0 0 0 None$", done.stdout, re.MULTILINE)


def test_alerts_name_what_there_is() -> None:
    rows = [cells for line in PAGE.splitlines() if line.startswith("|") and len(cells := line.split("|")) == 6]
    fields = {name for cells in rows for name in re.findall(r"`(\w+)` of `qmq groups`", cells[2])}
    assert fields <= set(GroupInfo.__annotations__)
    assert len(fields) >= 5
    facts = {name for cells in rows for name in re.findall(r"`(\w+)` of `admin.info\(\)`", cells[2])}
    assert facts <= set(BrokerInfo.__annotations__)
    assert facts
    assert all(cell.strip() for cells in rows for cell in cells[1:5])
