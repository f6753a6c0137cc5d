"""The jobs of workers for every client library: loops that send and receive, timed and checked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from bench.peers.peer import Promise, Target
from bench.peers.workers.driving import Receiver, closing, driver
from bench.peers.workers.tally import Tally, bodies
from qmq.bench.values import BenchFailed, latencies
from qmq.bench.worker import Gate

#: A message on a schedule is missing if it was not acknowledged or received this long after the last one was due.
LATE_S: Final = 30.0
_SKIPPED: Final = 0.1
#: A sender gives up if it takes so many times as long as its schedule, and some seconds.
_SLOWEST: Final = 2.0
_SLOWEST_S: Final = 2.0
#: How many messages a client that blocks sends between two looks at the clock.
_POSTED_AT_ONCE: Final = 1_000


def target_of(told: dict[str, Any]) -> Target:
    """Return a target from plain types."""
    return Target(told["address"], Promise(told["promise"]), told.get("more", {}))


async def make(gate: Gate, *, module: str, target: dict[str, Any], topics: list[str]) -> dict[str, Any]:
    """Create topics."""
    chosen = driver(module)
    gate()
    started = time.perf_counter()
    await chosen.make_topics(target_of(target), topics)
    return {"topics": len(topics), "seconds": time.perf_counter() - started}


async def send(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, size: int, messages: int
) -> dict[str, Any]:
    """Send *messages* to *topic* in that way, until all are acknowledged."""
    parts = bodies(size)
    sender = driver(module).sender(target_of(target), way)
    await sender.open([topic])
    async with closing(sender):
        gate()
        started = time.perf_counter()
        await sender.run(topic, parts, messages)
        seconds = time.perf_counter() - started
    return {"messages": messages, "seconds": seconds}


async def consume(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, group: str, size: int, messages: int,
    there: int | None = None, text: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Take and acknowledge *messages* of *topic*, or so many if more are *there*; *text* as in `Tally`.

    ``checked`` says whether their bodies were compared.
    """
    tally = Tally(size, messages, there, text)
    receiver = driver(module).receiver(target_of(target), way, topic, group)
    found = await take_all(gate, receiver, tally, messages, there is None)
    if way == "failing" and not receiver.refused:
        raise BenchFailed("no message failed: send more")
    return found


async def take_all(gate: Gate, receiver: Receiver, tally: Tally, messages: int, is_all: bool) -> dict[str, Any]:
    """Take and acknowledge *messages*, with *is_all* all that there are; the result is as that of `consume`."""
    await receiver.open()
    async with closing(receiver):
        gate()
        came, early, touched, started = 0, 0, True, time.perf_counter()
        while came < messages:
            found = await receiver.take()
            if isinstance(found, int):
                touched, count = False, found
            else:
                count = len(found)
                tally.add(found)
            if not count:
                raise BenchFailed(f"{came} messages came, {messages} were sent")
            if not came and receiver.late_start:
                early, started = count, time.perf_counter()
            came += count
        await receiver.flush()
        seconds = time.perf_counter() - started
        await _check_end(receiver, tally, touched, came, is_all)
    if came == early:
        raise BenchFailed("all messages came at once: nothing was timed; send more")
    return {"messages": came - early, "seconds": seconds, "checked": touched}


async def _check_end(receiver: Receiver, tally: Tally, touched: bool, came: int, is_all: bool) -> None:
    """Raise BenchFailed unless all messages arrived as they were sent, and, with *is_all*, none is left."""
    if touched:
        tally.check()
    elif came != tally.messages:
        raise BenchFailed(f"{came} messages came, {tally.messages} were sent")
    left = await receiver.left() if is_all else 0
    if left:
        raise BenchFailed(f"all messages were acknowledged, and the broker keeps {left} for the group")


# ---------------------------------------------------------------------------------------------------------------------
# On a schedule


async def paced(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, size: int, rate: int, seconds: float
) -> dict[str, Any]:
    """Send on a fixed schedule, spinning: each message is timed from when it was due to its acknowledgement.

    A body begins with when it was due (monotonic ns). If it takes far longer than its schedule, it gives up, and
    returns how fast it was.
    """
    total, every = int(rate * seconds), 1_000_000_000 // rate
    rest = bodies(size)[0][8:]
    sender = driver(module).sender(target_of(target), way)
    await sender.open([topic])
    async with closing(sender):
        took = array("q", bytes(8 * total))
        start = done = latest = 0

        def acked(number: int) -> None:
            nonlocal done
            took[number] = time.monotonic_ns() - start - number * every
            done += 1

        sender.acked = acked
        gate()
        start = time.monotonic_ns() + 20_000_000
        sent = 0
        while sent < total:
            now = time.monotonic_ns()
            if now - start > 1e9 * (seconds * _SLOWEST + _SLOWEST_S):
                return {"messages": sent, "gave_up": True, "sent_rate": sent * 1e9 / (now - start)}
            due = min((now - start) // every + 1, total, sent + _POSTED_AT_ONCE)
            while sent < due:
                at = start + sent * every
                latest = max(latest, now - at)
                sender.post(topic, at.to_bytes(8, "big") + rest, sent)
                sent += 1
            await sender.turn()
        sending_s = (time.monotonic_ns() - start) / 1e9
        await sender.flush()
    if done != total and sender.tells_acks:
        raise BenchFailed(f"{total} messages were sent, {done} were acknowledged")
    return {
        "messages": total,
        "gave_up": False,
        "first_due_ns": start,
        "latest_ms": latest / 1e6,
        "sent_rate": total / sending_s,
        **(_tail(took) if sender.tells_acks else {}),
    }


async def arrivals(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, group: str, size: int, rate: int,
    messages: int,
) -> dict[str, Any]:  # fmt: skip
    """Take the messages that `paced` sends: each is timed from when it was due until it arrives."""
    every = 1_000_000_000 // rate
    receiver = driver(module).receiver(target_of(target), way, topic, group)
    await receiver.open()
    async with closing(receiver):
        gate()
        took, came = array("q"), list[bytes]()
        deadline = time.monotonic() + messages / rate + 2 * LATE_S
        while len(came) < messages and time.monotonic() < deadline:
            found = await receiver.take()
            assert not isinstance(found, int), "a way on a schedule touches bodies"
            now = time.monotonic_ns()
            took.extend(now - int.from_bytes(body[:8], "big") for body in found)
            came += map(bytes, found)
        await receiver.flush()
        _check_schedule(came, messages, every, size)
        left = await receiver.left()
    if left:
        raise BenchFailed(f"all messages were acknowledged, and the broker keeps {left} for the group")
    return {"messages": len(came), "first_due_ns": int.from_bytes(min(came)[:8], "big"), **_tail(took)}


def _check_schedule(came: Sequence[bytes], messages: int, every: int, size: int) -> None:
    """Raise BenchFailed unless each message of the schedule arrived once, and no other did."""
    if len(came) != messages:
        raise BenchFailed(f"{len(came)} messages came, {messages} were sent")
    rest = bodies(size)[0][8:]
    first = int.from_bytes(min(came)[:8], "big")
    if sorted(came) != [(first + number * every).to_bytes(8, "big") + rest for number in range(messages)]:
        raise BenchFailed("what came is not what was sent on the schedule")


def _tail(took_ns: array[int]) -> dict[str, float]:
    """Return percentiles without the first tenth."""
    return latencies([at / 1e9 for at in took_ns[int(len(took_ns) * _SKIPPED) :]])


JOBS: Final[dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]]] = {
    "make": make,
    "send": send,
    "consume": consume,
    "paced": paced,
    "arrivals": arrivals,
}
