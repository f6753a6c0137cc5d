"""Samples of a soak's processes, files and latencies, as they are written down every few seconds."""

from __future__ import annotations

import math
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.soak.ledger import column

#: What a process counts, in the order of its meter's file.
COUNTED: Final = (
    "sends begun",
    "sends acknowledged",
    "sends failed",
    "sends held back",
    "got",
    "got late",
    "handled",
    "confirmed",
    "nacked",
    "raised",
    "asked for a retry",
    "rejected",
    "released",
    "fenced",
    "cancelled handlers",
)
_AT: Final = {name: number for number, name in enumerate(COUNTED)}
_STEPS: Final = 8  # buckets for each doubling
_BUCKETS: Final = 32 * _STEPS
_FIRST_BUCKET: Final = 64
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_KIB: Final = 1024


class Meter:
    """Counts and latencies of one process and those that follow it under its name, in a file that others read."""

    def __init__(self, directory: Path, name: str) -> None:
        self._cells = column(directory, f"meter-{name}", np.int64, _FIRST_BUCKET + _BUCKETS)

    def count(self, what: str, number: int = 1) -> None:
        """So many more of *what*."""
        self._cells[_AT[what]] += number

    def took(self, microseconds: float) -> None:
        """One more latency."""
        self._cells[_FIRST_BUCKET + min(int(math.log2(max(microseconds, 1.0)) * _STEPS), _BUCKETS - 1)] += 1

    def counts(self) -> Counter[str]:
        """All counts, since the soak began."""
        return Counter(dict(zip(COUNTED, self._cells.tolist(), strict=False)))

    def latencies(self) -> NDArray[np.int64]:
        """How many latencies there were of each bucket."""
        return self._cells[_FIRST_BUCKET:].copy()


def percentile_ms(latencies: NDArray[np.int64], percent: float) -> float | None:
    """The latency, in milliseconds, that so many percent do not exceed, within 9 %; None where there are none."""
    total = int(latencies.sum())
    if not total:
        return None
    bucket = int(np.searchsorted(np.cumsum(latencies), total * percent / 100))
    return round(float(2 ** ((bucket + 1) / _STEPS)) / 1_000, 3)


class Process(NamedTuple):
    """What the system says of a process: memory in bytes, CPU in seconds."""

    pid: int
    rss_anon: int
    peak_rss: int
    files: int
    threads: int
    cpu: float


def process(pid: int) -> Process | None:
    """One sample of it; None when it has gone."""
    proc = Path(f"/proc/{pid}")
    with suppress(OSError, KeyError, IndexError, ValueError):
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        return Process(
            pid,
            int(status["RssAnon"].split()[0]) * _KIB,
            int(status["VmHWM"].split()[0]) * _KIB,
            len(os.listdir(proc / "fd")),
            int(status["Threads"]),
            (int(fields[11]) + int(fields[12])) / _TICKS,
        )
    return None


class Disk(NamedTuple):
    """Files and bytes in a directory by kind, and the names of its segments."""

    files: Counter[str]
    bytes: Counter[str]
    segments: frozenset[str]


def disk(directory: Path) -> Disk:
    """Count a broker's data directory, with blocks that files really have; what goes meanwhile is left out."""
    files, sizes, segments = Counter[str](), Counter[str](), set[str]()
    for where, _, names in os.walk(directory):
        inside = Path(where).relative_to(directory)
        for name in names:
            kind = _kind(inside, name)
            with suppress(OSError):
                sizes[kind] += os.stat(os.path.join(where, name)).st_blocks * 512
                files[kind] += 1
            if name.endswith(".messages") and kind == "log":
                segments.add(f"{inside}/{name}")
    return Disk(files, sizes, frozenset(segments))


def _kind(inside: Path, name: str) -> str:
    if not inside.parts:
        return "checkpoint" if name.startswith("checkpoint-") else "other"
    return "log" if inside.parts[0].startswith("log-") else inside.parts[0]


def machine_load() -> float:
    """How busy the whole machine is: the work of others shows in latencies."""
    return round(os.getloadavg()[0], 2)
