"""The settings of groups with their bounds, and the modes of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Self

from qmq.broker.ports.commands import Subscribe
from qmq.errors import GroupMismatch, InvalidOption, UnknownGroup
from qmq.format.layout import MAX_DELAY_SHOWN, MAX_DELAY_US
from qmq.names import MEMBER_MARK, check_group
from qmq.net.protocol.types import ASKS, BROADCAST, LOOK, MODES, RELIABLE

RETRY_DELAYS_US: Final = tuple(s * 1_000_000 for s in (5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200))

MOST_RETRY_DELAYS: Final = 64
MOST_TAGS: Final = 32
MOST_TAG_BYTES: Final = 255


class ResolvedSettings(NamedTuple):
    """The settings of a group, with defaults for those that it did not set. Times are microseconds, 0 means never."""

    max_attempts: int = 16
    retry_delays_us: tuple[int, ...] = RETRY_DELAYS_US
    max_session_expiries: int = 3
    max_unacked: int = 10_000
    max_unacked_bytes: int = 64 << 20
    expire_after_us: int = 0
    ack_deadline_us: int = 0
    #: The share of what is handed out that goes to lower priorities while they wait.
    priority_share: float = 0.1
    #: The group takes messages that have one of these tags; without tags it takes all.
    tags: tuple[str, ...] = ()
    #: The time that a client has to come back once its system has closed its connections; None: as long as the broker's
    #: ``reconnect_timeout_ms`` says.
    reconnect_timeout_us: int | None = None

    def delay_us(self, attempt: int) -> int:
        """Return the delay after that attempt (from 1) failed."""
        return self.retry_delays_us[min(attempt, len(self.retry_delays_us)) - 1]

    @classmethod
    def kept(cls, fields: Iterable[Any]) -> Self:
        """Return the settings that a record or a checkpoint has; those of older versions have fewer."""
        values: list[Any] = [tuple(field) if isinstance(field, list) else field for field in fields]
        return cls(*values)


_TIME: Final = f"0 seconds to {MAX_DELAY_SHOWN}"
#: The least and the highest value of settings that are whole numbers.
_BOUNDS: Final = {
    "max_attempts": (1, 65_535),
    "max_session_expiries": (1, 255),
    "max_unacked": (1, 1_000_000),
    "max_unacked_bytes": (1, 1 << 40),
    "expire_after_us": (0, MAX_DELAY_US),
    "ack_deadline_us": (0, MAX_DELAY_US),
    "reconnect_timeout_us": (0, MAX_DELAY_US),
}


def settings_of(before: ResolvedSettings, given: Mapping[str, Any]) -> ResolvedSettings:
    """Return *before* with the checked values of *given*. Raise InvalidOption, which says what is allowed."""
    unknown = given.keys() - set(ResolvedSettings._fields)
    if unknown:
        names = ", ".join(sorted(f"{name!r:.40}" for name in unknown))
        raise InvalidOption(
            f"a group has no setting {names}; it has {', '.join(map(_shown, ResolvedSettings._fields))}"
        )
    return before._replace(**{name: _checked(name, value) for name, value in given.items()})


def differing(given: Mapping[str, Any], actual: ResolvedSettings) -> dict[str, Any]:
    """Return the requested settings whose value differs in the existing group. Raise InvalidOption for values that are
    not allowed.
    """
    wanted = settings_of(actual, given)
    return {name: getattr(actual, name) for name in given if getattr(wanted, name) != getattr(actual, name)}


def _checked(name: str, value: object) -> Any:
    if name == "retry_delays_us":
        delays = tuple(value) if isinstance(value, list | tuple) else ()
        if not 1 <= len(delays) <= MOST_RETRY_DELAYS or not all(_is_between(one, 0, MAX_DELAY_US) for one in delays):
            raise InvalidOption(
                f"retry_delays must be 1 to {MOST_RETRY_DELAYS} delays of {_TIME} each, not {value!r:.80}"
            )
        return delays
    if name == "tags":
        tags = tuple(value) if isinstance(value, list | tuple) else None
        if tags is None or len(tags) > MOST_TAGS or not all(_is_tag(one) for one in tags):
            raise InvalidOption(
                f"tags must be up to {MOST_TAGS} texts of 1 to {MOST_TAG_BYTES} bytes each, not {value!r:.80}"
            )
        return tuple(dict.fromkeys(tags))
    if name == "priority_share":
        if type(value) not in (int, float) or not 0 <= value <= 1:  # type: ignore[operator]  # it is a number there
            raise InvalidOption(
                f"priority_share must be a number from 0 (higher priorities always first) to 1, not {value!r:.80}"
            )
        return float(value)  # type: ignore[arg-type]
    if name == "reconnect_timeout_us" and value is None:
        return None
    least, most = _BOUNDS[name]
    if not _is_between(value, least, most):
        span = _TIME if name.endswith("_us") else f"a whole number from {least} to {most}"
        raise InvalidOption(f"{_shown(name)} must be {span}, not {_in_user_units(name, value)!r:.80}")
    return value


def _is_between(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_tag(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value.encode("utf-8", "surrogatepass")) <= MOST_TAG_BYTES


def _shown(name: str) -> str:
    return name.removesuffix("_us")


def _in_user_units(name: str, value: object) -> object:
    return value / 1e6 if name.endswith("_us") and type(value) is int else value


def group_of(command: Subscribe) -> str | None:
    """Return the group's name for a subscription: in a broadcast each member has a group of its own. Raise
    InvalidOption.
    """
    if command.mode not in MODES:
        raise InvalidOption(f"a group's mode is one of {', '.join(MODES)}, not {command.mode!r:.40}")
    if command.asks not in ASKS:
        raise InvalidOption(f"a subscription asks one of {', '.join(ASKS)}, not {command.asks!r:.40}")
    if command.group is None:
        if command.mode != RELIABLE:
            raise InvalidOption(f"a solo consumer has no mode {command.mode}: give a group")
        if command.asks == LOOK:
            raise InvalidOption("only a group can be looked at: give a group, or leave out the look")
        return None
    name = check_group(command.group)
    return f"{name}{MEMBER_MARK}{command.consumer}" if command.mode == BROADCAST else name


def unknown_group(name: str, groups: Mapping[str, object]) -> UnknownGroup:
    """Return the error for a group that does not exist; for a broadcast it names a member's group."""
    members = members_of(name, groups)
    if members:
        return UnknownGroup(
            f"{name!r} is a broadcast, in which each consumer is a group of its own: give one of them, such as "
            f"{members[0]!r} (`qmq groups` lists them)"
        )
    return UnknownGroup(f"there is no group {name!r}; `qmq groups` lists those there are")


def members_of(name: str, groups: Mapping[str, object]) -> list[str]:
    """Return the groups of the members of a broadcast."""
    return [one for one in groups if one.startswith(name + MEMBER_MARK)]


def check_mode(command: Subscribe, mode: str | None, broadcasts: Mapping[str, int]) -> None:
    """Raise GroupMismatch if a subscription does not fit the mode of its group (None: there is no group yet).

    *broadcasts* has the count of members of each broadcast.
    """
    if command.group is None:
        return
    actual = BROADCAST if mode is None and command.group in broadcasts else mode
    if actual is not None and actual != command.mode:
        raise GroupMismatch(
            f"group {command.group!r} is {actual}, so no consumer can join it as {command.mode}; "
            "use another group, or delete this one first"
        )
