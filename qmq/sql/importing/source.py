"""The rows of a query in a database, read in the order of their ids, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from qmq.errors import DatabaseFailed, InvalidOption, MissingExtra
from qmq.sql.importing.levels import RawPriority, Section
from qmq.sql.importing.rows import Row, RowColumns, RowId

#: Rows that are fetched at once.
FETCHED: Final = 1_000


class RowSource:
    """The rows of a query. Only SELECTs are run."""

    def __init__(self, url: str, query: str, columns: RowColumns) -> None:
        """Connect, and check the columns. Raises InvalidOption, MissingExtra, DatabaseFailed."""
        try:
            parsed = sa.make_url(url)
            self._engine = sa.create_engine(parsed, poolclass=sa.NullPool)
        except (NoSuchModuleError, ArgumentError) as error:
            raise InvalidOption(f"--db is no URL of a database that SQLAlchemy knows: {_text_of(error)}") from None
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"the driver of {url.partition(':')[0]} is not installed: pip install {error.name}"
            ) from error
        #: The URL without its password.
        self.shown_url = parsed.render_as_string(hide_password=True)
        self._query = query.strip().rstrip(";")
        if not self._query:
            raise InvalidOption("--query is empty; give a SELECT")
        self._columns = columns
        self.names = self._names(self._query, "--query")
        columns.check(self.names)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _column(self, name: str) -> str:
        return str(self._engine.dialect.identifier_preparer.quote(name))

    def _of(self, query: str) -> str:
        return f"({_literally(query)}\n) AS qmq_rows"

    @contextmanager
    def _connected(self, what: str) -> Iterator[sa.Connection]:
        """Connect for some SELECTs. Raises DatabaseFailed."""
        try:
            with self._engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                try:
                    yield connection
                except BaseException:
                    _leave_result(driver)
                    connection.invalidate()
                    raise
        except DBAPIError as error:
            raise DatabaseFailed(f"{what} failed in {self.shown_url}: {_text_of(error.orig or error)}") from error
        except SQLAlchemyError as error:
            raise DatabaseFailed(f"{what} failed in {self.shown_url}: {_text_of(error)}") from error

    def _names(self, query: str, option: str) -> list[str]:
        with self._connected(option) as connection:
            return list(connection.execute(sa.text(f"SELECT * FROM {self._of(query)} WHERE 1 = 0")).keys())

    def priorities(self) -> list[RawPriority]:
        """Return the values of the priority column; [None] where there is none."""
        name = self._columns.priority
        if name is None:
            return [None]
        with self._connected("--query") as connection:
            query = f"SELECT DISTINCT {self._column(name)} FROM {self._of(self._query)}"
            return [_plain(value) for (value,) in connection.execute(sa.text(query))]

    def offsets(self, query: str) -> dict[str, dict[RawPriority, RowId]]:
        """Return the offsets that a query says: rows of group, id and, with a priority column, priority.

        Raises InvalidOption, DatabaseFailed.
        """
        width = 2 if self._columns.priority is None else 3
        with self._connected("--group-offsets") as connection:
            result = connection.execute(sa.text(_literally(query.strip().rstrip(";"))))
            if len(result.keys()) != width:
                wanted = "group and id" if width == 2 else "group, id and priority"
                raise InvalidOption(f"--group-offsets is to give {wanted}; it gives {', '.join(result.keys())}")
            rows = [tuple(row) for row in result]
        found: dict[str, dict[RawPriority, RowId]] = {}
        for row in rows:
            group, row_id = _plain(row[0]), _plain(row[1])
            priority = _plain(row[2]) if width == 3 else None
            if group is None:
                raise InvalidOption("--group-offsets gives a group that is NULL")
            own = found.setdefault(str(group), {})
            if priority in own:
                raise InvalidOption(f"--group-offsets gives two offsets of group {group}")
            if row_id is not None:
                own[priority] = row_id
        return found

    def check_ids(self) -> None:
        """Raise InvalidOption if a row has no id: it would be left out."""
        with self._connected("--query") as connection:
            where = f"{self._column(self._columns.id)} IS NULL"
            query = f"SELECT count(*) FROM {self._of(self._query)} WHERE {where}"
            count = connection.execute(sa.text(query)).scalar_one()
        if count:
            rows = "1 row has" if count == 1 else f"{count} rows have"
            raise InvalidOption(f"{rows} NULL in column {self._columns.id}; --id is to tell rows apart")

    def rows(self, section: Section, after: RowId | None) -> Iterator[Row]:
        """Yield the rows of a section behind an id, in the order of ids. Raises DatabaseFailed; InvalidOption where two
        rows have one id.
        """
        condition, values = self._condition(section, after, section.high)
        by_id = self._column(self._columns.id)
        query = f"SELECT * FROM {self._of(self._query)} WHERE {condition} ORDER BY {by_id}"
        before: RowId | None = None
        with self._connected("--query") as connection:
            streamed = connection.execution_options(stream_results=True, yield_per=FETCHED)
            for found in streamed.execute(sa.text(query), values).mappings():
                row: Row = {**found}
                row_id = self._columns.id_of(row)
                if row_id == before:
                    raise InvalidOption(f"two rows have the id {row_id!r}; --id is to tell rows apart")
                before = row_id
                yield row

    def count(self, section: Section, upto: RowId | None) -> int:
        """Return how many rows a section has now, up to an id. Raises DatabaseFailed."""
        condition, values = self._condition(section, section.low, upto)
        with self._connected("--query") as connection:
            query = f"SELECT count(*) FROM {self._of(self._query)} WHERE {condition}"
            return int(connection.execute(sa.text(query), values).scalar_one())

    def _condition(self, section: Section, after: RowId | None, upto: RowId | None) -> tuple[str, Mapping[str, Any]]:
        name = self._column(self._columns.id)
        parts, values = [f"{name} IS NOT NULL"], dict[str, Any]()
        for bound, operator, value in (("qmq_after", ">", after), ("qmq_upto", "<=", upto)):
            if value is not None:
                parts.append(f"{name} {operator} :{bound}")
                values[bound] = value
        if self._columns.priority is not None:
            priority = self._column(self._columns.priority)
            if section.priority is None:
                parts.append(f"{priority} IS NULL")
            else:
                parts.append(f"{priority} = :qmq_priority")
                values["qmq_priority"] = section.priority
        return " AND ".join(parts), values


def _leave_result(driver: Any) -> None:
    """Have PyMySQL leave an unfinished result, which it would else read to its end, or fail at if the connection is
    lost.
    """
    result: Any = getattr(driver, "_result", None)
    if hasattr(result, "unbuffered_active"):
        result.unbuffered_active = False


def _literally(query: str) -> str:
    """Return a query for ``text``, which takes what follows a colon for a parameter."""
    return query.replace(":", "\\:")


def _plain(value: Any) -> Any:
    """Return a value as a state file keeps it: a whole number, a text, or None."""
    if value is None or isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return int(value) if hasattr(value, "to_integral_value") else str(value)


def _text_of(error: BaseException) -> str:
    """Return what a driver says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
