"""One page of small panels that shows a soak: memory, files, rates, latencies, disk; kills are vertical lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

Row = Mapping[str, Any]
Line = list[float | None]
_MIB: Final = 1 << 20
_COLUMNS: Final = 3
_BROKERS: Final = ("broker-1", "broker-2")


class Panel(NamedTuple):
    """Lines by name; None is a gap."""

    title: str
    lines: dict[str, Line]
    is_log: bool = False


def draw(path: Path) -> bool:
    """Draw `samples.jsonl` of *path* as `soak.png` beside it; False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed (make soak installs it)")
        return False
    mpl.use("agg")
    from matplotlib import pyplot

    samples = path / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    if not rows:
        print("no picture: there are no samples")
        return False
    shown = panels(rows)
    figure, axes = pyplot.subplots(
        -(-len(shown) // _COLUMNS), _COLUMNS, figsize=(18, 3.4 * -(-len(shown) // _COLUMNS)), squeeze=False,
        layout="constrained", sharex=True,
    )  # fmt: skip
    minutes = [row["at"] / 60 for row in rows]
    kills = [at / 60 for row in rows for at in row["kills"]]
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (title, lines, is_log) in zip(axes.flat, shown, strict=False):
        for name, values in lines.items():
            axis.plot(minutes, values, label=name, linewidth=1.2)
        for kill in kills:
            axis.axvline(kill, color="#dc2626", linewidth=0.6, alpha=0.6)
        axis.set_title(title, fontsize=10, loc="left")
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        if is_log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, axis.get_ylim()[1] * 1.2)  # room for the legend
        if len(lines) > 1:
            axis.legend(fontsize=7, ncols=2, frameon=False)
    figure.supxlabel("minutes; red: kill -9 of a broker", fontsize=9)
    figure.savefig(path / "soak.png", dpi=80)
    pyplot.close(figure)
    return True


def panels(rows: Sequence[Row]) -> list[Panel]:
    """What the picture shows of these samples."""
    names = sorted({name for row in rows for name in row["processes"]})
    brokers = [name for name in names if name in _BROKERS]
    clients = [name for name in names if name not in _BROKERS]
    steady = [name for name in clients if not name.startswith("audit")]
    groups = sorted({name for row in rows for name in row["groups"]})
    files = {f"{name} {what}": _seen(rows, name, what) for name in brokers for what in ("files", "threads")}
    busy = {name: _rates(rows, _cpu(rows, [name])) for name in brokers}
    counted = {"sent": "sends acknowledged", "handed out": "got", "handled": "handled"}
    found = [
        Panel("brokers: own memory (RssAnon), MiB", {name: _seen(rows, name, "rss_anon", _MIB) for name in brokers}),
        Panel("clients: own memory (RssAnon), MiB", {name: _seen(rows, name, "rss_anon", _MIB) for name in steady}),
        Panel("brokers: open files and threads", files),
        Panel("CPU, processors", {**busy, "clients": _rates(rows, _cpu(rows, clients))}),
        Panel("messages a second", {what: _rates(rows, _counted(rows, name)) for what, name in counted.items()}),
        Panel("load of the whole machine", {"load": [row["load"] for row in rows]}),
        Panel("sends, ms", _latencies(rows, "send"), is_log=True),
        Panel("end to end, ms", _latencies(rows, "end to end"), is_log=True),
        Panel("not handled yet, by group", {
            name: _of_group(rows, name, ("ready", "in_flight", "in_retry")) for name in groups
        }),
        Panel("dead letters, by group", {name: _of_group(rows, name, ("dead",)) for name in groups}),
    ]  # fmt: skip
    for broker in brokers:
        found.append(Panel(f"{broker}: disk, MiB", _on_disk(rows, broker, "bytes", _MIB)))
        found.append(Panel(f"{broker}: files on disk", _on_disk(rows, broker, "files", 1)))
    return found


def _seen(rows: Sequence[Row], name: str, what: str, unit: float = 1) -> Line:
    """Of a process; None while it does not run."""
    return [row["processes"][name][what] / unit if name in row["processes"] else None for row in rows]


def _of_group(rows: Sequence[Row], name: str, what: Sequence[str]) -> Line:
    return [sum(row["groups"][name][one] for one in what) if name in row["groups"] else None for row in rows]


def _on_disk(rows: Sequence[Row], broker: str, what: str, unit: float) -> dict[str, Line]:
    kinds = sorted({kind for row in rows for kind, number in row["disk"][broker][what].items() if number})
    return {kind: [row["disk"][broker][what].get(kind, 0) / unit for row in rows] for kind in kinds}


def _cpu(rows: Sequence[Row], names: Sequence[str]) -> list[dict[int, float]]:
    """Seconds so far of each process that runs, by pid."""
    return [
        {seen["pid"]: seen["cpu"] for name, seen in row["processes"].items() if name in names} for row in rows
    ]  # fmt: skip


def _counted(rows: Sequence[Row], what: str) -> list[dict[int, float]]:
    return [{0: float(sum(counts.get(what, 0) for counts in row["counts"].values()))} for row in rows]


def _rates(rows: Sequence[Row], counts: Sequence[Mapping[int, float]]) -> Line:
    """By how much counts grew each second, of what was there at both ends; None where nothing was."""
    found: Line = [None]
    for (before, old), (row, new) in pairwise(zip(rows, counts, strict=True)):
        both = old.keys() & new.keys()
        grown = sum(new[one] - old[one] for one in both) / max(row["at"] - before["at"], 0.001)
        found.append(grown if both else None)
    return found


def _latencies(rows: Sequence[Row], what: str) -> dict[str, Line]:
    return {percent: [row["latency"][what][percent] for row in rows] for percent in ("p50", "p99")}


if __name__ == "__main__":
    sys.exit(not draw(Path(sys.argv[1])))
