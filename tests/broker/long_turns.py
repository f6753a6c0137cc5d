"""The length of the broker's turns when a consumer with many messages in flight expires or leaves, and when many dead
letters are redriven: `python -m tests.broker.long_turns` prints a line for each.

It measures the processor time of each tick, since other programs may run; a line has the longest, and the number.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from qmq.broker.ports.commands import Ack, Administer, Unsubscribe
from qmq.broker.ports.effects import PulledMessages
from qmq.broker.ports.limits import BrokerLimits
from tests.broker.harness import Driven
from tests.fake_disk import FakeDisk

SESSION_TIMEOUT_MS = 30_000
#: Messages of a batch, and so of a range in flight.
BATCH = 1_000


class Turns(NamedTuple):
    """The times of ticks."""

    count: int
    longest_ms: float
    total_ms: float
    messages: int


def in_flight(directory: Path, messages: int, holes: int) -> tuple[Driven, int]:
    """Return a broker with a consumer that has that many messages in flight, and has acked others among them."""
    driven = Driven(directory, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS), disk=FakeDisk())
    subscription = driven.subscribe("a", group="g")
    settings = {"max_unacked": messages, "max_unacked_bytes": 1 << 40}
    driven.do(Administer(1, driven.request(), "set_group", {"group": "g", "settings": settings}))
    for _ in range(messages // BATCH):
        driven.do(driven.send_command({"a": [b"x"] * BATCH}, flush=False))
    in_flight = 0
    while in_flight < messages:
        said = driven.do(driven.pull_command(subscription, max_count=messages, max_bytes=1 << 30))
        in_flight += sum(answer.messages for answer in said if isinstance(answer, PulledMessages))
    if holes:
        step = messages // holes
        for first in range(0, messages, 1_000 * step):
            pairs = [
                number for at in range(first, min(first + 1_000 * step, messages), step) for number in (at, at + 1)
            ]
            driven.do(Ack(1, driven.request(), subscription, tuple(pairs)))
    return driven, subscription


def ticks(driven: Driven, milliseconds: int) -> Iterator[float]:
    """Return the processor time of each tick in ms, while the broker asks for another at once."""
    driven.now = driven.now._replace(
        monotonic_us=driven.now.monotonic_us + 1_000 * milliseconds, wall_us=driven.now.wall_us + 1_000 * milliseconds
    )
    for _ in range(1_000_000):
        begun = time.process_time()
        deadline_us = driven.broker.tick(driven.now)
        yield (time.process_time() - begun) * 1_000
        driven.effects()
        if deadline_us is None or deadline_us > driven.now.monotonic_us:
            return


def waiting(driven: Driven) -> int:
    """Return how many messages of the group wait for redelivery."""
    group = driven.broker.groups["g"]
    assert group.ledger is not None
    return group.ledger.retries.count


def measured(driven: Driven, taken: Iterator[float]) -> Turns:
    times = list(taken)
    driven.store.close(clean=False)
    return Turns(len(times), max(times), sum(times), waiting(driven))


def expire_session(directory: Path, messages: int, holes: int) -> Turns:
    """Let the consumer's session expire."""
    driven, _ = in_flight(directory, messages, holes)
    return measured(driven, ticks(driven, SESSION_TIMEOUT_MS + 1_000))


def leave(directory: Path, messages: int, holes: int) -> Turns:
    """Let the consumer leave by itself."""
    driven, subscription = in_flight(directory, messages, holes)

    def turns() -> Iterator[float]:
        begun = time.process_time()
        driven.broker.handle(Unsubscribe(1, driven.request(), subscription), driven.now)
        driven.broker.turn(driven.now)
        yield (time.process_time() - begun) * 1_000
        driven.effects()
        yield from ticks(driven, 0)

    return measured(driven, turns())


def main(messages: int) -> None:
    """All of them."""
    for name, work in (("falls silent", expire_session), ("leaves", leave)):
        for holes in (0, messages // 1_000, messages // 10):
            with tempfile.TemporaryDirectory() as directory:
                found = work(Path(directory) / "data", messages, holes)
            print(
                f"a consumer of {messages} messages with {holes} acknowledged in between {name}: {found.count} turns, "
                f"the longest {found.longest_ms:.1f} ms of {found.total_ms:.0f} ms; {found.messages} come again",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
