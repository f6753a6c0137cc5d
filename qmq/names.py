"""Checks of names of subjects, prefixes, groups and consumers, and which names a prefix takes.

Callers check a name once, where it enters QMQ.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from qmq.errors import InvalidName

#: The name of the socket in a data directory at which its broker answers; a killed one leaves it behind.
PING_NAME: Final = "ping"

MAX_NAME_BYTES: Final = 200
#: The longest name of a token: it is stamped into batches.
MAX_TOKEN_BYTES: Final = 48

#: Each member of a broadcast has a group of its own, GROUP@CONSUMER; this stands between the two names.
MEMBER_MARK: Final = "@"
MAX_GROUP_BYTES: Final = MAX_NAME_BYTES + 1 + MAX_NAME_BYTES
#: The longest subject that a broker stores is one for a single group: ~GROUP~SUBJECT.
MAX_SUBJECT_BYTES: Final = 1 + MAX_GROUP_BYTES + 1 + MAX_NAME_BYTES

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
_RULE: Final = (
    f"use ASCII letters, digits, '_' and '-' in segments joined by single dots, at most {MAX_NAME_BYTES} bytes in all"
)


def check_subject(name: str) -> str:
    """Return *name* if it is a valid subject. Raises InvalidName."""
    return _check("subject", name)


def check_group(name: str) -> str:
    """Return *name* if it is a valid group to subscribe to. Raises InvalidName."""
    if isinstance(name, str) and MEMBER_MARK in name:
        group, _, consumer = name.partition(MEMBER_MARK)
        raise InvalidName(
            f"group {name[:80]!r} is one member of a broadcast: subscribe to group {group[:40]!r} in broadcast mode as "
            f"consumer {consumer[:40]!r}; {_RULE}"
        )
    return _check("group", name)


def check_group_or_member(name: str) -> str:
    """Return *name* if it is a valid group, or GROUP@CONSUMER of a member of a broadcast. Raises InvalidName."""
    if isinstance(name, str) and MEMBER_MARK in name:
        group, _, consumer = name.partition(MEMBER_MARK)
        check_group(group)
        check_consumer(consumer)
        return name
    return check_group(name)


def check_consumer(name: str) -> str:
    """Return *name* if it is a valid consumer id. Raises InvalidName."""
    return _check("consumer", name)


def check_token(name: str) -> str:
    """Return *name* if it is a valid name of a token. Raises InvalidName."""
    if len(_check("token", name)) > MAX_TOKEN_BYTES:
        raise InvalidName(f"token {name!r} has {len(name)} characters; give it a name of at most {MAX_TOKEN_BYTES}")
    return name


def check_prefix(name: str) -> str:
    """Return *name* if it is a subject, a prefix (ends with a dot), or "" for all subjects. Raises InvalidName."""
    if name == "":
        return name
    if isinstance(name, str) and name.endswith(".") and len(name) <= MAX_NAME_BYTES:
        _check("prefix", name[:-1])
        return name
    return _check("prefix", name)


def takes(prefixes: Collection[str], name: str) -> bool:
    """Return whether one of the prefixes takes a name, or all that another prefix takes."""
    if name in prefixes or "" in prefixes:
        return True
    end = name.find(".")
    while end >= 0:
        if name[: end + 1] in prefixes:
            return True
        end = name.find(".", end + 1)
    return False


def _check(kind: str, name: str) -> str:
    if not isinstance(name, str):
        raise InvalidName(f"{kind} must be a str, not {type(name).__name__}")
    if len(name) > MAX_NAME_BYTES:
        raise InvalidName(f"{kind} {name[:40]!r}... has {len(name)} characters; {_RULE}")
    if not _NAME.fullmatch(name):
        raise InvalidName(f"{kind} {name!r} is not a valid name; {_RULE}")
    return name
