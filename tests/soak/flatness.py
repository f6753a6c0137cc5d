"""Whether something stays flat over a soak: its second quarter against its last, by stated tolerances.

The first quarter is left out: caches fill, retention has nothing to drop yet. Medians bear the moments of kills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

#: Fewer samples than these in a quarter say nothing.
LEAST_SAMPLES: Final = 3
_MIB: Final = 1 << 20


class Tolerance(NamedTuple):
    """How much the last quarter may be above the second: *share* of it, and *room* besides."""

    share: float
    room: float

    def most(self, before: float) -> float:
        """The highest median of the last quarter that is flat."""
        return before * (1 + self.share) + self.room


#: By the kind of series, in its unit.
TOLERANCES: Final = {
    "memory": Tolerance(0.05, 4 * _MIB),
    "files": Tolerance(0.20, 8),
    "threads": Tolerance(0.0, 4),  # an executor of asyncio fills up slowly
    "disk": Tolerance(0.25, 8 * _MIB),
    "disk files": Tolerance(0.25, 16),
    "consumers": Tolerance(0.0, 4),
    "waiting": Tolerance(0.50, 2_000),
    "latency": Tolerance(1.0, 50.0),
}


@dataclass(frozen=True)
class Series:
    """One quantity over the run: (seconds since its begin, value, life). A life is a process between two starts."""

    name: str
    kind: str
    points: Sequence[tuple[float, float, int]]


class Judgement(NamedTuple):
    """What became of one series. ``most``: what the last quarter's median was allowed; ``within``: the median growth
    within a life, between its second and last quarter (None where lives are too short to say).
    """

    name: str
    kind: str
    first: float
    last: float
    peak: float
    second_quarter: float | None
    last_quarter: float | None
    most: float | None
    within: float | None
    is_flat: bool


def judge(series: Series, seconds: float) -> Judgement:
    """Judge a series over a run of so many seconds. One with too few samples is not flat: nothing was shown."""
    values = [value for _, value, _ in series.points]
    if not values:
        return Judgement(series.name, series.kind, 0, 0, 0, None, None, None, None, False)
    tolerance = TOLERANCES[series.kind]
    second = [value for at, value, _ in series.points if 0.25 * seconds <= at < 0.5 * seconds]
    last = [value for at, value, _ in series.points if 0.75 * seconds <= at]
    shown = Judgement(series.name, series.kind, values[0], values[-1], max(values), None, None, None, None, False)
    if min(len(second), len(last)) < LEAST_SAMPLES:
        return shown
    before, after = float(median(second)), float(median(last))
    within = _growth_within_lives(series)
    is_flat = after <= tolerance.most(before) and (within is None or within <= tolerance.most(before) - before)
    return shown._replace(
        second_quarter=before, last_quarter=after, most=tolerance.most(before), within=within, is_flat=is_flat
    )


def _growth_within_lives(series: Series) -> float | None:
    """A process that leaks and is killed again and again looks flat from far; so look at each of its lives."""
    lives: dict[int, list[float]] = {}
    for _, value, life in series.points:
        lives.setdefault(life, []).append(value)
    growths = []
    for values in lives.values():
        quarter = len(values) // 4
        if len(lives) > 1 and quarter >= LEAST_SAMPLES:
            growths.append(median(values[-quarter:]) - median(values[quarter : 2 * quarter]))
    return float(median(growths)) if growths else None


def table(judgements: Sequence[Judgement]) -> str:
    """All of them, one line each."""
    rows = [["", "first", "2nd quarter", "last quarter", "allowed", "in a life", "last", "peak", ""]]
    for one in judgements:
        numbers = (one.first, one.second_quarter, one.last_quarter, one.most, one.within, one.last, one.peak)
        cells = [_shown(one.kind, number) for number in numbers]
        rows.append([one.name, *cells, "flat" if one.is_flat else "NOT FLAT"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if at in (0, 8) else cell.rjust(width) for at, (cell, width) in _sized(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _sized(row: Sequence[str], widths: Sequence[int]) -> Sequence[tuple[int, tuple[str, int]]]:
    return list(enumerate(zip(row, widths, strict=True)))


def _shown(kind: str, number: float | None) -> str:
    if number is None:
        return "-"
    if kind in ("memory", "disk"):
        return f"{number / _MIB:,.1f} MiB"
    return f"{number:,.1f} ms" if kind == "latency" else f"{number:,.0f}"
