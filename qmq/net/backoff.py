"""How long to wait before trying again."""

from __future__ import annotations

import random
from typing import Final

FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 1.0


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
