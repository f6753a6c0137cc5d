"""The inbox for SQLAlchemy: the work of a message is committed once, however often the message comes."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, overload

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from qmq import Message, SyncMessage
from qmq.sql.databases import lacks_tables
from qmq.sql.remembering import FORGET, NOTE, NOTE_IN_MYSQL, InboxRules

_NOTE: Final = sa.text(NOTE)
_NOTE_IN_MYSQL: Final = sa.text(NOTE_IN_MYSQL)
_FORGET: Final = sa.text(FORGET)


class Inbox(InboxRules):
    """Remembers, in the transaction of the work, which messages a group has worked on.

        inbox = qmq.sql.Inbox(group="billing")
        async with message, engine.begin() as tx:
            if await inbox.first_time(tx, message):
                ...  # the work, in the same transaction

    *keep*: how long a message is remembered; it must be longer than a message may come again. ``check`` compares it
    with the settings of the group. ``qmq outbox relay`` deletes what is older.
    """

    @overload
    def first_time(self, tx: sa.Connection | Session, message: Message | SyncMessage | str) -> bool: ...

    @overload
    def first_time(
        self, tx: AsyncConnection | AsyncSession, message: Message | SyncMessage | str
    ) -> Coroutine[Any, Any, bool]: ...

    def first_time(
        self, tx: sa.Connection | Session | AsyncConnection | AsyncSession, message: Message | SyncMessage | str
    ) -> bool | Coroutine[Any, Any, bool]:
        """Note a message, by one INSERT in the transaction of *tx*; return False if its work was committed before.

        If the transaction is rolled back, so is the note: the next attempt is the first time again. A second consumer
        with the same message waits for the first one's transaction. *message* may be its id. Await the call for a
        Connection or Session of asyncio. Raises DatabaseFailed where the table is missing, and errors of SQLAlchemy.
        """
        values = self.values_of(message)
        if isinstance(tx, AsyncConnection | AsyncSession):
            return tx.run_sync(_note, values)
        return _note(tx, values)

    @overload
    def forget(self, tx: sa.Connection | Session, message: Message | SyncMessage | str) -> bool: ...

    @overload
    def forget(
        self, tx: AsyncConnection | AsyncSession, message: Message | SyncMessage | str
    ) -> Coroutine[Any, Any, bool]: ...

    def forget(
        self, tx: sa.Connection | Session | AsyncConnection | AsyncSession, message: Message | SyncMessage | str
    ) -> bool | Coroutine[Any, Any, bool]:
        """Have the work of a message done again when it comes again, as after ``admin.resend``; return whether it was
        remembered.
        """
        values = self.values_of(message)
        del values["expires"]
        if isinstance(tx, AsyncConnection | AsyncSession):
            return tx.run_sync(_forget, values)
        return _forget(tx, values)


def _note(tx: sa.Connection | Session, values: dict[str, Any]) -> bool:
    connection = tx.connection() if isinstance(tx, Session) else tx
    is_mysql = connection.dialect.name in ("mysql", "mariadb")
    try:
        return connection.execute(_NOTE_IN_MYSQL if is_mysql else _NOTE, values).rowcount == 1
    except SQLAlchemyError as error:
        problem = lacks_tables(error)
        if problem is not None:
            raise problem from error
        raise


def _forget(tx: sa.Connection | Session, values: dict[str, Any]) -> bool:
    connection = tx.connection() if isinstance(tx, Session) else tx
    return connection.execute(_FORGET, values).rowcount == 1
