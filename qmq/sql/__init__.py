"""QMQ beside a database: an outbox and an inbox in its tables, so that no message is lost or doubled between the two.

outbox, inbox = qmq.sql.Outbox(), qmq.sql.Inbox(group="billing")
with engine.begin() as tx:
    tx.execute(orders.insert(), ...)
    outbox.send(tx, "shop.order.created", json=order, key="order-4421")

Needs the extra: ``pip install "qmq[sql]"``, and the driver of the database. ``qmq.sql.django`` is the same for Django,
and needs no SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qmq.errors import MissingExtra

if TYPE_CHECKING:
    from qmq.sql.inbox import Inbox
    from qmq.sql.outbox import Outbox
    from qmq.sql.tables import create_tables, ddl, metadata

__all__ = ["Inbox", "Outbox", "create_tables", "ddl", "metadata"]

_PLACES: Final = {
    "Inbox": "qmq.sql.inbox",
    "Outbox": "qmq.sql.outbox",
    "create_tables": "qmq.sql.tables",
    "ddl": "qmq.sql.tables",
    "metadata": "qmq.sql.tables",
}

if not TYPE_CHECKING:  # a type checker would accept every name because of it

    def __getattr__(name: str) -> Any:
        place = _PLACES.get(name)
        if place is None:
            raise AttributeError(f"module 'qmq.sql' has no attribute {name!r}")
        from importlib import import_module

        try:
            value = globals()[name] = getattr(import_module(place), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "qmq":
                raise
            raise MissingExtra(f'qmq.sql needs {error.name}: pip install "qmq[sql]"') from error
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
