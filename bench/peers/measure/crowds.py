"""Measure very many topics, consumers that come and go while messages flow, and consumers that wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final

from bench.peers.measure.moving import RATE
from bench.peers.measure.timing import MS
from bench.peers.peer import Client
from bench.peers.running import Row, Running
from bench.peers.workers.more_jobs import enough
from qmq.bench.values import BenchFailed

_SIZE: Final = 100
_SEED: Final = 1
_CHECKED: Final = 5
#: The rate that is assumed where no way here has a known one.
_SPREAD_RATE: Final = 250_000

_PROCESSES: Final = 10
_LOOK_S: Final = 5.0

_FLOW: Final = 1_000
_FLOW_S: Final = 12.0
#: When members join and how long each stays, in seconds. The first three are there before messages flow; the last stays
#: until all have arrived.
MEMBERS: Final = ((0.0, 9.0), (0.0, 11.0), (0.0, 13.0), (7.0, 8.0), (10.0, 8.0), (12.0, 22.0))
_FLOWS_AFTER_S: Final = 6.0


def subjects(running: Running) -> Iterator[Row]:
    """Send each message to a random one of very many topics, and consume all of these with one consumer, where a client
    can. Raises BenchFailed if they cannot be created in time.
    """
    client = running.peer.clients[0]
    way = next(iter(client.paced))
    running.warm(client)
    for count in running.amount.subjects:
        prefix = running.topic("many")
        made_s = _made(running, client, prefix, count)
        rate = min(next(iter(client.sends.values())).rate, _SPREAD_RATE)
        spread = {
            "prefix": prefix,
            "count": count,
            "size": _SIZE,
            "messages": running.amount.messages(rate, _SIZE),
        }
        options = {**spread, "seed": _SEED}
        give_up_after = {"way": way, "timeout_s": running.amount.timeout_s}
        (sent,) = running.run(("spread", client, {**options, **give_up_after}))
        places = [number * count // min(count, _CHECKED) for number in range(min(count, _CHECKED))]
        running.run(("check_spread", client, {**options, "way": "each", "places": places}))
        name = f"{count:,} subjects"
        yield running.row("subjects", client, way, name, sent["messages"] / sent["seconds"], RATE)
        for limited in client.spread:
            (came,) = running.run(("consume_spread", client, {**spread, "way": limited}))
            rate_out = came["messages"] / came["seconds"]
            yield running.row("subjects", client, limited, f"{name}, consumed", rate_out, RATE)
        yield running.row("subjects", client, way, f"{name}, made in", made_s + sent["made_s"], "s")
        yield running.row("subjects", client, way, f"{name}, memory", running.server.memory().own, "bytes")


def _made(running: Running, client: Client, prefix: str, count: int) -> float:
    options = {"prefix": prefix, "count": count, "timeout_s": running.amount.timeout_s}
    (made,) = running.run(("make_many", client, options))
    enough(made["topics"], count, made["seconds"])
    return float(made["seconds"])


def churn(running: Running) -> Iterator[Row]:
    """Let consumers of one group join and leave while messages flow; there are more of them than a topic has
    partitions.
    """
    for client in running.peer.clients:
        if not client.paced:
            continue
        running.warm(client)
        for way in ("paced", *(name for name in client.consumes if name == "share each")):
            topic = running.topic("churn")
            running.make(client, topic)
            came, sent = _flow(running, client, way, topic)
            _check(came, sent)
            arrived = sorted(at for at, _ in came)
            gap = max(after - before for before, after in pairwise(arrived)) / 1e6
            late = sorted(at - due for at, due in came)
            yield running.row("churn", client, way, "longest gap", gap, MS)
            yield running.row("churn", client, way, "end to end p99", late[len(late) * 99 // 100] / 1e6, MS)
            yield running.row("churn", client, way, "came twice", len(came) - sent["messages"], "messages")


def _flow(running: Running, client: Client, way: str, topic: str) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    options = {"way": way, "topic": topic, "group": "churn"}
    members = [running.worker("member", client, {**options, "seconds": stays}) for _, stays in MEMBERS]
    paced = {"way": next(iter(client.paced)), "topic": topic, "size": _SIZE, "rate": _FLOW, "seconds": _FLOW_S}
    sender = running.worker("paced", client, paced)
    starts = sorted([(joins, one) for (joins, _), one in zip(MEMBERS, members, strict=True)], key=lambda pair: pair[0])
    starts.append((_FLOWS_AFTER_S, sender))
    starts.sort(key=lambda pair: pair[0])
    try:
        began = time.monotonic()
        for at, worker in starts:
            time.sleep(max(at - (time.monotonic() - began), 0))
            worker.write_line("go")
        sent = running.result(sender)
        came = [(at, due) for one in members for at, due in running.result(one)["came"]]
    finally:
        for worker in (*members, sender):
            worker.end()
    return came, sent


def _check(came: Sequence[tuple[int, int]], sent: dict[str, Any]) -> None:
    """Raise BenchFailed unless each message of the schedule arrived at least once, and no other did."""
    every = 1_000_000_000 // _FLOW
    wanted = {sent["first_due_ns"] + number * every for number in range(sent["messages"])}
    found = Counter(due for _, due in came)
    if found.keys() != wanted:
        lost, strange = len(wanted - found.keys()), len(found.keys() - wanted)
        raise BenchFailed(f"of {len(wanted)} messages {lost} did not come, and {strange} that were not sent did")


def idle(running: Running) -> Iterator[Row]:
    """Measure what very many consumers cost the broker while no messages arrive."""
    client = next(client for client in running.peer.clients if client.paced)
    before = running.server.memory().own
    topic = running.topic("idle")
    running.make(client, topic)
    count = running.amount.consumers
    yield running.row("idle", client, "paced", "memory, none", before, "bytes")
    options = {
        "way": "paced",
        "topic": topic,
        "consumers": count // _PROCESSES,
        "seconds": running.amount.timeout_s / _PROCESSES,
    }
    with ExitStack() as stack:
        waiting = 0
        for _ in range(_PROCESSES):
            worker, told = running.prepared("idle", client, options)
            stack.enter_context(worker)
            waiting += told["waiting"]
        used, began = running.server.cpu_s(), time.monotonic()
        time.sleep(_LOOK_S)
        cores = (running.server.cpu_s() - used) / (time.monotonic() - began)
        grown = running.server.memory().own - before
    yield running.row("idle", client, "paced", f"{count:,} wanted, waiting", waiting, "consumers")
    yield running.row("idle", client, "paced", "processor", cores, "cores")
    yield running.row("idle", client, "paced", "memory a consumer", grown / max(waiting, 1), "bytes")
