"""The scrub of segments finds every fault, with the right position, and marks the bad bytes and no others."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.errors import BadBatch, StorageFailed
from qmq.format.batch import parse_header, validate_stored_header
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.format.pieces import read_answer
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.store import Store
from qmq.storage.types import Hole, SegmentSpan
from qmq.storage.verify import scrub
from qmq.storage.verify.scrub import Pace, PartitionDamage, SegmentReader
from tests.fake_disk import FakeDisk
from tests.storage.stops import fill
from tests.storage.stores import Sender, Sent, checkpoint, close_cleanly, damage, file_of, kill, open_store, verified


def filled(path: Path, count: int = 400, size: int = 300) -> Sender:
    """Return the sender of a store with some sealed segments."""
    sender = Sender(open_store(path, FakeDisk()))
    fill(sender, count, size=size)
    checkpoint(sender.store)
    return sender


def spans(store: Store) -> list[SegmentSpan]:
    return list(store.partitions[0].message_log.sealed)


def scrubbed(
    store: Store, span: SegmentSpan, disk: Disk | None = None, holes: tuple[Hole, ...] = ()
) -> list[PartitionDamage]:
    """Return all damage in a segment."""
    directory = store.partitions[0].message_log.file_offset_of(span.base).path.parent
    owner = SegmentOwner(store.store_id, 0)
    reader = SegmentReader(disk if disk is not None else Disk(), directory, span, owner, store.secret, holes)
    found = list[PartitionDamage]()
    try:
        while not (step := reader.step()).is_last:
            found += step.found
    finally:
        reader.close()
    return found + list(step.found)


def sealed_batches(sender: Sender, span: SegmentSpan) -> list[Sent]:
    return [sent for sent in sender.sent if span.base <= sent.position < span.end]


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    sender = filled(tmp_path)
    yield sender
    kill(sender.store)


@pytest.mark.parametrize("read_bytes", [300, 5_000, 64 << 10])
def test_nothing_is_found_in_sound_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr(scrub, "READ_BYTES", read_bytes)
    sender = filled(tmp_path)
    sender.send("large", b"x" * 30_000)  # longer than one read
    fill(sender, 200)
    assert len(spans(sender.store)) > 2
    for span in spans(sender.store):
        assert scrubbed(sender.store, span) == []
    close_cleanly(sender.store)
    verified(tmp_path)


def test_a_step_reads_little(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "READ_BYTES", 1_000)
    store, span = sender.store, spans(sender.store)[0]
    directory = store.partitions[0].message_log.file_offset_of(span.base).path.parent
    reader = SegmentReader(Disk(), directory, span, SegmentOwner(store.store_id, 0), store.secret)
    sizes = []
    while not (step := reader.step()).is_last:
        sizes.append(step.size)
    reader.close()
    assert max(sizes) == 1_000
    assert sum(sizes) >= span.end - span.base


@pytest.mark.parametrize("left", [0, 20, 200])
def test_a_file_that_is_cut_while_it_is_read(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """*left*: the bytes of the last batch that stay."""
    monkeypatch.setattr(scrub, "READ_BYTES", 1_000)
    store, span = sender.store, spans(sender.store)[0]
    last = sealed_batches(sender, span)[-1]
    path, start = file_of(tmp_path, last)
    reader = SegmentReader(Disk(), path.parent, span, SegmentOwner(store.store_id, 0), store.secret)
    assert not reader.step().is_last
    os.truncate(path, start + left)
    found = list[PartitionDamage]()
    while not (step := reader.step()).is_last:
        found += step.found
    reader.close()
    (bad,) = [*found, *step.found]
    assert (bad.start, bad.end, bad.reason) == (last.position, span.end, "the file is shorter than it was")


@pytest.mark.parametrize("read_bytes", [300, 64 << 10])
def test_every_flipped_bit_is_found_and_named(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    """Flip bits of one batch of several runs, and of its neighbour."""
    monkeypatch.setattr(scrub, "READ_BYTES", read_bytes)
    span = spans(sender.store)[0]
    batches = sealed_batches(sender, span)
    many = next(sent for sent in batches if len(sent.runs) > 1)
    kinds = Counter[str]()
    few = read_bytes == 300
    bits = [*range(0, 8 * 96, 5 if few else 1), *range(8 * 96, 8 * len(many.data), 101 if few else 11)]
    for bit in bits:
        flip(tmp_path, many, bit)
        (found,) = scrubbed(sender.store, span)
        assert (found.partition, found.start, found.end) == (0, many.position, many.position + len(many.data)), bit
        kinds[check_marks(many, bit, found)] += 1
        flip(tmp_path, many, bit)
    print(dict(kinds))
    assert set(kinds) == {"batch", "run", "messages"}
    assert scrubbed(sender.store, span) == []


def flip(path: Path, sent: Sent, bit: int) -> None:
    damage(path, sent, bit // 8, bytes([read_byte(path, sent, bit // 8) ^ 1 << bit % 8]))


def read_byte(path: Path, sent: Sent, offset: int) -> int:
    file, start = file_of(path, sent)
    with file.open("rb") as opened:
        opened.seek(start + offset)
        return opened.read(1)[0]


def check_marks(sent: Sent, bit: int, found: PartitionDamage) -> str:
    """Check that the marks are what a reader of the batch leaves out, and return them."""
    bad = bytearray(sent.data)
    bad[bit // 8] ^= 1 << bit % 8
    if found.marks == ((sent.position, len(sent.data)),):
        with pytest.raises(BadBatch):
            validate_stored_header(memoryview(bad), sent.position, bytes(16))
        return "batch"
    _, (lost,) = read_answer(memoryview(bad))
    start = sent.position + parse_header(sent.data).data_start
    ((mark, size),) = found.marks
    assert start <= mark
    assert mark + size <= sent.position + len(sent.data)
    if size != 4:
        return "run"
    assert lost.messages == 1
    return "messages"


def test_several_faults_are_named_each(sender: Sender, tmp_path: Path) -> None:
    for span in spans(sender.store):
        batches = sealed_batches(sender, span)
        hit = random.Random(3).sample(range(len(batches)), 6)
        for place in hit:
            damage(
                tmp_path, batches[place], random.Random(place).choice([0, 30, 84, 100, len(batches[place].data) - 1])
            )
        found = scrubbed(sender.store, span)
        bad = {batches[place].position for place in hit}
        covered = {sent.position for sent in batches for one in found if one.start <= sent.position < one.end}
        assert covered == bad
        assert sum(one.end - one.start for one in found) == sum(len(batches[place].data) for place in hit)


def test_bytes_that_no_header_explains_end_at_the_next_right_one(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "READ_BYTES", 1_000)
    span = spans(sender.store)[1]
    batches = sealed_batches(sender, span)
    first, last = batches[3], batches[30]
    size = last.position - first.position
    junk = random.Random(5).randbytes(size)
    damage(tmp_path, first, 0, junk[:600] + first.data + junk[600 + len(first.data) :])  # a header in the wrong place
    (found,) = scrubbed(sender.store, span)
    assert (found.start, found.end, found.marks) == (first.position, last.position, ((first.position, size),))
    end = span.end - first.position
    damage(tmp_path, first, 0, random.Random(6).randbytes(end))
    (found,) = scrubbed(sender.store, span)
    assert (found.start, found.end) == (first.position, span.end)


def test_holes_are_known(sender: Sender, tmp_path: Path) -> None:
    span = spans(sender.store)[0]
    batches = sealed_batches(sender, span)
    damage(tmp_path, batches[4], 200)
    hole = Hole(batches[4].position, batches[5].position)
    assert scrubbed(sender.store, span, holes=(hole,)) == []
    assert len(scrubbed(sender.store, span)) == 1


def test_a_segment_that_is_short_missing_or_foreign(sender: Sender, tmp_path: Path) -> None:
    span = spans(sender.store)[0]
    batches = sealed_batches(sender, span)
    path = sender.store.partitions[0].message_log.file_offset_of(span.base).path
    whole = path.read_bytes()
    path.write_bytes(whole[: batches[7].position - span.base + 50])
    (found,) = scrubbed(sender.store, span)
    assert found.marks == ((batches[7].position, span.end - batches[7].position),)
    path.write_bytes(b"\0" * SEGMENT_HEADER_SIZE + whole[SEGMENT_HEADER_SIZE:])
    (found,) = scrubbed(sender.store, span)
    assert (found.start, found.end, found.marks) == (span.base, span.base + SEGMENT_HEADER_SIZE, ())
    assert str(path) in found.reason
    path.unlink()
    (found,) = scrubbed(sender.store, span)
    assert found.marks == ()
    assert f"{path} is missing" in found.reason


@pytest.mark.parametrize("sectors", [1, 3])
def test_bad_sectors_cost_only_their_batches(sender: Sender, sectors: int) -> None:
    span = spans(sender.store)[0]
    batches = sealed_batches(sender, span)
    disk, path = FakeDisk("boot-1"), sender.store.partitions[0].message_log.file_offset_of(span.base).path
    for sector in range(sectors):
        disk.spoil(path, 8_192 + 4_096 * sector)
    found = scrubbed(sender.store, span, disk)
    assert disk.struck["unreadable"]
    assert disk.still_open() == []
    low, high = span.base + 8_192, span.base + 8_192 + 4_096 * sectors
    for sent in batches:
        is_hit = sent.position < high and low < sent.position + len(sent.data)
        assert is_hit == any(one.start <= sent.position < one.end for one in found), sent.position
    assert all("Input/output error" in one.reason for one in found)


# --- one batch -------------------------------------------------------------------------------------------------------


def test_one_batch_is_read_and_judged(sender: Sender, tmp_path: Path) -> None:
    store, span = sender.store, spans(sender.store)[0]
    directory = store.partitions[0].message_log.file_offset_of(span.base).path.parent
    sent = sealed_batches(sender, span)[4]
    size = len(sent.data)

    def read(disk: Disk) -> tuple[bytes, PartitionDamage | None]:
        reader = SegmentReader(disk, directory, span, SegmentOwner(store.store_id, 0), store.secret)
        try:
            view, found = reader.read_batch(sent.position, size)
            return bytes(view), found
        finally:
            reader.close()

    assert read(Disk()) == (sent.data, None)
    broken = FakeDisk("boot-1")
    broken.fail_always("preadv", errno.EIO)
    view, found = read(broken)
    assert view == b""
    assert found is not None
    assert "Input/output error" in found.reason
    assert found.marks == ((sent.position, size),)
    damage(tmp_path, sent, size - 1)
    view, found = read(Disk())
    assert found is not None
    assert found.start < found.marks[0][0] < found.end
    busy = FakeDisk("boot-1")
    busy.fail_always("open", errno.EMFILE)
    with pytest.raises(StorageFailed, match="raise the limit of open files"):
        read(busy)
    damage(tmp_path, sent, 30)
    _, found = read(Disk())
    assert found is not None
    assert found.marks == ((sent.position, size),)


# --- pace ------------------------------------------------------------------------------------------------------------


def test_the_pace_holds_over_pauses() -> None:
    pace, now_us, read = Pace(1_000_000), 5_000_000, 0
    start_us, random_source = now_us, random.Random(1)
    for _ in range(1_000):
        size = random_source.randrange(1, 70_000)
        read += size
        now_us = max(now_us + random_source.randrange(0, 20_000), pace.next_us(size, now_us))
        assert read <= now_us - start_us
    idle_us = now_us + 60_000_000
    assert pace.next_us(1_000, idle_us) == idle_us + 1_000  # unused time is not saved up
