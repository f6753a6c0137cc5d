"""Lists of several brokers say which one they lack."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import qmq
from tests.net.several import connections, put, several, until


def connect(url: str) -> qmq.Client:
    """As users do, but not as patient."""
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


async def test_what_is_lacking_from_the_start_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with several(tmp_path) as brokers, connect(brokers.url) as client:
        await put(brokers.one(1), "a", [b"x"])
        await brokers.stop(0)
        with caplog.at_level(logging.WARNING, "qmq.client"):
            assert [info.broker async for info in client.subjects()] == [brokers.address(1)]
        assert f"the list lacks {brokers.address(0)}" in caplog.text
        assert client.admin.missed == (brokers.address(0),)
