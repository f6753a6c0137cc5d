"""The parameters of every measurement: how much to send, where, and the broker."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from qmq.bench.processes import BrokerProcess, broker_in, run_together
from qmq.bench.values import BenchFailed, Value

KIB: Final = 1024
#: Body sizes with their names.
SIZES: Final = {100: "100 B", KIB: "1 KiB"}
DURABILITIES: Final = ("append", "flush")


class Size(NamedTuple):
    """How much a round sends: ``messages`` of 100 B in bulk, and times in seconds."""

    messages: int
    singles: int
    seconds: float
    subjects: int
    restart_bytes: int
    memory_bytes: int
    backlog: int
    errors: int

    def bulk(self, body_bytes: int) -> int:
        """Return how many messages of a body size take about as long as ``messages`` of 100 B."""
        return self.messages if body_bytes <= 100 else self.messages // 4


SIZES_OF_RUNS: Final[dict[str, Size]] = {
    "quick": Size(2_000_000, 3_000, 3.0, 100_000, 1 << 30, 1 << 30, 10_000_000, 20_000),
    "full": Size(8_000_000, 20_000, 20.0, 100_000, 10 << 30, 4 << 30, 100_000_000, 1_000_000),
}


class MeasuredBroker(NamedTuple):
    """The broker to measure; ``process`` is None if the bench did not start it."""

    url: str
    process: BrokerProcess | None


class Bench:
    """One run of the bench. Its files go below *directory*; without *server* each measurement has a broker of its
    own.
    """

    def __init__(self, directory: Path, size: Size, server: str | None, settings: Mapping[str, object]) -> None:
        self.directory = directory
        self.size = size
        self.server = server
        self.settings = dict(settings)

    @contextlib.contextmanager
    def target(self) -> Iterator[MeasuredBroker]:
        """Yield a broker to measure."""
        if self.server is not None:
            yield MeasuredBroker(self.server, None)
            return
        with self.broker() as broker:
            yield MeasuredBroker(broker.url, broker)

    @contextlib.contextmanager
    def broker(self) -> Iterator[BrokerProcess]:
        """Yield a broker that the measurement may inspect and kill."""
        with broker_in(self.directory, self.settings) as broker:
            yield broker

    def prefix(self) -> str:
        """Return a prefix that nothing was sent to yet."""
        return f"bench.{secrets.token_hex(5)}."

    def run(self, job: str, writes_bytes: int = 0, **options: object) -> dict[str, Any]:
        """Run one worker; *writes_bytes* as in `run_together`."""
        return run_together(self.directory, (job, options), writes_bytes=writes_bytes)[0]

    def fill(self, url: str, subject: str, size: int, messages: int) -> None:
        """Send that many messages, 1,000 a batch."""
        self.run("raw.ingest", url=url, subject=subject, size=size, count=1_000, batches=messages // 1_000, flush=False)

    def check_content(self, url: str, subject: str, size: int, messages: int, count: int = 1_000) -> None:
        """Read back everything that a measurement sent, and compare every body: see `checking.cycles`. Raises
        BenchFailed.
        """
        self.run("checking.cycles", url=url, subject=subject, size=size, count=count, messages=messages)


class Measurement(NamedTuple):
    """A measurement. ``own_broker``: it inspects the broker, so it cannot run with --server."""

    measure: Callable[[Bench], Iterator[Value]]
    own_broker: bool = False


def rate(result: Mapping[str, Any]) -> float:
    """Return the messages a second of a worker's result."""
    if not result["seconds"]:
        raise BenchFailed("a worker took no time")
    return float(result["messages"] / result["seconds"])
