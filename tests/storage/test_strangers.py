"""Segments that are missing, cut, or not those that belong in their place: named, skipped, and the rest is served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from qmq.errors import ForeignFile
from qmq.storage.message_log.segment import SegmentOwner, pack_header
from qmq.storage.store import Store
from tests.fake_disk import FakeDisk
from tests.storage.stops import fill
from tests.storage.stores import (
    NOW_US,
    Sender,
    Sent,
    check_counts,
    checkpoint,
    close_cleanly,
    file_of,
    identity_of,
    kill,
    open_store,
    positions,
    segment_files,
    verified,
)

#: Long, and others pass the same lines: several times as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

Change = Callable[[Path, int, bytes], None]


def _give_header(file: Path, owner: SegmentOwner, base: int) -> None:
    with file.open("r+b") as opened:
        opened.write(pack_header(owner, base, base, NOW_US))


def _of_another_store(file: Path, base: int, store_id: bytes) -> None:
    _give_header(file, SegmentOwner(b"other!", 0), base)


def _of_another_partition(file: Path, base: int, store_id: bytes) -> None:
    _give_header(file, SegmentOwner(store_id, 1), base)


def _of_another_place(file: Path, base: int, store_id: bytes) -> None:
    _give_header(file, SegmentOwner(store_id, 0), base + 4_096)


def _of_a_newer_store(file: Path, base: int, store_id: bytes) -> None:
    """A newer version, and not ours: there is no reason to want a newer QMQ for it."""
    _of_another_store(file, base, store_id)
    data = bytearray(file.read_bytes())
    data[8] = 9
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    file.write_bytes(data)


def _gone(file: Path, base: int, store_id: bytes) -> None:
    file.unlink()


def _emptied(file: Path, base: int, store_id: bytes) -> None:
    file.write_bytes(b"")


SMALL = {"segment_bytes": 10 << 10, "max_frame_bytes": 9 << 10}
UNTRUSTED = [_of_another_store, _of_another_partition, _of_another_place, _of_a_newer_store]


def _several(path: Path, after: int) -> Sender:
    """At least five segments, the last *after* batches behind the checkpoint."""
    sender = Sender(open_store(path, FakeDisk(), **SMALL))
    fill(sender, 100)
    checkpoint(sender.store)
    fill(sender, after)
    kill(sender.store)
    assert len(segment_files(path)) >= 5
    return sender


def _seen(sender: Sender) -> tuple[set[int], dict[str, int]]:
    """All positions that were given, and the next sequence of each subject."""
    positions = {sent.position + n for sent in sender.sent for n in range(sum(count for _, _, count in sent.runs))}
    ends = {name: first + count for sent in sender.sent for name, first, count in sent.runs}
    return positions, ends


def _check_served(store: Store, rest: list[Sent]) -> None:
    """All of *rest* can be read, and no other batch can; rows may be left of a segment that is too short for them."""
    assert positions(store) == [(sent.partition, sent.position) for sent in rest]
    for sent in rest:
        assert bytes(store.partitions[sent.partition].message_log.view(sent.position, len(sent.data))) == sent.data
        for name, first, count in sent.runs:
            number = store.subjects.number(name)
            assert number is not None
            ((partition, rows),) = store.subject_rows(number, first, 1)
            assert (partition, *rows[0].item()[:2], int(rows[0]["count"])) == (0, first, sent.position, count)
    check_counts(store, rest)


def _check_new(path: Path, sender: Sender, rest: list[Sent]) -> None:
    """Only *rest* is there; what is sent now gets neither a position nor a sequence that somebody has seen."""
    seen, ends = _seen(sender)
    for _ in range(2):
        store = open_store(path, FakeDisk(), **SMALL)
        _check_served(store, rest)
        more = Sender(store)
        for name in ends:
            sent = more.send(name, b"new", b"er")
            assert not {sent.position, sent.position + 1} & seen
            assert sent.runs[0][1] >= ends[name], name
        rest = rest + more.sent
        _check_served(store, rest)
        close_cleanly(store)
        verified(path)


@pytest.mark.parametrize("after", [0, 60], ids=["claimed", "with a tail"])
@pytest.mark.parametrize("place", [0, 1, -2, -1])
@pytest.mark.parametrize("change", [*UNTRUSTED, _gone, _emptied])
def test_one_segment_less(tmp_path: Path, change: Change, place: int, after: int) -> None:
    sender = _several(tmp_path, after)
    file = segment_files(tmp_path)[place]
    rest = [sent for sent in sender.sent if file_of(tmp_path, sent)[0] != file]
    assert 0 < len(rest) < len(sender.sent)
    change(file, int(file.stem, 16), sender.store.store_id)
    left = file.read_bytes() if change in UNTRUSTED else b""
    store = open_store(tmp_path, FakeDisk(), **SMALL)
    if change in UNTRUSTED:
        assert [file.name in note for note in store.recovery.notes].count(True) == 1
    kill(store)
    _check_new(tmp_path, sender, rest)
    if change in UNTRUSTED:
        assert file.read_bytes() == left


@pytest.mark.parametrize("change", UNTRUSTED)
def test_an_untrusted_client_where_the_log_would_go_on(tmp_path: Path, change: Change) -> None:
    """It lies where the next segment would be made; nothing of it is written to."""
    sender = _several(tmp_path, 5)
    last = segment_files(tmp_path)[-1]
    end = sender.sent[-1].position + len(sender.sent[-1].data)
    stranger = last.with_name(f"{end:016x}.messages")
    stranger.write_bytes(b"\1" * 9_000)
    change(stranger, end, sender.store.store_id)
    left = stranger.read_bytes()
    _check_new(tmp_path, sender, sender.sent)
    assert stranger.read_bytes() == left
    store = open_store(tmp_path, FakeDisk(), **SMALL)
    assert Sender(store).send("a.0", b"x").position >= end + 9_000
    kill(store)


def test_an_untrusted_client_far_away_changes_nothing(tmp_path: Path) -> None:
    sender = _several(tmp_path, 5)
    reserve = identity_of(tmp_path).partitions[0].reserve
    stranger = segment_files(tmp_path)[-1].with_name(f"{reserve + (1 << 40):016x}.messages")
    stranger.write_bytes(pack_header(SegmentOwner(b"other!", 0), reserve + (1 << 40), 0, NOW_US))
    end = sender.sent[-1].position + len(sender.sent[-1].data)
    store = open_store(tmp_path, FakeDisk(), **SMALL)
    assert Sender(store).send("a.0", b"x").position == end
    close_cleanly(store)
    verified(tmp_path)


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_only_untrusted_clients_is_the_wrong_directory(tmp_path: Path, with_checkpoint: bool) -> None:
    sender = _several(tmp_path, 5)
    for file in segment_files(tmp_path):
        _of_another_store(file, int(file.stem, 16), sender.store.store_id)
    if not with_checkpoint:
        for path in tmp_path.glob("checkpoint-*"):
            path.unlink()
    before = {file: file.read_bytes() for file in segment_files(tmp_path)}
    with pytest.raises(ForeignFile, match="belongs to store"):
        open_store(tmp_path, FakeDisk(), **SMALL)
    assert before == {file: file.read_bytes() for file in segment_files(tmp_path)}


@pytest.mark.parametrize("beyond", [0, 7])
def test_a_last_segment_cut_behind_a_batch_does_not_give_positions_again(tmp_path: Path, beyond: int) -> None:
    """Nothing says how much was there but that no zeros follow."""
    sender = _several(tmp_path, 10)
    file, start = file_of(tmp_path, sender.sent[-4])
    with file.open("r+b") as opened:
        opened.truncate(start + beyond)
    _check_new(tmp_path, sender, sender.sent[:-4])


def test_a_whole_directory_of_another_partition_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path, FakeDisk(), partitions=2)
    sender = Sender(store)
    fill(sender, 20, 2)
    close_cleanly(store)
    shutil.move(tmp_path / "log-0", tmp_path / "x")
    shutil.move(tmp_path / "log-1", tmp_path / "log-0")
    shutil.move(tmp_path / "x", tmp_path / "log-1")
    with pytest.raises(ForeignFile, match="was written as partition 1"):
        open_store(tmp_path, FakeDisk(), partitions=2)
