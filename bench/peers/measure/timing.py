"""Measure latency at a fixed rate, from when a message was due until it is acknowledged, and until it is received."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bench.peers.peer import Client
from bench.peers.running import Row, Running
from qmq.bench.values import BenchFailed

MS: Final = "ms"
US: Final = "us a message"
_SIZE: Final = 100
_SECONDS: Final = 2
_SHARES: Final = ("p50", "p99", "p99.9")
#: A sender that has sent less than this part of the rate could not keep up: its times only say how long it was
#: measured.
_KEEPS_UP: Final = 0.9


def rate_name(rate: int) -> str:
    """Return the name of a rate: 1 k msg/s."""
    return f"{rate // 1_000} k msg/s"


def latency(running: Running) -> Iterator[Row]:
    """Measure each way on a schedule, at each rate.

    The broker's threads, per message: how long they ran, and how long they could run and waited for a processor.
    A rate that a way cannot keep up with is its last; if it is far from it, only the number of messages sent is
    reported.
    """
    for client in running.peer.clients:
        if client.paced:
            running.warm(client)
        for way in client.paced:
            for rate in running.amount.rates:
                topic = running.topic("paced")
                running.make(client, topic)
                before = running.server.processor_time()
                sent, came = at_rate(running, client, way, rate, topic)
                after = running.server.processor_time()
                if "p50_ms" in sent:
                    yield from _percentiles(running, client, way, f"{rate_name(rate)} to ack", sent)
                if came is not None:
                    yield from _percentiles(running, client, way, f"{rate_name(rate)} end to end", came)
                for what, seconds in (
                    ("ran", after.ran_s - before.ran_s),
                    ("waited", after.waited_s - before.waited_s),
                ):
                    a_message = seconds / max(sent["messages"], 1) * 1e6
                    yield running.row("latency", client, way, f"{rate_name(rate)} broker {what}", a_message, US)
                yield running.row("latency", client, way, f"{rate_name(rate)} sent", sent["sent_rate"], "msg/s")
                if sent["sent_rate"] < rate * _KEEPS_UP:
                    break


def at_rate(
    running: Running, client: Client, way: str, rate: int, topic: str
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the results of sender and receiver, on an existing topic; None for the receiver if the sender gave up.
    Raises BenchFailed.
    """
    seconds = running.amount.seconds * _SECONDS
    common = {"topic": topic, "size": _SIZE, "rate": rate}
    receives = {**common, "way": "paced", "group": "one", "messages": int(rate * seconds)}
    with (
        running.worker("arrivals", client, receives) as receiver,
        running.worker("paced", client, {**common, "way": way, "seconds": seconds}) as sender,
    ):
        for worker in (receiver, sender):
            worker.write_line("go")
        sent = running.result(sender)
        if sent["gave_up"]:
            return sent, None
        came = running.result(receiver)
    # The times of all messages count from that of the first.
    if (came["messages"], came["first_due_ns"]) != (sent["messages"], sent["first_due_ns"]):
        raise BenchFailed(f"what came was not what was sent: {came}, {sent}")
    return sent, came


def arrived(running: Running, client: Client, way: str, rate: int, topic: str) -> Mapping[str, Any]:
    """Return the results of the receiver. Raises BenchFailed if the sender gave up."""
    sent, came = at_rate(running, client, way, rate, topic)
    if came is None:
        raise BenchFailed(f"of {rate:,} msg/s that were to be sent {sent['sent_rate']:,.0f} were")
    return came


def _percentiles(running: Running, client: Client, way: str, what: str, found: Mapping[str, Any]) -> Iterator[Row]:
    for share in _SHARES:
        yield running.row("latency", client, way, f"{what} {share}", found[f"{share}_ms"], MS)
