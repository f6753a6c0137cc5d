"""Workers that receive with the client."""

from __future__ import annotations

import asyncio
import time
from array import array
from itertools import pairwise
from typing import Any

from qmq import connect
from qmq.bench.errors import BenchFailed
from qmq.bench.raw import bodies_of
from qmq.bench.values import latencies
from qmq.bench.worker import Gate

#: No message for so long means that some are missing.
SILENCE_S = 10.0


def check_bodies(found: list[bytes], expected: list[bytes], at: int) -> None:
    """Raise BenchFailed unless *found* goes on in the cycle of *expected* at message number *at*."""
    offset = at % len(expected)
    wanted = (expected * (len(found) // len(expected) + 2))[offset : offset + len(found)]
    if found != wanted:
        place = next(index for index, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
        raise BenchFailed(f"message {at + place} came with another body than was sent: {found[place][:40]!r}...")


def missing(came: int, messages: int) -> BenchFailed:
    """The error for a count that is not what was sent."""
    return BenchFailed(f"{came} messages came, {messages} were sent")


async def pull(
    gate: Gate, *, url: str, prefix: str, size: int, count: int, messages: int, max_count: int
) -> dict[str, Any]:
    """`pull`, every body touched."""
    expected = bodies_of(count, size)
    async with connect(url) as client, client.subscribe(prefix, start="first") as consumer:
        gate()
        came = read = 0
        started = time.perf_counter()
        while came < messages:
            pulled = await consumer.pull(max_count, timeout=SILENCE_S)
            if not pulled:
                raise missing(came, messages)
            for message in pulled:
                read += len(message.body)
            check_bodies([pulled[0].body], expected, came)
            came += len(pulled)
        seconds = time.perf_counter() - started
    if came != messages or read != messages * size:
        raise missing(came, messages)
    return {"messages": came, "seconds": seconds}


async def pull_batch(
    gate: Gate, *, url: str, prefix: str, size: int, count: int, messages: int, max_count: int, check: bool
) -> dict[str, Any]:
    """`pull_batch`; with *check* every body is compared, else the first of each pull."""
    expected = bodies_of(count, size)
    async with connect(url) as client, client.subscribe(prefix, start="first") as consumer:
        gate()
        came = 0
        started = time.perf_counter()
        while came < messages:
            batch = await consumer.pull_batch(max_count, timeout=SILENCE_S)
            if not len(batch):
                raise missing(came, messages)
            check_bodies(batch.bodies if check else [batch[0].body], expected, came)
            came += len(batch)
        seconds = time.perf_counter() - started
    if came != messages:
        raise missing(came, messages)
    return {"messages": came, "bytes": came * size, "seconds": seconds}


async def async_for(gate: Gate, *, url: str, prefix: str, size: int, count: int, messages: int) -> dict[str, Any]:
    """`async for`, every body touched."""
    expected = bodies_of(count, size)
    async with connect(url) as client, client.subscribe(prefix, start="first") as consumer:
        gate()
        came = read = 0
        started = time.perf_counter()
        async for message in consumer:
            came += 1
            read += len(message.body)
            if came == messages:
                break
        seconds = time.perf_counter() - started
        check_bodies([message.body], expected, came - 1)
    if read != messages * size:
        raise BenchFailed(f"{read} bytes came, {messages * size} were sent")
    return {"messages": came, "seconds": seconds}


async def count_all(
    gate: Gate, *, url: str, prefix: str, messages: int, size: int, max_count: int, check: bool
) -> dict[str, Any]:
    """`pull_batch` of everything under a prefix of many subjects; with *check* the bytes of all bodies are counted."""
    async with connect(url) as client, client.subscribe(prefix, start="first") as consumer:
        gate()
        came = read = 0
        started = time.perf_counter()
        while came < messages:
            batch = await consumer.pull_batch(max_count, timeout=SILENCE_S)
            if not len(batch):
                raise missing(came, messages)
            came += len(batch)
            if check:
                read += sum(map(len, batch.bodies))
        seconds = time.perf_counter() - started
    if came != messages or (check and read != messages * size):
        raise missing(came, messages)
    return {"messages": came, "seconds": seconds}


async def arrivals(gate: Gate, *, url: str, prefix: str, messages: int, skip: int) -> dict[str, Any]:
    """`async for` over messages of `sending.open_loop`: how late each comes; the first *skip* are not counted."""
    took = array("q")
    async with connect(url) as client, client.subscribe(prefix, start="last") as consumer:
        await consumer.pull(timeout=0)
        gate()
        scheduled = array("q")
        async with asyncio.timeout(600):
            async for message in consumer:
                at = int.from_bytes(message.body[:8], "big")
                took.append(time.monotonic_ns() - at)
                scheduled.append(at)
                if len(took) == messages:
                    break
    if any(one >= other for one, other in pairwise(scheduled)):
        raise BenchFailed("messages came twice, or not in their order")
    return {"messages": len(took), **latencies([at / 1e9 for at in took[skip:]])}


async def park(gate: Gate, *, url: str, clients: int, consumers: int) -> dict[str, Any]:
    """Have *clients* times *consumers* pulls parked on a subject that nobody sends to, until the parent says enough."""
    opened = [connect(url) for _ in range(clients)]
    for client in opened:
        await client.__aenter__()
    subscribed = [
        await client.subscribe(f"bench.idle.{number}").__aenter__() for client in opened for number in range(consumers)
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
    return {"parked": len(pulls) - came}


async def last_stored(gate: Gate, *, url: str, prefix: str) -> dict[str, Any]:
    """How many messages the broker keeps under a prefix, and that it takes and gives one more."""
    async with connect(url, durability="append") as client:
        gate()
        kept = sum([info.messages async for info in client.subjects(prefix)])
        async with client.subscribe("bench.alive", start="last") as consumer:
            await consumer.pull(timeout=0)
            await client.send("bench.alive", b"here")
            pulled = await consumer.pull(timeout=SILENCE_S)
    if [message.body for message in pulled] != [b"here"]:
        raise BenchFailed("the broker does not hand out what it takes")
    return {"messages": kept}
