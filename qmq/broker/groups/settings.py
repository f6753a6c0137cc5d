"""What a group may set, and the bounds of each.

The modes of groups, and what each member of a broadcast is.
"""

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
    """What a group may set; the broker's answer to each is the one that counts. Times are microseconds, 0: never."""

    max_attempts: int = 16
    retry_delays_us: tuple[int, ...] = RETRY_DELAYS_US
    max_session_expiries: int = 3
    max_unacked: int = 10_000
    max_unacked_bytes: int = 64 << 20
    expire_after_us: int = 0
    ack_deadline_us: int = 0
    #: The group takes messages with one of these; none: all.
    tags: tuple[str, ...] = ()

    def delay_us(self, attempt: int) -> int:
        """How long to wait after that attempt (from 1) failed."""
        return self.retry_delays_us[min(attempt, len(self.retry_delays_us)) - 1]

    @classmethod
    def kept(cls, fields: Iterable[Any]) -> Self:
        """As a record or a checkpoint has them."""
        return cls._make(tuple(field) if isinstance(field, list) else field for field in fields)


_TIME: Final = f"0 seconds to {MAX_DELAY_SHOWN}"
#: Whole numbers from and to, as their files can hold them.
_BOUNDS: Final = {
    "max_attempts": (1, 65_535),
    "max_session_expiries": (1, 255),
    "max_unacked": (1, 1_000_000),
    "max_unacked_bytes": (1, 1 << 40),
    "expire_after_us": (0, MAX_DELAY_US),
    "ack_deadline_us": (0, MAX_DELAY_US),
}


def settings_of(before: ResolvedSettings, given: Mapping[str, Any]) -> ResolvedSettings:
    """*before* with what is given, each of which was checked. Raises InvalidOption, which says what it may be."""
    unknown = given.keys() - set(ResolvedSettings._fields)
    if unknown:
        names = ", ".join(sorted(f"{name!r:.40}" for name in unknown))
        raise InvalidOption(
            f"a group has no setting {names}; it has {', '.join(map(_shown, ResolvedSettings._fields))}"
        )
    return before._replace(**{name: _checked(name, value) for name, value in given.items()})


def differing(given: Mapping[str, Any], actual: ResolvedSettings) -> dict[str, Any]:
    """Of what somebody would have set, what the group has instead. Raises InvalidOption for what it cannot have."""
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
    """The name of the group that a subscription is to: a broadcast member's is its own. Raises InvalidOption."""
    if command.mode not in MODES:
        raise InvalidOption(f"a group's mode is one of {', '.join(MODES)}, not {command.mode!r:.40}")
    if command.asks not in ASKS:
        raise InvalidOption(f"a subscription asks one of {', '.join(ASKS)}, not {command.asks!r:.40}")
    if command.group is None:
        if command.mode != RELIABLE:
            raise InvalidOption(f"who follows alone has no mode {command.mode}: give a group")
        if command.asks == LOOK:
            raise InvalidOption("only a group can be looked at: who follows alone takes nothing from anybody")
        return None
    name = check_group(command.group)
    return f"{name}{MEMBER_MARK}{command.consumer}" if command.mode == BROADCAST else name


def unknown_group(name: str, groups: Mapping[str, object]) -> UnknownGroup:
    """Return the error of who names a group that there is not; a broadcast is as many groups as it has members."""
    members = members_of(name, groups)
    if members:
        return UnknownGroup(
            f"{name!r} is a broadcast, in which each consumer is a group of its own: give one of them, such as "
            f"{members[0]!r} (`qmq groups` lists them)"
        )
    return UnknownGroup(f"there is no group {name!r}; `qmq groups` lists those there are")


def members_of(name: str, groups: Mapping[str, object]) -> list[str]:
    """The groups of the members of a broadcast."""
    return [one for one in groups if one.startswith(name + MEMBER_MARK)]


def check_mode(command: Subscribe, mode: str | None, broadcasts: Mapping[str, int]) -> None:
    """Whether a subscription fits a group that has that mode already (None: there is none). Raises GroupMismatch.

    *broadcasts*: how many members each broadcast has.
    """
    if command.group is None:
        return
    actual = BROADCAST if mode is None and command.group in broadcasts else mode
    if actual is not None and actual != command.mode:
        raise GroupMismatch(
            f"group {command.group!r} is {actual}, so nobody can take part in it as {command.mode}; "
            "use another group, or delete this one first"
        )
