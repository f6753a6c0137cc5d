"""One page of small panels that shows a soak: memory, files, rates, latencies, disk; kills are vertical lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

Row = Mapping[str, Any]
_MIB: Final = 1 << 20
_COLUMNS: Final = 3
_BROKERS: Final = ("broker-1", "broker-2")


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


Panel = tuple[str, dict[str, list[float | None]], bool]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Title, lines by name, and whether the axis is logarithmic."""
    names = sorted({name for row in rows for name in row["processes"]})
    brokers = [name for name in names if name in _BROKERS]
    clients = [name for name in names if name not in _BROKERS and not name.startswith("audit")]
    groups = sorted({name for row in rows for name in row["groups"]})
    kinds = sorted({kind for row in rows for found in row["disk"].values() for kind in found["bytes"]})
    of_process: Callable[[str, str, float], list[float | None]] = lambda name, what, unit: [  # noqa: E731
        row["processes"][name][what] / unit if name in row["processes"] else None for row in rows
    ]
    found: list[Panel] = [
        ("brokers: own memory (RssAnon), MiB", {name: of_process(name, "rss_anon", _MIB) for name in brokers}, False),
        ("clients: own memory (RssAnon), MiB", {name: of_process(name, "rss_anon", _MIB) for name in clients}, False),
        ("brokers: open files and threads", {
            f"{name} {what}": of_process(name, what, 1) for name in brokers for what in ("files", "threads")
        }, False),
        ("CPU, processors", {name: _rates(rows, lambda row, name=name: _cpu(row, [name])) for name in brokers}
            | {"all clients": _rates(rows, lambda row: _cpu(row, [n for n in names if n not in _BROKERS]))}, False),
        ("messages a second", {
            label: _rates(rows, lambda row, what=what: float(sum(one.get(what, 0) for one in row["counts"].values())))
            for label, what in (("sent", "sends acknowledged"), ("handed out", "got"), ("handled", "handled"))
        }, False),
        ("sends, ms", _latencies(rows, "send"), True),
        ("end to end, ms", _latencies(rows, "end to end"), True),
        ("not handled yet, by group", {
            name: [
                sum(row["groups"][name][what] for what in ("ready", "in_flight", "in_retry")) if name in row["groups"]
                else None for row in rows
            ] for name in groups
        }, False),
        ("dead letters, by group", {
            name: [row["groups"][name]["dead"] if name in row["groups"] else None for row in rows] for name in groups
        }, False),
    ]  # fmt: skip
    found.append(("load of the whole machine", {"load": [row["load"] for row in rows]}, False))
    for broker in brokers:
        for what, unit, title in (("bytes", _MIB, "disk, MiB"), ("files", 1, "files on disk")):
            lines: dict[str, list[float | None]] = {
                kind: [row["disk"][broker][what].get(kind, 0) / unit for row in rows] for kind in kinds
            }
            found.append((f"{broker}: {title}", {kind: line for kind, line in lines.items() if any(line)}, False))
    return found


def _cpu(row: Row, names: Sequence[str]) -> float | None:
    seconds = [row["processes"][name]["cpu"] for name in names if name in row["processes"]]
    return sum(seconds) if len(seconds) == len(names) else None


def _rates(rows: Sequence[Row], value: Callable[[Row], float | None]) -> list[float | None]:
    """By how much a count grew each second; None where a process began anew."""
    found: list[float | None] = [None]
    for before, row in pairwise(rows):
        old, new = value(before), value(row)
        grown = None if old is None or new is None else (new - old) / max(row["at"] - before["at"], 0.001)
        found.append(None if grown is None or grown < 0 else grown)
    return found


def _latencies(rows: Sequence[Row], what: str) -> dict[str, list[float | None]]:
    return {percent: [row["latency"][what][percent] for row in rows] for percent in ("p50", "p99")}


if __name__ == "__main__":
    sys.exit(not draw(Path(sys.argv[1])))
