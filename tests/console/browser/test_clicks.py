"""A real browser at the console of a real broker: it clicks through every page and every action."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

import qmq
import qmq.testing
from tests.broker_process import running_broker
from tests.console.browser import pictures
from tests.console.browser.windows import assert_accessible, assert_fits, number, window
from tests.console.consoles import running_console
from tests.daemon.test_token_file import Keys

pytestmark = pytest.mark.asyncio(loop_scope="session")

HTML = "</pre><script>alert('x')</script><img src=x onerror=alert(1)><b>\"&"
SUBJECT = "shop.order.created"
LONG = "shop." + "n" * 195
SENT, ACKED, REJECTED = 9, 2, 4
PAGES = ("Overview", "Groups", "Subjects", "Find", "Dead letters", "Brokers")


@dataclass
class Shop:
    """A console of a broker with messages that a group has worked on, and the test's own account of them."""

    port: int
    client: qmq.Client
    sent: list[str]
    rejected: list[str]
    delayed: str
    consumer: qmq.Consumer

    async def handed_out(self, count: int) -> list[qmq.Message]:
        """Take so many messages as the consumer of billing."""
        messages = list[qmq.Message]()
        while len(messages) < count:
            messages += await self.consumer.pull(max_count=count - len(messages), timeout=10)
        return messages

    async def letters(self) -> set[str]:
        return {letter.id async for letter in self.client.admin.dead_letters("billing") if letter.id}


@asynccontextmanager
async def shop() -> AsyncIterator[Shop]:
    with qmq.testing.broker() as broker:
        async with qmq.connect(broker.url) as client, running_console(broker.url) as console:
            sent = []
            for at in range(SENT):
                body = f'{{"total": {at}, "note": {HTML!r}}}'.encode()
                receipt = await client.send(SUBJECT, body, key=HTML if at == 0 else f"o-{at}", properties={HTML: HTML})
                sent.append(receipt.id)
            delayed = await client.send(SUBJECT, b"later", key="later", delay=3600)
            await client.send(LONG, bytes(range(256)) * 20)
            async with client.subscribe("shop.", group=LONG):
                pass
            async with client.subscribe(SUBJECT, group="billing", consumer="worker-1") as consumer:
                messages = await consumer.pull(max_count=SENT, timeout=10)
                assert len(messages) == SENT
                for message in messages[:ACKED]:
                    await message.ack()
                for message in messages[ACKED : ACKED + REJECTED]:
                    await message.reject(HTML)
                watch, at = console.app.state.watch, 0
                while (now := await watch.newer_than(at)).dead != REJECTED or now.in_flight != SENT - ACKED - REJECTED:
                    at = now.number
                    watch.look()
                rejected = [message.id for message in messages[ACKED : ACKED + REJECTED]]
                yield Shop(console.port, client, sent, rejected, delayed.id, consumer)


async def click(page: Page, name: str) -> None:
    """Click the link or the button of a name."""
    link, button = (page.get_by_role(role, name=name, exact=True) for role in ("link", "button"))
    await link.or_(button).first.click()


async def walk(page: Page, shop: Shop) -> AsyncIterator[str]:
    """Open every page by clicks, with a name for each."""
    await page.goto("/")
    for name in PAGES:
        await page.get_by_label("Pages").get_by_role("link", name=name, exact=True).click()
        yield name
    await click(page, "Groups")
    await click(page, "billing")
    for summary in await page.locator("summary").all():
        await summary.click()
    yield "a group"
    await page.locator(".numbers").get_by_role("link").click()
    yield "the dead letters of a group"
    await page.get_by_label("Choose all of this page").check()
    assert await page.locator("td.pick input:checked").count() == REJECTED
    await page.locator("td.pick input").first.uncheck()
    await expect(page.get_by_label("Choose all of this page")).not_to_be_checked()
    await click(page, "Redrive the chosen…")
    await expect(page.get_by_role("button", name=f"Redrive {REJECTED - 1}")).to_be_visible()
    yield "a question"
    await click(page, "Back, and change nothing")
    await page.locator("td a.mono").first.click()
    yield "a message"
    await click(page, "Hex")
    yield "a body in hex"
    await click(page, SUBJECT)
    yield "a subject"
    await page.goto(f"/subjects/{LONG}")
    yield "a subject with a long name"
    await page.goto(f"/groups/{LONG}")
    yield "a group with a long name"
    await page.goto("/find?contains=onerror")
    yield "messages found"


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1600, "dark")])
async def test_every_page_fits_is_accessible_and_shows_html_as_text(chromium: Browser, width: int, scheme: str) -> None:
    async with shop() as at_work:
        options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
        async with window(chromium, at_work.port, **options) as page:
            seen = 0
            async for name in walk(page, at_work):
                assert await page.locator("main :is(script, img, b > b)").count() == 0, name
                await assert_fits(page)
                await assert_accessible(page)
                seen += 1
            assert seen == len(PAGES) + 9


