"""The console's JSON: what it says is what the broker knows, and its changes are done."""

from __future__ import annotations

import base64
from pathlib import Path

from qmq import connect
from tests.broker_process import running_broker
from tests.console.consoles import running_console

HTML = "<script>alert(1)</script>"


async def test_find_a_failed_message_see_why_and_redrive_it(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, connect(url) as client, running_console(url) as console:
        browser = await console.browser()
        receipt = await client.send("shop.order", HTML.encode(), keys=[HTML, "b"], tags=["eu"], properties={HTML: HTML})
        await client.send("shop.order", b"\xff\x00", key="binary")
        async with client.subscribe("shop.", group="billing", max_attempts=1) as consumer:
            for message in await consumer.pull(max_count=2, timeout=30):
                if message.key == HTML:
                    await message.reject(HTML)
                else:
                    await message.ack()
        (found,) = (await browser.get("/api/messages", key=HTML))["rows"]
        assert (found["id"], found["text"], found["properties"]) == (str(receipt.id), HTML, {HTML: HTML})
        (binary,) = (await browser.get("/api/messages", key="binary"))["rows"]
        assert (binary["text"], base64.b64decode(binary["base64"])) == (None, b"\xff\x00")
        trace = await browser.get(f"/api/messages/{receipt.id}/trace")
        assert [(one["group"], one["state"], one["reason"]) for one in trace["groups"]] == [("billing", "dead", HTML)]
        letters = await browser.get("/api/groups/billing/dead-letters")
        assert [letter["id"] for letter in letters["rows"]] == [str(receipt.id)]
        assert (await browser.get("/api/groups/billing/dead-letters/reasons"))["reasons"] == [[HTML, 1]]
        assert await browser.post("/api/groups/billing/redrive", ids=[str(receipt.id)]) == {"count": 1}
        async with client.subscribe("shop.", group="billing") as consumer:
            (again,) = await consumer.pull(max_count=1, timeout=30)
            assert again.body == HTML.encode()
            await again.ack()
        assert (await browser.get("/api/groups/billing/dead-letters"))["rows"] == []
