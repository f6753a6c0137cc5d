"""Durations as users write them: numbers of seconds, timedeltas, and texts such as "5m", "1h 30m" and "250ms".

This is the only parser and the only printer of durations: calls of the client, settings and commands use it.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from itertools import pairwise
from typing import Final

from qmq.errors import InvalidOption

#: A number of seconds, a ``timedelta``, or a text such as ``"1.5s"``, ``"5m"``, ``"1h 30m"`` or ``"7d"``.
Duration = float | timedelta | str

#: Microseconds of each unit, the largest first.
_UNITS: Final = {
    "w": 604_800_000_000,
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
}
#: The units of a printed duration. Weeks are read, but "7d" is plainer than "1w".
_PRINTED: Final = {unit: size for unit, size in _UNITS.items() if unit != "w"}

_NUMBER: Final = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SECONDS: Final = re.compile(_NUMBER, re.ASCII)
_PART: Final = re.compile(rf"({_NUMBER}) ?(us|ms|w|d|h|m|s)", re.ASCII)
_TEXT: Final = re.compile(rf"{_PART.pattern}(?: ?{_PART.pattern})*", re.ASCII)
_LONGEST_TEXT: Final = 100
#: Seconds below which a duration lies: floats tell microseconds apart far beyond each use.
_MOST: Final = 1e12

#: The rule for durations, as errors give it.
RULE: Final = 'a number of seconds, a timedelta, or a text such as "250ms", "1.5s", "5m", "1h 30m" or "7d"'


def seconds_of(name: str, value: object) -> float:
    """Return a duration in seconds, from 0 to below 1e12.

    A text without a unit is a number of seconds. In a text with several units the larger unit comes first. Raises
    InvalidOption, which calls the duration *name*.

        >>> seconds_of("delay", "1h 30m")
        5400.0
    """
    if isinstance(value, str):
        return _seconds_of_text(name, value)
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    else:
        raise InvalidOption(f"{name} must be {RULE}, not {value!r:.80}")
    return _bounded(name, value, seconds)


def _seconds_of_text(name: str, text: str) -> float:
    stripped = text.strip()
    if len(stripped) <= _LONGEST_TEXT:
        if _SECONDS.fullmatch(stripped):
            return _bounded(name, text, float(stripped))
        if _TEXT.fullmatch(stripped):
            parts = _PART.findall(stripped)
            sizes = [_UNITS[unit] for _, unit in parts]
            if all(larger > smaller for larger, smaller in pairwise(sizes)):
                us = math.fsum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))
                return _bounded(name, text, us / 1e6)
    raise InvalidOption(f"{name} must be {RULE}, not {text!r:.80}")


def _bounded(name: str, value: object, seconds: float) -> float:
    if not 0 <= seconds < _MOST:
        raise InvalidOption(f"{name} must be from 0 to below 1e12 seconds, not {value!r:.80}; give {RULE}")
    return seconds


def microseconds_of(name: str, value: object) -> int:
    """Return a duration in whole microseconds: at least 1, unless it is 0. Raises InvalidOption."""
    if isinstance(value, timedelta) and value >= timedelta(0):
        return value // timedelta(microseconds=1)
    seconds = seconds_of(name, value)
    return max(round(seconds * 1_000_000), int(seconds > 0))


def milliseconds_of(name: str, value: object) -> int:
    """Return a duration in whole milliseconds: at least 1, unless it is 0. Raises InvalidOption."""
    microseconds = microseconds_of(name, value)
    return max(round(microseconds / 1_000), int(microseconds > 0))


def duration_text(seconds: float) -> str:
    """Return a duration as the shortest text that reads as the same microseconds. *seconds* is finite, 0 or more.

    >>> duration_text(5400)
    '1h 30m'
    """
    left = round(seconds * 1_000_000)
    if not left:
        return "0s"
    parts = []
    for unit, size in _PRINTED.items():
        count, rest = divmod(left, size)
        if unit == "s" and count and rest:  # 1.5s, and not 1s 500ms
            parts.append(f"{left / size:.6f}".rstrip("0") + unit)
            break
        if count:
            parts.append(f"{count}{unit}")
            left = rest
    return " ".join(parts)
