"""The messages that are read and archived: as many as reported, in a data directory without a fault."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from bench.history.archives import _segment_paths
from bench.history.orders import Amount, Contents, Tally, total, write_orders
from tests.spark.reads import read, schema_of
from tests.storage.stores import verified


@pytest.mark.parametrize("headers", [False, True])
def test_what_is_told_is_there(tmp_path: Path, headers: bool) -> None:
    amount = Amount(3_000, 100, 30, batch=200, runs=7, headers=headers, segment_bytes=17 << 20)
    contents = write_orders(tmp_path / "data", amount)
    rows, damages = read(tmp_path / "data", schema=schema_of("subject", "key", "tags", "properties", "body"))
    found: Contents = {}
    for row in rows:
        tally = Tally(1, len(row["body"]), zlib.crc32(row["body"]))
        found[row["subject"]] = found.get(row["subject"], Tally(0, 0, 0)) + tally
    assert (found, damages) == (contents, [])
    assert total(contents)[:2] == (3_000, 300_000)
    assert len(contents) <= 30
    assert {(row["key"] is not None, len(row["tags"]), len(row["properties"])) for row in rows} == {
        (True, 1, 2) if headers else (False, 0, 0)
    }
    verified(tmp_path / "data")


def test_segments_are_as_large_as_asked_for(tmp_path: Path) -> None:
    write_orders(tmp_path, Amount(90_000, segment_bytes=17 << 20))
    assert [path.stat().st_size >> 20 for path in _segment_paths(tmp_path)] == [16, 1]
