"""The databases that a relay works on, by SQLAlchemy: with an engine, or with one of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from qmq.errors import DatabaseFailed, InvalidOption, MissingExtra
from qmq.sql.failures import database_failed, is_missing_table, mysql_settings
from qmq.sql.listen import Listener
from qmq.sql.relay import OpenDatabase, RelayDatabase
from qmq.sql.shards import Executor

T = TypeVar("T")

_DIALECTS: Final = ("postgresql", "mysql", "mariadb", "sqlite")
#: The first versions that can skip locked rows.
_SKIPPING_MARIADB: Final = (10, 6)
_SKIPPING_MYSQL: Final = (8, 0, 1)


@lru_cache(maxsize=64)
def _text(statement: str) -> sa.TextClause:
    return sa.text(statement)


class ConnectionExecutor:
    """Runs statements on a connection of SQLAlchemy."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        dialect = connection.dialect
        self.dialect = "mysql" if dialect.name == "mariadb" else dialect.name
        self.skips_locked = _skips_locked(dialect)

    def rows(self, statement: str, **values: Any) -> Sequence[Sequence[Any]]:
        """Return the rows of a query."""
        return self._connection.execute(_text(statement), values).fetchall()

    def change(self, statement: str, **values: Any) -> int:
        """Run a statement that changes rows; return how many."""
        return self._connection.execute(_text(statement), values).rowcount

    def change_plain(self, statement: str) -> int:
        """Run a statement without values, which will not come again."""
        return self._connection.exec_driver_sql(statement).rowcount

    def commit(self) -> None:
        """End the transaction."""
        self._connection.commit()

    def rollback(self) -> None:
        """Undo the transaction."""
        self._connection.rollback()


def _skips_locked(dialect: sa.Dialect) -> bool:
    if dialect.name == "postgresql":
        return True
    if dialect.name in ("mysql", "mariadb"):
        version = dialect.server_version_info or ()
        is_mariadb: bool = getattr(dialect, "is_mariadb", False)
        return tuple(version) >= (_SKIPPING_MARIADB if is_mariadb else _SKIPPING_MYSQL)
    return False


def _prepare(connection: sa.Connection, lease: float) -> None:
    """Have the database end transactions of this connection that stand still for the lease."""
    for name, value in _session_settings(connection, lease).items():
        connection.exec_driver_sql(f"SET SESSION {name} = {value}")
    connection.rollback()


def _restore(connection: sa.Connection) -> None:
    if not connection.closed:
        for name in _session_settings(connection, 1):
            connection.exec_driver_sql(f"SET SESSION {name} = DEFAULT")
        connection.rollback()


def _session_settings(connection: sa.Connection, lease: float) -> dict[str, int]:
    """Return settings of MariaDB and MySQL; PostgreSQL has its own within each transaction."""
    dialect = connection.dialect
    if dialect.name not in ("mysql", "mariadb"):
        return {}
    is_mariadb: bool = getattr(dialect, "is_mariadb", False)
    return mysql_settings(is_mariadb, lease)


def _isolation(engine: sa.Engine) -> dict[str, Any]:
    return {} if engine.dialect.name == "sqlite" else {"isolation_level": "READ COMMITTED"}


def failed(error: SQLAlchemyError) -> DatabaseFailed:
    """Return an error of SQLAlchemy as one of QMQ."""
    return database_failed(getattr(error, "orig", None) or error)


def lacks_tables(error: SQLAlchemyError) -> DatabaseFailed | None:
    """Return the error to raise where a table of QMQ is missing; None where it is something else."""
    problem = failed(error)
    return problem if is_missing_table(str(problem)) else None


@contextmanager
def driver_connection(engine: sa.Engine) -> Iterator[Any]:
    """Open a connection of the driver, which is closed at the end."""
    raw = engine.raw_connection()
    try:
        yield raw.driver_connection
    finally:
        raw.invalidate()


def listener_of(engine: sa.Engine | AsyncEngine) -> Callable[[Callable[[], object]], Listener] | None:
    """Return what makes a listener for *engine*; None for a database that tells nothing."""
    if isinstance(engine, AsyncEngine) or engine.dialect.driver not in ("psycopg", "psycopg2"):
        return None
    return partial(Listener, partial(driver_connection, engine))


