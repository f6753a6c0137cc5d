"""verify finds every bad byte that a checkpoint claims, accepts what a stop leaves behind, and writes nothing."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.archive.data_directory import open_data_directory
from qmq.errors import DirectoryInUse, InvalidOption, StorageFailed, SyncFailed
from qmq.format.batch import stamp
from qmq.format.build import RunContent
from qmq.format.layout import (
    DERIVED_HEADER_SIZE,
    ENTRIES_MAGIC,
    ENTRY_SIZE,
    INDEX_ENTRY_SIZE,
    INDEX_MAGIC,
    LANE_HIGH,
    LANE_LOW,
    LANE_ORDERED,
    SEGMENT_HEADER_SIZE,
)
from qmq.names import PING_NAME
from qmq.storage.consumer_log.header import parse_derived
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.identity import IdentityFile, latest, read_copies
from qmq.storage.store import Store
from qmq.storage.verify.repair import Outcome, repair
from qmq.storage.verify.verify import VerifyReport, verify
from tests.effort import part_of
from tests.fake_disk import FakeDisk
from tests.storage import stores
from tests.storage.stores import Sender, checkpoint, close_cleanly, kill, open_store

#: The other lane of each subject.
LANE_OF = (LANE_HIGH, LANE_LOW, LANE_ORDERED | 4_095)


def check(directory: Path) -> VerifyReport:
    return verify(directory, FakeDisk(is_read_only=True))


def faults(directory: Path) -> list[str]:
    return [str(finding) for finding in check(directory).findings if finding.severity == "fault"]


def notes(directory: Path) -> list[str]:
    report = check(directory)
    assert report.is_good, [str(finding) for finding in report.findings]
    return [str(finding) for finding in report.findings]


def fill(sender: Sender, batches: int, seed: int = 1) -> None:
    """Send random batches of one to four runs over three subjects in two lanes, to every partition."""
    random = np.random.default_rng(seed)
    for number in range(batches):
        lanes = [(f"s{n // 2}.x", n % 2 * LANE_OF[n // 2]) for n in random.permutation(6)[: random.integers(1, 5)]]
        runs = [
            RunContent(name, [bytes(random.integers(1, 900))] * int(random.integers(1, 6)), None, lane)
            for name, lane in lanes
        ]
        sender.stage(*runs, partition=number // 3 % len(sender.store.partitions))
        if number % 3 == 2:
            sender.write()
    sender.write()


def make(directory: Path, batches: int = 60, partitions: int = 2) -> Store:
    store = open_store(directory, FakeDisk(), partitions=partitions)
    fill(Sender(store), batches)
    return store


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two partitions with sealed segments, two checkpoints, cleanly closed. Not to be changed."""
    directory = tmp_path_factory.mktemp("sound") / "data"
    store = make(directory)
    checkpoint(store)
    fill(Sender(store), 30, seed=2)
    close_cleanly(store)
    assert len(list(directory.glob("log-*/*.messages"))) >= 4
    return directory


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_sound_store_has_nothing_to_tell(sound: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_of(sound)}
    calls: list[tuple[int, int]] = []
    report = verify(sound, FakeDisk(is_read_only=True), lambda done, total: calls.append((done, total)))
    assert [str(finding) for finding in report.findings] == []
    assert report.is_good
    assert report.counts["messages"].records == report.counts["index"].records + current_batches(sound) == 90
    assert report.counts["entries"].records > 90
    assert report.counts["subjects"].records == 6  # a number for each lane
    assert report.counts["entries"].files == report.counts["messages"].files
    assert report.counts["order"].files == report.counts["index"].files == report.counts["messages"].files - 2
    assert calls[-1][0] == calls[-1][1] > 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_of(sound)} == before


