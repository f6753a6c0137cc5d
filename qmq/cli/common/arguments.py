"""Parse the numbers and texts of a command line."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final

import click

from qmq.errors import InvalidOption

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE: Final = re.compile(r"[+-]?\d{1,100}", re.ASCII)


def number_of(text: str) -> float:
    """Return the finite number that *text* says. Raises ValueError."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def whole_number_of(text: str) -> int:
    """Return the whole number that *text* says. Raises ValueError."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(text)
    return int(text)


def text_of(argument: str) -> str:
    """Return an argument as text: its bytes must be UTF-8, whatever the locale. Raises InvalidOption."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(argument).decode()
        except UnicodeError:
            raise InvalidOption(f"{argument!r:.80} is not UTF-8; give it in UTF-8") from None
    return argument


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A number of seconds as the type of an option. *signed*: any finite number, which the client checks."""

    name = "seconds"

    def __init__(self, *, above_0: bool = False, signed: bool = False) -> None:
        self._above_0 = above_0
        self._signed = signed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds, at least 0 and below 1e9 (32 years) unless the client checks it. Raises
        BadParameter.
        """
        try:
            seconds = value if isinstance(value, float) else number_of(str(value))
        except ValueError:
            self.fail(f"{value!r:.80} is not a number of seconds.", param, ctx)
        if self._above_0 and seconds <= 0:
            self.fail(f"{value!r:.80} is not above 0.", param, ctx)
        if not self._signed and seconds < 0:
            self.fail(f"{value!r:.80} is below 0.", param, ctx)
        if not self._signed and seconds >= 1e9:
            self.fail(f"{value!r:.80} is not below 1e9 seconds.", param, ctx)
        return seconds
