"""The outbox for Django: a message is a row in the transaction of the program, so both happen or neither."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any, Final, Unpack

from django.db import Error, connections, transaction

from qmq import Duration, SyncClient
from qmq.durations import seconds_of
from qmq.errors import InvalidOption, UsageError
from qmq.sql.django.databases import DjangoDatabase
from qmq.sql.failures import database_failed, is_missing_table
from qmq.sql.guests import GuestRelay
from qmq.sql.listen import CHANNEL
from qmq.sql.rows import NOTIFY_EVERY_S, Body, OutboxOptions, new_row, new_transaction

_COLUMNS: Final = ("uid", "shard", "state", "subject", "body", "options", "created_at_us")
_INSERT: Final = f"INSERT INTO qmq_outbox ({', '.join(_COLUMNS)}) VALUES ({', '.join(['%s'] * len(_COLUMNS))})"
_MARK: Final = "_qmq_transaction"


class DjangoOutbox:
    """Messages that are sent if, and only if, the transaction commits that they were written in.

        outbox = qmq.sql.django.Outbox()
        with transaction.atomic():
            order = Order.objects.create(...)
            outbox.send("shop.order.created", json={"id": order.id}, key=f"order-{order.id}")

    ``manage.py qmq_outbox_relay`` (or ``qmq outbox relay``) sends them. With a *client* of ``connect_sync`` this
    process sends them as well, at once after the commit; both together send each once. *using* is the alias of the
    database, *keep* how long rows that are sent stay in the table.
    """

    def __init__(self, client: SyncClient | None = None, *, using: str = "default", keep: Duration = "1d") -> None:
        if client is not None and not isinstance(client, SyncClient):
            raise InvalidOption("an outbox of Django takes a client of connect_sync")
        self._client = client
        self._using = using
        self._keep = seconds_of("keep", keep)
        self._guest: GuestRelay | None = None
        self._lock = threading.Lock()
        self._notified_at = 0.0

    def send(self, subject: str, body: Body | None = None, **options: Unpack[OutboxOptions]) -> str:
        """Write one message as a row, by one INSERT, in the transaction that is open; return the row's id.

        The options are those of ``Client.send``; ``delay`` and ``expires_in`` count from now. In an inner ``atomic``
        block that is rolled back the row goes too. The order is that of ``qmq.sql.Outbox``. Raises UsageError outside
        of ``transaction.atomic()``, and as ``qmq.sql.Outbox.send``.
        """
        connection = connections[self._using]
        if not connection.in_atomic_block:
            raise UsageError(
                "the outbox sends what a transaction commits: call send within `with transaction.atomic():`, beside "
                "the changes that the message is about"
            )
        row = new_row(subject, body, transaction=self._transaction_of(connection), **options)
        values = [connection.Database.Binary(row.body) if name == "body" else getattr(row, name) for name in _COLUMNS]
        try:
            with connection.cursor() as cursor:
                cursor.execute(_INSERT, values)
                if self._client is None and connection.vendor == "postgresql" and self._is_time_to_notify():
                    cursor.execute(f"NOTIFY {CHANNEL}")
        except Error as error:
            if is_missing_table(str(error)):
                raise database_failed(error) from error
            raise
        if self._client is not None:
            transaction.on_commit(self._sent_soon, using=self._using)
        return row.uid

    def _transaction_of(self, connection: Any) -> int:
        """Return the number of the open transaction, which lasts as long as a hook that Django drops at its end."""
        known: tuple[int, object] | None = getattr(connection, _MARK, None)
        if known is not None and any(hook[1] is known[1] for hook in connection.run_on_commit):
            return known[0]
        number, mark = new_transaction(), partial(setattr, connection, _MARK, None)
        setattr(connection, _MARK, (number, mark))
        transaction.on_commit(mark, using=self._using)
        return number

    def _is_time_to_notify(self) -> bool:
        now = time.monotonic()
        if now < self._notified_at + NOTIFY_EVERY_S:
            return False
        self._notified_at = now
        return True

    def _sent_soon(self) -> None:
        """Have this process send what it has committed."""
        assert self._client is not None
        guest = self._guest
        if guest is None or not guest.lives:
            with self._lock:
                guest = self._guest
                if guest is None or not guest.lives:
                    guest = self._guest = GuestRelay(self._client, partial(DjangoDatabase, self._using), self._keep)
        guest.wake()

    def close(self) -> None:
        """Send what this process has committed, and end; rows that wait on are left to a relay."""
        if self._guest is not None:
            self._guest.close()
