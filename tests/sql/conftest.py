"""Databases for tests: real servers, which start with the first test that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import broker_process
from tests.sql.servers import Database, MariaDB, PostgreSQL, sqlite_database


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A server of PostgreSQL, one for all tests."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """A server of MariaDB, one for all tests."""
    with MariaDB() as server:
        yield server


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty database of each kind, in turn."""
    if request.param == "sqlite":
        return sqlite_database(tmp_path)
    server: MariaDB | PostgreSQL = request.getfixturevalue(request.param)
    return server.database()


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker, one for all tests: each has subjects of its own."""
    with broker_process(tmp_path_factory.mktemp("sql-broker")) as broker:
        yield broker.url
