"""Which of several brokers gets what a client sends. Without I/O; time is an argument, in seconds.

New batches go to one broker until it is lost or refuses for the moment; then to the next in the order of the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq.net.client.producer.window import Sending


class Failover:
    """Moves batches between ``lanes``, the sends to each broker."""

    def __init__(self, lanes: Sequence[Sending], failover_after: float | None) -> None:
        """*failover_after*: how long what may be stored waits for its own broker; None: as long as it is tried."""
        self._lanes = lanes
        self._failover_after = failover_after
        #: The number of the lane that new batches go to.
        self.active = 0
        for number, lane in enumerate(lanes):
            lane.takes_new = number == 0

    def rebalance(self, now: float) -> None:
        """Something has changed: a broker came, went, or refused; or time has passed."""
        if len(self._lanes) == 1:
            return
        self._choose(now)
        active = self._lanes[self.active]
        if not active.is_connected:
            return
        for lane in self._lanes:
            if lane is not active:
                given = lane.give_away(now, self._failover_after)
                if given:
                    active.take_over(given)

    def _choose(self, now: float) -> None:
        count = len(self._lanes)
        order = [(self.active + step) % count for step in range(count)]
        fit = [number for number in order if self._lanes[number].is_fit(now)]
        connected = [number for number in order if self._lanes[number].is_connected]
        chosen = (fit or connected or order)[0]
        if chosen != self.active:
            self._lanes[self.active].take_new(False)
            self.active = chosen
            self._lanes[chosen].take_new(True)