def current_batches(directory: Path) -> int:
    """Send batches to the last segments, whose indexes every start makes again and verify does not check."""
    with_index = [max((directory / f"log-{n}").glob("*.index")) for n in (0, 1)]
    return sum((path.stat().st_size - DERIVED_HEADER_SIZE) // INDEX_ENTRY_SIZE for path in with_index)


def vouched_bytes(path: Path) -> int:
    """Return how many bytes of a file of a sound store the checkpoint vouches for."""
    if path.name == "lock":
        return 0
    last = max(path.parent.glob("*.messages"), default=None)
    if path.suffix == ".index" and last is not None and path.stem == last.stem:
        return 0  # of the current segment: every start makes it again
    if path == last or path.suffix == ".pulls":
        return len(path.read_bytes().rstrip(b"\0"))
    return path.stat().st_size


@given(data=st.data())
@settings(max_examples=part_of(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_changed_byte_is_a_fault(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy)
    path = data.draw(st.sampled_from([path for path in files_of(copy) if vouched_bytes(path)]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, vouched_bytes(path) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert any(str(path.relative_to(copy)) in fault for fault in faults(copy)), (path.name, at)


@given(data=st.data())
@settings(max_examples=part_of(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_cut_file_is_a_fault(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy)
    path = data.draw(st.sampled_from([path for path in files_of(copy) if vouched_bytes(path)]))
    os.truncate(path, data.draw(st.integers(0, vouched_bytes(path) - 1)))
    assert any(str(path.relative_to(copy)) in fault for fault in faults(copy))


def test_missing_files(sound: Path, tmp_path: Path) -> None:
    """The store is sound without derived files, the lock and an old checkpoint, and unsound without any other file."""
    old = min(sound.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in files_of(sound):
        copy = tmp_path / "copy"
        shutil.copytree(sound, copy)
        (copy / path.relative_to(sound)).unlink()
        if path.suffix in (".entries", ".order", ".index") or path in (old, sound / "lock"):
            assert all("is missing" in note or "without good entries" in note for note in notes(copy)), path
        elif path.name.startswith("checkpoint-"):
            assert faults(copy) == [], "the checkpoint before holds, and what it does not know is behind it"
        else:
            assert faults(copy), path
        shutil.rmtree(copy)


def test_a_killed_store_is_no_fault(tmp_path: Path) -> None:
    store = make(tmp_path / "data", 40)
    shutil.copytree(tmp_path / "data", tmp_path / "no-checkpoint")
    checkpoint(store)
    fill(Sender(store), 60, seed=3)
    shutil.copytree(tmp_path / "data", tmp_path / "behind")
    kill(store)
    for name in ("no-checkpoint", "behind", "data"):
        assert not [note for note in notes(tmp_path / name) if "is a foreign file" in note]


@pytest.mark.parametrize("junk", [b"\1", b"x" * 5_000, b"QMQb" + b"\1" * 200])
def test_an_unfinished_tail_is_a_note(tmp_path: Path, junk: bytes) -> None:
    store = make(tmp_path / "data", 10, partitions=1)
    checkpoint(store)
    end = store.partitions[0].message_log.end
    kill(store)
    path = max((tmp_path / "data" / "log-0").glob("*.messages"))
    with path.open("r+b") as file:
        file.seek(end - int(path.stem, 16))
        file.write(junk)
    assert any("unfinished tail" in note and str(path) in note for note in notes(tmp_path / "data"))


def test_a_torn_batch_before_good_ones_behind_the_checkpoint_is_a_note(tmp_path: Path) -> None:
    store = make(tmp_path / "data", 4, partitions=1)
    checkpoint(store)
    sender = Sender(store)
    torn = sender.send("a", b"one" * 50)
    sender.send("a", b"two" * 50)
    kill(store)
    damage(tmp_path / "data", torn.position + 200)
    found = notes(tmp_path / "data")
    assert any("behind the checkpoint" in note and f"{len(torn.data)} bytes" in note for note in found)


def damage(directory: Path, position: int, partition: int = 0) -> Path:
    """Change the byte at a position of the message log."""
    paths = sorted((directory / f"log-{partition}").glob("*.messages"))
    path = next(path for path in reversed(paths) if int(path.stem, 16) <= position)
    with path.open("r+b") as file:
        file.seek(position - int(path.stem, 16))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x55]))
    return path


def test_recorded_holes_are_notes(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    store = open_store(directory)
    sender = Sender(store)
    sender.send("a", b"x" * 50)
    checkpoint(store)
    bad = sender.send("a", b"one" * 50)
    sender.send("a", b"two" * 50)
    kill(store)
    damage(directory, bad.position + 200)
    assert faults(directory) == []
    store = open_store(directory)
    assert store.recovery.partitions[0].holes
    Sender(store).send("a", b"three")
    close_cleanly(store)
    assert any("a hole of" in note and "known" in note for note in notes(directory))


def test_rot_that_the_checkpoint_claims_is_a_fault(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    store = open_store(directory)
    sender = Sender(store)
    batches = [sender.send("a", b"x" * 50) for _ in range(5)]
    close_cleanly(store)
    path = damage(directory, batches[2].position + 190)
    found = faults(directory)
    assert len(found) == 1
    assert f"{path} at byte {batches[2].position - int(path.stem, 16)}" in found[0]
    assert f"{len(batches[2].data)} bytes" in found[0]
    shutil.rmtree(directory / "consumer-log")  # so that recovery reads the batch again
    store = open_store(directory)
    start = batches[2].position
    assert store.recovery.partitions[0].damaged == [(start, start + len(batches[2].data))]
    close_cleanly(store)
    assert faults(directory) == found, "its header is good: its rows were made, and nothing was given up"


def test_a_rotten_header_costs_one_batch(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    store = open_store(directory)
    sender = Sender(store)
    batches = [sender.send("a", b"x" * 50) for _ in range(5)]
    close_cleanly(store)
    damage(directory, batches[1].position + 5)
    damage(directory, batches[3].position + 30)
    found = faults(directory)
    assert len(found) == 2
    assert all(f"{len(batches[1].data)} bytes" in fault for fault in found)


def test_two_batches_with_one_stamp(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", partitions=2)
    sender = Sender(store)
    sender.send("a", b"x", partition=0)
    sender._stamp_us -= 1
    sender.send("a", b"x", partition=1)
    close_cleanly(store)
    assert [("stamp" in fault, "log-" in fault) for fault in faults(tmp_path / "data")] == [(True, True)]


@pytest.mark.parametrize(("jump", "words"), [(5, "are missing, and no gap"), (-1, "twice")])
@pytest.mark.parametrize("runs", [1, 2])
def test_sequences_that_do_not_join(tmp_path: Path, jump: int, words: str, runs: int) -> None:
    store = open_store(tmp_path / "data", partitions=2)
    sender = Sender(store)
    for partition in (0, 1):
        sender.stage(("a", [b"x", b"y"]), partition=partition)
        sender.write()
        if partition == 0:
            store.subjects.ends[0] = int(store.subjects.ends[0]) + jump
        if runs == 2 and partition == 0:
            sender.stage(("a", [b"x"]), ("b", [b"y"]), partition=0)
            sender.write()
    close_cleanly(store)
    found = faults(tmp_path / "data")
    assert any(words in fault and " of a " in fault for fault in found), found


def test_sequences_that_a_start_has_passed_over_are_no_cause_for_worry(tmp_path: Path) -> None:
    """It raises them where the power was lost, and no checkpoint knows that yet."""
    sender = Sender(open_store(tmp_path / "data", FakeDisk("boot-1")))
    sender.send("a", b"x")
    checkpoint(sender.store)
    kill(sender.store)
    sender = Sender(open_store(tmp_path / "data", FakeDisk("boot-2")))
    assert sender.send("a", b"y").runs[0][1] > 1
    kill(sender.store)
    assert not faults(tmp_path / "data")
    told = [note for note in notes(tmp_path / "data") if "are missing, and no gap" in note]
    assert len(told) == 1
    assert "the next one has the gap" in told[0]


def test_claims_that_the_log_does_not_bear(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    Sender(store).send("a", b"x", b"y")
    store.subjects.ends[0] = 9
    close_cleanly(store)
    assert ["ahead of its log" in fault for fault in faults(tmp_path / "data")] == [True]
    store = open_store(tmp_path / "data")
    store.subjects.ends[0] = 1
    store.subjects.firsts[0] = 1
    close_cleanly(store)
    found = faults(tmp_path / "data")
    assert any("is already in its log" in fault for fault in found)
    assert any("first sequence" in fault for fault in found)


def test_rows_that_are_not_the_logs(sound: Path, tmp_path: Path) -> None:
    """Files with right checksums, but of another segment or with other rows."""
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    sealed = sorted((copy / "consumer-log" / "0").glob("*.order"))
    other = sorted((copy / "consumer-log" / "1").glob("*.order"))
    shutil.copy(other[0], sealed[0])
    entries = [path.with_suffix(".entries") for path in (sealed[0], other[0])]
    shutil.copy(entries[0], entries[1])
    found = faults(copy)
    assert any("not the order of the entries" in fault and str(sealed[0]) in fault for fault in found)
    assert any("another store, partition" in fault and str(entries[1]) in fault for fault in found)


@pytest.mark.parametrize("suffix", [".entries", ".index"])
def test_records_that_are_not_the_logs_under_a_right_checksum(sound: Path, tmp_path: Path, suffix: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    path = min(copy.glob(f"*/0/*{suffix}") if suffix == ".entries" else copy.glob(f"log-0/*{suffix}"))
    magic = ENTRIES_MAGIC if suffix == ".entries" else INDEX_MAGIC
    data = path.read_bytes()
    body = bytearray(data[DERIVED_HEADER_SIZE:])
    body[len(body) // 2] ^= 1
    header = parse_derived(data, magic, path)
    path.write_bytes(header._replace(body_crc=crc32c(bytes(body))).pack(magic) + body)
    assert any("is not that of the batch" in fault and str(path) in fault for fault in faults(copy))
    size = ENTRY_SIZE if suffix == ".entries" else INDEX_ENTRY_SIZE
    less = data[DERIVED_HEADER_SIZE:-size]
    path.write_bytes(header._replace(body_crc=crc32c(less), rows=header.rows - 1).pack(magic) + less)
    assert any("lacks the last 1 records" in fault and str(path) in fault for fault in faults(copy))
    more = data[DERIVED_HEADER_SIZE:] + data[-size:]
    path.write_bytes(header._replace(body_crc=crc32c(more), rows=header.rows + 1).pack(magic) + more)
    assert any("has no batch" in fault and str(path) in fault for fault in faults(copy))


def test_a_batch_of_another_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "data")
    sender = Sender(store)
    monkeypatch.setattr(stores, "stamp", lambda view, batch, **where: stamp(view, batch, **(where | {"partition": 7})))
    sender.send("a", b"x")
    close_cleanly(store)
    assert any("of partition 7" in fault for fault in faults(tmp_path / "data"))


def test_foreign_and_left_over_files_are_notes(sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    for name in ("notes.txt", "store-a.tmp", "log-0/core", "consumer-log/0/0123456789abcdef.order.tmp"):
        (copy / name).write_bytes(b"x")
    found = notes(copy)
    assert sorted("is a foreign file" in note for note in found) == [False, False, True, True]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    store = make(tmp_path / "data", 3)
    with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
        check(tmp_path / "data")
    close_cleanly(store)
    assert notes(tmp_path / "data") == []


def test_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="nowhere"):
        check(tmp_path / "nowhere")
    assert len(faults(tmp_path)) == 2


def test_copies_of_the_identity(sound: Path, tmp_path: Path) -> None:
    for name in ("store-a", "store-b"):
        copy = tmp_path / name
        shutil.copytree(sound, copy)
        (copy / name).unlink()
        assert [name in fault for fault in faults(copy)] == [True]
    other = tmp_path / "other"
    close_cleanly(open_store(other))
    shutil.copy(other / "store-b", tmp_path / "store-b" / "store-b")
    assert any("different stores" in fault for fault in faults(tmp_path / "store-b"))


@pytest.mark.parametrize("bad", ["store-a", "store-b"])
def test_a_start_writes_the_bad_copy_of_the_identity_first(tmp_path: Path, bad: str) -> None:
    close_cleanly(open_store(tmp_path))
    (tmp_path / bad).write_bytes(b"rotten")
    disk = FakeDisk()
    close_cleanly(open_store(tmp_path, disk))
    assert next(name for name in disk.renamed if "store-" in name).endswith(bad)
    assert faults(tmp_path) == []


def test_what_lies_behind_a_failed_sync_of_the_pull_log_is_no_fault(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    checkpoint(store)
    kill(store)
    disk = FakeDisk()
    store = open_store(tmp_path, disk)
    store.groups.take_records()
    store.groups.stage(1, b"what a sync has not brought to the disk")
    store.groups.write()
    disk.fail_always("fsync_directory", errno.EIO, "pulls")
    failed = store.begin_checkpoint({})
    with pytest.raises(SyncFailed) as caught:
        failed.write()
    store.fail_checkpoint(failed, caught.value)
    checkpoint(store)  # it has all of it, and lets go of the file before
    kill(store)
    (file,) = (tmp_path / "pulls").iterdir()
    assert faults(tmp_path) == []
    file.unlink()  # with the power
    assert faults(tmp_path) == []
    close_cleanly(open_store(tmp_path))
    assert faults(tmp_path) == []


def test_findings_of_one_file_are_bounded(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    sender = Sender(store)
    batches = [sender.send("a", b"x" * 50) for _ in range(100)]
    close_cleanly(store)
    for batch in batches[::2]:
        damage(tmp_path / "data", batch.position + 150)
    report = check(tmp_path / "data")
    assert (report.faults, len(report.findings), report.left_out) == (50, 20, 30)


def test_a_segment_that_no_checkpoint_knows_is_a_note(sound: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    first = min((copy / "log-0").glob("*.messages"))
    stray = first.with_name(f"{int(first.stem, 16) - SEGMENT_HEADER_SIZE:016x}.messages")
    shutil.copy(first, stray)
    assert any(str(stray) in note for note in notes(copy))


def test_a_directory_that_two_partitions_have_is_a_fault_and_no_live_segment_is_to_go(tmp_path: Path) -> None:
    data, first, second = tmp_path / "data", tmp_path / "a", tmp_path / "b"
    store = open_store(data, FakeDisk(), partitions=2, partition_dirs=(first, second))
    fill(Sender(store), 60)
    close_cleanly(store)
    moved = sorted(path.name for path in second.glob("*.messages"))
    for path in [*second.iterdir()]:
        path.rename(first / path.name)
    identity = latest(*read_copies(Disk(), data))
    both = tuple(partition._replace(directory=str(first)) for partition in identity.partitions)
    IdentityFile(Disk(), data, identity).change(lambda identity: replace(identity, partitions=both))
    (finding,) = check(data).findings
    assert (finding.severity, finding.file) == ("fault", first)
    assert finding.what == "is the directory of partition 0 and of partition 1"
    assert finding.advice.endswith(f"name that in partition_dirs: {', '.join(moved)}")
    assert len(moved) >= 2
    with pytest.raises(InvalidOption, match="is the same directory"):
        open_store(data, FakeDisk(), partitions=2)


# --- what is no file -------------------------------------------------------------------------------------------------


def _names(directory: Path) -> list[str]:
    """Return one of each kind of data file in a stopped store."""
    kinds = {path.suffix or path.name.split("-")[0]: path for path in files_of(directory)}
    return sorted(str(path.relative_to(directory)) for path in kinds.values())


def _as_fifo(path: Path) -> None:
    os.mkfifo(path)


def _as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        before = os.getcwd()
        os.chdir(path.parent)  # its name may be too long else
        try:
            sock.bind(path.name)
        finally:
            os.chdir(before)


def _as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make_one", "kind"),
    [(_as_fifo, "a FIFO"), (_as_socket, "a socket"), (_as_device, "a device"), (Path.mkdir, "a directory")],
)
def test_things_that_are_no_files_are_named_and_not_opened(
    sound: Path, tmp_path: Path, make_one: Callable[[Path], None], kind: str
) -> None:
    names = _names(sound)
    assert {Path(name).suffix or Path(name).name for name in names} >= {".messages", ".index", ".entries", "lock"}
    for number, name in enumerate(names):
        copy = Path(shutil.copytree(sound, tmp_path / str(number)))
        (copy / name).unlink()
        make_one(copy / name)
        if name == "lock":
            with pytest.raises(StorageFailed, match=f"lock: it is {kind}, not a file"):
                check(copy)
            continue
        if kind == "a directory" and name.startswith("pulls"):
            with pytest.raises(StorageFailed, match=f"{name}: it is {kind}, not a file"):
                check(copy)
            continue
        found = faults(copy)
        advice = "move it away; if there was a file of that name, put that back; then verify again"
        assert found == [f"fault: {copy / name}: is {kind}, not a file: nothing else was read; {advice}"]


@pytest.mark.parametrize("name", ["store-a", "checkpoint-99", "log-0/0123456789abcdef.messages"])
def test_a_store_with_a_fifo_in_the_place_of_a_file_does_not_hang(sound: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(StorageFailed, match=f"{name}: it is a FIFO, not a file; move it away"):
        open_store(copy, FakeDisk(), partitions=2)
    repaired = repair(copy, Disk(), 0)
    assert [(treated.finding.file, treated.outcome) for treated in repaired.treated] == [(copy / name, Outcome.LEFT)]
    if name != "checkpoint-99":
        with pytest.raises(StorageFailed, match=f"{name}: it is a FIFO, not a file; move it away"):
            open_data_directory(copy)


def test_the_socket_of_a_killed_broker_is_no_foreign_file(sound: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    _as_socket(copy / PING_NAME)
    assert notes(copy) == []


def test_a_foreign_fifo_is_left_alone(sound: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    for name in ("pipe", "log-0/pipe", "consumer-log/0/pipe"):
        os.mkfifo(copy / name)
    assert ["is a foreign file" in note for note in notes(copy)] == [True] * 3
