"""A broker with a file of tokens: who is let in, what they may do, and when that ends, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

import qmq
from fuzz.core import Core, Wire
from qmq.daemon.main import RunningBroker
from qmq.daemon.threads import CallThread
from qmq.daemon.token_file import ReadTokens, TokenFile, rules_of
from qmq.errors import InvalidOption, QmqError
from qmq.net.client import broker_link
from qmq.net.client.address import TokenText, parse_url
from qmq.net.client.blocking import ping
from qmq.net.client.log_reader import LogReader
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.settings import Settings
from qmq.tokens import USED_NAME, TokenEntry, Tokens, change_tokens, hash_of, new_secret, read_tokens, read_used
from tests.broker_process import running

#: Seconds for what must happen within a second, on a machine that is busy with other tests.
SOON = 20


@dataclass
class Keys:
    """The file of tokens of one broker, and the secrets that were made for it."""

    path: Path
    secrets: dict[str, str]

    def add(self, name: str, *, expires_in: float | None = None, secrets: int = 1, **rights: object) -> str:
        """Create a token, or renew it; return NAME:SECRET."""
        known = self.secrets.setdefault(name, new_secret())
        expires = None if expires_in is None else datetime.now(UTC) + timedelta(seconds=expires_in)
        hashes = (hash_of(known), hash_of(new_secret()))[:secrets]
        entry = TokenEntry(**rights, expires=expires, secrets=hashes)  # type: ignore[arg-type]
        self.change(lambda tokens: tokens | {name: entry})
        return f"{name}:{known}"

    def drop(self, name: str) -> None:
        self.change(lambda tokens: {other: entry for other, entry in tokens.items() if other != name})

    def change(self, change: Callable[[Tokens], Tokens]) -> None:
        change_tokens(self.path, change)


@asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[RunningBroker, Keys, str]]:
    """A broker that has tokens, with a token of an administrator."""
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    async with running(tmp_path / "data") as broker:
        yield broker, keys, ops


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until the broker has looked at its file."""
    async with asyncio.timeout(SOON):
        while not is_so():  # noqa: ASYNC110 (the broker tells nobody)
            await asyncio.sleep(0.02)


async def one(consumer: qmq.Consumer, timeout: float | None = None) -> qmq.Message:
    """Return the next message; without a timeout wait for it."""
    (message,) = await consumer.pull(1, timeout=timeout)
    return message


async def repeated(call: Callable[[], Awaitable[object]]) -> None:
    """Make a call until it raises."""
    async with asyncio.timeout(SOON):
        while True:
            await call()


async def test_a_broker_with_tokens_lets_in_nobody_without_one(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, _, ops):
        for token in ("", "ops:wrong", "nobody:x"):
            with pytest.raises(qmq.Unauthorized):
                async with qmq.connect(broker.url, token=token):
                    pass
        async with qmq.connect(broker.url, token=ops) as client:
            await client.send("a.b", b"1")


async def test_the_token_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path) as (broker, _, ops):
        file = tmp_path / "token"
        file.write_text(f"{ops}\n")
        monkeypatch.setenv("QMQ_TOKEN_FILE", str(file))
        async with qmq.connect(broker.url) as client:
            await client.send("a.b", b"1")
        monkeypatch.setenv("QMQ_TOKEN", ops)
        (address,) = parse_url(broker.url)
        assert (await asyncio.to_thread(ping, address, 60)).version
        monkeypatch.setenv("QMQ_TOKEN", "hunter2")
        with pytest.raises(InvalidOption, match="QMQ_TOKEN is no token") as caught:
            qmq.connect(broker.url)
        assert "hunter2" not in str(caught.value)


