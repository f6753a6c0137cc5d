"""Measure order by key and priorities: ``python -m bench.ordering --only keys,priorities --rounds 3``.

Senders and consumers are processes of their own. Every message is checked after it was timed: each key in order, and
nothing twice. Without ``--only`` everything is measured but what needs ``--older`` or ``--peers``; bench/README.md says
what the parts are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import uvloop

import qmq
from bench.resend import anonymous_mib, cpu_s
from qmq.format.hashing import hash_bytes
from qmq.format.lanes import lane_of_key_hash
from tests.broker_process import BrokerProcess, broker_process

#: A body: the number of its key, its number within the key, and when it was due (ns), then filling.
_BODY: Final = struct.Struct("<IIq")
_BODY_BYTES: Final = 100
_BATCH: Final = 1_000
_CONSUMERS: Final = 4
_PULL: Final = 5_000
_IDLE_S: Final = 60.0
#: High messages a second: few enough for a consumer that takes and acks one at a time, and low ones between.
_HIGH_RATE: Final = 200
_SPAWN: Final = multiprocessing.get_context("spawn")
_PRIORITIES: Final[tuple[Literal["high", "normal", "low"], ...]] = ("high", "normal", "low")
#: What `qmq bench` measures that is compared with an older checkout.
_PLAIN: Final = "send_many,pull,pull_batch,async_for,end_to_end"

Found = dict[str, list[float]]
Arrived = list[tuple[int, list[bytes]]]


def body_of(key: int, number: int, due_ns: int = 0) -> bytes:
    """Return a body."""
    return _BODY.pack(key, number, due_ns).ljust(_BODY_BYTES, b".")


# --- many keys -------------------------------------------------------------------------------------------------------


def keyed(messages: int, keys: int) -> Iterator[tuple[list[bytes], list[str]]]:
    """Yield batches of bodies with their keys, which come at random."""
    chance, numbers = np.random.default_rng(1), np.zeros(keys, np.int64)
    for start in range(0, messages, _BATCH):
        chosen = chance.integers(0, keys, min(_BATCH, messages - start)).tolist()
        bodies = []
        for key in chosen:
            bodies.append(body_of(key, int(numbers[key])))
            numbers[key] += 1
        yield bodies, [f"order-{key}" for key in chosen]


async def fill(url: str, subject: str, messages: int, keys: int) -> None:
    """Send messages with order keys."""
    async with qmq.connect(url, durability="append") as client:
        for bodies, names in keyed(messages, keys):
            await client.send_many(subject, bodies, order_keys=names)


def slot_of(key: int) -> int:
    """Return the slot of a key."""
    return lane_of_key_hash(hash_bytes(b"order-%d" % key))


class Shared:
    """What the consumers of one measurement share: they begin together, and end when all has come."""

    def __init__(self, consumers: int, expected: int) -> None:
        self.barrier = _SPAWN.Barrier(consumers + 1)
        self.taken = _SPAWN.Value("q", 0)
        self.found = _SPAWN.Queue()
        self.expected = expected

    def add(self, count: int) -> None:
        """Count messages that have come."""
        with self.taken.get_lock():
            self.taken.value += count

    @property
    def is_done(self) -> bool:
        """Whether all messages have come."""
        return bool(self.taken.value >= self.expected)


def consumer_process(url: str, subject: str, name: str, how: str, shared: Any) -> None:
    """Run one consumer in this process."""
    arrived = uvloop.run(consume(url, subject, name, how, shared))
    shared.found.put((*packed(arrived), time.process_time()))


def packed(arrived: Arrived) -> tuple[bytes, bytes]:
    """Return when messages came and their bodies' beginnings."""
    times = np.repeat([at for at, _ in arrived], [len(bodies) for _, bodies in arrived]).astype(np.int64)
    return times.tobytes(), b"".join(bytes(body[: _BODY.size]) for _, bodies in arrived for body in bodies)


async def consume(url: str, subject: str, name: str, how: str, shared: Shared) -> Arrived:
    """Consume and ack until all messages have come; return when they came."""
    arrived: Arrived = []
    async with (
        qmq.connect(url) as client,
        client.subscribe(subject, group="bench", consumer=name, start="first", max_unacked=4 * _PULL) as consumer,
    ):
        await asyncio.to_thread(shared.barrier.wait)
        if how == "pull_batch":
            while not shared.is_done:
                batch = await consumer.pull_batch(_PULL, timeout=0.2)
                arrived.append((time.monotonic_ns(), list(batch.bodies)))
                batch.ack()
                shared.add(len(batch))
        else:
            await iterate(consumer, arrived, shared)
        await consumer.flush()
    return arrived


