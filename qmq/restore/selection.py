"""The messages that a restore selects, and the subject or group that they are restored to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from qmq.errors import InvalidOption
from qmq.format.private import is_private, private_subject
from qmq.names import check_group_or_member, check_prefix, check_subject

#: Greater than all times.
END_US = 1 << 63


@dataclass(frozen=True)
class RestoreSelection:
    """Subjects as in a subscription, and the times in microseconds at which a broker stored the messages: from
    *since_us* until before *until_us*.

    *to_subject*: the subject that all messages are sent to. *group*: the only group that gets them.
    """

    prefix: str = ""
    since_us: int = 0
    until_us: int = END_US
    to_subject: str | None = None
    group: str | None = None
    #: Also messages that were restored before: mostly the archive has their originals too.
    with_replayed: bool = False

    def check(self) -> None:
        """Raise InvalidName or InvalidOption if the selection is invalid."""
        check_prefix(self.prefix)
        if self.to_subject is not None and self.group is not None:
            raise InvalidOption("give either --to-subject or --group")
        if self.to_subject is not None:
            check_subject(self.to_subject)
        if self.group is not None:
            check_group_or_member(self.group)
        if self.since_us >= self.until_us:
            raise InvalidOption("--since is not before --until; give an earlier --since")

    def takes(self, subject: str) -> bool:
        """Return whether messages of *subject* are selected, by its name; messages of one group alone never are."""
        if is_private(subject):
            return False
        if self.prefix == "" or self.prefix.endswith("."):
            return subject.startswith(self.prefix)
        return subject == self.prefix

    def subject_for(self, subject: str) -> str:
        """Return the subject that messages of *subject* are restored to."""
        if self.group is not None:
            return private_subject(self.group, subject)
        return self.to_subject if self.to_subject is not None else subject

    def digest(self) -> str:
        """Return 16 hex digits that identify the selection."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()
