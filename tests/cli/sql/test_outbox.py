"""`qmq outbox`, as from a shell: the relay, what waits, what was refused, and what is wrong with a database."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import qmq
from qmq.sql import Outbox
from tests.broker_process import broker_process
from tests.cli.commands import qmq as run
from tests.cli.commands import qmq_process
from tests.sql.boxes import RecordingSender, drain, engine_with_tables
from tests.sql.servers import sqlite_database

outbox = Outbox()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = engine_with_tables(sqlite_database(tmp_path))
    yield engine
    engine.dispose()


@pytest.fixture
def db(engine: sa.Engine) -> str:
    return engine.url.render_as_string()


def write(engine: sa.Engine, *bodies: bytes) -> None:
    with engine.begin() as tx:
        for body in bodies:
            outbox.send(tx, "shop.order", body, key="k")


def test_a_relay_sends_serves_metrics_and_ends_by_sigterm(engine: sa.Engine, db: str, tmp_path: Path) -> None:
    write(engine, b"1", b"2")
    with (
        broker_process(tmp_path / "data") as broker,
        qmq_process(
            "outbox", "relay", "--db", db, "--server", broker.url, "--metrics-listen", "127.0.0.1:0",
            "--log-format", "json",
        ) as relay,
        qmq.connect_sync(broker.url) as client,
        client.subscribe("shop.order", group="relayed") as consumer,
    ):  # fmt: skip
        assert relay.stdout is not None
        assert relay.stderr is not None
        ready = relay.stdout.readline().decode()
        assert ready.startswith("ready, metrics on http://127.0.0.1:")
        bodies: list[bytes] = []
        while len(bodies) < 2:
            for message in consumer.pull(timeout=60):
                with message:
                    bodies.append(message.body)
        assert bodies == [b"1", b"2"]
        url = ready.split()[-1]
        text = b""
        while b"qmq_outbox_sent_rows_total 2\n" not in text or b"qmq_outbox_ready_rows 0\n" not in text:
            text = urllib.request.urlopen(url, timeout=60).read()
        assert b"qmq_outbox_database_up 1" in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("metrics", "else"), timeout=60)
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(60) == 0
        lines = [json.loads(line) for line in relay.stderr.read().splitlines()]
    assert [line["message"] for line in lines if line["logger"] == "qmq.sql"][-1] == "2 rows were sent"


def test_a_relay_that_waits_for_its_broker_ends_by_sigterm(db: str) -> None:
    with qmq_process("outbox", "relay", "--db", db, "--server", "qmq://127.0.0.1:1") as relay:
        assert relay.stderr is not None
        assert b"waiting for one" in relay.stderr.readline()
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(60) == 0


def test_status_and_retry(engine: sa.Engine, db: str) -> None:
    assert run("outbox", "status", "--db", db).output == "0\t\t0\t0\n"
    write(engine, b"1", b"bad", b"2")
    drain(engine, RecordingSender({b"bad": qmq.MessageTooLarge("over 4 MiB")}))
    write(engine, b"3")
    shown = json.loads(run("outbox", "status", "--db", db, "--json").output)
    (parked,) = shown.pop("parked_rows")
    assert shown.pop("oldest") is not None
    assert shown == {"ready": 1, "parked": 1, "sent": 2}
    assert parked.pop("created_at") is not None
    assert parked == {"id": 2, "subject": "shop.order", "reason": "message_too_large: over 4 MiB"}
    failed = run("outbox", "retry", "1", "--db", db)
    assert (failed.exit_code, failed.stdout) == (1, "0 rows will be sent again\n")
    assert "1 row is not parked" in failed.stderr
    assert run("outbox", "retry", "2", "--db", db).output == "1 row will be sent again\n"
    assert json.loads(run("outbox", "retry", "--all", "--db", db, "--json").output) == {"retried": 0}
    assert run("outbox", "retry", "--db", db).exit_code == 2


@pytest.mark.parametrize(
    ("url", "code", "reason"),
    [
        ("nonsense", 2, "no URL of a database"),
        ("oracle://host/db", 2, "works on PostgreSQL, MariaDB, MySQL and SQLite"),
        ("postgresql+asyncpg://host/db", 2, "needs asyncpg: install this driver"),
        ("sqlite:////nowhere/shop.db", 1, "unable to open database file"),
        ("sqlite://", 1, "make the tables"),
        ("postgresql+psycopg://nobody@127.0.0.1:1/shop", 1, "the database says:"),
    ],
)
def test_a_bad_database_is_one_line(url: str, code: int, reason: str) -> None:
    for command in (["outbox", "status"], ["outbox", "relay", "--server", "qmq://127.0.0.1:1"]):
        done = run(*command, "--db", url)
        assert done.exit_code == code, done.output
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_bad_options_are_one_line(db: str) -> None:
    for option, reason in (
        (["--lease", "1s"], "at least 10 s"),
        (["--metrics-listen", "here"], "HOST:PORT"),
        (["--metrics-listen", "192.0.2.1:1"], "cannot listen"),
    ):
        done = run("outbox", "relay", "--db", db, "--server", "qmq://127.0.0.1:1", *option)
        assert done.exit_code in (1, 2)
        assert reason in done.stderr
    assert run("outbox", "status").exit_code == 2


def test_the_tables_are_printed(engine: sa.Engine) -> None:
    printed = run("sql", "ddl", "--dialect", "postgresql").output
    assert printed.startswith("CREATE TABLE qmq_inbox (")
    assert printed.endswith("INSERT INTO qmq_sql_version (version) VALUES (1);\n")
    assert run("sql", "ddl", "--dialect", "db2").exit_code == 2
