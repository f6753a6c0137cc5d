"""Delays between tries, and log lines about refused ones."""

from __future__ import annotations

import logging
import random
import time
from typing import Final

from qmq.errors import BrokerStopping, ConnectionLost, QmqError

log = logging.getLogger("qmq.client")

FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 1.0
_LOG_EVERY: Final = 10.0


class Backoff:
    """Delays that double from 50 ms to 1 s. Each is shortened by up to half at random, to spread many clients."""

    __slots__ = ("_random", "tries")

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self.tries = 0

    def next_delay(self) -> float:
        """Return the seconds to wait before the next try."""
        delay = min(LONGEST_DELAY, FIRST_DELAY * float(1 << min(self.tries, 10)))
        self.tries += 1
        return delay * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest delay again, after a success."""
        self.tries = 0


class RefusalLog:
    """Logs why an action is tried again, at most once in ten seconds."""

    __slots__ = ("_action", "_logged_at")

    def __init__(self, action: str) -> None:
        """*action*: the text that begins each log line."""
        self._action = action
        self._logged_at = -_LOG_EVERY

    def came(self, error: QmqError) -> None:
        """Log a refusal. The link logs lost connections."""
        now = time.monotonic()
        if now >= self._logged_at + _LOG_EVERY and not isinstance(error, ConnectionLost | BrokerStopping):
            self._logged_at = now
            log.warning("%s: %s; trying again", self._action, error)
