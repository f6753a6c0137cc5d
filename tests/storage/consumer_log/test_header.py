"""Headers and names of the consumer log's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRIES_MAGIC, ORDER_MAGIC
from qmq.storage.consumer_log.header import DerivedHeader, base_of, entries_path, order_path, parse_derived

PATH = Path("x.entries")
U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    DerivedHeader,
    partition=st.integers(0, 0xFFFF),
    store_id=st.binary(min_size=6, max_size=6),
    sealed=st.booleans(),
    base=U64,
    covered=U64,
    rows=U64,
    first_row=U64,
    body_crc=st.integers(0, 2**32 - 1),
)


@given(HEADERS)
def test_bytes_and_back(header: DerivedHeader) -> None:
    data = header.pack(ENTRIES_MAGIC)
    assert len(data) == DERIVED_HEADER_SIZE
    assert parse_derived(data, ENTRIES_MAGIC, PATH) == header


@given(HEADERS, st.integers(0, DERIVED_HEADER_SIZE - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(header: DerivedHeader, at: int, change: int) -> None:
    data = bytearray(header.pack(ENTRIES_MAGIC))
    data[at] ^= change
    with pytest.raises(BadBytes, match=r"x\.entries"):
        parse_derived(bytes(data), ENTRIES_MAGIC, PATH)


def test_golden_bytes() -> None:
    header = DerivedHeader(2, b"store1", True, 0x1000, 0x2000, 3, 4, 5)
    wanted = (
        "514d51454e545259 0100 0200 73746f726531 01 0000000000"
        "0010000000000000 0020000000000000 0300000000000000 0400000000000000 05000000"
    )
    assert header.pack(ENTRIES_MAGIC)[:60] == bytes.fromhex(wanted)
    assert header.unsealed() == DerivedHeader(2, b"store1", False, 0x1000, 0, 0, 4, 0)


def test_other_kinds_versions_and_short_files_are_refused() -> None:
    data = DerivedHeader(0, b"store1", False, 0, 0, 0, 0, 0).pack(ENTRIES_MAGIC)
    with pytest.raises(BadBytes, match="kind"):
        parse_derived(data, ORDER_MAGIC, PATH)
    with pytest.raises(BadBytes, match="63 bytes"):
        parse_derived(data[:63], ENTRIES_MAGIC, PATH)
    newer = data[:8] + b"\2\0" + data[10:60]
    with pytest.raises(ForeignFile, match="version 2"):
        parse_derived(newer + crc32c(newer).to_bytes(4, "little"), ENTRIES_MAGIC, PATH)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("00000000000000ff.entries", 255),
        ("00000000000000ff.order", 255),
        ("00000000000000ff.index", None),
        ("ff.entries", None),
        ("000000000000000g.order", None),
        ("entries", None),
    ],
)
def test_names(name: str, base: int | None) -> None:
    assert base_of(name) == base


def test_paths_are_names_that_are_known() -> None:
    for path in (entries_path(Path("d"), 77), order_path(Path("d"), 77)):
        assert base_of(path.name) == 77
