"""The figures of a console are those of a test's own bookkeeping: on pages, in JSON, in events and in metrics."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.console.snapshot import Snapshot
from qmq.console.watch import Watch
from tests.broker_process import running_broker
from tests.console.consoles import RunningConsole, running_console
from tests.console.test_events import event_of, tab
from tests.console.test_metrics import series
from tests.console.test_pages import number, page

SENT, DELAYED, TAKEN, ACKED, REJECTED, NACKED = 12, 1, 9, 3, 2, 1
#: The counts of each group, and of both together.
BILLING = {
    "ready": SENT - TAKEN, "in_flight": TAKEN - ACKED - REJECTED - NACKED, "in_retry": NACKED, "dead": REJECTED,
    "delayed": DELAYED, "consumers": 1,
}  # fmt: skip
MAIL = {"ready": SENT, "in_flight": 0, "in_retry": 0, "dead": 0, "delayed": DELAYED, "consumers": 1}
BOTH = {name: BILLING[name] + MAIL[name] for name in BILLING}
LABELS = {
    "ready": "Ready", "in_flight": "In flight", "in_retry": "In retry", "dead": "Dead letters", "delayed": "Delayed",
    "consumers": "Consumers",
}  # fmt: skip
METRICS = {
    "ready": "qmq_group_ready_messages", "in_flight": "qmq_group_in_flight_messages",
    "in_retry": "qmq_group_retrying_messages", "dead": "qmq_group_dead_messages",
    "delayed": "qmq_group_delayed_messages", "consumers": "qmq_group_consumers",
}  # fmt: skip
#: What came and went meanwhile.
MOVED = {"received": SENT, "delivered": TAKEN, "acked": ACKED, "failed": REJECTED + NACKED}


async def each(watch: Watch, seen: list[Snapshot]) -> None:
    """Add each snapshot to those that were seen."""
    while True:
        seen.append(await watch.newer_than(seen[-1].number if seen else 0))
        watch.look()


def moved(seen: list[Snapshot], name: str, group: str | None = None) -> float:
    """The messages that the rates of some snapshots stand for."""
    found = 0.0
    for before, after in pairwise(seen):
        rates: Any = after if group is None else after.groups.get(group)
        seconds = (after.brokers[0].at - before.brokers[0].at).total_seconds()
        found += seconds * getattr(rates, f"{name}_rate", 0.0)
    return found


async def test_all_figures_are_those_of_the_test(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path) as url,
        running_console(url) as console,
        qmq.connect(url) as client,
    ):
        watch, seen = console.app.state.watch, list[Snapshot]()
        watching = asyncio.create_task(each(watch, seen))
        await watch.newer_than(0)
        first = await client.send("shop.order", b"0")
        await client.send_many("shop.order", [b"x"] * (SENT - 1))
        await client.send("shop.order", b"later", delay=3600)
        async with (
            client.subscribe("shop.", group="billing", retry_delays=["1h"]) as consumer,
            client.subscribe("shop.", group="mail"),
        ):
            messages = await consumer.pull(max_count=TAKEN, min_count=TAKEN, timeout=30)
            assert len(messages) == TAKEN
            left = iter(messages)
            for _ in range(ACKED):
                await next(left).ack()
            for _ in range(REJECTED):
                await next(left).reject("broken")
            await next(left).nack(reason="later")
            while (latest := await watch.recent(0)).dead != REJECTED or counts(latest) != BOTH:
                pass
            await watch.newer_than(latest.number)  # its rates are 0 again
            await agree(console)
            watching.cancel()
        for name, count in MOVED.items():
            assert moved(seen, name) == pytest.approx(count), name
            if name != "received":
                assert moved(seen, name, "billing") == pytest.approx(count), name
                assert moved(seen, name, "mail") == 0, name
        oldest = (await client.get(first.id)).stored_at
        assert seen[-1].groups["mail"].oldest == oldest
        assert seen[-1].oldest == oldest


def counts(of: Any) -> dict[str, int]:
    """The counts of a snapshot or of a group of one."""
    groups = of.groups.values() if isinstance(of, Snapshot) else [of]
    return {name: sum(getattr(group, name) for group in groups) for name in BOTH}


async def agree(console: RunningConsole) -> None:
    """Look at all that the console shows while nothing moves any more."""
    browser = await console.browser()
    of_all = await browser.get("/api/overview")
    async with tab(console.port) as reader:
        event = await event_of(reader)
    text = await page(browser, "/")
    for name in ("ready", "in_flight", "in_retry", "dead"):
        assert number(text, LABELS[name]) == str(BOTH[name]), name
        assert (of_all[name], event[name]) == (BOTH[name], BOTH[name]), name
    assert [(family["name"], family["messages"]) for family in of_all["subjects"]] == [("shop", SENT)]
    rows = {row["name"]: row for row in (await browser.get("/api/groups"))["rows"]}
    shown = {row["name"]: row for row in event["groups"]}
    metrics = series((await browser.ask("GET", "/metrics")).body)
    for group, expected in (("billing", BILLING), ("mail", MAIL)):
        text = await page(browser, f"/groups/{group}")
        async with tab(console.port, f"/api/events?group={group}") as reader:
            alone = (await event_of(reader))["group"]
        for name, count in expected.items():
            assert number(text, LABELS[name]) == str(count), (group, name)
            assert [one[name] for one in (rows[group], shown[group], alone)] == [count] * 3, (group, name)
            assert metrics[METRICS[name], group] == count, (group, name)
    for name, count in {"delivered": TAKEN, "acked": ACKED, "died": REJECTED, "nacked": NACKED}.items():
        assert metrics[f"qmq_group_{name}_messages_total", "billing"] == count, name
    assert metrics["qmq_subject_received_messages_total", "shop"] == SENT  # a delayed one is received when it is due
    text = await page(browser, "/dead")
    assert f"{REJECTED} dead letters in 1 group<" in text
    text = await page(browser, "/subjects/shop.order")
    assert [number(text, label) for label in ("Messages", "Delayed", "Groups")] == [str(SENT), str(DELAYED), "2"]
