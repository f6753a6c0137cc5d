"""Segments as Parquet: every message once, day by day, whenever a run is killed and however many run at once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.archive import file_table, segments
from qmq.archive.data_directory import open_data_directory
from qmq.archive.file_table import path_of, second_of
from qmq.archive.files import LocalFiles, Progress
from qmq.archive.lock import ArchiveLock, this_process
from qmq.archive.write import open_run
from qmq.errors import DirectoryInUse, ForeignFile, StorageFailed, StorageFull
from qmq.format.build import RunContent, make_header
from qmq_spark.parquet import archive as parquet_archiving
from qmq_spark.parquet import files as parquet_files
from qmq_spark.parquet.archive import archive_parquet
from tests.archive.archives import GONE, NOW_US, SlowArchive, files_in
from tests.archive.orders import rows_in
from tests.effort import part_of
from tests.fake_disk import FakeDisk, Killed
from tests.spark.parquet.archives import DAY_US, archive, files_of, read, table_of, write_days
from tests.storage.stores import Sender, close_cleanly, damage, open_store, verified


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits: several rounds, and several files a day."""
    monkeypatch.setattr(parquet_archiving, "ROUND_BYTES", 5_000)
    monkeypatch.setattr(parquet_files, "GATHERED_BYTES", 8_000)
    monkeypatch.setattr(parquet_files, "OWN_BYTES", 3_000)
    monkeypatch.setattr(segments, "PIECE_BATCHES", 3)


def check(source: Path, to: Path) -> None:
    """Check that the archive has every message of the store once, and nothing else."""
    rows, damages = read(to)
    assert rows == rows_in(source)
    assert damages == []
    table = table_of(to)
    assert table.messages == sum(segment.messages for segment in table.segments) == len(rows)
    assert files_of(to) == {file.path for file in table.files}
    assert not [name for name in files_in(to) if "/_" in name or name.startswith("_")]
    for file in table.files:
        found = pq.read_table(to / file.path, partitioning=None)
        days = {time.date().isoformat() for time in found["stored_at"].to_pylist()}
        assert file.path.split("/")[1] == f"date={next(iter(days))}"
        assert len(days) == 1
        assert file.subject is None or set(found["subject"].to_pylist()) == {file.subject}
        assert (found.num_rows, (to / file.path).stat().st_size) == (file.messages, file.size)


@pytest.mark.usefixtures("small")
def test_has_every_message_once(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 3, 20)
    done = archive(source, to)
    check(source, to)
    assert (done.kept, done.left, done.damages, done.removed) == (0, 0, 0, 0)
    assert (done.messages, done.files) == (len(rows_in(source)), len(files_of(to)))
    assert done.files > len({path.split("/")[1] for path in files_of(to)}) == 3
    assert table_of(to).number > 1
    verified(source)


@pytest.mark.usefixtures("small")
def test_a_second_run_writes_nothing(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 2, 20)
    first = archive(source, to)
    before = files_in(to)
    again = archive(source, to, run="again")
    assert (again.messages, again.files, again.segments, again.kept) == (0, 0, 0, first.segments)
    assert files_in(to) == before


def test_runs_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """The last segment of a stopped store grows when the store is started again."""
    source, to = tmp_path / "data", tmp_path / "archive"
    for number in range(4):
        write_days(source, 1, 4, seed=number)
        done = archive(source, to, run=f"run-{number}")
        assert done.messages > 0
        check(source, to)


