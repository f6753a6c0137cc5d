"""Queries over a data directory, archives and brokers: the same rows everywhere, whatever is spared by a filter."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import qmq
import qmq.testing
from qmq.errors import QueryFailed
from qmq.sql.query import stored
from qmq.sql.query.database import QueryDatabase
from qmq.sql.query.stored import wanted_of
from qmq.sql.query.tables import SCHEMAS, Scan
from qmq_spark.read import Wanted
from tests.archive.archives import archive
from tests.archive.orders import rows_in, write_orders
from tests.archive.test_keys import write as write_keys
from tests.certificates import over_tls
from tests.spark.parquet import archives as parquet
from tests.spark.parquet.archives import write_days
from tests.storage.stores import damage

SCHEMA = SCHEMAS["messages"]
Rows = list[tuple[Any, ...]]


def result(database: QueryDatabase, query: str) -> Rows:
    with database.run(query) as rows:
        return [tuple(row.values()) for batch in rows for row in batch.to_pylist()]


def queried(location: Path, query: str) -> Rows:
    with QueryDatabase(location=str(location)) as database:
        found = result(database, query)
        assert database.damages == []
        return found


def plainly(rows: list[dict[str, Any]], query: str) -> Rows:
    """Return the result of a query over rows that lie in memory, from which nothing is spared."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        table = pa.Table.from_pylist(rows, SCHEMA)
        connection.register("everything", table)
        connection.execute("CREATE TABLE messages AS SELECT * FROM everything")
        return [tuple(row.values()) for row in connection.sql(query).to_arrow_table().to_pylist()]


def conditions(rows: list[dict[str, Any]]) -> list[str]:
    """Return conditions of every kind about what is in *rows*, and about what is not."""
    dice = random.Random(4)
    some = dice.choice(rows)
    keyed = next(row for row in rows if row["key"])
    stamp = f"'{some['stored_at'].isoformat()}'"
    return [
        "true",
        "subject LIKE 'hotel.%'",
        "subject LIKE 'hotel.order.p%' OR subject = 'a'",
        "NOT subject LIKE 'hotel.%' AND priority <> 'low'",
        f"subject = '{some['subject']}' AND stored_at >= {stamp}",
        f"stored_at < {stamp} AND subject IN ('a', 'hotel.order.paid', 'nobody.here')",
        f"stored_at = {stamp}",
        f"stored_at > {stamp} AND stored_at < {stamp}",
        f"created_at <= '{some['created_at'].isoformat()}'",
        f"key = '{keyed['key']}'",
        "key IN ('o', 'größe', 'nobody') AND partition = 1",
        "key IS NULL AND partition IN (0, 1)",
        f"message_id = '{some['message_id']}'",
        f"message_id IN ('{some['message_id']}', '{keyed['message_id']}', 'no id', '{'0' * 32}')",
        f"message_id = upper('{some['message_id']}')",
        f"message_id = '{some['message_id']}' AND key = 'nobody'",
        "list_contains(keys, 'größe') AND octet_length(body) > 10",
        "order_key = 'größe' AND sequence % 2 = 0",
        "message_id IN (SELECT message_id FROM messages WHERE subject LIKE 'flight.%')",
    ]


COLUMNS = "* EXCLUDE (properties)"


@pytest.mark.parametrize("where", ["data", "segments", "parquet"])
def test_every_condition_gives_what_it_gives_over_all_rows(tmp_path: Path, where: str) -> None:
    write_orders(tmp_path / "data", 25)
    rows = rows_in(tmp_path / "data")
    if where == "segments":
        archive(tmp_path / "data", tmp_path / where)
    if where == "parquet":
        parquet.archive(tmp_path / "data", tmp_path / where)
    order = "ORDER BY partition, position"
    with QueryDatabase(location=str(tmp_path / where)) as database:
        for condition in conditions(rows):
            query = f"SELECT {COLUMNS} FROM messages WHERE {condition} {order}"
            assert result(database, query) == plainly(rows, query), condition
        whole = f"SELECT properties FROM messages {order}"
        assert result(database, whole) == plainly(rows, whole)
        counts = "SELECT subject, count(*), max(sequence) FROM messages GROUP BY ALL ORDER BY ALL"
        assert result(database, counts) == plainly(rows, counts)
        assert (
            len(result(database, "SELECT count(*) AS n FROM messages AS a JOIN messages AS b USING (message_id)")) == 1
        )


