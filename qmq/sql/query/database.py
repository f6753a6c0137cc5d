"""A database of DuckDB in this process, whose tables are those of brokers, of a data directory, or of an archive.

It reads these tables and nothing else: it opens no file and no network, loads no extension, and takes no statement that
changes something. What does not fit into its memory goes to a temporary directory, which is removed at the end.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import duckdb
import pyarrow as pa

from qmq.errors import InvalidOption, QueryFailed
from qmq.sql.query.live import LiveTables
from qmq.sql.query.prefixes import with_bounds
from qmq.sql.query.stored import Damage, StoredMessages
from qmq.sql.query.tables import SCHEMAS, Reader, Table

#: Rows of a batch of the result.
ROWS: Final = 10_000
#: Batches of it that wait for whoever reads it.
_AHEAD: Final = 2
_LOOK_S: Final = 0.1
_SETTINGS: Final = {
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "enable_external_access": "false",
    "python_enable_replacements": "false",
}
#: A table of subjects where no broker is, who would count them.
_SUBJECTS: Final = """
CREATE VIEW subjects AS
SELECT subject, count(*) AS messages,
       CASE WHEN plain = count(*) THEN min(sequence) END AS first_sequence,
       CASE WHEN plain = count(*) THEN max(sequence) + 1 END AS next_sequence,
       NULL::BIGINT AS delayed,
       count(*) FILTER (priority = 'high') AS high, count(*) FILTER (priority = 'low') AS low,
       count(order_key) AS ordered, NULL::VARCHAR AS broker,
FROM messages GROUP BY subject
""".replace("plain", "count(*) FILTER (priority = 'normal' AND order_key IS NULL)")


#: Errors that say that the query is wrong, whatever the tables have.
_OF_THE_QUERY: Final = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.InvalidInputException,
    duckdb.NotImplementedException,
    duckdb.ParserException,
    duckdb.PermissionException,
    duckdb.SyntaxException,
)


class QueryDatabase:
    """The tables of one place, and queries over them. Use it with ``with``."""

    def __init__(
        self, *, server: str | None = None, location: str | None = None, timeout: float = 10.0, memory: str = "1GB"
    ) -> None:
        """Give either *server*, the URL of brokers, or the *location* of a data directory or an archive. *timeout*:
        each broker has so many seconds for each answer. *memory*: what a query may take of it.
        """
        self._failures: list[BaseException] = []
        #: The places that could not be read; their messages are missing.
        self.damages: list[Damage] = []
        #: The count of further places that could not be read.
        self.unreadable = 0
        self._live: LiveTables | None = None
        if server is not None:
            self._live = LiveTables(server, timeout, self.damages.append, self._add_unreadable)
            readers = self._live.readers()
        else:
            assert location is not None
            stored = StoredMessages(location, self.damages.append)
            stored.open()
            readers = {"messages": stored.read}
        self._directory = tempfile.mkdtemp(prefix="qmq-sql-")
        self._connection = self._connect(readers, memory)

    def _connect(self, readers: dict[str, Reader], memory: str) -> duckdb.DuckDBPyConnection:
        settings: dict[str, Any] = {**_SETTINGS, "memory_limit": memory, "temp_directory": self._directory}
        try:
            connection = duckdb.connect(":memory:", config=settings)
            connection.execute("SET TimeZone = 'UTC'")
        except duckdb.Error as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise InvalidOption(f"a query cannot have {memory!r:.80} of memory: {_text_of(error)}") from error
        for name, read in readers.items():
            connection.register(name, Table(name, read, self._failures))
        if "subjects" not in readers:
            connection.execute(_SUBJECTS)
        connection.execute("SET lock_configuration = true")
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and all connections."""
        self._connection.close()
        if self._live is not None:
            self._live.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _add_unreadable(self, count: int) -> None:
        self.unreadable += count

    def run(self, query: str) -> Result:
        """Begin a query, and return its rows as a stream, which is to be closed before the next query.

        Raises InvalidOption for anything but one SELECT over the tables, QueryFailed, and the errors of reading:
        StorageError, ConnectionLost, BrokersMissed, Forbidden and others.
        """
        self._check(query)
        try:
            relation = self._connection.sql(query)  # says what is wrong in the user's own words
            changed = with_bounds(self._connection, query)
            if changed != query:
                relation = self._connection.sql(changed)
        except duckdb.Error as error:
            raise self._error_of(error) from error
        return Result(relation, self._connection.interrupt, self._error_of)

    def _check(self, query: str) -> None:
        """Raise InvalidOption unless the text is one statement that only reads."""
        try:
            statements = self._connection.extract_statements(query)
        except duckdb.Error as error:
            raise self._error_of(error) from error
        if len(statements) != 1:
            raise InvalidOption(f"give one SELECT; these are {len(statements)} statements" if statements else _EMPTY)
        kind = statements[0].type
        if kind != duckdb.StatementType.SELECT:
            raise InvalidOption(f"{kind.name} is refused: queries only read; give a SELECT")

    def _error_of(self, error: BaseException) -> BaseException:
        """Return the error that a query ends with, for one of DuckDB or of Arrow: that of the scan that ended it, if
        there is one.
        """
        if self._failures:
            return self._failures.pop(0)
        text = _text_of(error)
        if isinstance(error, duckdb.CatalogException):
            missing = [name for name in SCHEMAS if f"name {name} does not exist" in text]
            if missing:
                return InvalidOption(f"the table {missing[0]} is that of a running broker; ask it with --server")
            text += f"; the tables are {', '.join(SCHEMAS)}"
        if isinstance(error, duckdb.PermissionException):
            text = f"queries read the tables {', '.join(SCHEMAS)} and nothing else: {text}"
        return InvalidOption(text) if isinstance(error, _OF_THE_QUERY) else QueryFailed(text)


