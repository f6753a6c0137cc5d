"""The app for Django: a project with its migrations, transactions, an admin command, on each database."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import qmq
from tests.sql.servers import Database

#: A program of a project. Django has one set of settings a process, so it runs in one of its own.
PROGRAM = """
import sys, threading
import django
from django.conf import settings
if {mysql}:
    import pymysql
    pymysql.version_info = (2, 2, 1, "final", 0)  # it is not the mysqlclient that Django asks for
    pymysql.install_as_MySQLdb()
settings.configure(
    DATABASES={{"default": {database}}}, INSTALLED_APPS=["qmq.sql.django"], USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
from django.core.management import call_command
from django.db import connection, transaction
import qmq
from qmq import testing
from qmq.errors import DatabaseFailed, UsageError
from qmq.sql.django import Inbox, Outbox
from qmq.sql.django.models import OutboxMessage

server, subject = sys.argv[1:]
outbox, inbox = Outbox(), Inbox("django")

class Undone(Exception):
    pass

def raises(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")

with transaction.atomic():
    print("no tables:", "qmq sql ddl" in raises(DatabaseFailed, outbox.send, subject, b"1"))
    transaction.set_rollback(True)
call_command("migrate", verbosity=0)
call_command("makemigrations", "qmq", check=True, dry_run=True, verbosity=0)

print("alone:", "transaction.atomic" in raises(UsageError, outbox.send, subject, b"1"))
print("inbox alone:", "transaction.atomic" in raises(UsageError, inbox.first_time, "a"))
with transaction.atomic():
    outbox.send(subject, json={{"total": 5}}, key="order-1", tags=["eu"])
    try:
        with transaction.atomic():
            outbox.send(subject, b"in a savepoint that is rolled back")
            raise Undone
    except Undone:
        pass
try:
    with transaction.atomic():
        outbox.send(subject, b"rolled back")
        raise Undone
except Undone:
    pass
with transaction.atomic():
    outbox.send(subject, b"2")
    outbox.send(subject, b"3")
shards = OutboxMessage.objects.filter(options=None).values("shard").distinct().count()
print("rows:", OutboxMessage.objects.count(), "shards of a transaction:", shards)

message = testing.sync_message(b"1")
with transaction.atomic():
    print("first:", inbox.first_time(message), inbox.first_time(message))
    transaction.set_rollback(True)
with transaction.atomic():
    print("first:", inbox.first_time(message))
with transaction.atomic():
    print("again:", inbox.first_time(message), inbox.forget(message), inbox.first_time(message))

import asyncio
from qmq.sql.django.databases import DjangoDatabase
from qmq.sql.relay import ClientSender, Relay

async def drain():
    async with qmq.connect(server) as client:
        relay = Relay(DjangoDatabase(), ClientSender(client, 60))
        await relay.check()
        await relay.drain()

asyncio.run(drain())
with qmq.connect_sync(server) as client, client.subscribe(subject, group=subject.replace(".", "-")) as consumer:
    bodies = []
    def take(count):
        while len(bodies) < count:
            for each in consumer.pull(timeout=60):
                with each:
                    bodies.append(each.body)
    take(3)
    inner = Outbox(client)
    with transaction.atomic():
        inner.send(subject, b"by this process", keys=["a", "b"])
    take(4)
    inner.close()
    print("bodies:", sorted(bodies))
print("states:", sorted(OutboxMessage.objects.values_list("state", flat=True)))
"""


def settings_of(database: Database) -> dict[str, object]:
    kind = database.url.partition("+")[0].partition(":")[0]
    if kind == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": database.url.removeprefix("sqlite:///")}
    where = database.url.rpartition("=")[2]
    if kind == "postgresql":
        return {"ENGINE": "django.db.backends.postgresql", "NAME": database.name, "USER": "qmq", "HOST": where}
    return {
        "ENGINE": "django.db.backends.mysql", "NAME": database.name, "USER": "root",
        "OPTIONS": {"unix_socket": where},
    }  # fmt: skip


def test_a_project_sends_what_it_commits_and_works_once(database: Database, broker_url: str) -> None:
    subject = f"django.{database.name}-{database.url.partition('+')[0].partition(':')[0]}"
    program = textwrap.dedent(PROGRAM).format(database=settings_of(database), mysql="mysql" in database.url)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, broker_url, subject], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "no tables: True",
        "alone: True",
        "inbox alone: True",
        "rows: 3 shards of a transaction: 1",
        "first: True False",
        "first: True",
        "again: False True True",
        "bodies: [b'2', b'3', b'by this process', b'{\"total\":5}']",
        "states: [1, 1, 1, 1]",
    ]


def test_its_command_sends_until_sigterm(tmp_path: Path, broker_url: str) -> None:
    manage = tmp_path / "manage.py"
    manage.write_text(
        textwrap.dedent(f"""
        import sys
        from django.conf import settings
        settings.configure(
            DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{tmp_path}/db.sqlite3"}}}},
            INSTALLED_APPS=["qmq.sql.django"],
        )
        import django
        django.setup()
        from django.core.management import call_command, execute_from_command_line
        if sys.argv[1] == "prepare":
            call_command("migrate", verbosity=0)
            from django.db import transaction
            from qmq.sql.django import Outbox
            with transaction.atomic():
                Outbox().send("django.command", b"1")
        else:
            execute_from_command_line(sys.argv)
        """)
    )
    subprocess.run([sys.executable, manage, "prepare"], check=True, timeout=120)
    command = [sys.executable, manage, "qmq_outbox_relay", "--server", broker_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        assert relay.stderr is not None
        try:
            assert relay.stdout.readline() == "ready\n"
            with (
                qmq.connect_sync(broker_url) as client,
                client.subscribe("django.command", group="django-command") as consumer,
            ):
                (message,) = consumer.pull(timeout=60)
                message.ack()
        finally:
            relay.terminate()
        assert relay.wait(60) == 0
        assert "1 rows were sent" in relay.stderr.read()
    bad = subprocess.run([*command, "--lease", "1s"], capture_output=True, text=True, timeout=120, check=False)
    assert bad.returncode == 1
    assert "the lease must be at least 10 s" in bad.stderr


def test_a_client_of_asyncio_is_refused() -> None:
    program = """
from django.conf import settings
settings.configure()
import qmq
from qmq.sql.django import Outbox
try:
    Outbox(qmq.connect())
except qmq.InvalidOption as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "connect_sync" in done.stdout
