"""When a message is to be delivered, as callers say it and as a batch carries it."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Final

from qmq.errors import InvalidOption
from qmq.format.layout import DELAY_END_US, MAX_DELAY_US

_DAY_S: Final = 86_400


def deliver_at_of(delay: float | None, deliver_at: float | datetime | None) -> int:
    """The column deliver_at: a delay goes by the broker's clock, from when it stores the message; 0: at once.

    *delay* is seconds, *deliver_at* seconds since 1970 or an aware datetime. Raises InvalidOption.
    """
    if delay is not None and deliver_at is not None:
        raise InvalidOption("give either delay or deliver_at, not both")
    if delay is not None:
        delay_us = _microseconds("delay", delay)
        _check_limit(delay_us)
        return max(0, delay_us)
    if deliver_at is None:
        return 0
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidOption("deliver_at has no time zone; use an aware datetime, as datetime.now(UTC) + ...")
        deliver_at = deliver_at.timestamp()
    at_us = _microseconds("deliver_at", deliver_at)
    _check_limit(at_us - time.time_ns() // 1_000 - _DAY_S * 1_000_000)  # the broker knows better what time it is
    return at_us if at_us >= DELAY_END_US else 0


def expire_at_of(expire: float | None) -> int:
    """The column expire_at: so many microseconds from when the broker stores the message; 0: never. *expire* is
    seconds. Raises InvalidOption.
    """
    if expire is None:
        return 0
    expire_us = _microseconds("expire", expire)
    if not 0 < expire_us <= MAX_DELAY_US:
        raise InvalidOption(
            f"expire must be above 0 and at most {MAX_DELAY_US // 1_000_000} seconds, not {expire!r:.80}"
        )
    return expire_us


def _microseconds(name: str, seconds: object) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise InvalidOption(f"{name} must be a number of seconds, not {seconds!r:.80}")
    return math.ceil(seconds * 1_000_000)


def _check_limit(delay_us: int) -> None:
    if delay_us > MAX_DELAY_US:
        raise InvalidOption(
            f"a message is to be delivered in {delay_us / 1e6 / _DAY_S:.1f} days; at most "
            f"{MAX_DELAY_US // 1_000_000 // _DAY_S} days are allowed"
        )
