"""tests/forks.py: a fork has what a process of its own has."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.forks import SHARED, Fork

WHERE = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['QMQ_TEST_WORD'], os.getpid(), flush=True); "


def python(*arguments: str) -> Fork:
    with tempfile.TemporaryFile() as stderr:
        return SHARED.python(arguments, stderr, stdin=True)


def test_arguments_directory_and_environment_are_those_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QMQ_TEST_WORD", "now")
    with python("-c", WHERE + "print(input())", "one", "two") as fork:
        assert fork.stdin is not None
        fork.stdin.write(b"a line\n")
        assert fork.wait(60) == 0
        said = fork.stdout.read().decode().splitlines()
    assert said == [f"['one', 'two'] {tmp_path} now {fork.pid}", "a line"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("-c", "raise SystemExit(3)"), 3), (("-c", "1 / 0"), 1), (("-m", "qmq.bench.worker", "raw.sink", "{}"), 1)],
)
def test_it_ends_as_python_does(arguments: tuple[str, ...], code: int) -> None:
    with python(*arguments) as fork:
        assert fork.wait(60) == code


def test_a_signal_ends_it() -> None:
    with python("-c", "input()") as fork:
        assert fork.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
    assert fork.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(fork.pid, 0)
