"""The arguments of a client's calls: their checks, and the values that frames and batches carry for them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

from qmq.durations import Duration, microseconds_of, seconds_of
from qmq.errors import InvalidName, InvalidOption, UsageError
from qmq.format.layout import (
    DELAY_END_US,
    LANE_HIGH,
    LANE_LOW,
    LANE_NORMAL,
    MAX_DELAY_SHOWN,
    MAX_DELAY_US,
    PRODUCER_ID_SIZE,
)
from qmq.net.client.address import DEFAULT_URL, Address, check_used, parse_url, tls_files, token_file_of, token_of

Body = bytes | bytearray | memoryview
Durability = Literal["flush", "append"]
#: A priority; 0 is low, 1 normal, 2 high.
Priority = Literal["low", "normal", "high", 0, 1, 2]
Start = Literal["first", "new"] | datetime | int | None

_MAX_PRODUCER_NAME = 200
#: Timeouts are shorter than this, in seconds (31 years): timers take no longer ones.
MAX_SECONDS: Final = 1e9
_MAX_SHOWN_NAME: Final = 100

#: The default size limits of ``pull``, and of ``pull_batch``, which makes no object for each message.
PULL_BYTES: Final = 4 << 20
BATCH_BYTES: Final = 16 << 20


class ClientOptions(NamedTuple):
    """The arguments of ``connect``, checked. Times are seconds."""

    addresses: tuple[Address, ...]
    flush: bool
    linger: float
    producer: str | None
    send_timeout: float
    max_queued_bytes: int
    failover_after: float | None
    admin_timeout: float
    name: str = ""
    app: str = ""
    wait: float = 0


def check_options(
    url: str | None,
    durability: str,
    linger: Duration,
    producer: str | None,
    send_timeout: Duration,
    max_queued_bytes: int,
    failover_after: Duration | None,
    admin_timeout: Duration,
    name: str | None = None,
    app: str | None = None,
    wait: Duration = 0,
    token: object = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
) -> ClientOptions:
    """Return the options of a client from the arguments of ``connect``. Raises InvalidOption, InvalidName."""
    linger_s, send_timeout_s = seconds_of("linger", linger), above_0("send_timeout", send_timeout)
    if linger_s >= send_timeout_s:
        raise InvalidOption(f"linger ({linger!r}) must be below send_timeout ({send_timeout!r})")
    if type(max_queued_bytes) is not int or max_queued_bytes <= 0:
        raise InvalidOption(f"max_queued_bytes must be a number of bytes above 0, not {max_queued_bytes!r}")
    if producer is not None:
        producer_id_of(producer)
    found = os.environ.get("QMQ_SERVER") or DEFAULT_URL if url is None else url
    files, read_from = tls_files(tls_ca, tls_cert, tls_key), token_file_of(token, token_file)
    addresses = tuple(dict.fromkeys(parse_url(found, files, token_of(token, token_file), read_from)))
    check_used(addresses, {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key})
    return ClientOptions(
        addresses,
        is_flush(durability),
        linger_s,
        producer,
        send_timeout_s,
        max_queued_bytes,
        None if failover_after is None else seconds_of("failover_after", failover_after),
        above_0("admin_timeout", admin_timeout),
        "" if name is None else _shown_name("name", name),
        _program() if app is None else _shown_name("app", app),
        seconds_of("wait", wait),
    )


def above_0(name: str, value: object) -> float:
    """Return a duration in seconds, above 0 and below MAX_SECONDS. Raises InvalidOption, which calls it *name*."""
    seconds = seconds_of(name, value)
    if not 0 < seconds < MAX_SECONDS:
        raise InvalidOption(f"{name} must be above 0 and below 1e9 seconds, not {value!r:.80}")
    return seconds


def _shown_name(argument: str, name: object) -> str:
    """Return a name that brokers show to people. Raises InvalidName."""
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_SHOWN_NAME or not name.isprintable():
        raise InvalidName(f"{argument} must be a printable str of 1 to {_MAX_SHOWN_NAME} characters, not {name!r:.80}")
    return name


def _program() -> str:
    """Return the name of this program: that of its file, or of its package when it was run by ``python -m``."""
    path = Path(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else Path("python")
    name = path.parent.name if path.name == "__main__.py" else path.name.removesuffix(".py")
    return "".join(character for character in name if character.isprintable())[:_MAX_SHOWN_NAME]


def is_flush(durability: str) -> bool:
    """Return whether *durability* waits for the disk. Raises InvalidOption."""
    if durability == "flush":
        return True
    if durability == "append":
        return False
    raise InvalidOption(f'durability must be "flush" or "append", not {durability!r}')


def producer_id_of(producer: str) -> bytes:
    """Return the producer id, 16 bytes, of a producer name. Raises InvalidName."""
    if not isinstance(producer, str) or not 1 <= len(producer) <= _MAX_PRODUCER_NAME:
        raise InvalidName(f"producer must be a str of 1 to {_MAX_PRODUCER_NAME} characters, not {producer!r:.80}")
    return hashlib.blake2b(producer.encode("utf-8", "surrogatepass"), digest_size=PRODUCER_ID_SIZE).digest()


def body_of(body: object) -> bytes:
    """Return *body* as bytes, copied unless it is bytes. Raises TypeError."""
    if type(body) is bytes:
        return body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    advice = "; encode it first, as in text.encode()" if isinstance(body, str) else ""
    raise TypeError(f"a body must be bytes, bytearray or memoryview, not {type(body).__name__}{advice}")


_LANES: Final = {
    "low": LANE_LOW, "normal": LANE_NORMAL, "high": LANE_HIGH, 0: LANE_LOW, 1: LANE_NORMAL, 2: LANE_HIGH
}  # fmt: skip


def lane_of(priority: Priority | None) -> int:
    """Return the lane of a priority; None: the normal one. Raises InvalidOption."""
    if priority is None:
        return LANE_NORMAL
    lane = _LANES.get(priority) if type(priority) in (str, int) else None
    if lane is None:
        raise InvalidOption(f"priority must be 'low', 'normal' or 'high', or 0, 1 or 2, not {priority!r:.80}")
    return lane


#: The default of ``json``: no value, as None is one.
NO_JSON: Final[Any] = object()
_CONTENT_TYPE: Final = "content-type"
_JSON_TYPE: Final = "application/json"
# Strict: NaN is no JSON, and a lone surrogate is no text, so other programs could not read them.
_encode_json: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_body_of(value: object, properties: Mapping[str, str] | None) -> tuple[bytes, dict[str, str]]:
    """Return *value* as a body of JSON, and *properties* with the content type that says so. Raises UsageError."""
    if value is NO_JSON:
        raise UsageError("a message needs a body: give bytes, or json=")
    try:
        body = _encode_json(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json={value!r:.80} cannot be written as JSON: {error}") from error
    return body, {_CONTENT_TYPE: _JSON_TYPE, **(properties or {})}


def json_of(body: bytes) -> Any:
    """Return the value that *body* has as JSON. Raises ValueError."""
    return _json_decoder()(body)


@cache
def _json_decoder() -> Callable[[bytes], Any]:
    """Return msgspec's decoder, three to six times as fast, if it is installed."""
    try:
        import msgspec  # type: ignore[import-not-found,unused-ignore]  # of the extra qmq[json]
    except ImportError:
        return decode_json
    decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode
    return decode


