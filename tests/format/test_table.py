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
from qmq.format.table import TABLE_BYTES, TABLE_BYTES_A_RUN, names_of, table_of
from qmq.names import MAX_NAME_BYTES

SUBJECTS = b"\xa8subjects"


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), min_size=1, max_size=40, unique=True))
def test_round_trip(names: list[str]) -> None:
    packed = table_of(names)
    assert names_of(packed) == tuple(names) == names_of(packed)
    assert msgpack.unpackb(packed) == {"subjects": names}


def test_golden_table() -> None:
    assert table_of(["a.b"]).hex() == "81a87375626a6563747391a3612e62"
    assert table_of(["a", "b"]).hex() == "81a87375626a6563747392a161a162"


def test_the_longest_names_fit_the_bound() -> None:
    for count in (1, 2, 40):
        names = [f"{number:03}" + "x" * (MAX_NAME_BYTES - 3) for number in range(count)]
        assert len(table_of(names)) <= TABLE_BYTES + TABLE_BYTES_A_RUN * count


def test_other_fields_are_for_later_versions() -> None:
    packed = msgpack.packb({"source": "10.0.0.1", "subjects": ["a", "b"], "compression": 0})
    assert names_of(packed) == ("a", "b")


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "OutOfData"),
        (b"\xc1", "Unexpected type header|Unpack failed|format"),
        (b"\x80", "does not name a subject"),
        (msgpack.packb({"x": 1}), "does not name a subject"),
        (msgpack.packb({"subjects": []}), "does not name a subject"),
        (msgpack.packb({"subjects": "abc"}), "Unexpected type header"),
        (msgpack.packb({"subjects": {"a": 1}}), "Unexpected type header"),
        (msgpack.packb({"subjects": 3}), "Unexpected type header"),
        (msgpack.packb(["subjects"]), "Unexpected type header"),
        (msgpack.packb({"subjects": ["a", "a"]}), "a subject twice"),
        (msgpack.packb({"subjects": ["a", b"b"]}), "expected str instance, bytes found"),
        (msgpack.packb({"subjects": ["a", 1]}), "expected str instance, int found"),
        (msgpack.packb({"subjects": ["a", None]}), "expected str instance, NoneType found"),
        (msgpack.packb({"subjects": ["a", []]}), "expected str instance, list found"),
        (msgpack.packb({"subjects": [["a"]]}), "exceeds max_array_len"),
        (msgpack.packb({"subjects": [{"a": 1}]}), "exceeds max_map_len"),
        (msgpack.packb({"subjects": [msgpack.ExtType(1, b"x")]}), "exceeds max_ext_len"),
        (msgpack.packb({"subjects": ["a"], "x": [1]}), "exceeds max_array_len"),
        (msgpack.packb({"subjects": ["x" * (TABLE_BYTES + 1)]}), "exceeds max_str_len"),
        (b"\x81" + SUBJECTS + b"\x91\xa2\xff\xfe", "decode|Unicode"),
        (b"\x82" + SUBJECTS + b"\x91\xa1a" + SUBJECTS + b"\x91\xa1b", "stands in it twice"),
        (b"\x81" + SUBJECTS + b"\x92\xa1a", "1 of 2 subjects"),
        (b"\x81" + SUBJECTS + b"\x91\xa1a\xc0", "1 bytes behind it"),
        (b"\x81" + SUBJECTS + b"\xdd\xff\xff\xff\xff", "4294967295 subjects"),
        (b"\x81" + SUBJECTS + b"\xdd" + (MAX_RUNS + 1).to_bytes(4, "big") + b"\xa1a", "65536 subjects"),
        (b"\xdf\xff\xff\xff\xff" + b"\xa1x\x01" * 10, "4294967295 fields, at most 16"),
        (b"\x81" + SUBJECTS + b"\xc7\xff\x01", "Unexpected type header"),
    ],
)
def test_bad_tables_are_refused_with_the_reason(packed: bytes, reason: str) -> None:
    for _ in range(2):  # a refusal is not remembered as names
        with pytest.raises(BadBatch, match=reason):
            names_of(packed)


@given(st.binary(max_size=60))
def test_any_bytes_are_names_or_refused(packed: bytes) -> None:
    for content in (packed, b"\x81" + SUBJECTS + packed):
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