class Result:
    """The rows of a query as a stream. Use it with ``with``; an interrupt ends the query at once."""

    def __init__(
        self, relation: Any, interrupt: Callable[[], None], error_of: Callable[[BaseException], BaseException]
    ) -> None:
        """Wait for the first rows. *interrupt* ends what DuckDB computes. Raises as ``QueryDatabase.run``."""
        self._relation = relation
        self._interrupt = interrupt
        self._error_of = error_of
        self._items: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._ended = threading.Event()
        # DuckDB computes rows without a look at signals, so a thread waits for them.
        self._thread = threading.Thread(target=self._compute, name="qmq-sql", daemon=True)
        try:
            self._thread.start()
            #: The columns.
            self.schema: pa.Schema = self._next()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in batches. Raises as ``QueryDatabase.run``."""
        while (batch := self._next()) is not None:
            yield batch

    def close(self) -> None:
        """End the query, if it still runs."""
        self._ended.set()
        while self._thread.is_alive():
            self._interrupt()
            self._thread.join(_LOOK_S)

    def _next(self) -> Any:
        item = self._items.get()
        if isinstance(item, BaseException):
            raise self._error_of(item) from item
        return item

    def _compute(self) -> None:
        """Put the schema, the batches and None, or an error, where the other thread takes them."""
        try:
            reader = self._relation.to_arrow_reader(ROWS)
            item = reader.schema
            while self._put(item):
                item = next(reader, None)
                if item is None:
                    self._put(None)
                    break
        except BaseException as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        while not self._ended.is_set():
            with suppress(queue.Full):
                self._items.put(item, timeout=_LOOK_S)
                return True
        return False


_EMPTY: Final = "the query is empty; give one SELECT"


def _text_of(error: BaseException) -> str:
    """Return what an error of DuckDB says, without the line of the query that it repeats."""
    return " ".join(str(error).partition("\nLINE ")[0].split()) or type(error).__name__
