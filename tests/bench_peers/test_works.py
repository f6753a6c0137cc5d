"""The works with many topics, many consumers and many waiting messages: their checks, in one process, with QMQ."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers.clients import qmq_client
from bench.peers.measure import crowds, waiting
from bench.peers.peer import Client, Promise
from bench.peers.processes import Server
from bench.peers.registry import PEERS
from bench.peers.running import Amount, Running
from bench.peers.workers import jobs, more_jobs
from bench.peers.workers.driving import Receiver
from bench.peers.workers.tally import Tally, bodies
from qmq.bench.values import BenchFailed

QMQ = PEERS["qmq"]
(CLIENT,) = QMQ.clients


def no_gate(**_: object) -> None:
    """Do not wait."""


class Counting(Running):
    """Moves nothing, and counts the messages that each topic would have."""

    def __init__(self, amount: Amount) -> None:
        self.peer, self.amount, self.promise = QMQ, amount, Promise.PAGE_CACHE
        self.filled = {}
        self.there: Counter[str] = Counter()

    def make(self, client: Client, *topics: str) -> float:
        return 0.0

    def warm(self, client: Client) -> None:
        """Do nothing."""

    def send(self, client: Client, way: str, topic: str, size: int, messages: int) -> float:
        assert messages > 0
        self.there[topic] += messages
        return 10_000.0 if topic.startswith("bench.short") else 5_000.0

    def consume(self, *_: Any, **options: Any) -> float:
        return 1_000.0


class Waiting(Counting):
    """Has as many messages to consume as it is told."""

    def consume(self, client: Client, way: str, topic: str, size: int, messages: int, **options: Any) -> float:
        assert options.get("there", messages) == self.there[topic]
        return 1_000.0


@pytest.fixture
def common(server: Server) -> dict[str, Any]:
    return {"module": CLIENT.module, "target": server.target}


async def test_messages_are_spread_over_topics_and_found_there(common: dict[str, Any]) -> None:
    options = {**common, "prefix": f"x.{secrets.token_hex(4)}", "count": 10, "size": 50, "messages": 2_000}
    sent = await more_jobs.spread(no_gate, way="paced", seed=1, timeout_s=60.0, **options)
    assert sent["messages"] == 2_000
    checked = await more_jobs.check_spread(no_gate, way="each", seed=1, places=[0, 9], **options)
    assert 200 < checked["messages"] < 700
    with pytest.raises(BenchFailed, match="messages were sent"):
        await more_jobs.check_spread(no_gate, way="each", seed=2, places=[5], **options)


@pytest.mark.parametrize("way", CLIENT.spread)
async def test_one_consumer_takes_what_was_spread_over_topics(common: dict[str, Any], way: str) -> None:
    options = {**common, "prefix": f"x.{secrets.token_hex(4)}", "count": 10, "size": 50}
    await more_jobs.spread(no_gate, way="paced", seed=1, timeout_s=60.0, messages=11_000, **options)
    came = await more_jobs.consume_spread(no_gate, way=way, messages=11_000, **options)
    assert came["checked"]
    assert came["messages"] == 11_010
    other = next(name for name in CLIENT.spread if name != way)
    with pytest.raises(BenchFailed, match="times more than it was sent"):
        await more_jobs.consume_spread(no_gate, way=other, messages=11_000, **{**options, "size": 51})


async def test_members_tell_when_each_message_came(common: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**common, "way": "paced", "topic": f"x.{secrets.token_hex(4)}"}
    sent = await jobs.paced(no_gate, size=50, rate=1_000, seconds=0.1, **options)
    # A second goes by with each message, one a take: a member leaves after 40 of them, the other takes 60.
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(more_jobs, "time", clock)
    monkeypatch.setattr(more_jobs, "_TIMEOUT_S", 60.0)
    monkeypatch.setattr(qmq_client, "_PULL", 1)
    came = []
    for stays in (40, 60):
        left = await more_jobs.member(no_gate, group="g", seconds=stays + 1.0, **options)
        assert len(left["came"]) == stays
        came += left["came"]
    assert {due for _, due in came} == {sent["first_due_ns"] + number * 1_000_000 for number in range(100)}
    crowds._check(came, sent)
    with pytest.raises(BenchFailed, match="of 101 messages 1 did not come, and 0 that were not sent did"):
        crowds._check(came, {**sent, "messages": 101})
    with pytest.raises(BenchFailed, match="of 99 messages 0 did not come, and 1 that were not sent did"):
        crowds._check(came, {**sent, "messages": 99})


def test_somebody_stays_until_all_has_come() -> None:
    flows_until = crowds._FLOWS_AFTER_S + crowds._FLOW_S
    assert max(joins + stays for joins, stays in crowds.MEMBERS) > flows_until + 10
    changes = [joins for joins, _ in crowds.MEMBERS] + [joins + stays for joins, stays in crowds.MEMBERS]
    assert sum(crowds._FLOWS_AFTER_S < at < flows_until for at in changes) >= 5


def test_a_backlog_is_filled_and_told_of(server: Server) -> None:
    running = Waiting(Amount(seconds=0.001, backlog=40_000, own_backlog=60_000))
    running.server = server
    rows = {(row.what, row.unit): row.value for row in waiting.backlog(running)}
    assert rows["40,000 wanted, waiting", "messages"] == 46_000
    # What was sent beside the first backlog waits too.
    assert rows["60,000 wanted, waiting", "messages"] == 66_000
    assert rows["send, 60,000 waiting", waiting.RATIO] == 0.5
    assert rows["consume, 60,000 waiting", waiting.RATIO] == 1.0
    assert rows["memory, 60,000 waiting", "bytes"] > 1 << 20


async def test_topics_are_made_some_at_a_time_and_given_up_in_time(
    common: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: Counter[str] = Counter()

    async def make_topics(_: object, topics: Sequence[str]) -> None:
        there.update(topics)

    monkeypatch.setattr(more_jobs, "driver", lambda _: SimpleNamespace(make_topics=make_topics))
    clock = itertools.count()
    monkeypatch.setattr(more_jobs, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    made = await more_jobs.make_many(no_gate, **common, prefix="x", count=1_003, timeout_s=60.0)
    # Each portion takes one tick of this clock: 20, 40, 80, 160, 320, and the rest.
    assert made == {"topics": 1_003, "seconds": 6.0}
    assert set(there) == set(more_jobs.topics_of("x", 1_003))
    assert there.total() == 1_003
    made = await more_jobs.make_many(no_gate, **common, prefix="x", count=1_003, timeout_s=2.0)
    assert made == {"topics": 140, "seconds": 3.0}
    with pytest.raises(BenchFailed, match="in 3 s only 140 of 1,003 topics could be made"):
        more_jobs.enough(140, 1_003, 3.0)


async def test_topics_that_need_no_making_are_given_up_in_time_too(common: dict[str, Any]) -> None:
    options = {**common, "prefix": "x", "count": 3_000, "size": 50, "messages": 2_000, "way": "paced", "seed": 1}
    with pytest.raises(BenchFailed, match="only 1,000 of 3,000 topics could be made"):
        await more_jobs.spread(no_gate, **options, timeout_s=0.0)


def test_a_broker_that_is_slow_to_fill_gets_a_shorter_backlog() -> None:
    running = Counting(Amount())
    waited = waiting.fill(running, CLIENT, "awaited", "bench.long", 10_000_000)
    assert waited == running.there["bench.long"] < 10_000_000
    assert waited / 5_000.0 >= running.amount.timeout_s


@pytest.mark.parametrize(("came", "is_right"), [(2_000, True), (2_500, True), (1_999, False), (5_001, False)])
def test_a_part_of_a_backlog_is_compared_too(came: int, is_right: bool) -> None:
    tally = Tally(20, 2_000, there=5_000)
    tally.add((bodies(20) * 6)[:came])
    if is_right:
        tally.check()
    else:
        with pytest.raises(BenchFailed, match="messages came"):
            tally.check()


def test_a_part_that_was_not_sent_so_often_is_found() -> None:
    tally = Tally(20, 2_000, there=5_000)
    tally.add([bodies(20)[0]] * 2_000)
    with pytest.raises(BenchFailed, match="times more than it was sent"):
        tally.check()


@pytest.mark.parametrize(("seconds", "fewer"), [(60.0, False), (0.0, True)])
async def test_consumers_wait_until_the_parent_says_enough(
    common: dict[str, Any], seconds: float, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(more_jobs, "_SETTLE_S", 0.0)
    told: list[dict[str, Any]] = []
    options = {**common, "way": "paced", "topic": f"x.{secrets.token_hex(4)}", "consumers": 3, "seconds": seconds}
    await more_jobs.idle(lambda **words: told.append(words), **options)
    assert told == [{"waiting": 0 if fewer else 3}]


def test_a_client_that_blocks_waits_in_a_thread(server: Server) -> None:
    class Blocking(Receiver):
        blocks = True
        came = 0

        async def open(self) -> None:
            """Do nothing."""

        async def take(self) -> int:
            self.came += 1
            return 0

        async def flush(self) -> None:
            """Do nothing."""

        async def close(self) -> None:
            """Do nothing."""

    receiver = Blocking(jobs.target_of(server.target), "x", "g")
    more_jobs._block(receiver)
    assert receiver.came == 1
