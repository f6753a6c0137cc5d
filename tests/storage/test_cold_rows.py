"""Rows that are not in memory are not waited for, and rows that a disk does not give back are made again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qmq.errors import StorageFailed
from qmq.storage.consumer_log import active as journal
from qmq.storage.consumer_log import subject_order as order
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.disk import PAGE
from qmq.storage.message_log.cold_reads import NotInMemory, Residence
from tests.fake_disk import FakeDisk
from tests.storage.rows import STORE, Feed, Row, as_array
from tests.storage.stores import Sender, check_stored, checkpoint, close_cleanly, open_store, verified

SEGMENT_BATCHES = 90


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 rows, 6 KiB: a segment has a few."""
    for module in (journal, order):
        monkeypatch.setattr(module, "BLOCK_ROWS", 128)


class Cold:
    """Three segments of rows, the first sealed, the second rolled, the third being written; nothing is in memory."""

    def __init__(self, directory: Path) -> None:
        self.feed = Feed()
        self.disk = FakeDisk("boot-1", forgets=0.0)
        self.directory = directory / "0"
        self.log = ConsumerLog.open(self.disk, self.directory, 0, STORE)
        self.log.load([], 0, reread=self.reread)
        self.log.roll(self.feed.bases[0])
        for segment in range(3):
            if segment:
                self.log.roll(self.feed.roll())
            if segment == 1:
                self.log.seal_pending()
            for _ in range(SEGMENT_BATCHES):
                self.log.append(as_array(self.feed.batch([(number, 1 + number) for number in range(6)])))
        self.log.publish(self.feed.position)
        self.log.flush()
        self.residence = Residence(self.disk, 0)
        self.log.attend(self.residence)
        self.residence.may_wait = False
        self.disk.forget()

    def reread(self, base: int, end: int) -> list[Any]:
        return [as_array(rows) for rows in self.feed.batches if base <= rows[0][1] < end]

    def ask(self, question: Callable[[], Any]) -> Any:
        """Ask until the answer is at hand, with reads between; at last with a wait. Nothing else reads."""
        known = set[object]()
        while True:
            before = self.disk.calls["pread"]
            try:
                return question()
            except NotInMemory as missing:
                assert self.disk.calls["pread"] == before
                read = missing.read
            if read.key in known:
                self.residence.may_wait = True
                try:
                    return question()
                finally:
                    self.residence.may_wait = False
            known.add(read.key)
            while read.step():
                pass
            for unreadable in read.unreadable:
                self.log.distrust(unreadable.file_range.path)

    def rows(self) -> list[Row]:
        found: list[Row] = []
        row = self.log.first_row
        while row < self.log.visible_row:
            part = self.ask(partial(self.log.rows, row, 100))
            found += part.tolist()
            row += len(part)
        return found

    def subject(self, number: int) -> list[Row]:
        found: list[Row] = []
        while True:
            sequence = found[-1][0] + found[-1][4] if found else 0
            part = self.ask(partial(self.log.subject_rows, number, sequence, 50))
            if not len(part):
                return found
            found += part.tolist()

    def check(self) -> None:
        """All rows are there, in order and by subject."""
        assert self.rows() == self.feed.rows
        for number in range(6):
            assert self.subject(number) == [row for row in self.feed.rows if row[3] == number]


def test_rows_of_every_age_are_read_by_a_thread(tmp_path: Path) -> None:
    cold = Cold(tmp_path)
    cold.check()
    assert cold.disk.struck["missing"] >= 3
    cold.disk.forget()
    assert [cold.ask(partial(cold.log.read_entry, row)) for row in (3, 700, 1_200)] == [
        cold.feed.rows[row] for row in (3, 700, 1_200)
    ]
    cold.disk.forget()
    stamp = cold.feed.rows[650][2]
    first = next(row for row in cold.feed.rows if row[3] == 4 and row[2] >= stamp)
    assert cold.ask(lambda: cold.log.sequence_at_time(4, stamp)) == first[0]
    cold.log.close()


def pages_of(path: Path) -> range:
    return range(0, path.stat().st_size, PAGE)


def test_what_cannot_be_read_of_sealed_rows_is_made_again(tmp_path: Path) -> None:
    cold = Cold(tmp_path)
    cold.log.seal_pending()
    cold.log.flush()
    struck = 0
    for path in sorted([*cold.directory.glob("*.order"), *cold.directory.glob("*.entries")]):
        if path.stem == f"{cold.feed.bases[2]:016x}":
            continue
        good = path.read_bytes()
        for offset in pages_of(path):
            cold.disk.forget()
            cold.disk.spoil(path, offset)
            cold.check()
            assert path.read_bytes() == good
            assert cold.disk.bad == set()
            struck += 1
    assert struck >= 2 * (7 + 1)
    assert cold.disk.struck["unreadable"] >= struck
    cold.log.close()


@pytest.mark.parametrize("page", range(3))
def test_rows_that_cannot_be_read_before_they_are_sealed_are_made_again_then(tmp_path: Path, page: int) -> None:
    cold = Cold(tmp_path)
    for base in cold.feed.bases[1:]:  # the one that is written has another name until a checkpoint syncs it
        (path,) = cold.directory.glob(f"{base:016x}.entries*")
        cold.disk.spoil(path, page * PAGE)
    with pytest.raises(StorageFailed, match="Input/output error"):
        cold.check()
    cold.log.roll(cold.feed.roll())
    cold.log.seal_pending()
    cold.log.flush()
    cold.check()
    assert cold.disk.struck["unreadable"] >= 2
    cold.log.close()


@pytest.mark.parametrize("suffix", ["entries", "order", "index"])
def test_a_start_makes_again_what_it_cannot_read(tmp_path: Path, suffix: str) -> None:
    disk = FakeDisk("boot-1", forgets=0.0)
    store = open_store(tmp_path, disk)
    sender = Sender(store)
    for number in range(80):
        sender.stage(*((f"a.{subject}", [bytes(300)] * 2) for subject in range(5)))
        sender.write()
        if number == 40:
            checkpoint(store)
    close_cleanly(store)
    paths = sorted(tmp_path.glob(f"**/*.{suffix}"))
    for path in paths:
        disk.spoil(path, 0)
    store = open_store(tmp_path, disk)
    check_stored(store, sender.sent)
    assert len(store.subject_rows(0, 0, 1_000)[0][1]) == 80
    assert disk.struck["unreadable"] >= 1
    close_cleanly(store)
    disk.bad.clear()
    verified(tmp_path)
