"""The pages of a console: each shows what is there, HTML as text, and changes something at the second click alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import qmq
import qmq.testing
from qmq.console.pages.formats import counted, short_age, size_text
from qmq.daemon import file_survey
from tests.broker_process import running_broker
from tests.cli.commands import qmq_process
from tests.console.consoles import Browser, running_console
from tests.console.made_up import at, broker_stats, group_stats
from tests.console.test_watch import Scripted

HTML = "<script>alert('x')</script><b>\"&"
SUBJECT = "shop.order.created"
LONG = "a" * 200


@asynccontextmanager
async def console_of_a_shop() -> AsyncIterator[tuple[Browser, qmq.Client, list[str]]]:
    """A console of a broker with five messages: two acked by billing, two dead there, one in flight."""
    with qmq.testing.broker() as broker:
        async with qmq.connect(broker.url) as client, running_console(broker.url) as console:
            ids = []
            for number in range(5):
                body = f'{{"total": {number}, "note": "</pre><img src=x onerror=alert(1)>"}}'.encode()
                receipt = await client.send(
                    SUBJECT, body, key=HTML if number == 0 else f"order-{number}", properties={HTML: HTML}
                )
                ids.append(receipt.id)
            await client.send(LONG, b"\x00\xff" * 5_000)
            async with client.subscribe("shop.", group="billing", consumer="worker-1") as consumer:
                messages = await consumer.pull(max_count=5, timeout=10)
                assert len(messages) == 5
                for message in messages[:2]:
                    await message.ack()
                for message in messages[2:4]:
                    await message.reject(HTML)
                watch, last = console.app.state.watch, 0
                while (snapshot := await watch.newer_than(last)).dead < 2 or snapshot.in_flight != 1:
                    last = snapshot.number
                    watch.look()
                yield await console.browser(), client, ids


async def page(browser: Browser, path: str, status: int = 200) -> str:
    """Return a page, in which nothing of what clients sent is HTML."""
    reply = await browser.ask("GET", path, accept="text/html")
    text = reply.body.decode()
    assert reply.status == status, text
    assert "<script>" not in text
    assert "<img" not in text
    assert " style=" not in text
    assert "<b>&" not in text.replace("<b>&#", "")
    assert len(reply.body) < 200_000
    return text


def number(text: str, label: str) -> str:
    """Return the number that a page shows below a label."""
    found = re.search(rf"<dt>{label}</dt><dd>(?:<a[^>]*>)?([^<]*)<", text)
    assert found is not None, label
    return found[1]


def marked(text: str) -> str:
    """Return where the entry of the menu leads that a page marks as its own."""
    (found,) = re.findall(r'<a href="([^"]*)" aria-current="page">', text)
    return str(found)


async def changed(browser: Browser, path: str, **fields: str) -> tuple[int, str]:
    reply = await browser.ask("POST", path, fields, form=True, accept="text/html")
    return reply.status, reply.headers.get("location") or unescape(reply.body.decode())


async def test_a_message_of_many_groups_shows_those_in_trouble_first() -> None:
    with qmq.testing.broker() as broker:
        async with qmq.connect(broker.url) as client, running_console(broker.url) as console:
            receipt = await client.send("shop.order", b"{}")
            for number in range(60):
                async with client.subscribe("shop.", group=f"team-{number:02}", consumer="c") as consumer:
                    if number == 59:
                        await (await consumer.pull())[0].reject("no such address")
            browser = Browser(console.port)
            text = await page(browser, f"/messages/{receipt.id}")
            assert text.index("no such address") < text.index("team-00")
            assert "team-48" in text
            assert "team-49" not in text
            assert "10 more groups: waiting in 10." in text
            text = await page(browser, f"/messages/{receipt.id}?group=team-49")
            assert "team-49" in text
            assert "team-00" not in text
            assert "No group has “nobody”" in await page(browser, f"/messages/{receipt.id}?group=nobody")


async def test_a_message_shows_no_group_that_does_not_follow_it() -> None:
    with qmq.testing.broker() as broker:
        async with qmq.connect(broker.url) as client, running_console(broker.url) as console:
            receipt = await client.send("shop.order", b"{}")
            for number in range(60):
                async with client.subscribe("hotel.", group=f"hotel-{number:02}"):
                    pass
            browser = Browser(console.port)
            text = await page(browser, f"/messages/{receipt.id}")
            assert "No group has it." in text
            async with client.subscribe("shop.", group="billing"):
                pass
            text = await page(browser, f"/messages/{receipt.id}")
            assert "billing" in text
            assert "hotel-" not in text
            assert "60 other groups do not follow its subject." in text
            assert "more group" not in text


async def test_a_group_says_which_order_keys_hold_messages_up() -> None:
    with qmq.testing.broker() as broker:
        async with qmq.connect(broker.url) as client, running_console(broker.url) as console:
            for subject, key in product(("pay.order", "pay.later"), ("<b>fails", "slow")):
                await client.send(subject, b"x", order_key=key)
            async with (
                client.subscribe("pay.", group="pay", consumer="one", retry_delays=["1h"]) as one,
                client.subscribe("pay.", group="pay", consumer="two") as two,
            ):
                (failed,) = await one.pull(max_count=1, min_count=1, timeout=60)
                await failed.nack(reason="<i>down")
                (held,) = await two.pull(max_count=1, min_count=1, timeout=60)
                watch, last = console.app.state.watch, 0
                now = None
                while now is None or now.blocked < 2 or now.failed_rate:
                    now, last = (await watch.newer_than(last)).groups.get("pay"), watch.latest.number
                    watch.look()
                text = unescape(await page(Browser(console.port), "/groups/pay"))
                reply = await Browser(console.port).ask("GET", "/api/groups/pay")
    assert "all wait: their keys are in flight or retry" in text
    by_key = dict(
        re.findall(r'"Order key" class="long"><span>(\S+) <small>slot \d+</small></span></td>(.*?)</tr>', text)
    )
    assert set(by_key) == {"<b>fails", "slow"}
    assert f'href="/messages/{failed.id}">comes again in ' in by_key["<b>fails"]
    assert "after 1 failed attempt: <i>down" in by_key["<b>fails"]
    assert f'href="/messages/{held.id}">is in flight at two</a>' in by_key["slow"]
    assert "pay.order <small>before pay.later</small>" in by_key["slow"]
    found = {one["order_key"]: one for row in reply.json()["rows"] for one in row["blocked"]}
    assert (found["slow"]["consumer"], found["<b>fails"]["failure"]) == ("two", "<i>down")


async def test_each_page_shows_what_is_there_and_html_as_text() -> None:
    async with console_of_a_shop() as (browser, _, ids):
        shown = await page(browser, "/")
        assert number(shown, "In flight") == "1"
        assert number(shown, "Dead letters") == "2"
        assert 'href="/groups/billing"' in await page(browser, "/groups?q=bill&sort=dead&page=7")
        assert "No group has “&lt;script&gt;" in await page(browser, "/groups?q=%3Cscript%3E")
        group = await page(browser, "/groups/billing")
        assert "Behind by" in group
        assert "worker-1" in group
        assert (number(group, "Ready"), number(group, "In flight"), number(group, "Dead letters")) == ("0", "1", "2")
        assert f">{LONG}</a>" in await page(browser, "/subjects")
        assert ">5</dd>" in await page(browser, f"/subjects/{SUBJECT}")
        assert "order-4" in await page(browser, f"/subjects/{SUBJECT}?order=oldest&since=2020-01-01T00:00")
        assert "&lt;script&gt;" in await page(browser, "/find?key=order-0&contains=%3Cscript%3E")
        message = await page(browser, f"/messages/{ids[2]}")
        assert "rejected" in message
        assert "&lt;script&gt;alert" in message
        assert "&lt;/pre&gt;&lt;img" in message
        assert "00000000  7b" in await page(browser, f"/messages/{ids[2]}?body=hex")
        dead = await page(browser, "/groups/billing/dead")
        assert dead.count('name="id"') == 2
        assert marked(dead) == "/dead"
        assert [marked(one) for one in (shown, group, message)] == ["/", "/groups", "/find"]
        assert "2 dead letters in 1 group<" in await page(browser, "/dead")
        assert "Settings (" in await page(browser, "/brokers")
        await page(browser, "/nothing", 404)
        found = await browser.ask("GET", f"/find?key={ids[1]}", accept="text/html")
        assert (found.status, found.headers["location"]) == (303, f"/messages/{ids[1]}")
        body = await browser.ask("GET", f"/messages/{ids[1]}/body")
        assert body.headers["content-disposition"] == f'attachment; filename="{ids[1]}.bin"'
        assert body.body.startswith(b'{"total": 1')


async def test_a_change_is_made_after_a_second_click_and_for_many_messages_with_their_count() -> None:
    async with console_of_a_shop() as (browser, client, ids):
        dead = "/groups/billing/dead"

        async def letters() -> int:
            return len([letter async for letter in client.admin.dead_letters("billing")])

        status, text = await changed(browser, f"{dead}/redrive", id=ids[2])
        assert (status, "1 dead letter of billing is handed out again" in text, await letters()) == (200, True, 2)
        status, where = await changed(browser, f"{dead}/redrive", id=ids[2], sure="1")
        assert (status, where, await letters()) == (303, f"{dead}?done=redriven&count=1", 1)
        assert "A dead letter is handed out again." in await page(browser, where)
        assert "1,000 dead letters are handed out again." in await page(browser, f"{dead}?done=redriven&count=1000")
        status, text = await changed(browser, f"{dead}/delete", all="1", sure="1", typed="7")
        assert (status, "Nothing was done" in text, await letters()) == (409, True, 1)
        status, where = await changed(browser, f"{dead}/delete", all="1", sure="1", typed="1")
        assert (status, where, await letters()) == (303, f"{dead}?done=removed&count=1", 0)

        status, text = await changed(browser, "/groups/billing/set", max_attempts="7")
        assert (status, "max_attempts becomes 7" in text) == (200, True)
        await changed(browser, "/groups/billing/set", max_attempts="7", sure="1")
        assert (await client.admin.groups("billing"))[0].settings["max_attempts"] == 7

        for share in ("1.5", "-1", "nan", "inf", "much", ""):
            status, text = await changed(browser, "/groups/billing/set", priority_share=share, sure="1")
            assert (status, f"number from 0 to 1, not {float(share) if share[-1:].isdigit() else share!r}" in text) == (
                400, share not in ("nan", "inf")
            ), text  # fmt: skip
        assert (await client.admin.groups("billing"))[0].settings["priority_share"] == 0.1

        status, text = await changed(browser, f"/messages/{ids[0]}/resend", group="billing")
        assert (status, "is handed out again to the group billing" in text) == (200, True)
        status, where = await changed(browser, f"/messages/{ids[0]}/resend", group="billing", sure="1")
        assert (status, where) == (303, f"/messages/{ids[0]}?done=resent&count=1")

        status, text = await changed(browser, "/groups/billing/seek", to="new", clear_retries="1")
        assert (status, "behind the last message" in text) == (200, True)
        assert (await changed(browser, "/groups/billing/seek", to="new", clear_retries="1", sure="1"))[0] == 303
        status, text = await changed(browser, "/groups/billing/delete")
        assert (status, "is deleted with its cursors" in text) == (200, True)
        assert await changed(browser, "/groups/billing/delete", sure="1") == (303, "/groups?done=deleted")
        await page(browser, "/groups/billing", 404)


async def test_a_stuck_group_comes_before_any_number_that_is_at_work(tmp_path: Path) -> None:
    busy = [group_stats(f"busy-{n}", consumers=1, in_flight=1, oldest_unacked=at(-n)) for n in range(600)]
    source = Scripted("a:1")
    answer = broker_stats(1, *busy, group_stats("stuck", ready=1, oldest_unacked=at(0)), broker="a:1")
    source.stats = lambda: asyncio.sleep(0, answer)  # type: ignore[method-assign]
    async with running_broker(tmp_path) as url, running_console(url, [source]) as console:
        text = await page(await console.browser(), "/")
    rows = re.findall(r'<td data-label="Group" class="long"><a href="/groups/([^"]*)">', text)
    assert rows[:3] == ["stuck", "busy-599", "busy-598"]
    assert "1 of 601 groups needs a look" in text
    assert "All 601 groups that are behind" in text


async def test_a_delayed_message_is_cancelled() -> None:
    async with console_of_a_shop() as (browser, client, _):
        receipt = await client.send(SUBJECT, b"later", delay=3600)
        assert "Cancel it" in await page(browser, f"/messages/{receipt.id}")
        assert (await changed(browser, f"/messages/{receipt.id}/cancel"))[0] == 200
        status, where = await changed(browser, f"/messages/{receipt.id}/cancel", sure="1")
        assert (status, where) == (303, f"/messages/{receipt.id}?done=cancelled")


async def test_an_archive_is_behind_until_it_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_survey, "REST_US", 0)
    monkeypatch.setattr(file_survey, "REST_TIMES", 0)
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client, running_console(url) as console:
        browser, watch = await console.browser(), console.app.state.watch

        async def archive() -> qmq.ArchiveStats:
            """Archive all that is stored; return what the broker says of it."""
            command = ["archive", str(tmp_path / "data"), "--to", str(tmp_path / "archive"), "--seal", "--server", url]
            with qmq_process(*command) as process:
                assert await asyncio.to_thread(process.wait, 60) == 0
            found: qmq.ArchiveStats = await stats(lambda found: found is not None and found.oldest is None)
            return found

        async def stats(is_so: Callable[[qmq.ArchiveStats | None], bool]) -> Any:
            while not is_so(found := (await watch.recent(0)).brokers[0].archive):
                pass
            return found

        async def facts() -> tuple[str, str]:
            """What the pages of the brokers and the overview say of the archive."""
            found = re.search(r"<dt>Archive</dt><dd>([^<]*)<", await page(browser, "/brokers"))
            row = re.search(r'<td data-label="Archive">([^<]*)<', await page(browser, "/"))
            assert row is not None
            return "" if found is None else found[1], row[1]

        await client.send("shop.order", b"x" * 5_000)
        await stats(lambda found: found is None)
        assert await facts() == ("", "none")
        first = await archive()
        verified = f"{first.verified_at:%Y-%m-%d %H:%M:%S} UTC"
        told, row = await facts()
        assert (told.startswith("has all messages; a copy was verified last "), row) == (True, "has all messages")
        assert told.endswith(f"s ago, {verified}")
        await client.send("shop.order", b"y" * 5_000)
        behind = await stats(lambda found: found is not None and found.oldest is not None)
        assert behind.unarchived_bytes > 5_000
        told, row = await facts()
        lacks = f"it lacks {size_text(behind.unarchived_bytes)} in 1 segment; a copy was verified last "
        assert f", since {behind.oldest:%Y-%m-%d %H:%M:%S} UTC: {lacks}" in told
        assert (told.startswith("behind by "), told.endswith(verified)) == (True, True), told
        assert row.startswith("behind by ")
        shown = (await browser.get("/api/overview"))["brokers"][0]["archive"]
        assert (shown["unarchived_bytes"], shown["unarchived_segments"]) == (behind.unarchived_bytes, 1)
        assert (await archive()).verified_at >= first.verified_at
        assert (await facts())[1] == "has all messages"


async def test_an_empty_broker_has_pages_that_say_so() -> None:
    with qmq.testing.broker() as broker:
        async with running_console(broker.url) as console:
            browser = await console.browser()
            assert "There is no group yet" in await page(browser, "/")
            assert "There is no group yet" in await page(browser, "/groups")
            assert "There is no subject yet" in await page(browser, "/subjects")
            assert "No group has dead letters" in await page(browser, "/dead")
            assert "Give the key" in await page(browser, "/find")


def test_counts_and_short_times_are_said_as_one_says_them() -> None:
    assert [counted(number, "group") for number in (0, 1, 2_000)] == ["0 groups", "1 group", "2,000 groups"]
    assert [short_age(seconds) for seconds in (0.000_04, 0.002, 3.0)] == ["40us", "2ms", "3.0s"]