async def iterate(consumer: Any, arrived: Arrived, shared: Shared) -> None:
    """Consume by ``async for``, and ack each message."""

    async def work() -> None:
        async for message in consumer:
            arrived.append((time.monotonic_ns(), [message.body]))
            message.ack()

    loop, counted = asyncio.ensure_future(work()), 0
    while not shared.is_done and not loop.done():
        await asyncio.sleep(0.01)
        came = len(arrived)
        shared.add(came - counted)
        counted = came
    loop.cancel()
    await asyncio.wait({loop})
    if not loop.cancelled():
        loop.result()


def consumed(url: str, subject: str, how: str, expected: int, work: Callable[..., None] | None = None) -> float:
    """Have some processes consume; return messages a second. Raises AssertionError if an order was broken."""
    shared = Shared(_CONSUMERS, expected)
    processes = [
        _SPAWN.Process(target=work or consumer_process, args=(url, subject, f"c{number}", how, shared))
        for number in range(_CONSUMERS)
    ]
    for process in processes:
        process.start()
    shared.barrier.wait(_IDLE_S)
    began = time.monotonic_ns()
    found = [shared.found.get() for _ in processes]
    for process in processes:
        process.join(_IDLE_S)
    times = np.concatenate([np.frombuffer(one[0], np.int64) for one in found])
    check_order(times, np.concatenate([np.frombuffer(one[1], np.dtype("<u4, <u4, <i8")) for one in found]), expected)
    return expected / ((int(times.max()) - began) / 1e9)


def check_order(times: np.ndarray[Any, Any], bodies: np.ndarray[Any, Any], expected: int) -> None:
    """Check that every message came once, and those of each key in order."""
    assert len(bodies) == expected, f"{len(bodies):,} messages came, {expected:,} were sent"
    order = np.lexsort((np.arange(len(times)), times, bodies["f0"]))
    keys, numbers = bodies["f0"][order], bodies["f1"][order].astype(np.int64)
    same = keys[1:] == keys[:-1]
    assert (numbers[1:][same] == numbers[:-1][same] + 1).all(), "a key's messages came in another order"


def measure_keys(found: Found, wanted: argparse.Namespace, *, stuck: bool) -> None:
    """Measure consumers of many keys, and with *stuck* beside one key whose handler does not return."""
    for how in ("pull_batch", "async for"):
        messages = wanted.messages if how == "pull_batch" else wanted.messages // 2
        with broker(wanted) as one:
            subject = "bench.keys"
            uvloop.run(fill(one.url, subject, messages, wanted.keys))
            if not stuck:
                add(found, f"{how}, {wanted.keys:,} keys, msg/s", consumed(one.url, subject, how, messages))
                continue
            holder = _SPAWN.Process(target=hold, args=(one.url, subject, ready := _SPAWN.Queue()), daemon=True)
            holder.start()
            slot = slot_of(ready.get(timeout=_IDLE_S))
            sent = np.bincount([key for bodies, _ in keyed(messages, wanted.keys) for key in keys_of(bodies)])
            behind = sum(int(count) for key, count in enumerate(sent) if slot_of(key) == slot)
            rate = consumed(one.url, subject, how, messages - behind)
            add(found, f"{how}, the same with one key that is stuck, msg/s", rate)
            holder.kill()


def keys_of(bodies: Sequence[bytes]) -> list[int]:
    """Return the numbers of the keys of bodies."""
    return [_BODY.unpack_from(body)[0] for body in bodies]


def hold(url: str, subject: str, ready: Any) -> None:
    """Take one message, and never ack it."""

    async def run() -> None:
        async with (
            qmq.connect(url) as client,
            client.subscribe(subject, group="bench", consumer="stuck", start="first") as consumer,
        ):
            batch = await consumer.pull_batch(1, timeout=_IDLE_S)
            ready.put(keys_of(batch.bodies)[0])
            await asyncio.sleep(3_600)

    uvloop.run(run())


# --- priorities ------------------------------------------------------------------------------------------------------


async def measure_priorities(url: str, found: Found, messages: int) -> None:
    """Measure three priorities mixed at random over 100 subjects, and the same without priorities."""
    chance = random.Random(1)
    for title in ("one priority", "three priorities"):
        prefix, sent = f"bench.{title.split()[0]}.", 0
        async with qmq.connect(url, durability="append") as client:
            while sent < messages:
                waiting = []
                for _ in range(20):
                    priority = chance.choice(_PRIORITIES) if title == "three priorities" else "normal"
                    bodies = [body_of(0, sent + at) for at in range(100)]
                    subject = f"{prefix}{chance.randrange(100)}"
                    waiting.append(client.send_many(subject, bodies, priority=priority))
                    sent += 100
                await asyncio.gather(*waiting)
            async with client.subscribe(prefix, group=prefix[:-1], start="first", max_unacked=100_000) as consumer:
                began, left, numbers = time.perf_counter(), sent, list[int]()
                while left:
                    batch = await consumer.pull_batch(10_000, timeout=_IDLE_S)
                    left -= len(batch)
                    batch.ack()
                await consumer.flush()
                add(found, f"pull_batch, {title}, 100 subjects, msg/s", sent / (time.perf_counter() - began))
            async with client.subscribe(prefix, start="first") as reader:
                while len(numbers) < sent:
                    numbers += [_BODY.unpack_from(body)[1] for body in (await reader.pull_batch(10_000)).bodies]
                assert sorted(numbers) == list(range(sent))


