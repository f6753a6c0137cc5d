"""Run servers as processes: started in sessions of their own, watched, and ended in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bench.peers.patience import undisturbed
from qmq.bench.values import BenchFailed

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_START_S: Final = 120.0
_STOP_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.02


class Memory(NamedTuple):
    """The bytes of a server's processes. ``own`` is RssAnon and shared anonymous memory, ``file`` what is mapped."""

    own: int
    file: int


def free_ports(count: int) -> list[int]:
    """Return ports of loopback on which nobody listened a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def answers(port: int) -> bool:
    """Return whether a server listens on this port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


class ProcessorTime(NamedTuple):
    """The seconds for which threads ran, and those for which they could run and waited for a processor."""

    ran_s: float
    waited_s: float


class Server:
    """A running broker: one process or several, and all their descendants.

    *target* is for its clients (see `peer.Target`), in plain types. Use it in a ``with`` block.
    """

    def __init__(self, name: str, directory: Path, target: Mapping[str, Any]) -> None:
        self.name = name
        self.directory = directory
        self.target = dict(target)
        #: Seconds from the start of its first process until it served.
        self.ready_after_s = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started: float | None = None
        self._log = directory / "server.out"
        directory.mkdir(parents=True, exist_ok=True)

    def run(self, command: Sequence[object], environment: Mapping[str, str] | None = None) -> None:
        """Start another process of it."""
        if self._started is None:
            self._started = time.perf_counter()
        try:
            with self._log.open("ab") as log, undisturbed():
                self._processes.append(
                    subprocess.Popen(
                        [str(part) for part in command],
                        cwd=self.directory,
                        env={**os.environ, **(environment or {})},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.end()
            raise

    def wait_until(self, serves: Callable[[], bool], timeout_s: float = _START_S) -> None:
        """Return when *serves* returns True. Raises BenchFailed if a process ends before, or the time is up."""
        assert self._started is not None
        try:
            while not serves():
                self._check(timeout_s)
                time.sleep(_LOOK_EVERY_S)
        except BaseException:
            self.end()
            raise
        self.ready_after_s = time.perf_counter() - self._started

    def _check(self, timeout_s: float) -> None:
        assert self._started is not None
        for process in self._processes:
            if process.poll() is not None:
                raise BenchFailed(f"{self.name} ended with {process.returncode}; {self.last_words()}")
        if time.perf_counter() - self._started > timeout_s:
            raise BenchFailed(f"{self.name} did not serve within {timeout_s:.0f} s; {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of its output, for errors."""
        words = self._log.read_text("utf-8", "replace").strip()[-800:]
        return f"its last words: {words}" if words else "it printed nothing"

    def pids(self) -> list[int]:
        """Return the ids of its processes and their descendants."""
        return sorted(descendants({process.pid for process in self._processes}))

    def memory(self) -> Memory:
        """Return the memory of all its processes."""
        own = file = 0
        for pid in self.pids():
            status = dict(_status(pid))
            own += status.get("RssAnon", 0) + status.get("RssShmem", 0)
            file += status.get("RssFile", 0)
        return Memory(own, file)

    def cpu_s(self) -> float:
        """Return the seconds of processor time of all its processes so far."""
        return sum(_cpu_ticks(pid) for pid in self.pids()) / _TICKS

    def processor_time(self) -> ProcessorTime:
        """Return how long the threads of all its processes ran and waited so far, as the scheduler counts it."""
        ran_ns = waited_ns = 0
        for pid in self.pids():
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    ran, waited, _ = map(int, path.read_text("ascii").split())
                    ran_ns += ran
                    waited_ns += waited
        return ProcessorTime(ran_ns / 1e9, waited_ns / 1e9)

    def end(self) -> None:
        """End all processes with SIGTERM, and kill those that do not end."""
        pids = self.pids()
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        deadline = time.monotonic() + _STOP_S
        while descendants(set(pids)) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def descendants(roots: set[int]) -> set[int]:
    """Return these processes and all their descendants that run."""
    parents = dict(_parents())
    found = {pid for pid in roots if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) and fields[0] != "Z":
            yield int(name), int(fields[1])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _cpu_ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _status(pid: int) -> Iterator[tuple[str, int]]:
    """Yield the sizes in /proc/PID/status, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in lines:
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            yield name, int(value.split()[0]) * 1024
