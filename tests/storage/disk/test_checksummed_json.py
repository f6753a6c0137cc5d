"""Lines with a checksum: what is packed is read again, and nothing else."""

from __future__ import annotations

import json

import pytest

from qmq.errors import BadBytes, ForeignFile
from qmq.storage.disk.checksummed_json import pack_json, parse_json

CONTENT = {"store_id": "7f0000015191", "base": 1 << 60, "destination": "hdfs://host/größe"}


def test_packed_and_read_again() -> None:
    packed = pack_json(1, CONTENT)
    assert parse_json(packed, 1, "name", "advice") == CONTENT
    assert packed.endswith(b"}\n")
    assert packed.count(b"\n") == 1
    assert json.loads(packed)["check"] == "6aaf4385"


def test_bytes_that_are_not_what_was_written_are_refused() -> None:
    packed = pack_json(1, CONTENT)
    for at in range(len(packed) - 1):
        bad = bytearray(packed)
        bad[at] ^= 1
        with pytest.raises(BadBytes, match=r"name .*advice"):
            parse_json(bytes(bad), 1, "name", "advice")
    for bad_one in (b"", b"[]", b"{}", b"7", b"\xff", packed[:-20]):
        with pytest.raises(BadBytes, match=r"name .*advice"):
            parse_json(bad_one, 1, "name", "advice")


def test_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(ForeignFile, match="name has format version 2; this QMQ reads 1"):
        parse_json(pack_json(2, CONTENT), 1, "name", "advice")
