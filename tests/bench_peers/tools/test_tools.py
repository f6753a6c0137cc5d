"""Load tools in other languages: how their output is parsed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import tools
from bench.peers.clients import qmq_client
from bench.peers.measure import moving
from bench.peers.peer import Promise, Tool, Way
from bench.peers.processes import Server
from bench.peers.registry import PEERS
from bench.peers.running import Amount, Running
from bench.peers.tools import Load
from bench.peers.tools.kafka import came_rate
from bench.peers.tools.kafka import sent_rate as sent_by_kafka
from bench.peers.tools.redis import sent_rate as sent_by_redis
from bench.peers.tools.rocketmq import _sum_of, rates_in
from bench.peers.workers import jobs
from bench.peers.workers.tally import text_of
from qmq.bench.values import BenchFailed

_SENT = """62065 records sent, 12229.6 records/sec (1.17 MB/sec), 211.4 ms avg latency, 3468.0 ms max latency.
1000 records sent, 500.5 records/sec (0.05 MB/sec), 80.89 ms avg latency, 3468.00 ms max latency, 69 ms 50th, \
157 ms 95th, 362 ms 99th, 681 ms 99.9th.
700 steady state records sent, 900.25 records/sec (0.09 MB/sec), 8.9 ms avg latency, 34.00 ms max latency, 9 ms 50th, \
17 ms 95th, 32 ms 99th, 81 ms 99.9th.
"""
_CAME = "2026-11-22 02:09:40:197, 2026-11-22 02:09:54:089, 0.0954, 13.72, 1000, 143967.7, 1776, 12116, 15.7, 165070.9\n"
_REPORT = (
    "Current Time: 02:16 | Send TPS: 265 | Send MPS: 8488 | Max RT(ms): 2 | Send Failed: 0 | Send Message Failed: 0\n"
)


def test_a_tool_that_fails_says_why() -> None:
    assert tools.said(["sh", "-c", "cat; echo $WORD"], b"given ", {"WORD": "here"}) == "given here\n"
    with pytest.raises(BenchFailed, match="sh ended with 3: no such topic"):
        tools.said(["sh", "-c", "echo no such topic >&2; exit 3"])
    with pytest.raises(BenchFailed, match="moved 5 messages, not 6"):
        tools.counted(5, 6)


def test_kafka_s_producer_counts_all_and_times_what_came_after_it_was_warm() -> None:
    assert sent_by_kafka(_SENT, 1_000) == 900.25
    with pytest.raises(BenchFailed, match="1000 messages, not 1001"):
        sent_by_kafka(_SENT, 1_001)
    with pytest.raises(BenchFailed, match="did not say"):
        sent_by_kafka(_SENT.splitlines()[0], 1_000)


def test_kafka_s_consumer_has_to_have_had_all_bytes() -> None:
    assert came_rate(_CAME, 100, 1_000) == 165070.9
    with pytest.raises(BenchFailed, match="1000 messages, not 999"):
        came_rate(_CAME, 100, 999)
    with pytest.raises(BenchFailed, match="not 1000"):
        came_rate(_CAME, 101, 1_000)
    with pytest.raises(BenchFailed, match="did not say"):
        came_rate("", 100, 1_000)


def test_redis_benchmark_tells_a_rate_or_nothing() -> None:
    assert sent_by_redis('"test","rps","avg_latency_ms"\n"XADD t * b","47000.59","8.387"\n') == 47000.59
    for nothing in ("", '"test","rps"\n', "no table"):
        with pytest.raises(BenchFailed, match="did not say"):
            sent_by_redis(nothing)


def test_rocketmq_s_reports_are_of_messages_and_have_no_failures() -> None:
    consumed = "Current Time: 02:16 | Consume TPS: 156 | AVG(B2C) RT(ms): 40299.659 | Consume Fail: 0\n"
    assert rates_in(f"topic: t2\n{_REPORT}{consumed}Current Time: 02:17 | Send TPS: 3") == [8488.0, 156.0]
    with pytest.raises(BenchFailed, match="failed"):
        rates_in(_REPORT.replace("Send Failed: 0", "Send Failed: 2"))


def test_rocketmq_s_tables_are_summed() -> None:
    status = "#Broker Name #QID #Min #Max\nbroker-a 0 0 9824 02:16\nbroker-a 1 0 9856 02:16\n\nTopic Put TPS: 0.0\n"
    assert _sum_of(status, column=3) == 19_680
    assert _sum_of("#Topic\nt2 broker-a 0 9824 9824 0\nother broker-a 0 1 1 0\n", column=4, of="t2") == 9_824


@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_a_tool_says_in_which_language_it_is_and_is_held_against_ways_of_qmq(peer: Any) -> None:
    (ours,) = PEERS["qmq"].clients
    for tool in peer.tools:
        assert any(name in tool.package for name in ("Java", "(C)", "(Go)"))
        assert {way.like or name for name, way in tool.sends.items()} <= set(ours.sends)
        assert {way.like or name for name, way in tool.consumes.items()} <= set(ours.consumes)
        assert tools.module(tool.module).send


class _Few(Running):
    """Runs each job here, with few messages."""

    def __init__(self, server: Server) -> None:
        self.peer, self.amount, self.promise = PEERS["qmq"], Amount(seconds=0.001, sizes=(100,)), Promise.PAGE_CACHE
        self.server = server
        self.consumed: list[dict[str, Any]] = []

    def make(self, client: Any, *topics: str) -> float:
        return 0.0

    def send(self, client: Any, way: str, topic: str, size: int, messages: int) -> float:
        return 1.0

    def consume(self, *given: Any, **options: Any) -> float:
        self.consumed.append({"topic": given[2], "messages": given[4], **options})
        return 1.0


def _tool(only_counts: bool) -> Tool:
    return Tool("t (C)", "thing", {"bulk": Way("sends", 5)}, {"each": Way("takes", 5)}, only_counts=only_counts)


@pytest.mark.parametrize("only_counts", [False, True])
def test_what_a_tool_moves_is_checked_by_the_usual_client(
    server: Server, monkeypatch: pytest.MonkeyPatch, only_counts: bool
) -> None:
    asked: list[tuple[str, int]] = []

    def send(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
        return Load(messages + 24, 3_000.0, text_of(size))

    def consume(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
        asked.append((topic, messages))
        return Load(messages, 4_000.0)

    monkeypatch.setattr(tools, "module", lambda name: SimpleNamespace(send=send, consume=consume))
    running = _Few(server)
    rows = list(moving._by_tool(running, _tool(only_counts)))
    assert [(row.work, row.client, row.value) for row in rows] == [
        ("send", "t (C)", 3_000),
        ("consume", "t (C)", 4_000),
    ]
    ((consumed_topic, consumed),) = asked
    if only_counts:
        assert (running.consumed, consumed) == ([], 2_024)
    else:
        assert [(one["messages"], one["text"]) for one in running.consumed] == [(2_024, text_of(100))]
        assert consumed == 2_000
        assert consumed_topic != running.consumed[0]["topic"]


async def test_one_text_over_and_over_is_compared(server: Server) -> None:
    target = jobs.target_of(server.target)
    topic, text = f"x.{secrets.token_hex(4)}", text_of(30)
    sender = qmq_client.sender(target, "bulk")
    await sender.open([topic])
    await sender.run(topic, [text.encode()], 2_000)
    await sender.close()
    options: dict[str, Any] = {
        "module": "qmq_client", "target": server.target, "way": "each", "topic": topic, "size": 30, "messages": 2_000
    }  # fmt: skip
    assert (await jobs.consume(lambda **_: None, group="one", text=text, **options))["checked"]
    with pytest.raises(BenchFailed, match="sent"):
        await jobs.consume(lambda **_: None, group="two", text=text[:-1] + "!", **options)
