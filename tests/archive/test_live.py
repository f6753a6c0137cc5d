"""Detect whether a broker uses a data directory, and whether segments exist."""

from __future__ import annotations

from pathlib import Path

from qmq.archive.data_directory import has_segments, is_live
from tests.storage.stores import Sender, close_cleanly, open_store


def test_who_holds_it_is_seen_and_what_begins_there(tmp_path: Path) -> None:
    store = open_store(tmp_path, partitions=2)
    Sender(store).send("a", b"1")
    assert is_live(tmp_path)
    ends = [(number, store.partitions[number].seal()) for number in range(2)]
    assert has_segments(tmp_path, ends)
    assert not has_segments(tmp_path, [ends[0], (2, ends[1][1])])
    assert not has_segments(tmp_path, [(0, ends[0][1] + 1)])
    close_cleanly(store)
    assert not is_live(tmp_path)
