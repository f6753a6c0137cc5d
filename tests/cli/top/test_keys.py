"""qmq/cli/top/keys.py: keys from the bytes of a terminal, however they are cut."""

from __future__ import annotations

import pytest

from qmq.cli.top.keys import Keys


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        ("é名".encode(), ["é", "名"]),
        (b"\r\n\x7f\x15", ["enter", "enter", "backspace", "clear"]),
        (b"\x1b[<0;1;1M", []),
        (b"\x1bx", ["escape", "x"]),
        (b"\x00\x01", []),
    ],
)
def test_bytes_become_keys_however_they_are_cut(data: bytes, keys: list[str]) -> None:
    whole, cut = Keys(), Keys()
    assert whole.feed(data) + whole.flush() == keys
    assert [key for one in data for key in cut.feed(bytes((one,)))] + cut.flush() == keys


def test_escape_alone_is_a_key_once_nothing_follows() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b") == []
    assert keys.is_open
    assert keys.flush() == ["escape"]
    assert not keys.is_open


def test_a_sequence_without_end_is_not_kept_for_ever() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b[" + b"1" * 100)[0] == "escape"
    assert not keys.is_open
