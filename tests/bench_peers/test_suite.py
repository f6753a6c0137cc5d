"""A run: a failure is reported and stops nothing, nothing hangs, and an interrupted run is continued."""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import suite as suites
from bench.peers.patience import at_most, undisturbed
from bench.peers.peer import Installed
from bench.peers.registry import chosen
from bench.peers.running import Amount, Row
from bench.peers.suite import Suite
from bench.peers.works import Work
from qmq.bench.values import BenchFailed
from qmq.errors import InvalidOption


class Fails:
    """A work that fails for a given peer with a given error, and counts the others."""

    def __init__(self, **faults: Exception) -> None:
        self.faults = faults
        self.done: list[tuple[str, str]] = []

    def __call__(self, running: Any) -> Iterator[Row]:
        self.done.append((running.peer.name, str(running.promise)))
        yield running.row("churn", running.peer.clients[0], "paced", "longest gap", float(len(self.done)), "ms")
        if running.peer.name in self.faults:
            raise self.faults[running.peer.name]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Fails:
    @contextmanager
    def running(peer: Any, promise: Any, *_: object) -> Iterator[Any]:
        def row(work: str, client: Any, way: str, what: str, value: float, unit: str) -> Row:
            return Row(work, peer.name, client.package, way, str(promise), what, value, unit)

        server = SimpleNamespace(cpu_s=lambda: 1.0, ready_after_s=0.5)
        memory = SimpleNamespace(own=1, file=2)
        yield SimpleNamespace(peer=peer, promise=promise, row=row, server=server, most_memory=memory)

    made = Fails()
    monkeypatch.setattr(suites, "running", running)
    monkeypatch.setitem(suites.WORKS, "churn", Work(made, both=False))
    return made


def suite(directory: Path, rounds: int = 1, amount: Amount = Amount()) -> Suite:  # noqa: B008 it never changes
    peers = chosen(["redis", "nats"])
    made = Suite(peers, ["churn"], rounds, amount, directory, directory, "run", most_s=5.0)
    made.installed = {peer.name: Installed("1.0", 1) for peer in peers}
    return made


def measure(one: Suite) -> list[str]:
    said: list[str] = []
    one.measure(said.append, lambda: None)
    return said


@pytest.mark.parametrize("fault", [BenchFailed("no"), OSError("no"), KeyError("no"), ValueError("no")])
def test_what_fails_is_told_of_and_the_others_go_on(tmp_path: Path, work: Fails, fault: Exception) -> None:
    work.faults["nats"] = fault
    one = suite(tmp_path)
    said = measure(one)
    assert [name for name, _ in work.done] == ["qmq", "nats", "redis"]
    (failure,) = one.failures
    assert (failure["peer"], failure["work"]) == ("nats", "churn")
    assert "no" in failure["why"]
    assert isinstance(fault, BenchFailed) or type(fault).__name__ in failure["why"]
    assert any(line.startswith("    failed: ") for line in said)
    assert {row.peer for _, row in one.rows if row.what == "start"} == {"qmq", "redis"}


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path: Path, work: Fails) -> None:
    work.faults["redis"] = BenchFailed("for now")
    first = suite(tmp_path)
    measure(first)
    found = json.loads(json.dumps(first.found()))
    work.faults.clear()
    work.done.clear()
    second = suite(tmp_path, rounds=2)
    second.resume(found)
    measure(second)
    # What failed is done again, and the second round.
    assert [name for name, _ in work.done] == ["redis", "nats", "redis", "qmq"]
    assert second.failures == []
    again = second.found()
    assert again["date"] == found["date"]
    gaps = {one["peer"]: one["rounds"] for one in again["numbers"] if one["what"] == "longest gap"}
    assert gaps == {"qmq": [1.0, 4.0], "nats": [2.0, 2.0], "redis": [1.0, 3.0]}


def test_a_run_of_other_amounts_is_not_gone_on_with(tmp_path: Path, work: Fails) -> None:
    found = json.loads(json.dumps(suite(tmp_path).found()))
    with pytest.raises(InvalidOption, match="the saved run moved other amounts"):
        suite(tmp_path, amount=Amount(seconds=1.0)).resume(found)


def test_a_run_is_not_gone_on_with_without_some_of_its_peers(tmp_path: Path, work: Fails) -> None:
    found = json.loads(json.dumps(suite(tmp_path).found()))
    fewer = suite(tmp_path)
    fewer.peers = fewer.peers[:2]
    with pytest.raises(InvalidOption, match="numbers of redis too"):
        fewer.resume(found)


def test_what_takes_too_long_is_ended_whatever_it_waits_for() -> None:
    with pytest.raises(BenchFailed, match="it took more than 0 s, and was ended"), at_most(0.01):
        select.select([], [], [])
    with at_most(60.0):
        """The alarm is off again behind it."""


def test_a_signal_waits_until_a_process_that_is_started_is_known() -> None:
    known = False
    with pytest.raises(BenchFailed), at_most(60.0):  # noqa: PT012 the signal is raised behind the inner block
        with undisturbed():
            signal.raise_signal(signal.SIGALRM)
            known = True
        select.select([], [], [], 60.0)
    assert known
