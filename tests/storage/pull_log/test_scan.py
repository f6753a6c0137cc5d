"""The scan of the pull log for traces finds all records of a file, and little else."""

from __future__ import annotations

import random
from pathlib import Path

from qmq.format.layout import PULL_RECORD_HEADER
from qmq.storage.disk.disk import Disk
from qmq.storage.pull_log.log import PullLog
from qmq.storage.pull_log.records import PULL_LOG_NAME, pull_file_path
from qmq.storage.pull_log.scan import PullLogScan

STORE, SECRET, BASE = b"store!", b"s" * 16, 5_000


def written(directory: Path, payloads: list[bytes]) -> list[int]:
    """Write records of kind 3, and return their offsets."""
    log = PullLog(Disk(), directory / PULL_LOG_NAME, STORE, SECRET, BASE, 1, 1 << 20)
    for payload in payloads:
        log.stage(3, payload)
    log.write()
    log.close()
    offsets, at = list[int](), 64
    for payload in payloads:
        offsets.append(at)
        at += 12 + len(payload)
    return offsets


def scanned(directory: Path) -> list[int]:
    scan = PullLogScan(Disk(), directory / PULL_LOG_NAME, STORE, SECRET, BASE + (1 << 20), 0)
    piece = None if scan.upcoming() is None else scan.next()
    return [] if piece is None else piece.offsets.tolist()


def likeness(size: int) -> bytes:
    """Return bytes that look like the beginning of a record."""
    return PULL_RECORD_HEADER.pack(size, 0, 3)


def test_bytes_of_records_that_look_like_records_are_left_out(tmp_path: Path) -> None:
    chance = random.Random(1)
    payloads = [chance.randbytes(5) + likeness(chance.randrange(13, 80)) + bytes(9) for _ in range(200)]
    assert scanned(tmp_path) == []
    offsets, found = written(tmp_path, payloads), scanned(tmp_path)
    assert set(offsets) <= set(found)
    assert len(found) <= len(offsets) + 2, "some begin where others seem to end"


def test_records_behind_a_hole_are_found(tmp_path: Path) -> None:
    offsets = written(tmp_path, [b"payload %d" % number for number in range(9)])
    path = pull_file_path(tmp_path / PULL_LOG_NAME, BASE)
    data = bytearray(path.read_bytes())
    data[offsets[2] : offsets[4]] = bytes(offsets[4] - offsets[2])
    path.write_bytes(data)
    assert scanned(tmp_path) == offsets[:2] + offsets[4:]
