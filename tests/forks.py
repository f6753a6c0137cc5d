"""Python processes that start in a tenth of the time: forks of one that has imported everything already.

They are processes of their own all the same, with arguments, environment, directory and pipes of their own. What is
left out is only Python's start and the imports.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from coverage import Coverage

_ROOT: Final = Path(__file__).parents[1]
_FORK_SERVER: Final = "import sys; from tests.forks import serve_forks; serve_forks(int(sys.argv[1]))"
_QMQ: Final = "from qmq.cli.main import cli; cli()"
#: What those imported before that are forked: a broker, and the load generators of the bench.
_IMPORTED: Final = (
    "uvloop",
    "qmq.cli.main",
    "qmq.cli.operate.serve",
    "qmq.net.client.client",
    "qmq.daemon.main",
    *(f"qmq.bench.{name}" for name in ("attacks", "checking", "raw", "receiving", "sending")),
)
_REQUEST_BYTES: Final = 1 << 17


class Fork:
    """A process that was forked: what a Popen is of one that was executed. Its pipes are not buffered."""

    def __init__(self, stdin: IO[Any] | None, stdout: IO[Any], report: int) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._report = report
        self.pid = int(self._line())

    def _has_report(self, timeout: float | None) -> bool:
        poller = select.poll()  # as select takes no descriptor above 1,023
        poller.register(self._report, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1_000))

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._has_report(0):
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            if not self._has_report(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As kill -9."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()

    def _ended(self) -> None:
        self.returncode = int(self._line())
        os.close(self._report)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            assert byte, "the process that forks has ended"
            line += byte
        return line


class Forks:
    """The process that forks; calling this starts `qmq` with arguments in another process.

    It is started when it is first needed, and ends at ``close`` or at the end of a ``with``.
    """

    def __init__(self) -> None:
        self._environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process that forks has no threads
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it. What it has forked goes on."""
        with self._lock:
            if self._socket is not None and self._server is not None:
                self._socket.close()
                self._server.wait()
            self._socket = self._server = None

    def __call__(self, arguments: list[str], stderr: IO[Any], /) -> Fork:
        """`qmq` with these *arguments*, whose stdout is a pipe of text."""
        return self.python(["-c", _QMQ, *arguments], stderr, text=True)

    def python(self, arguments: Sequence[str], stderr: IO[Any], *, text: bool = False, stdin: bool = False) -> Fork:
        """What ``python ARGUMENTS`` does, either ``-c CODE ...`` or ``-m MODULE ...``; a pipe for *stdin* if wanted."""
        out, its_out = os.pipe()
        report, its_report = os.pipe()
        its_in, into = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), None)
        what = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
        self._ask(json.dumps(what).encode(), [its_in, its_out, stderr.fileno(), its_report])
        for fd in (its_in, its_out, its_report):
            os.close(fd)
        written = None if into is None else open(into, "wb", buffering=0)  # noqa: SIM115  # as a Popen's
        read = open(out) if text else open(out, "rb", buffering=0)  # noqa: SIM115
        return Fork(written, read, report)

    def _ask(self, request: bytes, fds: list[int]) -> None:
        assert len(request) < _REQUEST_BYTES
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._server = subprocess.Popen(
                        [sys.executable, "-c", _FORK_SERVER, str(theirs.fileno())],
                        cwd=_ROOT,
                        env=self._environment,
                        pass_fds=[theirs.fileno()],
                    )
            socket.send_fds(self._socket, [request], fds)


#: The one of this process, for whoever wants a broker and not the start of Python. A test session closes it.
SHARED: Final = Forks()


def serve_forks(number: int) -> None:
    """Start a process for every request that comes over the socket with that file descriptor, until it is closed."""
    for name in _IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a broker's end are not waited for
    with socket.socket(fileno=number) as requests:
        while True:
            request, fds, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
            if not request:
                return
            if not os.fork():
                break
            for fd in fds:
                os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, report = fds
    if child := os.fork():
        _wait_for(child, standard, report)
    os.close(report)
    for fd, wanted in enumerate(standard):
        os.dup2(wanted, fd)
        os.close(wanted)
    _become(**json.loads(request))


def _wait_for(child: int, theirs: list[int], report: int) -> None:
    """Say what process it is, and later how it ended; then end."""
    os.write(report, b"%d\n" % child)
    for fd in theirs:
        os.close(fd)
    _, status = os.waitpid(child, 0)
    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(arguments: list[str], environment: Mapping[str, str], directory: str) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if "COVERAGE_PROCESS_CONFIG" not in environment and (counting := Coverage.current()) is not None:
        counting.stop()
    how, what, *others = arguments
    sys.argv = [how, *others]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
