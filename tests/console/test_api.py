"""The console's JSON: what it says is what the broker knows, and its changes are done."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        ("/seek", {"to": "900000d"}, "before the year 1"),
        ("/seek", {"to": "2026-01-01T00:00"}, "has no zone"),
        ("/seek", {"to": True}, "to"),
        ("/seek", {"to": "soon"}, "must be a number of seconds"),
        ("/seek", {"to": ""}, "a seek goes to first, new, a time or a sequence"),
        ("/settings", {"settings": {"group": "mail"}}, "a group has no setting 'group'"),
        ("/settings", {"settings": {"follows": ["a."]}, "follows": ["b."]}, "a group has no setting 'follows'"),
        ("/settings", {"settings": {"self": 1}}, "a group has no setting 'self'"),
        ("/settings", {"settings": {"max_attempts": "x"}}, "max_attempts must be a whole number"),
        *(
            ("/settings", {"settings": {"priority_share": share}}, "priority_share must be a number from 0 to 1, not ")
            for share in (-0.1, 1.1, "0.5", "", True, None, [0.1])
        ),
        ("/redrive", {"ids": ["a"], "all": True, "count": 0}, "not both"),
        ("/redrive", {}, "give the ids of dead letters, or all with their count"),
    ],
)
async def test_a_wrong_change_is_refused_with_what_is_wrong(
    path: str, fields: dict[str, object], error: str, tmp_path: Path
) -> None:
    async with running_broker(tmp_path) as url, connect(url) as client, running_console(url) as console:
        async with client.subscribe("shop.", group="billing"):
            await client.send("shop.order", b"x")
        before = await client.admin.groups()
        reply = await (await console.browser()).ask("POST", f"/api/groups/billing{path}", fields)
        assert (reply.status, reply.json()["error"]) == (400, "invalid_option")
        assert error in reply.json()["message"]
        assert [(row.settings, row.ready, row.follows) for row in await client.admin.groups()] == [
            (row.settings, row.ready, row.follows) for row in before
        ]


async def test_a_time_that_no_calendar_has_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, running_console(url) as console:
        browser = await console.browser()
        for path in (
            "/api/messages?since=900000d", "/api/messages?since=soon", "/find?since=0001-01-01T00:00:00%2B23:00",
        ):  # fmt: skip
            reply = await browser.ask("GET", path)
            assert (reply.status, reply.json()["error"]) == (400, "invalid_option"), path
            assert "Value error" not in reply.json()["message"]
