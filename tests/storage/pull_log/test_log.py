"""The pull log: records are read as written, and told from torn, rotten, missing and foreign bytes."""

from __future__ import annotations

import errno
import random
from itertools import accumulate
from pathlib import Path

import pytest

from qmq.broker.journal.record_bytes import OF_VERSION_2
from qmq.broker.journal.record_types import RecordKind
from qmq.errors import ForeignFile, StorageFailed, StorageFull, SyncFailed
from qmq.format.layout import PULL_FILE_HEADER_SIZE, PULL_LOG_VERSION, PULL_RECORD_HEADER_SIZE, PULL_RECORD_KINDS
from qmq.storage.disk.disk import Disk
from qmq.storage.pull_log.log import PullLog
from qmq.storage.pull_log.records import (
    PullLogContent,
    list_pull_files,
    pull_file_path,
    read_pull_log,
    rewrite_pull_log,
)
from tests.effort import part_of
from tests.fake_disk import FakeDisk, Operation
from tests.sim.disk import SimulatedDisk

STORE, SECRET, BASE, FILE_BYTES = b"store!", b"s" * 16, 5_000, 4_096

Said = list[tuple[int, bytes]]


def some_records(count: int, seed: int = 0, most: int = 90) -> Said:
    chance = random.Random(seed)
    return [(chance.randrange(1, 9), chance.randbytes(chance.randrange(most))) for _ in range(count)]


def made(path: Path, base: int = BASE, disk: Disk | None = None) -> PullLog:
    return PullLog(disk or Disk(), path / "pulls", STORE, SECRET, base, 7, FILE_BYTES)


def written(path: Path, records: Said) -> PullLog:
    log = made(path)
    for number, record in enumerate(records):
        log.stage(*record)
        if number % 7 == 3:
            log.write()
    log.write()
    return log


def found(path: Path, claimed: int = BASE, secret: bytes = SECRET, store: bytes = STORE) -> PullLogContent:
    return read_pull_log(Disk(), path / "pulls", store, secret, claimed)


def said(read: PullLogContent) -> Said:
    return [(record.kind, bytes(record.payload)) for record in read.records]


def test_written_records_are_read_from_any_position(tmp_path: Path) -> None:
    records = some_records(300)
    log = written(tmp_path, records)
    assert len(list_pull_files(Disk(), tmp_path / "pulls")) > 3
    read = found(tmp_path)
    assert (said(read), read.holes, read.problems, read.end) == (records, [], [], log.end)
    for number in range(0, 300, 13):
        part = found(tmp_path, read.records[number].position)
        assert (said(part), part.holes) == (records[number:], [])
    assert said(found(tmp_path, log.end)) == []
    log.close()


def test_a_start_goes_on_in_a_new_file(tmp_path: Path) -> None:
    first, second = some_records(20, 1), some_records(20, 2)
    written(tmp_path, first).close()
    log = made(tmp_path, found(tmp_path).end)
    for record in second:
        log.stage(*record)
    log.write()
    read = found(tmp_path)
    assert (said(read), read.holes, read.problems) == (first + second, [], [])
    log.close()


@pytest.mark.parametrize("filling", ["cut", "zeros", "junk"])
def test_a_tail_torn_at_every_byte_is_cut(tmp_path: Path, filling: str) -> None:
    records = some_records(20)
    written(tmp_path, records).close()
    path = pull_file_path(tmp_path / "pulls", BASE)
    whole = path.read_bytes()
    sizes = [PULL_RECORD_HEADER_SIZE + len(payload) for _, payload in records]
    ends = [PULL_FILE_HEADER_SIZE, *accumulate(sizes, initial=PULL_FILE_HEADER_SIZE)][1:]
    for cut in range(ends[-4], ends[-1] + 1):
        rest = {"cut": b"", "zeros": bytes(len(whole) - cut), "junk": random.Random(cut).randbytes(len(whole) - cut)}
        path.write_bytes(whole[:cut] + rest[filling])
        read = found(tmp_path)
        left = sum(end <= cut for end in ends[1:])
        assert (said(read), read.holes, read.end) == (records[:left], [], BASE + ends[left])


def test_a_flipped_bit_costs_only_its_record(tmp_path: Path) -> None:
    records = some_records(6, most=20)
    written(tmp_path, records).close()
    path = pull_file_path(tmp_path / "pulls", BASE)
    whole = path.read_bytes()
    read = found(tmp_path)
    for number, record in enumerate(read.records):
        start = record.position - BASE
        end = start + PULL_RECORD_HEADER_SIZE + len(record.payload)
        for bit in range(8 * start, 8 * end):
            bad = bytearray(whole)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            left = found(tmp_path)
            assert said(left) == records[:number] + records[number + 1 :]
            assert left.holes == ([(BASE + start, BASE + end)] if number < len(records) - 1 else [])


