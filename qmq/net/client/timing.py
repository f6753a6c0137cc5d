"""When a message is to be delivered, as callers say it and as a batch carries it."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Final

from qmq.errors import InvalidOption
from qmq.format.layout import DELAY_END_US, MAX_DELAY_SHOWN, MAX_DELAY_US

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
