"""``qmq top`` on a terminal of its own, with a real broker."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run

SOON = 60
#: What a terminal is sent when the other screen begins and ends, and when the cursor is shown.
BEGIN, END, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("top")) as broker:
        with qmq.connect_sync(broker.url) as client:
            for group in ("billing", "mails"):
                with client.subscribe("shop.", group=group):
                    pass
            client.send_many("shop.a", [b"x"] * 7)
        yield broker


class Terminal:
    """A terminal on which a command runs."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self._mine, self.its = pty.openpty()
        self.shown = b""
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.its)
        command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", *arguments]
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=self.its, stdout=self.its, stderr=self.its, env={**known, "TERM": "xterm-256color"}
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, *texts: bytes) -> bytes:
        """Read until all texts were shown; return what was shown since the last call."""
        end, found = time.monotonic() + SOON, b""
        while not all(text in found for text in texts):
            assert select.select([self._mine], [], [], max(end - time.monotonic(), 0))[0], found
            found += os.read(self._mine, 65_536)
        self.shown += found
        return found

    def type(self, keys: bytes) -> None:
        os.write(self._mine, keys)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        while self.process.poll() is None:
            if select.select([self._mine], [], [], 0.05)[0]:
                self.shown += os.read(self._mine, 65_536)
        while select.select([self._mine], [], [], 0)[0]:
            self.shown += os.read(self._mine, 65_536)
        return self.process.wait()

    def is_as_it_was(self) -> bool:
        """Return whether the other screen has ended, the cursor is shown, and keys are shown as before."""
        ended = self.shown.rfind(END) > self.shown.rfind(BEGIN) >= 0 and CURSOR in self.shown
        return ended and termios.tcgetattr(self.its) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._mine)
        os.close(self.its)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    shown = Terminal(*arguments)
    try:
        yield shown
    finally:
        shown.close()


def test_keys_sort_filter_pause_and_quit(broker: BrokerProcess) -> None:
    with terminal("top", "--server", broker.url) as shown:
        shown.until(BEGIN, b"billing", b"mails", b"no consumer is there", b"1-2 of 2")
        shown.type(b"/mai")
        shown.until(b"filter: ", b"mai")
        shown.type(b"\r")
        shown.until(b"1-1 of 1")
        shown.type(b"\x1b")  # alone
        shown.until(b"1-2 of 2")
        shown.type(b"p")
        shown.until(b"PAUSED")
        shown.type(b"?")
        shown.until(b"choose the column to sort by")
        shown.type(b"xq")
        assert shown.end() == 0
        assert shown.is_as_it_was()


def test_it_follows_the_size_of_the_terminal(broker: BrokerProcess) -> None:
    with terminal("top", "--server", broker.url) as shown:
        assert b"WHY" not in shown.until(b"1-2 of 2")
        shown.resize(200, 30)
        shown.process.send_signal(signal.SIGWINCH)
        shown.until(b"WHY")
        shown.type(b"q")
        assert shown.end() == 0


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(broker: BrokerProcess, how: signal.Signals, code: int) -> None:
    with terminal("top", "--server", broker.url) as shown:
        shown.until(b"1-2 of 2")
        shown.process.send_signal(how)
        assert shown.end() == code
        assert shown.is_as_it_was()
        assert b"Traceback" not in shown.shown


def test_a_stop_gives_the_terminal_back_until_it_goes_on(broker: BrokerProcess) -> None:
    with terminal("top", "--server", broker.url) as shown:
        shown.until(b"1-2 of 2")
        shown.process.send_signal(signal.SIGTSTP)
        shown.until(END)
        os.waitid(os.P_PID, shown.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert termios.tcgetattr(shown.its) == shown.before
        shown.process.send_signal(signal.SIGCONT)
        shown.until(BEGIN, b"1-2 of 2")
        shown.type(b"q")
        assert shown.end() == 0


def test_a_broker_that_goes_is_named_and_comes_back(tmp_path: Path, broker: BrokerProcess) -> None:
    with broker_process(tmp_path / "one") as other:
        url = f"{broker.url},{other.url.removeprefix('qmq://')}"
        shown = Terminal("top", "--server", url)
        shown.until(b"2 brokers")
        other.kill()
        shown.until(b"AWAY " + other.url.removeprefix("qmq://").encode(), b"1 of 2 brokers", b"billing")
        other.start()
        shown.until(b", 2 groups", b" started ")
        shown.type(b"q")
        assert shown.end() == 0
        shown.close()


def test_without_a_terminal_it_shows_everything_once(broker: BrokerProcess) -> None:
    done = run("top", "--interval", "0.1s", server=broker.url)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "1 broker, 2 groups, 2 with messages" in lines[0]
    (billing,) = [line for line in lines if line.startswith("billing")]
    assert billing.split()[1] == "7"
    assert billing.endswith("no consumer is there")
    assert "\x1b" not in done.stdout


def test_a_broker_that_does_not_answer_is_an_error() -> None:
    done = run("top", "--timeout", "1s", server="qmq://127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("qmq: ")
