"""The modes of groups, and what each member of a broadcast is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qmq.broker.ports.commands import Subscribe
from qmq.errors import GroupMismatch, InvalidOption, UnknownGroup
from qmq.names import MEMBER_MARK, check_group

RELIABLE: Final = "reliable"
MOST_ONCE: Final = "most_once"
BROADCAST: Final = "broadcast"
MODES: Final = (RELIABLE, MOST_ONCE, BROADCAST)

#: What a subscription asks of its group: to follow its prefixes from now on; the same once more, on another connection;
#: or only to have of its messages what these prefixes take.
FOLLOW: Final = "follow"
AGAIN: Final = "again"
LOOK: Final = "look"
ASKS: Final = (FOLLOW, AGAIN, LOOK)


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
