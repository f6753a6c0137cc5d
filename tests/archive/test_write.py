"""Segments in an archive: byte for byte, once, complete or not at all, whenever a run is killed."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from crc32c import crc32c

from qmq.archive.archive import archived_segments, manifests
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import LocalFiles
from qmq.archive.lock import ArchiveLock, this_process
from qmq.archive.write import _Run, _RunEnded
from qmq.errors import BadBytes, DirectoryInUse, StorageFailed, StorageFull
from tests.archive.archives import GONE, NOW_US, archive, files_in
from tests.archive.orders import write_orders
from tests.fake_disk import FakeDisk, Killed, Operation
from tests.storage.stores import Sender, Sent, close_cleanly, open_store, segment_files, verified


def positions_in(place: Path) -> list[tuple[int, int]]:
    """Return (partition, position) of all batches of an archive."""
    files = LocalFiles(place)
    return [
        (segment.partition, position)
        for segment in archived_segments(files)
        for position in segment.batches(files)["position"].tolist()
    ]


def receipts_for(source: Path, to: Path) -> set[int]:
    """Return the bases of the segments that have a receipt of this archive."""
    found = open_data_directory(source)
    receipts = [found.receipt(segment) for segment in found.segments]
    return {receipt.base for receipt in receipts if receipt is not None and receipt.destination == str(to)}


def places(sent: list[Sent]) -> list[tuple[int, int]]:
    return sorted((batch.partition, batch.position) for batch in sent)


def test_every_segment_is_there_byte_for_byte(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_orders(source, 100)
    done = archive(source, to)
    segments = [*segment_files(source), *segment_files(source, 1)]
    assert (done.copied, done.kept, done.left) == (len(segments), 0, 0)
    assert positions_in(to) == places(sent)
    for path, manifest in manifests(LocalFiles(to)):
        original = source / f"log-{manifest.partition}" / f"{manifest.base:016x}"
        data = original.with_suffix(".messages").read_bytes()[: manifest.end - manifest.base]
        assert (to / f"{path}.messages").read_bytes() == data
        assert (manifest.messages_bytes, manifest.messages_crc) == (len(data), crc32c(data))
        index = (to / f"{path}.index").read_bytes()
        assert (manifest.index_bytes, manifest.index_crc) == (len(index), crc32c(index))
        if original.with_suffix(".index").read_bytes()[18]:  # sealed
            assert index == original.with_suffix(".index").read_bytes()
        own = [
            batch for batch in sent
            if batch.partition == manifest.partition and manifest.base <= batch.position < manifest.end
        ]  # fmt: skip
        assert manifest.batches == len(own)
        assert manifest.messages == sum(count for batch in own for _, _, count in batch.runs)
        assert manifest.first_stored_at_us <= manifest.last_stored_at_us
        assert manifest.archived_at_us == NOW_US
    assert done.messages == sum(manifest.messages for _, manifest in manifests(LocalFiles(to)))
    verified(source)


def test_a_second_run_copies_nothing(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 50)
    first = archive(source, to)
    before = files_in(to)
    assert (to / "_lock").exists() is False
    again = archive(source, to)
    assert (again.copied, again.copied_bytes, again.kept) == (0, 0, first.copied)
    assert files_in(to) == before


def test_what_a_broker_still_writes_is_left(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    store = open_store(source)
    sender = Sender(store)
    for _ in range(30):
        sender.send("a", *[b"body" * 50] * 10)
    done = archive(source, to)
    assert (done.copied, done.left) == (len(segment_files(source)) - 1, 1)
    last = int(segment_files(source)[-1].stem, 16)
    assert positions_in(to) == [place for place in places(sender.sent) if place[1] < last]
    close_cleanly(store)
    assert archive(source, to).copied == 1
    assert positions_in(to) == places(sender.sent)


def test_a_segment_that_went_on_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_orders(source, 3)
    archive(source, to)
    store = open_store(source, partitions=2)
    sender = Sender(store)
    sender.send("a", b"more")
    close_cleanly(store)
    done = archive(source, to)
    assert (done.copied, done.kept) == (1, 1)
    assert positions_in(to) == places([*sent, *sender.sent])


def test_killed_at_any_moment_and_repeated(tmp_path: Path) -> None:
    """After each step the archive is correct, and the next run completes it."""
    source = tmp_path / "data"
    sent = write_orders(source, 12)
    archive(source, tmp_path / "whole")
    whole = files_in(tmp_path / "whole")
    killed = leftovers = 0
    for last in range(1_000):
        to, disk = tmp_path / f"archive-{last}", FakeDisk().kill_at(last)
        try:
            archive(source, to, disk, GONE)
        except Killed:
            killed += 1
        else:
            break
        if to.exists():
            assert set(positions_in(to)) <= set(places(sent))
            assert receipts_for(source, to) <= {manifest.base for _, manifest in manifests(LocalFiles(to))}
            leftovers += any(path.name.startswith("_") for path in to.rglob("*"))
        archive(source, to)
        assert files_in(to) == whole
        assert len(receipts_for(source, to)) == len(manifests(LocalFiles(to)))
    print(f"killed {killed} times, {leftovers} times with something left")
    assert killed > 20
    assert leftovers > 10


def test_the_lock_that_is_being_renewed_is_no_leftover(tmp_path: Path) -> None:
    """Its thread writes while the run removes unfinished files."""
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 1)
    archive(source, to)
    for process in (os.getpid(), 999_999_999):
        (to / f"_lock.{process}").write_bytes(b"half")
    assert archive(source, to).removed == 1
    assert [path.name for path in to.glob("_*")] == [f"_lock.{os.getpid()}"]


def test_killed_while_it_replaces_a_segment(tmp_path: Path) -> None:
    """The part that was archived before stays readable until the whole segment is there."""
    source, before = tmp_path / "data", tmp_path / "before"
    sent = write_orders(source, 3)
    archive(source, before)
    store = open_store(source, partitions=2)
    Sender(store).send("a", b"more")
    close_cleanly(store)
    killed = 0
    for last in range(1_000):
        to = tmp_path / f"archive-{last}"
        for name, data in files_in(before).items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes(data)
        try:
            archive(source, to, FakeDisk().kill_at(last), GONE)
        except Killed:
            killed += 1
        else:
            break
        assert set(positions_in(to)) >= set(places(sent))
    assert killed > 10


@pytest.mark.parametrize("operation", ["pwritev", "rename", "fsync"])
def test_a_full_or_failing_disk_ends_the_run_with_an_error(tmp_path: Path, operation: str) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_orders(source, 20)
    disk = FakeDisk("boot-1")
    disk.fail_always(operation, path_part=".messages")
    with pytest.raises(StorageFull, match="archive"):
        archive(source, to, disk)
    assert positions_in(to) == []
    assert disk.still_open() == []
    archive(source, to)
    assert positions_in(to) == places(sent)
    assert not [name for name in files_in(to) if "/_" in name or name.startswith("_")]


def test_a_run_that_lost_its_lock_puts_nothing_in_place(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 5)

    def steal(operation: Operation) -> None:
        assert operation.kind != "rename" or "segments" not in operation.path
        if operation.path.endswith(".manifest"):
            (to / "_lock").write_text('{"host": "elsewhere", "process": 7, "started": "now", "renewed_at_us": 0}')

    disk = FakeDisk()
    disk.before = steal
    with pytest.raises(DirectoryInUse, match="process 7 on elsewhere"):
        archive(source, to, disk)
    assert "elsewhere" in (to / "_lock").read_text()


def test_copies_get_their_names_in_order_though_two_are_made_at_once(tmp_path: Path) -> None:
    """A stream that reads an archive continues after the last segment that it has seen."""
    source, to, second_is_whole, order = tmp_path / "data", tmp_path / "archive", threading.Event(), list[str]()
    store = open_store(source)
    sender = Sender(store)
    while len(segment_files(source)) < 4:
        sender.send("a", b"body" * 500)
    close_cleanly(store)
    bases = [path.stem for path in segment_files(source)]

    def wait(operation: Operation) -> None:
        """Delay the copy of the first segment until that of the second one is done."""
        path = Path(operation.path)
        if path.name == f"_{bases[0]}.messages" and operation.kind == "open":
            assert second_is_whole.wait(60)
        if path.name == f"_{bases[1]}.index" and operation.kind == "open":
            second_is_whole.set()
        if path.suffix == ".manifest" and operation.kind == "rename":
            order.append(path.stem)

    disk = FakeDisk()
    disk.before = wait
    assert archive(source, to, disk).copied == 4
    assert order == bases
    assert positions_in(to) == places(sender.sent)


def test_a_full_disk_gets_the_room_back_that_copies_took(tmp_path: Path) -> None:
    source, to, begun = tmp_path / "data", tmp_path / "archive", threading.Event()
    write_orders(source, 60)
    first, second, *_ = segment_files(source)

    def wait(operation: Operation) -> None:
        """Make the disk full at the first copy, once the second one has begun."""
        name = Path(operation.path).name
        if operation.kind == "pwritev" and name == f"_{second.name}":
            begun.set()
        elif operation.kind == "pwritev" and name == f"_{first.name}":
            assert begun.wait(60)

    disk = FakeDisk()
    disk.before = wait
    disk.fail_always("pwritev", path_part=f"_{first.name}")
    with pytest.raises(StorageFull):
        archive(source, to, disk)
    assert not list(to.rglob("*.messages"))


def test_where_there_is_room_for_one_copy_they_are_made_one_by_one(tmp_path: Path) -> None:
    source, to, second_begins, struck = tmp_path / "data", tmp_path / "archive", threading.Event(), list[str]()
    sent = write_orders(source, 60)
    first, second, *others = segment_files(source)

    def opened(operation: Operation) -> None:
        if operation.kind == "open" and Path(operation.path).name == f"_{second.name}":
            second_begins.set()

    def refuse(operation: Operation) -> None:
        path = Path(operation.path)
        if operation.kind != "pwritev":
            return
        if path.name == f"_{first.name}":
            assert second_begins.wait(60)
        if path.suffix == ".messages" and len(list(to.rglob("_*.messages"))) > 1:
            struck.append(path.name)
            raise OSError(errno.ENOSPC, "full")

    disk = FakeDisk()
    disk.before, disk.after = refuse, opened
    done = archive(source, to, disk)
    print(f"the disk was full {len(struck)} times")
    assert struck
    assert done.copied == 2 + len(others) + len(segment_files(source, 1))
    assert done.copied_bytes == sum(path.stat().st_size for path in to.rglob("*.messages"))
    assert positions_in(to) == places(sent)


def test_a_copy_of_a_run_that_has_ended_goes_no_further(tmp_path: Path) -> None:
    source, to = tmp_path / "data", LocalFiles(tmp_path / "archive")
    write_orders(source, 5)
    to.make_directory("")
    with ArchiveLock(to, lambda: NOW_US, this_process()) as lock:
        run = _Run(open_data_directory(source), to, lock, lambda: NOW_US, None)
        run._copied(1)
        run._has_ended = True
        for goes_on in (run._copied, run._verified):
            with pytest.raises(_RunEnded):
                goes_on(1)


def test_a_rotten_manifest_is_told_of(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 5)
    archive(source, to)
    path = next(to.rglob("*.manifest"))
    path.write_bytes(path.read_bytes().replace(b'"batches":', b'"batches":1'))
    with pytest.raises(BadBytes, match="does not fit its checksum"):
        archived_segments(LocalFiles(to))
    path.write_bytes(b"{")
    with pytest.raises(BadBytes, match="is not a record of QMQ"):
        archived_segments(LocalFiles(to))


def test_a_segment_that_was_cut_is_archived_as_it_is(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 60)
    first = segment_files(source)[0]
    os.truncate(first, first.stat().st_size - 1)
    archive(source, to)
    (copy,) = to.rglob(first.name)
    assert copy.read_bytes() == first.read_bytes()


def test_an_archive_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    (tmp_path / "segments").mkdir()
    disk.fail("listdir")
    with pytest.raises(StorageFailed, match="cannot list"):
        manifests(LocalFiles(tmp_path, disk))
