"""Opening a data directory after every kind of stop: what was stored is there, what was torn is not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.errors import BadBytes, DirectoryInUse, ForeignFile, InvalidOption, StorageError, StorageFailed, StorageFull
from qmq.format.layout import (
    CHECKPOINT_MAGIC,
    CHECKPOINT_VERSION,
    IDENTITY_MAGIC,
    IDENTITY_VERSION,
    SEGMENT_HEADER_SIZE,
)
from qmq.storage.checkpoint import Hole, checkpoint_path, list_checkpoints, read_checkpoint
from qmq.storage.disk import Buffer, Disk
from qmq.storage.envelope import pack_envelope, read_envelope
from qmq.storage.identity import COPY_NAMES, pack_identity, read_copies
from qmq.storage.recovery import Source
from qmq.storage.segment import Owner, pack_header
from qmq.storage.store import Store
from tests.storage.disks import HastyDisk
from tests.storage.faults import FaultyDisk, copy_killed
from tests.storage.stores import (
    NOW_US,
    Sender,
    Sent,
    check_stored,
    checkpoint,
    close_cleanly,
    damage,
    file_of,
    kill,
    open_store,
    options,
    segment_files,
    verified,
)

SLOW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Rebooted(HastyDisk):
    """The machine has been started again."""

    def boot_id(self) -> str:
        return "another boot"


def fill(sender: Sender, count: int, partitions: int = 1, size: int = 300) -> None:
    """Batches of one and of several runs, some written together."""
    for number in range(count):
        partition = number % partitions
        if number % 5 == 4:
            sender.stage(("a.x", [b"1" * size, b"2"]), (f"b.{number % 7}", [b"3"]), partition=partition)
        else:
            sender.stage((f"a.{number % 3}", [b"%d" % number, b"x" * size]), partition=partition)
        if number % 3 == 0:
            sender.write()
    sender.write()


def killed(path: Path, before: int = 40, after: int = 10, **changes: int) -> Sender:
    """A store that was killed with *after* batches behind its checkpoint."""
    sender = Sender(open_store(path, HastyDisk(), **changes))
    fill(sender, before, changes.get("partitions", 1))
    checkpoint(sender.store, {"broker": b"state"})
    fill(sender, after, changes.get("partitions", 1))
    kill(sender.store)
    return sender


def reopened(path: Path, sender: Sender, batches: list[Sent] | None = None, disk: Disk | None = None) -> Store:
    """Open again, check that exactly *batches* are there and that more can be sent, close, and verify."""
    store = open_store(path, disk if disk is not None else HastyDisk())
    kept = sender.sent if batches is None else batches
    check_stored(store, kept)
    more = Sender(store)
    more.send("a.0", b"after the stop")
    check_stored(store, [*kept, *more.sent])
    close_cleanly(store)
    verified(path)
    return store


# --- a new directory -------------------------------------------------------------------------------------------------


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where" / "data"
    store = open_store(path, store_id_hint=b"\x7f\0\0\1\x51\x91")
    assert store.recovery.created
    assert store.store_id == b"\x7f\0\0\1\x51\x91"
    assert store.state == {}
    assert store.last_stored_at_us == 0
    assert store.subject_count == 0
    close_cleanly(store)
    assert {*COPY_NAMES, "lock", "subjects", "checkpoint-1", "log-0", "consumer-log"} == {
        file.name for file in path.iterdir()
    }
    verified(path)


def test_positions_of_two_new_directories_differ(tmp_path: Path) -> None:
    ends = []
    for name in "ab":
        store = open_store(tmp_path / name, HastyDisk())
        ends.append(store.end(0))
        kill(store)
    assert ends[0] != ends[1]


def test_a_crash_at_any_operation_while_a_directory_is_made_leaves_one_that_opens(tmp_path: Path) -> None:
    counting = FaultyDisk()
    kill(open_store(tmp_path / "whole", counting))
    for operation in (
        "open",
        "pwritev",
        "fsync",
        "fdatasync",
        "rename",
        "ftruncate",
        "map",
        "mkdir",
        "fsync_directory",
    ):
        assert counting.calls[operation]
        for nth in range(1, counting.calls[operation] + 1):
            path = tmp_path / f"{operation}-{nth}"
            disk = FaultyDisk()
            disk.fail(operation, nth)
            try:
                store = open_store(path, disk)
            except StorageError:
                store = open_store(path, HastyDisk())
            Sender(store).send("a", b"b")
            close_cleanly(store)
            verified(path)


# --- clean stops -----------------------------------------------------------------------------------------------------


def test_after_a_clean_stop_nothing_is_read_again(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, HastyDisk()))
    fill(sender, 60)
    checkpoint(sender.store, {"broker": b"state"})
    sender.store.state = {"broker": b"state"}
    close_cleanly(sender.store)
    store = open_store(tmp_path, Rebooted())
    assert store.recovery.clean
    assert not store.recovery.power_loss
    assert store.recovery.raised_by == 0
    (report,) = store.recovery.partitions
    assert (report.replayed_batches, report.rebuilt_bytes, report.rewritten_bytes, report.cut_bytes) == (0, 0, 0, 0)
    assert store.state == {"broker": b"state"}
    check_stored(store, sender.sent)
    kill(store)


def test_closing_without_a_checkpoint_is_not_clean(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, HastyDisk()))
    fill(sender, 3)
    sender.store.close(clean=True)
    store = open_store(tmp_path, HastyDisk())
    assert not store.recovery.clean
    check_stored(store, sender.sent)
    kill(store)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_after_kill_everything_that_was_written_is_there(tmp_path: Path, partitions: int) -> None:
    sender = killed(tmp_path, 200, 200, partitions=partitions)
    ends = sender.store.ends[: sender.store.subject_count].copy()
    store = open_store(tmp_path, HastyDisk(), partitions=partitions)
    check_stored(store, sender.sent)
    assert store.ends[: store.subject_count].tolist() == ends.tolist()
    assert store.recovery.raised_by == 0
    assert not store.recovery.power_loss
    assert store.state == {"broker": b"state"}
    assert sum(part.replayed_batches for part in store.recovery.partitions) == 200
    for number in range(store.subject_count):
        assert store.message_count(number, 0, int(store.ends[number])) == int(store.ends[number])
    close_cleanly(store)
    verified(tmp_path)


def test_the_unsynced_tail_is_written_again_and_synced_before_anything_is_served(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    disk = FaultyDisk(boot=Disk().boot_id())
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
    for cut in [*range(1, 200, 7), *range(200, len(last.data), 97), len(last.data) - 1]:
        path = tmp_path / f"cut-{cut}"
        copy_killed(base, path)
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
        assert store.recovery.partitions[0].holes == []
        assert (store.recovery.partitions[0].cut_bytes > 0) or last.data[:cut].strip(b"\0") == b""
        shutil.rmtree(path)


def test_a_tail_that_was_cut_does_not_come_back_with_the_batch_behind_it(tmp_path: Path) -> None:
    sender = killed(tmp_path, 3, 6)
    damage(tmp_path, sender.sent[-1], 0, bytes(len(sender.sent[-1].data)))
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, sender.sent[:-1])
    again = Sender(store)
    again.send("a.0", b"short")  # at the place of the lost one, shorter
    kill(store)
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, [*sender.sent[:-1], *again.sent])
    kill(store)


def test_a_bad_batch_in_the_tail_is_a_hole_and_its_sequences_are_not_given_again(tmp_path: Path) -> None:
    sender = killed(tmp_path, 10, 10)
    bad = sender.sent[14]
    damage(tmp_path, bad, len(bad.data) - 1)
    ends = sender.store.ends[: sender.store.subject_count].tolist()
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, [sent for sent in sender.sent if sent is not bad])
    assert store.recovery.partitions[0].holes == [Hole(bad.position, bad.position + len(bad.data))]
    assert store.recovery.raised_by == 0
    assert store.ends[: store.subject_count].tolist() == ends
    for name, first, count in bad.runs:
        number = store.subject_number(name)
        assert number is not None
        assert store.message_count(number, first, first + count) == 0
    close_cleanly(store)
    verified(tmp_path)
    store = open_store(tmp_path, HastyDisk())
    assert store.recovery.partitions[0].holes == []  # reported once
    kill(store)


def test_a_bad_header_in_the_tail_raises_every_sequence_past_what_it_may_have_held(tmp_path: Path) -> None:
    sender = killed(tmp_path, 10, 10)
    bad = sender.sent[14]
    damage(tmp_path, bad, 20)
    ends = sender.store.ends[: sender.store.subject_count].tolist()
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, [sent for sent in sender.sent if sent is not bad])
    assert store.recovery.raised_by == len(bad.data)
    assert all(after >= before for after, before in zip(store.ends.tolist(), ends, strict=False))
    close_cleanly(store)
    verified(tmp_path)


def test_a_whole_last_batch_that_has_rotten_is_a_hole_and_keeps_its_place(tmp_path: Path) -> None:
    sender = killed(tmp_path, 3, 6)
    bad = sender.sent[-1]
    damage(tmp_path, bad, 250)
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, sender.sent[:-1])
    assert store.recovery.partitions[0].holes == [Hole(bad.position, bad.position + len(bad.data))]
    sent = Sender(store).send("a.0", b"next")
    assert sent.position == bad.position + len(bad.data)
    close_cleanly(store)
    verified(tmp_path)


def test_a_body_cannot_pass_for_a_batch(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, HastyDisk()))
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
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, [first, last])
    kill(store)


def test_a_hole_over_the_end_of_a_segment(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, HastyDisk()))
    fill(sender, 3)
    checkpoint(sender.store)
    fill(sender, 500)
    kill(sender.store)
    files = segment_files(tmp_path)
    assert len(files) > 2
    ends_first = [sent for sent in sender.sent if file_of(tmp_path, sent)[0] == files[0]][-1]
    damage(tmp_path, ends_first, 20)
    store = open_store(tmp_path, HastyDisk())
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
    store = open_store(path, Rebooted() if rebooted else HastyDisk())
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
    disk = FaultyDisk()
    disk.track(path)
    sender = Sender(open_store(path, disk, partitions=partitions))
    fill(sender, 30, partitions)
    checkpoint(sender.store)
    kept = list(sender.sent)
    fill(sender, 10, partitions)
    synced = sender.sent[-10:]
    for partition in range(partitions):
        sender.store.sync(partition)
    sender.send("new.subject", b"1", b"2")  # seen by somebody, and lost
    disk.without_power(path, lost)
    kill(sender.store)

    after = FaultyDisk("boot-2")
    store = open_store(lost, after, partitions=partitions)
    assert store.recovery.power_loss
    check_stored(store, kept + synced)
    more = Sender(store)
    reserves = [identity.reserve for identity in _identity(lost).partitions]
    for partition in range(partitions):
        new = more.send("new.subject", b"again", partition=partition)
        assert new.position > max(sent.position for sent in sender.sent if sent.partition == partition) + 500_000
        assert new.position < reserves[partition]
        assert new.runs[0][1] > 2
    for name in ("a.0", "a.x"):
        number = store.subject_number(name)
        assert number is not None
        end = int(store.ends[number])
        assert end > max(f + c for sent in sender.sent for n, f, c in sent.runs if n == name)
        stored = sum(c for sent in kept + synced for n, f, c in sent.runs if n == name)
        assert store.message_count(number, 0, end) == stored
    check_stored(store, kept + synced + more.sent)
    close_cleanly(store)
    verified(lost)


def test_two_losses_of_power_before_a_checkpoint_raise_twice(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    ends = []
    for boot in ("2", "3", "4"):
        disk = FaultyDisk(boot)
        store = open_store(tmp_path, disk)
        check_stored(store, sender.sent)
        number = store.subject_number("a.0")
        assert number is not None
        ends.append(int(store.ends[number]))
        kill(store)
    assert ends[0] < ends[1] < ends[2]
    store = open_store(tmp_path, FaultyDisk("4"))  # and kill -9 does not raise
    assert int(store.ends[number]) == ends[2]
    kill(store)


def test_a_crash_at_any_operation_during_recovery_loses_and_repeats_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    sender = killed(base, 20, 30)
    counting = FaultyDisk("boot-2")
    copy_killed(base, tmp_path / "whole")
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
            copy_killed(base, path)
            disk = FaultyDisk("boot-2")
            disk.fail(operation, nth)
            try:
                store = open_store(path, disk)
            except StorageError:
                store = open_store(path, FaultyDisk("boot-2"))
            check_stored(store, sender.sent)
            assert Sender(store).send("a.0", b"x").position > seen + 500_000, (operation, nth)
            close_cleanly(store)
            verified(path)
            shutil.rmtree(path)


# --- checkpoints and identity ----------------------------------------------------------------------------------------


def _identity(path: Path):  # type: ignore[no-untyped-def]
    copy = read_copies(Disk(), path)[0]
    assert copy.identity is not None
    return copy.identity


def _rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("bad", "source"),
    [
        ((), Source.CHECKPOINT),
        ((0,), Source.CHECKPOINT_BEFORE),
        ((1,), Source.CHECKPOINT),
        ((0, 1), Source.WHOLE_LOG),
    ],
)
@pytest.mark.parametrize("how", ["rotten", "missing", "empty"])
def test_rotten_checkpoints_fall_back(tmp_path: Path, bad: tuple[int, ...], source: Source, how: str) -> None:
    sender = Sender(open_store(tmp_path, HastyDisk(), partitions=2))
    for part in (b"1", b"2", b"3"):
        fill(sender, 100, 2)
        checkpoint(sender.store, {"part": part})
    fill(sender, 20, 2)
    ends = sender.store.ends[: sender.store.subject_count].tolist()
    kill(sender.store)
    numbers = list_checkpoints(Disk(), tmp_path)
    assert numbers == [3, 2]
    for place in bad:
        file = checkpoint_path(tmp_path, numbers[place])
        if how == "missing":
            file.unlink()
        elif how == "empty":
            file.write_bytes(b"")
        else:
            _rot(file)
    store = open_store(tmp_path, HastyDisk(), partitions=2)
    if how != "missing":
        assert store.recovery.source is source
    names = {store.subject_name(number): int(store.ends[number]) for number in range(store.subject_count)}
    assert sorted(names.values()) == sorted(ends)
    check_stored(store, sender.sent)
    expected = {(): b"3", (1,): b"3", (0,): b"2"}.get(bad)
    assert store.state == ({} if expected is None else {"part": expected})
    close_cleanly(store)
    verified(tmp_path)
    assert all(
        read_checkpoint(Disk(), tmp_path, number).claims is not None for number in list_checkpoints(Disk(), tmp_path)
    )


@pytest.mark.parametrize("name", COPY_NAMES)
@pytest.mark.parametrize("how", ["rotten", "missing"])
def test_one_copy_of_the_identity_is_enough(tmp_path: Path, name: str, how: str) -> None:
    sender = killed(tmp_path)
    if how == "rotten":
        _rot(tmp_path / name)
    else:
        (tmp_path / name).unlink()
    reopened(tmp_path, sender)
    assert len({(tmp_path / copy).read_bytes() for copy in COPY_NAMES}) == 1


def test_without_an_identity_nothing_is_touched(tmp_path: Path) -> None:
    killed(tmp_path)
    for name in COPY_NAMES:
        (tmp_path / name).unlink()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file.name != "lock"}
    with pytest.raises(BadBytes, match=r"no identity.*put one of them back"):
        open_store(tmp_path)
    assert before == {file: file.read_bytes() for file in before}


def test_an_identity_of_another_directory_is_refused(tmp_path: Path) -> None:
    killed(tmp_path / "a", 5, 5)
    killed(tmp_path / "b", 5, 5)
    for name in COPY_NAMES:
        shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(ForeignFile, match="belongs to store"):
        open_store(tmp_path / "a")


def test_a_wrong_secret_does_not_cut_the_log(tmp_path: Path) -> None:
    killed(tmp_path, 5, 5)
    for number in list_checkpoints(Disk(), tmp_path):
        checkpoint_path(tmp_path, number).unlink()
    identity = replace(_identity(tmp_path), secret=bytes(16))
    for name in COPY_NAMES:
        (tmp_path / name).write_bytes(b"".join(pack_identity(identity)))
    before = [file.read_bytes() for file in segment_files(tmp_path)]
    with pytest.raises(BadBytes, match="mark"):
        open_store(tmp_path, HastyDisk())
    assert before == [file.read_bytes() for file in segment_files(tmp_path)]


def test_copies_of_different_stores_are_refused(tmp_path: Path) -> None:
    killed(tmp_path / "a", 1, 1)
    killed(tmp_path / "b", 1, 1)
    shutil.copy(tmp_path / "b" / "store-b", tmp_path / "a" / "store-b")
    with pytest.raises(BadBytes, match="different stores"):
        open_store(tmp_path / "a")


@pytest.mark.parametrize("name", [*COPY_NAMES, "checkpoint-1"])
def test_a_newer_version_is_refused_by_name(tmp_path: Path, name: str) -> None:
    killed(tmp_path, 1, 1)
    path = tmp_path / name
    magic, version = (CHECKPOINT_MAGIC, CHECKPOINT_VERSION) if "-1" in name else (IDENTITY_MAGIC, IDENTITY_VERSION)
    content = read_envelope(Disk(), path, magic, version).content
    assert content is not None
    path.write_bytes(b"".join(pack_envelope(magic, 9, content)))
    with pytest.raises(ForeignFile, match=rf"{name} has format version 9"):
        open_store(tmp_path)


# --- segments --------------------------------------------------------------------------------------------------------


def _many(path: Path) -> Sender:
    sender = Sender(open_store(path, HastyDisk()))
    fill(sender, 900)
    checkpoint(sender.store)
    fill(sender, 10)
    kill(sender.store)
    assert len(segment_files(path)) >= 3
    return sender


def test_a_segment_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    _many(tmp_path)
    file = segment_files(tmp_path)[1]
    data = bytearray(file.read_bytes())
    data[8] = 7
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(ForeignFile, match=rf"{file.name} has format version 7"):
        open_store(tmp_path)


def test_a_segment_of_another_store_is_refused_by_name(tmp_path: Path) -> None:
    _many(tmp_path)
    file = segment_files(tmp_path)[-1]
    base = int(file.stem, 16)
    with file.open("r+b") as opened:
        opened.write(pack_header(Owner(b"other!", 0), base, base, NOW_US))
    with pytest.raises(ForeignFile, match=rf"{file.name} belongs to store"):
        open_store(tmp_path)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_rotten_header_of_a_segment_is_written_again(tmp_path: Path, place: int) -> None:
    sender = _many(tmp_path)
    file = segment_files(tmp_path)[place]
    with file.open("r+b") as opened:
        opened.write(b"\xff" * SEGMENT_HEADER_SIZE)
    store = reopened(tmp_path, sender)
    assert any(file.stem in note for note in store.recovery.notes)


def test_an_empty_last_segment_goes_on(tmp_path: Path) -> None:
    sender = _many(tmp_path)
    store = open_store(tmp_path, HastyDisk())
    end = store.end(0)
    kill(store)
    (tmp_path / "log-0" / f"{end:016x}.messages").write_bytes(b"")
    store = reopened(tmp_path, sender)
    assert store.recovery.partitions[0].holes == []


def test_a_segment_that_is_gone_is_a_hole(tmp_path: Path) -> None:
    sender = _many(tmp_path)
    gone = segment_files(tmp_path)[1]
    rest = [sent for sent in sender.sent if file_of(tmp_path, sent)[0] != gone]
    end = int(segment_files(tmp_path)[2].stem, 16)
    gone.unlink()
    store = reopened(tmp_path, sender, rest)
    assert store.recovery.partitions[0].damaged == [Hole(int(gone.stem, 16), end)]
    store = open_store(tmp_path, HastyDisk())
    assert store.recovery.partitions[0].damaged == []  # reported once
    kill(store)


def test_a_last_segment_that_is_gone_does_not_give_its_positions_again(tmp_path: Path) -> None:
    sender = _many(tmp_path)
    gone = segment_files(tmp_path)[-1]
    rest = [sent for sent in sender.sent if file_of(tmp_path, sent)[0] != gone]
    gone.unlink()
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, rest)
    more = Sender(store)
    assert more.send("a.0", b"x").position > max(sent.position for sent in sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_a_log_cut_below_the_checkpoint_does_not_give_its_positions_again(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, HastyDisk()))
    fill(sender, 40)
    checkpoint(sender.store)
    kill(sender.store)
    file, start = file_of(tmp_path, sender.sent[30])
    with file.open("r+b") as opened:
        opened.truncate(start + 10)
    store = open_store(tmp_path, HastyDisk())
    more = Sender(store)
    assert more.send("a.0", b"x").position > sender.sent[-1].position + 500_000
    assert bytes(store.view(0, sender.sent[29].position, len(sender.sent[29].data))) == sender.sent[29].data
    close_cleanly(store)
    verified(tmp_path)


def test_all_segments_gone_is_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    _many(tmp_path)
    for file in segment_files(tmp_path):
        file.unlink()
    with pytest.raises(StorageError, match="is its disk mounted"):
        open_store(tmp_path)
    shutil.rmtree(tmp_path / "log-0")
    with pytest.raises(StorageError, match="is its disk mounted"):
        open_store(tmp_path)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    strangers = [
        "notes.txt",
        "log-0/README",
        "log-0/123.messages",
        "consumer-log/0/x.y",
        "checkpoint-old",
        "checkpoint-x",
    ]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    reopened(tmp_path, sender)
    assert [(tmp_path / name).read_text() for name in strangers] == ["mine"] * len(strangers)


# --- derived files ---------------------------------------------------------------------------------------------------


def _derived(path: Path) -> dict[str, bytes]:
    files = [*path.glob("consumer-log/**/*"), *path.glob("log-*/*.index")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


def _sealed_and_settled(path: Path, partitions: int) -> dict[str, bytes]:
    store = open_store(path, HastyDisk(), partitions=partitions)
    checkpoint(store, store.state)
    checkpoint(store, store.state)
    store.close(clean=True)
    return _derived(path)


@pytest.mark.parametrize("partitions", [1, 3])
def test_derived_files_thrown_away_are_made_again_equal_byte_for_byte(tmp_path: Path, partitions: int) -> None:
    sender = killed(tmp_path, 900, 300, partitions=partitions)
    damage(tmp_path, sender.sent[-1], 100, b"torn")
    file, start = file_of(tmp_path, sender.sent[-1])
    with file.open("r+b") as opened:
        opened.truncate(start + 120)
    before = _sealed_and_settled(tmp_path, partitions)
    assert len(before) > 8
    shutil.rmtree(tmp_path / "consumer-log")
    for index in tmp_path.glob("log-*/*.index"):
        index.unlink()
    assert _sealed_and_settled(tmp_path, partitions) == before
    verified(tmp_path)


def _append(path: Path) -> None:
    with path.open("ab") as opened:
        opened.write(b"\x01" * 4_000)


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("change", [_append, _halve, _empty, _rot, Path.unlink])
@pytest.mark.parametrize("suffix", [".index", ".entries", ".order"])
def test_derived_files_ahead_behind_or_rotten_are_made_again(
    tmp_path: Path, change: Callable[[Path], None], suffix: str
) -> None:
    sender = killed(tmp_path, 600, 50)
    before = _sealed_and_settled(tmp_path, 1)
    for file in tmp_path.rglob(f"*{suffix}"):
        change(file)
    store = open_store(tmp_path, HastyDisk())
    check_stored(store, sender.sent)
    number = store.subject_number("a.x")
    assert number is not None
    found = [row[0] for _, rows in store.subject_rows(number, 0, 10_000) for row in rows.tolist()]
    assert found == [first for sent in sender.sent for name, first, _ in sent.runs if name == "a.x"]
    checkpoint(store)
    close_cleanly(store)
    if not (suffix == ".index" and change is _rot):  # a rotten body of a sealed index is found when it is read
        assert _derived(tmp_path) == before
        verified(tmp_path)


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rotten", "cut", "missing", "all rotten"])
def test_names_that_the_registry_has_lost_are_found_in_the_log(tmp_path: Path, how: str) -> None:
    sender = killed(tmp_path, 400, 100, partitions=2)
    names = [sender.store.subject_name(number) for number in range(sender.store.subject_count)]
    ends = sender.store.ends[: len(names)].tolist()
    file = tmp_path / "subjects"
    data = bytearray(file.read_bytes())
    if how == "rotten":
        data[45] ^= 1
        data[70] ^= 1
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(data[:60])
    elif how == "missing":
        file.unlink()
    else:
        file.write_bytes(b"\xff" * len(data))
    store = open_store(tmp_path, HastyDisk(), partitions=2)
    assert [store.subject_name(number) for number in range(store.subject_count)] == names
    assert store.ends[: len(names)].tolist() == ends
    assert any("found again in the message log" in note for note in store.recovery.notes)
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_a_name_that_no_row_tells_keeps_its_number(tmp_path: Path) -> None:
    store = open_store(tmp_path, HastyDisk())
    sender = Sender(store)
    store.add_subject("never.used")
    sender.send("used", b"x")
    close_cleanly(store)
    (tmp_path / "subjects").unlink()
    store = open_store(tmp_path, HastyDisk())
    assert [store.subject_name(number) for number in range(store.subject_count)] == ["~lost-0", "used"]
    assert store.subject_number("never.used") is None
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_registry_and_checkpoints_lost_together(tmp_path: Path) -> None:
    sender = killed(tmp_path, 400, 100)
    ends = {sender.store.subject_name(n): int(sender.store.ends[n]) for n in range(sender.store.subject_count)}
    (tmp_path / "subjects").unlink()
    for number in list_checkpoints(Disk(), tmp_path):
        checkpoint_path(tmp_path, number).unlink()
    store = open_store(tmp_path, HastyDisk())
    assert ends == {store.subject_name(n): int(store.ends[n]) for n in range(store.subject_count)}
    assert len(list(store.headers_since([]))) == len(sender.sent)
    close_cleanly(store)
    verified(tmp_path)


# --- what stands in the way ------------------------------------------------------------------------------------------


def test_a_second_one_is_told_who_has_the_directory(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(DirectoryInUse, match=r"in use by process \d+ on "):
        open_store(tmp_path)
    kill(store)
    kill(open_store(tmp_path))


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailed, match="choose another directory"):
        open_store(tmp_path / "file")
    with pytest.raises(StorageFailed, match="choose another directory"):
        open_store(tmp_path / "file" / "data")


@pytest.mark.parametrize("operation", ["open", "mkdir", "listdir", "pwritev"])
@pytest.mark.parametrize(("code", "advice"), [(13, "give the user"), (30, "mount the file system for writing")])
def test_missing_rights_are_named(tmp_path: Path, operation: str, code: int, advice: str) -> None:
    disk = FaultyDisk()
    disk.fail_always(operation, code)
    with pytest.raises(StorageFailed, match=advice):
        open_store(tmp_path / "data", disk)


def test_a_tail_that_cannot_be_written_again_is_not_served(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    disk = FaultyDisk(Disk().boot_id())
    disk.fail_always("pwritev", errno.EIO, "messages")
    with pytest.raises(StorageFailed, match="write again"):
        open_store(tmp_path, disk)
    disk.heal()
    store = open_store(tmp_path, disk)
    check_stored(store, sender.sent)
    kill(store)


class NoRoom(FaultyDisk):
    """Takes no byte that a file does not have already."""

    full = False

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.full and offset + sum(map(len, buffers)) > self.data_end(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


def test_a_full_disk_after_kill_is_served_and_takes_sends_again_when_there_is_room(tmp_path: Path) -> None:
    sender = killed(tmp_path, 600, 50)
    kill(open_store(tmp_path, HastyDisk()))
    for index in tmp_path.glob("log-0/*.index"):
        index.unlink()
    disk = NoRoom(Disk().boot_id())
    disk.full = True
    store = open_store(tmp_path, disk)
    check_stored(store, sender.sent)
    again = Sender(store)
    with pytest.raises(StorageFull):
        again.send("a.0", b"x" * 20_000)
    again.take_back()
    with pytest.raises(StorageFull):
        checkpoint(store)
    disk.full = False
    again.send("a.0", b"x")
    check_stored(store, sender.sent + again.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_partitions_can_be_added_not_taken_away(tmp_path: Path) -> None:
    sender = killed(tmp_path, partitions=1)
    store = open_store(tmp_path, HastyDisk(), partitions=3)
    check_stored(store, sender.sent)
    more = Sender(store)
    for partition in range(3):
        more.send("a.0", b"x", partition=partition)
    check_stored(store, sender.sent + more.sent)
    close_cleanly(store)
    verified(tmp_path)
    with pytest.raises(InvalidOption, match="has 3 partitions"):
        open_store(tmp_path, HastyDisk(), partitions=2)


def test_partitions_on_other_disks(tmp_path: Path) -> None:
    places = (tmp_path / "disk1" / "qmq", tmp_path / "disk2")
    store = open_store(tmp_path / "data", HastyDisk(), partitions=2, partition_dirs=places)
    sender = Sender(store)
    sender.send("a", b"1", partition=1)
    close_cleanly(store)
    assert [len(list(place.glob("*.messages"))) for place in places] == [1, 1]
    store = open_store(tmp_path / "data", HastyDisk(), partitions=2)  # it knows where they are
    check_stored(store, sender.sent)
    kill(store)
    with pytest.raises(InvalidOption, match="1 directories for 2"):
        open_store(tmp_path / "data", HastyDisk(), partitions=2, partition_dirs=places[:1])


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="raise it to"):
        Store.open(tmp_path, replace(options(), max_frame_bytes=1 << 20), Disk(), NOW_US)
    with pytest.raises(InvalidOption, match="store_id_hint"):
        open_store(tmp_path, store_id_hint=b"short")