async def measure_beside(url: str, found: Found, backlog: int, seconds: float) -> None:
    """Measure the time end to end of messages of high priority: alone, and beside a backlog of low ones."""
    async with qmq.connect(url, durability="append") as client:
        for title in ("alone", f"beside {backlog:,} low ones"):
            if title != "alone":
                for _ in range(0, backlog, 20 * _BATCH):
                    bodies = [body_of(1, 0)] * _BATCH
                    await asyncio.gather(*(client.send_many("bench.high", bodies, priority="low") for _ in range(20)))
            process = _SPAWN.Process(target=send_high, args=(url, "bench.high", seconds))
            async with client.subscribe("bench.high", group="bench", start="first") as consumer:
                (await consumer.pull_batch(1, timeout=0.01)).ack()
                process.start()
                times, low = list[float](), 0
                while len(times) < int(seconds * _HIGH_RATE):
                    batch = await consumer.pull_batch(1, timeout=_IDLE_S)
                    for body in batch.bodies:
                        key, _, due_ns = _BODY.unpack_from(body)
                        if key == 0:
                            times.append((time.monotonic_ns() - due_ns) / 1e6)
                        low += key
                    batch.ack()
            process.join()
            times.sort()
            for name, at in (("p50", 0.5), ("p99", 0.99)):
                add(found, f"a high message {title}, {name} in ms", times[int(len(times) * at)])
            if low:
                add(found, "low messages that were handed out meanwhile", low)


def send_high(url: str, subject: str, seconds: float) -> None:
    """Send high messages at their rate; a thread sleeps between them, since this process shares the processors."""

    async def run() -> None:
        async with qmq.connect(url, durability="append") as client:
            loop = asyncio.get_running_loop()

            def send(due_ns: int) -> None:
                client.send_nowait(subject, body_of(0, 0, due_ns), priority="high")

            def pace() -> None:
                due_ns = time.monotonic_ns() + 200_000_000
                for _ in range(int(seconds * _HIGH_RATE)):
                    due_ns += 1_000_000_000 // _HIGH_RATE
                    time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
                    loop.call_soon_threadsafe(send, due_ns)

            await asyncio.to_thread(pace)
            await client.flush()

    uvloop.run(run())


# --- memory, and what a send costs -----------------------------------------------------------------------------------


async def measure_memory(wanted: argparse.Namespace, found: Found) -> None:
    """Measure what keys that wait add to the broker's memory, beside as many plain messages."""
    used = {}
    for title in ("plain messages", "keys"):
        with broker(wanted) as one:
            async with qmq.connect(one.url, durability="append") as client:
                for start in range(0, wanted.waiting, _BATCH):
                    names = [f"order-{number}" for number in range(start, start + _BATCH)]
                    bodies = [b"x" * 100] * _BATCH
                    if title == "keys":
                        await client.send_many("bench.waiting", bodies, order_keys=names)
                    else:
                        await client.send_many("bench.waiting", bodies, keys=names)
                async with client.subscribe("bench.waiting", group="bench", start="first") as consumer:
                    await consumer.pull_batch(1_000, timeout=_IDLE_S)
                    used[title] = anonymous_mib(one.pid)
        add(found, f"RssAnon with {wanted.waiting:,} {title} waiting, MiB", used[title])
    add(found, "of these the keys' own, MiB", used["keys"] - used["plain messages"])


