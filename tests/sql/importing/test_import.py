"""`qmq import`: every row once, whatever ends it; groups begin where their offset was; bad rows and databases."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import qmq
import qmq.testing
from qmq.errors import DatabaseFailed
from qmq.sql.importing import run as importing
from qmq.sql.importing.rows import RowColumns
from qmq.sql.importing.run import ImportRun
from qmq.sql.importing.source import RowSource
from qmq.sql.importing.state import ImportState, ImportStateFile
from tests.cli.commands import qmq as command
from tests.sql.importing.tables import CLAIMED, commands_of, execute, fill_by_priority
from tests.sql.servers import Database, MariaDB

_TWO_GROUPS = ("--group-offsets", "SELECT 'a', 10 UNION ALL SELECT 'b', 20")
MAIL = "SELECT id, body, subject, priority FROM mail"


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[qmq.testing.LocalBroker]:
    monkeypatch.chdir(tmp_path)
    with qmq.testing.broker() as broker:
        yield broker


def fill(path: Path, rows: int, *, subjects: int = 1) -> str:
    """Make a table of mails in SQLite; return its URL."""
    url = f"sqlite:///{path / 'mail.db'}"
    values = ", ".join(
        f"({number}, 'b{number}', 'mail.s{number % subjects}', '{('low', 'normal', 'high')[number % 3]}')"
        for number in range(1, rows + 1)
    )
    table = "CREATE TABLE mail (id INTEGER PRIMARY KEY, body TEXT, subject TEXT, priority TEXT)"
    execute(url, table, f"INSERT INTO mail VALUES {values}")
    return url


def imported(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Run an import; return its summary."""
    done = command("import", *arguments, "--json", server=os.environ["QMQ_SERVER"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def failed(*arguments: str, code: int = 1) -> str:
    """Run an import that fails; return what it says."""
    done = command("import", *arguments, server=os.environ["QMQ_SERVER"])
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    return done.stderr


def stored(subject: str = "") -> list[qmq.StoredMessage]:
    with qmq.connect_sync() as client:
        return list(client.find(subject, limit=None))


def row_ids(subject: str = "") -> list[str]:
    return [message.properties["import-id"] for message in stored(subject)]


def test_every_row_becomes_a_message_with_its_columns(broker: qmq.testing.LocalBroker, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    execute(
        url,
        "CREATE TABLE q (id INTEGER PRIMARY KEY, topic TEXT, data BLOB, k1 TEXT, k2 TEXT, tag TEXT, entity TEXT, "
        "at TIMESTAMP, host TEXT, extra TEXT)",
        "INSERT INTO q VALUES (7, 'shop.a', x'ff00', 'o-1', 'u-2', 'eu, vip', NULL, '2026-01-31 12:00:00', 'h', "
        """'{"tenant": "t", "n": 4, "none": null}')""",
        "INSERT INTO q VALUES (9, 'shop.b', 'größe', NULL, '', NULL, 'e-1', NULL, NULL, NULL)",
    )
    summary = imported(
        "--db", url, "--query", "SELECT * FROM q WHERE topic LIKE 'shop.%';", "--subject-column", "topic",
        "--body", "data",
        "--key", "k1,k2", "--tags", "tag", "--order-key", "entity", "--time", "at", "--properties", "host",
        "--json-properties", "extra", "--name", "q",
    )  # fmt: skip
    assert (summary["imported"], summary["imported_now"], summary["rejected"], summary["late"]) == (2, 2, 0, 0)
    first, second = stored()
    assert (first.subject, first.body, first.keys, first.tags) == ("shop.a", b"\xff\x00", ("o-1", "u-2"), ("eu", "vip"))
    assert first.properties == {
        "import": "q", "import-id": "7", "host": "h", "tenant": "t", "n": "4", "time": "2026-01-31 12:00:00",
    }  # fmt: skip
    assert (second.subject, second.body, second.keys, second.tags) == ("shop.b", "größe".encode(), (), ())
    assert (second.order_key, second.properties) == ("e-1", {"import": "q", "import-id": "9"})


def test_a_repeated_import_sends_what_came_since(broker: qmq.testing.LocalBroker, tmp_path: Path) -> None:
    url = fill(tmp_path, 2_500)
    options = ("--db", url, "--query", MAIL, "--subject", "mail")
    assert imported(*options)["imported_now"] == 2_500
    again = imported(*options)
    assert (again["imported"], again["imported_now"]) == (2_500, 0)
    execute(url, "INSERT INTO mail VALUES (3000, 'new', 'x', NULL)")
    assert imported(*options)["imported_now"] == 1
    assert row_ids() == [*map(str, range(1, 2_501)), "3000"]
    assert sorted(path.suffix for path in tmp_path.glob("import-*")) == [".state"]


def test_a_priority_that_comes_later_is_imported_too(broker: qmq.testing.LocalBroker, tmp_path: Path) -> None:
    url = fill(tmp_path, 9)
    execute(url, "UPDATE mail SET priority = 'high'")
    options = ("--db", url, "--query", MAIL, "--subject", "mail", "--priority", "priority",
               "--group-offsets", "SELECT 'a', 3, 'high' UNION ALL SELECT 'b', 5, 'high'")  # fmt: skip
    assert imported(*options)["imported"] == 6
    execute(url, "INSERT INTO mail VALUES (1000, 'x', 's', 'low'), (1001, 'x', 's', NULL)")
    assert imported(*options, "--dry-run")["imported_now"] == 2
    assert imported(*options)["imported_now"] == 2
    later = ["low:1000", "1001"]
    assert sorted(taken("b", "mail")) == sorted([f"high:{number}" for number in range(6, 10)] + later)
    assert sorted(taken("a", "mail")) == sorted([f"high:{number}" for number in range(4, 10)] + later)
    execute(url, "ALTER TABLE mail RENAME TO old", "CREATE TABLE mail AS SELECT * FROM old",
            "INSERT INTO mail VALUES (NULL, 'x', 's', 'low')")  # fmt: skip
    assert "1 row has NULL in column id" in failed(*options, code=2)


class Killed(BaseException):
    """As if the process were gone."""


def run_until(url: str, path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run an import that ends at its n-th step, before or after the state is written, or a chunk is stored."""
    steps, flush, save = 0, qmq.SyncClient.flush, ImportStateFile.save

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == fails_at:
            raise Killed

    def saved(file: ImportStateFile, state: ImportState) -> None:
        step()
        save(file, state)
        step()

    def flushed(client: qmq.SyncClient) -> None:
        flush(client)
        step()

    with monkeypatch.context() as patch:
        patch.setattr(ImportStateFile, "save", saved)
        patch.setattr(qmq.SyncClient, "flush", flushed)
        columns = RowColumns(subject_column="subject", priority="priority")
        source = RowSource(url, MAIL, columns)
        run = ImportRun(
            source, columns, "kills", query="q", state=ImportStateFile(path / "state"), rejected=path / "rejected"
        )
        try:
            run.run(os.environ["QMQ_SERVER"], "SELECT 'g', 10, 'low' UNION ALL SELECT 'h', 40, 'high'", ["mail."],
                    allow_repeats=True)  # fmt: skip
        except Killed:
            return False
        finally:
            source.close()
    return True


def test_whatever_step_it_ends_at_each_row_is_sent_once(
    broker: qmq.testing.LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows come between two runs, so chunks have other bounds then."""
    url = fill(tmp_path, 120, subjects=3)
    monkeypatch.setattr(importing, "CHUNK_ROWS", 7)
    dice, last, runs = random.Random(5), 120, 0
    while not run_until(url, tmp_path, dice.randrange(1, 12), monkeypatch):
        runs += 1
        if last < 150:
            last += 1
            execute(url, f"INSERT INTO mail VALUES ({last}, 'late', 'mail.s0', 'high')")
    assert runs > 10
    found = Counter(row_ids())
    assert set(found.values()) == {1}
    with sa.create_engine(url).connect() as connection:
        rows = connection.exec_driver_sql("SELECT id, priority FROM mail").all()
    # Both groups are through with none of the normal rows; h lacks all low ones, and g all high ones.
    assert set(found) == {f"{priority}:{row_id}" for row_id, priority in rows}


def test_an_import_that_is_killed_while_it_sends_goes_on(broker: qmq.testing.LocalBroker, tmp_path: Path) -> None:
    url = fill(tmp_path, 30_000)
    program = [sys.executable, "-c", "from qmq.cli.main import cli; cli()"]
    options = ["import", "--db", url, "--query", MAIL, "--subject", "mail", "--name", "mails"]
    for kills in (1, 2):
        with subprocess.Popen([*program, *options], cwd=tmp_path, stdout=subprocess.PIPE) as process:
            state = ImportStateFile(tmp_path / "mails.state")
            begun = state.load()
            while process.poll() is None:
                found = state.load()
                if found is not None and found.imported > (begun.imported if begun else 0) + 2_000 * kills:
                    process.send_signal(signal.SIGKILL)
                    break
            process.wait()
    imported(*options[1:])
    assert row_ids() == [*map(str, range(1, 30_001))]


def test_two_runs_at_once_are_refused(
    broker: qmq.testing.LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_CLAIM_S", 0.1)
    with qmq.connect_sync(producer="mails") as client:
        client.send("x", b"")
        assert "mails" in failed("--db", fill(tmp_path, 1), "--query", MAIL, "--subject", "mail", "--name", "mails")


def test_without_its_state_an_import_does_not_begin_anew(broker: qmq.testing.LocalBroker, tmp_path: Path) -> None:
    options = ("--db", fill(tmp_path, 3), "--query", MAIL, "--subject", "mail", "--name", "mails")
    imported(*options)
    (tmp_path / "mails.state").rename(tmp_path / "elsewhere")
    assert "its state mails.state is not there" in failed(*options, code=2)
    assert imported(*options, "--state", "elsewhere")["imported_now"] == 0
    other = (*options[:3], f"{MAIL} WHERE id > 2", *options[4:], "--state", "elsewhere")
    assert "begun with other options" in failed(*other, code=2)
    (tmp_path / "elsewhere").write_text("{}")
    assert "is no state of an import" in failed(*options, "--state", "elsewhere", code=2)


def test_a_row_that_can_be_no_message_ends_the_import_behind_those_before(
    broker: qmq.testing.LocalBroker, tmp_path: Path
) -> None:
    url = fill(tmp_path, 10)
    options = ("--db", url, "--query", MAIL, "--subject-column", "subject", "--priority", "priority", "--name", "mails")
    execute(url, "UPDATE mail SET priority = 'high'", "UPDATE mail SET subject = 'no name' WHERE id = 4")
    said = failed(*options)
    assert "row high:4: " in said
    assert "All rows before it are imported" in said
    assert row_ids() == ["high:1", "high:2", "high:3"]
    failed(*options)  # and stays there
    execute(url, "UPDATE mail SET subject = 'a.name' WHERE id = 4")
    assert imported(*options)["imported"] == 10
    assert sorted(row_ids()) == sorted(f"high:{number}" for number in range(1, 11))


def test_rows_that_can_be_no_message_are_left_out_and_kept_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = fill(tmp_path, 9)
    execute(
        url,
        "UPDATE mail SET subject = NULL WHERE id = 2",
        "UPDATE mail SET body = zeroblob(70000) WHERE id = 3",
        "UPDATE mail SET priority = 'urgent' WHERE id = 5",
        "UPDATE mail SET body = x'fffe' WHERE id = 6",
    )
    options = ("--db", url, "--query", MAIL, "--subject-column", "subject", "--priority", "priority", "--name", "mails")
    with qmq.testing.broker(max_message_bytes="64 KiB"):
        summary = imported(*options, "--on-error", "skip")
        assert (summary["imported"], summary["rejected"], summary["rejected_now"]) == (6, 3, 3)
        assert sorted(row_ids()) == ["high:8", "low:6", "low:9", "normal:1", "normal:4", "normal:7"]
        lines = [json.loads(line) for line in (tmp_path / "mails.rejected").read_text("utf-8").splitlines()]
        assert [(line["id"], line["row"]["id"]) for line in lines] == [(2, 2), (3, 3), (5, 5)]
        assert [word in line["reason"] for word, line in zip(("NULL", "65536", "urgent"), lines, strict=True)] == [
            True
        ] * 3
        again = imported(*options, "--on-error", "skip")
        assert (again["rejected"], again["rejected_now"]) == (3, 0)
        text = command("import", *options, "--on-error", "skip", server=os.environ["QMQ_SERVER"]).stdout
        assert text == (
            "mails: 6 rows imported, 0 of them now, 3 rows left out, see mails.rejected; to go on, repeat it with "
            "mails.state\n"
        )


def test_a_dry_run_looks_at_all_rows_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = fill(tmp_path, 9, subjects=2)
    execute(url, "UPDATE mail SET subject = 'no name' WHERE id = 6")
    options = ("import", "--db", url, "--query", MAIL, "--subject-column", "subject", "--priority", "priority",
               "--dry-run", "--group-offsets", "SELECT 'g', 4, 'low'", "--follow", "mail.", "--name", "m")  # fmt: skip
    done = command(*options, server="qmq://127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stdout == (
        "m: would send 7 rows, 2 to mail.s0 with high priority, 1 to mail.s0, 1 to mail.s1 with high priority, "
        "1 to mail.s1 with low priority, 2 to mail.s1, 1 row can be no message, make groups g\n"
    )
    assert "row 6: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mail.db"]


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def taken(group: str, *prefixes: str) -> list[str]:
    """Return which rows a group gets."""
    with qmq.connect_sync() as client, client.subscribe(*prefixes, group=group) as consumer:
        found = list[str]()
        while messages := consumer.pull(1_000, timeout=0.1 if found else 5):
            for message in messages:
                found.append(message.properties.get("import-id", "other"))
                message.ack()
        return found


def test_groups_begin_where_their_offset_was(broker: qmq.testing.LocalBroker, tmp_path: Path) -> None:
    url = fill(tmp_path, 50)
    offsets = "SELECT 'a' AS g, 20 AS id UNION ALL SELECT 'b', 35 UNION ALL SELECT 'c', 35 UNION ALL SELECT 'd', 50"
    summary = imported("--db", url, "--query", MAIL, "--subject", "mail", "--group-offsets", offsets)
    assert (summary["imported"], summary["groups"]) == (30, ["a", "b", "c", "d"])
    with qmq.connect_sync() as client:
        client.send("mail", b"")
    for group, offset in {"a": 20, "b": 35, "c": 35, "d": 50}.items():
        assert taken(group, "mail") == [*map(str, range(offset + 1, 51)), "other"]


def test_groups_that_exist_or_cross_are_refused_before_anything_is_sent(
    broker: qmq.testing.LocalBroker, tmp_path: Path
) -> None:
    url = fill(tmp_path, 30)
    options = ("--db", url, "--query", MAIL, "--subject", "mail", "--priority", "priority", "--name", "mails")
    crossed = ("--group-offsets", "SELECT 'a', 9, 'high' UNION ALL SELECT 'b', 9, 'low'")
    assert "are each ahead of the other" in failed(*options, *crossed, code=2)
    with qmq.connect_sync() as client, client.subscribe("mail", group="there") as consumer:
        consumer.pull(1, timeout=0.01)
    assert "group there exists already" in failed(*options, "--group-offsets", "SELECT 'there', 9, 'high'", code=2)
    double = "SELECT 'g', 9, 'high' UNION ALL SELECT 'g', 8, 'high'"
    assert "gives two offsets" in failed(*options, "--group-offsets", double, code=2)
    assert "is to give group, id and priority" in failed(*options, "--group-offsets", "SELECT 'g', 9", code=2)
    assert (stored(), list(tmp_path.glob("*.state"))) == ([], [])
    imported(*options, *crossed, "--allow-repeats")
    lacks = {f"{name}:{number}" for number in range(1, 31) for name in [("low", "normal", "high")[number % 3]]}
    a, b = set(taken("a", "mail")), set(taken("b", "mail"))
    assert a >= lacks - {f"high:{number}" for number in range(1, 10)}
    assert b >= lacks - {f"low:{number}" for number in range(1, 10)}


def test_messages_of_others_that_a_group_would_not_get_are_said(
    broker: qmq.testing.LocalBroker, tmp_path: Path
) -> None:
    url = fill(tmp_path, 30)
    options = ("--db", url, "--query", MAIL, "--subject", "mail", *_TWO_GROUPS)
    with qmq.connect_sync() as client:
        client.send("mail", b"before")
        said = failed(*options, code=2)
        assert "others have sent 1 messages to mail, which the groups of --group-offsets would not get" in said
        assert len(stored()) == 1


def test_others_that_begin_in_the_middle_end_the_import_before_the_next_group(
    broker: qmq.testing.LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fill(tmp_path, 30)
    options = ("--db", url, "--query", MAIL, "--subject", "mail", *_TWO_GROUPS)
    with qmq.connect_sync() as client:
        flush, sent = qmq.SyncClient.flush, list[int]()

        def flushed(importer: qmq.SyncClient) -> None:
            flush(importer)
            if not sent:
                sent.append(1)
                client.send("mail", b"meanwhile")

        with monkeypatch.context() as patch:
            patch.setattr(qmq.SyncClient, "flush", flushed)
            assert "others have sent 1 messages to mail" in failed(*options, code=2)
        assert [info.name for info in client.admin.groups()] == ["a"]
    assert imported(*options, "--skip-others")["groups"] == ["a", "b"]
    assert taken("b", "mail") == [str(number) for number in range(21, 31)]
    assert taken("a", "mail") == [*map(str, range(11, 21)), "other", *map(str, range(21, 31))]


def test_a_token_that_may_not_look_at_what_it_sends_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--db", fill(tmp_path, 3), "--query", MAIL, "--subject", "mail", "--name", "mails")
    tokens = {}
    for name, rights in {"blind": [], "seeing": ["--browse", "mail"]}.items():
        made = command("tokens", "create", name, "--produce", "mail", *rights, "--tokens-file", "tokens")
        tokens[name] = made.stdout.split()[-1]
    with qmq.testing.broker(tokens_file=str(tmp_path / "tokens")):
        monkeypatch.setenv("QMQ_TOKEN", tokens["blind"])
        assert "the token may not look at mail" in failed(*options)
        monkeypatch.setenv("QMQ_TOKEN", tokens["seeing"])
        assert imported(*options)["imported_now"] == 3
        assert row_ids("mail") == ["1", "2", "3"]


def test_each_kind_of_database(broker: qmq.testing.LocalBroker, database: Database) -> None:
    """Names in quotes, colons and percent signs in the query, priorities, offsets, and rows that come later."""
    execute(database.url, "CREATE TABLE mail (id INTEGER PRIMARY KEY, body TEXT, prio SMALLINT, at TIMESTAMP)")
    insert = "INSERT INTO mail VALUES ({0}, 'b{0}', {1}, '2026-01-31 12:00:00')"
    execute(database.url, *(insert.format(number, number % 3) for number in range(1, 31)))
    options = (
        "--db", database.url, "--subject", "mail", "--priority", "prio", "--time", "at", "--name", "mail", "--query",
        "SELECT id, body, prio, at FROM mail WHERE at <> '2026-01-31 10:30:00' AND body LIKE 'b%' AND body <> ':x'",
        "--group-offsets", "SELECT 'g' AS g, id, prio FROM mail WHERE id IN (10, 11, 12)",
    )  # fmt: skip
    assert imported(*options)["imported"] == 18
    execute(database.url, insert.format(31, 1))
    assert imported(*options)["imported_now"] == 1
    rows = [f"{number % 3}:{number}" for number in range(13, 32)]
    assert sorted(taken("g", "mail")) == sorted(rows)
    (message,) = (message for message in stored() if message.properties["import-id"] == "2:14")
    assert (message.body, message.priority, message.properties["time"][:10]) == (b"b14", "high", "2026-01-31")


# ---------------------------------------------------------------------------------------------------------------------
# The tables of two queues of MySQL, in MariaDB


def test_a_queue_in_tables_by_priority_moves_as_its_page_says(
    broker: qmq.testing.LocalBroker, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = mariadb.database()
    fill_by_priority(database.url, 30)
    offsets = {"billing": {"high": 30, "middle": 20, "low": 5}, "mail": {"high": 30, "middle": 30, "low": 10}}
    values = ", ".join(
        f"('{group}', {row_id}, '{name}')" for group, own in offsets.items() for name, row_id in own.items()
    )
    execute(database.url, f"INSERT INTO offset_t VALUES {values}", "INSERT INTO resend_low VALUES ('billing', 2, 3)")
    monkeypatch.setenv("QMQ_DB", database.url)
    moves, again = commands_of("import-priorities.md")
    summary = imported(*moves)
    assert summary["imported"] == 10 + 25
    (message,) = (message for message in stored("shop.mail") if message.properties["import-id"] == "low:17")
    assert (message.body, message.key, message.priority) == (b"b17", "k-2", "low")
    assert message.properties["tenant"] == "t-1"
    assert message.properties["source_ip"] == "10.0.0.8"
    assert message.properties["time"] == "2026-01-31T12:00:00.017000"
    # What a group is to get again goes to a subject that it alone follows.
    imported(*again)
    for group, own in offsets.items():
        rows = {f"{name}:{number}" for name, row_id in own.items() for number in range(row_id + 1, 31)}
        assert Counter(taken(group, "shop.mail")) == Counter(rows)
    assert taken("billing", "shop.mail", "shop.mail.again.billing") == ["2", "3"]


def test_a_queue_whose_workers_claim_rows_moves_as_its_page_says(
    broker: qmq.testing.LocalBroker, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = mariadb.database()
    rows = [(biz, status, f"{biz} {number}: {status}") for number in range(4)
            for biz, status in (("Order", "n"), ("order", "run"), ("mail", "y"), ("mail", "n"))]  # fmt: skip
    values = ", ".join(f"('{biz}', 1, '{status}', '{text}', 2, '2026-01-31 12:00:00')" for biz, status, text in rows)
    execute(
        database.url, *CLAIMED,
        f"INSERT INTO queue_t (biz, conn_id, status, data_string, times, update_times) VALUES {values}",
    )  # fmt: skip
    monkeypatch.setenv("QMQ_DB", database.url)
    (moves,) = commands_of("import-claims.md")
    summary = imported(*moves)
    assert summary["imported"] == 12
    assert Counter(message.body.decode() for message in stored()) == Counter(
        text for _, status, text in rows if status != "y"
    )
    assert {message.properties["times"] for message in stored("shop.order")} == {"2"}


def test_rows_that_were_committed_late_are_said(
    broker: qmq.testing.LocalBroker, mariadb: MariaDB, tmp_path: Path
) -> None:
    database = mariadb.database()
    fill_by_priority(database.url, 3)
    options = (
        "--db",
        database.url,
        "--query",
        "SELECT id, body FROM msg_low_t",
        "--subject",
        "mail",
        "--name",
        "mails",
    )
    engine = sa.create_engine(database.url)
    with engine.connect() as early, engine.connect() as late:
        insert = sa.text("INSERT INTO msg_low_t (body, timestamp) VALUES ('x', now())")
        early.execute(insert)  # 4
        late.execute(insert)  # 5
        late.commit()
        assert imported(*options)["imported"] == 4
        early.commit()
    engine.dispose()
    done = command("import", *options, server=broker.url)
    assert done.exit_code == 1
    assert "1 row came into the table behind rows with higher ids, and were not sent" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--query", ""], "--query is empty", 2),
        (["--query", "SELECT 1 AS n"], "no column id; name the column that tells rows apart with --id", 2),
        (["--query", "SELECT 1 AS id"], "the query has no column body; name the column with the body with --body", 2),
        (["--key", "nobody"], "the query has no column nobody, which --key names. It has id, body", 2),
        (["--properties", "body,nobody"], "the query has no column nobody, which --properties names", 2),
        (["--query", "SELECT * FROM nobody"], "--query failed in ", 1),
        (["--query", "DELETE FROM mail"], "--query failed in ", 1),
        (["--query", "SELECT NULL AS id, body FROM mail"], "3 rows have NULL in column id", 2),
        (["--query", "SELECT 1 AS id, body FROM mail"], "two rows have the id 1", 2),
        (["--query", "SELECT 1.5 AS id, body FROM mail"], "is neither a whole number nor a text", 2),
        (["--subject", "no name"], "no name", 2),
        (["--subject-column", "subject"], "give either --subject or --subject-column", 2),
        (["--db", "nothing"], "--db is no URL", 2),
        (["--db", "nobody://x"], "--db is no URL of a database that SQLAlchemy knows", 2),
        (["--db", "mysql+mysqlconnector://u:secret@h/d"], "pip install", 2),
        (["--db", "sqlite:////nobody/here.db"], "failed in sqlite:////nobody/here.db", 1),
        (["--db", "mysql+pymysql://u:secret@127.0.0.1:1/d"], "failed in mysql+pymysql://u:***@127.0.0.1:1/d", 1),
        (["--server", "qmq://127.0.0.1:1"], "127.0.0.1:1", 1),
        (["--server", "127.0.0.1,127.0.0.2"], "an import sends to one broker", 2),
        (["--state", "/nobody/here"], "the state of the import cannot be written to /nobody/here", 1),
        (["--group-offsets", "SELECT 'g'"], "--group-offsets is to give group and id", 2),
        (["--group-offsets", "SELECT NULL, 1"], "a group that is NULL", 2),
        (["--group-offsets", "SELECT 'g', nobody"], "--group-offsets failed", 1),
        (["--group-offsets", "SELECT 'g h', 1"], "g h", 2),
        (["--name", "a/b"], "--name 'a/b' has other characters", 2),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of drivers that do not connect
def test_bad_input_is_said_and_nothing_is_sent(
    shared_broker: qmq.testing.LocalBroker, tmp_path: Path, arguments: list[str], said: str, code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    options = {"--db": fill(tmp_path, 3), "--query": MAIL, "--subject": "mail", "--server": shared_broker.url}
    options |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    done = command("import", *(part for option in options.items() for part in option))
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert said in done.stderr
    assert "secret" not in done.stderr
    assert stored() == []


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[qmq.testing.LocalBroker]:
    with qmq.testing.broker() as broker:
        yield broker


def test_a_connection_that_is_lost_in_the_middle(
    broker: qmq.testing.LocalBroker, mariadb: MariaDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "CHUNK_ROWS", 1_000)
    database = mariadb.database()
    fill_by_priority(database.url, 100)
    query = "SELECT a.id * 1000 + b.id AS id, repeat(a.body, 500) AS body FROM msg_low_t a, msg_high_t b"

    def lose(looked: int) -> None:
        if looked == 2_000:
            with sa.create_engine(database.url).connect() as connection:
                ids = "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
                for (number,) in connection.exec_driver_sql(ids).all():
                    connection.exec_driver_sql(f"KILL {number}")

    columns, state = RowColumns(subject="mail"), ImportStateFile(tmp_path / "state")
    source = RowSource(database.url, query, columns)
    for progress in (lose, None):
        run = ImportRun(source, columns, "mails", query="", state=state, rejected=tmp_path / "rejected",
                        progress=progress)  # fmt: skip
        if progress is not None:
            with pytest.raises(DatabaseFailed, match="--query failed"):
                run.run(broker.url, None, [])
            assert len(row_ids()) >= 2_000
        else:
            assert run.run(broker.url, None, []).imported == 10_000
    source.close()
    assert len(row_ids()) == len(set(row_ids())) == 10_000
