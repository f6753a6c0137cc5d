"""Takes the pictures of docs/console.md: ``python -m tests.console.browser.pictures DIR [SECONDS [PAGE...]]``.

A broker of its own works on orders for some SECONDS (30): one group keeps up, one rejects some messages, and one has a
consumer that holds what it was given. Then every PAGE is taken at 1,600 pixels, light, and at 400, dark.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from playwright.async_api import Browser, async_playwright

import qmq
import qmq.testing
from tests.console.consoles import running_console

_SUBJECTS: Final = ("shop.order.created", "shop.order.paid", "shop.order.shipped")
_REASONS: Final = ("card declined", "no such address", "HTTP 503 of the bank")
_WINDOWS: Final = ((1600, 1000, "light"), (400, 860, "dark"))
_QUALITY: Final = 70


async def _send(client: qmq.Client) -> None:
    chance, number = random.Random(1), 0
    while True:
        number += 1
        body = b'{"order": %d, "total": %d, "currency": "EUR"}' % (number, chance.randrange(500, 90_000))
        await client.send(chance.choice(_SUBJECTS), body, key=f"order-{number % 400}", properties={"shop": "berlin"})
        await asyncio.sleep(0.01)


async def _handle(client: qmq.Client, group: str, share_rejected: float) -> None:
    chance = random.Random(2)
    async with client.subscribe("shop.", group=group, consumer=f"{group}-1") as consumer:
        async for message in consumer:
            if chance.random() < share_rejected:
                await message.reject(chance.choice(_REASONS))
            else:
                await message.ack()


async def _hold(client: qmq.Client) -> None:
    async with client.subscribe("shop.", group="ledger", consumer="ledger-1") as consumer:
        held = await consumer.pull(20, timeout=60)
        await asyncio.get_running_loop().create_future()
        del held


async def _take(browser: Browser, port: int, paths: dict[str, str], to: Path) -> None:
    for width, height, scheme in _WINDOWS:
        context = await browser.new_context(
            base_url=f"http://127.0.0.1:{port}",
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            timezone_id="UTC",
        )
        page = await context.new_page()
        for name, path in paths.items():
            await page.goto(path)
            await page.wait_for_load_state("load")
            await page.screenshot(path=to / f"{name}-{width}-{scheme}.jpg", type="jpeg", quality=_QUALITY)
        await context.close()


async def main(to: Path, seconds: float, pages: Collection[str] = ()) -> None:
    """Take the pictures of some pages; of all, if none is named."""
    with qmq.testing.broker() as broker:
        async with qmq.connect(broker.url) as client, running_console(broker.url) as console:
            tasks = [
                asyncio.create_task(one)
                for one in (
                    _send(client), _handle(client, "mail", 0), _handle(client, "billing", 0.03), _hold(client)
                )
            ]  # fmt: skip
            end = asyncio.get_running_loop().time() + seconds
            watch, letters = console.app.state.watch, list[str]()
            while asyncio.get_running_loop().time() < end or not letters:
                watch.look()
                snapshot = await watch.newer_than(watch.latest.number)
                if "billing" in snapshot.groups:
                    letters = [letter.id async for letter in client.admin.dead_letters("billing") if letter.id]
            paths = {
                "overview": "/", "groups": "/groups", "group": "/groups/ledger", "subjects": "/subjects",
                "subject": "/subjects/shop.order.created", "find": "/find", "message": f"/messages/{letters[0]}",
                "dead-letters": "/groups/billing/dead", "brokers": "/brokers",
            }  # fmt: skip
            paths = {name: paths[name] for name in pages or paths}
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
                )
                await _take(browser, console.port, paths, to)
                await browser.close()
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 30, sys.argv[3:]))