async def test_the_numbers_are_those_of_the_test(chromium: Browser) -> None:
    async with shop() as at_work, window(chromium, at_work.port) as page:
        await page.goto("/")
        assert await number(page, "In flight") == str(SENT - ACKED - REJECTED)
        assert await number(page, "Dead letters") == str(REJECTED)
        await page.goto("/groups/billing")
        assert await number(page, "Ready") == "0"
        assert await number(page, "In flight") == str(SENT - ACKED - REJECTED)
        assert await number(page, "Dead letters") == str(REJECTED)
        assert await number(page, "Delayed") == "1"
        assert await number(page, "Consumers") == "1"
        await page.goto(f"/subjects/{SUBJECT}?order=oldest")
        assert await number(page, "Messages") == str(SENT)
        hrefs = await page.locator('td[data-label="Stored"] a').evaluate_all("all => all.map(one => one.pathname)")
        assert hrefs == [f"/messages/{one}" for one in at_work.sent]
        # A page that is open shows what is sent later, without being loaded again.
        await page.goto("/groups/billing")
        await at_work.client.send(SUBJECT, b"one more")
        await expect(page.locator('.numbers div:has(dt:text-is("Ready")) dd')).to_have_text("1", timeout=20_000)


async def test_a_message_is_found_by_its_key_and_redriven(chromium: Browser) -> None:
    async with shop() as at_work, window(chromium, at_work.port) as page:
        dead = at_work.rejected[0]
        await page.goto("/")
        await click(page, "Find")
        await page.wait_for_url("**/find")  # else the page before may have the keys
        await page.keyboard.press("/")
        await page.keyboard.type(f"o-{ACKED}")
        await page.keyboard.press("Enter")
        await page.locator('td[data-label="Stored"] a').click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(f"Message {dead}")
        await expect(page.locator(".timeline li.bad")).to_contain_text("rejected")
        await expect(page.locator(".timeline .reason")).to_have_text(HTML)
        await click(page, "billing")
        await page.locator(".numbers").get_by_role("link").click()
        await page.get_by_label(f"Choose {dead}").check()
        await click(page, "Redrive the chosen…")
        assert await at_work.letters() == set(at_work.rejected)
        await click(page, "Redrive 1")
        await expect(page.get_by_role("status")).to_contain_text("A dead letter is handed out again")
        assert await at_work.letters() == set(at_work.rejected[1:])
        await page.get_by_label(f"Choose {at_work.rejected[1]}").check()
        await click(page, "Delete the chosen…")
        await click(page, "Delete 1")
        await expect(page.get_by_role("status")).to_contain_text("A dead letter is deleted")
        left = set(at_work.rejected[2:])
        assert await at_work.letters() == left
        await change_all(page, "Redrive", len(left))
        await expect(page.get_by_role("status")).to_contain_text("2 dead letters are handed out again")
        assert await at_work.letters() == set()
        redriven = await at_work.handed_out(1 + len(left))
        assert {message.id for message in redriven} == {dead, *left}
        for message in redriven:
            await message.reject("again")
        await page.goto("/groups/billing/dead")
        await change_all(page, "Delete", len(redriven))
        await expect(page.get_by_role("status")).to_contain_text("3 dead letters are deleted")
        assert await at_work.letters() == set()


async def change_all(page: Page, verb: str, count: int) -> None:
    """Redrive or delete all dead letters, which asks for their count."""
    await click(page, f"{verb} all {count}…")
    button = page.get_by_role("button", name=f"{verb} {count}")
    await expect(button).to_be_disabled()
    await page.get_by_label(f"Type {count}").fill(str(count + 1))
    await expect(button).to_be_disabled()
    await page.get_by_label(f"Type {count}").fill(str(count))
    await button.click()


