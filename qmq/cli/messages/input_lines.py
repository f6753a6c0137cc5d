"""Make messages of the lines of stdin: plain lines, or JSON objects as ``qmq consume --json`` prints them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qmq.errors import InvalidOption, MessageTooLarge

if TYPE_CHECKING:
    from qmq import Priority

#: Longer lines are rejected: brokers take at most 1 GiB, and 4 MiB by default.
MAX_LINE_BYTES: Final = 64 << 20
#: Fields that ``consume`` prints and a sender cannot set.
_IGNORED: Final = frozenset(
    ("id", "sequence", "attempt", "created_at", "stored_at", "replayed", "source", "sender", "producer", "app")
)
_TAKEN: Final = (
    "subject",
    "key",
    "keys",
    "tags",
    "properties",
    "delay",
    "deliver_at",
    "expires_in",
    "priority",
    "order_key",
    "unique",
    "body",
    "body_base64",
)


class InputMessage(NamedTuple):
    """One message to send."""

    subject: str
    body: bytes
    keys: list[str] | None
    tags: list[str] | None
    properties: dict[str, str] | None
    #: Seconds after it is stored, or a time: seconds since 1970, or an aware datetime.
    delay: float | None = None
    deliver_at: float | datetime | None = None
    expires_in: float | None = None
    priority: Priority | None = None
    order_key: str | None = None
    unique: str | None = None


class LineSplitter:
    """Splits the chunks of a stream into lines without newlines. The last line may lack its newline."""

    def __init__(self, most: int = MAX_LINE_BYTES) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self._size = 0
        #: The number of lines yielded so far, which is the number of the last one.
        self.number = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | MessageTooLarge]:
        """Yield the lines that *chunk* completes; an error instead of one that is too long."""
        first, *rest = chunk.split(b"\n")
        self._keep(first)
        for part in rest:
            yield self._take()
            self._keep(part)

    def end(self) -> Iterator[bytes | MessageTooLarge]:
        """Yield the last line if the stream did not end with a newline."""
        if self._size:
            yield self._take()

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._most:
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def _take(self) -> bytes | MessageTooLarge:
        self.number += 1
        parts, self._parts = self._parts, []
        size, self._size = self._size, 0
        if size > self._most:
            return MessageTooLarge(f"the line has {size} bytes; a message can have {self._most} at most")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def draft_of(line: bytes, defaults: InputMessage) -> InputMessage:
    """Return the message of a JSON line; *defaults* has the values of missing fields. Raises InvalidOption."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidOption("not a JSON object")
    unknown = fields.keys() - _IGNORED - set(_TAKEN)
    if unknown:
        raise InvalidOption(f"unknown field {min(unknown)!r:.80}; use {', '.join(_TAKEN)}")
    tags, properties = fields.get("tags"), fields.get("properties")
    delay, deliver_at = fields.get("delay"), _time(fields)
    if delay is None and deliver_at is None:
        delay = defaults.delay
    return InputMessage(
        _text(fields, "subject") or defaults.subject,
        _body(fields),
        _keys(fields) or defaults.keys,
        (defaults.tags if tags is None else tags) or None,
        (defaults.properties if properties is None else properties) or None,
        delay,
        deliver_at,
        fields.get("expires_in", defaults.expires_in),
        *_lane(fields, defaults),
        _text(fields, "unique"),
    )


def _lane(fields: dict[str, Any], defaults: InputMessage) -> tuple[Priority | None, str | None]:
    """Return priority and order key."""
    priority: Priority | None = fields.get("priority")
    order_key = _text(fields, "order_key")
    return (
        defaults.priority if priority is None else priority,
        defaults.order_key if order_key is None else order_key,
    )


def _time(fields: dict[str, Any]) -> float | datetime | None:
    """Return the delivery time: seconds since 1970, or a time such as 2027-01-31T12:00:00Z."""
    value: float | str | None = fields.get("deliver_at")
    if not isinstance(value, str):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise InvalidOption(f"deliver_at {value!r:.40} is not a time such as 2027-01-31T12:00:00Z") from None


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidOption(f"{name} is a string, not {json.dumps(value)[:40]}")
    return value


def _keys(fields: dict[str, Any]) -> list[str] | None:
    """Return the keys. ``consume`` prints the first of them as the key, too."""
    key, keys = _text(fields, "key"), fields.get("keys")
    if keys is None:
        return None if key is None else [key]
    if not isinstance(keys, list) or not all(isinstance(one, str) for one in keys):
        raise InvalidOption(f"keys is a list of strings, not {json.dumps(keys)[:40]}")
    if key is not None and key != next(iter(keys), None):
        raise InvalidOption("give either key or keys; beside keys, key can only be the first of them")
    return keys


def _body(fields: dict[str, Any]) -> bytes:
    text, packed = _text(fields, "body"), _text(fields, "body_base64")
    if packed is None and text is not None:
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise InvalidOption("the body is not valid Unicode text; use body_base64 for bytes") from None
    if packed is None or text is not None:
        raise InvalidOption("give either body or body_base64")
    try:
        return base64.b64decode(packed, validate=True)
    except ValueError as error:
        raise InvalidOption(f"body_base64 is not base64: {error}") from None
