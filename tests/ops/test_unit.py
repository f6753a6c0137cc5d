"""ops/qmq.service: systemd accepts it, it is hardened, and what it allows is what a broker needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qmq.settings import load

OPS = Path(__file__).parents[2] / "ops"
UNIT = (OPS / "qmq.service").read_text("utf-8")
QMQ = Path(sys.executable).parent / "qmq"


def values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as a file, with the command that is installed here."""
    path = tmp_path / "qmq.service"
    path.write_text(UNIT.replace("/opt/qmq/bin/qmq", str(QMQ)))
    return path


def analyzed(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_systemd_accepts_it(unit: Path) -> None:
    assert analyzed("verify", unit) == (0, "")


def test_it_exposes_little(unit: Path) -> None:
    """On systemd's scale from 0 (nothing) to 10."""
    code, shown = analyzed("security", "--offline=yes", "--threshold=20", unit)
    assert code == 0, shown
    (level,) = re.findall(r"Overall exposure level for qmq.service: ([\d.]+) OK", shown)
    assert float(level) <= 2


def test_a_broker_may_call_what_it_calls() -> None:
    """A filter without mincore ends no broker, but makes each read go to a thread."""
    allowed, denied = set[str](), set[str]()
    for line in values("SystemCallFilter"):
        for name in line.removeprefix("~").split():
            (denied if line.startswith("~") else allowed).update(calls_of(name))
    needed = {"fdatasync", "fallocate", "io_getevents", "io_setup", "io_submit", "mincore", "pwritev", "renameat2"}
    assert needed <= allowed - denied


def calls_of(name: str) -> set[str]:
    """The system calls of a group of systemd's, or the one of that name."""
    if not name.startswith("@"):
        return {name}
    code, shown = analyzed("syscall-filter", name)
    assert code == 0, shown
    found = [line.strip() for line in shown.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]
    return set().union(*map(calls_of, found))


def test_its_command_and_its_settings_are_those_of_qmq() -> None:
    (command,) = values("ExecStart")
    program, *arguments = command.split()
    assert (program, arguments) == ("/opt/qmq/bin/qmq", ["serve", "--config", "/etc/qmq/qmq.toml"])
    settings = load(OPS / "qmq.toml")
    (directory,) = values("StateDirectory")
    assert settings.data_dir.parent == Path("/var/lib") / directory
    assert settings.log_format == "json"
    assert values("LimitCORE") == ["0"]
    (files,) = values("LimitNOFILE")
    assert int(files) >= settings.max_connections + 2_000
