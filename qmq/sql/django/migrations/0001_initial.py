"""The tables of version 1: those that ``qmq sql ddl`` prints, as Django makes them."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from qmq.sql.rows import SHARDS
from qmq.sql.shards import KNOWN_VERSION


def add_rows(apps: Any, schema_editor: Any) -> None:
    """Insert the rows that are there from the beginning."""
    alias = schema_editor.connection.alias
    shard, version = apps.get_model("qmq", "OutboxShard"), apps.get_model("qmq", "TablesVersion")
    shard.objects.using(alias).bulk_create(
        [shard(shard=number, lease_until_us=0, claimed_at_us=0, claimed_to=0) for number in range(SHARDS)]
    )
    version.objects.using(alias).create(version=KNOWN_VERSION)


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Makes the tables."""

    initial = True
    dependencies: list[tuple[str, str]] = []  # noqa: RUF012
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("uid", models.CharField(max_length=32)),
                ("shard", models.SmallIntegerField()),
                ("state", models.SmallIntegerField()),
                ("subject", models.CharField(max_length=200)),
                ("body", models.BinaryField()),
                ("options", models.TextField(null=True)),
                ("created_at_us", models.BigIntegerField()),
                ("attempted_at_us", models.BigIntegerField(null=True)),
                ("sent_at_us", models.BigIntegerField(null=True)),
                ("reason", models.TextField(null=True)),
            ],
            options={"db_table": "qmq_outbox"},
        ),
        migrations.CreateModel(
            name="OutboxShard",
            fields=[
                ("shard", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("owner", models.CharField(max_length=64, null=True)),
                ("lease_until_us", models.BigIntegerField(default=0)),
                ("claimed_at_us", models.BigIntegerField(default=0)),
                ("claimed_to", models.BigIntegerField(default=0)),
            ],
            options={"db_table": "qmq_outbox_shards"},
        ),
        migrations.CreateModel(
            name="InboxMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("group_name", models.CharField(max_length=200)),
                ("message_id", models.CharField(max_length=32)),
                ("expires_at_us", models.BigIntegerField(db_index=True)),
            ],
            options={"db_table": "qmq_inbox"},
        ),
        migrations.CreateModel(
            name="TablesVersion",
            fields=[("version", models.IntegerField(primary_key=True, serialize=False))],
            options={"db_table": "qmq_sql_version"},
        ),
        migrations.AddIndex(
            model_name="outboxmessage",
            index=models.Index(fields=["state", "shard", "id"], name="qmq_outbox_state"),
        ),
        migrations.AddConstraint(
            model_name="inboxmessage",
            constraint=models.UniqueConstraint(fields=["group_name", "message_id"], name="qmq_inbox_once"),
        ),
        migrations.RunPython(add_rows, migrations.RunPython.noop),
    ]
