"""The files of a log that was read to its end are put right when it is opened for use."""

from __future__ import annotations

from pathlib import Path

from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.segment import Segment, SegmentOwner, check_header, segment_path
from qmq.storage.recovery.finish_log import RecoveredLog, SegmentFile
from qmq.storage.types import SegmentSpan

OWNER = SegmentOwner(b"store!", 0)
FIRST, SECOND, FLOOR, SIZE = 4_096, 12_288, 40_960, 8_192


def made(directory: Path, *bases: int) -> list[SegmentFile]:
    """Segments of that size, full of ones behind their headers."""
    for base in bases:
        segment = Segment.create(Disk(), directory, OWNER, base, base, SIZE, 1)
        segment.write([b"\1" * (SIZE - 64)], SIZE - 64, 64)
        segment.close()
    return [SegmentFile(base, SIZE, base) for base in bases]


def opened(directory: Path, files: list[SegmentFile], end: int, *, floor: int = 0, has_junk: bool) -> MessageLog:
    spans = [SegmentSpan(file.base, min(file.base + SIZE, end)) for file in files]
    read = RecoveredLog(Disk(), directory, OWNER, files, spans, end, claimed=0, has_junk=has_junk, changed=False)
    log = read.open(floor=floor, reserve=1 << 20, segment_bytes=SIZE, now_us=5, sync=True)
    assert len(read.notes) == sum(file.previous_end is None for file in files)
    return log


def test_junk_behind_the_end_is_taken_away_and_the_file_keeps_its_size(tmp_path: Path) -> None:
    log = opened(tmp_path, made(tmp_path, FIRST), FIRST + 1_000, has_junk=True)
    content = segment_path(tmp_path, FIRST).read_bytes()
    assert content[64:1_000] == b"\1" * 936
    assert content[1_000:] == bytes(SIZE - 1_000)
    assert (log.current.base, log.end) == (FIRST, FIRST + 1_000)
    log.close()


def test_below_the_floor_the_last_file_is_cut_and_a_new_one_begins(tmp_path: Path) -> None:
    log = opened(tmp_path, made(tmp_path, FIRST, SECOND), SECOND + 500, floor=FLOOR, has_junk=True)
    assert [segment_path(tmp_path, base).stat().st_size for base in (FIRST, SECOND)] == [SIZE, 500]
    assert (log.current.base, log.end) == (FLOOR, FLOOR + 64)
    assert check_header(segment_path(tmp_path, FLOOR).read_bytes()[:64], tmp_path, OWNER, FLOOR) == SECOND + 500
    log.close()


def test_a_bad_header_is_written_again_as_it_was(tmp_path: Path) -> None:
    first, second = made(tmp_path, FIRST, SECOND)
    path = segment_path(tmp_path, SECOND)
    path.write_bytes(bytes(64) + path.read_bytes()[64:])
    log = opened(tmp_path, [first, second._replace(previous_end=None)], SECOND + 700, has_junk=False)
    assert check_header(path.read_bytes()[:64], path, OWNER, SECOND) == FIRST + SIZE
    log.close()