def test_a_file_that_is_gone_is_a_hole(tmp_path: Path) -> None:
    records = some_records(300)
    written(tmp_path, records).close()
    bases = list_pull_files(Disk(), tmp_path / "pulls")
    inside = [record for record in found(tmp_path).records if not bases[1] <= record.position < bases[2]]
    pull_file_path(tmp_path / "pulls", bases[1]).unlink()
    read = found(tmp_path)
    assert [record.position for record in read.records] == [record.position for record in inside]
    assert [hole.end for hole in read.holes] == [bases[2]]


@pytest.mark.parametrize("lost", [1, 20, 33])
def test_cut_records_do_not_count_nor_come_back(tmp_path: Path, lost: int) -> None:
    records = some_records(40)
    written(tmp_path, records).close()
    gone = found(tmp_path).records[lost]
    base = max(base for base in list_pull_files(Disk(), tmp_path / "pulls") if base <= gone.position)
    path = pull_file_path(tmp_path / "pulls", base)
    data = bytearray(path.read_bytes())
    start = gone.position - base
    data[start : start + PULL_RECORD_HEADER_SIZE + len(gone.payload)] = bytes(
        PULL_RECORD_HEADER_SIZE + len(gone.payload)
    )
    path.write_bytes(data)
    end = found(tmp_path).end
    assert [hole.start for hole in found(tmp_path).holes] == [gone.position]
    log = PullLog(Disk(), tmp_path / "pulls", STORE, SECRET, end, 7, FILE_BYTES, 2, cut=gone.position)
    new = some_records(100, seed=1)
    for record in new:
        log.stage(*record)
    log.write()
    log.close()
    read = found(tmp_path)
    assert said(read) == records[:lost] + records[lost + 1 :] + new
    assert [one.counts for one in read.records] == [True] * lost + [False] * (39 - lost) + [True] * 100
    assert (read.holes, read.generation, read.end) == ([], 2, log.end)


def test_another_generation_is_on_disk_before_anything_else(tmp_path: Path) -> None:
    written(tmp_path, some_records(5)).close()
    disk, end = FakeDisk("boot-1"), found(tmp_path).end
    disk.fail("fdatasync")
    with pytest.raises(StorageFailed):
        PullLog(disk, tmp_path / "pulls", STORE, SECRET, end, 7, FILE_BYTES, 2, cut=end)
    assert len(list_pull_files(disk, tmp_path / "pulls")) == 1
    PullLog(disk, tmp_path / "pulls", STORE, SECRET, end, 7, FILE_BYTES, 2, cut=end).close()
    assert disk.calls["fdatasync"] == 2
    assert disk.still_open() == []


def test_a_closed_log_writes_nothing_to_the_next_file_with_its_descriptor(tmp_path: Path) -> None:
    log = written(tmp_path, some_records(5))
    log.close()
    other = tmp_path / "other"
    with other.open("wb", buffering=0):
        log.stage(*some_records(1)[0])
        with pytest.raises(SyncFailed, match="has stopped"):
            log.write()
    assert other.read_bytes() == b""
    log.close()


class _Killed(BaseException):
    """End the process."""


@pytest.mark.parametrize("seed", range(part_of(30)))
def test_a_generation_that_a_killed_start_began_outlasts_the_power(seed: int) -> None:
    """It was killed before the name of its file was on disk; the next start goes on in that generation, and clients are
    told so.
    """
    disk, pulls = SimulatedDisk(seed), Path("/data/pulls")
    log = PullLog(disk, pulls, STORE, SECRET, BASE, 7, FILE_BYTES)
    log.stage(1, b"first")
    log.write()
    log.begin_sync().run()

    def killed(operation: Operation) -> None:
        if operation.kind == "fsync_directory" and operation.path == str(pulls):
            raise _Killed

    disk.before = killed
    with pytest.raises(_Killed):
        PullLog(disk, pulls, STORE, SECRET, log.end, 7, FILE_BYTES, generation=2, cut=log.end)
    disk.stop(power=False)
    read = read_pull_log(disk, pulls, STORE, SECRET, BASE)
    assert read.generation == 2
    rewrite_pull_log(disk, pulls, read)
    disk.stop(power=True)
    assert read_pull_log(disk, pulls, STORE, SECRET, BASE).generation == 2


