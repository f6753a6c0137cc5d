"""How many messages a loop takes from the broker at a time. Without I/O; time is an argument.

What a consumer of a group has in hand, others can't have. So it takes about as many as it handles in a tenth of a
second at the rate of those before, from one up: a slow one has nothing that waits, and a fast one seldom asks.
"""

from __future__ import annotations

from typing import Final

#: Seconds of work that are taken at a time.
WORK: Final = 0.1
#: Who follows alone takes nothing from others.
FIRST_SOLO: Final = 16
MOST: Final = 32_768


class Prefetch:
    """Of one loop."""

    def __init__(self, is_solo: bool) -> None:
        self._count = FIRST_SOLO if is_solo else 1
        self._came = 0
        self._came_at = 0.0

    def wanted(self, now: float) -> int:
        """How many to take, as those that came before are handled."""
        if not self._came:
            return self._count
        took = now - self._came_at
        fits = max(int(self._came * WORK / took), 1) if took > 0 else MOST
        if fits < self._count:
            self._count = fits
        elif self._came > self._count // 2:  # batches go whole, so it is rarely all that was asked for
            self._count = min(2 * self._count, fits, MOST)
        return self._count

    def came(self, count: int, now: float) -> None:
        """So many were taken."""
        self._came, self._came_at = count, now
