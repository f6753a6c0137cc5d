"""Names of subjects, prefixes, groups, consumers: checked once, at the edge."""

from __future__ import annotations

import re
from typing import Final

from qmq.errors import InvalidName

MAX_NAME_BYTES: Final = 200

#: Between the group's name and the consumer's, in the name of a broadcast member's own group: GROUP@CONSUMER.
MEMBER_MARK: Final = "@"
MAX_GROUP_BYTES: Final = MAX_NAME_BYTES + 1 + MAX_NAME_BYTES
#: The longest subject that a broker stores: of one group alone, ~GROUP~SUBJECT.
MAX_SUBJECT_BYTES: Final = 1 + MAX_GROUP_BYTES + 1 + MAX_NAME_BYTES

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
_RULE: Final = (
    f"use ASCII letters, digits, '_' and '-' in segments joined by single dots, at most {MAX_NAME_BYTES} bytes in all"
)


def check_subject(name: str) -> str:
    """Return *name* if it may be a subject, else raise InvalidName."""
    return _check("subject", name)


def check_group(name: str) -> str:
    """Return *name* if it may be a group that consumers name, else raise InvalidName."""
    if isinstance(name, str) and MEMBER_MARK in name:
        group, _, consumer = name.partition(MEMBER_MARK)
        raise InvalidName(
            f"group {name[:80]!r} is one member of a broadcast: consume from group {group[:40]!r} in broadcast mode as "
            f"consumer {consumer[:40]!r}; {_RULE}"
        )
    return _check("group", name)


def check_group_or_member(name: str) -> str:
    """Return *name* if it may be a group, or one member's of a broadcast: GROUP@CONSUMER. Else raise InvalidName."""
    if isinstance(name, str) and MEMBER_MARK in name:
        group, _, consumer = name.partition(MEMBER_MARK)
        check_group(group)
        check_consumer(consumer)
        return name
    return check_group(name)


def check_consumer(name: str) -> str:
    """Return *name* if it may be a consumer id, else raise InvalidName."""
    return _check("consumer", name)


def check_prefix(name: str) -> str:
    """Return *name* if it may be subscribed: a subject, or a prefix (ends with a dot), or "" for everything."""
    if name == "":
        return name
    if isinstance(name, str) and name.endswith(".") and len(name) <= MAX_NAME_BYTES:
        _check("prefix", name[:-1])
        return name
    return _check("prefix", name)


def _check(what: str, name: str) -> str:
    if not isinstance(name, str):
        raise InvalidName(f"{what} must be a str, not {type(name).__name__}")
    if len(name) > MAX_NAME_BYTES:
        raise InvalidName(f"{what} {name[:40]!r}... has {len(name)} characters; {_RULE}")
    if not _NAME.fullmatch(name):
        raise InvalidName(f"{what} {name!r} is not a valid name; {_RULE}")
    return name
