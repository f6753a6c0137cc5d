"""The consumer logs of a partition against plain lists, over segments, blocks, restarts and failing disks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.errors import BadBytes, StorageFull
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRY_SIZE
from qmq.storage.consumer_log import active, sealed_set, subject_order
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.disk import Disk
from tests.effort import part_of
from tests.fake_disk import FakeDisk
from tests.storage.rows import STORE, Feed, Row, as_array

RUNS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=4, unique_by=lambda run: run[0])
STEPS = st.lists(st.one_of(RUNS, st.sampled_from(["roll", "publish", "seal", "flush"])), max_size=60)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 8 rows, so that a few batches reach every border."""
    for module in (active, subject_order):
        monkeypatch.setattr(module, "BLOCK_ROWS", 8)
    monkeypatch.setattr("qmq.storage.consumer_log.partition_index.BLOCK_ROWS", 8)
    monkeypatch.setattr("qmq.storage.consumer_log.subject_order.FEW_ROWS", 3)
    monkeypatch.setattr(sealed_set, "MAPPED_SEGMENTS", 2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "consumer-log" / "0"


def start(directory: Path, feed: Feed, disk: Disk | None = None) -> ConsumerLog:
    log = ConsumerLog.open(disk or FakeDisk(), directory, 0, STORE)
    assert log.load([], 0) == 0
    log.roll(feed.bases[0])
    return log


def add(log: ConsumerLog, rows: list[Row]) -> None:
    log.append(rows[0] if len(rows) == 1 else as_array(rows))


def feed_from(log: ConsumerLog, feed: Feed, position: int) -> None:
    """Feed every batch from *position* on, and roll at later segments, as a store does after load."""
    segment = max(number for number, base in enumerate(feed.bases) if base <= position)
    if log.journal_state() is None:  # position is the end of the last sealed segment
        segment = len([1 for _, end, _ in feed.segments() if end <= position]) - 1
    for rows, number in zip(feed.batches, feed.segment_of, strict=True):
        if rows[0][1] < position or number < segment:
            continue
        while segment < number:
            segment += 1
            log.roll(feed.bases[segment])
        add(log, rows)
    while segment < len(feed.bases) - 1:
        segment += 1
        log.roll(feed.bases[segment])
    log.publish(feed.position)


def all_rows(log: ConsumerLog, limit: int = 1_000) -> list[Row]:
    found: list[Row] = []
    row = log.first_row
    while len(part := log.rows(row, limit)):
        found += part.tolist()
        row += len(part)
    assert row == log.visible_row
    return found


def check_reads(log: ConsumerLog, rows: list[Row]) -> None:
    """Compare every way to read with *rows*, the published ones."""
    assert log.visible_row == len(rows)
    assert all_rows(log) == all_rows(log, 3) == rows
    assert [log.read_entry(number) for number in range(len(rows))] == rows
    for row in [*rows[:: max(1, len(rows) // 7)], *rows[-1:]]:
        for position in (row[1] - 1, row[1], row[1] + 1):
            assert log.row_at_position(position) == sum(r[1] < position for r in rows)
        for time_us in (row[2], row[2] + 1):
            assert log.row_at_time(time_us) == sum(r[2] < time_us for r in rows)
    for subject in range(6):
        check_subject(log, subject, [row for row in rows if row[3] == subject])


def check_subject(log: ConsumerLog, subject: int, mine: list[Row]) -> None:
    ends = [row[0] + row[4] for row in mine]
    for sequence in sorted({0, *(row[0] for row in mine), *(end - 1 for end in ends), *ends}):
        wanted = [row for row, end in zip(mine, ends, strict=True) if end > sequence]
        assert log.subject_rows(subject, sequence, 1_000).tolist() == wanted
        assert log.subject_rows(subject, sequence, 2).tolist() == wanted[:2]
    for row in mine[::3]:
        following = [r[0] for r in mine if r[2] > row[2]]
        assert log.sequence_at_time(subject, row[2]) == row[0]
        assert log.sequence_at_time(subject, row[2] + 1) == (following[0] if following else None)


@given(steps=STEPS)
@settings(max_examples=part_of(120))
def test_against_lists(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    feed = Feed()
    log = start(tmp_path_factory.mktemp("log") / "0", feed)
    published: list[Row] = []
    for step in steps:
        if step == "roll":
            log.roll(feed.roll())
        elif step == "publish":
            log.publish(feed.position)
            published = feed.rows
        elif step == "seal":
            log.seal_pending()
        elif step == "flush":
            log.flush()
        else:
            add(log, feed.batch(step))
        assert log.visible_row == len(published)
        assert log.end_row == len(feed.rows)
    check_reads(log, published)
    for row in feed.rows[::5]:
        since = [found for rows in log.rows_since(row[1]) for found in rows.tolist()]
        assert since == [other for other in feed.rows if other[1] >= row[1]]
    log.publish(feed.position)
    check_reads(log, feed.rows)
    log.close()


@given(steps=STEPS, lag=st.integers(0, 20))
@settings(max_examples=part_of(40))
def test_publish_goes_batch_by_batch(tmp_path_factory: pytest.TempPathFactory, steps: list[Any], lag: int) -> None:
    """Publishing may lag over blocks and segments; rows behind it show in no way to read."""
    feed = Feed()
    log = start(tmp_path_factory.mktemp("log") / "0", feed)
    for step in steps:
        if step == "roll":
            log.roll(feed.roll())
        elif isinstance(step, list):
            add(log, feed.batch(step))
    batches = feed.batches[: max(0, len(feed.batches) - lag)]
    log.publish(batches[-1][0][1] + batches[-1][0][10] if batches else 0)
    check_reads(log, [row for batch in batches for row in batch])
    log.close()


def mixed(batches: int, *, rolls: int = 1, seed: int = 1) -> Feed:
    """Make a feed of random batches over *rolls* + 1 segments."""
    random = np.random.default_rng(seed)
    feed = Feed()
    for number in range(batches):
        subjects = random.permutation(5)[: random.integers(1, 5)].tolist()
        feed.batch([(subject, int(random.integers(1, 6))) for subject in subjects])
        if (number + 1) % (batches // (rolls + 1)) == 0 and len(feed.bases) <= rolls:
            feed.roll(gap=number % 2 * 100)
    return feed


def filled(directory: Path, feed: Feed, disk: Disk | None = None) -> ConsumerLog:
    log = start(directory, feed, disk)
    feed_from(log, feed, feed.bases[0])
    log.seal_pending()
    log.flush()
    return log


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_restart_goes_on_where_the_checkpoint_was(directory: Path) -> None:
    feed = mixed(40)
    log = filled(directory, feed)
    state, covered = log.journal_state(), feed.position
    log.close()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), covered, state) == covered
    check_reads(log, feed.rows)
    add(log, feed.batch([(1, 3), (2, 1)]))
    log.publish(feed.position)
    log.flush()
    check_reads(log, feed.rows)
    assert log.journal_state() is not None
    log.close()


@given(batches=st.integers(4, 30), rolls=st.integers(0, 3), known=st.integers(0, 30), late=st.booleans())
@settings(max_examples=part_of(60))
def test_nothing_at_or_past_covered_is_used(
    tmp_path_factory: pytest.TempPathFactory, batches: int, rolls: int, known: int, late: bool
) -> None:
    """A checkpoint at any batch, and files written on after it: fed again, the log is the same."""
    directory = tmp_path_factory.mktemp("log") / "0"
    feed = mixed(batches, rolls=rolls)
    log = start(directory, feed)
    segment, state, covered = 0, log.journal_state(), feed.bases[0]
    for number, (rows, at) in enumerate(zip(feed.batches, feed.segment_of, strict=True)):
        while segment < at:
            segment += 1
            log.roll(feed.bases[segment])
        if number == known:
            if late:  # the journal may know rows that the log's sync did not cover
                add(log, rows)
            log.flush()
            state, covered = log.journal_state(), rows[0][1]
            if late:
                continue
        add(log, rows)
    log.flush()
    log.seal_pending()
    log.close()
    wanted = mixed(batches, rolls=rolls)
    for path in directory.iterdir():  # the rows past covered are from another history
        data = bytearray(path.read_bytes())
        if path.suffix == ".entries" and not data[18]:
            first_lost = DERIVED_HEADER_SIZE + ENTRY_SIZE * (state[1] if state else 0)
            data[first_lost:] = bytes(len(data[first_lost:]))
            path.write_bytes(data)
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    position = log.load(wanted.segments(), covered, state)
    assert position <= max(covered, feed.bases[0])
    assert log.visible_row == sum(row[1] < position for row in wanted.rows)
    feed_from(log, wanted, position)
    check_reads(log, wanted.rows)
    log.close()


@pytest.mark.no_cover
def test_a_cut_at_every_byte_is_healed(directory: Path) -> None:
    feed = mixed(5)
    log = filled(directory, feed)
    state, covered = log.journal_state(), feed.position
    log.close()
    good = contents(directory)
    assert len(good) == 3
    for name in good:
        for cut in range(0, len(good[name]), 5):  # in time each byte of a header and of a row
            for other, data in good.items():
                (directory / other).write_bytes(data[:cut] if other == name else data)
            log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
            position = log.load(feed.segments(), covered, state)
            assert position in (covered, *feed.bases)
            assert position == covered or not name.endswith(".order")
            feed_from(log, feed, position)
            assert all_rows(log) == feed.rows
            check_subject(log, 1, [row for row in feed.rows if row[3] == 1])
            log.seal_pending()
            log.flush()
            log.close()
            assert contents(directory) == good


@given(data=st.data())
@settings(max_examples=part_of(80))
def test_a_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("log") / "0"
    feed = mixed(14)
    log = filled(directory, feed)
    state, covered = log.journal_state(), feed.position
    log.close()
    good = contents(directory)
    name = data.draw(st.sampled_from(sorted(good)))
    at = data.draw(st.integers(0, len(good[name]) - 1))
    changed = bytearray(good[name])
    changed[at] ^= data.draw(st.integers(1, 255))
    (directory / name).write_bytes(changed)
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    feed_from(log, feed, log.load(feed.segments(), covered, state))
    check_reads(log, feed.rows)
    log.close()


def reread_of(feed: Feed) -> Any:
    def reread(base: int, end: int) -> Iterator[Any]:
        for rows in feed.batches:
            if base <= rows[0][1] < end:
                yield rows[0] if len(rows) == 1 else as_array(rows)

    return reread


def test_only_a_lost_middle_segment_is_made_again(directory: Path) -> None:
    feed = mixed(40, rolls=3)
    log = filled(directory, feed)
    state, covered = log.journal_state(), feed.position
    log.close()
    good = contents(directory)
    (directory / f"{feed.bases[1]:016x}.entries").unlink()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), covered, state, reread_of(feed)) == covered
    assert contents(directory) == good
    check_reads(log, feed.rows)
    log.close()
    (directory / f"{feed.bases[1]:016x}.entries").unlink()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), covered, state) == feed.bases[1]
    log.close()


