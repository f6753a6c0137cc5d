"""Parse the numbers and texts of a command line."""

from __future__ import annotations

import math
import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import click
from click.core import ParameterSource

from qmq.durations import seconds_of
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


def duration_of(name: str, text: str) -> float:
    """Return the seconds of a number of seconds or of a text such as 5m. Raises InvalidOption."""
    try:
        return number_of(text)
    except ValueError:
        return seconds_of(name, text)


Start = Literal["first", "new"] | datetime | int


def start_of(text: str, option: str) -> Start:
    """Return where to begin, as --start or a similar option says it. Raises InvalidOption."""
    if text in ("first", "new"):
        return text  # type: ignore[return-value]  # equal to one of the literals
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    return _time_of(text, f"{option} {text!r:.80} is not first, new, a sequence")


def time_of(text: str, option: str) -> datetime:
    """Return the time that an option says: one with its zone, or a duration before now. Raises InvalidOption."""
    return _time_of(text, f"{option} {text!r:.80} is not")


def _time_of(text: str, wrong: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is not None and time.tzinfo is not None:
        return time
    try:
        return datetime.now(UTC) - timedelta(seconds=seconds_of("time", text))
    except (InvalidOption, OverflowError):
        raise InvalidOption(
            f"{wrong}, a time with its zone such as 2026-01-31T12:00:00Z, or how long ago such as 2h"
            if wrong.endswith("sequence")
            else f"{wrong} a time with its zone such as 2026-01-31T12:00:00Z, nor how long ago such as 2h"
        ) from None


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A duration as the type of an option: a number of seconds, or a text such as 5m. *signed*: below 0 too, which the
    client checks.
    """

    name = "duration"

    def __init__(self, *, above_0: bool = False, signed: bool = False) -> None:
        self._above_0 = above_0
        self._signed = signed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds, at least 0 and below 1e9 (32 years) unless the client checks it. Raises
        BadParameter.
        """
        try:
            seconds = float(value) if isinstance(value, int | float) else duration_of("the duration", str(value))
        except InvalidOption:
            self.fail(f"{value!r:.80} is no duration: give seconds, or a text such as 250ms, 5m or 1h 30m.", param, ctx)
        if self._above_0 and seconds <= 0:
            self.fail(f"{value!r:.80} is not above 0.", param, ctx)
        if not self._signed and seconds < 0:
            self.fail(f"{value!r:.80} is below 0.", param, ctx)
        if not self._signed and seconds >= 1e9:
            self.fail(f"{value!r:.80} is not below 1e9 seconds.", param, ctx)
        return seconds


def given_in(context: click.Context, name: str) -> click.Context | None:
    """Return the command whose command line gives an option: this one, or one that it is a command of."""
    one: click.Context | None = context
    while one is not None and one.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        one = one.parent
    return one


def inherited(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Return the value given before the name of a subcommand, unless the subcommand has one of its own."""
    assert parameter.name is not None
    given = given_in(context, parameter.name)
    return value if given is None else given.params.get(parameter.name, value)