def test_records_of_other_places_stores_and_clients_are_none(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    inner = written(tmp_path / "other", some_records(3))
    inner.close()
    forged = pull_file_path(tmp_path / "other" / "pulls", BASE).read_bytes()[PULL_FILE_HEADER_SIZE:200]
    log = written(tmp_path, [(1, forged), (2, b"x" * 7), (1, forged)])
    log.close()
    path = pull_file_path(tmp_path / "pulls", BASE)
    data = bytearray(path.read_bytes())
    data[PULL_FILE_HEADER_SIZE + 4] ^= 1  # the record around the forged ones is bad
    path.write_bytes(data)
    assert said(found(tmp_path)) == [(2, b"x" * 7), (1, forged)]
    assert said(found(tmp_path, secret=b"t" * 16)) == []
    assert "another file" in found(tmp_path, store=b"others").problems[0][1]


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    from crc32c import crc32c

    written(tmp_path, some_records(2)).close()
    path = pull_file_path(tmp_path / "pulls", BASE)
    data = bytearray(path.read_bytes())
    data[8:10] = (PULL_LOG_VERSION + 1).to_bytes(2, "little")
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ForeignFile, match=f"format version {PULL_LOG_VERSION + 1}"):
        found(tmp_path)


def test_a_kind_of_record_that_is_not_known_is_refused(tmp_path: Path) -> None:
    log = written(tmp_path, some_records(2))
    log.stage(PULL_RECORD_KINDS + 1, b"newer")
    log.write()
    log.close()
    assert sorted({*RecordKind, *OF_VERSION_2}) == list(range(1, PULL_RECORD_KINDS + 1))
    with pytest.raises(
        ForeignFile, match=rf"pulls has a record of kind {PULL_RECORD_KINDS + 1} at offset \d+; this QMQ"
    ):
        found(tmp_path)


def test_staged_records_stay_for_the_next_write_when_the_disk_is_full(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = made(tmp_path, disk=disk)
    records = some_records(100)
    for record in records:
        log.stage(*record)
    for step in range(1, 40):
        disk.fail("pwritev" if step % 2 else "open", 1, errno.ENOSPC)
        if step % 2 == 0:
            for record in (more := some_records(60, step)):  # so many that it needs another file
                log.stage(*record)
            records += more
        with pytest.raises(StorageFull, match=str(tmp_path)):
            log.write()
        disk.heal()
        log.stage(*some_records(1, step)[0])
        records += some_records(1, step)
    disk.heal()
    log.write()
    assert said(found(tmp_path)) == records
    log.close()
    assert disk.still_open() == []


def test_a_start_on_a_full_disk_writes_on_in_the_last_file(tmp_path: Path) -> None:
    records = some_records(20)
    written(tmp_path, records).close()
    disk = FakeDisk("boot-1")
    for number in range(3):
        end = found(tmp_path).end
        disk.fail_always("open", path_part=pull_file_path(tmp_path, end).name)
        log = made(tmp_path, end, disk)
        more = some_records(10, number, most=50)
        for record in more:
            log.stage(*record)
        log.write()
        records += more
        assert len(list_pull_files(disk, tmp_path / "pulls")) == 1
        assert said(found(tmp_path)) == records
        log.close()
    disk.heal()
    assert disk.still_open() == []


def test_another_generation_waits_for_room_for_a_header(tmp_path: Path) -> None:
    written(tmp_path, some_records(5)).close()
    disk = FakeDisk("boot-1")
    end = found(tmp_path).end
    disk.fail_always("open", path_part=pull_file_path(tmp_path, end).name)
    log = PullLog(disk, tmp_path / "pulls", STORE, SECRET, end, 7, FILE_BYTES, generation=2, cut=end)
    log.stage(1, b"a")
    with pytest.raises(StorageFull):
        log.write()
    disk.heal()
    log.write()
    log.close()
    assert found(tmp_path).generation == 2
    assert len(said(found(tmp_path))) == 6


def test_nothing_is_written_after_a_failed_sync(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = made(tmp_path, disk=disk)
    log.stage(1, b"a")
    log.write()
    disk.fail("fdatasync")
    sync = log.begin_sync()
    with pytest.raises(SyncFailed, match="restarted") as caught:
        sync.run()
    log.broken = str(caught.value)
    log.stage(1, b"b")
    with pytest.raises(SyncFailed):
        log.write()
    log.close()


def test_records_that_were_read_are_written_again_and_synced(tmp_path: Path) -> None:
    records = some_records(200)
    written(tmp_path, records).close()
    disk = FakeDisk("boot-1")
    rewrite_pull_log(disk, tmp_path / "pulls", found(tmp_path))
    files = len(list_pull_files(Disk(), tmp_path / "pulls"))
    assert disk.calls["fdatasync"] == files
    assert disk.calls["pwritev"] == len(records) + files, "a header each"
    assert said(found(tmp_path)) == records


def test_a_file_that_was_being_made_is_made_again(tmp_path: Path) -> None:
    log = written(tmp_path, [(1, b"one")])
    log.close()
    pull_file_path(tmp_path / "pulls", log.end).write_bytes(bytes(FILE_BYTES))
    read = found(tmp_path)
    assert (said(read), read.holes, read.problems, read.end) == ([(1, b"one")], [], [], log.end)
