"""The private subjects of messages of one group alone.

A private subject is ``~GROUP~SUBJECT``. No client may send to it or follow it, so every file and check that knows
subjects keeps these messages apart. The messages are copies, which ``copies.for_group`` makes.
"""

from __future__ import annotations

from typing import Final

from qmq.errors import InvalidName
from qmq.names import check_subject

#: The first character of names that no client may use.
PRIVATE: Final = "~"


def private_subject(group: str, subject: str) -> str:
    """Return the private subject of *group* for messages of *subject*."""
    return f"{PRIVATE}{group}{PRIVATE}{subject}"


def is_private(name: str) -> bool:
    """Return whether *name* is a private subject."""
    return name[:1] == PRIVATE and PRIVATE in name[1:]


def origin_subject(name: str) -> str:
    """Return the subject that messages were sent to: *name*, or the subject in a private one."""
    return name.split(PRIVATE, 2)[2] if is_private(name) else name


def check_private(name: str, group: str) -> str:
    """Return *name* if it is a private subject of *group*, or of a broadcast member's group. Raises InvalidName."""
    if not is_private(name) or name.split(PRIVATE, 2)[1] != group:
        raise InvalidName(f"subject {name!r} is not private to group {group!r}: such a subject begins with ~{group}~")
    check_subject(origin_subject(name))
    return name
