"""Brokers that start in a tenth of the time: forks of a process that has imported everything already.

They are `qmq serve` in processes of their own all the same; what is left out is only Python's start and the imports.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

_ROOT: Final = Path(__file__).parents[2]
_FORK_SERVER: Final = "import sys; from tests.faults.forks import serve_forks; serve_forks(int(sys.argv[1]))"


class Fork:
    """A process that was forked: what a Popen is of one that was executed."""

    def __init__(self, stdout: IO[str], report: int) -> None:
        self.stdout = stdout
        self._report = report
        self._code: int | None = None
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None and select.select([self._report], [], [], 0)[0]:
            self._ended()
        return self._code

    def wait(self, timeout: float) -> int:
        """Wait for its end; its exit code."""
        if self._code is None:
            assert select.select([self._report], [], [], timeout)[0], f"process {self.pid} runs after {timeout} s"
            self._ended()
        assert self._code is not None
        return self._code

    def _ended(self) -> None:
        self._code = int(self._line())
        os.close(self._report)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            assert byte, "the process that forks has ended"
            line += byte
        return line


class Forks:
    """The process that forks; calling this starts `qmq` with arguments in another process. For use in ``with``."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _FORK_SERVER, str(theirs.fileno())],
                cwd=_ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process that forks has no threads
                pass_fds=[theirs.fileno()],
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        self._server.wait()

    def __call__(self, arguments: list[str], stderr: IO[str], /) -> Fork:
        out, its_out = os.pipe()
        report, its_report = os.pipe()
        socket.send_fds(self._socket, [json.dumps(arguments).encode()], [its_out, stderr.fileno(), its_report])
        os.close(its_out)
        os.close(its_report)
        return Fork(os.fdopen(out), report)


def serve_forks(number: int) -> None:
    """Start a process for every request that comes over the socket with that file descriptor, until it is closed."""
    import uvloop  # noqa: F401  # imported once, for all forks

    import qmq.wiring  # noqa: F401
    from qmq.cli.main import cli

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a broker's end are not waited for
    with socket.socket(fileno=number) as requests:
        while True:
            arguments, fds, _, _ = socket.recv_fds(requests, 1 << 16, 3)
            if not arguments:
                return
            if not os.fork():
                break
            for fd in fds:
                os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, error, report = fds
    if child := os.fork():
        os.write(report, b"%d\n" % child)
        os.close(out)
        _, status = os.waitpid(child, 0)
        os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(report)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.close(out)
    os.close(error)
    cli(json.loads(arguments))
