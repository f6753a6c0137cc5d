"""Events: one refresher for any number of tabs, and a slow one holds up nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qmq import connect
from qmq.console.events import MOST_GROUPS, _events
from qmq.console.watch import Watch
from tests.broker_process import running_broker
from tests.console.consoles import Browser, running_console
from tests.console.made_up import at, broker_stats, group_stats
from tests.console.test_watch import Scripted


@asynccontextmanager
async def tab(port: int, path: str = "/api/events") -> AsyncIterator[asyncio.StreamReader]:
    """An open stream of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
    try:
        assert b" 200 " in await reader.readline()
        yield reader
    finally:
        writer.close()


async def event_of(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next event of a tab."""
    while not (line := await asyncio.wait_for(reader.readline(), 60)).startswith(b"data: "):
        assert line, "the stream has ended"
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


async def test_a_hundred_tabs_cost_the_broker_what_one_does(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, connect(url) as client, running_console(url) as console:
        async with client.subscribe("shop.", group="billing"):
            await client.send("shop.order", b"x")
        async with AsyncExitStack() as stack:
            slow = await stack.enter_async_context(tab(console.port))
            tabs = [await stack.enter_async_context(tab(console.port)) for _ in range(99)]
            first = await asyncio.gather(*map(event_of, tabs))
            watch = console.app.state.watch
            before = await watch.newer_than(max(event["number"] for event in first))
            events = await asyncio.gather(*map(event_of, tabs))
            while events[0]["number"] < before.number + 3:
                events = await asyncio.gather(*map(event_of, tabs))
            after = watch.latest
            assert {event["number"] for event in events} <= {events[0]["number"], events[0]["number"] + 1}
            assert events[0]["groups"][0]["name"] == "billing"
            assert events[0]["ready"] == 1
            snapshots = after.number - before.number
            assert after.brokers[0].requests - before.brokers[0].requests <= 2 * snapshots + 5
            assert (await event_of(slow))["number"] >= 1
            assert console.app.state.streams == 100
        async with tab(console.port, "/api/events?group=billing") as one:
            assert (await event_of(one))["group"]["ready"] == 1


async def test_a_slow_reader_gets_the_newest_only() -> None:
    async with Watch([Scripted("a:1")], fast_seconds=0, slow_seconds=0) as watch:
        seen = SimpleNamespace(sees_all=True, groups_of=lambda snapshot: [], refresh=lambda: asyncio.sleep(0))
        state = SimpleNamespace(watch=watch, stopping=asyncio.Event())
        stream = _events(state, seen, None)  # type: ignore[arg-type]  # what it needs of a session
        assert (await anext(stream)).startswith(b"retry")
        numbers = []
        for _ in range(3):
            await watch.newer_than(watch.latest.number + 10)
            numbers.append(int((await anext(stream)).partition(b"\n")[0].removeprefix(b"id: ")))
        assert numbers[1] - numbers[0] > 10
        assert numbers[2] - numbers[1] > 10
        state.stopping.set()
        watch.latest  # noqa: B018
        rest = [event async for event in stream]
        assert len(rest) <= 1
        assert state.streams == 0


async def test_10_000_groups_come_in_pages_and_events_stay_small(tmp_path: Path) -> None:
    groups = [group_stats(f"group-{n:05}", ready=n, oldest_unacked=at(-n)) for n in range(10_000)]
    source = Scripted("a:1")
    source.stats = lambda: asyncio.sleep(0, broker_stats(1, *groups, broker="a:1"))  # type: ignore[method-assign]
    async with running_broker(tmp_path) as url, running_console(url, [source]) as console:
        browser: Browser = await console.browser()
        page = await browser.get("/api/groups", limit=1000)
        assert (page["total"], page["next"], page["rows"][0]["name"]) == (10_000, 1000, "group-09999")
        names = set()
        offset: int | None = 0
        while offset is not None:
            page = await browser.get("/api/groups", limit=1000, offset=offset, sort="name")
            names |= {row["name"] for row in page["rows"]}
            offset = page["next"]
        assert len(names) == 10_000
        assert (await browser.get("/api/groups", search="0042"))["total"] == len(
            [n for n in range(10_000) if "0042" in f"group-{n:05}"]
        )
        assert (await browser.ask("GET", "/api/groups?limit=1001")).status == 400
        async with tab(console.port) as reader:
            event = await event_of(reader)
        assert (len(event["groups"]), event["behind"]) == (MOST_GROUPS, 10_000)
        assert len(json.dumps(event)) < 40_000
