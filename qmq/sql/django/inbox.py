"""The inbox for Django: the work of a message is committed once, however often the message comes."""

from __future__ import annotations

from django.db import Error, connections

from qmq import Duration, Message, SyncMessage
from qmq.errors import UsageError
from qmq.sql.django.databases import for_django
from qmq.sql.failures import database_failed, is_missing_table
from qmq.sql.remembering import FORGET, NOTE, NOTE_IN_MYSQL, InboxRules


class DjangoInbox(InboxRules):
    """Remembers, in the transaction of the work, which messages a group has worked on.

        inbox = qmq.sql.django.Inbox("billing")
        with message, transaction.atomic():
            if inbox.first_time(message):
                ...  # the work

    *keep* and ``check`` are those of ``qmq.sql.Inbox``; *using* is the alias of the database.
    """

    def __init__(self, group: str, *, using: str = "default", keep: Duration = "30d") -> None:
        super().__init__(group, keep=keep)
        self._using = using

    def first_time(self, message: Message | SyncMessage | str) -> bool:
        """Note a message, by one INSERT in the transaction that is open; return False if its work was committed before.

        Raises UsageError outside of ``transaction.atomic()``, DatabaseFailed where the table is missing.
        """
        connection = connections[self._using]
        if not connection.in_atomic_block:
            raise UsageError("the inbox notes a message in the transaction of its work: use transaction.atomic()")
        statement = NOTE_IN_MYSQL if connection.vendor == "mysql" else NOTE
        try:
            with connection.cursor() as cursor:
                cursor.execute(for_django(statement), self.values_of(message))
                return bool(cursor.rowcount == 1)
        except Error as error:
            if is_missing_table(str(error)):
                raise database_failed(error) from error
            raise

    def forget(self, message: Message | SyncMessage | str) -> bool:
        """Have the work of a message done again when it comes again; return whether it was remembered."""
        values = self.values_of(message)
        del values["expires"]
        with connections[self._using].cursor() as cursor:
            cursor.execute(for_django(FORGET), values)
            return bool(cursor.rowcount == 1)
