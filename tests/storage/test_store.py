"""The door: storing all or nothing, reading, checkpoints."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from qmq.errors import (
    BadBytes,
    StorageError,
    StorageFailed,
    SyncFailed,
    TooManySubjects,
)
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from tests.fake_disk import FakeDisk
from tests.storage.stops import open_again
from tests.storage.stores import (
    NOW_US,
    Sender,
    check_stored,
    checkpoint,
    close_cleanly,
    header_at,
    kill,
    open_store,
    segment_files,
    verified,
)

# --- storing ---------------------------------------------------------------------------------------------------------


def test_batches_lie_one_after_another_and_are_written_with_one_call(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    start = sender.store.partitions[0].message_log.end
    before = disk.calls["pwritev"]
    sent = [sender.stage(("a", [b"x" * size])) for size in (1, 100, 1_000)]
    assert sender.store.partitions[0].message_log.end == start
    sender.write()
    assert disk.calls["pwritev"] == before + 1
    assert [batch.position for batch in sent] == [
        start, start + len(sent[0].data), start + len(sent[0].data) + len(sent[1].data)
    ]  # fmt: skip
    assert sender.store.partitions[0].message_log.end == sent[-1].position + len(sent[-1].data)
    assert sender.store.last_stored_at_us == header_at(sender.store, sent[-1]).stored_at_us
    check_stored(sender.store, sent)
    kill(sender.store)


def test_more_batches_than_one_call_takes(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), segment_bytes=1 << 20))
    for number in range(2_500):
        sender.stage(("a", [b"%d" % number]))
    sender.write()
    check_stored(sender.store, sender.sent)
    kill(sender.store)


def test_writes_that_come_short_are_finished(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    disk.short = 100
    sender.stage(("a", [b"x" * 300]))
    sender.stage(("b", [b"y" * 300]), ("c", [b"z"]))
    sender.write()
    disk.heal()
    check_stored(sender.store, sender.sent)
    kill(sender.store)


def test_writing_nothing_is_nothing(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    store = open_store(tmp_path, disk)
    before, end = disk.calls["pwritev"], store.partitions[0].message_log.end
    store.partitions[0].write()
    assert (disk.calls["pwritev"], store.partitions[0].message_log.end) == (before, end)
    kill(store)


def test_a_segment_is_filled_then_the_next_one_begins_where_it_ends(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    while len(segment_files(tmp_path)) < 3:
        sender.send("a", b"x" * 5_000)
    files = segment_files(tmp_path)
    bases = [int(file.stem, 16) for file in files]
    assert [base + file.stat().st_size for base, file in zip(bases[:-1], files[:-1], strict=True)] == bases[1:]
    assert sender.sent[-1].position == bases[-1] + SEGMENT_HEADER_SIZE
    check_stored(sender.store, sender.sent)
    close_cleanly(sender.store)
    verified(tmp_path)


def test_one_write_may_go_on_in_a_new_segment(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    for _ in range(30):
        sender.stage(("a", [b"x" * 9_000]))
    sender.write()
    assert len(segment_files(tmp_path)) >= 4
    check_stored(sender.store, sender.sent)
    kill(sender.store)
    check_stored(open_again(tmp_path), sender.sent)


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    for body in (b"x", b"l" * 200_000, b"y", b"l" * 100_000, b"l" * 300_000, b"z" * 1_000):
        sender.send("a", body)
    check_stored(sender.store, sender.sent)
    kill(sender.store)
    again = open_again(tmp_path)
    check_stored(again, sender.sent)
    close_cleanly(again)
    verified(tmp_path)


def test_too_many_subjects(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), max_subjects=2))
    sender.send("a", b"x")
    sender.send("b", b"x")
    with pytest.raises(TooManySubjects, match=r"2 subjects.*max_subjects"):
        sender.send("c", b"x")
    sender.send("a", b"y")
    check_stored(sender.store, sender.sent)
    kill(sender.store)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_nothing_is_readable_before_it_is_published(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    store = sender.store
    first = sender.stage(("a", [b"1"]))
    second = sender.stage(("a", [b"2"]))
    store.partitions[0].write()
    assert store.partitions[0].consumer_log.visible_row == 0
    assert list(store.headers_since([])) == []
    store.partitions[0].consumer_log.publish(second.position)
    assert store.partitions[0].consumer_log.visible_row == 1
    assert store.partitions[0].consumer_log.read_entry(0)[1] == first.position
    store.partitions[0].consumer_log.publish(store.partitions[0].message_log.end)
    assert len(store.partitions[0].consumer_log.rows(0, 10)) == 2
    kill(store)


@pytest.mark.parametrize(("before", "size"), [(1, 10), (0, 1 << 20)])
def test_views_outside_the_log_are_refused(tmp_path: Path, before: int, size: int) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    for _ in range(20):
        sender.send("a", b"x" * 9_000)
    files = segment_files(tmp_path)
    for place in (int(files[0].stem, 16) + SEGMENT_HEADER_SIZE, int(files[-1].stem, 16) + SEGMENT_HEADER_SIZE):
        assert len(sender.store.partitions[0].message_log.view(place, 10)) == 10
        with pytest.raises(BadBytes, match="run qmq verify"):
            sender.store.partitions[0].message_log.view(place - before, size)
    with pytest.raises(BadBytes):
        sender.store.partitions[0].message_log.view(sender.store.partitions[0].message_log.end, 1)
    kill(sender.store)


def test_views_outlive_the_store_and_cost_no_descriptors(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    for _ in range(30):
        sender.send("a", b"x" * 9_000)
    views = [sender.store.partitions[0].message_log.view(sent.position, len(sent.data)) for sent in sender.sent]
    kill(sender.store)
    assert [bytes(view) for view in views] == [sent.data for sent in sender.sent]


def test_a_sealed_segment_that_was_cut_under_us_is_an_error_not_a_signal(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    for _ in range(30):
        sender.send("a", b"x" * 9_000)
    close_cleanly(sender.store)
    store = open_store(tmp_path, FakeDisk())
    segment_files(tmp_path)[0].write_bytes(b"short")
    with pytest.raises(BadBytes, match="shorter than it was"):
        store.partitions[0].message_log.view(sender.sent[0].position, 100)
    segment_files(tmp_path)[1].unlink()
    with pytest.raises(StorageFailed, match="cannot open"):
        store.partitions[0].message_log.view(int(segment_files(tmp_path)[1].stem, 16) - 100, 50)
    kill(store)


def test_one_subject_over_partitions_comes_in_sequence_order(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), partitions=3))
    random = np.random.default_rng(7)
    for _ in range(200):
        runs = [("a", [b"x"] * int(random.integers(1, 4)))] + ([("b", [b"y"])] if random.random() < 0.3 else [])
        sender.stage(*runs, partition=int(random.integers(3)))
        if random.random() < 0.5:
            sender.write()
    sender.write()
    store = sender.store
    number = store.subjects.number("a")
    assert number is not None
    expected = [(sent.partition, first, count) for sent in sender.sent for n, first, count in sent.runs if n == "a"]
    for limit in (1, 3, 50, 1_000):
        found: list[tuple[int, int, int]] = []
        sequence = 0
        while parts := store.subject_rows(number, sequence, limit):
            found += [(partition, row[0], row[4]) for partition, rows in parts for row in rows.tolist()]
            assert sum(len(rows) for _, rows in parts) <= limit
            sequence = found[-1][1] + found[-1][2]
        assert found == expected
    inside = next(first for _, first, count in expected if count > 1 and first > 20)
    assert store.subject_rows(number, inside + 1, 1)[0][1][0]["first_sequence"] == inside
    for sent in sender.sent[::20]:
        at = header_at(store, sent).stored_at_us
        assert store.sequence_at_time(number, at) == next(
            first for batch in sender.sent if header_at(store, batch).stored_at_us >= at
            for n, first, _ in batch.runs if n == "a"
        )  # fmt: skip
    assert store.sequence_at_time(number, NOW_US * 2) is None
    kill(store)


def test_headers_come_in_the_order_in_which_they_were_stored(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), partitions=3))
    for number in range(100):
        sender.send("a", b"%d" % number, partition=number * 7 % 3)
    store = sender.store
    found = [(partition, header.position) for partition, header in store.headers_since([])]
    assert found == [(sent.partition, sent.position) for sent in sender.sent]
    since = [next(sent.position for sent in sender.sent[50:] if sent.partition == number) for number in range(3)]
    assert [place for _, place in found[50:]] == [header.position for _, header in store.headers_since(since)]
    assert [header.position for partition, header in store.headers_since(since[:1]) if partition > 0] == [
        sent.position for sent in sender.sent if sent.partition > 0
    ]
    kill(store)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_claims_what_was_written_when_it_began(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    store = sender.store
    sender.send("a", b"1", b"2")
    assert store.unsynced_bytes == len(sender.sent[0].data)
    made = store.begin_checkpoint({"x": b"y"})
    assert store.unsynced_bytes == 0
    later = sender.send("b", b"later")
    made.write()
    store.finish_checkpoint(made)
    assert store.partitions[0].message_log.synced == later.position
    assert store.unsynced_bytes == len(later.data)
    claims = read_checkpoint(Disk(), tmp_path, 1).claims
    assert claims is not None
    assert claims.partitions[0].position == later.position
    assert claims.subjects.count == 1
    assert np.frombuffer(claims.subjects.ends, "<u8").tolist() == [2]
    assert claims.state.items() >= {"x": b"y"}.items()
    kill(store)
    check_stored(open_again(tmp_path), sender.sent)


def test_only_two_checkpoints_are_kept(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    for number in range(5):
        sender.send("a", b"x")
        checkpoint(sender.store)
        assert list_checkpoints(Disk(), tmp_path) == [number + 1, number][: number + 1]
    kill(sender.store)


def test_a_checkpoint_that_fails_at_any_operation_leaves_the_older_ones_and_can_be_repeated(tmp_path: Path) -> None:
    counting = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path / "counting", counting))
    for _ in range(30):
        sender.send("a", b"x" * 5_000)
    before = counting.calls.copy()
    checkpoint(sender.store)
    kill(sender.store)
    for operation in ("open", "pwritev", "fsync", "rename", "map", "fsync_directory", "fdatasync"):
        for nth in range(1, counting.calls[operation] - before[operation] + 1):
            path = tmp_path / f"{operation}-{nth}"
            disk = FakeDisk()
            sender = Sender(open_store(path, disk))
            checkpoint(sender.store, {"number": b"1"})
            for _ in range(30):
                sender.send("a", b"x" * 5_000)
            disk.fail(operation, nth, errno.EIO)
            try:
                checkpoint(sender.store, {"number": b"2"})
            except SyncFailed:
                kill(sender.store)
                check_stored(open_again(path), sender.sent)
                continue
            except StorageError:
                assert sender.store.partitions[0].message_log.synced < sender.store.partitions[0].message_log.end
            disk.heal()
            sender.send("b", b"x")
            checkpoint(sender.store, {"number": b"3"})
            sender.store.close(clean=True)
            verified(path)
            store = open_store(path, FakeDisk())
            assert store.state == {"number": b"3"}
            assert store.recovery.clean
            check_stored(store, sender.sent)
            kill(store)


def test_closing_twice_and_not_cleanly(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    sender.send("a", b"x")
    checkpoint(sender.store)
    disk.fail("fsync", 1)
    with pytest.raises(StorageFailed):
        sender.store.close(clean=True)
    sender.store.close(clean=True)
    assert disk.still_open() == []
    store = open_store(tmp_path, disk)
    assert not store.recovery.clean
    kill(store)