def decode_json(body: bytes) -> Any:
    """Do as ``json_of``, by the standard library."""
    return json.loads(body.decode(), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def bodies_of(bodies: Sequence[Body]) -> list[bytes]:
    """Return the bodies as a list of bytes; this may be *bodies* itself. Raises TypeError."""
    if isinstance(bodies, str | bytes | bytearray | memoryview):
        raise TypeError(f"send_many takes a sequence of bodies, not one {type(bodies).__name__}; use send for one")
    listed = bodies if type(bodies) is list else list(bodies)
    if list(map(type, listed)).count(bytes) == len(listed):
        return listed  # type: ignore[return-value]  # bytes only
    return list(map(body_of, listed))


def check_pull(max_count: int, min_count: int, timeout: Duration | None) -> float | None:
    """Check the arguments of a pull; return its timeout in seconds. Raises InvalidOption."""
    if type(max_count) is not int or type(min_count) is not int or not 1 <= min_count <= max_count:
        raise InvalidOption(
            f"a pull needs 1 <= min_count <= max_count, not min_count={min_count!r}, max_count={max_count!r}"
        )
    if timeout is None:
        return None
    seconds = seconds_of("timeout", timeout)
    if seconds >= MAX_SECONDS:
        raise InvalidOption(f"timeout must be below 1e9 seconds, or None for no limit, not {timeout!r}")
    return seconds


def start_of(start: object) -> Any:
    """Return the field start of SUBSCRIBE for *start*. Raises InvalidOption."""
    if start is None or start in ("first", "new"):
        return start
    if isinstance(start, datetime):
        if start.utcoffset() is None:
            raise InvalidOption(f"start {start!r} has no time zone; use datetime(..., tzinfo=UTC)")
        since = start - datetime(1970, 1, 1, tzinfo=UTC)
        return ["time", max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)]
    if type(start) is int and 0 <= start < 1 << 63:
        return ["sequence", start]
    raise InvalidOption(f'start must be "first", "new", an aware datetime, a sequence or None, not {start!r}')


