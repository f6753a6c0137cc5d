"""What a filter says about single columns: never more than it means, whatever its constants are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from qmq.sql.query.filters import NO_LIMITS, Limits, RowFilter, following
from qmq.sql.query.tables import SCHEMAS, Scan, Table

SCHEMA = SCHEMAS["messages"]


def values(*these: Any) -> Limits:
    return Limits(frozenset(these))


def asked(condition: str) -> RowFilter:
    """Return the filter that DuckDB gives the scan of a query with this condition."""
    scans = list[Scan]()

    def read(scan: Scan) -> Iterator[pa.RecordBatch]:
        scans.append(scan)
        return iter(())

    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("messages", Table("messages", read, []))
        connection.execute(f"SELECT position FROM messages WHERE {condition}").fetchall()
    return scans[0].filter


@pytest.mark.parametrize(
    ("condition", "limits"),
    [
        ("subject = 'shop.a'", {"subject": values("shop.a")}),
        ("subject IN ('a', 'b') AND key = 'k'", {"subject": values("a", "b"), "key": values("k")}),
        ("subject = 'a' OR subject = 'b'", {"subject": values("a", "b")}),
        ("subject = 'a' AND (key = 'k' OR key IS NULL)", {"subject": values("a")}),
        ("subject = 'a' AND key IS NOT NULL AND key != 'k'", {"subject": values("a")}),
        ("subject = 'a' OR key = 'k'", {}),
        ("NOT subject IN ('a', 'b')", {}),
        ("subject >= 'shop.' AND subject < 'shop/'", {"subject": Limits(low="shop.", high="shop/", below_high=True)}),
        ("subject BETWEEN 'a' AND 'c' AND subject >= 'b'", {"subject": Limits(low="b", high="c")}),
        ("partition IN (1, 3)", {"partition": values(1, 3)}),
        (
            "stored_at > '2026-01-01 00:00:00.000001' AND stored_at <= '2026-01-02T00:00:00Z'::TIMESTAMPTZ",
            {
                "stored_at": Limits(
                    low=datetime(2026, 1, 1, microsecond=1, tzinfo=UTC), high=datetime(2026, 1, 2, tzinfo=UTC)
                )
            },
        ),
        ("tags = ['a']", {}),
        ("key LIKE '%k%'", {}),
        ("body = 'abc'::BLOB", {}),  # Arrow shows it in hex
    ],
)
def test_limits_are_what_the_filter_says(condition: str, limits: dict[str, Limits]) -> None:
    found = asked(condition)
    assert {name: found.of(name) for name in SCHEMA.names if found.of(name) != NO_LIMITS} == limits


@pytest.mark.parametrize(
    "text",
    ['"', "\\", '") or (key == "', "größe", "a\nb\tc\r\x01\x00\x7f", "😀", " and ", '",\n  "', "\\x41", "'", "null"],
)
def test_texts_of_every_kind_are_read_as_they_are(text: str) -> None:
    constant = text.replace("'", "''")
    if "\x00" not in text:  # DuckDB's parser takes none
        assert asked(f"key = '{constant}' AND partition = 1").of("key") == values(text)
        assert asked(f"key IN ('{constant}', 'x')").of("key") == values(text, "x")
    # Arrow shows texts in lists as they are, so one text may look like two.
    assert RowFilter(pc.field("key") == text, SCHEMA).of("key") in (values(text), NO_LIMITS)


def test_a_long_list_is_known_as_a_whole() -> None:
    names = [f"k{number}" for number in range(1_000)]
    assert asked(f"key IN ({', '.join(map(repr, names))})").of("key") == values(*names)


def test_a_filter_that_is_not_understood_limits_nothing_and_is_applied() -> None:
    expression = (pc.field("subject") == "a") & (pc.utf8_length(pc.field("subject")) == 1)
    found = RowFilter(expression, SCHEMA)
    assert found.of("subject") == NO_LIMITS
    assert found.columns == ["subject"]
    batch = pa.RecordBatch.from_pydict(
        {"subject": ["a", "b", "a"], "position": [1, 2, 3]},
        pa.schema([SCHEMA.field("subject"), SCHEMA.field("position")]),
    )
    assert [part.to_pydict() for part in found.applied(batch, ["position"])] == [{"position": [1, 3]}]


@pytest.mark.parametrize(
    ("limits", "prefix"),
    [
        (Limits(low="shop.", high="shop/", below_high=True), "shop."),
        (Limits(low="shop.", high="shop/"), "shop"),
        (Limits(low="shop.a", high="shop.b"), "shop."),
        (Limits(low="a", high="b"), ""),
        (Limits(low="a"), ""),
        (Limits(high="a"), ""),
        (NO_LIMITS, ""),
    ],
)
def test_a_prefix_is_what_all_texts_between_two_begin_with(limits: Limits, prefix: str) -> None:
    assert limits.prefix == prefix


def test_the_text_behind_a_prefix() -> None:
    assert [following(text) for text in ("a", "shop.", "ab\u00ff", "\ud7ff", "\U0010ffff", "")] == [
        "b", "shop/", "ab\u0100", None, None, None,
    ]  # fmt: skip


def test_limits_of_both_and_of_one() -> None:
    low, high, below = Limits(low=1), Limits(high=5), Limits(high=5, below_high=True)
    assert low & high == Limits(low=1, high=5)
    assert high & below == below & high == below
    assert below & Limits(high=4) == Limits(high=4)
    assert low & Limits(low=2) == Limits(low=2)
    assert values(1, 2) & values(2, 3) == values(2)
    assert values(1) | values(2) == values(1, 2)
    assert values(1) | low == NO_LIMITS
