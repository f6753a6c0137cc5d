"""A message as a row of the outbox: made by the program that sends it, read by the relay. It knows no database."""

from __future__ import annotations

import json as json_module
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypedDict

from qmq import Durability, Duration, Priority
from qmq.durations import seconds_of
from qmq.errors import InvalidOption, UsageError
from qmq.names import check_subject

#: Rows of one shard are sent by one relay at a time, in the order of their ids.
SHARDS: Final = 16
#: States of a row.
READY: Final = 0
SENT: Final = 1
PARKED: Final = 2

#: Transactions of PostgreSQL that notify wait for each other at their commits, so a process notifies so often at most.
NOTIFY_EVERY_S: Final = 0.02
#: Stands for a ``json=`` that is not given, since None is a value.
NO_JSON: Final[Any] = object()
_MOST_KEYS: Final = 16
_MOST_KEY_BYTES: Final = 1_024
_MOST_AHEAD_S: Final = 731 * 86_400
_PRIORITIES: Final = ("low", "normal", "high", 0, 1, 2)
#: The least time that a message has which expired before it was sent: then it becomes a dead letter, not lost.
_LEAST_S: Final = 0.001

_encode: Final = json_module.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

Body = bytes | bytearray | memoryview


class OutboxOptions(TypedDict, total=False):
    """The options of ``Client.send`` that an outbox takes."""

    json: Any
    key: str | None
    keys: Sequence[str] | None
    tags: Sequence[str] | None
    properties: Mapping[str, str] | None
    delay: Duration | None
    deliver_at: float | datetime | None
    expires_in: Duration | None
    priority: Priority | None
    order_key: str | None
    durability: Durability | None


class NewRow(NamedTuple):
    """The columns of a row that a program inserts."""

    uid: str
    shard: int
    state: int
    subject: str
    body: bytes
    options: str | None
    created_at_us: int


class OutboxRow(NamedTuple):
    """A row that a relay has read: a message that waits."""

    id: int
    uid: str
    subject: str
    body: bytes
    options: str | None
    created_at_us: int
    attempted_at_us: int | None


def new_row(
    subject: str,
    body: Body | None,
    *,
    transaction: int,
    json: Any = NO_JSON,
    key: str | None = None,
    keys: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    properties: Mapping[str, str] | None = None,
    delay: Duration | None = None,
    deliver_at: float | datetime | None = None,
    expires_in: Duration | None = None,
    priority: str | int | None = None,
    order_key: str | None = None,
    durability: str | None = None,
) -> NewRow:
    """Return the row of a message with the options of ``Client.send``. Times count from now, not from when it is sent.

    *transaction* is a number of its own for each transaction: the messages of one that have no key stay in order.
    Raises InvalidName, InvalidOption, UsageError, TypeError.
    """
    check_subject(subject)
    if body is None:
        if json is NO_JSON:
            raise UsageError("a message needs a body: give bytes, or json=")
        body = _json_body(json)
        properties = {"content-type": "application/json", **(properties or {})}
    elif json is not NO_JSON:
        raise UsageError("give either a body or json, not both")
    elif not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"a body must be bytes, not {type(body).__name__}; text must be encoded")
    now = time.time()
    options: dict[str, Any] = {}
    if key is not None or keys is not None:
        options["keys"] = _keys_of(key, keys)
    if tags:
        options["tags"] = _texts_of("tags", tags)
    if properties:
        options["properties"] = _properties_of(properties)
    due = _due_of(delay, deliver_at, now)
    if due is not None:
        options["deliver_at"] = due
    if expires_in is not None:
        lives = _seconds_ahead("expires_in", expires_in)
        if not lives:
            raise InvalidOption(f"expires_in must be above 0 seconds, not {expires_in!r:.80}; leave it out for never")
        # the time of a delayed message begins when it falls due
        options.update({"expires_in": lives} if due is not None else {"expires_at": now + lives})
    if priority is not None:
        if isinstance(priority, bool) or priority not in _PRIORITIES:
            raise InvalidOption(f'priority must be "low", "normal" or "high", not {priority!r:.80}')
        options["priority"] = priority
    if order_key is not None:
        options["order_key"] = _key_of("order_key", order_key)
    if durability is not None:
        if durability not in ("flush", "append"):
            raise InvalidOption(f'durability must be "flush" or "append", not {durability!r:.80}')
        options["durability"] = durability
    return NewRow(
        uid=secrets.token_hex(16),
        shard=_shard_of(order_key or (options["keys"][0] if options.get("keys") else None), transaction),
        state=READY,
        subject=subject,
        body=bytes(body),
        options=_encode(options) if options else None,
        created_at_us=int(now * 1e6),
    )


