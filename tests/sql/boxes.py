"""What tests of outbox and inbox share: a sender that is no broker, and relays that end by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from qmq.sql import create_tables
from qmq.sql.databases import ConnectionExecutor, EngineDatabase
from qmq.sql.relay import Relay
from qmq.sql.rows import OutboxRow
from tests.sql.servers import Database

HOUR_US = 3_600_000_000


def engine_with_tables(database: Database) -> sa.Engine:
    """An engine whose database has the tables of outbox and inbox, and one of orders."""
    engine = sa.create_engine(database.url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
    return engine


class RecordingSender:
    """Keeps what it is given, with *errors* for some bodies."""

    def __init__(self, errors: dict[bytes, BaseException] | None = None, most: int = 500) -> None:
        self.most = most
        self.errors = errors or {}
        self.sent: list[bytes] = []
        self.tries: list[list[OutboxRow]] = []
        #: Called with the rows before they count as sent.
        self.before: Callable[[Sequence[OutboxRow]], None] = lambda rows: None

    async def send(self, rows: Sequence[OutboxRow]) -> list[BaseException | None]:
        await asyncio.sleep(0)
        self.tries.append(list(rows))
        self.before(rows)
        outcomes = [self.errors.get(row.body) for row in rows]
        self.sent += [row.body for row, error in zip(rows, outcomes, strict=True) if error is None]
        return outcomes


def relay_of(engine: sa.Engine, sender: RecordingSender, **options: float) -> Relay:
    return Relay(EngineDatabase(engine), sender, **options)  # type: ignore[arg-type]


def drain(engine: sa.Engine, sender: RecordingSender, **options: float) -> bool:
    """Have a new relay send what waits."""
    return asyncio.run(relay_of(engine, sender, **options).drain())


def states(engine: sa.Engine) -> dict[bytes, int]:
    """The state of each row by its body."""
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT body, state FROM qmq_outbox ORDER BY id")).fetchall()
    return {bytes(body): state for body, state in rows}


def executor_of(connection: sa.Connection) -> ConnectionExecutor:
    return ConnectionExecutor(connection.execution_options(
        **({} if connection.dialect.name == "sqlite" else {"isolation_level": "READ COMMITTED"})
    ))  # fmt: skip
