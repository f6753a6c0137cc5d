"""Draw plots of the results: a picture for each work, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.peers import loopback
from bench.peers.report.results import OURS
from qmq.bench.values import shown

Found = Mapping[str, Any]
_OURS_COLOUR: Final = "#c2410c"
_THEIRS_COLOUR: Final = "#64748b"
_COLUMNS: Final = 2


class Bar(NamedTuple):
    """A bar: its label, its value, and the spread of the rounds."""

    label: str
    value: float
    least: float
    most: float
    is_ours: bool


class Panel(NamedTuple):
    """All bars of one number, the best first."""

    title: str
    unit: str
    bars: list[Bar]


def panels(found: Found, work: str) -> list[Panel]:
    """Return the panels of the picture of *work*: one for each number and promise that at least two brokers have."""
    titles = {loopback.NAME: loopback.TITLE} | {peer["name"]: peer["title"] for peer in found["peers"]}
    chosen = [number for number in found["numbers"] if number["work"] == work and _is_drawn(number["what"])]
    made = []
    for what, promise, unit in dict.fromkeys((one["what"], one["promise"], one["unit"]) for one in chosen):
        same = [one for one in chosen if (one["what"], one["promise"], one["unit"]) == (what, promise, unit)]
        if len({one["peer"] for one in same}) > 1:
            bars = sorted((_bar(one, titles) for one in same), key=lambda bar: bar.value, reverse=unit.endswith("/s"))
            better = "more" if unit.endswith("/s") else "less"
            made.append(Panel(f"{what}, {promise}: {better} is better", unit, bars))
    return made


def _is_drawn(what: str) -> bool:
    """Return whether a number is drawn; p99.9, times to the acknowledgement and the sent rate are only in the table."""
    return not what.endswith(("p99.9", " sent")) and " to ack " not in what


def _bar(number: Mapping[str, Any], titles: Mapping[str, str]) -> Bar:
    client = "" if number["client"] == number["peer"] else f"{number['client']}, "
    label = f"{titles[number['peer']]}: {client}{number['way']}"
    return Bar(label, number["median"], number["least"], number["most"], number["peer"] == OURS)


def pictures(founds: Sequence[Found], directory: Path, suffix: str = ".png") -> dict[tuple[int, str], Path]:
    """Return the path of each picture with something to compare, by the index of its run and its work."""
    paths: dict[tuple[int, str], Path] = {}
    for at, found in enumerate(founds):
        for work in dict.fromkeys(number["work"] for number in found["numbers"]):
            if panels(found, work):
                before = sum(other == work for _, other in paths)
                paths[at, work] = directory / f"{work}{f'-{before + 1}' if before else ''}{suffix}"
    return paths


def draw(founds: Sequence[Found], directory: Path, suffix: str = ".png") -> None:
    """Draw all `pictures`. Needs matplotlib, which `.venv-peers` has."""
    for (at, work), path in pictures(founds, directory, suffix).items():
        _draw(panels(founds[at], work), f"{work}: {founds[at]['date'][:10]}", path)


def _draw(chosen: Sequence[Panel], title: str, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.fonttype"] = "none"  # otherwise letters are drawn as paths, and a picture is many times as large
    from matplotlib import pyplot

    rows = -(-len(chosen) // _COLUMNS)
    height = sum(
        0.9 + 0.28 * max(len(panel.bars) for panel in chosen[at : at + _COLUMNS])
        for at in range(0, len(chosen), _COLUMNS)
    )
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(16, height + 0.6), squeeze=False, layout="constrained")
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, chosen, strict=False):
        _fill(axis, panel)
    figure.suptitle(title)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _fill(axis: Any, panel: Panel) -> None:
    places = range(len(panel.bars))
    values = [bar.value for bar in panel.bars]
    spread = [[bar.value - bar.least for bar in panel.bars], [bar.most - bar.value for bar in panel.bars]]
    colours = [_OURS_COLOUR if bar.is_ours else _THEIRS_COLOUR for bar in panel.bars]
    axis.barh(places, values, xerr=spread, color=colours, error_kw={"lw": 1, "ecolor": "#1e293b"})
    axis.set_yticks(places, [bar.label for bar in panel.bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"{panel.title} ({panel.unit})", fontsize=9, loc="left")
    axis.tick_params(axis="x", labelsize=8)
    axis.xaxis.set_major_formatter(lambda value, _: shown(value))
    axis.spines[["top", "right"]].set_visible(False)
    most = max(bar.most for bar in panel.bars)
    for place, bar in zip(places, panel.bars, strict=True):
        axis.text(bar.most + most * 0.01, place, shown(bar.value, 3), va="center", fontsize=8)
    axis.set_xlim(0, most * 1.15 if most else 1)
