"""What callers hand over to a client, checked at the call.

When a message is to be delivered, as callers say it and as a batch carries it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from qmq.errors import InvalidName, InvalidOption
from qmq.format.layout import DELAY_END_US, MAX_DELAY_SHOWN, MAX_DELAY_US, PRODUCER_ID_SIZE
from qmq.net.client.address import Address, parse_url

Body = bytes | bytearray | memoryview
Durability = Literal["flush", "append"]
Start = Literal["first", "last"] | datetime | int | None

_MAX_PRODUCER_NAME = 200

#: What one pull may bring; and one for columns, which makes no object of a message.
PULL_BYTES: Final = 4 << 20
BATCH_BYTES: Final = 16 << 20


class ClientOptions(NamedTuple):
    """What ``connect`` was called with. Times in seconds."""

    addresses: tuple[Address, ...]
    flush: bool
    linger: float
    producer: str | None
    send_timeout: float
    max_queued_bytes: int
    failover_after: float | None
    admin_timeout: float


def check_options(
    url: str,
    durability: str,
    linger: float,
    producer: str | None,
    send_timeout: float,
    max_queued_bytes: int,
    failover_after: float | None,
    admin_timeout: float,
) -> ClientOptions:
    """Check what ``connect`` was called with. Raises InvalidOption, InvalidName."""
    if not _is_number(linger) or linger < 0:
        raise InvalidOption(f"linger must be a number of seconds from 0, not {linger!r}")
    if not _is_number(send_timeout) or send_timeout <= 0:
        raise InvalidOption(f"send_timeout must be a number of seconds above 0, not {send_timeout!r}")
    if linger >= send_timeout:
        raise InvalidOption(f"linger ({linger!r} s) must be below send_timeout ({send_timeout!r} s)")
    if type(max_queued_bytes) is not int or max_queued_bytes <= 0:
        raise InvalidOption(f"max_queued_bytes must be a number of bytes above 0, not {max_queued_bytes!r}")
    if producer is not None:
        producer_id_of(producer)
    if failover_after is not None and (not _is_number(failover_after) or failover_after < 0):
        raise InvalidOption(f"failover_after must be a number of seconds from 0 or None, not {failover_after!r}")
    if not _is_number(admin_timeout) or not 0 < admin_timeout < 1e9:
        raise InvalidOption(f"admin_timeout must be a number of seconds above 0, not {admin_timeout!r}")
    addresses = tuple(dict.fromkeys(parse_url(url)))
    return ClientOptions(
        addresses,
        is_flush(durability),
        linger,
        producer,
        send_timeout,
        max_queued_bytes,
        failover_after,
        admin_timeout,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_flush(durability: str) -> bool:
    """Whether that durability waits for the disk. Raises InvalidOption."""
    if durability == "flush":
        return True
    if durability == "append":
        return False
    raise InvalidOption(f'durability must be "flush" or "append", not {durability!r}')


def producer_id_of(producer: str) -> bytes:
    """The 16 bytes that a producer name stands for. Raises InvalidName."""
    if not isinstance(producer, str) or not 1 <= len(producer) <= _MAX_PRODUCER_NAME:
        raise InvalidName(f"producer must be a str of 1 to {_MAX_PRODUCER_NAME} characters, not {producer!r:.80}")
    return hashlib.blake2b(producer.encode("utf-8", "surrogatepass"), digest_size=PRODUCER_ID_SIZE).digest()


def body_of(body: object) -> bytes:
    """*body* as bytes of its own. Raises TypeError."""
    if type(body) is bytes:
        return body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    advice = "; encode it first, as in text.encode()" if isinstance(body, str) else ""
    raise TypeError(f"a body must be bytes, bytearray or memoryview, not {type(body).__name__}{advice}")


def bodies_of(bodies: Sequence[Body]) -> list[bytes]:
    """The bodies as a list of bytes, maybe the very one given. Raises TypeError."""
    if isinstance(bodies, str | bytes | bytearray | memoryview):
        raise TypeError(f"send_many takes a sequence of bodies, not one {type(bodies).__name__}; use send for one")
    listed = bodies if type(bodies) is list else list(bodies)
    if list(map(type, listed)).count(bytes) == len(listed):
        return listed  # type: ignore[return-value]  # bytes only
    return list(map(body_of, listed))


def check_pull(max_count: int, min_count: int, timeout: float | None) -> None:
    """Raise InvalidOption for what a pull can't be asked for."""
    if type(max_count) is not int or type(min_count) is not int or not 1 <= min_count <= max_count:
        raise InvalidOption(
            f"a pull needs 1 <= min_count <= max_count, not min_count={min_count!r}, max_count={max_count!r}"
        )
    if timeout is not None and (not isinstance(timeout, int | float) or not 0 <= timeout < 1e9):
        raise InvalidOption(f"timeout must be a number of seconds from 0, or None to wait without end, not {timeout!r}")


def start_of(start: object) -> Any:
    """What SUBSCRIBE says for *start*. Raises InvalidOption."""
    if start is None or start in ("first", "last"):
        return start
    if isinstance(start, datetime):
        if start.utcoffset() is None:
            raise InvalidOption(f"start {start!r} has no time zone; use datetime(..., tzinfo=UTC)")
        since = start - datetime(1970, 1, 1, tzinfo=UTC)
        return ["time", max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)]
    if type(start) is int and 0 <= start < 1 << 63:
        return ["sequence", start]
    raise InvalidOption(f'start must be "first", "last", an aware datetime, a sequence from 0 or None, not {start!r}')


def make_consumer_id() -> str:
    """An id for a consumer that was given none: host, process id and a random part."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:100] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


_DAY_US: Final = 86_400_000_000
#: Seconds since 1970 in which no calendar is left.
_FAR: Final = 1e15


def deliver_at_of(delay: float | None, deliver_at: float | datetime | None) -> int:
    """The column deliver_at: a delay goes by the broker's clock, from when it stores the message; 0: at once.

    *delay* is seconds, *deliver_at* seconds since 1970 or an aware datetime. Raises InvalidOption.
    """
    if delay is not None and deliver_at is not None:
        raise InvalidOption("give either delay or deliver_at, not both")
    if delay is not None:
        return microseconds_of("delay", delay)
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
    if ahead_us > MAX_DELAY_US + _DAY_US:  # the broker knows better what time it is
        raise InvalidOption(
            f"a message is to be delivered in {ahead_us / _DAY_US:.1f} days; at most {MAX_DELAY_SHOWN} are allowed"
        )
    return at_us if at_us >= DELAY_END_US else 0


def expire_at_of(expire: float | None) -> int:
    """The column expire_at: so many microseconds from when the broker stores the message; 0: never. *expire* is
    seconds. Raises InvalidOption.
    """
    if expire is None:
        return 0
    expire_us = microseconds_of("expire", expire)
    if not expire_us:
        raise InvalidOption(f"expire must be above 0 seconds, not {expire!r:.80}; leave it out for never")
    return expire_us


def microseconds_of(name: str, seconds: object) -> int:
    """A time that a caller gives in seconds, as microseconds; a shorter one than that counts as one.

    Raises InvalidOption where it is none, negative, or longer than MAX_DELAY_US.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_DELAY_US / 1_000_000:  # type: ignore[operator]  # it is a number
        raise InvalidOption(f"{name} must be a number of seconds from 0 to {MAX_DELAY_SHOWN}, not {seconds!r:.80}")
    return max(round(seconds * 1_000_000), int(seconds > 0))  # type: ignore[operator]
