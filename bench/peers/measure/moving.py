"""Measure how fast messages are sent and consumed, for each way of each client and each size of body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.peers import loopback, tools
from bench.peers.peer import Client, Tool
from bench.peers.report.results import OURS
from bench.peers.running import SIZES, Row, Running
from bench.peers.tools import Load

RATE: Final = "msg/s"
#: Ways to consume that other works measure.
_OF_OTHER_WORKS: Final = ("paced", "failing")
#: About how many messages of 100 B a plain copy moves in a second.
_COPY_RATE: Final = 10_000_000


def move(running: Running) -> Iterator[Row]:
    """Measure every way to send, and every way to consume what was sent, so that every message is checked."""
    for client in running.peer.clients:
        running.warm(client)
        for size in running.amount.sizes:
            for send, consume, measures_send, measures_consume in pairs(client):
                topic = running.topic("move")
                messages = running.amount.messages(client.sends[send].rate, size)
                running.make(client, topic)
                sent = running.send(client, send, topic, size, messages)
                came = running.consume(client, consume, topic, size, messages)
                if measures_send:
                    yield running.row("send", client, send, SIZES[size], sent, RATE)
                if measures_consume:
                    yield running.row("consume", client, consume, SIZES[size], came, RATE)
    for tool in running.peer.tools:
        yield from _by_tool(running, tool)
    if running.peer.name == OURS:
        for size in running.amount.sizes:
            copied = running.copy(size, running.amount.messages(_COPY_RATE, size))
            promise = str(running.promise)
            yield Row("consume", loopback.NAME, loopback.CLIENT, loopback.WAY, promise, SIZES[size], copied, RATE)


def keys(running: Running) -> Iterator[Row]:
    """Measure every way to send with keys; every message is consumed and compared."""
    size = min(running.amount.sizes)
    for client in running.peer.clients:
        for way, says in client.keyed.items():
            topic, messages = running.topic("keys"), running.amount.messages(says.rate, size)
            running.make(client, topic)
            sent = running.send(client, way, topic, size, messages)
            running.consume(client, "each", topic, size, messages)
            yield running.row("keys", client, way, SIZES[size], sent, RATE)


def limits(running: Running) -> Iterator[Row]:
    """Measure every way to consume a few messages at a time, with the smaller bodies."""
    for client in running.peer.clients:
        if not client.limited:
            continue
        running.warm(client)
        for size in sorted(running.amount.sizes)[:2]:
            for way, says in client.limited.items():
                topic, messages = running.topic("limits"), running.amount.messages(says.rate, size)
                running.make(client, topic)
                running.send(client, next(iter(client.sends)), topic, size, messages)
                came = running.consume(client, way, topic, size, messages)
                yield running.row("limits", client, way, SIZES[size], came, RATE)


def _by_tool(running: Running, tool: Tool) -> Iterator[Row]:
    """Measure a broker's own load tool; the usual client consumes what it sends, and the other way round."""
    client, module = running.peer.clients[0], tools.module(tool.module)
    for size in running.amount.sizes:
        topic, done = "", Load(0, 0.0)
        for way, says in tool.sends.items():
            topic, messages = running.topic("tool"), running.amount.messages(says.rate, size)
            running.make(client, topic)
            done = module.send(running.server.target, way, topic, size, messages)
            if not tool.only_counts:
                running.consume(client, "each", topic, size, done.messages, text=done.text)
            yield running.row("send", tool, way, SIZES[size], done.rate, RATE)
        for way, says in tool.consumes.items():
            messages = done.messages
            if not tool.only_counts:
                topic, messages = running.topic("tool"), running.amount.messages(says.rate, size)
                running.make(client, topic)
                running.send(client, next(iter(client.sends)), topic, size, messages)
            done = module.consume(running.server.target, way, topic, size, messages)
            yield running.row("consume", tool, way, SIZES[size], done.rate, RATE)


def pairs(client: Client) -> list[tuple[str, str, bool, bool]]:
    """Return pairs of ways to send and to consume, so that all are used, and whether it is the first use of either.

    The first ways to send are the fast ones, so they are used again if there are more ways to consume.
    """
    sends = list(client.sends)
    consumes = [way for way in client.consumes if way not in _OF_OTHER_WORKS]
    if not sends or not consumes:
        return []
    return [
        (sends[at] if at < len(sends) else sends[0], consumes[at % len(consumes)], at < len(sends), at < len(consumes))
        for at in range(max(len(sends), len(consumes)))
    ]
