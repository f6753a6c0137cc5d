"""The inbox: the work of a message is committed once, however often and wherever it comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import qmq
from qmq import testing
from qmq.errors import DatabaseFailed, InvalidName, InvalidOption, UnknownGroup
from qmq.sql import Inbox, create_tables
from qmq.sql.remembering import longest_retry
from tests.sql.boxes import engine_with_tables
from tests.sql.servers import Database, Server, sqlite_database

inbox = Inbox(group="billing")


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    """An engine of each database, in turn."""
    engine = engine_with_tables(database)
    yield engine
    engine.dispose()


class Failed(Exception):
    """A handler fails."""


def test_the_work_of_a_message_is_done_once(engine: sa.Engine) -> None:
    message, other = testing.sync_message(b"1"), testing.sync_message(b"2")
    with suppress(Failed), engine.begin() as tx:
        assert inbox.first_time(tx, message)
        raise Failed
    with engine.begin() as tx:
        assert inbox.first_time(tx, message)  # the first attempt was rolled back
        assert not inbox.first_time(tx, message)
    with Session(engine) as session, session.begin():
        assert not inbox.first_time(session, message)
        assert inbox.first_time(session, other)
        assert Inbox(group="shipping").first_time(session, message)
        assert not inbox.first_time(session, message.id)
    with engine.begin() as tx:
        assert inbox.forget(tx, message)
        assert not inbox.forget(tx, message)
        assert inbox.first_time(tx, message)


async def test_with_asyncio_it_is_awaited(database: Database) -> None:
    engine = create_async_engine(database.async_url)
    await create_tables(engine)
    message = testing.message(b"1")
    async with engine.begin() as tx:
        assert await inbox.first_time(tx, message)
    async with AsyncSession(engine) as session, session.begin():
        assert not await inbox.first_time(session, message)
        assert await inbox.forget(session, message)
    await engine.dispose()


@pytest.mark.parametrize("name", ["mariadb", "postgresql"])
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_the_same_message_at_two_consumers_at_once_is_committed_once(
    request: pytest.FixtureRequest, name: str, commits: bool
) -> None:
    server: Server = request.getfixturevalue(name)
    engine = engine_with_tables(server.database())
    message, begun = testing.sync_message(b"1"), threading.Event()

    def second() -> bool:
        with engine.begin() as tx:
            begun.set()
            return inbox.first_time(tx, message)  # waits for the first one's transaction

    with ThreadPoolExecutor(1) as pool, engine.connect() as tx:
        assert inbox.first_time(tx, message)
        answer = pool.submit(second)
        begun.wait()
        assert not answer.done()
        tx.commit() if commits else tx.rollback()
        assert answer.result(60) is not commits
    engine.dispose()


def test_it_takes_one_insert(tmp_path: Path) -> None:
    engine = engine_with_tables(sqlite_database(tmp_path))
    statements: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    with engine.begin() as tx:
        inbox.first_time(tx, testing.sync_message(b"1"))
    engine.dispose()
    assert [statement.split()[0] for statement in statements] == ["INSERT"]


def test_a_database_without_the_tables_says_what_to_do(database: Database) -> None:
    engine = sa.create_engine(database.url)
    with engine.connect() as tx, pytest.raises(DatabaseFailed, match="qmq sql ddl"):
        inbox.first_time(tx, testing.sync_message(b"1"))
    engine.dispose()


def test_bad_groups_and_times_are_refused() -> None:
    with pytest.raises(InvalidName):
        Inbox(group="no group")
    with pytest.raises(InvalidOption, match="above 0"):
        Inbox(group="billing", keep=0)


def test_the_longest_retry_is_that_of_the_settings() -> None:
    assert longest_retry({"max_attempts": 3, "retry_delays": [1.0, 10.0], "ack_deadline": 0}, 0) == 11
    assert longest_retry({"max_attempts": 5, "retry_delays": [1.0, 10.0], "ack_deadline": 2.0}, 0) == 31 + 10
    assert longest_retry({"max_attempts": 3, "retry_delays": [1.0], "ack_deadline": 0}, 60) == 120
    assert longest_retry({"max_attempts": 1, "retry_delays": [5.0]}, 60) == 0
    assert longest_retry({"max_attempts": 1_000_000, "retry_delays": [1.0]}, 0) == 999_999


async def test_what_forgets_too_early_is_refused(broker_url: str) -> None:
    async with qmq.connect(broker_url) as client:
        with pytest.raises(UnknownGroup):
            await Inbox(group="inbox-nobody").check(client)
        async with client.subscribe(
            "inbox.check", group="inbox-check", max_attempts=3, retry_delays=["1h"]
        ) as consumer:
            await Inbox(group="inbox-check", keep="1d").check(client)
            with pytest.raises(InvalidOption, match=r"keeps 1h, but a message may come again up to 2h"):
                await Inbox(group="inbox-check", keep="1h").check(client)
            with pytest.raises(InvalidOption, match="up to 4d"):
                await Inbox(group="inbox-check", keep="1d").check(client, longest_delay="2d")
            await client.send("inbox.check", b"1")
            (message,) = await consumer.pull(timeout=60)
            await message.reject("bad")
            await client.admin.set_group("inbox-check", max_attempts=1)
            await Inbox(group="inbox-check", keep="1h").check(client)
            with pytest.raises(InvalidOption, match="dead letter that is"):
                await Inbox(group="inbox-check", keep="1ms").check(client)


def test_a_client_without_asyncio_checks_too(broker_url: str) -> None:
    with (
        qmq.connect_sync(broker_url) as client,
        client.subscribe("inbox.sync", group="inbox-sync", max_attempts=3, retry_delays=["1h"]),
    ):
        Inbox(group="inbox-sync").check(client)
        with pytest.raises(InvalidOption, match="may come again"):
            Inbox(group="inbox-sync", keep="1h").check(client)


async def test_a_redriven_dead_letter_that_never_succeeded_is_worked_on(tmp_path: Path, broker_url: str) -> None:
    engine = engine_with_tables(sqlite_database(tmp_path))
    redriving = Inbox(group="inbox-redrive")
    async with qmq.connect(broker_url) as client:
        await client.send("inbox.redrive", b"1")
        async with client.subscribe("inbox.redrive", group="inbox-redrive", max_attempts=1) as consumer:
            (message,) = await consumer.pull(timeout=60)
            with suppress(Failed):
                async with message:
                    with engine.begin() as tx:
                        assert redriving.first_time(tx, message)
                        raise Failed
            while not await client.admin.redrive("inbox-redrive", all=True):
                pass
            (message,) = await consumer.pull(timeout=60)
            async with message:
                with engine.begin() as tx:
                    assert redriving.first_time(tx, message)
    engine.dispose()
