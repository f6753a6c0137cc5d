"""Make Markdown of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from qmq.bench.values import Goal, shown

#: The heading of the part of docs/BENCHMARKS.md.
HEADING: Final = "# History: Spark, HDFS, Parquet"

#: The goals on two cores, for 10 M messages of 200 B.
GOALS: Final[dict[tuple[str, str], Goal]] = {
    ("count by subject, first time", "time"): Goal(5, at_most=True),
    ("count by subject", "time"): Goal(5, at_most=True),
    ("sum of lengths, all columns", "bodies"): Goal(400),
    ("noop write, all columns", "bodies"): Goal(400),
    ("archive to a directory", "of the copy, synced"): Goal(0.8),
    ("archive to HDFS", "of hdfs dfs -put"): Goal(0.8),
    ("archive as Parquet", "time a GB"): Goal(22, at_most=True),
}


def render(found: Mapping[str, Any]) -> str:
    """Return the whole part, for one run as it was saved."""
    lines = [HEADING, "", *_about(found), "| | | median | least to most | goal | |", "|---|---|---|---|---|---|"]
    before = ""
    for number in found["numbers"]:
        what = number["measurement"] if number["measurement"] != before else ""
        before = number["measurement"]
        lines.append(f"| {what} | {_row(number)} |")
    return "\n".join(lines) + "\n"


def _about(found: Mapping[str, Any]) -> Iterator[str]:
    machine, amount = found["machine"], found["amount"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield (
        "Made by `make bench-history` from what it saved; not written by hand. See "
        "[bench/README.md](../bench/README.md#history) for how it is measured."
    )
    yield ""
    yield (
        f"{found['date'][:10]}, `{found['command']}`: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB, {machine['filesystem']}, Linux {machine['kernel']}; "
        f"{versions}; load before: {machine['load_average']:.1f}. {amount['messages']:,} messages with bodies of "
        f"{amount['body_bytes']} B of {amount['subjects']} subjects, {found['bytes'] / 1e9:.2f} GB of segments of "
        f"{amount['segment_bytes'] >> 20} MiB; rounds: {found['rounds']}; DataNodes: {found['datanodes']}."
    )
    yield ""


def _row(number: Mapping[str, Any]) -> str:
    unit = number["unit"]
    median = f"{shown(number['median'])} {unit}".rstrip()
    spread = f"{shown(number['least'])} to {shown(number['most'])}" if len(number["rounds"]) > 1 else ""
    cells = [number["what"], median, spread, "", ""]
    if number["goal"] is not None:
        cells[3:] = [str(Goal(**number["goal"])), "reached" if number["reached"] else "missed"]
    return " | ".join(cells)
