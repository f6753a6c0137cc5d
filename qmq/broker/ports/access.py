"""The table of rights: which right each request, each of its values, and each action of ADMINISTER needs.

FRAMES has a row for each request, ACTIONS one for each action of ADMINISTER. Where only the stored message decides, by
its subject, the part that reads it checks the right; the table says so by the same word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from qmq.broker.ports import commands
from qmq.broker.ports.rights import Need, Rights
from qmq.names import takes

#: The right that each value of a request needs, by the request's command; all but its connection and its number.
FRAMES: Final[Mapping[type, Mapping[str, Need]]] = {
    commands.Send: {
        "batch": Need.PRODUCE, "flush": Need.LOGIN, "copy": Need.INTERNAL, "numbers": Need.INTERNAL,
    },
    commands.Subscribe: {
        "group": Need.GROUP, "prefixes": Need.CONSUME, "consumer": Need.LOGIN, "start": Need.LOGIN,
        "nonce": Need.LOGIN, "client": Need.LOGIN, "transient": Need.LOGIN, "settings": Need.LOGIN,
        "mode": Need.LOGIN, "known": Need.LOGIN, "asks": Need.LOGIN, "session": Need.LOGIN,
    },
    commands.Pull: {
        "subscription": Need.OWN, "max_count": Need.LOGIN, "min_count": Need.LOGIN, "max_bytes": Need.LOGIN,
        "timeout_ms": Need.LOGIN, "expected": Need.LOGIN, "checks": Need.LOGIN,
    },
    commands.Withdraw: {"pull_request": Need.OWN},
    commands.Unsubscribe: {"subscription": Need.OWN},
    commands.Ack: {"subscription": Need.OWN, "intervals": Need.OWN, "may_wait": Need.LOGIN},
    commands.HandBack: {"subscription": Need.OWN, "backs": Need.OWN},
    commands.HandOver: {
        "batch": Need.CONSUME, "group": Need.GROUP, "attempt": Need.LOGIN, "disposition": Need.LOGIN,
        "delay_us": Need.LOGIN, "reason": Need.LOGIN,
    },
    commands.Restore: {"batches": Need.ADMIN},
    commands.Heartbeat: {"client": Need.LOGIN, "stalled_us": Need.LOGIN},
    commands.Administer: {"action": Need.LOGIN, "fields": Need.LOGIN},  # ACTIONS says which
    commands.LastSequence: {"producer_id": Need.LOGIN},
    commands.Claim: {"producer_id": Need.ANY_PRODUCE, "client": Need.LOGIN},
    commands.ListSubjects: {"prefix": Need.SEE, "after": Need.LOGIN, "limit": Need.LOGIN},
    commands.Report: {
        "partition": Need.LOGIN, "position": Need.SEE, "first": Need.LOGIN, "messages": Need.LOGIN,
        "reason": Need.LOGIN,
    },
    commands.ListSegments: {"partition": Need.BROWSE_ALL, "position": Need.LOGIN},
    commands.ListBatches: {"partition": Need.BROWSE_ALL, "start": Need.LOGIN, "end": Need.LOGIN},
    commands.ReadLog: {"partition": Need.BROWSE_ALL, "position": Need.LOGIN, "size": Need.LOGIN},
    commands.Get: {"message_id": Need.BROWSE},
    commands.Find: {
        "selection": Need.BROWSE, "newest": Need.LOGIN, "after": Need.LOGIN, "upto_us": Need.LOGIN,
        "max_count": Need.LOGIN, "max_bytes": Need.LOGIN,
    },
    commands.TraceMessage: {"message_id": Need.BROWSE, "places": Need.BROWSE},
    commands.TraceConsumer: {"name": Need.BROWSE, "since_us": Need.LOGIN, "limit": Need.LOGIN},
}  # fmt: skip


class ActionRow(NamedTuple):
    """An action of ADMINISTER: the right that it needs, and those that its fields need. A change of the broker that an
    administrator makes is logged (``is_audited``).
    """

    need: Need
    fields: Mapping[str, Need]
    is_audited: bool = False


_ADMIN: Final = Need.ADMIN
ACTIONS: Final[Mapping[str, ActionRow]] = {
    "info": ActionRow(_ADMIN, {}),
    "rights": ActionRow(Need.LOGIN, {}),
    "stats": ActionRow(Need.BROWSE_ALL, {"after": Need.LOGIN, "limit": Need.LOGIN}),
    "groups": ActionRow(Need.ANY_GROUP, {"group": Need.GROUP, "after": Need.LOGIN}),
    "consumers": ActionRow(Need.ANY_GROUP, {"group": Need.GROUP, "after": Need.LOGIN}),
    "waiting": ActionRow(Need.ANY_GROUP, {"group": Need.GROUP, "after": Need.LOGIN}),
    "dead_letters": ActionRow(Need.ANY_GROUP, {"group": Need.GROUP, "after": Need.LOGIN, "limit": Need.LOGIN}),
    "handled": ActionRow(
        Need.ANY_GROUP,
        {
            "group": Need.GROUP, "consumer": Need.LOGIN, "since_us": Need.LOGIN, "generation": Need.LOGIN,
            "handled": Need.LOGIN,
        },
    ),
    "leave": ActionRow(Need.ANY_GROUP, {"group": Need.GROUP, "consumer": Need.LOGIN, "nonce": Need.LOGIN}),
    "cancel": ActionRow(Need.ANY_PRODUCE, {"id": Need.PRODUCE}),
    "set_group": ActionRow(_ADMIN, {"group": _ADMIN, "settings": _ADMIN, "follows": _ADMIN}, True),
    "seek_group": ActionRow(_ADMIN, {"group": _ADMIN, "to": _ADMIN, "clear_retries": _ADMIN}, True),
    "delete_group": ActionRow(_ADMIN, {"group": _ADMIN}, True),
    "redrive": ActionRow(_ADMIN, {"group": _ADMIN, "numbers": _ADMIN}, True),
    "delete_dead": ActionRow(_ADMIN, {"group": _ADMIN, "numbers": _ADMIN}, True),
    "resend": ActionRow(
        _ADMIN,
        dict.fromkeys(
            ("run", "group", "all_groups", "ids", "sequences", "prefix", "since_us", "until_us", "dry_run"), _ADMIN
        ),
        True,
    ),
    "restore": ActionRow(_ADMIN, {"run": _ADMIN, "group": _ADMIN, "since": _ADMIN}, True),
    "roll": ActionRow(_ADMIN, {}, True),
}  # fmt: skip


def check(rights: Rights, command: Any) -> Any:
    """Return a command that a token with *rights* may give, without fields that no row names. Raises Forbidden.

    Subjects that only the stored message has are checked later, by the part that reads it.
    """
    if rights.is_admin:
        return command
    if type(command) is commands.Administer:
        return _check_action(rights, command)
    row = _CHECKED.get(type(command))
    if row is None:
        _CHECKS[Need.ADMIN](rights, None)  # a request without a row is for nobody else
        return command
    for name, checked in row:
        checked(rights, getattr(command, name))
    return command


def _check_action(rights: Rights, command: commands.Administer) -> commands.Administer:
    action = ACTIONS.get(command.action)
    if action is None:
        _CHECKS[Need.ADMIN](rights, None)  # an action without a row is for nobody else
        return command
    _CHECKS[action.need](rights, None)
    fields = {name: command.fields[name] for name in action.fields if command.fields.get(name) is not None}
    for name, value in fields.items():
        _CHECKS[action.fields[name]](rights, value)
    return command._replace(fields=fields)


def _group(rights: Rights, group: object) -> None:
    """Check a group; without one a solo consumer reads. A group that is no name is refused later."""
    if isinstance(group, str):
        rights.require(rights.may_join(group), Need.GROUP, group)
    elif group is None:
        return
    else:
        rights.require(False, Need.GROUP)


def _prefixes(rights: Rights, prefixes: object) -> None:
    """Check prefixes; the batch of a handover is checked by the part that reads its subject."""
    if isinstance(prefixes, tuple):
        for prefix in prefixes:
            rights.require(isinstance(prefix, str) and takes(rights.consume, prefix), Need.CONSUME, str(prefix))
    else:
        rights.require(bool(rights.consume), Need.CONSUME)


def _any_of(need: Need, kind: Callable[[Rights], Collection[str]]) -> Callable[[Rights, Any], None]:
    return lambda rights, value: rights.require(bool(kind(rights)), need)


_CHECKS: Final[Mapping[Need, Callable[[Rights, Any], None]]] = {
    Need.LOGIN: lambda rights, value: None,
    Need.OWN: lambda rights, value: None,
    Need.INTERNAL: lambda rights, value: None,
    Need.SEE: lambda rights, value: None,  # what may not be seen is left out
    Need.PRODUCE: _any_of(Need.PRODUCE, lambda rights: rights.produce),
    Need.ANY_PRODUCE: _any_of(Need.PRODUCE, lambda rights: rights.produce),
    Need.CONSUME: _prefixes,
    Need.GROUP: _group,
    Need.ANY_GROUP: _any_of(Need.GROUP, lambda rights: rights.group),
    Need.BROWSE: _any_of(Need.BROWSE, lambda rights: rights.browse),
    Need.BROWSE_ALL: lambda rights, value: rights.require("" in rights.browse, Need.BROWSE, "everything, ''"),
    Need.ADMIN: lambda rights, value: rights.require(rights.is_admin, Need.ADMIN),
}
#: The values of each command that are checked: most have none.
_CHECKED: Final[Mapping[type, tuple[tuple[str, Callable[[Rights, Any], None]], ...]]] = {
    kind: tuple(
        (name, _CHECKS[need])
        for name, need in row.items()
        if need not in (Need.LOGIN, Need.OWN, Need.INTERNAL, Need.SEE)
    )
    for kind, row in FRAMES.items()
}
