"""A database of Django, as a relay works on it; its calls block, so they are made in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

from django.db import Error, connections

from qmq.errors import InvalidOption
from qmq.sql.failures import database_failed, mysql_settings
from qmq.sql.listen import Listener
from qmq.sql.relay import OpenDatabase
from qmq.sql.shards import Executor

T = TypeVar("T")

VENDORS: Final = ("postgresql", "mysql", "sqlite")
_NAME: Final = re.compile(r"(?<!:):([a-z_]+)")
_SKIPPING_MARIADB: Final = (10, 6)
_SKIPPING_MYSQL: Final = (8, 0, 1)


@lru_cache(maxsize=64)
def for_django(statement: str) -> str:
    """Return a statement with the names of its values as Django writes them."""
    return _NAME.sub(r"%(\1)s", statement)


class DjangoExecutor:
    """Runs statements on a connection of Django."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.dialect: str = connection.vendor
        self.skips_locked = _skips_locked(connection)

    def rows(self, statement: str, **values: Any) -> Sequence[Sequence[Any]]:
        """Return the rows of a query."""
        with self._connection.cursor() as cursor:
            cursor.execute(for_django(statement), values)
            return list(cursor.fetchall())

    def change(self, statement: str, **values: Any) -> int:
        """Run a statement that changes rows; return how many."""
        with self._connection.cursor() as cursor:
            cursor.execute(for_django(statement), values)
            return int(cursor.rowcount)

    def change_plain(self, statement: str) -> int:
        """Run a statement without values, which will not come again."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.rowcount)

    def commit(self) -> None:
        """End the transaction."""
        self._connection.commit()

    def rollback(self) -> None:
        """Undo the transaction."""
        self._connection.rollback()


def _skips_locked(connection: Any) -> bool:
    if connection.vendor == "postgresql":
        return True
    if connection.vendor == "mysql":
        least = _SKIPPING_MARIADB if connection.mysql_is_mariadb else _SKIPPING_MYSQL
        return tuple(connection.mysql_version) >= least
    return False


class DjangoDatabase:
    """A database of Django by its alias. Its thread has a connection of its own."""

    def __init__(self, using: str = "default") -> None:
        if connections[using].vendor not in VENDORS:
            raise InvalidOption(
                f"the outbox works on PostgreSQL, MariaDB, MySQL and SQLite, and not on {connections[using].vendor}"
            )
        self._using = using
        self._thread = ThreadPoolExecutor(1, "qmq-outbox")

    @asynccontextmanager
    async def connect(self, lease: float) -> AsyncIterator[OpenDatabase]:
        """Open a connection. Raises DatabaseFailed."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._open, lease)
        try:
            yield self
        finally:
            await asyncio.shield(loop.run_in_executor(self._thread, self._close))

    async def run(self, action: Callable[[Executor], T]) -> T:
        """Run *action* with the connection. Raises DatabaseFailed."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, action)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # the connection is used until then
            raise

    def _open(self, lease: float) -> None:
        connection = connections[self._using]
        try:
            connection.ensure_connection()
            connection.set_autocommit(False)
            with connection.cursor() as cursor:
                if connection.vendor == "postgresql":
                    cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED")
                elif connection.vendor == "mysql":
                    cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
                    for name, value in mysql_settings(connection.mysql_is_mariadb, lease).items():
                        cursor.execute(f"SET SESSION {name} = {value}")
            connection.commit()
        except Error as error:
            self._close()
            raise database_failed(error) from error

    def _close(self) -> None:
        try:
            connections[self._using].close()
        except Error:
            pass

    def _guarded(self, action: Callable[[Executor], T]) -> T:
        connection = connections[self._using]
        try:
            return action(DjangoExecutor(connection))
        except Error as error:
            try:
                connection.rollback()
            except Error:
                pass
            raise database_failed(error) from error


@contextmanager
def _driver_connection(using: str) -> Iterator[Any]:
    connection = connections[using].copy()
    connection.connect()
    try:
        yield connection.connection
    finally:
        connection.close()


def listener_of(using: str) -> Callable[[Callable[[], object]], Listener] | None:
    """Return what makes a listener for a database; None for one that tells nothing."""
    if connections[using].vendor != "postgresql":
        return None
    return partial(Listener, partial(_driver_connection, using))
