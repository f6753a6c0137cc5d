"""Opening with files that are rotten, lost, foreign or of another version."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile, StorageError
from qmq.format.layout import (
    CHECKPOINT_MAGIC,
    CHECKPOINT_VERSION,
    IDENTITY_MAGIC,
    IDENTITY_VERSION,
    SEGMENT_HEADER_SIZE,
)
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import pack_envelope, read_envelope
from qmq.storage.meta.checkpoint import checkpoint_path, list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import COPY_NAMES, pack_identity
from qmq.storage.recovery.decide import RecoverySource
from qmq.storage.types import Hole
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
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

# --- checkpoints and identity ----------------------------------------------------------------------------------------


def _rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("bad", "source"),
    [
        ((), RecoverySource.CHECKPOINT),
        ((0,), RecoverySource.CHECKPOINT_BEFORE),
        ((1,), RecoverySource.CHECKPOINT),
        ((0, 1), RecoverySource.WHOLE_LOG),
    ],
)
@pytest.mark.parametrize("how", ["rotten", "missing", "empty"])
def test_rotten_checkpoints_fall_back(tmp_path: Path, bad: tuple[int, ...], source: RecoverySource, how: str) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), partitions=2))
    for part in (b"1", b"2", b"3"):
        fill(sender, 100, 2)
        checkpoint(sender.store, {"part": part})
    fill(sender, 20, 2)
    ends = sender.store.subjects.ends[: sender.store.subjects.count].tolist()
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
    store = open_store(tmp_path, FakeDisk(), partitions=2)
    if how != "missing":
        assert store.recovery.source is source
    names = {store.subjects.name(number): int(store.subjects.ends[number]) for number in range(store.subjects.count)}
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
    identity = replace(identity_of(tmp_path), secret=bytes(16))
    for name in COPY_NAMES:
        (tmp_path / name).write_bytes(b"".join(pack_identity(identity)))
    before = [file.read_bytes() for file in segment_files(tmp_path)]
    with pytest.raises(BadBytes, match="not written by this store"):
        open_store(tmp_path, FakeDisk())
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
    sender = Sender(open_store(path, FakeDisk()))
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
    store = open_store(tmp_path, FakeDisk())
    end = store.partitions[0].message_log.end
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
    store = open_store(tmp_path, FakeDisk())
    assert store.recovery.partitions[0].damaged == []  # reported once
    kill(store)


@pytest.mark.parametrize(("offset", "blind"), [(100, True), (-1, False)])
def test_rot_met_while_rows_are_made_again_is_reported(tmp_path: Path, offset: int, blind: bool) -> None:
    """A bad header takes its batch away for good; of a batch with a bad body the other runs may still be served."""
    sender = _many(tmp_path)
    bad = next(sent for sent in sender.sent if file_of(tmp_path, sent)[0] == segment_files(tmp_path)[1])
    close_cleanly(open_store(tmp_path, FakeDisk()))
    damage(tmp_path, bad, offset % len(bad.data))
    shutil.rmtree(tmp_path / "consumer-log")
    rest = [sent for sent in sender.sent if sent != bad]
    store = open_store(tmp_path, FakeDisk())
    assert store.recovery.partitions[0].damaged == [Hole(bad.position, bad.position + len(bad.data))]
    if blind:
        check_stored(store, rest)
    close_cleanly(store)
    assert verify(tmp_path, Disk()).is_good == blind, "what is recorded is no fault any more"
    store = open_store(tmp_path, FakeDisk())
    assert store.recovery.partitions[0].damaged == []
    kill(store)


def test_a_last_segment_that_is_gone_does_not_give_its_positions_again(tmp_path: Path) -> None:
    sender = _many(tmp_path)
    gone = segment_files(tmp_path)[-1]
    rest = [sent for sent in sender.sent if file_of(tmp_path, sent)[0] != gone]
    gone.unlink()
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, rest)
    more = Sender(store)
    assert more.send("a.0", b"x").position > max(sent.position for sent in sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_a_log_cut_below_the_checkpoint_does_not_give_its_positions_again(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    fill(sender, 40)
    checkpoint(sender.store)
    kill(sender.store)
    file, start = file_of(tmp_path, sender.sent[30])
    with file.open("r+b") as opened:
        opened.truncate(start + 10)
    store = open_store(tmp_path, FakeDisk())
    more = Sender(store)
    assert more.send("a.0", b"x").position > sender.sent[-1].position + 500_000
    assert (
        bytes(store.partitions[0].message_log.view(sender.sent[29].position, len(sender.sent[29].data)))
        == sender.sent[29].data
    )
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
    store = open_store(path, FakeDisk(), partitions=partitions)
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
    store = open_store(tmp_path, FakeDisk())
    check_stored(store, sender.sent)
    number = store.subjects.number("a.x")
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
    names = [sender.store.subjects.name(number) for number in range(sender.store.subjects.count)]
    ends = sender.store.subjects.ends[: len(names)].tolist()
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
    store = open_store(tmp_path, FakeDisk(), partitions=2)
    assert [store.subjects.name(number) for number in range(store.subjects.count)] == names
    assert store.subjects.ends[: len(names)].tolist() == ends
    assert any("found again in the message log" in note for note in store.recovery.notes)
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_a_name_that_no_row_tells_keeps_its_number(tmp_path: Path) -> None:
    store = open_store(tmp_path, FakeDisk())
    sender = Sender(store)
    store.add_subject("never.used")
    sender.send("used", b"x")
    close_cleanly(store)
    (tmp_path / "subjects").unlink()
    store = open_store(tmp_path, FakeDisk())
    assert [store.subjects.name(number) for number in range(store.subjects.count)] == ["~lost-0", "used"]
    assert store.subjects.number("never.used") is None
    assert store.subjects.numbers(["used", "~lost-0"]) == [1, None]  # nobody can send to it
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_registry_and_checkpoints_lost_together(tmp_path: Path) -> None:
    sender = killed(tmp_path, 400, 100)
    ends = {
        sender.store.subjects.name(n): int(sender.store.subjects.ends[n]) for n in range(sender.store.subjects.count)
    }
    (tmp_path / "subjects").unlink()
    for number in list_checkpoints(Disk(), tmp_path):
        checkpoint_path(tmp_path, number).unlink()
    store = open_store(tmp_path, FakeDisk())
    assert ends == {store.subjects.name(n): int(store.subjects.ends[n]) for n in range(store.subjects.count)}
    assert len(list(store.headers_since([]))) == len(sender.sent)
    close_cleanly(store)
    verified(tmp_path)
