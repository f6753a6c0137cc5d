"""ops/qmq-outbox.service: systemd accepts it, it is hardened, and its command is a relay."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from qmq.sql.relay import HOLD_S
from tests.broker_process import broker_process
from tests.cli.commands import qmq_process
from tests.ops.test_unit import OPS, QMQ, analyzed
from tests.sql.boxes import engine_with_tables
from tests.sql.servers import sqlite_database

UNIT = (OPS / "qmq-outbox.service").read_text("utf-8")


def value(key: str) -> str:
    found: str
    (found,) = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as a file, with the command that is installed here."""
    path = tmp_path / "qmq-outbox.service"
    path.write_text(UNIT.replace("/opt/qmq/bin/qmq", str(QMQ)))
    return path


def test_systemd_accepts_it(unit: Path) -> None:
    assert analyzed("verify", unit) == (0, "")


def test_it_exposes_little(unit: Path) -> None:
    """On systemd's scale from 0 (nothing) to 10."""
    code, shown = analyzed("security", "--offline=yes", "--threshold=20", unit)
    assert code == 0, shown
    (level,) = re.findall(r"Overall exposure level for qmq-outbox.service: ([\d.]+) OK", shown)
    assert float(level) <= 2


def test_a_stop_has_time_for_what_is_under_way() -> None:
    assert value("LimitCORE") == "0"
    assert int(value("TimeoutStopSec")) > 2 * HOLD_S


def test_its_command_is_a_relay(tmp_path: Path) -> None:
    program, *arguments = value("ExecStart").split()
    assert program == "/opt/qmq/bin/qmq"
    database = sqlite_database(tmp_path)
    engine_with_tables(database).dispose()
    with (
        broker_process(tmp_path / "data") as broker,
        qmq_process(*arguments, "--db", database.url, "--server", broker.url) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [line["message"] for line in lines if line["logger"] == "qmq.sql"][-2:] == ["stopping", "0 rows were sent"]
