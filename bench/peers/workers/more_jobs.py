"""The jobs of workers for many topics or many consumers."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from bench.peers.workers.driving import Receiver, closing, driver
from bench.peers.workers.jobs import take_all, target_of
from bench.peers.workers.tally import BODIES, Tally, bodies
from qmq.bench.values import BenchFailed
from qmq.bench.worker import Gate

_TIMEOUT_S: Final = 0.2
#: The time after which messages in flight to a member that has left come again, if nothing else brings them back.
_SESSION_TIMEOUT_S: Final = 2.0
_IDLE_S: Final = 600.0
_SETTLE_S: Final = 1.0
_ON_THEIR_WAY: Final = 10_000
_TURN_EVERY: Final = 1_000
_FIRST_MADE: Final = 20
_MADE_AT_ONCE: Final = 500


async def make_many(
    gate: Gate, *, module: str, target: dict[str, Any], prefix: str, count: int, timeout_s: float
) -> dict[str, Any]:
    """Create `topics_of`, some at a time, and give up after *timeout_s*; return how many there are."""
    chosen, topics = driver(module), topics_of(prefix, count)
    gate()
    seconds, made, at_once = 0.0, 0, _FIRST_MADE
    while made < count and seconds <= timeout_s:
        started = time.perf_counter()
        await chosen.make_topics(target_of(target), topics[made : made + at_once])
        seconds += time.perf_counter() - started
        made = min(made + at_once, count)
        at_once = min(2 * at_once, _MADE_AT_ONCE)
    return {"topics": made, "seconds": seconds}


def enough(made: int, count: int, seconds: float) -> None:
    """Raise BenchFailed if fewer than *count* topics could be created in that time."""
    if made < count:
        raise BenchFailed(f"in {seconds:.0f} s only {made:,} of {count:,} topics could be made")


async def spread(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], prefix: str, count: int, size: int, messages: int,
    seed: int, timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Send a message to each of `topics_of`, then each message to a random one.

    Where topics need not be created, the first messages create them. Raises BenchFailed if that takes longer than
    *timeout_s*.
    """
    topics = topics_of(prefix, count)
    parts, places = bodies(size), places_of(count, messages, seed)
    sender = driver(module).sender(target_of(target), way)
    await sender.open(topics)
    done = 0

    def acked(_: int) -> None:
        nonlocal done
        done += 1

    sender.acked = acked

    async def post(first: int, chosen: Sequence[int]) -> float:
        """Send to these topics, beginning with message number *first*; return the seconds until all are
        acknowledged.
        """
        started = time.perf_counter()
        until = started + (timeout_s if not first else math.inf)
        for number, place in enumerate(chosen, first):
            sender.post(topics[place], parts[number % BODIES], number)
            if not number % _TURN_EVERY and number > first:
                if time.perf_counter() > until:
                    enough(number, len(chosen), timeout_s)
                await sender.turn()
                while sender.tells_acks and number - done > _ON_THEIR_WAY:
                    await sender.turn()
        await sender.flush()
        return time.perf_counter() - started

    try:
        made_s = await post(0, range(len(topics)))
        gate()
        seconds = await post(len(topics), places)
    finally:
        await sender.close()
    return {"messages": messages, "seconds": seconds, "made_s": made_s}


def topics_of(prefix: str, count: int) -> list[str]:
    """Return the topics that messages are spread over. They are not among a worker's options, since these would be too
    long.
    """
    return [f"{prefix}.{number:06}" for number in range(count)]


def places_of(topics: int, messages: int, seed: int) -> list[int]:
    """Return the index of the topic of each message."""
    return random.Random(seed).choices(range(topics), k=messages)


