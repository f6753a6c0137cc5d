"""Key indexes that are missing, torn, rotten or old, and disks that fail: searches stay complete, and the files are
made again byte for byte.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.errors import StorageError, StorageFailed, StorageFull
from qmq.format.hashing import key_hash
from qmq.format.layout import DERIVED_HEADER_SIZE, KEY_PAGE_SIZE
from qmq.storage.key_index.key_file import keys_path
from qmq.storage.store import Store
from qmq.storage.verify.repair import Outcome, repair
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk, Killed
from tests.storage.key_index.keyed import cover, find, find_all, make, make_all, send_keyed
from tests.storage.stores import NOW_US, Sender, Sent, checkpoint, close_cleanly, damage, kill, open_store, verified

KEYS = [f"order-{number}" for number in range(40)]
Stored = dict[str, list[Sent]]


def fill(sender: Sender, batches: int = 60, size: int = 1_500) -> Stored:
    """Store batches of two keys each, in several segments."""
    stored: Stored = defaultdict(list)
    for number in range(batches):
        keys = KEYS[number % 40], KEYS[number * 7 % 40]
        sent = send_keyed(sender, *keys, body=bytes(size))
        for key in set(keys):
            stored[key].append(sent)
    return stored


def check_found(store: Store, stored: Stored, *lost: Sent) -> None:
    """Every key is found, and one that nobody has is not."""
    part = store.partitions[0]
    for key in KEYS:
        positions = [sent.position for sent in stored[key] if sent not in lost]
        assert find(part, key) == positions
        assert find(part, key, newest=True) == positions[::-1]
    assert find(part, "nobody's") == []


def key_files(path: Path) -> list[Path]:
    """Return the key indexes of partition 0."""
    return sorted((path / "log-0").glob("*.keys*"))


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Sender, Stored]:
    """Return the sender of an open store, all of whose sealed segments have key indexes, and what it stored."""
    sender = Sender(open_store(tmp_path, FakeDisk()))
    stored = fill(sender)
    checkpoint(sender.store)
    assert make_all(sender.store) == len(sender.store.partitions[0].message_log.sealed) > 1
    return sender, stored


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -KEY_PAGE_SIZE // 2])


def make_old(path: Path) -> None:
    """As of a version that has other contents: this one must not read it."""
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)


def rot_header(path: Path) -> None:
    _flip(path, 40)


def rot_entries(path: Path) -> None:
    _flip(path, KEY_PAGE_SIZE + 5)


def rot_filter(path: Path) -> None:
    _flip(path, path.stat().st_size - 2_000)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


SPOILS = [Path.unlink, cut_short, make_old, rot_header, rot_entries, rot_filter]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("restart", [True, False], ids=["after a start", "while open"])
def test_a_bad_file_is_searched_around_and_made_again(
    tmp_path: Path, filled: tuple[Sender, Stored], spoil: Callable[[Path], None], restart: bool
) -> None:
    sender, stored = filled
    store, good = sender.store, {path: path.read_bytes() for path in key_files(tmp_path)}
    if restart:
        close_cleanly(store)
    for path in good:
        spoil(path)
    if restart:
        store = open_store(tmp_path, FakeDisk())
    check_found(store, stored)
    checkpoint(store)
    make_all(store)
    assert {path: path.read_bytes() for path in key_files(tmp_path)} == good
    check_found(store, stored)
    close_cleanly(store)
    verified(tmp_path)


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_scrub_finds_a_bad_file(
    tmp_path: Path, filled: tuple[Sender, Stored], spoil: Callable[[Path], None]
) -> None:
    part = filled[0].store.partitions[0]
    first, second = part.message_log.sealed[:2]
    spoil(keys_path(tmp_path / "log-0", first.base))
    for span, is_good in ((first, False), (second, True)):
        reader = part.key_index.reader(span)
        while not (step := reader.step()).is_last:
            pass
        reader.close()
        assert step.is_good == is_good
    part.key_index.distrust(first.base)
    assert [span.base for span in part.key_index.unindexed()] == [first.base, part.message_log.current.base]
    assert make_all(filled[0].store) == 1
    close_cleanly(filled[0].store)
    verified(tmp_path)


@pytest.mark.parametrize("spoil", SPOILS[1:])
def test_verify_names_a_bad_file_and_repair_makes_it_again(
    tmp_path: Path, filled: tuple[Sender, Stored], spoil: Callable[[Path], None]
) -> None:
    close_cleanly(filled[0].store)
    report = verify(tmp_path, FakeDisk())
    assert report.findings == []
    path = key_files(tmp_path)[1]
    good = path.read_bytes()
    assert report.counts["keys"].records == sum(len(stored) for stored in filled[1].values()) - sum(
        1 for stored in filled[1].values() for sent in stored if sent.position > int(key_files(tmp_path)[-1].stem, 16)
        and sent.position >= filled[0].store.partitions[0].message_log.current.base
    )  # fmt: skip
    spoil(path)
    (finding,) = verify(tmp_path, FakeDisk()).findings
    assert (finding.severity, finding.file) == ("fault", path)
    done = repair(tmp_path, FakeDisk(), NOW_US)
    assert [(treated.finding.file, treated.outcome) for treated in done.treated] == [(path, Outcome.MADE_AGAIN)]
    assert path.read_bytes() == good
    verified(tmp_path)


def test_verify_finds_a_file_of_other_messages(tmp_path: Path, filled: tuple[Sender, Stored]) -> None:
    """A good file that does not have what its segment has: an entry too few."""
    sender, _ = filled
    part = sender.store.partitions[0]
    span = part.message_log.sealed[0]
    builder = part.key_index.builder(span)
    builder._walk.position = min(sent.position + len(sent.data) for sent in sender.sent)  # leaves the first batch out
    make(builder)
    close_cleanly(sender.store)
    (finding,) = verify(tmp_path, FakeDisk()).findings
    assert finding.severity == "fault"
    assert "entries are not the" in finding.what


def test_a_key_index_may_have_batches_that_have_rotten_since(tmp_path: Path, filled: tuple[Sender, Stored]) -> None:
    sender, stored = filled
    close_cleanly(sender.store)
    damage(tmp_path, sender.sent[3], len(sender.sent[3].data) - 1)
    assert {finding.file.suffix for finding in verify(tmp_path, FakeDisk()).findings} == {".messages"}
    store = open_store(tmp_path, FakeDisk())
    check_found(store, stored)  # the caller finds that the batch cannot be read
    kill(store)


def test_bad_headers_are_searched_around_without_an_index(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    stored = fill(sender)
    lost = sender.sent[5]
    checkpoint(sender.store)
    damage(tmp_path, lost, 8, b"\xff\xff\xff\x00")  # the size
    check_found(sender.store, stored, lost)
    make_all(sender.store)
    check_found(sender.store, stored, lost)
    kill(sender.store)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
def test_an_index_that_cannot_be_made_hurts_nobody_and_is_made_later(tmp_path: Path, code: int) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk))
    stored = fill(sender, 30, 4_000)
    checkpoint(sender.store)
    part = sender.store.partitions[0]
    span = part.message_log.sealed[0]
    before = disk.count_failing(code)
    builder = part.key_index.builder(span)
    make(builder)
    count = disk.count_failing(code) - before
    good = builder.path.read_bytes()
    assert count >= 2
    failed = 0
    for nth in range(count):
        builder.path.unlink(missing_ok=True)
        disk.strike(code, nth, lasting=False)
        try:
            make(part.key_index.builder(span))
        except StorageError:
            failed += 1
        disk.heal()
        assert [path for path in key_files(tmp_path) if path != builder.path] == []
        check_found(sender.store, stored)
        sent = send_keyed(sender, "order-0")
        stored["order-0"].append(sent)
        make(part.key_index.builder(span))
        assert builder.path.read_bytes() == good
    assert failed >= count - 1  # a part of the log that cannot be read at once can be read page by page
    close_cleanly(sender.store)
    verified(tmp_path)


def test_a_disk_that_cannot_read_a_part_of_the_log_gets_no_index_of_it(tmp_path: Path) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk))
    stored = fill(sender)
    checkpoint(sender.store)
    part = sender.store.partitions[0]
    disk.fail_always("preadv", errno.EIO, part.message_log.directory.name)
    builder = part.key_index.builder(part.message_log.sealed[0])
    with pytest.raises(StorageFailed, match="the disk cannot read"):
        make(builder)
    search = part.key_index.search(key_hash("order-0"))
    unread = 0
    while not (step := search.step()).is_last:
        unread += step.unread_bytes
    search.close()
    assert unread + step.unread_bytes > 0  # a result without these is not taken for a whole one
    disk.heal()
    check_found(sender.store, stored)
    close_cleanly(sender.store)


def test_a_kill_at_any_step_leaves_a_whole_index_or_none(tmp_path: Path) -> None:
    for step in range(1, 100):
        path = tmp_path / str(step)
        sender = Sender(open_store(path, FakeDisk()))
        stored = fill(sender, 30, 4_000)
        checkpoint(sender.store)
        part = sender.store.partitions[0]
        span = part.message_log.sealed[0]
        killing = FakeDisk().kill_at(step)
        part.key_index._disk = killing
        builder = part.key_index.builder(span)
        try:
            while builder.step():
                pass
        except Killed:
            is_killed = True
        else:
            is_killed = False
        kill(sender.store)
        for fd in (builder._fd, builder._parts_fd, builder._walk._fd):
            if fd >= 0:
                os.close(fd)
        verified(path)
        store = open_store(path, FakeDisk())
        assert [found.name for found in key_files(path) if found.suffix != ".keys"] == []
        check_found(store, stored)
        checkpoint(store)
        make_all(store)
        check_found(store, stored)
        close_cleanly(store)
        verified(path)
        if not is_killed:
            return
    raise AssertionError("a builder takes fewer steps")


def test_an_index_takes_none_of_the_room_that_is_kept_for_acknowledgements(tmp_path: Path) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk, keep_free_bytes=1 << 20))
    stored = fill(sender)
    checkpoint(sender.store)
    part = sender.store.partitions[0]
    span = part.message_log.sealed[0]
    disk.room_left = {"": (1 << 20) + 100}
    with pytest.raises(StorageFull, match="keep_free_bytes"):
        make(part.key_index.builder(span))
    assert key_files(tmp_path) == []
    check_found(sender.store, stored)
    disk.room_left = {"": 2 << 20}
    make(part.key_index.builder(span))
    close_cleanly(sender.store)
    verified(tmp_path)


def test_an_index_survives_a_loss_of_power_whole_or_not_at_all(tmp_path: Path) -> None:
    source, disk = tmp_path / "source", FakeDisk("boot-1")
    disk.track(source)
    sender = Sender(open_store(source, disk))
    stored = fill(sender)
    checkpoint(sender.store)
    part = sender.store.partitions[0]
    builder = part.key_index.builder(part.message_log.sealed[0])
    for step in range(100):
        is_done = not builder.step()
        lost = tmp_path / str(step)
        disk.without_power(source, lost)
        whole = lost / "log-0" / builder.path.name
        assert whole.exists() == is_done
        if is_done:
            break
    assert whole.read_bytes() == builder.path.read_bytes()
    builder.close()
    kill(sender.store)
    store = open_store(lost, FakeDisk("boot-2"))
    check_found(store, stored)
    assert part.message_log.sealed[0].base in store.partitions[0].key_index.indexed
    kill(store)


def test_retention_removes_the_file_with_its_segment(tmp_path: Path, filled: tuple[Sender, Stored]) -> None:
    sender, stored = filled
    store = sender.store
    part = store.partitions[0]
    span = part.message_log.sealed[0]
    search = part.key_index.search(key_hash("order-0"))
    builder = part.key_index.builder(span)
    make(builder)
    part.remove_segment(span.base)
    gone = [sent for sent in sender.sent if sent.position < span.end]
    assert find_all(search) == [sent.position for sent in stored["order-0"] if sent not in gone]
    check_found(store, stored, *gone)
    for _ in range(3):
        checkpoint(store)
    assert not keys_path(tmp_path / "log-0", span.base).exists()
    assert not part.key_index.built(span.base)  # a builder that ends now has made a file that nobody needs
    keys_path(tmp_path / "log-0", span.base).write_bytes(b"made meanwhile")
    part.key_index.discard(span.base)
    assert not keys_path(tmp_path / "log-0", span.base).exists()
    keys_path(tmp_path / "log-0", span.base).write_bytes(b"left by a kill")
    close_cleanly(store)
    store = open_store(tmp_path, FakeDisk())
    assert not keys_path(tmp_path / "log-0", span.base).exists()
    check_found(store, stored, *gone)
    close_cleanly(store)
    verified(tmp_path)


def test_two_keys_with_one_hash_are_both_found(tmp_path: Path) -> None:
    """The hash of a key is given by its sender, so any two can be the same."""
    sender = Sender(open_store(tmp_path, FakeDisk()))
    stored = fill(sender)
    value = key_hash("order-3")
    other = [sent.position for sent in stored["order-4"]]
    checkpoint(sender.store)
    for sent in stored["order-4"]:  # its hashes become those of order-3
        path = tmp_path / "log-0" / f"{_base_of(sender, sent):016x}.messages"
        data = path.read_bytes().replace(key_hash("order-4").to_bytes(8, "little"), value.to_bytes(8, "little"))
        path.write_bytes(data)
    expected = sorted({*other, *(sent.position for sent in stored["order-3"])})
    assert find(sender.store.partitions[0], "order-3") == expected
    make_all(sender.store)
    assert find(sender.store.partitions[0], "order-3") == expected
    kill(sender.store)


def _base_of(sender: Sender, sent: Sent) -> int:
    span = sender.store.partitions[0].message_log.segment_at(sent.position)
    assert span is not None
    return span.base


def test_a_key_of_ten_thousand_messages_comes_in_bounded_steps_while_more_arrive(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), segment_bytes=4 << 20))
    stored = [send_keyed(sender, "hot").position for _ in range(10_000)]
    sender.store.partitions[0].seal()
    stored += [send_keyed(sender, "hot").position for _ in range(1_000)]
    checkpoint(sender.store)
    make_all(sender.store)
    cover(sender.store)
    part = sender.store.partitions[0]
    for newest in (False, True):
        search, found = part.key_index.search(key_hash("hot"), newest=newest), list[int]()
        while True:
            step = search.step()
            found += step.positions
            assert len(step.positions) < 1_500
            if step.is_last:
                break
            if step.positions and not newest:
                assert all(position < step.searched_to for position in step.positions)
            send_keyed(sender, "hot")  # is behind the end of the search
        search.close()
        assert found == (stored[::-1] if newest else stored)
        stored = find(part, "hot")
    assert len(stored) > 11_000
    kill(sender.store)


def test_a_search_goes_on_where_another_one_stopped(tmp_path: Path, filled: tuple[Sender, Stored]) -> None:
    sender, stored = filled
    part = sender.store.partitions[0]
    expected = [sent.position for sent in stored["order-7"]]
    for newest in (False, True):
        found, start, end = list[int](), 0, None
        for _ in range(100):
            search = part.key_index.search(key_hash("order-7"), start, end, newest=newest)
            step = search.step()
            search.close()
            found += step.positions
            if step.is_last:
                break
            start, end = (0, step.searched_to) if newest else (step.searched_to, None)
        assert found == (expected[::-1] if newest else expected)
    kill(sender.store)


def test_filters_leave_out_what_cannot_have_the_key(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), segment_bytes=64 << 20))
    sent = [send_keyed(sender, f"key-{number}", body=bytes(20_000)) for number in range(1_000)]
    part = sender.store.partitions[0]

    def read_for(key: str) -> tuple[list[int], int]:
        search, found, read = part.key_index.search(key_hash(key)), list[int](), 0
        while True:
            step = search.step()
            found, read = found + step.positions, read + step.read_bytes
            if step.is_last:
                search.close()
                return found, read

    assert read_for("key-500")[1] > 15 << 20
    cover(sender.store)
    found, read = read_for("key-500")
    assert found == [sent[500].position]
    assert read < 8 << 20
    assert read_for("nobody's") == ([], 0)
    late = send_keyed(sender, "key-500")
    assert read_for("key-500")[0] == [sent[500].position, late.position]
    kill(sender.store)
    assert DERIVED_HEADER_SIZE == 64
