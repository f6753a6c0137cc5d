"""The table of a batch: round trips, refusals, and bounded memory for an untrusted client's nesting."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BadBatch
from qmq.format import table
from qmq.format.layout import MAX_RUNS
from qmq.format.source import NO_SOURCE, front_of
from qmq.format.table import TABLE_BYTES, TABLE_BYTES_A_RUN, names_of, table_of
from qmq.names import MAX_NAME_BYTES
from tests.format.contents import table_with, with_source

SUBJECTS = b"\xa8subjects"


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), min_size=1, max_size=40, unique=True))
def test_round_trip(names: list[str]) -> None:
    packed = table_of(names)
    assert names_of(packed) == tuple(names) == names_of(packed)
    assert msgpack.unpackb(packed) == {"source": NO_SOURCE, "subjects": names}


def test_golden_table() -> None:
    front = "82a6736f75726365c415" + "00" * 21
    assert table_of(["a.b"]).hex() == front + "a87375626a6563747391a3612e62"
    assert table_of(["a", "b"]).hex() == front + "a87375626a6563747392a161a162"


def test_the_longest_names_fit_the_bound() -> None:
    for count in (1, 2, 40):
        names = [f"{number:03}" + "x" * (MAX_NAME_BYTES - 3) for number in range(count)]
        assert len(table_of(names)) <= TABLE_BYTES + TABLE_BYTES_A_RUN * count


def test_other_fields_are_for_later_versions() -> None:
    packed = table_with({"subjects": ["a", "b"], "compression": 0})
    assert names_of(packed) == ("a", "b")


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "first field of the table is not the source"),
        (b"\xc1", "first field of the table is not the source"),
        (b"\x80", "first field of the table is not the source"),
        (msgpack.packb({"subjects": ["a"]}), "first field of the table is not the source"),
        (msgpack.packb({"source": "a" * 21, "subjects": ["a"]}), "first field of the table is not the source"),
        (with_source(b"\x81" + SUBJECTS + b"\x91\xa1a")[:20], "first field of the table is not the source"),
        (b"\x82\xa6source\xc5\xff\xff" + bytes(99), "first field of the table is not the source"),
        (with_source(b"\x80"), "does not name a subject"),
        (table_with({"x": 1}), "does not name a subject"),
        (table_with({"subjects": []}), "does not name a subject"),
        (table_with({"subjects": "abc"}), "Unexpected type header"),
        (table_with({"subjects": {"a": 1}}), "Unexpected type header"),
        (table_with({"subjects": 3}), "Unexpected type header"),
        (msgpack.packb(["subjects"]), "first field of the table is not the source"),
        (table_with({"subjects": ["a", "a"]}), "a subject twice"),
        (table_with({"subjects": ["a", b"b"]}), "expected str instance, bytes found"),
        (table_with({"subjects": ["a", 1]}), "expected str instance, int found"),
        (table_with({"subjects": ["a", None]}), "expected str instance, NoneType found"),
        (table_with({"subjects": ["a", []]}), "expected str instance, list found"),
        (table_with({"subjects": [["a"]]}), "exceeds max_array_len"),
        (table_with({"subjects": [{"a": 1}]}), "exceeds max_map_len"),
        (table_with({"subjects": [msgpack.ExtType(1, b"x")]}), "exceeds max_ext_len"),
        (table_with({"subjects": ["a"], "x": [1]}), "exceeds max_array_len"),
        (table_with({"subjects": ["x" * (TABLE_BYTES + 1)]}), "exceeds max_str_len"),
        (with_source(b"\x81" + SUBJECTS + b"\x91\xa2\xff\xfe"), "decode|Unicode"),
        (with_source(b"\x82" + SUBJECTS + b"\x91\xa1a" + SUBJECTS + b"\x91\xa1b"), "stands in it twice"),
        (with_source(b"\x81" + SUBJECTS + b"\x92\xa1a"), "1 of 2 subjects"),
        (with_source(b"\x81" + SUBJECTS + b"\x91\xa1a\xc0"), "1 bytes behind it"),
        (with_source(b"\x81" + SUBJECTS + b"\xdd\xff\xff\xff\xff"), "4294967295 subjects"),
        (with_source(b"\x81" + SUBJECTS + b"\xdd" + (MAX_RUNS + 1).to_bytes(4, "big") + b"\xa1a"), "65536 subjects"),
        (b"\xdf\xff\xff\xff\xff" + b"\xa1x\x01" * 10, "first field of the table is not the source"),
        (b"\xff" + front_of(NO_SOURCE) + SUBJECTS + b"\x91\xa1a", "Unexpected type header"),
        (with_source(b"\x81" + SUBJECTS + b"\xc7\xff\x01"), "Unexpected type header"),
    ],
)
def test_bad_tables_are_refused_with_the_reason(packed: bytes, reason: str) -> None:
    for _ in range(2):  # a refusal is not remembered as names
        with pytest.raises(BadBatch, match=reason):
            names_of(packed)


@given(st.binary(max_size=60))
def test_any_bytes_are_names_or_refused(packed: bytes) -> None:
    for content in (packed, with_source(b"\x80" + packed), with_source(b"\x81" + SUBJECTS + packed)):
        try:
            names = names_of(content)
        except BadBatch:
            continue
        assert names
        assert all(type(name) is str for name in names)


NESTED = {
    "arrays in arrays": b"\x91" * 1_000_000,
    "arrays in the list": b"\x81" + SUBJECTS + b"\x91" * 1_000_000,
    "empty arrays": b"\x81" + SUBJECTS + b"\xdc\xff\xff" + b"\x90" * 1_000_000,
    "empty maps": b"\x81" + SUBJECTS + b"\xdc\xff\xff" + b"\x80" * 1_000_000,
    "wide arrays in the list": b"\x81" + SUBJECTS + b"\x91" + (b"\xdc\xff\xff" + b"\xc0" * 65_534) * 15,
    "wide maps": b"\x81" + SUBJECTS + b"\x91" + b"\xdf\x00\xff\xff\xff" * 200_000,
    "a map of empty arrays": b"\xdf\x00\x0f\xff\xff" + b"\x90\x90" * 500_000,
    "a long string": b"\x81" + SUBJECTS + b"\x91\xdb\xff\xff\xff\xff" + b"x" * 1_000_000,
}


@pytest.mark.parametrize("packed", NESTED.values(), ids=NESTED)
def test_hostile_nesting_takes_no_memory(packed: bytes) -> None:
    packed = with_source(packed)
    tracemalloc.start()
    try:
        with pytest.raises(BadBatch):
            names_of(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(packed)


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_CACHE_ENTRIES", 10)
    names_cache: dict[bytes, tuple[str, ...]] = {}
    tables_cache: dict[str, bytes] = {}
    monkeypatch.setattr(table, "_names", names_cache)
    monkeypatch.setattr(table, "_tables", tables_cache)
    for number in range(25):
        assert names_of(table_of([f"s.{number}"])) == (f"s.{number}",)
    assert 1 <= len(names_cache) <= 10
    assert 1 <= len(tables_cache) <= 10
    large = [f"s.{number}" for number in range(100)]
    before = len(names_cache)
    assert names_of(table_of(large)) == tuple(large)
    assert len(names_cache) == before