async def test_a_wrong_right_fails_the_call_and_not_the_connection(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, _):
        keys.add("shop", produce=("shop.",), consume=("shop.",), group=("billing",))
        await until(lambda: "shop" in broker.server.token_names)
        async with qmq.connect(broker.url, token=f"shop:{keys.secrets['shop']}") as client:
            with pytest.raises(qmq.SendFailed, match=r"lacks a right: produce 'hr\.a'") as caught:
                await client.send("hr.a", b"1")
            assert isinstance(caught.value.__cause__, qmq.Forbidden)
            for wrong in (client.admin.info(), client.admin.delete_group("billing"), client.get("0" * 32)):
                with pytest.raises(qmq.Forbidden):
                    await wrong
            with pytest.raises(qmq.Forbidden, match="group 'other'"):
                async with client.subscribe("shop.", group="other") as consumer:
                    await one(consumer, 1)
            mixed = await asyncio.gather(
                client.send("shop.a", b"2"), client.send("hr.b", b"3"), client.send("shop.c", b"4"),
                return_exceptions=True,
            )  # fmt: skip
            assert [isinstance(one, qmq.SendFailed) for one in mixed] == [False, True, False]
            async with client.subscribe("shop.", group="billing") as consumer:
                assert {(await one(consumer, SOON)).body for _ in range(2)} == {b"2", b"4"}


async def test_messages_say_whose_token_sent_them(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, ops):
        shop = keys.add("shop-api", produce=("shop.",))
        await until(lambda: "shop-api" in broker.server.token_names)
        async with qmq.connect(broker.url, token=shop) as client:
            ids = [str((await client.send("shop.a", body)).id) for body in (b"1", b"2")]
        async with qmq.connect(broker.url, token=ops) as client:
            assert [(await client.get(one)).sender for one in ids] == ["shop-api", "shop-api"]


# --- changes of the file ----------------------------------------------------------------------------------------------


