"""The outbox for SQLAlchemy: a message is a row in the program's own transaction, so both happen or neither."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack, overload

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from qmq import Client, Duration, SyncClient
from qmq.durations import seconds_of
from qmq.errors import InvalidOption, UsageError
from qmq.sql.databases import database_of, lacks_tables
from qmq.sql.guests import GuestRelay
from qmq.sql.listen import CHANNEL
from qmq.sql.rows import NOTIFY_EVERY_S, Body, OutboxOptions, new_row, new_transaction

_MARK: Final = "qmq_outbox"
_COLUMNS: Final = ("uid", "shard", "state", "subject", "body", "options", "created_at_us")
#: As text it is half as much work as an insert() of SQLAlchemy.
_INSERT: Final = sa.text(
    f"INSERT INTO qmq_outbox ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"
)
#: The sync engines of engines that were seen, so that their commits wake relays.
_watched: weakref.WeakSet[sa.Engine] = weakref.WeakSet()
_guests: weakref.WeakKeyDictionary[sa.Engine, weakref.WeakSet[GuestRelay]] = weakref.WeakKeyDictionary()


class Outbox:
    """Messages that are sent if, and only if, the transaction commits that they were written in.

        outbox = qmq.sql.Outbox()
        with engine.begin() as tx:
            tx.execute(orders.insert(), ...)
            outbox.send(tx, "shop.order.created", json={"id": "order-4421"}, key="order-4421")

    ``qmq outbox relay`` sends them. With a *client* this process sends them as well, at once after the commit; both
    together send each once. The process begins with the first message; a block (``with``, or ``async with`` for an
    asyncio client) or ``close`` ends it. *keep*: how long rows that are sent stay in the table.
    """

    def __init__(self, client: Client | SyncClient | None = None, *, keep: Duration = "1d") -> None:
        self._client = client
        self._keep = seconds_of("keep", keep)
        self._guests: dict[sa.Engine, GuestRelay] = {}
        self._lock = threading.Lock()
        self._notified_at = 0.0
        self._is_closed = False

    @overload
    def send(
        self, tx: sa.Connection | Session, subject: str, body: Body | None = None, **options: Unpack[OutboxOptions]
    ) -> str: ...

    @overload
    def send(
        self, tx: AsyncConnection | AsyncSession, subject: str, body: Body | None = None,
        **options: Unpack[OutboxOptions],
    ) -> Coroutine[Any, Any, str]: ...  # fmt: skip

    def send(
        self, tx: sa.Connection | Session | AsyncConnection | AsyncSession, subject: str, body: Body | None = None,
        **options: Unpack[OutboxOptions],
    ) -> str | Coroutine[Any, Any, str]:  # fmt: skip
        """Write one message as a row, by one INSERT, in the transaction of *tx*; return the row's id in the outbox.

            outbox.send(session, "shop.order.created", b"...", key="order-4421")
            await outbox.send(async_session, "shop.reminder", b"...", delay="2h")

        *tx* is a Connection or a Session of SQLAlchemy; await the call for one of asyncio. The options are those of
        ``Client.send``; ``delay`` and ``expires_in`` count from now. A row in a savepoint that is rolled back is not
        sent. Messages of one ``order_key``, else of one key (the first), are sent in the order in which their
        transactions committed; those without a key in their order within the transaction.

        Raises InvalidName, InvalidOption, UsageError and TypeError before it writes; DatabaseFailed where the table is
        missing, and errors of SQLAlchemy.
        """
        if isinstance(tx, AsyncConnection | AsyncSession):
            return self._send_async(tx, subject, body, options)
        connection = _connection_of(tx)
        uid = self._insert(connection, subject, body, options)
        self._begin(connection.engine, connection.engine)
        return uid

    async def _send_async(
        self, tx: AsyncConnection | AsyncSession, subject: str, body: Body | None, options: OutboxOptions
    ) -> str:
        engine: sa.Engine | None = None

        def insert(sync_tx: sa.Connection | Session) -> str:
            nonlocal engine
            connection = _connection_of(sync_tx)
            engine = connection.engine
            return self._insert(connection, subject, body, options)

        uid = await tx.run_sync(insert)
        assert engine is not None
        self._begin(engine, AsyncEngine(engine))
        return uid

    def _insert(self, connection: sa.Connection, subject: str, body: Body | None, options: OutboxOptions) -> str:
        _watch(connection.engine)
        transaction = connection.info.get(_MARK)
        if transaction is None:
            transaction = connection.info[_MARK] = new_transaction()
        row = new_row(subject, body, transaction=transaction, **options)
        try:
            connection.execute(_INSERT, row._asdict())
        except SQLAlchemyError as error:
            problem = lacks_tables(error)
            if problem is not None:
                raise problem from error
            raise
        if self._client is None and connection.dialect.name == "postgresql":
            self._notify(connection)
        return row.uid

    def _notify(self, connection: sa.Connection) -> None:
        now = time.monotonic()
        if now >= self._notified_at + NOTIFY_EVERY_S:
            self._notified_at = now
            connection.exec_driver_sql(f"NOTIFY {CHANNEL}")

    # --- sending from this process ------------------------------------------------------------------------------------

    def _begin(self, engine: sa.Engine, given: sa.Engine | AsyncEngine) -> None:
        """Have this process send what it commits, if it has a client."""
        client = self._client
        if client is None:
            return
        guest = self._guests.get(engine)
        if guest is not None and guest.lives:
            return
        if isinstance(given, AsyncEngine) and isinstance(client, SyncClient):
            raise InvalidOption("an outbox with a client of connect_sync needs an Engine, not one of asyncio")
        with self._lock:
            guest = self._guests.get(engine)
            if guest is not None and guest.lives:
                return
            if self._is_closed:
                raise UsageError("the outbox is closed; make another one")
            guest = self._guests[engine] = GuestRelay(client, partial(database_of, given), self._keep)
            _guests.setdefault(engine, weakref.WeakSet()).add(guest)

    def close(self) -> None:
        """Send what this process has committed, and end; rows that wait on are left to a relay."""
        self._is_closed = True
        for guest in self._guests.values():
            guest.close()

    async def aclose(self) -> None:
        """As ``close``, for an outbox with an asyncio client."""
        self._is_closed = True
        for guest in self._guests.values():
            await guest.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _connection_of(tx: object) -> sa.Connection:
    if isinstance(tx, sa.Connection):
        return tx
    if isinstance(tx, Session):
        return tx.connection()
    raise TypeError(
        f"tx must be a Connection or a Session of SQLAlchemy, or one of asyncio, not {type(tx).__name__}; "
        "for Django there is qmq.sql.django"
    )


def _watch(engine: sa.Engine) -> None:
    """Have commits on an engine wake the relays of this process."""
    if engine in _watched:
        return
    _watched.add(engine)
    for name in ("commit", "commit_twophase"):
        event.listen(engine, name, _committing)
    for name in ("rollback", "rollback_twophase"):
        event.listen(engine, name, _forget)


def _committing(connection: sa.Connection, *_: object) -> None:
    """The commit follows at once: relays look for its rows for a moment."""
    if connection.info.pop(_MARK, None) is None:
        return
    for guest in tuple(_guests.get(connection.engine, ())):
        guest.wake()


def _forget(connection: sa.Connection, *_: object) -> None:
    if not connection.invalidated:
        connection.info.pop(_MARK, None)