@pytest.mark.parametrize("where", ["data", "archive"])
def test_key_indexes_are_used_for_keys_and_ids(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_keys(tmp_path / "data", with_indexes=True)
    archive(tmp_path / "data", tmp_path / "archive")
    planned, plan = list[int](), stored.plan

    def noted(*arguments: Any) -> Any:
        parts = plan(*arguments)
        planned.append(sum(each.end - each.start for part in parts for each in part))
        return parts

    monkeypatch.setattr(stored, "plan", noted)
    with QueryDatabase(location=str(tmp_path / where)) as database:
        ((some,),) = result(database, "SELECT min(message_id) FROM messages")
        planned.clear()
        assert result(database, "SELECT count(*) > 100 FROM messages") == [(True,)]
        assert result(database, "SELECT count(*) FROM messages WHERE key = 'order-3'") > [(0,)]
        assert result(database, f"SELECT count(*) FROM messages WHERE message_id = '{some}'") == [(1,)]
    whole, of_key, of_id = planned
    assert of_key < whole / 2
    assert of_id < whole / 2


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("subject LIKE 'shop.%'", Wanted(prefixes=("shop.",))),
        ("subject IN ('a', 'b') AND key = 'k'", Wanted(subjects=frozenset("ab"), keys=frozenset("k"))),
        (
            "stored_at >= '1970-01-01 00:00:01' AND stored_at < '1970-01-01 00:00:02'",
            Wanted(stored_from=1_000_000, stored_until=2_000_000),
        ),
        (
            "stored_at > '1970-01-01 00:00:01' AND stored_at <= '1970-01-01 00:00:02'",
            Wanted(stored_from=1_000_000, stored_until=2_000_001),
        ),
        ("created_at = '1970-01-01 00:00:01'", Wanted(created_from=1_000_000, created_until=1_000_001)),
        ("partition = 1 AND message_id = 'x'", Wanted(partitions=frozenset([1]), ids=frozenset("x"))),
        ("stored_at < '1960-01-01'", None),
        ("key IS NULL", Wanted()),
    ],
)
def test_conditions_spare_reading(
    tmp_path: Path, condition: str, wanted: Wanted | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_orders(tmp_path, 2)
    scans = list[Scan]()

    def noted(scan: Scan) -> Wanted | None:
        scans.append(scan)
        return wanted_of(scan)

    monkeypatch.setattr(stored, "wanted_of", noted)
    queried(tmp_path, f"SELECT subject FROM messages WHERE {condition}")
    assert wanted_of(scans[0]) == wanted


def test_only_the_columns_of_a_query_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_orders(tmp_path, 2)
    scans = list[Scan]()
    monkeypatch.setattr(stored, "wanted_of", lambda scan: scans.append(scan) or Wanted())
    queried(tmp_path, "SELECT subject, count(*) FROM messages WHERE partition = 0 GROUP BY ALL")
    assert scans[0].schema.names == ["subject", "partition"]


def test_messages_are_read_while_days_pass_in_an_archive_of_both_forms(tmp_path: Path) -> None:
    write_days(tmp_path / "data", 3, 10)
    parquet.archive(tmp_path / "data", tmp_path / "to")
    write_days(tmp_path / "data", 1, 5, seed=2)
    archive(tmp_path / "data", tmp_path / "to")
    rows = rows_in(tmp_path / "data")
    query = "SELECT message_id FROM messages WHERE stored_at::DATE > '2000-01-01' ORDER BY 1"
    assert queried(tmp_path / "to", query) == plainly(rows, query)


def test_bad_bytes_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    sent = write_orders(tmp_path, 20)
    damage(tmp_path, sent[4], len(sent[4].data) - 1)
    with QueryDatabase(location=str(tmp_path)) as database:
        ((count,),) = result(database, "SELECT count(body) FROM messages")
        assert len(database.damages) == 1
        missing = database.damages[0].messages
        assert missing
        assert count + missing == len(rows_in_all(sent))


def rows_in_all(sent: list[Any]) -> list[None]:
    return [None for batch in sent for _ in range(int.from_bytes(batch.data[16:20], "little"))]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueryDatabase]:
    path = tmp_path_factory.mktemp("refused")
    write_orders(path, 3)
    with QueryDatabase(location=str(path), memory="100MB") as database:
        yield database


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "the query is empty"),
        ("-- nothing", "the query is empty"),
        ("SELEC 1", "Parser Error: syntax error"),
        ("SELECT 1; SELECT 2", "give one SELECT; these are 2 statements"),
        ("INSERT INTO messages VALUES (1)", "INSERT is refused: queries only read"),
        ("UPDATE messages SET subject = 'a'", "UPDATE is refused"),
        ("DELETE FROM messages", "DELETE is refused"),
        ("CREATE TABLE t AS SELECT 1", "CREATE is refused"),
        ("DROP VIEW messages", "DROP is refused"),
        ("WITH t AS (SELECT 1) INSERT INTO messages SELECT * FROM t", "INSERT is refused"),
        ("COPY (SELECT 1) TO '/tmp/qmq-sql-test.csv'", "COPY is refused"),
        ("EXPORT DATABASE '/tmp/qmq-sql-test'", "EXPORT is refused"),
        ("ATTACH '/tmp/qmq-sql-test.db'", "ATTACH is refused"),
        ("INSTALL httpfs", "LOAD is refused"),
        ("LOAD httpfs", "LOAD is refused"),
        ("SET enable_external_access = true", "SET is refused"),
        ("PRAGMA enable_profiling", "refused"),
        ("CALL duckdb_settings()", "CALL is refused"),
        ("EXPLAIN ANALYZE DELETE FROM messages", "EXPLAIN is refused"),
        ("SELECT * FROM read_csv('/etc/passwd')", "read the tables messages, subjects"),
        ("SELECT * FROM read_text('/etc/passwd')", "read the tables messages, subjects"),
        ("SELECT * FROM glob('/*')", "read the tables messages, subjects"),
        ("SELECT * FROM '/etc/passwd'", "the tables are messages, subjects"),
        ("SELECT * FROM read_parquet('http://127.0.0.1/x')", "."),
        ("SELECT * FROM database", "the tables are messages, subjects"),
        ("SELECT * FROM mesages", 'Did you mean "messages"'),
        ("SELECT * FROM groups", "the table groups is that of a running broker"),
        ("SELECT nobody FROM messages", "Binder Error"),
        ("SELECT $1", "Values were not provided"),
    ],
)  # fmt: skip
def test_all_but_reading_the_tables_is_refused(database: QueryDatabase, query: str, said: str) -> None:
    with pytest.raises(qmq.UsageError) as raised:
        result(database, query)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "LINE 1" not in str(raised.value)
    assert result(database, "SELECT count(*) > 0 FROM messages") == [(True,)]


