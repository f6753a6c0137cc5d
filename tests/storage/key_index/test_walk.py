"""Reading a segment for its hashes: in steps, from anywhere, around bad bytes, and with sectors that fail."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.errors import StorageFailed
from qmq.format.hashing import key_hash
from qmq.storage.key_index.walk import STEP_BYTES, SegmentWalk
from qmq.storage.partition import Partition
from tests.fake_disk import FakeDisk
from tests.storage.key_index.keyed import send_keyed
from tests.storage.stores import Sender, damage, kill, open_store


def walked(walk: SegmentWalk) -> list[tuple[int, int]]:
    """Return all (hash, position) that a walk finds."""
    found: list[tuple[int, int]] = []
    while not walk.is_done:
        before = walk.position
        step = walk.step()
        assert walk.position > before
        assert step.size <= STEP_BYTES or len(step.hashes)
        found += zip(step.hashes.tolist(), step.positions.tolist(), strict=True)
    walk.close()
    return found


def walk_of(part: Partition, start: int = 0, wanted: int | None = None) -> SegmentWalk:
    """Return a walk over the segment that is being written."""
    return part.key_index.walk(part.message_log.spans()[-1], start, wanted)


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    """Return a sender that has stored 40 small batches and a large one between them."""
    sender = Sender(open_store(tmp_path, FakeDisk(), segment_bytes=8 << 20, max_frame_bytes=4 << 20))
    for number in range(40):
        send_keyed(sender, f"key-{number}", body=bytes(3 << 20) if number == 20 else b"body")
    return sender


def hashes_of(sender: Sender, *left_out: int) -> list[tuple[int, int]]:
    """Return what a walk has to find."""
    return [
        (key_hash(f"key-{number}"), sent.position) for number, sent in enumerate(sender.sent) if number not in left_out
    ]


def test_a_walk_finds_the_hash_of_each_batch(sender: Sender) -> None:
    assert walked(walk_of(sender.store.partitions[0])) == hashes_of(sender)
    kill(sender.store)


def test_a_walk_from_any_byte_finds_all_batches_behind_it(sender: Sender) -> None:
    first, _, third = sender.sent[:3]
    part = sender.store.partitions[0]
    for start in range(first.position, third.position + 1):
        expected = [found for found in hashes_of(sender)[:19] if found[1] >= start]
        for wanted in (sender.sent[19].position, start + 33, start + 100):
            walk, found = walk_of(part, start, wanted), list[tuple[int, int]]()
            while walk.position < wanted:
                step = walk.step()
                found += zip(step.hashes.tolist(), step.positions.tolist(), strict=True)
            walk.close()
            assert [one for one in found if one[1] < wanted] == [one for one in expected if one[1] < wanted]
    kill(sender.store)


@pytest.mark.parametrize("lost", [(0,), (5, 6), (19, 20, 21), (20,), (39,), tuple(range(10, 30))])
def test_a_walk_goes_around_bad_headers(tmp_path: Path, sender: Sender, lost: tuple[int, ...]) -> None:
    for number in lost:
        damage(tmp_path, sender.sent[number], 0, bytes(40))
    assert walked(walk_of(sender.store.partitions[0])) == hashes_of(sender, *lost)
    kill(sender.store)


def test_a_body_that_looks_like_a_batch_is_none(tmp_path: Path) -> None:
    """The bytes of a batch with the right position, behind a bad header: only the mark tells that it is in a body."""
    sender = Sender(open_store(tmp_path, FakeDisk()))
    other = Sender(open_store(tmp_path / "other", FakeDisk()))
    forged = bytearray(send_keyed(other, "forged").data)
    probe = send_keyed(sender, "probe", body=bytes(40) + bytes(forged))
    offset = probe.data.index(forged)
    position = probe.position + len(probe.data) + offset
    forged[24:32] = position.to_bytes(8, "little")
    forged[50:56] = sender.store.store_id
    carrier = send_keyed(sender, "other", body=bytes(40) + bytes(forged))
    end = send_keyed(sender, "end")
    assert carrier.position + carrier.data.index(forged) == position
    damage(tmp_path, carrier, 0, bytes(40))
    found = walked(walk_of(sender.store.partitions[0]))
    assert found == [(key_hash("probe"), probe.position), (key_hash("end"), end.position)]
    kill(other.store)
    kill(sender.store)


def test_a_bad_sector_is_passed_over_and_said(sender: Sender) -> None:
    part = sender.store.partitions[0]
    walk = walk_of(part)
    disk = sender.store._disk
    assert isinstance(disk, FakeDisk)
    disk.fail_always("preadv", errno.EIO)
    step = walk.step()
    assert (step.size, step.unread) == (STEP_BYTES, STEP_BYTES)
    disk.heal()
    found = walked(walk)
    assert found == [one for one in hashes_of(sender) if one[1] >= sender.sent[21].position]
    kill(sender.store)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path, sender: Sender) -> None:
    walk = walk_of(sender.store.partitions[0])
    walk.path.unlink()
    with pytest.raises(StorageFailed, match="No such file"):
        walk.step()
    walk.close()
    kill(sender.store)
