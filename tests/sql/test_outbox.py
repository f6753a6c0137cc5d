"""The outbox: a row in the program's own transaction, whatever SQLAlchemy calls that."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import qmq
from qmq.errors import DatabaseFailed, InvalidName, InvalidOption, MissingExtra, UsageError
from qmq.sql import Outbox, create_tables
from tests.sql.boxes import RecordingSender, drain, engine_with_tables, states
from tests.sql.servers import Database, PostgreSQL, sqlite_database

outbox = Outbox()


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    """An engine of each database, in turn."""
    engine = engine_with_tables(database)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = engine_with_tables(sqlite_database(tmp_path))
    yield engine
    engine.dispose()


class Undone(Exception):
    """A program fails."""


def test_what_is_committed_is_sent_and_what_is_rolled_back_is_not(engine: sa.Engine) -> None:
    with engine.begin() as tx:
        tx.execute(sa.text("INSERT INTO orders VALUES (1)"))
        outbox.send(tx, "shop.order", b"committed")
    with suppress(Undone), engine.begin() as tx:
        tx.execute(sa.text("INSERT INTO orders VALUES (2)"))
        outbox.send(tx, "shop.order", b"rolled back")
        raise Undone
    with engine.begin() as tx:
        with suppress(Undone), tx.begin_nested():
            outbox.send(tx, "shop.order", b"in a savepoint that is rolled back")
            raise Undone
        with tx.begin_nested():
            outbox.send(tx, "shop.order", b"in a savepoint")
        outbox.send(tx, "shop.order", b"after savepoints")
    with Session(engine) as session, session.begin():
        session.execute(sa.text("INSERT INTO orders VALUES (3)"))
        outbox.send(session, "shop.order", b"of a session")
    sender = RecordingSender()
    assert drain(engine, sender)
    assert sorted(sender.sent) == sorted([b"committed", b"in a savepoint", b"after savepoints", b"of a session"])
    assert set(states(engine).values()) == {1}
    assert drain(engine, sender)
    assert len(sender.sent) == 4


async def test_with_asyncio_it_is_awaited(database: Database) -> None:
    engine = create_async_engine(database.async_url)
    await create_tables(engine)
    async with engine.begin() as tx:
        await outbox.send(tx, "shop.order", b"of a connection")
    async with AsyncSession(engine) as session, session.begin():
        await outbox.send(session, "shop.order", b"of a session")
        with suppress(Undone):
            async with session.begin_nested():
                await outbox.send(session, "shop.order", b"in a savepoint that is rolled back")
                raise Undone
    await engine.dispose()
    sync_engine = sa.create_engine(database.url)
    sender = RecordingSender()
    await asyncio.to_thread(drain, sync_engine, sender)
    sync_engine.dispose()
    assert sorted(sender.sent) == [b"of a connection", b"of a session"]


def test_it_takes_one_insert(sqlite: sa.Engine) -> None:
    statements: list[str] = []
    sa.event.listen(sqlite, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    with sqlite.begin() as tx:
        outbox.send(tx, "shop.order", b"...", key="order-4421", tags=["eu"])
    assert len(statements) == 1
    assert statements[0].startswith("INSERT INTO qmq_outbox")


def test_messages_of_a_key_or_of_a_transaction_stay_in_order(sqlite: sa.Engine) -> None:
    with sqlite.begin() as tx:
        for number in range(60):
            outbox.send(tx, "shop.order", b"key %d %d" % (number % 3, number), key=f"order-{number % 3}", keys=None)
    with sqlite.begin() as tx:
        for number in range(20):
            outbox.send(tx, "shop.order", b"tx %d" % number)
    with sqlite.begin() as tx:
        for number in range(20):
            outbox.send(tx, "shop.order", b"ordered %d" % number, order_key="order-9", key=f"key-{number}")
    sender = RecordingSender(most=7)
    drain(sqlite, sender)
    for name in (b"key 0", b"key 1", b"key 2", b"tx", b"ordered"):
        numbers = [int(body.split()[-1]) for body in sender.sent if body.startswith(name)]
        assert numbers == sorted(numbers)
        assert len(numbers) == 20


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"subject": "shop order"}, InvalidName),
        ({"subject": "shop." + "x" * 200}, InvalidName),
        ({"key": ""}, InvalidOption),
        ({"key": "x" * 1025}, InvalidOption),
        ({"key": "\ud800"}, InvalidOption),
        ({"key": "a", "keys": ["b"]}, InvalidOption),
        ({"keys": [str(number) for number in range(17)]}, InvalidOption),
        ({"keys": "order-7"}, InvalidOption),
        ({"tags": "eu"}, InvalidOption),
        ({"properties": {"a": 1}}, InvalidOption),
        ({"properties": ["a"]}, InvalidOption),
        ({"delay": -1}, InvalidOption),
        ({"delay": "800d"}, InvalidOption),
        ({"delay": 1, "deliver_at": 5}, InvalidOption),
        ({"deliver_at": datetime(2027, 1, 1)}, InvalidOption),  # noqa: DTZ001
        ({"deliver_at": "tomorrow"}, InvalidOption),
        ({"deliver_at": 1e12}, InvalidOption),
        ({"expires_in": 0}, InvalidOption),
        ({"priority": "urgent"}, InvalidOption),
        ({"priority": True}, InvalidOption),
        ({"order_key": ""}, InvalidOption),
        ({"durability": "maybe"}, InvalidOption),
        ({"body": "text"}, TypeError),
        ({"body": None}, UsageError),
        ({"body": b"1", "json": 1}, UsageError),
        ({"body": None, "json": {1, 2}}, UsageError),
        ({"body": None, "json": float("nan")}, UsageError),
    ],
)
def test_what_could_never_be_sent_is_refused_before_it_is_written(
    sqlite: sa.Engine, options: dict[str, object], error: type[Exception]
) -> None:
    arguments = {"subject": "shop.order", "body": b"...", **options}
    with sqlite.begin() as tx, pytest.raises(error):
        outbox.send(tx, **arguments)  # type: ignore[call-overload]
    assert states(sqlite) == {}


def test_a_database_without_the_tables_says_what_to_do(database: Database) -> None:
    engine = sa.create_engine(database.url)
    with engine.connect() as tx, pytest.raises(DatabaseFailed, match="qmq sql ddl"):
        outbox.send(tx, "shop.order", b"...")
    engine.dispose()


def test_what_is_no_transaction_is_refused(sqlite: sa.Engine) -> None:
    with pytest.raises(TypeError, match=r"Connection or a Session .* not Engine"):
        outbox.send(sqlite, "shop.order", b"...")  # type: ignore[call-overload]


def test_errors_of_the_database_stay_as_they_are(sqlite: sa.Engine) -> None:
    with sqlite.begin() as tx:
        tx.execute(sa.text("PRAGMA query_only = ON"))
        with pytest.raises(sa.exc.OperationalError):
            outbox.send(tx, "shop.order", b"...")
        tx.execute(sa.text("PRAGMA query_only = OFF"))


def test_postgresql_is_told_of_rows(postgresql: PostgreSQL) -> None:
    engine = engine_with_tables(postgresql.database())
    listening = engine.raw_connection()
    driver = listening.driver_connection
    driver.autocommit = True
    driver.execute("LISTEN qmq_outbox")
    with engine.begin() as tx:
        Outbox().send(tx, "shop.order", b"...")
    assert [notice.channel for notice in driver.notifies(timeout=10, stop_after=1)] == ["qmq_outbox"]
    listening.invalidate()
    engine.dispose()


# ---------------------------------------------------------------------------------------------------------------------
# With a client


async def test_with_a_client_what_is_committed_is_sent_at_once(database: Database, broker_url: str) -> None:
    engine = create_async_engine(database.async_url)
    await create_tables(engine)
    async with qmq.connect(broker_url) as client, Outbox(client) as sending:
        subject = f"at-once.{database.name}-{engine.dialect.name}"
        async with client.subscribe(subject, group=subject.replace(".", "-")) as consumer:
            async with engine.begin() as tx:
                await sending.send(
                    tx, subject, json={"total": 5}, keys=["order-1", "order-2"], tags=["eu"],
                    properties={"a": "b"}, order_key="order-1", expires_in="1h",
                )  # fmt: skip
            (message,) = await consumer.pull(timeout=60)
            async with message:
                assert (message.json(), message.keys, message.tags) == ({"total": 5}, ("order-1", "order-2"), ("eu",))
                assert message.properties == {"content-type": "application/json", "a": "b"}
                assert message.order_key == "order-1"
    await engine.dispose()


def test_with_a_client_without_asyncio_a_thread_sends(sqlite: sa.Engine, broker_url: str) -> None:
    with (
        qmq.connect_sync(broker_url) as client,
        Outbox(client) as sending,
        client.subscribe("by-thread", group="by-thread") as consumer,
    ):
        with sqlite.begin() as tx:
            sending.send(tx, "by-thread", b"1", delay="1ms")
        with Session(sqlite) as session, session.begin():
            sending.send(session, "by-thread", b"2")
        bodies = set()
        while len(bodies) < 2:
            for message in consumer.pull(timeout=60):
                with message:
                    bodies.add(message.body)
    assert bodies == {b"1", b"2"}
    with sqlite.begin() as tx, pytest.raises(UsageError, match="closed"):
        sending.send(tx, "by-thread", b"3")


def test_an_asyncio_client_needs_its_loop(sqlite: sa.Engine) -> None:
    with sqlite.begin() as tx, pytest.raises(UsageError, match="connect_sync"):
        Outbox(qmq.connect("qmq://127.0.0.1:1")).send(tx, "shop.order", b"...")


def test_without_the_extra_it_says_how_to_install_it() -> None:
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sqlalchemy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import qmq.sql
from qmq.errors import MissingExtra
try:
    qmq.sql.Outbox
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == 'qmq.sql needs sqlalchemy: pip install "qmq[sql]"\n'
    assert issubclass(MissingExtra, UsageError)
