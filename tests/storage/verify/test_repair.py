"""Repair: derived files are made again, what a start mends is mended, and the rest is named and left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.errors import DirectoryInUse, InvalidOption, StorageError
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import SegmentOwner, pack_header
from qmq.storage.meta.checkpoint import checkpoint_path, list_checkpoints
from qmq.storage.verify.repair import Outcome, Repair, repair
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
from tests.storage.histories import Files, History, kind_of, quick_directory, read_files, survive, write_files
from tests.storage.stops import fill
from tests.storage.stores import (
    NOW_US,
    Sender,
    check_stored,
    checkpoint,
    close_cleanly,
    damage,
    file_of,
    identity_of,
    kill,
    open_store,
    segment_files,
    verified,
)

SMALL = {"segment_bytes": 4 << 10, "max_frame_bytes": 2 << 10}
STATE = {"broker": b"what it knows"}


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    """Return the sender of the messages of the store in tmp_path, which was stopped cleanly."""
    sender = Sender(open_store(tmp_path, FakeDisk(), partitions=2, **SMALL))
    fill(sender, 90, 2)
    checkpoint(sender.store, STATE)
    sender.store.close()
    return sender


def _repaired(directory: Path) -> Repair:
    return repair(directory, FakeDisk(), NOW_US)


def _outcomes(done: Repair) -> dict[str, Outcome]:
    return {str(t.finding.file.relative_to(done.directory)): t.outcome for t in done.treated}


def _derived(directory: Path) -> Files:
    """Return the files that a repair must make again; the index of the last segment is not compared."""
    last = {segment_files(directory, number)[-1].stem for number in (0, 1)}
    paths = [*directory.glob("consumer-log/*/*"), *directory.glob("log-*/*.index")]
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in paths
        if path.suffix != ".index" or path.stem not in last
    }


def test_nothing_wrong_nothing_done(tmp_path: Path, sender: Sender) -> None:
    before = read_files(tmp_path)
    done = _repaired(tmp_path)
    assert (done.treated, done.notes, done.is_whole) == ([], [], True)
    assert read_files(tmp_path) == before


def _delete(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [_delete, _empty, _cut, _rot])
def test_derived_files_are_made_again_equal_byte_for_byte(
    tmp_path: Path, sender: Sender, spoil: Callable[[Path], None]
) -> None:
    wanted = _derived(tmp_path)
    assert {kind_of(name) for name in wanted} == {"entries", "order", "index"}
    spoilt = sorted(wanted)[::2]
    for name in spoilt:
        spoil(tmp_path / name)
    done = _repaired(tmp_path)
    assert done.is_whole
    assert {name for name, outcome in _outcomes(done).items() if outcome is Outcome.MADE_AGAIN} >= set(spoilt)
    assert _derived(tmp_path) == wanted
    verified(tmp_path)
    store = open_store(tmp_path, FakeDisk(), partitions=2, **SMALL)
    check_stored(store, sender.sent)
    assert store.state == STATE
    kill(store)


def test_contents_that_fit_their_checksums_but_not_the_log(tmp_path: Path, sender: Sender) -> None:
    """A start checks checksums alone; verify, and so repair, also checks the content."""
    wanted = _derived(tmp_path)
    names = [name for name in wanted if name.startswith("log-0") and name.endswith(".index")]
    other = bytearray(wanted[names[0]])
    (tmp_path / names[1]).write_bytes(other)
    done = _repaired(tmp_path)
    assert _outcomes(done) == {names[1]: Outcome.MADE_AGAIN}
    assert _derived(tmp_path) == wanted


def test_repair_mends_all_that_a_start_mends(tmp_path: Path, sender: Sender) -> None:
    newest = checkpoint_path(tmp_path, list_checkpoints(Disk(), tmp_path)[0])
    shutil.copy(newest, tmp_path / "checkpoint-9")  # a checkpoint to fall back to
    _rot(tmp_path / "checkpoint-9")
    _rot(tmp_path / "store-b")
    segment = segment_files(tmp_path)[1]
    with segment.open("r+b") as opened:
        opened.write(bytes(64))
    done = _repaired(tmp_path)
    assert _outcomes(done) == {
        "store-b": Outcome.MENDED,
        "checkpoint-9": Outcome.REMOVED,
        str(segment.relative_to(tmp_path)): Outcome.MENDED,
    }
    assert done.is_whole
    assert done.notes
    verified(tmp_path)


def test_rot_in_the_message_log_is_left_and_all_else_made_again(tmp_path: Path, sender: Sender) -> None:
    bad = sender.sent[5]
    damage(tmp_path, bad, len(bad.data) - 1)
    file, start = file_of(tmp_path, bad)
    wanted = _derived(tmp_path)
    shutil.rmtree(tmp_path / "consumer-log")
    done = _repaired(tmp_path)
    assert not done.is_whole
    (left,) = [treated for treated in done.treated if treated.outcome is not Outcome.MADE_AGAIN]
    assert (left.outcome, left.finding.file, left.finding.position) == (Outcome.LEFT, file, start)
    assert _derived(tmp_path) == wanted, "its other runs may be good, and are served"


def test_a_batch_without_a_header_is_given_up_with_its_rows(tmp_path: Path, sender: Sender) -> None:
    bad = sender.sent[5]
    damage(tmp_path, bad, 100)
    file, start = file_of(tmp_path, bad)
    shutil.rmtree(tmp_path / "consumer-log")
    done = _repaired(tmp_path)
    assert not done.is_whole
    (lost,) = [treated for treated in done.treated if treated.outcome is not Outcome.MADE_AGAIN]
    assert (lost.outcome, lost.finding.file, lost.finding.position) == (Outcome.GIVEN_UP, file, start)
    verified(tmp_path)
    store = open_store(tmp_path, FakeDisk(), partitions=2, **SMALL)
    check_stored(store, [sent for sent in sender.sent if sent != bad])
    kill(store)


def test_rot_behind_the_checkpoint_is_given_up_and_named(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), **SMALL))
    fill(sender, 20)
    checkpoint(sender.store)
    bad, _ = sender.send("a.b", b"1"), sender.send("a.b", b"2")
    kill(sender.store)
    damage(tmp_path, bad, len(bad.data) - 1)
    shutil.rmtree(tmp_path / "consumer-log")
    done = _repaired(tmp_path)
    (lost,) = [treated for treated in done.treated if treated.outcome is not Outcome.MADE_AGAIN]
    assert (lost.outcome, lost.finding.file, lost.finding.position) == (Outcome.GIVEN_UP, *file_of(tmp_path, bad))
    verified(tmp_path)


def _gone(file: Path) -> None:
    file.unlink()


def _shorter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def _foreign(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(pack_header(SegmentOwner(b"other!", 0), int(file.stem, 16), int(file.stem, 16), NOW_US))


@pytest.mark.parametrize("change", [_gone, _shorter, _foreign])
def test_nothing_is_changed_while_a_segment_could_be_put_back(
    tmp_path: Path, sender: Sender, change: Callable[[Path], None]
) -> None:
    segment = segment_files(tmp_path)[1]
    good = segment.read_bytes()
    change(segment)
    shutil.rmtree(tmp_path / "consumer-log" / "1")
    before = read_files(tmp_path)
    done = _repaired(tmp_path)
    assert not done.is_whole
    assert _outcomes(done)[str(segment.relative_to(tmp_path))] is Outcome.LEFT
    assert {treated.outcome for treated in done.treated} == {Outcome.LEFT}
    assert read_files(tmp_path) == before
    segment.write_bytes(good)
    assert _repaired(tmp_path).is_whole
    store = open_store(tmp_path, FakeDisk(), partitions=2, **SMALL)
    check_stored(store, sender.sent)
    kill(store)


def test_without_an_identity_nothing_is_changed(tmp_path: Path, sender: Sender) -> None:
    for name in ("store-a", "store-b"):
        _rot(tmp_path / name)
    before = read_files(tmp_path)
    done = _repaired(tmp_path)
    assert set(_outcomes(done).items()) == {("store-a", Outcome.LEFT), ("store-b", Outcome.LEFT)}
    assert read_files(tmp_path) == before
    with pytest.raises(InvalidOption, match="no data directory"):
        _repaired(tmp_path / "log-0")
    assert not (tmp_path / "log-0" / "store-a").exists()


def test_a_directory_in_use_is_left_alone(tmp_path: Path, sender: Sender) -> None:
    shutil.rmtree(tmp_path / "consumer-log")
    lock = DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    before = read_files(tmp_path)
    with pytest.raises(DirectoryInUse, match="in use by process"):
        _repaired(tmp_path)
    assert read_files(tmp_path) == before
    lock.release()
    assert _repaired(tmp_path).is_whole


@pytest.mark.parametrize("operation", ["open", "pwritev", "fdatasync", "rename", "unlink"])
def test_a_repair_that_fails_can_be_done_again(tmp_path: Path, sender: Sender, operation: str) -> None:
    """After a failed sync the log goes on in a new segment, so the one before is not compared."""
    last = {segment_files(tmp_path, number)[-1].stem for number in (0, 1)}
    wanted = {name: data for name, data in _derived(tmp_path).items() if Path(name).stem not in last}
    struck = 0
    for nth in (2, 5, 13):
        for name in sorted(wanted)[::3]:
            _rot(tmp_path / name)
        disk = FakeDisk()
        disk.fail(operation, nth, 5)
        try:
            repair(tmp_path, disk, NOW_US)
        except StorageError:
            struck += 1
        assert _repaired(tmp_path).is_whole
        assert _derived(tmp_path).items() >= wanted.items()
    print(f"{operation}: {struck} repairs failed")
    assert struck


def test_a_broker_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Groups keep their cursors, repeats are known, and messages that were acked are not given again."""
    with quick_directory() as quick:
        history = History(quick / "history")
        for moment in (history.newer, history.stopped):
            write_files(quick / "data", moment.files)
            shutil.rmtree(quick / "data" / "consumer-log")
            assert _repaired(quick / "data").is_whole
            assert verify(quick / "data", Disk()).is_good
            report, damaged = survive(history, quick / "data", moment, set())
            assert report.is_good
            assert not damaged


def test_progress_goes_to_the_end(tmp_path: Path, sender: Sender) -> None:
    shutil.rmtree(tmp_path / "consumer-log")
    told: list[tuple[int, int]] = []
    repair(tmp_path, FakeDisk(), NOW_US, lambda done, total: told.append((done, total)))
    assert told[0][0] > 0
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_segments_larger_than_the_default_are_not_taken_for_cut(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), segment_bytes=300 << 20, max_frame_bytes=1 << 20))
    fill(sender, 20)
    checkpoint(sender.store)
    fill(sender, 5)
    kill(sender.store)
    shutil.rmtree(tmp_path / "consumer-log")
    floor = identity_of(tmp_path).partitions[0].floor
    assert _repaired(tmp_path).is_whole
    assert identity_of(tmp_path).partitions[0].floor == floor, "the log goes on where it was"
    store = open_store(tmp_path, FakeDisk(), segment_bytes=300 << 20, max_frame_bytes=1 << 20)
    check_stored(store, sender.sent)
    close_cleanly(store)