def test_an_error_while_it_runs_ends_the_query(database: QueryDatabase) -> None:
    with pytest.raises(QueryFailed, match="Could not convert"):
        result(database, "SELECT subject::INTEGER FROM messages")
    assert result(database, "SELECT count(*) > 0 FROM messages") == [(True,)]


def test_a_place_without_messages_and_a_wrong_bound_of_memory_are_said(tmp_path: Path) -> None:
    with pytest.raises(qmq.InvalidOption, match="neither a data directory nor an archive"):
        QueryDatabase(location=str(tmp_path))
    with pytest.raises(qmq.StorageFailed, match="no directory"):
        QueryDatabase(location=str(tmp_path / "missing"))
    write_orders(tmp_path, 1)
    with pytest.raises(qmq.InvalidOption, match="memory"):
        QueryDatabase(location=str(tmp_path), memory="much")


def test_a_result_that_is_not_read_to_its_end_is_left(database: QueryDatabase) -> None:
    with database.run("SELECT i FROM range(1000000000000) AS t(i)") as rows:
        assert next(iter(rows)).num_rows
    assert result(database, "SELECT count(*) > 0 FROM messages") == [(True,)]


def test_an_interrupt_ends_a_query_that_has_no_row_yet(
    database: QueryDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(scan: Scan) -> Wanted | None:
        os.kill(os.getpid(), signal.SIGINT)
        return wanted_of(scan)

    monkeypatch.setattr(stored, "wanted_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        result(database, "SELECT count(*) FROM messages, range(1000000000000)")
    monkeypatch.undo()
    assert result(database, "SELECT count(*) > 0 FROM messages") == [(True,)]


def test_times_are_in_utc(database: QueryDatabase) -> None:
    assert result(database, "SELECT current_setting('TimeZone')") == [("UTC",)]


# ---------------------------------------------------------------------------------------------------------------------
# Brokers


@pytest.fixture(scope="module")
def broker() -> Iterator[qmq.testing.LocalBroker]:
    with qmq.testing.broker() as broker, qmq.connect_sync() as client:
        for number in range(30):
            keys = [f"k-{number % 3}", "k-0"][: 1 + number % 2]
            subject = f"shop.order.{'ab'[number % 2]}"
            client.send(subject, b"%d" % number, keys=keys, properties={"n": str(number)}, tags=["eu"])
        client.send("mail", b"\xff", priority="high")
        client.send("mail", b"later", delay="1h")
        client.send("mail", b"soon", key="k-1", delay="1s")
        client.send("ordered", b"{}", order_key="o-1")
        broker.clock.advance("2s")
        with client.subscribe("shop.", group="billing", consumer="b-1", max_attempts=1) as consumer:
            messages = consumer.pull(10)
            for message in messages[:3]:
                message.nack(reason="no stock")
            for message in messages[3:]:
                message.ack()
        yield broker


def live_rows(broker: qmq.testing.LocalBroker) -> list[dict[str, Any]]:
    """All messages, from the broker's own files."""
    with QueryDatabase(location=str(broker.data_dir)) as database:
        return [row for batch in database.run("FROM messages") for row in batch.to_pylist()]


def test_brokers_give_what_their_files_have(broker: qmq.testing.LocalBroker) -> None:
    rows = live_rows(broker)
    assert len(rows) == 33
    some = rows[7]
    asked = [
        "true",
        "subject LIKE 'shop.%'",
        "subject = 'mail'",
        "key = 'k-0'",
        "key IN ('k-0', 'k-1') AND subject LIKE 'shop.%'",
        "key = 'k-1' AND subject IN ('mail', 'shop.order.b', 'no good name!', 'shop.')",
        f"message_id = '{some['message_id']}'",
        f"message_id IN ('{rows[-1]['message_id']}', 'no id')",
        f"stored_at > '{some['stored_at'].isoformat()}' AND key = 'k-0'",
        "key = ''",
        f"key = '{'k' * 5_000}'",
        "stored_at < '1950-01-01' AND key = 'k-0'",
        "stored_at < '9999-12-31' AND key = 'k-0'",
    ]
    with QueryDatabase(server=broker.url) as database:
        for condition in asked:
            query = f"SELECT {COLUMNS}, CAST(properties AS VARCHAR) FROM messages WHERE {condition} ORDER BY position"
            assert result(database, query) == plainly(rows, query), condition


def test_groups_consumers_dead_letters_and_subjects_of_a_broker(broker: qmq.testing.LocalBroker) -> None:
    with QueryDatabase(server=broker.url) as database:
        columns = "subject, messages, high, ordered, delayed, next_sequence"
        assert result(database, f"SELECT {columns} FROM subjects ORDER BY 1") == [
            ("mail", 2, 1, 0, 1, None),
            ("ordered", 1, 0, 1, 0, None),
            ("shop.order.a", 15, 0, 0, 0, 15),
            ("shop.order.b", 15, 0, 0, 0, 15),
        ]
        assert result(database, "SELECT group_name, follows, ready, dead, oldest > '2020-01-01' FROM groups") == [
            ("billing", ["shop."], 20, 3, True)
        ]
        assert result(database, "SELECT group_name, consumer, online, in_flight FROM consumers") == [
            ("billing", "b-1", False, 0)
        ]
        letters = "SELECT group_name, reason, count(*) FROM dead_letters WHERE group_name = 'billing' GROUP BY ALL"
        assert result(database, letters) == [("billing", "no stock", 3)]
        assert result(database, "SELECT * FROM dead_letters WHERE group_name = 'nobody'") == []
        joined = "SELECT decode(body) FROM dead_letters JOIN messages USING (message_id) ORDER BY body::VARCHAR::INT"
        assert len(result(database, joined)) == 3
        for name, schema in SCHEMAS.items():
            with database.run(f"SELECT * FROM {name}") as rows:
                assert rows.schema.names == schema.names


def test_a_token_that_may_not_read_logs_searches_below_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cli.commands import qmq as run

    file = tmp_path / "tokens"
    tokens = {}
    for name, rights in {"all": ["--admin"], "shop": ["--browse", "shop.", "--group", "billing"]}.items():
        made = run("tokens", "create", name, *rights, "--tokens-file", str(file))
        tokens[name] = made.stdout.split()[-1]
    with qmq.testing.broker(tokens_file=str(file)) as broker:
        with qmq.connect_sync(token=tokens["all"]) as client:
            for number in range(5):
                client.send("shop.order", b"%d" % number, key="k")
                client.send("mail", b"%d" % number, key="k")
        monkeypatch.setenv("QMQ_TOKEN", tokens["shop"])
        with QueryDatabase(server=broker.url) as database:
            query = "SELECT decode(body), position > 0, partition FROM messages WHERE subject"
            assert sorted(result(database, f"{query} LIKE 'shop.%'")) == [(f"{n}", True, 0) for n in range(5)]
            assert len(result(database, f"{query} = 'shop.order' AND stored_at > now() - INTERVAL 1 HOUR")) == 5
            assert result(database, f"{query} = 'shop.order' AND stored_at > now()") == []
            # What the token may not see is not there for it.
            assert result(database, "SELECT count(*) FROM messages") == [(5,)]
            assert result(database, "SELECT count(*) FROM messages WHERE key = 'k'") == [(5,)]
            assert len(result(database, f"{query} LIKE 'shop.%' AND key = 'k'")) == 5


def test_a_broker_by_tls(tmp_path: Path) -> None:
    with over_tls(tmp_path / "tls") as files, qmq.testing.broker(**files.settings) as broker:
        assert broker.url.startswith("qmqs://")
        with qmq.connect_sync() as client:
            client.send("mail", b"1", key="k")
        with QueryDatabase(server=broker.url) as database:
            assert result(database, "SELECT subject FROM messages") == [("mail",)]  # from the log
            assert result(database, "SELECT subject FROM messages WHERE key = 'k'") == [("mail",)]


def test_a_broker_that_is_away_is_said_at_once() -> None:
    with pytest.raises(qmq.ConnectionLost), QueryDatabase(server="qmq://127.0.0.1:1") as database:
        result(database, "SELECT * FROM groups")


def test_one_of_two_brokers_that_is_away_is_an_error(broker: qmq.testing.LocalBroker) -> None:
    with QueryDatabase(server=f"{broker.url},127.0.0.1:1", timeout=0.2) as database:
        for query in (
            "FROM groups",
            "FROM subjects",
            "FROM messages WHERE key = 'k-0'",
            "FROM consumers",
            "FROM messages",
        ):
            with pytest.raises(qmq.QmqError, match=r"127\.0\.0\.1:1"):
                result(database, query)
