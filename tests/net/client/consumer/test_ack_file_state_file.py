"""State files of consumers."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from qmq.errors import ForeignFile
from qmq.net.client.consumer.ack_file import StateFile, state_directory
from qmq.net.protocol.types import KnownConsumer

STORE = b"store1"
KNOWN = KnownConsumer(1_700_000_000_000_000, 3, 0, 500, (1, 5, 7, 8, 400, 500))


def opened(path: Path, consumer: str = "c1") -> StateFile:
    return StateFile.open(path, STORE, "g", consumer)


def test_a_written_state_is_read_and_replaced(tmp_path: Path) -> None:
    file = opened(tmp_path / "made" / "anew")
    assert file.read() is None
    file.write(KNOWN)
    assert file.read() == KNOWN
    file.write(KNOWN._replace(handled=()))
    assert file.read() == KNOWN._replace(handled=())
    file.close()
    again = opened(tmp_path / "made" / "anew")
    assert again.read() == KNOWN._replace(handled=())
    again.close()


def test_each_consumer_has_a_file_of_its_own(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path, "c2")
    one.write(KNOWN)
    assert other.read() is None
    one.close()
    other.close()


def test_one_process_at_a_time_has_it(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(BlockingIOError):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_flipped_or_cut_file_counts_as_missing(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.write(KNOWN)
    good = file.path.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.path.write_bytes(bad)
        if good[6:7].isdigit() and bit // 8 == 6 and bytes(bad[6:7]).isdigit():
            with pytest.raises(ForeignFile, match="has format version"):  # as of another version
                file.read()
        else:
            assert file.read() is None, bit
    for size in range(len(good)):
        file.path.write_bytes(good[:size])
        assert file.read() is None, size
    file.close()


def test_a_file_of_another_consumer_counts_as_missing(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path, "c2")
    one.write(KNOWN)
    other.path.write_bytes(one.path.read_bytes())
    assert other.read() is None
    one.close()
    other.close()


def test_where_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "state" in state_directory().parts, "set for every test"
    monkeypatch.delenv("QMQ_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/x/state")
    assert state_directory() == Path("/x/state/qmq")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert state_directory() == Path("/home/somebody/.local/state/qmq")


def test_names_of_any_length_make_file_names(tmp_path: Path) -> None:
    file = StateFile.open(tmp_path, STORE, "g" * 200, "c" * 200)
    file.write(KNOWN)
    assert file.read() == KNOWN
    file.close()


def names(path: Path) -> list[str]:
    return sorted(file.suffix for file in path.iterdir())


def test_no_lock_file_stays_behind(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert names(tmp_path) == [".lock"]
    with pytest.raises(BlockingIOError):
        opened(tmp_path)
    assert names(tmp_path) == [".lock"], "it is the other's"
    file.write(KNOWN)
    file.close()
    assert names(tmp_path) == [".state"]


def test_a_lock_that_is_removed_between_opening_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    tries = list[int]()

    def slow(fd: int, operation: int) -> None:
        tries.append(fd)
        if len(tries) == 1:
            first.close()  # by its owner, between open and flock
        flock(fd, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", slow)
    second = opened(tmp_path)
    assert len(tries) == 2
    assert names(tmp_path) == [".lock"]
    with pytest.raises(BlockingIOError):
        opened(tmp_path)
    second.close()
    assert names(tmp_path) == []


def test_one_process_at_a_time_has_the_file_however_they_come_and_go(tmp_path: Path) -> None:
    holders, most, got = 0, 0, 0

    def come_and_go() -> None:
        nonlocal holders, most, got
        times = 0
        while times < 50:
            try:
                file = opened(tmp_path)
            except BlockingIOError:
                continue
            times += 1
            with counting:
                holders, got = holders + 1, got + 1
                most = max(most, holders)
            with counting:
                holders -= 1
            file.close()

    counting = threading.Lock()
    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (holders, most) == (0, 1)
    assert got == 200
    assert names(tmp_path) == []


def test_other_users_may_not_read_state_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = opened(tmp_path / "made" / "anew")
        file.write(KNOWN)
        made = [*(tmp_path / "made").rglob("*"), tmp_path / "made"]
        assert {path.stat().st_mode & 0o77 for path in made} == {0}
        assert len(made) == 4
        file.close()
    finally:
        os.umask(before)


def test_writes_after_close_do_nothing(tmp_path: Path) -> None:
    """A thread may write late, when another process has the file."""
    file = opened(tmp_path)
    file.close()
    file.close()
    file.write(KnownConsumer(1, 1, 0, 3, (1, 3)))
    again = opened(tmp_path)
    assert again.read() is None
    again.close()
