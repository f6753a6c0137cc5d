"""Files of what consumers have acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.net.holding import Known
from qmq.net.state_file import StateFile, state_directory

STORE = b"store1"
KNOWN = Known(1_700_000_000_000_000, 3, 0, 500, (1, 5, 7, 8, 400, 500))


def opened(path: Path, consumer: str = "c1") -> StateFile:
    return StateFile.open(path, STORE, "g", consumer)


def test_what_is_written_is_read_and_replaced(tmp_path: Path) -> None:
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


def test_whatever_bit_is_flipped_and_wherever_it_is_cut_it_says_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.write(KNOWN)
    good = file.path.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.path.write_bytes(bad)
        assert file.read() is None, bit
    for size in range(len(good)):
        file.path.write_bytes(good[:size])
        assert file.read() is None, size
    file.close()


def test_a_file_of_another_consumer_says_nothing(tmp_path: Path) -> None:
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
