"""ops/qmq-console.service: systemd accepts it, it is hardened, and its command is a console that answers."""

from __future__ import annotations

import http.client
import json
import re
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from qmq.console.serve import MOST_CONNECTIONS, STOP_SECONDS
from tests.broker_process import broker_process
from tests.cli.commands import qmq_process
from tests.ops.test_unit import OPS, analyzed

UNIT = (OPS / "qmq-console.service").read_text("utf-8")
QMQ = Path(sys.executable).parent / "qmq"


def value(key: str) -> str:
    found: str
    (found,) = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as a file, with the command that is installed here."""
    path = tmp_path / "qmq-console.service"
    path.write_text(UNIT.replace("/opt/qmq/bin/qmq", str(QMQ)))
    return path


def test_systemd_accepts_it(unit: Path) -> None:
    assert analyzed("verify", unit) == (0, "")


def test_it_exposes_little(unit: Path) -> None:
    """On systemd's scale from 0 (nothing) to 10."""
    code, shown = analyzed("security", "--offline=yes", "--threshold=20", unit)
    assert code == 0, shown
    (level,) = re.findall(r"Overall exposure level for qmq-console.service: ([\d.]+) OK", shown)
    assert float(level) <= 2


def test_its_limits_are_above_those_of_the_console() -> None:
    assert value("LimitCORE") == "0"
    assert int(value("LimitNOFILE")) >= 2 * MOST_CONNECTIONS
    assert int(value("TimeoutStopSec")) > STOP_SECONDS


def test_its_command_logs_json_and_gives_metrics(tmp_path: Path) -> None:
    program, *arguments = value("ExecStart").split()
    assert program == "/opt/qmq/bin/qmq"
    with (
        broker_process(tmp_path) as broker,
        qmq_process(*arguments, "--listen", "127.0.0.1:0", "--server", broker.url) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline().decode().rstrip("/\n").rpartition(":")[2])
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert (answer.status, b"qmq_console_snapshot_timestamp_seconds" in answer.read()) == (200, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert [line["message"] for line in lines if line["logger"] == "qmq.console"][-1] == "stopping"
