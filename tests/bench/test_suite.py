"""The suite: names, rounds, the report; and every measurement taken once, on next to nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from qmq.bench import backlog, context, latency, processes, resources, suite, throughput
from qmq.bench.context import Bench, rate
from qmq.bench.values import GOALS, BenchFailed, summarize
from qmq.errors import InvalidOption
from tests.bench.conftest import TINY


def test_names_are_chosen_in_the_order_of_the_suite() -> None:
    assert suite.chosen([], own_broker=True) == list(suite.MEASUREMENTS)
    assert suite.chosen(["pull", "ingest"], own_broker=True) == ["ingest", "pull"]
    without = suite.chosen([], own_broker=False)
    assert set(suite.MEASUREMENTS) - set(without) == {
        "waiting_pulls", "memory", "restart", "cold", "untrusted_clients", "backlog", "ready_subjects", "errors"
    }  # fmt: skip


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidOption, match="there is no measurement 'pul'; there are ingest, send_many"):
        suite.chosen(["pul"], own_broker=True)
    with pytest.raises(InvalidOption, match="restart inspects the broker and may kill it; leave --server out"):
        suite.chosen(["restart"], own_broker=False)


def measured(bench: Bench, *names: str) -> dict[tuple[str, str], float]:
    started: list[tuple[int, str]] = []
    values = list(suite.run(bench, names, 1, lambda number, name: started.append((number, name))))
    assert started == [(0, name) for name in names]
    summaries = summarize(values)
    found = {(summary.measurement, summary.what): summary.median for summary in summaries}
    assert all(value > 0 for (_, what), value in found.items() if what != "growth" and "cpu" not in what)
    report = suite.report(bench, summaries, "qmq bench", 1, "tiny")
    assert json.loads(json.dumps(report))["machine"]["cores"] >= 1
    return found


@pytest.mark.parametrize(
    "name", ["send_awaited", "send_one", "pull", "pull_batch", "async_for", "subjects", "both_ways"]
)
def test_measurements_on_next_to_nothing(bench: Bench, name: str) -> None:
    taken = {what for _, what in measured(bench, name)}
    goals = {what for measurement, what in GOALS if measurement == name}
    # The table of goals names numbers by hand: a wrong name would never be looked at.
    subjects = "2,000" if name == "subjects" else "100,000"
    assert {what.replace("100,000", subjects) for what in goals} <= taken | {"open files"}


def test_measurements_that_need_a_broker_of_their_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TINY, None, {"segment_bytes": "32MiB"})
    found = measured(bench, "memory", "restart", "backlog", "ready_subjects", "errors")
    assert {("backlog", what) for name, what in GOALS if name == "backlog"} <= found.keys()
    assert {("ready_subjects", what) for name, what in GOALS if name == "ready_subjects"} <= found.keys()
    assert {("errors", what) for name, what in GOALS if name == "errors"} <= found.keys()
    assert found["restart", "log"] > 0
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", [name for name in suite.MEASUREMENTS if name != "waiting_pulls"])
def test_every_measurement_checks_what_it_moves(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def run_twisted(parent: Path, *jobs: tuple[str, dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
        """Send every body one byte longer than it should be."""
        sends = ("sending.", "raw.ingest", "raw.send_plain")
        jobs = tuple(
            (job, {**options, "size": options["size"] + 1} if job.startswith(sends) else options)
            for job, options in jobs
        )
        return processes.run_together(parent, *jobs, **more)

    for module in (context, throughput, latency, backlog):
        monkeypatch.setattr(module, "run_together", run_twisted)
    if suite.MEASUREMENTS[name].own_broker:
        bench = Bench(tmp_path, TINY, None, {"segment_bytes": "32MiB"})
    with pytest.raises(BenchFailed, match="is not what was sent"):
        measured(bench, name)


@pytest.mark.parametrize(("found", "fits"), [(99, False), (100, True), (150, True), (151, False)])
def test_a_kill_must_cost_nothing_that_was_acknowledged(found: int, fits: bool) -> None:
    with contextlib.nullcontext() if fits else pytest.raises(BenchFailed, match=f"{found} messages are left"):
        resources.check_left(found, 100, 150)


def test_a_plain_loop_that_writes_something_else_is_no_yardstick(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run", lambda *_, **options: {**Bench.run(bench, *_, **options), "crc": 1})
    assert throughput.plain_loop(bench, 100, 2, write=False) > 0
    with pytest.raises(BenchFailed, match="the plain loop received other bytes"):
        throughput.plain_loop(bench, 100, 2, write=True)


def test_a_worker_that_took_no_time_measured_nothing() -> None:
    with pytest.raises(BenchFailed):
        rate({"messages": 5, "seconds": 0.0})


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path: Path) -> None:
    assert suite.filesystem_of(Path("/proc/self")) == "proc"
    assert suite.filesystem_of(tmp_path) not in ("", "unknown")