async def check_spread(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], prefix: str, count: int, size: int, messages: int,
    seed: int, places: list[int],
) -> dict[str, Any]:  # fmt: skip
    """Consume the topics at *places*, and compare each with what `spread` sent to it."""
    gate()
    topics = topics_of(prefix, count)
    parts, sent = bodies(size), places_of(count, messages, seed)
    came = 0
    for place in places:
        wanted = Counter([parts[place % BODIES]])
        wanted.update(parts[(len(topics) + at) % BODIES] for at, chosen in enumerate(sent) if chosen == place)
        receiver = driver(module).receiver(target_of(target), way, topics[place], "check")
        found: Counter[bytes] = Counter()
        await receiver.open()
        async with closing(receiver):
            while found.total() < wanted.total():
                taken = await receiver.take()
                assert not isinstance(taken, int), "a way that only counts can't check"
                if not taken:
                    break
                found.update(map(bytes, taken))
            await receiver.flush()
        if found != wanted:
            raise BenchFailed(f"{topics[place]}: {wanted.total()} messages were sent, {found.total()} or others came")
        came += found.total()
    return {"messages": came}


async def consume_spread(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], prefix: str, count: int, size: int, messages: int
) -> dict[str, Any]:
    """Take and acknowledge with one consumer all that `spread` sent, and compare it."""
    total = count + messages
    receiver = driver(module).spread_receiver(target_of(target), way, prefix, topics_of(prefix, count))
    return await take_all(gate, receiver, Tally(size, total), total, True)


async def member(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, group: str, seconds: float
) -> dict[str, Any]:
    """Join, consume for *seconds*, leave; return when each message arrived, and when it was due (both ns)."""
    receiver = driver(module).receiver(target_of(target), way, topic, group)
    receiver.silence_s = _TIMEOUT_S
    receiver.session_timeout_s = _SESSION_TIMEOUT_S
    gate()
    began = time.monotonic()
    await receiver.open()
    came: list[tuple[int, int]] = []
    while time.monotonic() - began < seconds:
        found = await receiver.take()
        assert not isinstance(found, int), "members touch bodies"
        now = time.monotonic_ns()
        came += [(now, int.from_bytes(body[:8], "big")) for body in found]
    came += [(at, int.from_bytes(body[:8], "big")) for at, body in await receiver.rest()]
    if came:
        await receiver.flush()
    await receiver.close()
    return {"came": came}


async def take_one(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, group: str
) -> dict[str, Any]:
    """Take some messages, return how many, and do nothing more; the parent stops this process meanwhile."""
    receiver = driver(module).receiver(target_of(target), way, topic, group)
    await receiver.open()
    gate()
    found = await receiver.take()
    gate(took=found if isinstance(found, int) else len(found))
    return {}


async def idle(
    gate: Gate, *, module: str, way: str, target: dict[str, Any], topic: str, consumers: int, seconds: float
) -> dict[str, Any]:
    """Have *consumers* wait for messages that do not arrive, each in a group of its own, until the parent ends it.

    It opens them for at most *seconds*, and returns how many there are.
    """
    receivers: list[Receiver] = []
    began = time.monotonic()
    while len(receivers) < consumers and time.monotonic() - began < seconds:
        receiver = driver(module).receiver(target_of(target), way, topic, f"idle-{os.getpid()}-{len(receivers)}")
        receiver.silence_s = _IDLE_S
        await receiver.open()
        receivers.append(receiver)
    threads = [threading.Thread(target=_block, args=(one,), daemon=True) for one in receivers if one.blocks]
    for thread in threads:
        thread.start()
    waiting = [asyncio.ensure_future(one.take()) for one in receivers if not one.blocks]
    await asyncio.sleep(_SETTLE_S)
    await asyncio.to_thread(gate, waiting=len(receivers))
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.gather(*[one.close() for one in receivers if not one.blocks])
    return {}


def _block(receiver: Receiver) -> None:
    """Drive a coroutine that never waits but blocks."""
    try:
        receiver.take().send(None)
    except StopIteration:
        return


JOBS: Final[dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]]] = {
    "make_many": make_many,
    "spread": spread,
    "check_spread": check_spread,
    "consume_spread": consume_spread,
    "member": member,
    "take_one": take_one,
    "idle": idle,
}
