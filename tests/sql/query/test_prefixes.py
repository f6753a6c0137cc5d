"""Bounds beside conditions on how a subject begins: the query means what it meant."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest

from qmq.sql.query.prefixes import with_bounds


@pytest.fixture
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:") as connection:
        connection.execute("CREATE TABLE messages (subject VARCHAR, key VARCHAR)")
        subjects = ["shop.a", "shop.b", "shop/", "shop", "show", "größe.a", "a'b", "", "Shop.a", None]
        connection.executemany("INSERT INTO messages VALUES (?, ?)", [[name, "a"] for name in subjects])
        yield connection


@pytest.mark.parametrize(
    ("condition", "bounded"),
    [
        ("subject LIKE 'shop.%'", "(subject LIKE 'shop.%' AND {s} >= 'shop.' AND {s} < 'shop/')"),
        ("m.subject like 'sho_.a'", "(m.subject like 'sho_.a' AND {m} >= 'sho' AND {m} < 'shp')"),
        ("starts_with(subject, 'a''b')", "(starts_with(subject, 'a''b') AND {s} >= 'a''b' AND {s} < 'a''c')"),
        ("\"subject\" ^@ 'größe'", "({s} ^@ 'größe' AND {s} >= 'größe' AND {s} < 'größf')"),
        ("NOT (subject) LIKE 's%'", "NOT ((subject) LIKE 's%' AND {s} >= 's' AND {s} < 't')"),
        (
            "key = 'ü' AND (subject /* x */ LIKE -- y\n 's%' OR key IS NULL)",
            "key = 'ü' AND ((subject /* x */ LIKE -- y\n 's%' AND {s} >= 's' AND {s} < 't') OR key IS NULL)",
        ),
    ],
)
def test_bounds_stand_beside_the_condition(connection: duckdb.DuckDBPyConnection, condition: str, bounded: str) -> None:
    query = "SELECT subject FROM messages AS m WHERE "
    changed = with_bounds(connection, query + condition)
    assert changed == query + bounded.format(s='"subject"', m='"m"."subject"')
    assert connection.execute(changed).fetchall() == connection.execute(query + condition).fetchall()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT subject LIKE 'a%' FROM messages",  # its text names the column
        "SELECT subject FROM messages GROUP BY subject, subject LIKE 'a%' ORDER BY subject LIKE 'a%'",
        "SELECT 1 FROM messages WHERE subject LIKE '%a'",
        "SELECT 1 FROM messages WHERE subject NOT LIKE 'a%'",
        "SELECT 1 FROM messages WHERE subject ILIKE 'a%'",
        "SELECT 1 FROM messages WHERE subject LIKE 'a$%' ESCAPE '$'",
        "SELECT 1 FROM messages WHERE subject LIKE key",
        "SELECT 1 FROM messages WHERE key LIKE 'a%'",
        "SELECT 1 FROM messages WHERE subject LIKE '\U0010ffff%'",
        "SELECT 1 FROM messages WHERE subject LIKE 'b%' || 'c'",
        "DESCRIBE messages",
    ],
)
def test_other_queries_stay_as_they_are(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    assert with_bounds(connection, query) == query


def test_conditions_of_inner_queries_count_too(connection: duckdb.DuckDBPyConnection) -> None:
    query = "WITH t AS (SELECT key AS subject FROM messages) SELECT (SELECT count(*) FROM t WHERE subject LIKE 'a%')"
    assert with_bounds(connection, f"{query} FROM t WHERE subject LIKE 'a%'").count(" >= ") == 1
    assert with_bounds(connection, "SELECT * FROM (FROM messages WHERE subject LIKE 'a%')").count(" >= ") == 1


def test_a_query_with_an_error_stays_as_it_is(connection: duckdb.DuckDBPyConnection) -> None:
    assert with_bounds(connection, "SELEC subject LIKE 'a%'") == "SELEC subject LIKE 'a%'"
