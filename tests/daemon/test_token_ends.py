"""Tokens that end while a find, a restore or a spool is at work, and client certificates that stand for tokens."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.archive.files import LocalFiles
from qmq.archive.lock import this_process
from qmq.daemon.token_file import rules_of
from qmq.net.client.address import TokenText, parse_url, tls_files
from qmq.net.client.blocking import ping
from qmq.net.client.failover import handover
from qmq.net.client.log_reader import LogReader
from qmq.net.client.restore import RestoreTarget
from qmq.restore.run import RestoreRun
from qmq.restore.selection import RestoreSelection
from qmq.tokens import TokenEntry, read_tokens
from tests.broker_process import broker_process, running
from tests.certificates import Authority
from tests.daemon.test_token_file import SOON, Keys, guarded, one, repeated, until
from tests.restore.archived import check_restored, orders_archive

HOW_IT_ENDS = pytest.mark.parametrize("how", ["revoked", "expired"])


def end(keys: Keys, name: str, how: str, **rights: Any) -> None:
    """Have a token end in at most a second."""
    if how == "revoked":
        keys.drop(name)
    else:
        keys.add(name, expires_in=0.5, **rights)


@HOW_IT_ENDS
async def test_a_find_ends_with_its_token(tmp_path: Path, how: str) -> None:
    async with guarded(tmp_path) as (broker, keys, ops), qmq.connect(broker.url, token=ops) as owner:
        await owner.send_many("shop.a", [b"x"] * 3_000)
        token = keys.add("desk", browse=("shop.",))
        await until(lambda: "desk" in broker.server.token_names)
        client = await qmq.connect(broker.url, token=token)
        begun = client.find("shop.", limit=None)
        assert len(await begun.page(10)) == 10

        async def find_all() -> None:
            assert len([message async for message in client.find("shop.", limit=None)]) == 3_000

        await find_all()
        end(keys, "desk", how, browse=("shop.",))
        with pytest.raises(qmq.Unauthorized):
            await repeated(find_all)
        with pytest.raises(qmq.Unauthorized):
            await repeated(begun.page)


@HOW_IT_ENDS
async def test_a_restore_ends_with_its_token_and_another_one_goes_on(tmp_path: Path, how: str) -> None:
    wanted = orders_archive(tmp_path)
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    restorer = keys.add("restorer", admin=True)
    async with running(tmp_path / "data", max_frame_bytes=1 << 16, max_message_bytes=1 << 14) as broker:

        def restoring(token: str) -> RestoreRun:
            return RestoreRun(
                LocalFiles(tmp_path / "archive"), RestoreSelection(), parse_url(broker.url, token=TokenText(token)),
                lambda: 1_800_000_000_000_000, this_process(),
            )  # fmt: skip

        shown = 0

        def end_it(looked: int, total: int) -> None:
            """End the token after the first frame, as soon as the broker looks at its file."""
            nonlocal shown
            shown += 1
            if how == "revoked":
                keys.drop("restorer")
            else:
                keys.add("restorer", expires_in=-1, admin=True)
            broker.server.set_tokens(rules_of(read_tokens(keys.path)))

        with pytest.raises(qmq.Unauthorized):
            async with asyncio.timeout(SOON):
                await restoring(restorer).run(end_it)
        assert shown == 1
        await restoring(ops).run()
    check_restored(wanted, tmp_path / "data")


async def test_a_spool_ends_with_its_token_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(handover, "AGAIN_AFTER", 0.05)
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    rights: dict[str, Any] = {"consume": ("shop.",), "group": ("billing",)}
    token = keys.add("billing", **rights)
    spool = tmp_path / "state" / "spool"
    with broker_process(tmp_path / "data") as process:
        async with qmq.connect(process.url, token=ops) as owner:
            await owner.admin.rights()
            client = await qmq.connect(process.url, token=token, failover_after=0.1)
            consumer = client.subscribe("shop.", group="billing")
            await consumer.__aenter__()
            await owner.send("shop.a", b"fails")
            message = await one(consumer, SOON)
            await asyncio.to_thread(process.kill)
            async with asyncio.timeout(SOON):
                await message.nack(delay=0.0)
            (file,) = spool.iterdir()
            size = file.stat().st_size
            keys.drop("billing")
            await asyncio.to_thread(process.start)
            with pytest.raises(qmq.Unauthorized):
                async with asyncio.timeout(SOON):
                    await one(consumer)
            assert [path.stat().st_size for path in spool.iterdir()] == [size]
            keys.add("billing", **rights)

        async def others() -> qmq.Message:
            async with (
                qmq.connect(process.url, token=token) as client,
                client.subscribe("shop.", group="billing") as consumer,
            ):
                message = await one(consumer, SOON)
                await message.ack()
                return message

        async with asyncio.timeout(SOON):
            while True:
                try:
                    message = await others()
                    break
                except qmq.Unauthorized:
                    await asyncio.sleep(0.05)
        assert (message.body, message.attempt) == (b"fails", 2)


@HOW_IT_ENDS
async def test_a_token_that_ends_while_a_spool_is_sent_loses_nothing_and_a_new_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(handover, "AGAIN_AFTER", 0.05)
    monkeypatch.setattr(handover, "AT_ONCE", 1)
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    rights: dict[str, Any] = {"consume": ("shop.",), "group": ("billing",)}
    token = keys.add("billing", **rights)
    spool, bodies = tmp_path / "state" / "spool", [b"%d" % number for number in range(5)]
    async with running(tmp_path / "data") as broker:
        url, listen = broker.url, f"127.0.0.1:{broker.address[1]}"
        client = await qmq.connect(url, token=token, failover_after=0.1)
        consumer = client.subscribe("shop.", group="billing")
        await consumer.__aenter__()
        async with qmq.connect(url, token=ops) as owner:
            await owner.send_many("shop.a", bodies)
        messages = await consumer.pull(5, min_count=5, timeout=SOON)
    async with asyncio.timeout(SOON):
        for message in messages:
            await message.nack(delay=0.0)
    (file,) = spool.iterdir()
    size, took, tries = file.stat().st_size, handover.HandoverClient._took, list[bool]()

    async with running(tmp_path / "data", listen=listen) as broker:

        async def ends_after_two(*arguments: Any) -> bool:
            tries.append(await took(*arguments))
            if tries == [True, True]:
                if how == "revoked":
                    keys.drop("billing")
                else:
                    keys.add("billing", expires_in=-1, **rights)
                broker.server.set_tokens(rules_of(read_tokens(keys.path)))
            return tries[-1]

        monkeypatch.setattr(handover.HandoverClient, "_took", ends_after_two)
        with pytest.raises(qmq.Unauthorized):
            await repeated(client.admin.rights)
        await until(lambda: [path.stat().st_size < size for path in spool.glob("*.spool")] == [True])
        assert sum(tries) == 2
        await client.close()
        renewed = keys.add("heir", **rights)
        await until(lambda: "heir" in broker.server.token_names)
        async with (
            qmq.connect(url, token=renewed) as client,
            client.subscribe("shop.", group="billing") as consumer,
        ):
            await until(lambda: not list(spool.iterdir()))
            again = await consumer.pull(5, min_count=5, timeout=SOON)
            assert [(message.body, message.attempt) for message in again] == [(body, 2) for body in bodies]
            for message in again:
                await message.ack()
            assert await consumer.pull(timeout=0) == []


async def test_a_spool_that_is_refused_in_part_says_so_once_and_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(handover, "AGAIN_AFTER", 0.02)
    monkeypatch.setattr(handover, "LONGEST_AFTER", 0.02)
    caplog.set_level(logging.DEBUG, "qmq.client")
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    token = keys.add("worker", consume=("shop.",), group=("billing", "mail"))
    spool = tmp_path / "state" / "spool"
    async with running(tmp_path / "data") as broker:
        url, listen = broker.url, f"127.0.0.1:{broker.address[1]}"
        client = await qmq.connect(url, token=token, failover_after=0.1)
        messages = []
        async with qmq.connect(url, token=ops) as owner:
            await owner.send("shop.a", b"x")
        for group in ("billing", "mail"):
            consumer = client.subscribe("shop.", group=group)
            await consumer.__aenter__()
            messages.append(await one(consumer, SOON))
    async with asyncio.timeout(SOON):
        for message in messages:
            await message.nack(delay=0.0)
    keys.add("worker", consume=("shop.",), group=("mail",))

    def said(text: str, level: int) -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelno == level and text in each.getMessage()]

    async def comes_again(owner: qmq.Client, group: str) -> None:
        async with owner.subscribe("shop.", group=group) as heir:
            message = await one(heir, SOON)
            assert (message.body, message.attempt) == (b"x", 2)
            await message.ack()

    async with (
        running(tmp_path / "data", listen=listen) as broker,
        qmq.connect(url, token=ops) as owner,
    ):
        await until(lambda: "worker" in broker.server.token_names)
        await comes_again(owner, "mail")
        await until(lambda: len(said("did not take a failed message of group billing", logging.DEBUG)) > 3)
        (told,) = said("refuses", logging.WARNING)
        assert "failed messages of group billing" in told
        assert "lacks a right" in told
        assert str(spool) in told
        keys.add("worker", consume=("shop.",), group=("billing", "mail"))
        await until(lambda: not list(spool.iterdir()))
        await comes_again(owner, "billing")
        await client.close()


# --- client certificates ----------------------------------------------------------------------------------------------


async def test_a_client_certificate_stands_for_the_token_of_its_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    server, mine, strange = (
        authority.issue(*names, common_name=name, file=name)
        for name, names in {"server": (), "billing": ("billing.example",), "strange": ("strange.example",)}.items()
    )
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    rights: dict[str, Any] = {"produce": ("shop.",), "consume": ("shop.",), "group": ("billing",), "browse": ("",)}
    keys.change(lambda tokens: tokens | {"billing": TokenEntry(**rights)})
    tls: dict[str, Any] = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    by_certificate: dict[str, Any] = {"tls_ca": authority.ca, "tls_cert": mine.cert, "tls_key": mine.key}
    async with running(tmp_path / "data", session_timeout_ms=600, **tls) as broker:
        client = await qmq.connect(broker.url, **by_certificate)
        consumer = client.subscribe("shop.", group="billing")
        await consumer.__aenter__()
        receipt = await client.send("shop.a", b"mine")
        assert (await client.get(str(receipt.id))).sender == "billing"
        message = await one(consumer, SOON)
        with pytest.raises(qmq.SendFailed, match=r"produce 'hr\.a'"):
            await client.send("hr.a", b"x")
        with pytest.raises(qmq.Forbidden):
            await client.admin.delete_group("billing")
        beats = client._brokers.links[0]._heartbeat
        assert beats is not None
        first = beats._heard_at
        await until(lambda: beats._heard_at > first + 1.0)  # longer than the session: heartbeats are let in
        await message.ack()
        await asyncio.to_thread(_use_without_asyncio, broker.url, authority, mine)

        # A token that is given counts, not the certificate; and a certificate of another name is no token.
        async with qmq.connect(broker.url, token=ops, **by_certificate) as admin:
            assert [(found.name, found.admin) for found in await admin.admin.rights()] == [("ops", True)]
        with pytest.raises(qmq.Unauthorized, match="'strange' of this client certificate"):
            async with qmq.connect(broker.url, tls_ca=authority.ca, tls_cert=strange.cert, tls_key=strange.key):
                pass
        with pytest.raises(qmq.Unauthorized):
            async with qmq.connect(broker.url, token="ops:wrong", **by_certificate):
                pass

        await client.send("shop.a", b"left")
        await one(consumer, SOON)
        keys.drop("billing")
        with pytest.raises(qmq.Unauthorized, match="billing"):
            async with asyncio.timeout(SOON):
                await one(consumer)
        with pytest.raises(qmq.Unauthorized):
            await repeated(client.admin.rights)
        async with (
            qmq.connect(broker.url, token=ops, **by_certificate) as heir,
            heir.subscribe("shop.", group="billing") as consumer,
        ):
            message = await one(consumer, SOON)
            assert (message.body, message.attempt) == (b"left", 1)
            await message.ack()


def _use_without_asyncio(url: str, authority: Authority, mine: tuple[Path, Path]) -> None:
    """Log in by the certificate with each kind of client."""
    (address,) = parse_url(url, tls_files(authority.ca, *mine))
    assert ping(address, 60).version
    reader = LogReader(address)
    assert reader.segments(0)
    reader.close()
    with qmq.connect_sync(url, tls_ca=authority.ca, tls_cert=mine[0], tls_key=mine[1]) as client:
        assert [found.name for found in client.admin.rights()] == ["billing"]
    target = asyncio.run(_restore_target(url, authority, mine))
    assert target


async def _restore_target(url: str, authority: Authority, mine: tuple[Path, Path]) -> bytes:
    target = await RestoreTarget.open(parse_url(url, tls_files(authority.ca, *mine))[0])
    await target.close()
    return target.welcome.store_id