class _OpenEngine:
    def __init__(self, connection: sa.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread

    async def run(self, action: Callable[[Executor], T]) -> T:
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, _guarded, action, self._connection)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # the connection is used until then
            raise


def _guarded(action: Callable[[Executor], T], connection: sa.Connection) -> T:
    try:
        return action(ConnectionExecutor(connection))
    except SQLAlchemyError as error:
        try:
            connection.rollback()
        except SQLAlchemyError:
            connection.invalidate()
        raise failed(error) from error


class EngineDatabase:
    """A database by an engine of SQLAlchemy; its calls block, so they are made in a thread."""

    def __init__(self, engine: sa.Engine) -> None:
        _check_dialect(engine.dialect.name)
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "qmq-outbox")

    @asynccontextmanager
    async def connect(self, lease: float) -> AsyncIterator[OpenDatabase]:
        """Open a connection. Raises DatabaseFailed."""
        loop = asyncio.get_running_loop()

        def opened() -> sa.Connection:
            try:
                connection = self._engine.connect().execution_options(**_isolation(self._engine))
                _prepare(connection, lease)
            except SQLAlchemyError as error:
                raise failed(error) from error
            return connection

        def close(connection: sa.Connection) -> None:
            try:
                _restore(connection)
                connection.close()
            except SQLAlchemyError:
                connection.invalidate()
                connection.close()

        connection = await loop.run_in_executor(self._thread, opened)
        try:
            yield _OpenEngine(connection, self._thread)
        finally:
            await asyncio.shield(loop.run_in_executor(self._thread, close, connection))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


class _OpenAsyncEngine:
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def run(self, action: Callable[[Executor], T]) -> T:
        return await self._connection.run_sync(lambda connection: _guarded(action, connection))


class AsyncEngineDatabase:
    """A database by an asyncio engine of SQLAlchemy."""

    def __init__(self, engine: AsyncEngine) -> None:
        _check_dialect(engine.dialect.name)
        self._engine = engine

    @asynccontextmanager
    async def connect(self, lease: float) -> AsyncIterator[OpenDatabase]:
        """Open a connection. Raises DatabaseFailed."""
        try:
            connection = await self._engine.connect()
        except (SQLAlchemyError, OSError) as error:
            raise failed(error) if isinstance(error, SQLAlchemyError) else DatabaseFailed(str(error)) from error
        try:
            try:
                await connection.execution_options(**_isolation(self._engine.sync_engine))
                await connection.run_sync(_prepare, lease)
            except SQLAlchemyError as error:
                raise failed(error) from error
            yield _OpenAsyncEngine(connection)
        finally:
            try:
                await connection.run_sync(_restore)
                await connection.close()
            except SQLAlchemyError:
                await connection.invalidate()
                await connection.close()

    def close(self) -> None:
        """Do nothing: the engine belongs to the program."""


def database_of(engine: sa.Engine | AsyncEngine) -> RelayDatabase:
    """Return the database of an engine, for one relay."""
    return AsyncEngineDatabase(engine) if isinstance(engine, AsyncEngine) else EngineDatabase(engine)


def engine_of(url: str) -> sa.Engine | AsyncEngine:
    """Return an engine for a URL of SQLAlchemy; one of asyncio where its driver is. Raises InvalidOption."""
    driver = ""
    try:
        parsed = sa.make_url(url)
        driver = parsed.drivername
        _check_dialect(parsed.get_backend_name())
        if parsed.get_dialect().is_async:
            return create_async_engine(parsed, pool_pre_ping=True)
        return sa.create_engine(parsed, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{driver} needs {error.name}: install this driver") from error
    except (ArgumentError, NoSuchModuleError) as error:
        raise InvalidOption(
            f"{url!r:.80} is no URL of a database: give one of SQLAlchemy, as postgresql+psycopg://user@host/shop, "
            "mysql+pymysql://user@host/shop or sqlite:///shop.db"
        ) from error


def _check_dialect(name: str) -> None:
    if name not in _DIALECTS:
        raise InvalidOption(f"the outbox works on PostgreSQL, MariaDB, MySQL and SQLite, and not on {name!r:.40}")
