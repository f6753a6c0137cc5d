"""Measure what waiting messages cost: a backlog, and a live group beside a stuck one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from statistics import median
from typing import Final

from bench.peers.measure import timing
from bench.peers.measure.moving import RATE
from bench.peers.peer import Client
from bench.peers.running import Row, Running
from qmq.bench.values import BenchFailed

_SIZE: Final = 100
RATIO: Final = "of the same without"
#: Short runs differ by half, so this many of each kind are done in turn for the median.
_PAIRS: Final = 3
_FILL_PORTION: Final = 5_000_000
_LIVE_RATE: Final = 1_000
#: Failures are slow, so few messages are enough for a fast broker.
_FAILING_MOST: Final = 50_000


def backlog(running: Running) -> Iterator[Row]:
    """Send to a topic and consume from it, with very few and with very many messages waiting in it."""
    client = running.peer.clients[0]
    running.warm(client)
    send = next(iter(client.sends))
    consume = "each"
    messages = running.amount.messages(client.sends[send].rate, _SIZE)
    topic = running.topic("long")
    running.make(client, topic)
    for wanted in running.backlogs():
        waiting = fill(running, client, send, topic, wanted)
        pairs = []
        for number in range(_PAIRS):
            short = running.topic("short")  # a new topic each time, since machines drift
            running.make(client, short)
            sent = running.send(client, send, short, _SIZE, messages)
            beside = running.send(client, send, topic, _SIZE, messages)
            waiting += messages
            running.filled[topic] = waiting
            came = running.consume(client, consume, short, _SIZE, messages)
            group = f"of-{wanted}-{number}"
            out = running.consume(client, consume, topic, _SIZE, messages, group=group, there=waiting)
            pairs.append((beside, beside / sent, out, out / came))
        beside, of_sent, out, of_came = map(median, zip(*pairs, strict=True))
        name = f"{wanted:,}"
        for way, what, value, unit in (
            (send, f"send, {name} waiting", beside, RATE),
            (send, f"send, {name} waiting", of_sent, RATIO),
            (consume, f"consume, {name} waiting", out, RATE),
            (consume, f"consume, {name} waiting", of_came, RATIO),
            (send, f"{name} wanted, waiting", waiting, "messages"),
            (send, f"memory, {name} waiting", running.server.memory().own, "bytes"),
        ):
            yield running.row("backlog", client, way, what, value, unit)


def fill(running: Running, client: Client, send: str, topic: str, wanted: int) -> int:
    """Send until so many messages wait, or the time is up; return how many do: a slow broker has a shorter backlog."""
    waiting, seconds = running.filled.get(topic, 0), 0.0
    while waiting < wanted and seconds < running.amount.timeout_s:
        portion = min(wanted - waiting, _FILL_PORTION, max(client.sends[send].rate * 10, 1_000))
        seconds += portion / running.send(client, send, topic, _SIZE, portion)
        waiting += portion
    running.filled[topic] = waiting
    return waiting


def neighbours(running: Running) -> Iterator[Row]:
    """Measure a group on a schedule, alone, and while the only consumer of another group of its topic is stopped."""
    for client in running.peer.clients:
        if not client.paced:
            continue
        running.warm(client)
        way, topic = next(iter(client.paced)), running.topic("shared")
        running.make(client, topic)
        alone = timing.arrived(running, client, way, _LIVE_RATE, topic)
        with running.worker("take_one", client, {"way": "paced", "topic": topic, "group": "stuck"}) as stuck:
            stuck.write_line("go")
            if not json.loads(stuck.read_line())["took"]:
                raise BenchFailed("the consumer that is to be stuck got no message")
            os.kill(stuck.pid, signal.SIGSTOP)
            try:
                beside = timing.arrived(running, client, way, _LIVE_RATE, topic)
            finally:
                os.kill(stuck.pid, signal.SIGCONT)
        for share in ("p50", "p99"):
            for name, found in (("alone", alone), ("beside a stuck group", beside)):
                yield running.row("neighbours", client, way, f"{name} {share}", found[f"{share}_ms"], timing.MS)


def failing(running: Running) -> Iterator[Row]:
    """Measure a consumer that fails for one message of ten the first time, if the broker has a nack."""
    for client in running.peer.clients:
        if "failing" not in client.consumes:
            continue
        running.warm(client)
        send = next(iter(client.sends))
        messages = min(running.amount.messages(client.sends[send].rate, _SIZE), _FAILING_MOST)
        rates = {}
        for way in (next(name for name in ("share each", "each") if name in client.consumes), "failing"):
            topic = running.topic("failing")
            running.make(client, topic)
            running.send(client, send, topic, _SIZE, messages)
            rates[way] = running.consume(client, way, topic, _SIZE, messages)
        without, with_failures = rates.values()
        yield running.row("failing", client, "failing", "one of ten nacked", with_failures, RATE)
        yield running.row("failing", client, "failing", "one of ten nacked", with_failures / without, RATIO)
