"""Workers that send with the client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from qmq import Client, connect
from qmq.bench.raw import bodies_of, body_of
from qmq.bench.values import BenchFailed, latencies
from qmq.bench.worker import Gate

Durability = Literal["flush", "append"]

#: What a message has beside its body.
Fields = Literal["nothing", "key", "key and property", "key and properties"]

_TIMEOUT_S: Final = 60.0
#: The number of different bodies of `spray`.
SPRAYED_BODIES: Final = 1_000


async def many(
    gate: Gate, *, url: str, subject: str, durability: Durability, size: int, count: int, calls: int, in_flight: int
) -> dict[str, Any]:
    """`send_many` of *count* messages, *calls* times, with *in_flight* calls at a time."""
    bodies = bodies_of(count, size)
    async with connect(url, durability=durability) as client:
        gate()
        started = time.perf_counter()
        left = iter(range(calls))

        async def send() -> None:
            for _ in left:
                await client.send_many(subject, bodies)

        await asyncio.gather(*[send() for _ in range(in_flight)])
        seconds = time.perf_counter() - started
    return {"messages": calls * count, "seconds": seconds}


async def nowait(
    gate: Gate,
    *,
    url: str,
    subject: str,
    durability: Durability,
    size: int,
    messages: int,
    fields: Fields = "nothing",
    drain_every: int = 1_000,
) -> dict[str, Any]:
    """`send_nowait` with a `drain` every *drain_every* messages, then `flush`."""
    sent = fields_of(size, fields)
    parts = [sent[start : start + drain_every] for start in range(0, len(sent), drain_every)]
    async with connect(url, durability=durability) as client:
        gate()
        started = time.perf_counter()
        for _ in range(messages // len(sent)):
            for part in parts:
                if fields == "nothing":
                    for body, _, _ in part:
                        client.send_nowait(subject, body)
                elif fields == "key":
                    for body, key, _ in part:
                        client.send_nowait(subject, body, key=key)
                else:
                    for body, key, properties in part:
                        client.send_nowait(subject, body, key=key, properties=properties)
                await client.drain()
        await client.flush()
        seconds = time.perf_counter() - started
    return {"messages": messages // len(sent) * len(sent), "seconds": seconds}


def fields_of(size: int, fields: Fields) -> list[tuple[bytes, str | None, dict[str, str]]]:
    """Return body, key and properties of 1,000 messages, which are sent over and over."""
    key = fields != "nothing"
    names = {"key and property": ("price",), "key and properties": ("price", "currency")}.get(fields, ())
    return [
        (body, _key_of(number) if key else None, {name: _PROPERTIES[name](number) for name in names})
        for number, body in enumerate(bodies_of(1_000, size))
    ]


def _key_of(number: int) -> str:
    return f"order-{number}"


def _price_of(number: int) -> str:
    return str(100 + number % 900)


_PROPERTIES: Final[dict[str, Callable[[int], str]]] = {"price": _price_of, "currency": lambda _: "EUR"}


async def awaited(
    gate: Gate, *, url: str, subject: str, durability: Durability, size: int, messages: int, in_flight: int
) -> dict[str, Any]:
    """`await send`, *in_flight* at a time."""
    bodies = bodies_of(1_000, size)
    async with connect(url, durability=durability) as client:
        left = iter(range(messages))

        async def send() -> None:
            for number in left:
                await client.send(subject, bodies[number % 1_000])

        gate()
        started = time.perf_counter()
        await asyncio.gather(*[send() for _ in range(in_flight)])
        seconds = time.perf_counter() - started
    return {"messages": messages, "seconds": seconds}


async def tasks(
    gate: Gate, *, url: str, subject: str, durability: Durability, size: int, messages: int, in_flight: int
) -> dict[str, Any]:
    """`await send` with key and property, each in a task of its own, *in_flight* tasks at a time."""
    parts = fields_of(size, "key and property")[:in_flight]
    async with connect(url, durability=durability) as client:
        gate()
        started = time.perf_counter()
        for _ in range(messages // len(parts)):
            sends = [
                asyncio.ensure_future(client.send(subject, body, key=key, properties=properties))
                for body, key, properties in parts
            ]
            await asyncio.gather(*sends)
        seconds = time.perf_counter() - started
    return {"messages": messages // len(parts) * len(parts), "seconds": seconds}


async def one_at_a_time(
    gate: Gate, *, url: str, subject: str, durability: Durability, size: int, messages: int
) -> dict[str, Any]:
    """`await send` one after another; return how long each takes."""
    body = body_of(0, size)
    async with connect(url, durability=durability) as client:
        for _ in range(100):
            await client.send(subject, body)
        gate()
        took = []
        for _ in range(messages):
            started = time.perf_counter()
            await client.send(subject, body)
            took.append(time.perf_counter() - started)
    return {"messages": messages + 100, **latencies(took)}


async def rounds(gate: Gate, *, url: str, subject: str, size: int, seconds: float) -> dict[str, Any]:
    """`await send` and `await pull` of that message, over and over; return how many, and how long each takes."""
    body = body_of(0, size)
    took = []
    async with connect(url, durability="append") as client, client.subscribe(subject, start="new") as consumer:
        await consumer.pull(timeout=0)
        gate()
        started = now = time.perf_counter()
        while now - started < seconds:
            await client.send(subject, body)
            if len(await consumer.pull(timeout=_TIMEOUT_S)) != 1:
                raise BenchFailed("a message was sent, but none was received")
            before, now = now, time.perf_counter()
            took.append(now - before)
    return {"messages": len(took), "seconds": now - started, **latencies(took)}


async def paced(
    gate: Gate, *, url: str, subject: str, durability: Durability, size: int, rate: int, seconds: float
) -> dict[str, Any]:
    """`send_many` at *rate* messages a second: every 5 ms, those that are due."""
    every = 0.005
    bodies = bodies_of(max(int(rate * every), 1), size)
    async with connect(url, durability=durability) as client:
        gate()
        started = time.perf_counter()
        sends: set[asyncio.Task[Any]] = set()
        calls = 0
        while (now := time.perf_counter() - started) < seconds:
            while calls * every < now and len(sends) < 64:
                task = asyncio.ensure_future(client.send_many(subject, bodies))
                sends.add(task)
                task.add_done_callback(sends.discard)
                calls += 1
            await asyncio.sleep(every)
        await asyncio.gather(*sends)
        took = time.perf_counter() - started
    return {"messages": calls * len(bodies), "seconds": took}


async def producers(
    gate: Gate, *, url: str, prefix: str, durability: Durability, size: int, clients: int, count: int, seconds: float
) -> dict[str, Any]:
    """Run *clients* clients that send *count* messages and wait until they are stored, for *seconds*.

    Each has its own subject and bodies.
    """
    bodies = [bodies_of(count, size, number * count) for number in range(clients)]
    opened = [connect(url, durability=durability) for _ in range(clients)]
    for client in opened:
        await client.__aenter__()
    sent = [0] * clients
    gate()
    started = time.perf_counter()
    deadline = started + seconds

    async def produce(number: int) -> None:
        client, subject = opened[number], f"{prefix}{number:06}"
        while time.perf_counter() < deadline:
            if count == 1:
                await client.send(subject, bodies[number][0])
            else:
                await client.send_many(subject, bodies[number])
            sent[number] += count

    await asyncio.gather(*map(produce, range(clients)))
    took = time.perf_counter() - started
    for client in opened:
        await client.__aexit__(None, None, None)
    return {"messages": sum(sent), "sent": sent, "seconds": took}


async def spray(
    gate: Gate, *, url: str, prefix: str, subjects: int, size: int, messages: int, seed: int
) -> dict[str, Any]:
    """`send_nowait` one message to each of *subjects*, then each message to a random one."""
    bodies = bodies_of(SPRAYED_BODIES, size)
    names, chosen = sprayed_subjects(prefix, subjects, messages, seed)
    async with connect(url, durability="append") as client:
        started = time.perf_counter()
        await _send_each(client, names, bodies)
        made_s = time.perf_counter() - started
        gate()
        started = time.perf_counter()
        await _send_each(client, chosen, bodies)
        seconds = time.perf_counter() - started
    return {"messages": messages + subjects, "timed": messages, "seconds": seconds, "made_s": made_s}


def sprayed_subjects(prefix: str, subjects: int, messages: int, seed: int) -> tuple[list[str], list[str]]:
    """Return the subjects of the first messages, one each, and those of the others; the bodies of both are repeated
    from the first on.
    """
    names = [f"{prefix}{number:06}" for number in range(subjects)]
    return names, random.Random(seed).choices(names, k=messages)


async def _send_each(client: Client, subjects: Sequence[str], bodies: Sequence[bytes]) -> None:
    for start in range(0, len(subjects), len(bodies)):
        for subject, body in zip(subjects[start : start + len(bodies)], bodies, strict=False):
            client.send_nowait(subject, body)
        await client.drain()
    await client.flush()


async def open_loop(
    gate: Gate, *, url: str, subject: str, durability: Durability, size: int, rate: int, seconds: float
) -> dict[str, Any]:
    """Send on a fixed schedule, spinning; each body begins with the time at which it is due (monotonic ns)."""
    total, every = int(rate * seconds), 1_000_000_000 // rate
    rest = body_of(0, size)[8:]
    late = 0
    async with connect(url, durability=durability) as client:
        gate()
        start = time.monotonic_ns() + 20_000_000
        sent = 0
        while sent < total:
            now = time.monotonic_ns()
            due = min((now - start) // every + 1, total)
            while sent < due:
                at = start + sent * every
                late = max(late, now - at)
                client.send_nowait(subject, at.to_bytes(8, "big") + rest)
                sent += 1
            await asyncio.sleep(0)
        await client.flush()
    return {"messages": sent, "first_due_ns": start, "latest_ms": late / 1e6}
