"""Sign-in: by tokens that the broker checks; what a token may not do is refused on every route."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.routing import Route

import qmq
from qmq.console.sign_in import FREE_FAILURES, MOST_DELAY, RIGHTS_SECONDS, FailedSignIns, Sessions, local_path
from tests.broker_process import running_broker
from tests.console.consoles import Browser, Reply, RunningConsole, running_console
from tests.daemon.test_token_file import Keys

_FOREIGN = ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec_fetch_site": "cross-site"})


@asynccontextmanager
async def guarded_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RunningConsole, Keys, str, str]]:
    """A console with a token that may look at everything, at a broker with tokens; the token of an administrator."""
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    monkeypatch.setenv("QMQ_TOKEN", keys.add("console", browse=("",)))
    keys.add("looker", browse=("",), group=("",))
    keys.add("member", group=("billing",))
    keys.add("part", browse=("shop.",), group=("",))
    keys.add("other", admin=True)
    async with running_broker(tmp_path / "data") as url, running_console(url) as console:
        yield console, keys, ops, url


def token_of(keys: Keys, name: str) -> str:
    return f"{name}:{keys.secrets[name]}"


def changing_routes(console: RunningConsole) -> list[str]:
    """The paths of all routes that take more than GET, with names put in."""
    routes = [route for route in console.app.routes if isinstance(route, Route)]
    changing = [route.path for route in routes if set(route.methods or ()) - {"GET", "HEAD"}]
    return [re.sub(r"\{\w+(:\w+)?\}", "billing", path) for path in changing if not path.startswith("/sign-")]


def assert_refused(reply: Reply, code: str, path: str) -> None:
    assert (reply.status, reply.json()["error"]) == (403, code), path


def audited(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The changes that the broker has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "qmq.audit"]


async def test_every_changing_route_is_refused_to_who_may_only_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, keys, ops, url):
        looker = Browser(console.port, token=token_of(keys, "looker"))
        admin = Browser(console.port)
        await admin.sign_in(ops)
        stranger = Browser(console.port)
        async with qmq.connect(url, token=ops) as client:
            async with client.subscribe("shop.", group="billing"):
                await client.send("shop.order", b"x")
            before = await client.admin.groups()
            paths = changing_routes(console)
            assert len(paths) >= 7
            with caplog.at_level(logging.INFO, "qmq.audit"):
                for path in paths:
                    assert_refused(await looker.ask("POST", path, {}), "forbidden", path)
                    assert (await stranger.ask("POST", path, {})).status == 401
                    assert_refused(await admin.ask("POST", path, {}, x_csrf_token=""), "csrf", path)
                    assert_refused(await admin.ask("POST", path, {}, x_csrf_token="guess"), "csrf", path)
                    form = await admin.ask("POST", path, {"csrf": "guess"}, form=True, x_csrf_token="")
                    assert_refused(form, "csrf", path)
                    for foreign in _FOREIGN:
                        assert_refused(await admin.ask("POST", path, {}, **foreign), "other_origin", path)
            assert await client.admin.groups() == before
            assert audited(caplog) == []
            own = f"http://127.0.0.1:{console.port}"
            done = await admin.ask("POST", "/api/groups/billing/seek", {"to": "new"}, origin=own)
            assert done.status == 200
        await console.app.state.watch.recent(0)
        assert (await looker.get("/api/overview"))["group_count"] == 1


async def test_the_broker_audits_the_user_and_not_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, _, ops, url):
        admin = Browser(console.port)
        await admin.sign_in(ops)
        async with (
            qmq.connect(url, token=ops) as client,
            client.subscribe("shop.", group="billing") as consumer,
        ):
            await client.send_many("shop.order", [b"x"] * 30)
            for message in await consumer.pull(max_count=30, min_count=30, timeout=30):
                await message.reject("broken")
        with caplog.at_level(logging.INFO, "qmq.audit"):
            for wrong in (None, 29):
                refused = await admin.ask("POST", "/api/groups/billing/redrive", {"all": True, "count": wrong})
                assert (refused.status, "the count of dead letters is 30 now" in refused.json()["message"]) == (
                    409,
                    True,
                )
            assert audited(caplog) == []
            assert await admin.post("/api/groups/billing/redrive", all=True, count=30) == {"count": 30}
            (line,) = audited(caplog)
        assert line.startswith("token 'ops'")
        assert "redrive" in line


async def test_a_wrong_token_is_not_let_in_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, _, _, _):
        for token in ("", "ops:wrong-secret", "wrong-secret", "\nwrong-secret"):
            browser = Browser(console.port)
            reply = await browser.ask("POST", "/sign-in", {"token": token}, form=True)
            assert (reply.status, reply.headers["location"]) == (303, "/sign-in?failed=wrong&next=%2F")
            assert browser.cookie is None
        reply = await Browser(console.port, token="ops:wrong-secret").ask("GET", "/api/groups")
        assert reply.status == 401
        assert "wrong-secret" not in caplog.text + reply.body.decode()


async def test_a_cookie_is_for_this_site_and_not_for_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, _, ops, _):
        browser = Browser(console.port)
        reply = await browser.ask("POST", "/sign-in", {"token": ops, "next": "//evil.example"}, form=True)
        cookie = reply.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert reply.headers["location"] == "/"
        browser.csrf = (await browser.get("/api/session"))["csrf"]
        kept = browser.cookie
        assert (await browser.ask("POST", "/sign-out", {})).status == 303
        assert (await Browser(console.port, cookie=kept).ask("GET", "/api/session")).status == 401
        foreign = await browser.ask("POST", "/sign-in", {"token": ops}, form=True, origin="https://evil.example")
        assert foreign.status == 403


async def test_who_asks_for_a_page_is_sent_to_sign_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, _, _, _):
        reply = await Browser(console.port).ask("GET", "/groups?search=a", accept="text/html")
        assert (reply.status, reply.headers["location"]) == (303, "/sign-in?next=%2Fgroups%3Fsearch%3Da")
        assert (await Browser(console.port).ask("GET", "/healthz")).status == 200


async def test_a_token_sees_its_own_groups_and_no_bodies_that_it_may_not_browse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, keys, ops, url):
        member = Browser(console.port, token=token_of(keys, "member"))
        async with qmq.connect(url, token=ops) as client:
            receipt = await client.send("shop.order", b"secret")
            for name in ("billing", "mail"):
                async with client.subscribe("shop.", group=name) as consumer:
                    (message,) = await consumer.pull(max_count=1, timeout=30)
                    await message.reject("broken")
        await console.app.state.watch.recent(0)
        assert [row["name"] for row in (await member.get("/api/groups"))["rows"]] == ["billing"]
        assert "acked_rate" in await member.get("/api/history", group="billing")
        for path in (
            "/api/overview", "/api/history", "/api/history?group=mail", "/api/events?group=mail", "/api/brokers",
            "/api/groups/mail", "/api/groups/mail/dead-letters", f"/api/messages/{receipt.id}", "/api/messages",
            f"/api/messages/{receipt.id}/body", f"/api/messages/{receipt.id}/trace",
        ):  # fmt: skip
            assert_refused(await member.ask("GET", path), "forbidden", path)
        assert (await member.get("/api/groups/billing"))["rows"][0]["dead"] == 1


async def test_a_revoked_token_ends_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.console.sign_in.RIGHTS_SECONDS", 0.0)
    assert RIGHTS_SECONDS <= 10
    async with guarded_console(tmp_path, monkeypatch) as (console, keys, ops, _):
        browser, bearer = Browser(console.port), Browser(console.port, token=token_of(keys, "looker"))
        await bearer.get("/api/overview")
        await browser.sign_in(token_of(keys, "other"))
        keys.drop("looker")
        keys.drop("other")
        for one in (browser, bearer):
            while (reply := await one.ask("GET", "/api/overview")).status != 401:  # the broker looks at the file
                assert reply.status in (200, 503)
        admin = Browser(console.port)
        await admin.sign_in(ops)


async def test_a_sign_in_that_is_cancelled_leaves_no_client_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, closed = asyncio.Event(), list[qmq.Client]()

    async def never(admin: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def close(client: qmq.Client) -> None:
        closed.append(client)
        await original(client)

    original = qmq.Client.close
    async with guarded_console(tmp_path, monkeypatch) as (console, _, ops, url):
        await console.app.state.watch.newer_than(0)
        sessions: Sessions = console.app.state.sessions
        async with qmq.connect(url, token=ops) as client:
            before = (await client.admin.stats())[0].connections
            with monkeypatch.context() as patch:
                patch.setattr(type(client.admin), "rights", never)
                patch.setattr(qmq.Client, "close", close)
                task = asyncio.create_task(sessions.sign_in(ops, "127.0.0.1"))
                await asked.wait()
                assert (await client.admin.stats())[0].connections == before + 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert len(closed) == 1
            async with asyncio.timeout(30):
                while (await client.admin.stats())[0].connections > before:
                    pass


def test_failures_of_one_address_are_answered_later_and_later() -> None:
    failed = FailedSignIns()
    delays = [failed.failed("a", 0.0) for _ in range(FREE_FAILURES + 10)]
    assert delays[:FREE_FAILURES] == [0.0] * FREE_FAILURES
    assert delays[FREE_FAILURES:] == sorted(delays[FREE_FAILURES:])
    assert 0 < delays[FREE_FAILURES] < delays[-1] == MOST_DELAY
    assert failed.failed("b", 0.0) == 0
    assert failed.failed("a", 1_000.0) == 0


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/groups?x=1", "/groups?x=1"), ("//evil.example", "/"), ("https://evil.example", "/"), ("/\\evil", "/"),
        ("/a\nb", "/"), (None, "/"), (["/a"], "/"), ("", "/"),
    ],
)  # fmt: skip
def test_after_the_sign_in_nobody_is_led_elsewhere(target: object, path: str) -> None:
    assert local_path(target) == path
