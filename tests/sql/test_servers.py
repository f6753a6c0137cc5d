"""The servers that tests start."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.sql.servers import Database, MariaDB, PostgreSQL, Server, leaking_sockets


async def test_a_database_is_reached_by_both_urls(database: Database) -> None:
    engine = sa.create_engine(database.url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE numbers (number INTEGER)"))
        connection.execute(sa.text("INSERT INTO numbers VALUES (4421)"))
    engine.dispose()
    async_engine = create_async_engine(database.async_url)
    async with async_engine.connect() as async_connection:
        assert await async_connection.scalar(sa.text("SELECT number FROM numbers")) == 4421
    await async_engine.dispose()


@pytest.mark.parametrize("kind", [PostgreSQL, MariaDB])
def test_what_was_committed_survives_a_kill(kind: type[Server]) -> None:
    with kind() as server:
        database = server.database()
        engine = sa.create_engine(database.url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE numbers (number INTEGER)"))
            connection.execute(sa.text("INSERT INTO numbers VALUES (1)"))
        server.kill()
        with leaking_sockets(), pytest.raises(sa.exc.OperationalError):
            engine.connect()
        server.start()
        with engine.begin() as connection:
            assert connection.scalar(sa.text("SELECT number FROM numbers")) == 1
    assert not server.directory.exists()
