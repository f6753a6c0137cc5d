"""All measurements by name, and a run of some of them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from qmq.bench import backlog, latency, resources, throughput
from qmq.bench.context import Bench, Measurement
from qmq.bench.values import Summary, Value
from qmq.errors import InvalidOption

MEASUREMENTS: Final[dict[str, Measurement]] = {
    "ingest": Measurement(throughput.ingest),
    "send_many": Measurement(throughput.send_many),
    "send_nowait": Measurement(throughput.send_nowait),
    "send_awaited": Measurement(throughput.send_awaited),
    "send_one": Measurement(latency.send_one),
    "flush_under_load": Measurement(latency.flush_under_load),
    "producers": Measurement(throughput.producers),
    "pull": Measurement(throughput.pull),
    "pull_batch": Measurement(throughput.pull_batch),
    "async_for": Measurement(throughput.async_for),
    "both_ways": Measurement(throughput.both_ways),
    "end_to_end": Measurement(latency.end_to_end),
    "subjects": Measurement(throughput.subjects),
    "waiting_pulls": Measurement(resources.waiting_pulls, own_broker=True),
    "memory": Measurement(resources.memory, own_broker=True),
    "backlog": Measurement(backlog.backlog, own_broker=True),
    "ready_subjects": Measurement(backlog.ready_subjects, own_broker=True),
    "errors": Measurement(backlog.errors, own_broker=True),
    "cold": Measurement(backlog.cold, own_broker=True),
    "untrusted_clients": Measurement(resources.untrusted_clients, own_broker=True),
    "restart": Measurement(resources.restart, own_broker=True),
}

_PACKAGES: Final = ("qmq", "numpy", "msgpack", "uvloop", "crc32c", "xxhash")


def chosen(only: Sequence[str], own_broker: bool) -> list[str]:
    """Return the measurements to take: without *only*, all. Raises InvalidOption for an unknown name."""
    for name in only:
        if name not in MEASUREMENTS:
            raise InvalidOption(f"there is no measurement {name!r}; there are {', '.join(MEASUREMENTS)}")
        if MEASUREMENTS[name].own_broker and not own_broker:
            raise InvalidOption(f"{name} inspects the broker and may kill it; leave --server out")
    return [
        name
        for name, measurement in MEASUREMENTS.items()
        if (name in only if only else own_broker or not measurement.own_broker)
    ]


def run(
    bench: Bench, names: Sequence[str], rounds: int, starting: Callable[[int, str], None]
) -> Iterator[tuple[str, Value]]:
    """Take the measurements *names* in rounds; *starting* gets (round, name) before each. Raises BenchFailed."""
    for number in range(rounds):
        for name in names:
            starting(number, name)
            for value in MEASUREMENTS[name].measure(bench):
                yield name, value


def report(bench: Bench, summaries: Sequence[Summary], command: str, rounds: int, size: str) -> dict[str, Any]:
    """Return the results and the parameters of the run in plain types."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "size": size,
        "rounds": rounds,
        "server": bench.server,
        "settings": {key: str(value) for key, value in bench.settings.items()},
        "machine": machine(bench.directory),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "results": [summary.as_json() for summary in summaries],
    }


def machine(directory: Path) -> dict[str, Any]:
    """Return a description of the machine."""
    free = os.statvfs(directory)
    return {
        "processor": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "filesystem": filesystem_of(directory),
        "load_average": os.getloadavg()[0],
        "free_bytes": free.f_bavail * free.f_frsize,
        "byte_order": sys.byteorder,
    }


def filesystem_of(directory: Path) -> str:
    """Return the kind of file system of *directory*, by the longest mount point above it."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    above = [(point, kind) for point, kind in mounts if directory.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _first_value(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
