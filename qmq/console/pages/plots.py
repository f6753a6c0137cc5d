"""Lines over time as paths of SVG, made of the columns of the history. A template draws them; styles colour them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import numpy as np

from qmq.console.history import Column, Columns
from qmq.console.pages.formats import age_text, count_text, rate_text

#: The size of a plot's own coordinates; the page stretches them.
WIDTH: Final = 600
HEIGHT: Final = 120
#: Points of a line: more would lie on one pixel.
_MOST_POINTS: Final = 180
#: The width of a line that has one point.
_DASH: Final = 4
_STEPS: Final = (1, 2, 2.5, 5, 10)
_AGE_STEPS: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400)


class Line(NamedTuple):
    """One line: its label, the last value as text, and its path."""

    label: str
    last: str
    path: str


class Plot(NamedTuple):
    """Lines on one axis from 0 to ``top``; ``begin`` and ``end`` are times of day. Without lines nothing is known."""

    title: str
    lines: tuple[Line, ...]
    top: str
    begin: str
    end: str

    @property
    def summary(self) -> str:
        """The plot in words, for those who do not see it."""
        values = ", ".join(f"{line.label} {line.last}" for line in self.lines)
        return f"{self.title} from {self.begin} to {self.end} UTC, now: {values}; the axis ends at {self.top}"


def rate_plot(columns: Columns, *, of_group: bool) -> Plot:
    """Return the plot of the rates of all groups together, or of one group."""
    lines = [] if of_group else [("received", columns.received_rate)]
    lines += [("handed out", columns.delivered_rate), ("acked", columns.acked_rate), ("failed", columns.failed_rate)]
    return _plot("Messages a second", columns.times, lines, rate_text)


def backlog_plot(columns: Columns) -> Plot:
    """Return the plot of messages that wait, are in flight and are in retry."""
    lines = [("ready", columns.ready), ("in flight", columns.in_flight), ("in retry", columns.in_retry)]
    return _plot("Messages that wait", columns.times, lines, count_text)


def oldest_plot(columns: Columns) -> Plot:
    """Return the plot of the age of the oldest message."""
    return _plot("Age of the oldest message", columns.times, [("oldest", columns.oldest_age)], age_text)


def _plot(title: str, times: Column, lines: Sequence[tuple[str, Column]], text: Callable[[float], str]) -> Plot:
    if len(times) < 2:
        return Plot(title, (), "", "", "")
    thinned, step = [], -(-len(times) // _MOST_POINTS)
    for label, values in lines:
        thinned.append((label, _thinned(values, step), values[-1]))
    begin, end = float(times[0]), float(times[-1])
    x = (_thinned(times, step) - begin) / max(end - begin, 1e-9) * WIDTH
    highest = max((float(np.nanmax(values)) for _, values, _ in thinned if not np.isnan(values).all()), default=0.0)
    top = _age_top(highest) if text is age_text else _top(highest)
    drawn = tuple(
        Line(label, "unknown" if math.isnan(last) else text(float(last)), _path(x, values, top))
        for label, values, last in thinned
    )
    return Plot(title, drawn, text(top), _clock(begin), _clock(end))


def _thinned(values: Column, step: int) -> Column:
    """Return the highest of each *step* values, so that a short peak is still seen."""
    if step == 1:
        return values
    padded = np.concatenate([values, np.full(-len(values) % step, np.nan)]).reshape(-1, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step without any value has no highest one: NaN
        return np.asarray(np.nanmax(padded, axis=1), np.float64)


def _path(x: Column, values: Column, top: float) -> str:
    """Return the path of a line, which is broken where a value is not known."""
    parts, is_open = list[str](), False
    for at, value in zip(x.tolist(), values.tolist(), strict=True):
        if math.isnan(value):
            is_open = False
            continue
        y = HEIGHT - 1 - value / top * (HEIGHT - 2)
        if is_open:
            parts.append(f"L{at:.0f} {y:.1f}")
        else:  # it begins with a short dash, so that a point alone is seen, too
            begin = max(at - _DASH, 0.0)
            parts.append(f"M{begin:.0f} {y:.1f}H{max(at, begin + _DASH):.0f}")
        is_open = True
    return "".join(parts)


def _top(highest: float) -> float:
    """Return a round number at or above the highest value."""
    if highest <= 1:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(highest))
    return next(step * scale for step in _STEPS if step * scale >= highest * 0.9999)


def _age_top(highest: float) -> float:
    return next((step for step in _AGE_STEPS if step >= highest), None) or math.ceil(highest / 86_400) * 86_400


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}"
