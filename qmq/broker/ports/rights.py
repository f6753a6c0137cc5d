"""Rights: what the token of a connection may do. The table in ``access`` says which right each request needs.

A right is a prefix of names, taken literally: ``orders.`` stands for every name that begins so, ``orders`` for this
name alone, ``""`` for all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from qmq.errors import Forbidden
from qmq.format.private import origin_subject
from qmq.names import MEMBER_MARK, takes

#: Subjects of one token whose check is remembered, so that a batch costs one lookup.
_REMEMBERED: Final = 10_000


class Need(enum.Enum):
    """The right that a value of a request needs."""

    #: None: whoever has logged in may give it.
    LOGIN = "any token"
    #: A subscription, pull or run of this connection, which was checked when it began.
    OWN = "any token, for what this connection began"
    #: The right to send, to the subjects of the batch.
    PRODUCE = "produce"
    #: The right to send, to any subject.
    ANY_PRODUCE = "any produce"
    #: The right to receive, of each prefix.
    CONSUME = "consume"
    #: The right to take part in the group.
    GROUP = "group"
    #: The right to take part in some group: the answer has only groups that the token may join.
    ANY_GROUP = "any group"
    #: The right to look at the message's subject; the answer has no others.
    BROWSE = "browse"
    #: The right to look at all subjects, as the log is read as it lies.
    BROWSE_ALL = "browse of everything"
    #: Any right to a subject: the answer has only such subjects.
    SEE = "any right to the subject"
    ADMIN = "admin"
    #: No client can give it.
    INTERNAL = "never given by a client"


class Rights:
    """The rights of one token. ``name`` is the token's."""

    __slots__ = ("_sent_to", "browse", "consume", "group", "is_admin", "name", "numbers", "produce")

    def __init__(
        self,
        name: str,
        produce: Iterable[str] = (),
        consume: Iterable[str] = (),
        group: Iterable[str] = (),
        browse: Iterable[str] = (),
        *,
        is_admin: bool = False,
    ) -> None:
        self.name = name
        self.is_admin = is_admin
        everything = frozenset(("",)) if is_admin else frozenset[str]()
        self.produce = everything or frozenset(produce)
        self.consume = everything or frozenset(consume)
        self.group = everything or frozenset(group)
        self.browse = everything or frozenset(browse)
        #: Numbers of subjects in the store to which it may send.
        self.numbers: set[int] = set()
        self._sent_to: set[str] = set()

    def shown(self) -> dict[str, object]:
        """Return the rights as the action rights gives them."""
        kinds = zip(("produce", "consume", "group", "browse"), self._kinds(), strict=True)
        return {"name": self.name, "admin": self.is_admin, **{kind: sorted(prefixes) for kind, prefixes in kinds}}

    def covers(self, other: Rights) -> bool:
        """Return whether it gives all that *other* gives."""
        pairs = zip(self._kinds(), other._kinds(), strict=True)
        return all(takes(mine, prefix) for mine, theirs in pairs for prefix in theirs) and (
            self.is_admin or not other.is_admin
        )

    def _kinds(self) -> tuple[frozenset[str], ...]:
        return self.produce, self.consume, self.group, self.browse

    def check_produce(self, subjects: Iterable[str]) -> None:
        """Raise Forbidden unless it may send to all of these subjects."""
        for subject in subjects:
            if subject not in self._sent_to:
                self.require(takes(self.produce, subject), Need.PRODUCE, subject)
                if len(self._sent_to) >= _REMEMBERED:
                    self._sent_to.clear()
                self._sent_to.add(subject)

    def note_number(self, number: int) -> None:
        """Remember the number of a subject to which it may send."""
        if len(self.numbers) >= _REMEMBERED:
            self.numbers.clear()
        self.numbers.add(number)

    def may_consume(self, prefix: str) -> bool:
        """Return whether it may receive all messages of a subject or prefix; a private subject counts as its own."""
        return takes(self.consume, origin_subject(prefix))

    def may_join(self, group: str) -> bool:
        """Return whether it may take part in a group; a member of a broadcast counts as its group."""
        return takes(self.group, group.partition(MEMBER_MARK)[0])

    def may_browse(self, subject: str) -> bool:
        """Return whether it may look at messages of a subject; a private subject counts as its own."""
        return takes(self.browse, origin_subject(subject))

    def may_see(self, subject: str) -> bool:
        """Return whether it has any right to a subject."""
        name = origin_subject(subject)
        return any(takes(prefixes, name) for prefixes in (self.produce, self.consume, self.browse))

    def require(self, is_given: bool, need: Need, what: str = "") -> None:
        """Raise Forbidden, which says that *need* of *what* is missing, unless the right is given."""
        if not is_given:
            right = f"{need.value} {what!r:.220}" if what else need.value
            raise Forbidden(
                f"token {self.name!r} lacks a right: {right}; whoever keeps the broker's tokens can give it"
            )


#: The rights of a connection at a broker that asks for no token.
UNCHECKED: Final = Rights("", is_admin=True)
