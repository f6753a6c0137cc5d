"""The selection of messages by which a client looks for them: subjects, a key, times, or the id of an original."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from qmq.errors import InvalidOption
from qmq.format.layout import MAX_KEY_BYTES, MESSAGE_ID_SIZE
from qmq.format.private import is_private, origin_subject
from qmq.names import check_prefix

#: Greater than all times.
END_US: Final = 1 << 63


class Selection(NamedTuple):
    """Messages of a prefix or subject, with a key, stored at or after ``since_us`` and before ``until_us``.

    ``original`` selects copies instead: messages that keep this id, 16 bytes, as their origin id. Messages of one group
    alone (carried forward, handed over, restored to a group) are selected only by a key or an original.
    """

    prefix: str = ""
    key: str | None = None
    since_us: int = 0
    until_us: int = END_US
    original: bytes | None = None

    def check(self) -> Selection:
        """Return the selection if it is valid. Raises InvalidName, InvalidOption."""
        check_prefix(self.prefix)
        if self.key is not None:
            check_key(self.key)
        if not 0 <= self.since_us <= END_US or not 0 <= self.until_us <= END_US:
            raise InvalidOption("since and until must be times from 1970 on")
        if self.since_us >= self.until_us:
            raise InvalidOption("since is not before until; give an earlier since")
        if self.original is not None and len(self.original) != MESSAGE_ID_SIZE:
            raise InvalidOption(f"a message id has {MESSAGE_ID_SIZE} bytes, not {len(self.original)}")
        return self

    @property
    def is_sparse(self) -> bool:
        """Whether single messages are selected, so that batches have to be looked into."""
        return self.key is not None or self.original is not None

    def takes(self, subject: str) -> bool:
        """Return whether messages of *subject* are selected, by its name."""
        if is_private(subject):
            if not self.is_sparse:
                return False
            subject = origin_subject(subject)
        if self.prefix == "" or self.prefix.endswith("."):
            return subject.startswith(self.prefix)
        return subject == self.prefix

    def packed(self) -> dict[str, Any]:
        """Return the fields of a frame for the selection, without those that have their default."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}

    @classmethod
    def unpacked(cls, fields: dict[str, Any]) -> Selection:
        """Return the checked selection of the fields of a frame. Raises InvalidName, InvalidOption."""
        known = {name: fields[name] for name in cls._fields if fields.get(name) is not None}
        for name, value in known.items():
            if type(value) is not _TYPES[name]:
                raise InvalidOption(f"{name} of a selection must be {_TYPES[name].__name__}, not {value!r:.80}")
        return cls(**known).check()


_TYPES: Final[dict[str, type]] = {"prefix": str, "key": str, "since_us": int, "until_us": int, "original": bytes}


def check_key(key: str) -> str:
    """Return *key* if it can be the key of a message. Raises InvalidOption."""
    if not isinstance(key, str):
        raise InvalidOption(f"key must be a str, not {key!r:.80}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidOption(f"key {key!r:.80} is not text: it has a lone surrogate") from None
    if not 0 < size <= MAX_KEY_BYTES:
        raise InvalidOption(f"key {key[:40]!r} has {size:,} bytes; a key has 1 to {MAX_KEY_BYTES:,}")
    return key


class Boundary(NamedTuple):
    """A place between two messages in the order of a store: before message ``ordinal`` of the batch stored then."""

    stored_at_us: int
    ordinal: int
