"""Workers that receive with the client."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import zlib
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

from qmq import connect
from qmq.bench.checking import SILENCE_S, Cycle, check_end, compare, missing
from qmq.bench.raw import bodies_of, body_of
from qmq.bench.values import BenchFailed, latencies
from qmq.bench.worker import Gate
from qmq.net.client.consumer.consumer import Consumer

#: A message that arrives more seconds later than this after it was due counts as missing.
LATE_S = 60.0
#: What a consumer of a group may have in flight: more than any measurement has.
WINDOW_BYTES: Final = 1 << 30


@asynccontextmanager
async def consuming(
    url: str, prefix: str, window: int | None, start: Literal["first", "new"] = "first"
) -> AsyncIterator[Consumer]:
    """Yield a consumer from *start* on: a solo consumer, or one of a group with *window* as its max_unacked.

    At the end all messages of the group must be acknowledged, each at its first attempt.
    """
    async with connect(url) as client:
        if window is None:
            async with client.subscribe(prefix, start=start) as alone:
                yield alone
            return
        group = f"bench.{secrets.token_hex(5)}"
        async with client.subscribe(prefix, group=group, start=start) as consumer:
            await client.admin.set_group(group, max_unacked=window, max_unacked_bytes=WINDOW_BYTES)
            yield consumer
        (left,) = await client.admin.groups(group)
        if left.ready or left.in_flight or left.in_retry or left.dead:
            raise BenchFailed(f"not all messages are acknowledged at the end: {left}")
        await client.admin.delete_group(group)


async def pull(
    gate: Gate,
    *,
    url: str,
    prefix: str,
    size: int,
    count: int,
    messages: int,
    max_count: int,
    window: int | None = None,
) -> dict[str, Any]:
    """`pull`, with every body read and compared; in a group (with a *window*), each message is acknowledged."""
    cycle = Cycle(bodies_of(count, size), max_count)
    async with consuming(url, prefix, window) as consumer:
        gate()
        started = time.perf_counter()
        while cycle.came < messages:
            pulled = await consumer.pull(max_count, timeout=SILENCE_S)
            if not pulled:
                raise missing(cycle.came, messages)
            cycle.check([message.body for message in pulled])
            if window is not None:
                for message in pulled:
                    message.ack()
        await consumer.flush()
        seconds = time.perf_counter() - started
        await _check_count(consumer, cycle.came, messages)
    return {"messages": cycle.came, "seconds": seconds}


async def pull_batch(
    gate: Gate, *, url: str, prefix: str, messages: int, max_count: int, window: int | None = None, nice: int = 0
) -> dict[str, Any]:
    """`pull_batch`, only counted: reading every body would be most of the work, so another pass compares them.

    In a group (with a *window*), each batch is acknowledged. *nice* lowers the priority of the process.
    """
    os.nice(nice)
    async with consuming(url, prefix, window) as consumer:
        gate()
        came = 0
        started = time.perf_counter()
        while came < messages:
            batch = await consumer.pull_batch(max_count, timeout=SILENCE_S)
            if not len(batch):
                raise missing(came, messages)
            came += len(batch)
            batch.ack()
        await consumer.flush()
        seconds = time.perf_counter() - started
        await _check_count(consumer, came, messages)
    return {"messages": came, "seconds": seconds}


def compute(gate: Gate, *, seconds: float, nice: int) -> dict[str, Any]:
    """Only compute, for *seconds*: the processor time of a reader without a broker."""
    os.nice(nice)
    gate()
    started, block = time.perf_counter(), bytes(1 << 16)
    while (spent := time.perf_counter() - started) < seconds:
        zlib.crc32(block)
    return {"seconds": spent}


async def async_for(
    gate: Gate, *, url: str, prefix: str, size: int, count: int, messages: int, window: int | None = None
) -> dict[str, Any]:
    """`async for`, with every body read and compared, 1,000 at a time; in a group (with a *window*), each is
    acknowledged.
    """
    cycle = Cycle(bodies_of(count, size), 1_000)
    bodies: list[bytes] = []
    acks = window is not None
    async with consuming(url, prefix, window) as consumer:
        gate()
        clock = asyncio.get_running_loop().time
        wanted = min(1_000, messages)
        started = time.perf_counter()
        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                async for message in consumer:
                    bodies.append(message.body)
                    if acks:
                        message.ack()
                    if len(bodies) == wanted:
                        cycle.check(bodies)
                        bodies.clear()
                        wanted = min(1_000, messages - cycle.came)
                        if not wanted:
                            break
                        silence.reschedule(clock() + SILENCE_S)
        except TimeoutError:
            raise missing(cycle.came + len(bodies), messages) from None
        await consumer.flush()
        seconds = time.perf_counter() - started
        await check_end(consumer)
    return {"messages": cycle.came, "seconds": seconds}


async def arrivals(
    gate: Gate, *, url: str, prefix: str, size: int, rate: int, messages: int, skip: int, window: int | None = None
) -> dict[str, Any]:
    """`async for` over the messages of `sending.open_loop`; return how late each arrives, without the first *skip*.

    In a group (with a *window*), each is acknowledged.
    """
    every = 1_000_000_000 // rate
    took = array("q")
    bodies: list[bytes] = []
    async with consuming(url, prefix, window, "new") as consumer:
        await consumer.pull(timeout=0)
        gate()
        try:
            async with asyncio.timeout(messages / rate + LATE_S):
                async for message in consumer:
                    body = message.body
                    took.append(time.monotonic_ns() - int.from_bytes(body[:8], "big"))
                    bodies.append(body)
                    message.ack()
                    if len(bodies) == messages:
                        break
        except TimeoutError:
            raise missing(len(bodies), messages) from None
        await check_end(consumer)
    first = int.from_bytes(bodies[0][:8], "big")
    compare(bodies, [body_of(first + number * every, size) for number in range(messages)], 0)
    return {"messages": messages, "first_due_ns": first, **latencies([at / 1e9 for at in took[skip:]])}


async def _check_count(consumer: Consumer, came: int, messages: int) -> None:
    if came != messages:
        raise missing(came, messages)
    await check_end(consumer)


async def waiting_pulls(
    gate: Gate, *, url: str, clients: int, consumers: int, group: str | None = None
) -> dict[str, Any]:
    """Keep *clients* times *consumers* pulls waiting on a subject without messages, until the parent ends it."""
    opened = [connect(url) for _ in range(clients)]
    for client in opened:
        await client.__aenter__()
    subscribed = [
        await client.subscribe(f"bench.idle.{number}", group=group).__aenter__()
        for client in opened
        for number in range(consumers)
    ]
    pulls = [asyncio.ensure_future(consumer.pull()) for consumer in subscribed]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(gate)
    came = sum(pull.done() for pull in pulls)
    for pulling in pulls:
        pulling.cancel()
    await asyncio.gather(*pulls, return_exceptions=True)
    for client in opened:
        await client.__aexit__(None, None, None)
    return {"waiting": len(pulls) - came}


async def last_stored(gate: Gate, *, url: str, prefix: str) -> dict[str, Any]:
    """Return how many messages a prefix has, after checking that the broker stores and delivers one more."""
    async with connect(url, durability="append") as client:
        gate()
        kept = sum([info.messages async for info in client.subjects(prefix)])
        async with client.subscribe("bench.alive", start="new") as consumer:
            await consumer.pull(timeout=0)
            await client.send("bench.alive", b"here")
            pulled = await consumer.pull(timeout=SILENCE_S)
    if [message.body for message in pulled] != [b"here"]:
        raise BenchFailed("the broker did not deliver a message that it stored")
    return {"messages": kept}