def test_runs_go_on_where_the_base_of_the_table_has_rotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few files a table lists, it has the changes since the first one."""
    monkeypatch.setattr(file_table, "_LARGE", 1)
    monkeypatch.setattr(file_table, "_SHARE", 0)
    source, to = tmp_path / "data", tmp_path / "archive"
    for number in range(3):
        write_days(source, 1, 4, seed=number)
        archive(source, to, run=f"run-{number}")
    base = table_of(to).base
    assert base is not None
    assert (to / second_of(base.number)).is_file(), "the end of a run leaves it"
    path = to / path_of(base.number)
    path.write_bytes(path.read_bytes().replace(b"files", b"tiles", 1))
    check(source, to)
    write_days(source, 1, 4, seed=3)
    archive(source, to, run="run-3")
    check(source, to)
    assert not path.exists()
    assert not (to / second_of(base.number)).exists()


def test_what_a_broker_still_writes_is_left(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    store = open_store(source)
    sender = Sender(store)
    for _ in range(30):
        sender.send("a", *[b"body" * 50] * 10)
    done = archive(source, to)
    assert (done.left, done.messages) == (1, len(read(to)[0]))
    assert 0 < done.messages < 300
    close_cleanly(store)
    assert archive(source, to, run="later").messages == 300 - done.messages


def test_a_batch_is_of_the_day_on_which_it_was_stored(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    store = open_store(source, partitions=2)
    sender = Sender(store)
    sender.pass_time(DAY_US - 2 - sender.now_us % DAY_US)
    for body in (b"last of the day", b"first of the next"):
        sender.send("a", body)
    close_cleanly(store)
    archive(source, to)
    check(source, to)
    assert len(table_of(to).files) == 2


def test_bad_bytes_are_listed_and_the_others_there(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_days(source, 1, 30)
    rows, bad = rows_in(source), sent[9]
    damage(source, bad, len(bad.data) - 1)
    done = archive(source, to)
    count = sum(messages for _, _, messages in bad.runs)
    places = range(bad.position, bad.position + count)
    kept = [row for row in rows if row["partition"] != bad.partition or row["position"] not in places]
    assert read(to)[0] == kept
    (told,) = table_of(to).damages
    assert (told.partition, told.start, told.messages) == (bad.partition, bad.position, count)
    assert "checksum" in told.reason
    assert (done.damages, done.messages) == (1, len(kept))
    assert archive(source, to, run="again").damages == 0
    assert len(table_of(to).damages) == 1


@pytest.mark.usefixtures("small")
def test_killed_at_any_moment_and_repeated(tmp_path: Path) -> None:
    """After each step the table is correct, and the next run completes the archive, with nothing twice."""
    source = tmp_path / "data"
    write_days(source, 3, 3)
    rows = rows_in(source)
    killed = partly = leftovers = removed = 0
    for last in range(1_000):
        to, disk = tmp_path / f"archive-{last}", FakeDisk().kill_at(last)
        try:
            archive(source, to, disk, GONE)
        except Killed:
            killed += 1
        else:
            break
        if to.exists():
            found = read(to)
            assert found == ([row for row in rows if row in found[0]], [])
            partly += 0 < len(found[0]) < len(rows)
            leftovers += bool(files_of(to) - {file.path for file in table_of(to).files})
        removed += archive(source, to, FakeDisk(), run="again").removed > 0
        assert read(to) == (rows, [])
        assert files_of(to) == {file.path for file in table_of(to).files}
        assert not [name for name in files_in(to) if "/_" in name or name.startswith("_")]
        shutil.rmtree(to)
    print(f"killed {killed} times, {partly} times with a part of it there, {leftovers} times with files of nobody")
    assert min(killed, partly, leftovers, removed) > 5


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("operation", ["pwritev", "fsync"])
@pytest.mark.parametrize("place", [".parquet", "tables"])
def test_a_full_or_failing_disk_ends_the_run_with_an_error(tmp_path: Path, operation: str, place: str) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 1, 6)
    disk = FakeDisk("boot-1")
    disk.fail_always(operation, path_part=place)
    with pytest.raises(StorageFull, match="archive"):
        archive(source, to, disk)
    assert read(to) == ([], [])
    assert disk.still_open() == []
    archive(source, to, run="again")
    check(source, to)


def test_a_copy_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    """A disk confirmed a write that it did not make."""

    class Forgetful(LocalFiles):
        def copy_in(self, source: Any, size: int, path: str, progress: Progress) -> int:
            crc = super().copy_in(source, size, path, progress)
            with (to / path).open("r+b") as file:
                file.write(b"?")
            return crc

    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 1, 6)
    files, found = Forgetful(to), open_data_directory(source)
    files.make_directory("")
    with ArchiveLock(files, lambda: NOW_US, this_process()) as lock, pytest.raises(StorageFailed, match="as it was"):
        archive_parquet(found.files, found.segments, files, lock, "run")
    assert read(to) == ([], [])


def test_a_run_that_lost_its_lock_commits_nothing(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 1, 6)

    class Thief(LocalFiles):
        def copy_in(self, source: Any, size: int, path: str, progress: Progress) -> int:
            held = {"host": "elsewhere", "process": 7, "started": "now", "renewed_at_us": 0}
            (to / "_lock").write_text(json.dumps(held))
            return super().copy_in(source, size, path, progress)

    files, found = Thief(to), open_data_directory(source)
    files.make_directory("")
    with ArchiveLock(files, lambda: NOW_US, this_process()) as lock, pytest.raises(DirectoryInUse, match="elsewhere"):
        archive_parquet(found.files, found.segments, files, lock, "run")
    assert table_of(to).number == 0


@pytest.mark.parametrize(
    ("operation", "ending"),
    [("fsync", ".parquet"), ("close", ".parquet"), ("rename", ".parquet"), ("link", ".table")],
)
def test_the_lock_is_renewed_however_long_a_call_takes(
    operation: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bytes are reported while one file is synced."""
    source, to, disk = tmp_path / "data", tmp_path / "archive", SlowArchive(operation, ending)
    write_days(source, 1, 6)
    disk.use(monkeypatch)
    with open_run(source, str(to), disk.clock) as run:
        archive_parquet(run.source.files, run.source.segments, run.files, run.lock, "run")
    assert disk.held
    monkeypatch.undo()
    check(source, to)


