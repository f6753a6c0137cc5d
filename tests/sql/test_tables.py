"""The tables: made at once, printed for a migration tool, and the same both ways."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from qmq.errors import InvalidOption
from qmq.sql import create_tables, ddl, metadata
from qmq.sql.shards import KNOWN_VERSION, check_tables
from qmq.sql.tables import TABLES_VERSION
from tests.sql.boxes import executor_of
from tests.sql.servers import Database


def columns_of(engine: sa.Engine) -> dict[str, list[tuple[str, str, bool]]]:
    found = sa.inspect(engine)
    return {
        table: [(column["name"], str(column["type"]), column["nullable"]) for column in found.get_columns(table)]
        + [(str(index["name"]), str(index["column_names"]), False) for index in found.get_indexes(table)]
        for table in sorted(metadata.tables)
    }


def test_what_is_printed_makes_what_is_made(database: Database) -> None:
    engine = sa.create_engine(database.url)
    create_tables(engine)
    create_tables(engine)  # again, which changes nothing
    with engine.connect() as connection:
        check_tables(executor_of(connection))
    made = columns_of(engine)
    metadata.drop_all(engine)
    with engine.begin() as connection:
        for statement in ddl(engine.dialect.name).split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    with engine.connect() as connection:
        check_tables(executor_of(connection))
    assert columns_of(engine) == made
    engine.dispose()


async def test_they_are_made_by_asyncio_too(database: Database) -> None:
    engine = create_async_engine(database.async_url)
    await create_tables(engine)
    async with engine.begin() as connection:
        await create_tables(connection)
        count = await connection.scalar(sa.text("SELECT count(*) FROM qmq_outbox_shards"))
    await engine.dispose()
    assert count == 16


def test_a_connection_makes_them_in_its_transaction(database: Database) -> None:
    engine = sa.create_engine(database.url)
    with engine.begin() as connection:
        create_tables(connection)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT version FROM qmq_sql_version")) == TABLES_VERSION == KNOWN_VERSION
    engine.dispose()


def test_other_databases_are_refused() -> None:
    with pytest.raises(InvalidOption, match="postgresql, mysql, sqlite"):
        ddl("oracle")
