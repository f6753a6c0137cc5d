"""The shop's database: prices, payments, reminders that were sent, and sales. One SQLite file for all programs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

#: Prices in cents with which a new database begins.
FIRST_PRICES = {"lamp": 4900, "chair": 12900, "teapot": 2400}

TABLES = """
    CREATE TABLE IF NOT EXISTS prices (item TEXT PRIMARY KEY, cents INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS payments (order_id TEXT PRIMARY KEY, cents INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS reminders (order_id TEXT PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS sales (order_id TEXT PRIMARY KEY, item TEXT NOT NULL, cents INTEGER NOT NULL);
"""


class Store:
    """The tables. A primary key makes each write idempotent: a message that comes twice changes nothing."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Open the database at *path* (default: SHOP_DB, else shop.db); make it if there is none."""
        self._db = sqlite3.connect(
            path or os.environ.get("SHOP_DB", "shop.db"), timeout=30, isolation_level=None, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(TABLES)
        self._db.executemany("INSERT OR IGNORE INTO prices VALUES (?, ?)", FIRST_PRICES.items())

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def prices(self) -> dict[str, int]:
        """Return the price of each item in cents."""
        return dict(self._db.execute("SELECT item, cents FROM prices ORDER BY item"))

    def set_price(self, item: str, cents: int) -> None:
        """Change the price of an item."""
        self._db.execute("INSERT OR REPLACE INTO prices VALUES (?, ?)", (item, cents))

    def charge(self, order_id: str, cents: int) -> bool:
        """Record a payment; return False if this order was paid before. The order's id is the idempotency key."""
        return self._db.execute("INSERT OR IGNORE INTO payments VALUES (?, ?)", (order_id, cents)).rowcount == 1

    def is_paid(self, order_id: str) -> bool:
        """Return whether an order is paid."""
        return self._db.execute("SELECT 1 FROM payments WHERE order_id = ?", (order_id,)).fetchone() is not None

    def payments(self) -> list[tuple[str, int]]:
        """Return all payments: order and cents."""
        return self._db.execute("SELECT order_id, cents FROM payments ORDER BY order_id").fetchall()

    def remind(self, order_id: str) -> bool:
        """Record that the customer was reminded; return False if this was done before."""
        return self._db.execute("INSERT OR IGNORE INTO reminders VALUES (?)", (order_id,)).rowcount == 1

    def record_sales(self, sales: Iterable[tuple[str, str, int]]) -> None:
        """Record sales (order, item, cents) in one transaction; those that were recorded before stay as they are."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR IGNORE INTO sales VALUES (?, ?, ?)", sales)

    def revenue(self) -> dict[str, int]:
        """Return what was sold of each item, in cents."""
        return dict(self._db.execute("SELECT item, sum(cents) FROM sales GROUP BY item ORDER BY item"))
