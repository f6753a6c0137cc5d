"""How long to wait before trying again."""

from __future__ import annotations

import logging
import random
import time
from typing import Final

from qmq.errors import BrokerStopping, ConnectionLost, QmqError

log = logging.getLogger("qmq.client")

FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 1.0
_TELL_EVERY: Final = 10.0


class Backoff:
    """Delays that double from 50 ms to 1 s, each less up to a half at random: many clients shall not come at once."""

    __slots__ = ("_random", "tries")

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self.tries = 0

    def next_delay(self) -> float:
        """Seconds to wait before the next try."""
        delay = min(LONGEST_DELAY, FIRST_DELAY * float(1 << min(self.tries, 10)))
        self.tries += 1
        return delay * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked: begin anew."""
        self.tries = 0


class RefusalLog:
    """Tells the log now and then why something is tried again."""

    __slots__ = ("_told_at", "_what")

    def __init__(self, what: str) -> None:
        """*what* cannot be done for now, for people."""
        self._what = what
        self._told_at = -_TELL_EVERY

    def came(self, error: QmqError) -> None:
        """It was refused so. Of lost connections the log is told elsewhere."""
        now = time.monotonic()
        if now >= self._told_at + _TELL_EVERY and not isinstance(error, ConnectionLost | BrokerStopping):
            self._told_at = now
            log.warning("%s: %s; trying again", self._what, error)