@pytest.mark.parametrize("there_already", [False, True])
@pytest.mark.parametrize("moment", ["confirm", "claim"])
def test_one_that_only_seemed_to_be_dead_commits_nothing(tmp_path: Path, there_already: bool, moment: str) -> None:
    """It stops after its last look at the lock, or before its table; meanwhile another run does everything and removes
    unlisted files. If that one had nothing to write, it has removed files that the first one is about to list.
    """
    source, other, to = tmp_path / "data", tmp_path / "other", tmp_path / "archive"
    write_days(source, 1, 6)
    write_days(other, 1, 6, seed=2)
    if there_already:
        archive(other, to, run="before")

    def stand_still(now: str) -> None:
        if now == moment:
            (to / "_lock").unlink()
            archive(other if there_already else source, to, run="meanwhile")

    class SlowLock(ArchiveLock):
        def confirm(self) -> None:
            super().confirm()
            stand_still("confirm")

    class SlowFiles(LocalFiles):
        def claim(self, path: str, data: bytes) -> bool:
            stand_still("claim" if path.startswith("tables/") else "lock")
            return super().claim(path, data)

    files, found = SlowFiles(to), open_data_directory(source)
    files.make_directory("")
    before = table_of(to).files
    with SlowLock(files, lambda: NOW_US, this_process()) as lock, pytest.raises((DirectoryInUse, StorageFailed)):
        archive_parquet(found.files, found.segments, files, lock, "slow")
    assert (table_of(to).files == before) is there_already
    archive(source, to, run="later")
    rows = sorted([*rows_in(source), *(rows_in(other) if there_already else [])], key=_place)
    assert sorted(read(to)[0], key=_place) == rows


def _place(row: dict[str, Any]) -> Any:
    return row["message_id"]


_TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
_RUNS = st.builds(
    lambda subject, messages: RunContent(
        subject, [body for body, *_ in messages], [make_header(key, tags, names) for _, key, tags, names in messages]
    ),
    st.sampled_from(["hotel.order.created", "hotel.order.paid", "a"]),
    st.lists(
        st.tuples(
            st.binary(max_size=50),
            st.lists(st.text(min_size=1, max_size=5), max_size=3),
            st.lists(_TEXTS, max_size=3),
            st.dictionaries(_TEXTS, _TEXTS, max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
)
_BATCHES = st.lists(
    st.tuples(
        st.lists(_RUNS, min_size=1, max_size=3, unique_by=lambda run: run.subject), st.integers(0, 1), st.booleans()
    ),
    max_size=8,
)


@settings(max_examples=part_of(12))
@given(stays=st.lists(_BATCHES, min_size=1, max_size=2))
def test_any_messages_come_back(tmp_path_factory: pytest.TempPathFactory, stays: list[Any]) -> None:
    """Each stay is a broker's, with a run after it; batches with a True are a day later."""
    directory = tmp_path_factory.mktemp("any")
    source, to = directory / "data", directory / "archive"
    for number, batches in enumerate(stays):
        store = open_store(source, FakeDisk(), partitions=2)
        sender = Sender(store)
        for runs, partition, later in batches:
            sender.pass_time(DAY_US * later)
            sender.stage(*runs, partition=partition)
            sender.write()
        close_cleanly(store)
        archive(source, to, FakeDisk(), run=f"run-{number}")
    check(source, to)
    shutil.rmtree(directory)


def test_a_segment_of_a_clone_that_ends_before_the_archived_one_is_refused(tmp_path: Path) -> None:
    first, second, to = tmp_path / "first", tmp_path / "second", tmp_path / "archive"
    store = open_store(first)
    Sender(store).send("a", b"common")
    close_cleanly(store)
    shutil.copytree(first, second)
    store = open_store(first)
    Sender(store).send("a", b"only in the first")
    close_cleanly(store)
    archive(first, to)
    before = files_in(to)
    with pytest.raises(ForeignFile, match="qmq repair --new-id"):
        archive(second, to, run="again")
    assert files_in(to) == before


def twins(tmp_path: Path, *, common: list[bytes], firsts: list[bytes], seconds: list[bytes]) -> tuple[Path, Path]:
    """Make a directory and its clone, which both get messages of their own."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path, bodies in ((first, common), (first, firsts), (second, seconds)):
        if path == second:
            continue
        store = open_store(path)
        for body in bodies:
            Sender(store).send("a", body)
        close_cleanly(store)
        if bodies is common:
            shutil.copytree(first, second)
    store = open_store(second)
    for body in seconds:
        Sender(store).send("a", body)
    close_cleanly(store)
    return first, second


@pytest.mark.parametrize("own", [b"only in the 2nd", b"of another size", b""])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_segment_of_a_clone_that_ends_behind_the_archived_one_is_refused(
    tmp_path: Path, own: bytes, more: int
) -> None:
    """Whether it goes as far as the archived one or further, and whatever the sizes of its batches."""
    to, seconds = tmp_path / "archive", [own or b"x" * 200, *[b"more" * 20] * more]
    first, second = twins(tmp_path, common=[b"common"], firsts=[b"only in the 1st"], seconds=seconds)
    archive(first, to)
    before = files_in(to)
    with pytest.raises(ForeignFile, match=r"other messages than .*qmq repair --new-id"):
        archive(second, to, run="again")
    assert files_in(to) == before
    assert archive(first, to, run="once more").kept == 1


def test_a_clone_without_messages_of_its_own_adds_none(tmp_path: Path) -> None:
    to = tmp_path / "archive"
    first, second = twins(tmp_path, common=[b"common"], firsts=[], seconds=[])
    archive(first, to)
    assert archive(second, to, run="again").kept == 1
    check(first, to)


def test_a_last_batch_that_has_rotten_since_is_no_clone(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    store = open_store(source)
    sender = Sender(store)
    sender.send("a", b"one")
    sender.send("a", b"two")
    close_cleanly(store)
    archive(source, to)
    store = open_store(source)
    Sender(store).send("a", b"three")
    close_cleanly(store)
    damage(source, sender.sent[-1], 40)
    assert archive(source, to, run="again").messages == 1
    assert archive(source, to, run="once more").kept == 1


def test_a_table_of_before_lists_no_last_batches(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_days(source, 1, 4)
    archive(source, to)
    table = table_of(to)
    rows = tuple(dataclasses.replace(one, last_position=None, last_crc=None) for one in table.segments)
    before = dataclasses.replace(table, segments=rows)
    content = before.pack()
    assert b"last_crc" not in content
    (to / path_of(table.number)).write_bytes(content)
    assert table_of(to).segments == rows
    assert archive(source, to, run="again").messages == 0
    write_days(source, 1, 4, seed=1)
    archive(source, to, run="once more")
    check(source, to)
    assert all(one.last_crc is not None for one in table_of(to).segments[-1:])