def make_consumer_id() -> str:
    """Return an id for a consumer without one: host, process id and a random part."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:100] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


_DAY_US: Final = 86_400_000_000
#: Times from this one on, in seconds since 1970, are refused: no calendar reaches them.
_FAR: Final = 1e15


def deliver_at_of(delay: Duration | None, deliver_at: float | datetime | None) -> int:
    """Return the column deliver_at; 0: at once. A delay counts from the time at which the broker stores the message.

    *deliver_at* is in seconds since 1970, or an aware datetime. Raises InvalidOption.
    """
    if delay is not None and deliver_at is not None:
        raise InvalidOption("give either delay or deliver_at, not both")
    if delay is not None:
        return delay_us_of("delay", delay)
    if deliver_at is None:
        return 0
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidOption("deliver_at has no time zone; use an aware datetime, as datetime.now(UTC) + ...")
        deliver_at = deliver_at.timestamp()
    if isinstance(deliver_at, bool) or not isinstance(deliver_at, int | float) or not abs(deliver_at) < _FAR:
        raise InvalidOption(f"deliver_at must be a number of seconds since 1970, not {deliver_at!r:.80}")
    at_us = math.ceil(deliver_at * 1_000_000)
    ahead_us = at_us - time.time_ns() // 1_000
    if ahead_us > MAX_DELAY_US + _DAY_US:  # a day more, as the broker's clock counts, not this one
        raise InvalidOption(
            f"deliver_at is {ahead_us / _DAY_US:.1f} days ahead; it must be at most {MAX_DELAY_SHOWN} ahead"
        )
    return at_us if at_us >= DELAY_END_US else 0


def expire_at_of(expires_in: Duration | None) -> int:
    """Return the column expire_at: microseconds from the time at which the broker stores the message; 0: never.

    Raises InvalidOption.
    """
    if expires_in is None:
        return 0
    expire_us = delay_us_of("expires_in", expires_in)
    if not expire_us:
        raise InvalidOption(f"expires_in must be above 0 seconds, not {expires_in!r:.80}; leave it out for never")
    return expire_us


def delay_us_of(name: str, value: object) -> int:
    """Return a duration of up to MAX_DELAY_US in microseconds: at least 1, unless it is 0.

    Raises InvalidOption, which calls it *name*.
    """
    delay_us = microseconds_of(name, value)
    if delay_us > MAX_DELAY_US:
        raise InvalidOption(f"{name} must be at most {MAX_DELAY_SHOWN}, not {value!r:.80}")
    return delay_us
