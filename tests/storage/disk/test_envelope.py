"""Small files that are written whole: every changed byte is noticed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BadBytes, StorageFailed
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import FileState, pack_envelope, read_envelope, unpack_envelope
from tests.fake_disk import FakeDisk

MAGIC = b"QMQTESTS"
VALUES = st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.binary(max_size=50) | st.text(max_size=20)
CONTENTS = st.dictionaries(st.text(max_size=10), VALUES | st.lists(VALUES, max_size=4), max_size=5)


@given(CONTENTS)
def test_content_is_unpacked_as_packed(content: dict[str, Any]) -> None:
    assert unpack_envelope(b"".join(pack_envelope(MAGIC, 3, content)), MAGIC, 3, "f") == content


@given(CONTENTS, st.data())
def test_every_changed_byte_and_every_length_is_noticed(content: dict[str, Any], data: st.DataObject) -> None:
    whole = bytearray(b"".join(pack_envelope(MAGIC, 3, content)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadBytes):
        unpack_envelope(bytes(whole), MAGIC, 3, "f")
    whole = bytearray(b"".join(pack_envelope(MAGIC, 3, content)))
    with pytest.raises(BadBytes):
        unpack_envelope(bytes(whole[: data.draw(st.integers(0, len(whole) - 1))]), MAGIC, 3, "f")
    with pytest.raises(BadBytes):
        unpack_envelope(bytes(whole) + b"\0", MAGIC, 3, "f")


def test_golden_bytes() -> None:
    body = b"\x81\xa1n\x07"
    fields = b"QMQTESTS" + b"\x03\0\0\0" + b"\x04\0\0\0"
    crc = crc32c(fields + body).to_bytes(4, "little")
    assert b"".join(pack_envelope(MAGIC, 3, {"n": 7})) == fields + crc + body


def test_the_state_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert read_envelope(Disk(), path, MAGIC, 3).state is FileState.MISSING
    good = b"".join(pack_envelope(MAGIC, 3, {"n": 7}))
    path.write_bytes(good)
    opened = read_envelope(Disk(), path, MAGIC, 3)
    assert (opened.state, opened.content, opened.reason) == (FileState.GOOD, {"n": 7}, "")
    older = read_envelope(Disk(), path, MAGIC, 2)
    assert older.state is FileState.UNKNOWN
    assert older.reason == f"{path} has format version 3; this QMQ reads 1 to 2: use a newer one"
    for rotten in (b"", good[:-1], good[:30] + b"?", b"x" * 40):
        path.write_bytes(rotten)
        found = read_envelope(Disk(), path, MAGIC, 3)
        assert (found.state, found.content) == (FileState.ROTTEN, None)
        assert str(path) in found.reason


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (msgpack.packb([1, 2]), "does not hold a map"),
        (b"\x81\x90\x01", "does not hold a map: "),  # a key that is a list
        (b"\x81\x01", "does not hold a map: "),
        (b"\xc1", "does not hold a map: "),
    ],
)
def test_good_bytes_of_the_wrong_kind(body: bytes, problem: str) -> None:
    fields = b"QMQTESTS" + b"\x03\0\0\0" + len(body).to_bytes(4, "little")
    whole = fields + crc32c(fields + body).to_bytes(4, "little") + body
    with pytest.raises(BadBytes, match=problem):
        unpack_envelope(whole, MAGIC, 3, "f")


@pytest.mark.parametrize("operation", ["open", "pread"])
def test_a_bad_sector_is_rot(tmp_path: Path, operation: str) -> None:
    disk = FakeDisk("boot-1")
    (tmp_path / "f").write_bytes(b"".join(pack_envelope(MAGIC, 3, {"n": 7})))
    disk.fail(operation, 1, errno.EIO)
    opened = read_envelope(disk, tmp_path / "f", MAGIC, 3)
    assert (opened.state, opened.content) == (FileState.ROTTEN, None)
    assert opened.reason.startswith(f"cannot read {tmp_path / 'f'}: {os.strerror(errno.EIO)}; check the disk")


def test_a_file_that_the_system_does_not_let_read(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.fail_always("open", 13)
    with pytest.raises(StorageFailed, match="cannot read"):
        read_envelope(disk, tmp_path / "f", MAGIC, 3)
