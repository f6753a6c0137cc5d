"""Which messages are restored, and as what."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from qmq.errors import InvalidOption
from qmq.format.private import is_private, private_subject
from qmq.names import check_group_or_member, check_prefix, check_subject

#: Above all times.
END_US = 1 << 63


@dataclass(frozen=True)
class RestoreSelection:
    """Subjects as in a subscription; times in microseconds, by when a broker stored a message: from *since_us* up to,
    not including, *until_us*. *to_subject*: all become messages of that one. *group*: they are for that one alone.
    """

    prefix: str = ""
    since_us: int = 0
    until_us: int = END_US
    to_subject: str | None = None
    group: str | None = None
    #: Also what has been restored once: mostly the original is in the archive, too.
    with_replayed: bool = False

    def check(self) -> None:
        """Raises InvalidName, InvalidOption."""
        check_prefix(self.prefix)
        if self.to_subject is not None and self.group is not None:
            raise InvalidOption("give either --to-subject or --group")
        if self.to_subject is not None:
            check_subject(self.to_subject)
        if self.group is not None:
            check_group_or_member(self.group)
        if self.since_us >= self.until_us:
            raise InvalidOption("--since is not before --until: nothing lies between")

    def takes(self, subject: str) -> bool:
        """Whether messages of that subject are wanted, by its name; what is one group's alone never is."""
        if is_private(subject):
            return False
        if self.prefix == "" or self.prefix.endswith("."):
            return subject.startswith(self.prefix)
        return subject == self.prefix

    def subject_for(self, subject: str) -> str:
        """What messages of *subject* are restored as."""
        if self.group is not None:
            return private_subject(self.group, subject)
        return self.to_subject if self.to_subject is not None else subject

    def digest(self) -> str:
        """16 hex digits that name it."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()
