"""Settings of groups as users give and see them: times in seconds. The broker takes them in microseconds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypedDict

from qmq.errors import InvalidOption
from qmq.net.client.options import microseconds_of
from qmq.net.protocol.types import MODES

_COUNTS: Final = ("max_attempts", "max_session_expiries", "max_unacked", "max_unacked_bytes")
_SECONDS: Final = {"expire_after": "expire_after_us", "ack_deadline": "ack_deadline_us"}
_DELAYS: Final = ("retry_delays", "retry_delays_us")
SETTINGS: Final = (*_COUNTS, _DELAYS[0], *_SECONDS, "tags")


class GroupSettings(TypedDict, total=False):
    """What a new group may be given; None: the broker's default. Times are seconds, and 0 is never.

    A message is handed out ``max_attempts`` times at most, again after the ``retry_delays`` of its attempts; it may end
    ``max_session_expiries`` processes. A consumer holds ``max_unacked`` messages of ``max_unacked_bytes`` at most, each
    no longer than ``ack_deadline``. What waits longer than ``expire_after`` is dead.
    """

    max_attempts: int | None
    max_session_expiries: int | None
    max_unacked: int | None
    max_unacked_bytes: int | None
    retry_delays: Iterable[float] | None
    expire_after: float | None
    ack_deadline: float | None


class ChangedSettings(TypedDict, total=False):
    """What ``set_group`` may change: as ``GroupSettings``, and ``tags``: only messages with one of these; none: all."""

    max_attempts: int
    max_session_expiries: int
    max_unacked: int
    max_unacked_bytes: int
    retry_delays: Iterable[float]
    expire_after: float
    ack_deadline: float
    tags: Iterable[str]


class Terms(NamedTuple):
    """How a consumer takes part in its group: the mode, and the settings of a new group as the broker takes them.

    One that only *looks* makes no group, and has it follow nothing more.
    """

    mode: str = "reliable"
    settings: Mapping[str, Any] = MappingProxyType({})
    looks: bool = False


DEFAULT_TERMS: Final = Terms()


def terms_of(group: str | None, mode: str, settings: Mapping[str, Any], *, looks: bool = False) -> Terms:
    """Check what ``subscribe`` was given. Raises InvalidOption."""
    if mode not in MODES:
        raise InvalidOption(f"mode must be one of {', '.join(MODES)}, not {mode!r:.80}")
    given = {name: value for name, value in settings.items() if value is not None}
    if group is None and (given or mode != "reliable"):
        raise InvalidOption(f"who follows alone has no {', '.join(given) or 'mode'}: give a group")
    if looks and (group is None or mode != "reliable" or given):
        raise InvalidOption("look goes with a reliable group that is there, and with none of its settings")
    return Terms(mode, packed_settings(given), looks)


def packed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As the broker takes them. Raises InvalidOption; the broker checks the bounds of each."""
    packed: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _COUNTS:
            if type(value) is not int:
                raise InvalidOption(f"{name} must be a whole number, not {value!r:.80}")
            if not -(1 << 63) <= value < 1 << 63:
                raise InvalidOption(f"{name} must be a whole number of less than 2^63")
            packed[name] = value
        elif name == _DELAYS[0]:
            packed[_DELAYS[1]] = [microseconds_of(name, one) for one in _listed(name, "delays in seconds", value)]
        elif name in _SECONDS:
            packed[_SECONDS[name]] = microseconds_of(name, value)
        elif name == "tags":
            packed[name] = [_text(one) for one in _listed(name, "texts", value)]
        else:
            check_setting(name)
    return packed


def check_setting(name: str) -> None:
    """Raise InvalidOption for what is the name of no setting."""
    if name in SETTINGS:
        return
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    advice = f"did you mean {near[0]}? There are" if near else "there are"
    raise InvalidOption(f"a group has no setting {name!r:.80}; {advice} {', '.join(SETTINGS)}")


def _listed(name: str, what: str, value: object) -> list[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidOption(f"{name} must be a list of {what}, not {value!r:.80}")
    return list(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidOption(f"a tag must be a str, not {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"a tag must be a str that UTF-8 can hold, not {value!r:.80}") from None
    return value


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As users see them."""
    names = {packed: name for name, packed in (*_SECONDS.items(), _DELAYS)}
    shown: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            shown[name] = value
        elif isinstance(value, list):
            shown[names[name]] = [one / 1e6 for one in value]
        else:
            shown[names[name]] = value / 1e6
    return shown