async def test_the_first_token_ends_connections_without_one(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as broker:
        client = await qmq.connect(broker.url)
        await client.send("a.b", b"1")
        Keys(tmp_path / "data" / "tokens.toml", {}).add("ops", admin=True)
        with pytest.raises(qmq.Unauthorized):
            async with asyncio.timeout(SOON), client.subscribe("a.", group="g", start="new") as consumer:
                await one(consumer)
        await client.close()
        with pytest.raises(qmq.Unauthorized):
            async with qmq.connect(broker.url):
                pass
        broker_log = broker.server.has_tokens
        assert broker_log


async def test_a_typo_leaves_the_old_rules_and_is_logged_once_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(tmp_path) as (broker, keys, ops):
        async with qmq.connect(broker.url, token=ops) as client:
            text = keys.path.read_text()
            keys.path.write_text(text.replace("admin", "admyn"))
            await until(lambda: "ops.admyn" in caplog.text)
            await client.send("a.b", b"1")
            async with qmq.connect(broker.url, token=ops):
                pass
            keys.path.unlink()
            await until(lambda: "is gone" in caplog.text)
            await client.send("a.b", b"2")
            keys.path.write_text(text)
            await until(lambda: "1 tokens from" in caplog.text)
            await client.send("a.b", b"3")
        assert caplog.text.count("ops.admyn") == 1
        assert "line 5: ops.admyn: there is no such key" in caplog.text


async def test_a_change_touches_only_the_connections_of_that_token(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, ops):
        shop = keys.add("shop", produce=("",))
        await until(lambda: "shop" in broker.server.token_names)
        async with qmq.connect(broker.url, token=ops, name="stays") as client:
            numbers = {one for one, each in broker.server._connections.items() if each.name == "stays"}
            other = await qmq.connect(broker.url, token=shop)
            keys.drop("shop")
            with pytest.raises((qmq.SendFailed, qmq.Unauthorized)):
                await repeated(lambda: other.send("a", b"x"))
            with pytest.raises(qmq.Unauthorized, match="revoked"):
                await other.send("a", b"x")
            await client.send("a", b"x")
            assert numbers <= set(broker.server._connections)


async def test_more_rights_count_on_open_connections(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, _):
        shop = keys.add("shop", produce=("shop.",))
        await until(lambda: "shop" in broker.server.token_names)
        async with qmq.connect(broker.url, token=shop, name="stays") as client:
            with pytest.raises(qmq.SendFailed):
                await client.send("hr.a", b"x")
            numbers = {one for one, each in broker.server._connections.items() if each.name == "stays"}
            keys.add("shop", produce=("shop.", "hr."))
            async with asyncio.timeout(SOON):
                while True:
                    try:
                        await client.send("hr.a", b"x")
                        break
                    except qmq.SendFailed:
                        await asyncio.sleep(0.05)
            assert numbers <= set(broker.server._connections)


async def test_a_client_with_fewer_rights_connects_again(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, _):
        shop = keys.add("shop", produce=("shop.", "hr."))
        await until(lambda: "shop" in broker.server.token_names)
        async with qmq.connect(broker.url, token=shop) as client:
            await client.send("hr.a", b"x")
            keys.add("shop", produce=("shop.",))
            with pytest.raises(qmq.SendFailed, match=r"produce 'hr\.a'"):
                await repeated(lambda: client.send("hr.a", b"x"))
            await client.send("shop.a", b"x")


# --- the end of a token in every state of a consumer's life -----------------------------------------------------------


async def waiting_pull(consumer: qmq.Consumer) -> None:
    await one(consumer)


async def stream(consumer: qmq.Consumer) -> None:
    async for _ in consumer:
        pass


async def run(consumer: qmq.Consumer) -> None:
    async def handle(message: qmq.Message) -> None:
        pass

    await consumer.run(handle)


async def ack_again_and_again(consumer: qmq.Consumer) -> None:
    """Hold a message, and try to acknowledge it after the end."""
    message = await one(consumer)
    held.append(message)
    await one(consumer)


held: list[qmq.Message] = []


@pytest.mark.parametrize("how", ["revoked", "expired", "secret ended"])
@pytest.mark.parametrize("life", [waiting_pull, stream, run, ack_again_and_again])
async def test_work_that_waits_ends_with_its_token(
    tmp_path: Path, how: str, life: Callable[[qmq.Consumer], Awaitable[None]]
) -> None:
    held.clear()
    async with guarded(tmp_path) as (broker, keys, ops), qmq.connect(broker.url, token=ops) as owner:
        rights = {"consume": ("shop.",), "group": ("billing",)}
        token = keys.add("billing", expires_in=3_600, **rights)
        await until(lambda: "billing" in broker.server.token_names)
        if life is ack_again_and_again:
            await owner.send("shop.a", b"mine")

        async def live() -> None:
            async with (
                qmq.connect(broker.url, token=token) as client,
                client.subscribe("shop.", group="billing") as consumer,
            ):
                await life(consumer)

        task = asyncio.ensure_future(live())
        await until(lambda: broker.broker.waiting_pulls() > 0 and (life is not ack_again_and_again or bool(held)))
        if how == "revoked":
            keys.drop("billing")
        elif how == "secret ended":
            keys.secrets["billing"] = new_secret()
            keys.add("billing", **rights)
        else:
            keys.add("billing", expires_in=1, **rights)
        with pytest.raises(qmq.Unauthorized):
            async with asyncio.timeout(SOON):
                await task
        if held:
            with pytest.raises((qmq.Unauthorized, qmq.Fenced)):
                await held[0].ack()
        async with owner.subscribe("shop.", group="billing") as heir:
            if not held:
                await owner.send("shop.a", b"mine")
            message = await one(heir, SOON)
            assert (message.body, message.attempt) == (b"mine", 1)
            await message.ack()


class AtOnce:
    """Makes the calls of a thread of the disk where it stands: here no time passes but that of a clock that is set."""

    def call(self, work: Callable[[], object], done: Callable[[QmqError | None], None]) -> None:
        work()
        done(None)


@pytest.mark.parametrize("how", ["revoked", "expired", "secret ended"])
@pytest.mark.parametrize("after", [0.0, 0.25, 0.5])
def test_a_token_ends_within_a_second_by_the_clock_of_the_broker(tmp_path: Path, how: str, after: float) -> None:
    """Whenever between two looks it ends, the connection is told in less than a second, and before that nothing."""
    core = Core()
    keys = Keys(tmp_path / "tokens.toml", {})
    keys.add("ops", admin=True)
    now = datetime.now(UTC).timestamp()
    core.loop.advance(after)  # the file has whole seconds, so the looks move instead
    ends_at = 10.0
    ends_in = core.loop.now().wall_us / 1e6 - core.loop.time() + ends_at - now
    given = keys.add("work", consume=("",), group=("",), expires_in=ends_in if how == "expired" else None)
    read = ReadTokens(None, rules_of(read_tokens(keys.path)))
    settings = Settings(data_dir=tmp_path, tokens_file=keys.path)
    loop = cast(asyncio.AbstractEventLoop, core.loop)
    TokenFile(settings, core.server, read, loop, cast(CallThread, AtOnce())).start()
    wire = Wire(core)
    hello = {"protocol": frames.PROTOCOL_VERSION, "client": "test", "token": given}
    wire.send(frames.encode_frame(FrameKind.HELLO, 1, frames.pack_meta(hello), 0))
    core.run()
    assert [answer.kind for answer in wire.frames()] == [FrameKind.WELCOME]
    core.loop.advance(ends_at - core.loop.time() - 0.001)
    assert list(wire.frames()) == []
    if how == "revoked":
        keys.drop("work")
    elif how == "secret ended":
        keys.secrets["work"] = new_secret()
        keys.add("work", consume=("",), group=("",))
    core.loop.advance(1.0)
    (answer,) = wire.frames()
    assert frames.unpack_meta(answer.meta)["code"] == "unauthorized"
    assert not core.server.tokens_in_use()
    core.close()


class Hangs:
    """Makes no call and answers none, as a thread does whose disk hangs."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, work: Callable[[], object], done: Callable[[QmqError | None], None]) -> None:
        self.calls += 1


def test_a_token_expires_while_the_disk_of_its_file_hangs(tmp_path: Path) -> None:
    core, disk = Core(), Hangs()
    keys = Keys(tmp_path / "tokens.toml", {})
    now = datetime.now(UTC).timestamp()
    given = keys.add("work", consume=("",), group=("",), expires_in=core.loop.now().wall_us / 1e6 + 10 - now)
    read = ReadTokens(None, rules_of(read_tokens(keys.path)))
    settings = Settings(data_dir=tmp_path, tokens_file=keys.path)
    loop = cast(asyncio.AbstractEventLoop, core.loop)
    TokenFile(settings, core.server, read, loop, cast(CallThread, disk)).start()
    wire = Wire(core)
    hello = {"protocol": frames.PROTOCOL_VERSION, "client": "test", "token": given}
    wire.send(frames.encode_frame(FrameKind.HELLO, 1, frames.pack_meta(hello), 0))
    core.run()
    assert [answer.kind for answer in wire.frames()] == [FrameKind.WELCOME]
    core.loop.advance(8.9)  # the file has whole seconds: it expires between 9 and 10 s from now
    assert list(wire.frames()) == []
    core.loop.advance(2.0)
    (answer,) = wire.frames()
    assert frames.unpack_meta(answer.meta)["code"] == "unauthorized"
    assert disk.calls == 1, "no more work waits for a disk that hangs"
    core.close()


async def test_a_renewed_token_keeps_what_is_in_flight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(tmp_path) as (broker, keys, ops), qmq.connect(broker.url, token=ops) as owner:
        token = keys.add("billing", consume=("shop.",), group=("billing",), expires_in=3_600)
        await until(lambda: "billing" in broker.server.token_names)
        await owner.send("shop.a", b"mine")
        async with (
            qmq.connect(broker.url, token=token) as client,
            client.subscribe("shop.", group="billing") as consumer,
        ):
            message = await one(consumer, SOON)
            before = caplog.text.count("tokens from")
            keys.add("billing", consume=("shop.",), group=("billing",), secrets=2)
            await until(lambda: caplog.text.count("tokens from") > before)
            await message.ack()
            (group,) = await owner.admin.groups()
            assert (group.in_flight, group.in_retry) == (0, 0)


async def test_clients_without_asyncio_and_readers_of_logs_end_too(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, _):
        token = keys.add("all", produce=("",), browse=("",))
        await until(lambda: "all" in broker.server.token_names)
        (address,) = parse_url(broker.url, token=TokenText(token))
        reader = LogReader(address)
        assert (await asyncio.to_thread(reader.segments, 0))[0] == 1
        client = await asyncio.to_thread(lambda: qmq.connect_sync(broker.url, token=token).__enter__())
        await asyncio.to_thread(client.send, "a", b"x")
        keys.drop("all")
        await until(lambda: not broker.server.tokens_in_use())
        with pytest.raises(qmq.Unauthorized):
            await asyncio.to_thread(reader.segments, 0)

        def send() -> None:
            while True:
                client.send("a", b"x")

        with pytest.raises((qmq.Unauthorized, qmq.SendFailed)):
            await asyncio.to_thread(send)
        reader.close()


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_a_broker_does_not_open_to_others_by_itself(tmp_path: Path, listen: str) -> None:
    settings = Settings(data_dir=tmp_path / "data", listen=listen)
    with pytest.raises(InvalidOption, match=r"qmq tokens create NAME --admin --data-dir .* or set insecure = true"):
        RunningBroker(settings)
    assert not (tmp_path / "data").exists(), "nothing was made"


@pytest.mark.parametrize("more", ["tokens", "insecure"])
async def test_a_broker_opens_with_tokens_or_when_told_to(
    tmp_path: Path, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    if more == "tokens":
        Keys(tmp_path / "data" / "tokens.toml", {}).add("ops", admin=True)
    async with running(tmp_path / "data", listen="0.0.0.0:0", insecure=more == "insecure") as broker:
        broker.log_start()
        assert broker.server.has_tokens == (more == "tokens")
    assert ("anyone who reaches" in caplog.text) == (more == "insecure")


def test_a_named_file_must_be_there_and_right(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", listen="127.0.0.1:0", tokens_file=tmp_path / "t.toml")
    with pytest.raises(InvalidOption, match="does not exist; make it with `qmq tokens create"):
        RunningBroker(settings)
    (tmp_path / "t.toml").write_text("[a]\nx = 1\n")
    with pytest.raises(InvalidOption, match="line 2"):
        RunningBroker(settings)


async def test_a_client_reads_the_file_of_its_token_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rights = {"produce": ("shop.",), "consume": ("shop.",), "group": ("g",)}
    file = tmp_path / "token"
    async with guarded(tmp_path) as (broker, keys, _ops):
        file.write_text(keys.add("web", **rights))
        await until(lambda: "web" in broker.server.token_names)
        monkeypatch.setenv("QMQ_TOKEN_FILE", str(file))
        async with (
            asyncio.timeout(3 * SOON),
            qmq.connect(broker.url) as client,
            qmq.connect(broker.url, token_file=file) as other,
            other.subscribe("shop.", group="g") as consumer,
        ):

            async def taken(body: bytes) -> None:
                message = await one(consumer)
                assert message.body == body
                message.ack()
                await consumer.flush()

            await client.send("shop.a", b"1")
            await taken(b"1")
            file.write_text(keys.add("desk-of-a-longer-name", **rights))  # before the first token ends
            keys.drop("web")
            links = [one._brokers.links[0] for one in (client, other)]
            await until(lambda: all(link.address.token.name == "desk-of-a-longer-name" for link in links))
            await client.send("shop.a", b"2")
            await taken(b"2")
            keys.drop("desk-of-a-longer-name")
            await until(lambda: caplog.text.count("for another token in") == 2)  # it ends first
            file.write_text("")
            file.write_text(keys.add("web", **rights))
            await client.send("shop.a", b"3")
            await taken(b"3")


async def test_a_client_without_another_token_in_its_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_link, "TOKEN_WAIT_S", 0.1)
    file = tmp_path / "token"
    async with guarded(tmp_path) as (broker, keys, _ops):
        file.write_text(keys.add("web", produce=("shop.",)))
        await until(lambda: "web" in broker.server.token_names)
        client = await qmq.connect(broker.url, token_file=file)
        await client.send("shop.a", b"1")
        keys.drop("web")
        with pytest.raises((qmq.Unauthorized, qmq.SendFailed)):
            await repeated(lambda: client.send("shop.a", b"2"))
        with pytest.raises(qmq.Unauthorized):
            await client.send("shop.a", b"2")
        await client.close()
        with pytest.raises(qmq.Unauthorized):
            async with qmq.connect(broker.url, token_file=file):
                pass


def test_a_token_and_a_file_of_one_are_too_much(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="either token or token_file"):
        qmq.connect("qmq://127.0.0.1:1", token="a:b", token_file=tmp_path)


# --- what can be seen -------------------------------------------------------------------------------------------------


async def test_changes_of_an_administrator_are_lines_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(tmp_path) as (broker, keys, ops), qmq.connect(broker.url, token=ops, name="desk") as client:
        shop = keys.add("shop", group=("g",))
        await until(lambda: "shop" in broker.server.token_names)
        await client.send("a", b"x")
        async with client.subscribe("a", group="g"):
            pass
        await client.admin.set_group("g", max_attempts=7)
        await client.admin.groups()
        await client.admin.delete_group("g")
        async with qmq.connect(broker.url, token=shop) as other:
            with pytest.raises(qmq.Forbidden):
                await other.admin.delete_group("g")
    refusal = "token 'shop' lacks a right: admin; whoever keeps the broker's tokens can give it"
    lines = [record.getMessage() for record in caplog.records if record.name == "qmq.audit"]
    assert [line.partition(": ")[2].partition(" at ")[0] for line in lines] == [
        "set_group group='g' settings={'max_attempts': 7} (done)",
        "delete_group group='g' (done)",
        f"delete_group group='g' (refused: {refusal})",
    ]
    assert lines[0].startswith("token 'ops', 'desk' at 127.0.0.1:")


async def test_the_last_use_is_written_for_people(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, ops):
        keys.add("unused", admin=True)
        async with qmq.connect(broker.url, token=ops):
            pass
    used = read_used(tmp_path / "data" / USED_NAME)
    assert set(used) == {"ops"}
    assert abs(used["ops"] / 1e6 - datetime.now(UTC).timestamp()) < 600


async def test_no_secret_is_anywhere_but_where_it_belongs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(tmp_path) as (broker, keys, ops):
        secret = keys.secrets["ops"]
        errors = []
        for token in (f"nobody:{secret}", f"{secret}:x", f"ops:{secret}x"):
            with pytest.raises(qmq.Unauthorized) as caught:
                async with qmq.connect(broker.url, token=token):
                    pass
            errors.append(str(caught.value))
        async with qmq.connect(broker.url, token=ops) as client:
            info = repr(await client.admin.info())
            await client.send("a", b"x")
            options = repr(client._options) + repr(client._brokers.links[0].address)
    of_process = [Path(f"/proc/{os.getpid()}/{name}") for name in ("cmdline", "environ")]
    files = [path for path in (*of_process, *(tmp_path / "data").rglob("*")) if path.is_file()]
    texts = [caplog.text, *errors, info, options, repr(broker.settings)]
    texts += [path.read_bytes().decode("latin-1") for path in files]
    assert [text[max(0, text.find(secret) - 100) :] for text in texts if secret in text] == []