async def measure_sends(one: BrokerProcess, found: Found, messages: int) -> None:
    """Measure sends with an order key beside sends with a key and without."""
    bodies, names = [b"x" * 100] * _BATCH, [f"order-{number}" for number in range(_BATCH)]
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "a key": {"keys": names}, "an order key": {"order_keys": names}}
    rates = {}
    async with qmq.connect(one.url, durability="append") as client:
        for title, more in kinds.items():

            async def many(title: str = title, more: dict[str, Any] = more) -> None:
                for _ in range(messages // (4 * _BATCH)):
                    await asyncio.gather(*(client.send_many(f"bench.{title[-3:]}", bodies, **more) for _ in range(4)))

            async def one_by_one(title: str = title, more: dict[str, Any] = more) -> None:
                singular = next(({name[:-1]: names} for name in more), {})
                for at in range(messages // 4):
                    given: dict[str, Any] = {name: values[at % _BATCH] for name, values in singular.items()}
                    client.send_nowait(f"bench.{title[-3:]}", bodies[0], **given)
                    if at % 500 == 499:
                        await client.drain()
                await client.drain()

            for name, call, count in (("send_many", many, messages), ("send_nowait", one_by_one, messages // 4)):
                before, began = cpu_s(one.pid) + time.process_time(), time.perf_counter()
                await call()
                took, used = time.perf_counter() - began, cpu_s(one.pid) + time.process_time() - before
                rates[name, title] = used
                add(found, f"{name} with {title}, msg/s".replace("with plain", "plain"), count / took)
                add(found, f"{name} with {title}, us of processors".replace("with plain", "plain"), used / count * 1e6)
    for name in ("send_many", "send_nowait"):
        ratio = rates[name, "a key"] / max(rates[name, "an order key"], 1e-9)
        add(found, f"{name} with an order key relative to a key, by processor time", ratio)


def measure_older(found: Found, older: Path, scratch: Path, *, older_first: bool) -> None:
    """Measure plain messages in this checkout and in an older one, one after the other."""
    trees, rates = [Path(__file__).parents[1], older.absolute()], dict[Path, dict[str, float]]()
    for tree in reversed(trees) if older_first else trees:
        saved = scratch / "found.json"
        command = [tree / ".venv" / "bin" / "qmq", "bench", "--only", _PLAIN, "--rounds", "1", "--json", saved]
        subprocess.run(list(map(str, command)), cwd=tree, check=True, stdout=subprocess.DEVNULL)
        results = json.loads(saved.read_text("utf-8"))["results"]
        rates[tree] = {f"{one['measurement']}, {one['what']}, {one['unit']}": one["median"] for one in results}
    new, old = (rates[tree] for tree in trees)
    for name in (name for name in new if old.get(name)):
        add(found, f"{name}: relative to the older checkout", new[name] / old[name])


# --- all of it -------------------------------------------------------------------------------------------------------


@contextmanager
def broker(wanted: argparse.Namespace) -> Iterator[BrokerProcess]:
    """Run a broker with a new directory."""
    with (
        tempfile.TemporaryDirectory(prefix="qmq-bench-", dir=wanted.dir) as scratch,
        broker_process(Path(scratch)) as one,
    ):
        yield one


def add(found: Found, name: str, value: float) -> None:
    """Keep a number."""
    found.setdefault(name, []).append(value)
    print(f"  {name}: {value:,.2f}", flush=True)


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = argparse.ArgumentParser(description="Measure order by key and priorities.")
    parser.add_argument("--only", default="keys,stuck,priorities,beside,memory,sends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--backlog", type=int, default=10_000_000)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="for which high messages are sent")
    parser.add_argument("--older", type=Path, help="a checkout with its .venv: adds plain messages relative to it")
    parser.add_argument("--peers", action="store_true", help="adds Kafka and RabbitMQ; run with .venv-peers/bin/python")
    parser.add_argument("--dir", type=Path, help="where brokers have their directories")
    parser.add_argument("--json", type=Path, help="saves the numbers")
    wanted = parser.parse_args()
    parts, found = wanted.only.split(","), Found()
    for number in range(wanted.rounds):
        print(f"round {number + 1}", flush=True)
        for stuck in (False, True):
            if ("stuck" if stuck else "keys") in parts:
                measure_keys(found, wanted, stuck=stuck)
        if "priorities" in parts:
            with broker(wanted) as one:
                uvloop.run(measure_priorities(one.url, found, wanted.messages))
        if "beside" in parts:
            with broker(wanted) as one:
                uvloop.run(measure_beside(one.url, found, wanted.backlog, wanted.seconds))
        if "memory" in parts:
            uvloop.run(measure_memory(wanted, found))
        if "sends" in parts:
            with broker(wanted) as one:
                uvloop.run(measure_sends(one, found, wanted.messages // 2))
        with tempfile.TemporaryDirectory(prefix="qmq-bench-", dir=wanted.dir) as scratch:
            if wanted.older is not None:
                measure_older(found, wanted.older, Path(scratch), older_first=bool(number % 2))
            if wanted.peers:
                from bench.ordering_peers import measure_peers

                measure_peers(found, wanted, Path(scratch))
    print("\n| | median | least to most |\n|---|---:|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):,.2f} | {min(values):,.2f} to {max(values):,.2f} |")
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
