"""The segment that is being written: buffer, blocks, file, and what a start takes over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from qmq.errors import StorageFull
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRIES_MAGIC, ENTRY_SIZE, SEGMENT_HEADER_SIZE
from qmq.storage.consumer_log import active
from qmq.storage.consumer_log.active import ActiveRows
from qmq.storage.consumer_log.header import DerivedHeader, parse_derived
from qmq.storage.consumer_log.subject_order import BLOCK_ROWS, FEW_ROWS
from qmq.storage.disk.disk import Disk
from tests.fake_disk import FakeDisk
from tests.storage.rows import STORE, Feed, as_array

OWNER = DerivedHeader(0, STORE, False, 1_000, 0, 0, 70, 0)


def filled(directory: Path, batches: int, disk: Disk | None = None) -> tuple[ActiveRows, Feed]:
    feed = Feed()
    journal = ActiveRows(disk or Disk(), directory, OWNER)
    for number in range(batches):
        journal.extend(as_array(feed.batch([(number % 7, 1), (7 + number % 3, 2)])))
    return journal, feed


def body(path: Path) -> bytes:
    return path.read_bytes()[DERIVED_HEADER_SIZE:]


def test_flush_writes_new_rows_and_updates_the_checksum(tmp_path: Path) -> None:
    journal, feed = filled(tmp_path, 5)
    assert not journal.path.exists()
    journal.flush()
    journal.extend(as_array(feed.batch([(1, 1)])))
    journal.flush()
    wanted = as_array(feed.rows).tobytes()
    assert body(journal.path) == wanted
    assert (journal.flushed, journal.crc) == (11, crc32c(wanted))
    assert parse_derived(journal.path.read_bytes(), ENTRIES_MAGIC, journal.path) == OWNER
    assert journal.end() == feed.position
    journal.close()


def test_full_buffers_are_written_and_leave_memory(tmp_path: Path) -> None:
    """With more rows than fit two buffers, older ones are read from the file, and arrays returned before stay good."""
    journal = ActiveRows(Disk(), tmp_path, OWNER)
    rows = np.zeros(2 * BLOCK_ROWS + 10, journal.buffer.dtype)
    rows["first_sequence"] = np.arange(len(rows))
    rows["subject"] = np.arange(len(rows)) % 1_000
    journal.extend(rows[:5])
    early, _ = journal.rows_at(0)
    early = early[:5]
    journal.extend(rows[5:])
    assert (journal.sorted_count, journal.fill, journal.waiting_blocks) == (2 * BLOCK_ROWS, 10, 0)
    assert journal.path.stat().st_size == DERIVED_HEADER_SIZE + 2 * BLOCK_ROWS * ENTRY_SIZE
    for index in (0, BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS, 2 * BLOCK_ROWS + 9):
        found, start = journal.rows_at(index)
        assert found[index - start] == rows[index]
    assert np.array_equal(early, rows[:5])
    for each in journal.shelves.from_sequence(17, 0):
        assert list(each.span) == np.flatnonzero(each.row_range.rows()["subject"] == 17).tolist()
    journal.close()


@pytest.mark.parametrize("step", [1, 3, FEW_ROWS + 1])
def test_the_index_of_the_buffer(tmp_path: Path, step: int) -> None:
    """Search after few new rows and after many, alone and mixed."""
    random = np.random.default_rng(step)
    journal = ActiveRows(Disk(), tmp_path, OWNER)
    subjects: list[int] = []
    for _ in range(12):
        for count in (step, 2):
            rows = np.zeros(count, journal.buffer.dtype)
            rows["subject"] = random.integers(0, 50, count)
            subjects += rows["subject"].tolist()
            journal.extend(rows)
            if len(subjects) < BLOCK_ROWS:
                for subject in (0, 49, 50):
                    wanted = [index for index, number in enumerate(subjects) if number == subject]
                    assert list(journal.recent.span(subject)) == wanted
    journal.close()


def test_freeze_and_seal(tmp_path: Path) -> None:
    journal, feed = filled(tmp_path, 20)
    journal.freeze()
    header = parse_derived(journal.path.read_bytes(), ENTRIES_MAGIC, journal.path)
    wanted = as_array(feed.rows).tobytes()
    assert header == OWNER._replace(sealed=True, covered=feed.position, rows=40, body_crc=crc32c(wanted))
    assert journal.sealed is None
    assert not list(tmp_path.glob("*.order"))
    journal.seal()
    assert journal.sealed is not None
    assert journal.sealed.header == header
    assert journal.sealed.rows().tolist() == feed.rows
    assert len(list(tmp_path.glob("*.order"))) == 1
    journal.close()


def test_a_segment_without_rows(tmp_path: Path) -> None:
    journal = ActiveRows(Disk(), tmp_path, OWNER)
    journal.freeze()
    journal.seal()
    assert journal.sealed is not None
    assert journal.sealed.header == OWNER._replace(sealed=True, covered=1_000 + SEGMENT_HEADER_SIZE)
    journal.close()


def test_resume_takes_only_rows_in_the_checkpoint(tmp_path: Path) -> None:
    journal, feed = filled(tmp_path, 10)
    journal.flush()
    count, crc, covered = journal.flushed, journal.crc, feed.position
    journal.extend(as_array(feed.batch([(1, 1)])))
    journal.flush()
    journal.close()
    again = ActiveRows(Disk(), tmp_path, OWNER)
    assert again.resume(count, crc, covered)
    assert again.rows_at(0)[0].tolist() == feed.rows[:-1]
    again.extend(as_array(feed.batches[-1]))
    again.flush()
    again.close()
    assert body(again.path) == as_array(feed.rows).tobytes()
    for wrong in ((count, crc ^ 1), (count - 1, crc), (count + 50, crc)):
        assert not ActiveRows(Disk(), tmp_path, OWNER).resume(*wrong, covered)
    assert not ActiveRows(Disk(), tmp_path, OWNER._replace(first_row=71)).resume(count, crc, covered)
    assert not ActiveRows(Disk(), tmp_path, OWNER).resume(count, crc, feed.batches[0][0][1]), "none lies before"


def test_resume_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "BLOCK_ROWS", 8)
    journal, feed = filled(tmp_path, 10)
    journal.flush()
    again = ActiveRows(Disk(), tmp_path, OWNER)
    assert again.resume(journal.flushed, journal.crc, feed.batches[-1][0][1])
    assert (again.sorted_count, again.fill) == (16, 2)
    assert again.rows_at(17)[0].tolist() == feed.rows[16:18]
    assert again.rows_at(3)[0].tolist() == feed.rows[:16]
    assert again.crc == crc32c(as_array(feed.rows[:18]).tobytes())
    journal.close()
    again.close()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "BLOCK_ROWS", 8)
    disk = FakeDisk()
    journal, feed = filled(tmp_path, 2, disk)
    disk.full = True
    for _ in range(12):
        journal.extend(as_array(feed.batch([(1, 1), (2, 1)])))
    assert journal.waiting_blocks == 3
    with pytest.raises(StorageFull):
        journal.flush()
    assert [journal.rows_at(index)[0][index - journal.rows_at(index)[1]].item() for index in range(28)] == feed.rows
    disk.full = False
    journal.flush()
    assert journal.waiting_blocks == 0
    assert body(journal.path) == as_array(feed.rows).tobytes()
    journal.close()
