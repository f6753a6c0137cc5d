"""A body that holds batches, each saying the very place where it lies: when the batch around them rots, and whoever
reads the log looks for the next header behind it, none of them passes for one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qmq.format.batch import BatchLimits, check_batch, header_crc_of, parse_header, stamp
from qmq.format.build import RunContent, build_batch
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.reader import candidates
from qmq.storage.meta.checkpoint import checkpoint_path, list_checkpoints
from qmq.storage.store import Store
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
from tests.storage.stores import (
    NOW_US,
    PRODUCER,
    Sender,
    check_stored,
    checkpoint,
    close_cleanly,
    damage,
    kill,
    open_store,
)


def _forged(store: Store, position: int) -> bytes:
    """All as it should be, but for a secret that was guessed."""
    parts = build_batch(
        [RunContent("bank.transfer", [b"all of it"], None)],
        created_at_us=NOW_US,
        producer_id=PRODUCER,
        producer_sequence=10**6,
    )
    view = memoryview(bytearray(b"".join(parts)))
    stamp(
        view,
        check_batch(view, BatchLimits()),
        position=position,
        stored_at_us=store.last_stored_at_us + 1,
        partition=0,
        store_id=store.store_id,
        secret=b"a guessed secret",
        first_sequences=0,
    )
    return bytes(view)


def _moved(data: bytes, position: int) -> bytes:
    """A batch that was stored, with its own mark, at another place."""
    moved = bytearray(data)
    moved[24:32] = position.to_bytes(8, "little")
    moved[84:88] = header_crc_of(memoryview(moved), parse_header(moved).data_start).to_bytes(4, "little")
    return bytes(moved)


@pytest.fixture
def log(tmp_path: Path) -> Sender:
    """A log whose second batch holds forged ones."""
    sender = Sender(open_store(tmp_path, FakeDisk()))
    first = sender.send("a.order", b"1")
    store = sender.store
    body, place = (
        b"",
        store.partitions[0].message_log.end + len(first.data) - 1,
    )  # what is not body is as long as in the first
    for make in (_forged, lambda _, position: _moved(first.data, position), lambda _, position: first.data) * 2:
        body += b"." * 37
        body += make(store, place + len(body))
    around = sender.send("a.order", body)
    assert len(candidates(memoryview(around.data), around.position)) == 1 + 4, "these say their places, and it does"
    sender.send("a.order", b"3")
    return sender


@pytest.mark.parametrize("part", ["magic", "size", "data"])
@pytest.mark.parametrize("when", ["in the tail", "rows made again", "no checkpoint", "clean"])
def test_a_forged_batch_fools_nobody(tmp_path: Path, log: Sender, part: str, when: str) -> None:
    if when == "in the tail":
        kill(log.store)
    elif when == "clean":
        close_cleanly(log.store)
    else:
        checkpoint(log.store)
        kill(log.store)
    first, around, last = log.sent
    damage(tmp_path, around, {"magic": 0, "size": 10, "data": len(around.data) - 3}[part])
    if when == "rows made again":
        shutil.rmtree(tmp_path / "consumer-log")
    elif when == "no checkpoint":
        checkpoint_path(tmp_path, list_checkpoints(Disk(), tmp_path)[0]).unlink()
    assert verify(tmp_path, Disk()).counts["messages"].records == 2
    store = open_store(tmp_path, FakeDisk())
    assert store.subjects.number("bank.transfer") is None
    is_vouched = when == "clean" or (when == "rows made again" and part == "data")
    if not is_vouched:  # else the rows of the bad batch are there, as they were, and who reads it finds it bad
        check_stored(store, [first, last])
    close_cleanly(store)
    assert verify(tmp_path, Disk()).counts["messages"].records == 2