async def test_a_group_is_set_moved_and_deleted(chromium: Browser) -> None:
    async with shop() as at_work, window(chromium, at_work.port) as page:
        admin = at_work.client.admin
        await page.goto("/groups/billing")
        await page.get_by_text("Change settings").click()
        await page.locator('input[name="max_attempts"]').fill("7")
        await click(page, "Change…")
        await expect(page.get_by_text("max_attempts becomes 7")).to_be_visible()
        await click(page, "Change")
        await expect(page.get_by_role("status")).to_have_text("The settings are changed.")
        assert (await admin.groups("billing"))[0].settings["max_attempts"] == 7
        await page.get_by_text("Change settings").click()
        await page.locator('input[name="follows"]').fill(f"{SUBJECT}, mail.")
        await page.locator('input[name="retry_delays"]').fill("1, 60")
        await click(page, "Change…")
        await click(page, "Change")
        await expect(page.get_by_role("status")).to_have_text("The settings are changed.")
        info = (await admin.groups("billing"))[0]
        assert (list(info.follows), list(info.settings["retry_delays"])) == ([SUBJECT, "mail."], [1, 60])
        now, hour = datetime.now(UTC), timedelta(hours=1)
        for choice, at, ready in (
            ("behind the last message", None, 0), ("the first stored message", None, SENT),
            ("the messages stored since", now + hour, 0), ("the messages stored since", now - hour, SENT),
        ):  # fmt: skip
            place = f"{at:%Y-%m-%d %H:%M:%S} UTC" if at else "first message that is stored" if ready else choice
            before = (await admin.groups("billing"))[0]
            await page.get_by_text("Move the group to another place").click()
            await page.get_by_label(choice).check()
            if at is not None:
                await page.get_by_label("Time (UTC)").fill(f"{at:%Y-%m-%dT%H:%M:%S}")
            await click(page, "Move…")
            await expect(page.locator(".ask")).to_contain_text(place)
            assert (await admin.groups("billing"))[0].ready == before.ready
            await click(page, "Move the group")
            await expect(page.get_by_role("status")).to_have_text("The group is moved.")
            moved = (await admin.groups("billing"))[0]
            assert (moved.ready, moved.in_flight) == (ready, 0)
        assert [message.id for message in await at_work.handed_out(SENT)] == at_work.sent
        await page.goto(f"/groups/{LONG}")
        await page.get_by_text("Delete the group").click()
        await click(page, "Delete…")
        await click(page, "Delete the group")
        await expect(page.get_by_role("status")).to_have_text("The group is deleted.")
        assert [info.name for info in await admin.groups()] == ["billing"]


async def test_a_message_is_resent_and_a_delayed_one_cancelled(chromium: Browser) -> None:
    async with shop() as at_work, window(chromium, at_work.port) as page:
        again = at_work.sent[0]
        await page.goto(f"/messages/{again}")
        await page.get_by_label("To").select_option("billing")
        await click(page, "Resend…")
        await click(page, "Resend it")
        await expect(page.get_by_role("status")).to_contain_text("One group gets the message again")
        (resent,) = await at_work.handed_out(1)
        assert (resent.id, resent.attempt) == (again, 1)
        await resent.ack()
        async with at_work.client.subscribe("shop.", group=LONG) as other:
            (first,) = await other.pull(max_count=1, timeout=10)
            await first.ack()
            await page.get_by_label("To").select_option("all groups that follow it")
            await click(page, "Resend…")
            await expect(page.locator(".ask")).to_contain_text("all groups that follow its subject (2)")
            await click(page, "Resend it")
            await expect(page.get_by_role("status")).to_contain_text("2 groups get the message again")
            assert [message.id for message in await at_work.handed_out(1)] == [again]
            assert [message.id for message in await other.pull(max_count=1, timeout=10)] == [again]
        await page.goto(f"/messages/{at_work.delayed}")
        await click(page, "Cancel it…")
        await click(page, "Cancel it")
        await expect(page.get_by_role("status")).to_have_text("The message is cancelled.")
        assert (await at_work.client.admin.groups("billing"))[0].delayed == 0


async def test_who_signs_in_with_a_token_does_what_it_may(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    monkeypatch.setenv("QMQ_TOKEN", keys.add("console", browse=("",)))
    looker = keys.add("looker", browse=("",), group=("",))
    async with running_broker(tmp_path / "data") as url, running_console(url) as console:
        async with qmq.connect(url, token=ops) as client, client.subscribe("shop.", group="billing"):
            pass
        async with window(chromium, console.port) as page:
            await page.goto("/groups/billing")
            await assert_accessible(page)
            await page.get_by_label("Token").fill("ops:no")
            await click(page, "Sign in")
            await expect(page.get_by_role("alert")).to_contain_text("No broker lets this token in")
            await page.get_by_label("Token").fill(looker)
            await click(page, "Sign in")
            await expect(page.get_by_role("heading", level=1)).to_have_text("billing")
            await expect(page.get_by_text("Change settings")).to_have_count(0)
            assert "looker" not in await page.evaluate("document.cookie")
            await click(page, "Sign out")
            await page.get_by_label("Token").fill(ops)
            await click(page, "Sign in")
            await page.goto("/groups/billing")
            await expect(page.get_by_text("Change settings")).to_be_visible()


async def test_the_pictures_of_the_document_can_be_taken_again(tmp_path: Path) -> None:
    await pictures.main(tmp_path, 0, ["message"])
    for size in ("1600-light", "400-dark"):
        taken = (tmp_path / f"message-{size}.jpg").read_bytes()
        assert taken.startswith(b"\xff\xd8\xff")
        assert 5_000 < len(taken) < 200_000
