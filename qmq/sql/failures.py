"""The errors of databases, as those of QMQ."""

from __future__ import annotations

from typing import Final

from qmq.errors import DatabaseFailed

_MISSING: Final = ("no such table", "does not exist", "doesn't exist")
_MOST_TEXT: Final = 500
_LOCK_WAIT_S: Final = 5


def database_failed(error: BaseException) -> DatabaseFailed:
    """Return the error of a driver as one of QMQ."""
    text = " ".join(str(error).split())[:_MOST_TEXT]
    advice = ""
    if is_missing_table(text):
        advice = "; make the tables: `qmq sql ddl` prints them, qmq.sql.create_tables(engine) makes them"
    return DatabaseFailed(f"the database says: {text}{advice}")


def mysql_settings(is_mariadb: bool, lease: float) -> dict[str, int]:
    """Return the settings of a session that ends a relay's transactions after its *lease*, and its waits for locks."""
    name = "idle_transaction_timeout" if is_mariadb else "wait_timeout"
    return {name: max(1, int(lease)), "innodb_lock_wait_timeout": _LOCK_WAIT_S}


def is_missing_table(text: str) -> bool:
    """Return whether a text of a database says that a table of QMQ is missing."""
    return "qmq_" in text and any(words in text.lower() for words in _MISSING)
