"""Start the processes of the bench, brokers and workers, and end them in any case."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, Self

from qmq.bench.values import BenchFailed

#: A process that is silent for longer than this hangs.
TIMEOUT_S: Final = 600.0
_STOP_S: Final = 20.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def start_python(arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Run Python with these arguments, with pipes to its stdin and stdout."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=errors, bufsize=0)


class Child:
    """A Python process that prints lines on stdout; its stderr goes to a file that errors quote."""

    def __init__(self, name: str, arguments: list[str], errors: Path) -> None:
        self.name = name
        self._errors = errors
        with errors.open("wb") as sink:
            self._process = start_python(arguments, sink)
        self._line = b""

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def read_line(self, timeout_s: float = TIMEOUT_S) -> str:
        """Return the next line. Raises BenchFailed if the process ends first, or is silent for too long."""
        out = self._process.stdout
        assert out is not None
        deadline = time.monotonic() + timeout_s
        poller = select.poll()  # as select takes no descriptor above 1,023
        poller.register(out, select.POLLIN)
        while b"\n" not in self._line:
            if not poller.poll(max(deadline - time.monotonic(), 0) * 1_000):
                raise BenchFailed(f"{self.name} said nothing for {timeout_s:.0f} s; {self._last_words()}")
            read = os.read(out.fileno(), 1 << 16)
            if not read:
                raise BenchFailed(f"{self.name} ended with {self._process.wait()}; {self._last_words()}")
            self._line += read
        line, _, self._line = self._line.partition(b"\n")
        return line.decode()

    def write_line(self, line: str) -> None:
        """Write *line* to its stdin."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise BenchFailed(f"{self.name} ended early; {self._last_words()}") from None

    def kill(self) -> None:
        """Kill it, as kill -9 does, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End it with SIGTERM, and kill it if it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _last_words(self) -> str:
        words = self._errors.read_text("utf-8", "replace").strip()[-600:]
        return f"its last words: {words}" if words else "it printed no error"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# ---------------------------------------------------------------------------------------------------------------------
# Brokers


class BrokerProcess(Child):
    """A broker on a directory of its own, ready to serve."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        assignments = {"listen": "127.0.0.1:0", "log_level": "warning", **settings, "data_dir": directory}
        arguments = [part for key, value in assignments.items() for part in ("--set", f"{key}={value}")]
        started = time.perf_counter()
        super().__init__(
            "the broker",
            ["-c", "from qmq.cli.main import cli; cli()", "serve", *arguments],
            directory.with_suffix(".errors"),
        )
        try:
            ready = self.read_line()
        except BenchFailed:
            self.end()
            raise
        #: Seconds from the start of the process to the line that it prints when it is ready.
        self.ready_after_s = time.perf_counter() - started
        self.url = ready.removeprefix("ready on ").partition(",")[0]
        self.directory = directory

    def anonymous_bytes(self) -> int:
        """Return RssAnon: its memory without what is mapped from files."""
        for line in Path(f"/proc/{self.pid}/status").read_text("ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise BenchFailed("this kernel has no RssAnon in /proc/PID/status")

    def cpu_s(self) -> float:
        """Return the seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def open_files(self) -> int:
        """Return how many files and sockets it has open, maps included."""
        maps = Path(f"/proc/{self.pid}/maps").read_text("utf-8", "replace")
        mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if f" {self.directory}" in line}
        return len(os.listdir(f"/proc/{self.pid}/fd")) + len(mapped)


@contextmanager
def broker_in(parent: Path, settings: Mapping[str, object]) -> Iterator[BrokerProcess]:
    """Yield a broker on a new directory below *parent*; the directory is deleted at the end."""
    directory = parent / f"broker-{time.monotonic_ns():x}"
    try:
        with BrokerProcess(directory, settings) as broker:
            yield broker
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Workers


class LoadWorker(Child):
    """A load generator, see qmq.bench.worker. It is prepared when the constructor returns, and starts with ``go``."""

    def __init__(self, parent: Path, job: str, options: Mapping[str, object]) -> None:
        super().__init__(
            f"the worker {job}",
            ["-m", "qmq.bench.worker", job, json.dumps(options)],
            parent / f"worker-{time.monotonic_ns():x}.errors",
        )
        try:
            #: Its values for the parent from before it starts.
            self.prepared: dict[str, Any] = json.loads(self.read_line())
        except BenchFailed:
            self.end()
            raise

    def go(self) -> None:
        """Start it, or let it pass its next gate."""
        self.write_line("go")

    def result(self) -> dict[str, Any]:
        """Wait for its result, and return it."""
        found: dict[str, Any] = json.loads(self.read_line())
        return found


def run_together(parent: Path, *jobs: tuple[str, Mapping[str, object]], writes_bytes: int = 0) -> list[dict[str, Any]]:
    """Prepare workers one after another, start them together, and return their results.

    *writes_bytes* is about what they will write: see `warm_memory`.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(LoadWorker(parent, job, options)) for job, options in jobs]
        warm_memory(parent, writes_bytes)
        for worker in workers:
            worker.go()
        return [worker.result() for worker in workers]


def warm_memory(parent: Path, size: int) -> None:
    """Make *size* bytes of page cache free that were just used, by writing a file and deleting it.

    On a virtual machine that returns unused memory to its host, the first touch of a page costs more than all other
    work on it: a broker that wrote 1 GiB of cold pages was measured at a third of its speed.
    """
    if not size:
        return
    path = parent / "warm"
    chunk = bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-size // len(chunk))):
            file.write(chunk)
    path.unlink()