def test_rot_found_at_first_use(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not read old segments. Rotten ones are made again when they are read, or at the next start."""
    monkeypatch.setattr(sealed_set, "CHECKED_AT_START", 0)
    feed = mixed(40, rolls=3)
    log = filled(directory, feed)
    state, covered = log.journal_state(), feed.position
    log.close()
    path = directory / f"{feed.bases[1]:016x}.entries"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), covered, state, reread_of(feed)) == covered
    check_reads(log, feed.rows)
    assert path.read_bytes() == good
    log.close()

    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), covered, state) == covered
    with pytest.raises(BadBytes, match="restart the broker"):
        all_rows(log)
    log.close()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    position = log.load(feed.segments(), covered, state)
    assert position == feed.bases[1]
    feed_from(log, feed, position)
    check_reads(log, feed.rows)
    log.close()


def test_files_of_other_segments_are_deleted_and_foreign_files_stay(directory: Path) -> None:
    feed = mixed(20)
    log = filled(directory, feed)
    state = log.journal_state()
    log.close()
    for name in ("00000000000000ff.entries", "00000000000000ff.order.tmp", "notes.txt"):
        (directory / name).write_bytes(b"x")
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    log.load(feed.segments(), feed.position, state)
    log.close()
    assert {path.name for path in directory.iterdir()} == {
        f"{feed.bases[0]:016x}.entries",
        f"{feed.bases[0]:016x}.order",
        f"{feed.bases[1]:016x}.entries",
        "notes.txt",
    }


def test_files_of_another_store_or_partition_are_not_used(directory: Path) -> None:
    feed = mixed(20)
    log = filled(directory, feed)
    state = log.journal_state()
    log.close()
    for partition, store in ((1, STORE), (0, b"other1")):
        copy = directory.with_name(f"copy{partition}{store!r}")
        shutil.copytree(directory, copy)
        other = ConsumerLog.open(FakeDisk(), copy, partition, store)
        assert other.load(feed.segments(), feed.position, state) == feed.bases[0]
        assert other.end_row == 0
        other.close()


def test_a_missing_order_is_written_by_seal_pending(directory: Path) -> None:
    feed = mixed(20)
    log = filled(directory, feed)
    state = log.journal_state()
    log.close()
    path = directory / f"{feed.bases[0]:016x}.order"
    good = path.read_bytes()
    path.unlink()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), feed.position, state) == feed.position
    log.seal_pending()
    assert path.read_bytes() == good
    log.close()


def test_a_full_disk_keeps_rows_readable_and_loses_none(directory: Path) -> None:
    disk = FakeDisk()
    feed = Feed()
    log = start(directory, feed, disk)
    add(log, feed.batch([(0, 1), (1, 2)]))
    log.flush()
    disk.full = True
    for _ in range(20):
        add(log, feed.batch([(2, 1), (1, 2)]))
    log.publish(feed.position)
    assert log.waiting_blocks > 1
    with pytest.raises(StorageFull, match=r"\.entries"):
        log.flush()
    log.roll(feed.roll())
    with pytest.raises(StorageFull):
        log.seal_pending()
    add(log, feed.batch([(2, 1), (1, 2)]))
    log.publish(feed.position)
    check_reads(log, feed.rows)
    disk.full = False
    log.seal_pending()
    log.flush()
    assert log.waiting_blocks == 0
    check_reads(log, feed.rows)
    state = log.journal_state()
    log.close()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    assert log.load(feed.segments(), feed.position, state) == feed.position
    check_reads(log, feed.rows)
    log.close()


def test_segments_without_rows(directory: Path) -> None:
    feed = Feed()
    log = start(directory, feed)
    log.roll(feed.roll())
    add(log, feed.batch([(3, 2)]))
    log.roll(feed.roll())
    log.roll(feed.roll())
    log.seal_pending()
    state = log.journal_state()
    log.publish(feed.position)
    check_reads(log, feed.rows)
    log.flush()
    log.close()
    log = ConsumerLog.open(FakeDisk(), directory, 0, STORE)
    feed_from(log, feed, log.load(feed.segments(), feed.position, state))
    check_reads(log, feed.rows)
    log.close()
