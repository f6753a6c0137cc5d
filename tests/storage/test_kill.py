"""Opening after kill -9 and loss of power: what was stored is there, what was torn is not, nothing repeats."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.errors import StorageError
from qmq.format.batch import parse_header
from qmq.storage.types import Hole
from tests.effort import part_of
from tests.fake_disk import REBOOTED, FakeDisk
from tests.storage.stops import fill, killed, reopened
from tests.storage.stores import (
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

SLOW = settings(max_examples=part_of(25), suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_after_kill_everything_that_was_written_is_there(tmp_path: Path, partitions: int) -> None:
    sender = killed(tmp_path, 200, 200, partitions=partitions)
    ends = sender.store.subjects.ends[: sender.store.subjects.count].copy()
    store = open_store(tmp_path, FakeDisk(), partitions=partitions)
    check_stored(store, sender.sent)
    assert store.subjects.ends[: store.subjects.count].tolist() == ends.tolist()
    assert store.recovery.raised_by == 0
    assert not store.recovery.power_loss
    assert store.state == {"broker": b"state"}
    assert sum(part.replayed_batches for part in store.recovery.partitions) == 200
    for number in range(store.subjects.count):
        assert store.subjects.message_count(number, 0, int(store.subjects.ends[number])) == int(
            store.subjects.ends[number]
        )
    close_cleanly(store)
    verified(tmp_path)


def test_the_unsynced_tail_is_written_again_and_synced_before_anything_is_served(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    disk = FakeDisk()
    disk.track(tmp_path)
    store = open_store(tmp_path, disk)
    tail = b"".join(sent.data for sent in sender.sent[-10:])
    assert store.recovery.partitions[0].rewritten_bytes == len(tail)
    lost = tmp_path.with_name("without power")
    disk.without_power(tmp_path, lost)
    assert tail in b"".join(file.read_bytes() for file in segment_files(lost))
    kill(store)


@pytest.mark.parametrize("kind", ["nothing", "zeros", "junk", "end"])
def test_a_last_batch_cut_at_any_byte_is_gone_and_all_before_stays(tmp_path: Path, kind: str) -> None:
    base = tmp_path / "base"
    sender = killed(base, 3, 4)
    last = sender.sent[-1]
    file, start = file_of(base, last)
    counts = Counter[str]()
    for cut in [*range(1, 200, 7), *range(200, len(last.data), 97), len(last.data) - 1]:
        path = tmp_path / f"cut-{cut}"
        shutil.copytree(base, path)
        with (path / file.relative_to(base)).open("r+b") as opened:
            if kind in ("nothing", "end"):
                opened.truncate(start + cut)
            if kind == "nothing":
                opened.truncate(64 << 10)
            opened.seek(start + cut)
            if kind == "zeros":
                opened.write(bytes(len(last.data) - cut))
            if kind == "junk":
                opened.write(b"\xa5" * (len(last.data) - cut + 300))
        store = reopened(path, sender, sender.sent[:-1])
        report = store.recovery.partitions[0]
        if report.holes:  # its header is whole: it may have been seen, so what it had is not given again
            assert report.holes == [Hole(last.position, last.position + len(last.data))]
            assert cut >= parse_header(memoryview(last.data)).data_start
        else:
            assert report.cut_bytes > 0 or last.data[:cut].strip(b"\0") == b""
        counts["hole" if report.holes else "cut"] += 1
        shutil.rmtree(path)
    print(dict(counts))
    assert counts["cut"] > 0
    assert (counts["hole"] > 0) is (kind != "end")


def test_a_tail_that_was_cut_does_not_come_back_with_the_batch_behind_it(tmp_path: Path) -> None:
    sender = killed(tmp_path, 3, 6)
    damage(tmp_path, sender.sent[-1], 0, bytes(len(sender.sent[-1].data)))
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, sender.sent[:-1])
    again = Sender(store)
    again.send("a.0", b"short")  # at the place of the lost one, shorter
    kill(store)
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, [*sender.sent[:-1], *again.sent])
    kill(store)


def test_a_bad_batch_in_the_tail_is_a_hole_and_its_sequences_are_not_given_again(tmp_path: Path) -> None:
    sender = killed(tmp_path, 10, 10)
    bad = sender.sent[14]
    damage(tmp_path, bad, len(bad.data) - 1)
    ends = sender.store.subjects.ends[: sender.store.subjects.count].tolist()
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, [sent for sent in sender.sent if sent is not bad])
    assert store.recovery.partitions[0].holes == [Hole(bad.position, bad.position + len(bad.data))]
    assert store.recovery.raised_by == 0
    assert store.subjects.ends[: store.subjects.count].tolist() == ends
    for name, first, count in bad.runs:
        number = store.subjects.number(name)
        assert number is not None
        assert store.subjects.message_count(number, first, first + count) == 0
    close_cleanly(store)
    verified(tmp_path)
    store = open_store(tmp_path, FakeDisk())
    assert store.recovery.partitions[0].holes == []  # reported once
    kill(store)


def test_a_bad_header_in_the_tail_raises_every_sequence_past_what_it_may_have_held(tmp_path: Path) -> None:
    sender = killed(tmp_path, 10, 10)
    bad = sender.sent[14]
    damage(tmp_path, bad, 20)
    ends = sender.store.subjects.ends[: sender.store.subjects.count].tolist()
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, [sent for sent in sender.sent if sent is not bad])
    assert store.recovery.raised_by == len(bad.data)
    assert all(after >= before for after, before in zip(store.subjects.ends.tolist(), ends, strict=False))
    close_cleanly(store)
    verified(tmp_path)


def test_a_whole_last_batch_that_has_rotten_is_a_hole_and_keeps_its_place(tmp_path: Path) -> None:
    sender = killed(tmp_path, 3, 6)
    bad = sender.sent[-1]
    damage(tmp_path, bad, 250)
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, sender.sent[:-1])
    assert store.recovery.partitions[0].holes == [Hole(bad.position, bad.position + len(bad.data))]
    sent = Sender(store).send("a.0", b"next")
    assert sent.position == bad.position + len(bad.data)
    close_cleanly(store)
    verified(tmp_path)


def test_a_body_cannot_pass_for_a_batch(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    first = sender.send("a", b"x" * 200)
    second_position = first.position + len(first.data)
    forged = bytearray(first.data)
    for place in range(second_position, second_position + 400):  # one of them lies where its position says
        forged[24:32] = place.to_bytes(8, "little")
        if place == second_position + 200:
            break
    bad = sender.stage(("a", [b"\0" * 50 + bytes(forged) * 2]))
    sender.write()
    last = sender.send("a", b"y")
    kill(sender.store)
    damage(tmp_path, bad, 3)
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, [first, last])
    kill(store)


def test_a_hole_over_the_end_of_a_segment(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    fill(sender, 3)
    checkpoint(sender.store)
    fill(sender, 500)
    kill(sender.store)
    files = segment_files(tmp_path)
    assert len(files) > 2
    ends_first = [sent for sent in sender.sent if file_of(tmp_path, sent)[0] == files[0]][-1]
    damage(tmp_path, ends_first, 20)
    store = open_store(tmp_path, FakeDisk())
    rest = [sent for sent in sender.sent if sent is not ends_first]
    check_stored(store, rest)
    assert store.recovery.partitions[0].holes == [Hole(ends_first.position, int(files[1].stem, 16))]
    close_cleanly(store)
    verified(tmp_path)


@SLOW
@given(st.integers(0, 3_000), st.binary(min_size=1, max_size=60), st.integers(0, 30), st.booleans())
def test_whatever_happens_to_the_tail_what_is_whole_is_kept(
    tmp_path_factory: pytest.TempPathFactory, offset: int, junk: bytes, more: int, rebooted: bool
) -> None:
    path = tmp_path_factory.mktemp("store")
    sender = killed(path, 4, 5 + more)
    tail = sender.sent[4:]
    file, start = file_of(path, tail[0])
    data = bytearray(file.read_bytes())
    place = start + offset
    data[place : place + len(junk)] = junk
    if len(data) > 64 << 10:
        data = data[: 64 << 10]
    whole = [
        sent
        for sent in sender.sent
        if file_of(path, sent)[0] != file
        or data[file_of(path, sent)[1] : file_of(path, sent)[1] + len(sent.data)] == sent.data
    ]
    file.write_bytes(data)
    store = open_store(path, FakeDisk(REBOOTED) if rebooted else FakeDisk())
    check_stored(store, whole)
    seen = {sent.position for sent in sender.sent}
    new = Sender(store).send("a.0", b"new")
    assert rebooted is (new.position not in seen and new.position > max(seen) + 1_000_000 // 2)
    close_cleanly(store)
    verified(path)


# --- loss of power ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 2])
def test_after_loss_of_power_positions_and_sequences_go_on_past_what_was_seen(tmp_path: Path, partitions: int) -> None:
    path, lost = tmp_path / "a", tmp_path / "b"
    disk = FakeDisk("boot-1")
    disk.track(path)
    sender = Sender(open_store(path, disk, partitions=partitions))
    fill(sender, 30, partitions)
    checkpoint(sender.store)
    kept = list(sender.sent)
    fill(sender, 10, partitions)
    synced = sender.sent[-10:]
    for partition in range(partitions):
        sender.store.partition(partition).sync()
    sender.send("new.subject", b"1", b"2")  # seen by somebody, and lost
    disk.without_power(path, lost)
    kill(sender.store)

    after = FakeDisk("boot-2")
    store = open_store(lost, after, partitions=partitions)
    assert store.recovery.power_loss
    check_stored(store, kept + synced)
    more = Sender(store)
    reserves = [identity.reserve for identity in identity_of(lost).partitions]
    for partition in range(partitions):
        new = more.send("new.subject", b"again", partition=partition)
        assert new.position > max(sent.position for sent in sender.sent if sent.partition == partition) + 500_000
        assert new.position < reserves[partition]
        assert new.runs[0][1] > 2
    for name in ("a.0", "a.x"):
        number = store.subjects.number(name)
        assert number is not None
        end = int(store.subjects.ends[number])
        assert end > max(f + c for sent in sender.sent for n, f, c in sent.runs if n == name)
        stored = sum(c for sent in kept + synced for n, f, c in sent.runs if n == name)
        assert store.subjects.message_count(number, 0, end) == stored
    check_stored(store, kept + synced + more.sent)
    close_cleanly(store)
    verified(lost)


def test_two_losses_of_power_before_a_checkpoint_raise_twice(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    ends = []
    for boot in ("2", "3", "4"):
        disk = FakeDisk(boot)
        store = open_store(tmp_path, disk)
        check_stored(store, sender.sent)
        number = store.subjects.number("a.0")
        assert number is not None
        ends.append(int(store.subjects.ends[number]))
        kill(store)
    assert ends[0] < ends[1] < ends[2]
    store = open_store(tmp_path, FakeDisk("4"))  # and kill -9 does not raise
    assert int(store.subjects.ends[number]) == ends[2]
    kill(store)


def test_a_crash_at_any_operation_during_recovery_loses_and_repeats_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    sender = killed(base, 20, 30)
    counting = FakeDisk("boot-2")
    shutil.copytree(base, tmp_path / "whole")
    kill(open_store(tmp_path / "whole", counting))
    seen = max(sent.position for sent in sender.sent)
    for operation in (
        "open",
        "pwritev",
        "fsync",
        "fdatasync",
        "rename",
        "ftruncate",
        "map",
        "preadv",
        "fsync_directory",
    ):
        for nth in range(1, counting.calls[operation] + 1):
            path = tmp_path / f"{operation}-{nth}"
            shutil.copytree(base, path)
            disk = FakeDisk("boot-2")
            disk.fail(operation, nth)
            try:
                store = open_store(path, disk)
            except StorageError:
                store = open_store(path, FakeDisk("boot-2"))
            check_stored(store, sender.sent)
            assert Sender(store).send("a.0", b"x").position > seen + 500_000, (operation, nth)
            close_cleanly(store)
            verified(path)
            shutil.rmtree(path)
