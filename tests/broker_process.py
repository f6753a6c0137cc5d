"""Brokers for tests: one in this process, and one in a process of its own that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from qmq.daemon.main import RunningBroker
from qmq.settings import Settings
from qmq.storage.disk.disk import Disk
from tests.certificates import active
from tests.forks import SHARED

_TIMEOUT_S = 60


class Process(Protocol):
    """What is needed of a process; a Popen is one."""

    pid: int

    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...


class Starter(Protocol):
    """Starts `qmq` with arguments in a process of its own."""

    def __call__(self, arguments: list[str], stderr: IO[str], /) -> Process: ...


def executed(arguments: list[str], stderr: IO[str]) -> Process:
    """As from a shell: Python starts anew."""
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


def tls_settings() -> dict[str, str]:
    """The settings by which a broker takes connections by TLS; none unless tests run over TLS."""
    files = active()
    return {} if files is None else files.settings


@asynccontextmanager
async def running(path: Path, disk: Disk | None = None, **settings: Any) -> AsyncIterator[RunningBroker]:
    """A broker on the data directory *path* in this process, on a free port; *settings* are keys of ``qmq serve``."""
    all_settings = {"data_dir": path, "listen": "127.0.0.1:0", **tls_settings(), **settings}
    broker = RunningBroker(Settings.model_validate(all_settings), disk)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


@asynccontextmanager
async def running_broker(path: Path, **settings: Any) -> AsyncIterator[str]:
    """As ``running``; gives the url."""
    async with running(path, **settings) as broker:
        yield broker.url


class BrokerProcess:
    """`qmq serve` on *path* in a process of its own. It keeps its port over ``start``, ``kill`` and ``start`` again.

    By default it is forked from one that has imported it all before; the *starter* ``executed`` spares it nothing.
    """

    def __init__(self, path: Path, starter: Starter = SHARED, **settings: Any) -> None:
        self.path = path
        self._settings = {**tls_settings(), **settings}
        self._starter = starter
        self._port = 0
        self._process: Process | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by ``close``
        self.ready_line = ""

    @property
    def url(self) -> str:
        return f"{'qmqs' if 'tls_cert' in self._settings else 'qmq'}://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Start it, and do not wait for it."""
        arguments = ["serve", "--data-dir", str(self.path), "--listen", f"127.0.0.1:{self._port}"]
        for key, value in self._settings.items():
            arguments += ["--set", f"{key}={value}"]
        self._process = self._starter(arguments, self._log)

    def start(self) -> str:
        """Start it, wait until it serves, return its url."""
        self.spawn()
        assert self._process is not None
        assert self._process.stdout is not None
        self.ready_line = self._process.stdout.readline()
        assert self.ready_line.startswith("ready on "), f"the broker did not start: {self.log()}"
        self._port = int(self.ready_line.split(",")[0].rpartition(":")[2])
        return self.url

    def kill(self) -> int:
        """kill -9, and wait until it is gone; returns its exit code: -9, unless it had ended before."""
        return self._end(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, and do not wait for what comes of it."""
        os.kill(self.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it cleanly; returns its exit code."""
        return self._end(number)

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        if process.poll() is None:
            os.kill(process.pid, number)
        code = process.wait(_TIMEOUT_S)
        process.stdout.close()
        self._process = None
        return code

    def log(self) -> str:
        """What it has written to stderr, over all its starts."""
        # Its place in the file is the process's too: to move it would have that write over what it wrote.
        number = self._log.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode()

    def logs(self, text: str) -> bool:
        """Whether *text* stands in ``log``, or comes soon: a thread writes it, maybe later than what it tells of."""
        ends = time.monotonic() + _TIMEOUT_S
        while text not in self.log():
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Kill it if it runs, and let go of what is kept of it."""
        if self._process is not None:
            self.kill()
        self._log.close()


@contextmanager
def broker_process(path: Path, **settings: Any) -> Iterator[BrokerProcess]:
    """A started BrokerProcess, gone at the end."""
    broker = BrokerProcess(path, **settings)
    try:
        broker.start()
        yield broker
    finally:
        broker.close()
