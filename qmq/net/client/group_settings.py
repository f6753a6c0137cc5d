"""Settings of groups as users give them, with durations, and see them, in seconds; the broker has microseconds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypedDict

from qmq.durations import Duration
from qmq.errors import InvalidOption
from qmq.net.client.options import delay_us_of
from qmq.net.protocol.types import MODES

_COUNTS: Final = ("max_attempts", "max_session_expiries", "max_unacked", "max_unacked_bytes")
_SECONDS: Final = {
    "expire_after": "expire_after_us",
    "ack_deadline": "ack_deadline_us",
    "reconnect_timeout": "reconnect_timeout_us",
}
_DELAYS: Final = ("retry_delays", "retry_delays_us")
SETTINGS: Final = (*_COUNTS, _DELAYS[0], *_SECONDS, "tags", "priority_share")


class GroupSettings(TypedDict, total=False):
    """The settings of a new group; None: the broker's default. Times are durations, as 5, "5m" or a
    timedelta; 0: never.

    A message is handed out at most ``max_attempts`` times, again after the ``retry_delays`` of its attempts, and may be
    in flight at most in ``max_session_expiries`` sessions that expire. A consumer has at most ``max_unacked`` messages
    of ``max_unacked_bytes`` in flight, each for at most ``ack_deadline``. When its process ends, others get them after
    ``reconnect_timeout`` (without one, the broker's ``reconnect_timeout_ms``), unless it comes back. A message that
    waits longer than ``expire_after`` becomes a dead letter. ``priority_share``, from 0 to 1, is the share of what is
    handed out that goes to lower priorities while they wait; 0: higher ones always come first.
    """

    max_attempts: int | None
    max_session_expiries: int | None
    max_unacked: int | None
    max_unacked_bytes: int | None
    retry_delays: Iterable[Duration] | None
    expire_after: Duration | None
    ack_deadline: Duration | None
    reconnect_timeout: Duration | None
    priority_share: float | None


class ChangedSettings(TypedDict, total=False):
    """The settings that ``set_group`` changes: ``GroupSettings``, and ``tags``: only messages with one; none: all.

    ``reconnect_timeout=None`` is the broker's again.
    """

    max_attempts: int
    max_session_expiries: int
    max_unacked: int
    max_unacked_bytes: int
    retry_delays: Iterable[Duration]
    expire_after: Duration
    ack_deadline: Duration
    reconnect_timeout: Duration | None
    priority_share: float
    tags: Iterable[str]


OnDifference = Literal["warn", "raise", "apply"]


class SubscriptionTerms(NamedTuple):
    """The terms of a subscription: the group's mode, the settings of a new group as the broker takes them, and what to
    do if the group exists with other ones.

    A consumer that only *looks* creates no group, and adds no prefixes to one.
    """

    mode: str = "reliable"
    settings: Mapping[str, Any] = MappingProxyType({})
    looks: bool = False
    on_difference: OnDifference = "warn"


DEFAULT_TERMS: Final = SubscriptionTerms()


def terms_of(
    group: str | None,
    mode: str,
    settings: Mapping[str, Any],
    *,
    looks: bool = False,
    on_difference: OnDifference = "warn",
) -> SubscriptionTerms:
    """Return the terms of a subscription from the arguments of ``subscribe``. Raises InvalidOption."""
    if on_difference not in ("warn", "raise", "apply"):
        raise InvalidOption(f'on_difference must be "warn", "raise" or "apply", not {on_difference!r:.80}')
    if mode not in MODES:
        raise InvalidOption(f"mode must be one of {', '.join(MODES)}, not {mode!r:.80}")
    given = {name: value for name, value in settings.items() if value is not None}
    if group is None and (given or mode != "reliable"):
        raise InvalidOption(f"{', '.join(given) or 'mode'} can be given with a group only: give a group")
    if looks and (group is None or mode != "reliable" or given):
        raise InvalidOption("look needs an existing reliable group; give a group, and neither mode nor settings")
    return SubscriptionTerms(mode, packed_settings(given), looks, on_difference)


def packed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as the broker takes them. Raises InvalidOption; the broker checks their bounds."""
    packed: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _COUNTS:
            if type(value) is not int:
                raise InvalidOption(f"{name} must be a whole number, not {value!r:.80}")
            if not -(1 << 63) <= value < 1 << 63:
                raise InvalidOption(f"{name} must be a whole number below 2^63, not {value!r:.80}")
            packed[name] = value
        elif name == _DELAYS[0]:
            packed[_DELAYS[1]] = [delay_us_of(name, one) for one in _listed(name, "durations", value)]
        elif name in _SECONDS:
            is_default = value is None and name == "reconnect_timeout"
            packed[_SECONDS[name]] = None if is_default else delay_us_of(name, value)
        elif name == "priority_share":
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise InvalidOption(f"priority_share must be a number from 0 to 1, not {value!r:.80}")
            packed[name] = float(value)
        elif name == "tags":
            packed[name] = [_text(one) for one in _listed(name, "texts", value)]
        else:
            check_setting(name)
    return packed


def check_setting(name: str) -> None:
    """Check the name of a setting. Raises InvalidOption."""
    if name in SETTINGS:
        return
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    advice = f"did you mean {near[0]}? There are" if near else "there are"
    raise InvalidOption(f"a group has no setting {name!r:.80}; {advice} {', '.join(SETTINGS)}")


def _listed(name: str, items: str, value: object) -> list[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidOption(f"{name} must be a list of {items}, not {value!r:.80}")
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
    """Return settings of the broker as users see them."""
    names = {packed: name for name, packed in (*_SECONDS.items(), _DELAYS)}
    shown: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            shown[name] = value
        elif value is None:
            shown[names[name]] = None
        elif isinstance(value, list):
            shown[names[name]] = [one / 1e6 for one in value]
        else:
            shown[names[name]] = value / 1e6
    return shown
