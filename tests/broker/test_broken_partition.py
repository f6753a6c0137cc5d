"""After a failed sync the broker goes on, with checkpoints; the next start may find what was not synced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Send, SyncBroken
from qmq.broker.ports.effects import Refused, Sent
from qmq.errors import SyncFailed
from tests.broker.harness import Driven, bodies_of
from tests.fake_disk import FakeDisk

SMALL = {"segment_bytes": 64 << 10, "max_frame_bytes": 16 << 10}
LEFT = ["killed", "killed, and the pages gone", "without power"]


def break_partition(driven: Driven) -> None:
    """Have the wanted sync fail."""
    assert isinstance(driven.disk, FakeDisk)
    (wanted,) = driven.wanted
    driven.wanted.clear()
    driven.disk.fail("fdatasync")
    with pytest.raises(SyncFailed) as caught:
        driven.store.partition(wanted.partition).sync()
    with pytest.raises(SyncFailed):
        driven.checkpoint()  # the broker does not know of it yet
    said = driven.do(SyncBroken(wanted.partition, caught.value))
    assert isinstance(said[0], Refused)
    driven.checkpoint()


def started_again(driven: Driven, left: str) -> Driven:
    """Start another broker on what is left of the directory."""
    assert isinstance(driven.disk, FakeDisk)
    directory = driven.directory.with_name("left")
    if left == "killed":
        shutil.copytree(driven.directory, directory)
    else:
        driven.disk.without_power(driven.directory, directory)
    driven.store.close(clean=False)
    disk = FakeDisk("boot-2" if left == "without power" else driven.disk.boot)
    return Driven(directory, disk=disk, partitions=len(driven.store.partitions), **SMALL)


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_failed_to_sync_can_be_sent_again_after_a_restart(tmp_path: Path, partitions: int, left: str) -> None:
    disk = FakeDisk("boot-1")
    disk.track(tmp_path / "first")
    driven = Driven(tmp_path / "first", disk=disk, auto_sync=False, partitions=partitions, **SMALL)
    driven.do(driven.send_command({"a": [b"a0"], "b": [b"b0"]}))
    driven.sync()
    driven.checkpoint()
    failed = driven.send_command({"a": [b"a1", b"a2"], "b": [b"b1"], "c": [b"c0"]})
    again = Send(1, 1, memoryview(bytearray(failed.batch)), True)
    driven.do(failed)
    break_partition(driven)
    group = driven.subscribe("")
    seen = bodies_of(driven.pull(group))
    assert seen == [b"a0", b"b0", b"a1", b"a2", b"b1", b"c0"]
    stored = [b"a0", b"b0"]
    ends = {name: int(driven.store.subjects.ends[number]) for number, name in enumerate("abc")}
    positions = [driven.store.partitions[partition].message_log.end for partition in range(partitions)]
    if partitions == 2:
        driven.auto_sync = True
        assert driven.send("a", b"a3").partition == 1
        assert driven.send("c", b"c1", flush=False).partition == 1
        assert bodies_of(driven.pull(group)) == [b"a3", b"c1"]
        stored += [b"a3", b"c1"]
    driven.checkpoint()
    after = started_again(driven, left)
    (sent,) = after.do(again)
    assert isinstance(sent, Sent)
    new = bodies_of(after.pull(after.subscribe("")))
    everything = bodies_of(after.pull(after.subscribe("", group="other")))
    failed_bodies = [b"a1", b"a2", b"b1", b"c0"]
    if left == "killed":
        assert new == []  # it is the same batch still
        assert everything == stored[:2] + failed_bodies + stored[2:]
    else:
        assert new == failed_bodies
        assert everything == stored + failed_bodies
        assert sent.position >= positions[sent.partition]
        assert [int(first) >= ends[name] for first, name in zip(sent.first_sequences, "abc", strict=True)] == [True] * 3
    counts = [
        after.store.subjects.message_count(number, 0, int(after.store.subjects.ends[number])) for number in range(3)
    ]
    assert counts == [sum(body.startswith(name) for body in everything) for name in (b"a", b"b", b"c")]
    after.close()


def test_a_kill_soon_after_a_failed_sync_gives_no_place_again(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.track(tmp_path / "first")
    driven = Driven(tmp_path / "first", disk=disk, auto_sync=False, **SMALL)
    seen = driven.send("a", b"seen", flush=False)
    driven.do(driven.send_command({"a": [b"not acknowledged"]}))
    disk.fail("fdatasync")
    with pytest.raises(SyncFailed):
        driven.store.partitions[0].sync()
    after = started_again(driven, "killed, and the pages gone")
    sent = after.send("a", b"later", flush=False)
    assert sent.position > seen.position
    assert sent.first_sequences > seen.first_sequences
    after.close()


@pytest.mark.parametrize("left", LEFT)
def test_producers_that_are_not_packed_each_time_are_packed_then(
    tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.broker._PRODUCERS_AT_ONCE_BYTES", 0)
    disk = FakeDisk("boot-1")
    disk.track(tmp_path / "first")
    driven = Driven(tmp_path / "first", disk=disk, auto_sync=False, **SMALL)
    failed = driven.send_command({"a": [b"a0"]})
    again = Send(1, 1, memoryview(bytearray(failed.batch)), True)
    driven.do(failed)
    break_partition(driven)
    after = started_again(driven, left)
    (sent,) = after.do(again)
    assert isinstance(sent, Sent)
    assert bodies_of(after.pull(after.subscribe("a"))) == [b"a0"]
    after.close()
