"""One broker for the workers' tests, and a gate for workers in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from qmq.bench import processes
from qmq.bench.context import Bench, Size
from qmq.bench.processes import BrokerProcess, broker_in
from tests.forks import SHARED, Fork

TINY = Size(
    messages=4_000,
    singles=20,
    seconds=0.05,
    subjects=2_000,
    restart_bytes=1 << 20,
    memory_bytes=1 << 20,
    backlog=20_000,
    errors=500,
)


def no_gate(**_: object) -> None:
    """Do not wait."""


def start_fork(arguments: Sequence[str], errors: IO[bytes]) -> Fork:
    """Start a fork instead of a new Python."""
    return SHARED.python(arguments, errors, stdin=True)


@pytest.fixture(scope="package", autouse=True)
def forked() -> Iterator[None]:
    """Fork brokers and workers, since there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_python", start_fork)
        yield


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_in(tmp_path_factory.mktemp("bench"), {}) as process:
        yield process


@pytest.fixture
def bench(tmp_path: Path, broker: BrokerProcess) -> Bench:
    """Return a tiny run against the shared broker."""
    return Bench(tmp_path, TINY, broker.url, {})
