"""The tables as models, so that Django makes them. Programs use ``Outbox`` and ``Inbox``; admins may look at these."""

from __future__ import annotations

from django.db import models


class OutboxMessage(models.Model):  # type: ignore[misc]  # Django has no types
    """A message that waits, was sent, or can never be sent."""

    id = models.BigAutoField(primary_key=True)
    uid = models.CharField(max_length=32)
    shard = models.SmallIntegerField()
    state = models.SmallIntegerField()
    subject = models.CharField(max_length=200)
    body = models.BinaryField()
    options = models.TextField(null=True)
    created_at_us = models.BigIntegerField()
    attempted_at_us = models.BigIntegerField(null=True)
    sent_at_us = models.BigIntegerField(null=True)
    reason = models.TextField(null=True)

    class Meta:
        db_table = "qmq_outbox"
        indexes = [models.Index(fields=["state", "shard", "id"], name="qmq_outbox_state")]  # noqa: RUF012

    def __str__(self) -> str:
        return f"{self.subject} ({self.id})"


class OutboxShard(models.Model):  # type: ignore[misc]
    """A shard: rows that one relay sends at a time."""

    shard = models.SmallIntegerField(primary_key=True)
    owner = models.CharField(max_length=64, null=True)
    lease_until_us = models.BigIntegerField(default=0)
    claimed_at_us = models.BigIntegerField(default=0)
    claimed_to = models.BigIntegerField(default=0)

    class Meta:
        db_table = "qmq_outbox_shards"

    def __str__(self) -> str:
        return f"shard {self.shard}"


class InboxMessage(models.Model):  # type: ignore[misc]
    """A message whose work was committed. Raw SQL writes it: its key is that of the database, of two columns."""

    id = models.BigAutoField(primary_key=True)
    group_name = models.CharField(max_length=200)
    message_id = models.CharField(max_length=32)
    expires_at_us = models.BigIntegerField(db_index=True)

    class Meta:
        db_table = "qmq_inbox"
        constraints = [models.UniqueConstraint(fields=["group_name", "message_id"], name="qmq_inbox_once")]  # noqa: RUF012

    def __str__(self) -> str:
        return f"{self.group_name} {self.message_id}"


class TablesVersion(models.Model):  # type: ignore[misc]
    """The version of the tables."""

    version = models.IntegerField(primary_key=True)

    class Meta:
        db_table = "qmq_sql_version"

    def __str__(self) -> str:
        return str(self.version)
