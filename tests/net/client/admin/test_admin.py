"""Lists and changes of groups at several brokers, of which some do not answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.errors import UnknownGroup
from qmq.net.client import brokers as brokers_module
from tests.broker_process import broker_process
from tests.net.scripted import scripted_broker
from tests.net.several import connections, put, several, until


def connect(url: str) -> qmq.Client:
    """Return a client that waits two seconds for each broker."""
    return qmq.connect(url, admin_timeout=2.0)


async def test_a_broker_that_goes_while_a_list_is_read_is_named(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        for number in range(2):
            await put(brokers.one(number), "a", [b"x"])
        listing = client.subjects()
        assert (await anext(listing)).broker == brokers.address(0)
        assert client.admin.missed == ()
        await brokers.stop(1)
        assert [info async for info in listing] == []
        assert client.admin.missed == (brokers.address(1),)
        await brokers.start(1)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        assert {info.broker async for info in client.subjects()} == {brokers.address(0), brokers.address(1)}
        assert client.admin.missed == ()


async def test_a_list_logs_a_broker_that_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        await put(brokers.one(1), "a", [b"x"])
        await brokers.stop(0)
        with caplog.at_level(logging.WARNING, "qmq.client"):
            assert [info.broker async for info in client.subjects()] == [brokers.address(1)]
        assert f"the list lacks {brokers.address(0)}" in caplog.text
        assert client.admin.missed == (brokers.address(0),)


async def test_lists_are_of_all_brokers(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        connect(brokers.url) as client,
        client.subscribe("a", group="g", consumer="c"),
    ):
        await put(brokers.one(1), "a", [b"x"])
        both = [brokers.address(0), brokers.address(1)]
        assert [(row.name, row.ready, row.broker) for row in await client.admin.groups()] == [
            ("g", 0, both[0]),
            ("g", 1, both[1]),
        ]
        assert [(row.name, row.broker) for row in await client.admin.consumers("g")] == [("c", at) for at in both]
        await brokers.stop(0)
        assert [row.broker for row in await client.admin.groups()] == both[1:]
        assert client.admin.missed == (both[0],)


async def test_settings_go_to_every_broker_and_the_same_call_completes_them(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        connect(brokers.url) as client,
        client.subscribe("a", group="g", consumer="c"),
    ):
        await client.admin.set_group("g", max_attempts=3)
        assert [row.settings["max_attempts"] for row in await client.admin.groups()] == [3, 3]
        await brokers.stop(1)
        with pytest.raises(qmq.BrokersMissed, match=rf"done at {brokers.address(0)}.*{brokers.address(1)}"):
            await client.admin.set_group("g", max_attempts=4)
        await brokers.start(1)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        assert [row.settings["max_attempts"] for row in await client.admin.groups()] == [4, 3]
        await client.admin.set_group("g", max_attempts=4)
        assert [row.settings["max_attempts"] for row in await client.admin.groups()] == [4, 4]


async def test_a_seek_is_made_at_every_broker(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        for number in range(2):
            await put(brokers.one(number), "a", [b"x"] * 3)
        async with client.subscribe("a", group="g") as consumer:
            for message in await consumer.pull(min_count=6, timeout=30):
                message.ack()
            await consumer.flush()
        assert [row.ready for row in await client.admin.groups()] == [0, 0]
        await client.admin.seek("g", "first")
        assert [row.ready for row in await client.admin.groups()] == [3, 3]


async def test_a_deletion_that_missed_a_broker_is_completed_by_the_same_call(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        async with client.subscribe("a", group="g"):
            pass
        await brokers.stop(0)
        with pytest.raises(qmq.BrokersMissed, match=brokers.address(0)):
            await client.admin.delete_group("g")
        await brokers.start(0)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        assert [row.broker for row in await client.admin.groups()] == [brokers.address(0)]
        await client.admin.delete_group("g")
        assert await client.admin.groups() == []
        with pytest.raises(UnknownGroup):
            await client.admin.delete_group("g")


async def test_a_refusal_of_any_broker_is_raised(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        for call in (client.admin.groups("none"), client.admin.consumers("none"), client.admin.seek("none", "first")):
            with pytest.raises(UnknownGroup):
                await call
        with pytest.raises(UnknownGroup):
            await anext(client.admin.dead_letters("none"))
        async with client.subscribe("a", group="g"):
            with pytest.raises(qmq.InvalidOption):
                await client.admin.set_group("g", max_attempts=0)
        for name in ("no\udcff", "", "g@", "g@c@d"):
            with pytest.raises(qmq.InvalidName):
                await client.admin.delete_group(name)
        with pytest.raises(UnknownGroup):
            await client.admin.delete_group("g@c")


async def test_dead_letters_of_all_are_listed_handed_out_again_and_deleted(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        for number in range(2):
            await put(brokers.one(number), "a", [b"%d-%d" % (number, i) for i in range(3)])
        async with client.subscribe("a", group="g") as consumer:
            for message in await consumer.pull(min_count=6, timeout=30):
                await message.reject("bad")
            letters = [letter async for letter in client.admin.dead_letters("g")]
            assert [letter.broker for letter in letters] == [brokers.address(0)] * 3 + [brokers.address(1)] * 3
            ids = [letter.id for letter in letters if letter.id is not None]
            with pytest.raises(qmq.InvalidOption, match="1 of these"):
                await client.admin.delete_dead("g", [ids[0], "00" * 16])
            assert await client.admin.delete_dead("g", [ids[0], ids[3]]) == 2
            assert await client.admin.redrive("g", all=True) == 4
            messages = await consumer.pull(min_count=4, timeout=30)
            assert sorted(message.id for message in messages) == sorted({*ids} - {ids[0], ids[3]})
            for message in messages:
                message.ack()


async def test_files_are_closed_at_every_broker(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        await put(brokers.one(1), "a", [b"x"])
        first = await client.admin.roll()
        assert [row.broker for row in first] == [brokers.address(0), brokers.address(1)]
        assert {row.partition for row in first} == {0}
        assert await client.admin.roll() == first, "nothing was written since"
        await put(brokers.one(1), "a", [b"x"])
        again = await client.admin.roll()
        assert again[0] == first[0]
        assert again[1].end > first[1].end


CALLS: dict[str, Callable[[qmq.Admin], Awaitable[object]]] = {
    "groups": lambda admin: admin.groups(),
    "consumers": lambda admin: admin.consumers("g"),
    "set_group": lambda admin: admin.set_group("g", max_attempts=3),
    "seek": lambda admin: admin.seek("g", "first"),
    "delete_group": lambda admin: admin.delete_group("g"),
    "dead_letters": lambda admin: anext(admin.dead_letters("g")),
    "redrive": lambda admin: admin.redrive("g", ["0" * 32]),
    "delete_dead": lambda admin: admin.delete_dead("g", ["0" * 32]),
    "cancel": lambda admin: admin.cancel("0" * 32),
    "roll": lambda admin: admin.roll(),
}


def address_of(url: str) -> str:
    return url.removeprefix("qmq://")


@pytest.mark.parametrize("name", CALLS)
async def test_a_broker_that_never_answers_ends_each_call_and_is_named(name: str) -> None:
    async with scripted_broker() as frozen, qmq.connect(frozen.url, admin_timeout=0.05) as client:
        with pytest.raises(qmq.BrokersMissed, match=f"no answer within 0.05 s from {address_of(frozen.url)}") as caught:
            await CALLS[name](client.admin)
        assert caught.value.retryable


async def test_a_broker_that_goes_and_stays_away_ends_calls_too() -> None:
    async with scripted_broker() as gone, qmq.connect(gone.url, admin_timeout=0.05) as client:
        await gone.close()
        await until(lambda: connections(client) == [False], "the client has seen it")
        for call in (client.admin.groups(), anext(client.subjects()), anext(client.admin.dead_letters("g"))):
            with pytest.raises(qmq.BrokersMissed, match=address_of(gone.url)):
                await call


async def test_lists_go_on_without_a_broker_that_never_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with several(tmp_path, 1) as brokers, scripted_broker() as frozen:
        url = f"{brokers.url},{frozen.url}"
        async with connect(brokers.url) as client, client.subscribe("a", group="g", consumer="c") as consumer:
            await put(brokers.one(0), "a", [b"x"])
            await (await consumer.pull())[0].reject("bad")
        async with qmq.connect(url, admin_timeout=1.0) as client:
            lists: list[Callable[[], Awaitable[Sequence[Any]]]] = [
                client.admin.groups,
                lambda: client.admin.consumers("g"),
                lambda: collected(client.subjects()),
                lambda: collected(client.admin.dead_letters("g")),
            ]
            for listed in lists:
                caplog.clear()
                assert [row.broker for row in await listed()] == [brokers.address(0)]
                assert client.admin.missed == (address_of(frozen.url),)
                assert f"no answer within 1 s from {address_of(frozen.url)}" in caplog.text
            with pytest.raises(qmq.BrokersMissed, match=f"done at {brokers.address(0)}; no answer within 1 s from"):
                await client.admin.set_group("g", max_attempts=3)


async def test_lists_do_not_wait_for_a_broker_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(brokers_module, "AWAY_AFTER", 0.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with several(tmp_path, 1) as brokers:
            await put(brokers.one(0), "a", [b"x"])
            async with qmq.connect(f"{brokers.url},{away}", admin_timeout=3600) as client, asyncio.timeout(30):
                assert [row.broker for row in await client.admin.stats()] == [brokers.address(0)]
                assert client.admin.missed == (away,)
                assert f"no connection to {away}" in caplog.text
                assert [row.broker async for row in client.subjects()] == [brokers.address(0)]
                finder = client.find("a")
                assert [message.body async for message in finder] == [b"x"]
                assert finder.missed == (away,)


async def collected(rows: AsyncIterator[Any]) -> list[Any]:
    return [row async for row in rows]


def test_the_client_without_asyncio_has_the_limit_too(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker, qmq.connect_sync(broker.url, admin_timeout=0.5) as client:
        broker.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(qmq.BrokersMissed, match=address_of(broker.url)):
                client.admin.groups()
            with pytest.raises(qmq.BrokersMissed, match=address_of(broker.url)):
                list(client.subjects())
        finally:
            broker.send_signal(signal.SIGCONT)
