"""The shop's database: prices, payments, reminders that were sent, and sales. One SQLite file for all programs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import sqlalchemy as sa

import qmq.sql

#: Prices in cents with which a new database begins.
FIRST_PRICES = {"lamp": 4900, "chair": 12900, "teapot": 2400}

TABLES = """
    CREATE TABLE IF NOT EXISTS prices (item TEXT PRIMARY KEY, cents INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS payments (order_id TEXT PRIMARY KEY, cents INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS reminders (order_id TEXT PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS sales (order_id TEXT PRIMARY KEY, item TEXT NOT NULL, cents INTEGER NOT NULL);
"""


class Store:
    """The tables, and those of the outbox and the inbox. ``engine.begin()`` begins a transaction."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Open the database at *path* (default: SHOP_DB, else shop.db); make it if there is none."""
        path = path or os.environ.get("SHOP_DB", "shop.db")
        self.engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        with self.engine.begin() as tx:
            tx.exec_driver_sql("BEGIN IMMEDIATE")  # two programs may begin at once
            for table in TABLES.split(";\n")[:-1]:
                tx.exec_driver_sql(table)
            qmq.sql.create_tables(tx)
            for item, cents in FIRST_PRICES.items():
                tx.exec_driver_sql("INSERT OR IGNORE INTO prices VALUES (?, ?)", (item, cents))

    def close(self) -> None:
        """Close the database."""
        self.engine.dispose()

    def prices(self) -> dict[str, int]:
        """Return the price of each item in cents."""
        with self.engine.connect() as tx:
            rows = tx.exec_driver_sql("SELECT item, cents FROM prices ORDER BY item")
            return {row.item: row.cents for row in rows}

    def set_price(self, tx: sa.Connection, item: str, cents: int) -> None:
        """Change the price of an item."""
        tx.exec_driver_sql("INSERT OR REPLACE INTO prices VALUES (?, ?)", (item, cents))

    def charge(self, tx: sa.Connection, order_id: str, cents: int) -> bool:
        """Record a payment; return False if this order was paid before: the customer may have ordered twice."""
        return tx.exec_driver_sql("INSERT OR IGNORE INTO payments VALUES (?, ?)", (order_id, cents)).rowcount == 1

    def is_paid(self, order_id: str) -> bool:
        """Return whether an order is paid."""
        with self.engine.connect() as tx:
            rows = tx.exec_driver_sql("SELECT 1 FROM payments WHERE order_id = ?", (order_id,))
            return rows.fetchone() is not None

    def payments(self) -> list[tuple[str, int]]:
        """Return all payments: order and cents."""
        with self.engine.connect() as tx:
            rows = tx.exec_driver_sql("SELECT order_id, cents FROM payments ORDER BY order_id")
            return [(order_id, cents) for order_id, cents in rows]

    def remind(self, order_id: str) -> bool:
        """Record that the customer was reminded; return False if this was done before."""
        with self.engine.begin() as tx:
            return tx.exec_driver_sql("INSERT OR IGNORE INTO reminders VALUES (?)", (order_id,)).rowcount == 1

    def record_sales(self, sales: Iterable[tuple[str, str, int]]) -> None:
        """Record sales (order, item, cents) in one transaction; those that were recorded before stay as they are."""
        with self.engine.begin() as tx:
            tx.exec_driver_sql("INSERT OR IGNORE INTO sales VALUES (?, ?, ?)", list(sales))

    def revenue(self) -> dict[str, int]:
        """Return what was sold of each item, in cents."""
        with self.engine.connect() as tx:
            rows = tx.exec_driver_sql("SELECT item, sum(cents) AS cents FROM sales GROUP BY item ORDER BY item")
            return {row.item: row.cents for row in rows}
