"""Manifests: they are read as they were packed, and damaged ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qmq.archive import manifest
from qmq.archive.manifest import Manifest, parse_manifest
from qmq.errors import BadBytes, ForeignFile

MADE = Manifest("7f0000015191", 0, 1 << 60, (1 << 60) + 1_000, 3, 30, 5, 7, 1_000, 0xFFFF_FFFF, 112, 0, 8_192, 7, 9)


def test_packed_and_read_again() -> None:
    assert parse_manifest(MADE.pack(), "name") == MADE
    assert json.loads(MADE.pack())["base"] == 1 << 60
    assert MADE.pack().count(b"\n") == 1


def test_bytes_that_are_not_what_was_written_are_refused() -> None:
    packed = MADE.pack()
    for at in range(len(packed) - 1):
        bad = bytearray(packed)
        bad[at] ^= 1
        with pytest.raises(BadBytes, match="name"):
            parse_manifest(bytes(bad), "name")
    for bad_one in (b"", b"[]", b"{}", b"\xff", packed[:-20]):
        with pytest.raises(BadBytes, match="name"):
            parse_manifest(bad_one, "name")


def test_a_newer_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 2)
    newer = replace(MADE, partition=1).pack()
    monkeypatch.undo()
    with pytest.raises(ForeignFile, match="version 2"):
        parse_manifest(newer, "name")