def send_options(row: OutboxRow, now: float) -> dict[str, Any]:
    """Return the options with which ``Client.send`` sends *row*; *now* is in seconds since 1970."""
    options: dict[str, Any] = json_module.loads(row.options) if row.options else {}
    expires_at = options.pop("expires_at", None)
    if expires_at is not None:
        options["expires_in"] = max(expires_at - now, _LEAST_S)
    return options


def new_transaction() -> int:
    """Return the number of a transaction."""
    return secrets.randbits(32)


def unique_of(uid: str) -> str:
    """Return the text by which a broker knows a row that it has stored already."""
    return f"outbox-{uid}"


def _shard_of(order_by: str | None, transaction: int) -> int:
    if order_by is None:
        return transaction % SHARDS
    return blake2b(order_by.encode(), digest_size=1).digest()[0] % SHARDS


def _json_body(value: object) -> bytes:
    try:
        return _encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json={value!r:.80} cannot be written as JSON: {error}") from error


def _keys_of(key: str | None, keys: Sequence[str] | None) -> list[str]:
    if key is not None and keys is not None:
        raise InvalidOption("give either key or keys, not both")
    if keys is None:
        return [_key_of("a key", key)]
    texts = _listed("keys", keys)
    checked = list(dict.fromkeys(_key_of("a key", text) for text in texts))
    if len(checked) > _MOST_KEYS:
        raise InvalidOption(f"a message has at most {_MOST_KEYS} keys, not {len(checked)}")
    return checked


def _key_of(name: str, text: object) -> str:
    size = len(_text_of(name, text).encode())
    if not 1 <= size <= _MOST_KEY_BYTES:
        raise InvalidOption(f"{name} must have 1 to {_MOST_KEY_BYTES:,} bytes of UTF-8, not {size:,}")
    return str(text)


def _properties_of(properties: object) -> dict[str, str]:
    if not isinstance(properties, Mapping):
        raise InvalidOption(f"properties must be a dict of texts, not {properties!r:.80}")
    return {_text_of("a property's name", name): _text_of("a property", text) for name, text in properties.items()}


def _texts_of(name: str, texts: object) -> list[str]:
    return [_text_of(f"each of {name}", text) for text in _listed(name, texts)]


def _listed(name: str, texts: object) -> list[object]:
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Sequence):
        raise InvalidOption(f"{name} must be a list of texts, not {texts!r:.80}")
    return list(texts)


def _text_of(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidOption(f"{name} must be a str, not {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"{name} must be a str that UTF-8 can hold, not {text!r:.80}") from None
    return text


def _due_of(delay: Duration | None, deliver_at: float | datetime | None, now: float) -> float | None:
    if delay is not None:
        if deliver_at is not None:
            raise InvalidOption("give either delay or deliver_at, not both")
        ahead = _seconds_ahead("delay", delay)
        return now + ahead if ahead else None
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidOption("deliver_at has no time zone; use an aware datetime, as datetime.now(UTC) + ...")
        deliver_at = deliver_at.timestamp()
    if deliver_at is None:
        return None
    if isinstance(deliver_at, bool) or not isinstance(deliver_at, int | float):
        raise InvalidOption(f"deliver_at must be a number of seconds since 1970, not {deliver_at!r:.80}")
    if not deliver_at <= now + _MOST_AHEAD_S:
        raise InvalidOption("deliver_at must be at most 731 days ahead")
    return float(deliver_at)


def _seconds_ahead(name: str, value: object) -> float:
    seconds = seconds_of(name, value)
    if seconds > _MOST_AHEAD_S:
        raise InvalidOption(f"{name} must be at most 731 days, not {value!r:.80}")
    return seconds
