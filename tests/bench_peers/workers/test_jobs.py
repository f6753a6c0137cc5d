"""The loops of the workers, with QMQ: what they move is checked."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from bench.peers.clients import qmq_client
from bench.peers.processes import Server
from bench.peers.registry import PEERS
from bench.peers.workers import jobs
from bench.peers.workers.driving import Tags, portions
from qmq.bench.values import BenchFailed

(QMQ,) = PEERS["qmq"].clients


def no_gate(**_: object) -> None:
    """Do not wait."""


@pytest.fixture
def common(server: Server) -> dict[str, Any]:
    return {"module": QMQ.module, "target": server.target, "topic": f"x.{secrets.token_hex(4)}", "size": 100}


@pytest.mark.parametrize(
    ("send", "consume"),
    [
        ("bulk", "bulk"), ("queued", "each"), ("awaited", "iterated"), ("bulk", "failing"),
        ("key", "each"), ("key and property", "at most 1,000"),
    ],
)  # fmt: skip
async def test_what_is_sent_is_consumed(common: dict[str, Any], send: str, consume: str) -> None:
    sent = await jobs.send(no_gate, way=send, messages=3_000, **common)
    came = await jobs.consume(no_gate, way=consume, group=secrets.token_hex(4), messages=3_000, **common)
    assert sent["messages"] == came["messages"] == 3_000
    assert sent["seconds"] > 0
    assert came["seconds"] > 0
    # What a batch holds is only counted; the bench reads it again.
    assert came["checked"] == (consume not in ("bulk", "at most 1,000"))


@pytest.mark.parametrize(("sent", "size"), [(2_000, 100), (1_000, 101)])
async def test_what_is_not_what_was_sent_is_an_error(common: dict[str, Any], sent: int, size: int) -> None:
    await jobs.send(no_gate, way="bulk", messages=sent, **(common | {"size": size}))
    with pytest.raises(BenchFailed, match=r"sent|keeps"):
        await jobs.consume(no_gate, way="each", group=secrets.token_hex(4), messages=1_000, **common)


async def test_a_schedule_times_both_ends(common: dict[str, Any]) -> None:
    ready = asyncio.Event()
    arriving = asyncio.create_task(
        jobs.arrivals(
            lambda **_: ready.set(), way="paced", group=secrets.token_hex(4), rate=1_000, messages=50, **common
        )
    )
    await ready.wait()
    sent = await jobs.paced(no_gate, way="awaited", rate=1_000, seconds=0.05, **common)
    came = await arriving
    assert (came["messages"], came["first_due_ns"]) == (sent["messages"], sent["first_due_ns"])
    assert sent["messages"] == 50
    for told in (sent, came):
        assert 0 < told["p50_ms"] <= told["p99_ms"] <= told["p99.9_ms"]


async def test_a_sender_that_is_far_behind_gives_up(common: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SLOWEST", 0.0)
    monkeypatch.setattr(jobs, "_SLOWEST_S", 0.05)
    told = await jobs.paced(no_gate, way="awaited", rate=1_000, seconds=60.0, **common)
    assert told["gave_up"]
    assert told["messages"] < 60_000
    # The schedule is never ahead of its rate; a busy machine may leave it nothing.
    assert 0 <= told["sent_rate"] <= 1_100
    assert "p50_ms" not in told


def test_portions_go_round() -> None:
    parts = list(portions([b"a", b"b"], 7, 4))
    assert parts == [[b"a", b"b", b"a", b"b"], [b"a", b"b", b"a"]]
    assert list(portions([b"a", b"b", b"c"], 5, 2)) == [[b"a", b"b"], [b"c", b"a"], [b"b"]]


async def test_a_consumer_that_is_to_fail_and_did_not_is_an_error(
    common: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.send(no_gate, way="bulk", messages=1_000, **common)
    monkeypatch.setattr(qmq_client._Failing, "take", qmq_client._Pull.take)
    with pytest.raises(BenchFailed, match="no message failed"):
        await jobs.consume(no_gate, way="failing", group=secrets.token_hex(4), messages=1_000, **common)


def test_confirmations_in_any_order_count_each_message_once() -> None:
    """Some of several queues are confirmed one by one ahead of others, which are then confirmed all at once."""
    tags = Tags()
    assert list(tags.confirm(8, multiple=False)) == [8]
    assert list(tags.confirm(3, multiple=False)) == [3]
    assert list(tags.confirm(6, multiple=True)) == [1, 2, 4, 5, 6]
    assert list(tags.confirm(7, multiple=False)) == [7]
    assert list(tags.confirm(9, multiple=True)) == [9]
    found = [tag for last in range(10, 30_000) for tag in tags.confirm(last, multiple=False)]
    assert found == list(range(10, 30_000))
    assert list(tags.confirm(30_001, multiple=True)) == [30_000, 30_001]
