"""The tables of outbox and inbox, for SQLAlchemy: made at once, or printed for a migration tool."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import CreateIndex, CreateTable

from qmq.errors import InvalidOption
from qmq.sql.rows import SHARDS

#: The version of the tables.
TABLES_VERSION: Final = 1
#: The databases for which there are tables, by their names in SQLAlchemy.
DIALECTS: Final = ("postgresql", "mysql", "sqlite")

_ID: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_BYTES: Final = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
_TEXT: Final = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
_OPTIONS: Final[dict[str, Any]] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4", "mariadb_engine": "InnoDB",
                   "mariadb_charset": "utf8mb4"}  # fmt: skip

#: The tables. A program with an Alembic of its own gives this to ``target_metadata``, beside its own.
metadata: Final = sa.MetaData()

OUTBOX: Final = sa.Table(
    "qmq_outbox",
    metadata,
    sa.Column("id", _ID, primary_key=True, autoincrement=True),
    # It names the row to the broker, which stores a row once however often it is sent.
    sa.Column("uid", sa.String(32), nullable=False),
    sa.Column("shard", sa.SmallInteger, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("subject", sa.String(200), nullable=False),
    sa.Column("body", _BYTES, nullable=False),
    sa.Column("options", _TEXT),
    sa.Column("created_at_us", sa.BigInteger, nullable=False),
    # When a send of it failed first, so that the broker may have it or not.
    sa.Column("attempted_at_us", sa.BigInteger),
    sa.Column("sent_at_us", sa.BigInteger),
    sa.Column("reason", _TEXT),
    sa.Index("qmq_outbox_state", "state", "shard", "id"),
    **_OPTIONS,
)
SHARD_TABLE: Final = sa.Table(
    "qmq_outbox_shards",
    metadata,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.String(64)),
    sa.Column("lease_until_us", sa.BigInteger, nullable=False),
    # The claim that is under way: when it began, and the last id of its rows; 0 if there is none.
    sa.Column("claimed_at_us", sa.BigInteger, nullable=False),
    sa.Column("claimed_to", sa.BigInteger, nullable=False),
    **_OPTIONS,
)
INBOX: Final = sa.Table(
    "qmq_inbox",
    metadata,
    sa.Column("group_name", sa.String(200), primary_key=True),
    sa.Column("message_id", sa.String(32), primary_key=True),
    sa.Column("expires_at_us", sa.BigInteger, nullable=False),
    sa.Index("qmq_inbox_expires", "expires_at_us"),
    **_OPTIONS,
)
VERSION_TABLE: Final = sa.Table(
    "qmq_sql_version",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    **_OPTIONS,
)
_SHARD_ROWS: Final = [
    {"shard": shard, "lease_until_us": 0, "claimed_at_us": 0, "claimed_to": 0} for shard in range(SHARDS)
]
_VERSION_ROW: Final = {"version": TABLES_VERSION}


def create_tables(bind: Any) -> Any:
    """Make the tables of outbox and inbox that are not there yet.

    *bind* is an Engine or a Connection of SQLAlchemy, or one of asyncio: then await it.
    """
    if isinstance(bind, AsyncEngine):
        return _create_by_async_engine(bind)
    if isinstance(bind, AsyncConnection):
        return bind.run_sync(_create)
    if isinstance(bind, sa.Engine):
        with bind.begin() as connection:
            return _create(connection)
    return _create(bind)


async def _create_by_async_engine(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(_create)


def _create(connection: sa.Connection) -> None:
    metadata.create_all(connection)
    shards = set(connection.scalars(sa.select(SHARD_TABLE.c.shard)))
    missing = [row for row in _SHARD_ROWS if row["shard"] not in shards]
    if missing:
        connection.execute(SHARD_TABLE.insert(), missing)
    if connection.scalar(sa.select(VERSION_TABLE.c.version)) is None:
        connection.execute(VERSION_TABLE.insert(), [_VERSION_ROW])


def ddl(dialect: str) -> str:
    """Return the statements that make the tables, for one of DIALECTS. Raises InvalidOption."""
    if dialect not in DIALECTS:
        raise InvalidOption(f"there are tables for {', '.join(DIALECTS)}, and not for {dialect!r:.80}")
    speaks = {"postgresql": postgresql.dialect, "mysql": mysql.dialect, "sqlite": sqlite.dialect}[dialect]()
    texts: list[str] = []
    for table in metadata.sorted_tables:
        texts.append(_text_of(CreateTable(table), speaks))
        texts += [
            _text_of(CreateIndex(index), speaks) for index in sorted(table.indexes, key=lambda index: str(index.name))
        ]
    for table, rows in ((SHARD_TABLE, _SHARD_ROWS), (VERSION_TABLE, [_VERSION_ROW])):
        names = ", ".join(rows[0])
        values = ", ".join("(" + ", ".join(str(value) for value in row.values()) + ")" for row in rows)
        texts.append(f"INSERT INTO {table.name} ({names}) VALUES {values};")
    return "\n\n".join(texts) + "\n"


def _text_of(element: sa.schema.DDLElement, dialect: sa.Dialect) -> str:
    text = str(element.compile(dialect=dialect)).strip().replace("\t", "    ").replace(")ENGINE", ") ENGINE")
    return "\n".join(line.rstrip() for line in text.splitlines()) + ";"
