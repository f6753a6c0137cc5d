"""The progress file of a restore."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.archive.files import LocalFiles
from qmq.errors import BadBytes, ForeignFile
from qmq.intervals import Intervals
from qmq.restore import progress as kept
from qmq.restore.progress import Counts, RestoreProgress, parse_progress

numbers = st.integers(0, 1 << 62)


def some(since: list[int] | None, done: list[tuple[int, int]]) -> RestoreProgress:
    progress = RestoreProgress(
        "72" * 16, ["7f0000015191"], 5, "7f0000015191", since, 7, 0, Counts(restored=3, damages=1)
    )
    intervals = progress.done["7f0000015191-0"] = Intervals()
    for start, size in done:
        intervals.add(start, start + size)
    return progress


@given(st.none() | st.lists(numbers), st.lists(st.tuples(numbers, st.integers(1, 1 << 40))))
def test_it_comes_back_as_it_was(since: list[int] | None, done: list[tuple[int, int]]) -> None:
    progress = some(since, done)
    again = parse_progress(progress.pack(), "it")
    assert again.pack() == progress.pack()
    assert (again.since, again.counts, list(again.done["7f0000015191-0"])) == (
        since, progress.counts, list(progress.done["7f0000015191-0"]),
    )  # fmt: skip


def test_what_rots_is_noticed_and_what_is_newer_refused() -> None:
    packed = some([1], [(5, 9)]).pack()
    for at in range(len(packed)):
        if packed[at : at + 1].isdigit():
            rotten = packed[:at] + (b"1" if packed[at : at + 1] == b"0" else b"0") + packed[at + 1 :]
            with pytest.raises(BadBytes, match=r"it .*remove it"):
                parse_progress(rotten, "it")
    for wrong in (b"", b"[]", b"{}", b"\xff"):
        with pytest.raises(BadBytes):
            parse_progress(wrong, "it")


def test_a_newer_one_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "VERSION", 2)
    packed = some(None, []).pack()
    monkeypatch.undo()
    with pytest.raises(ForeignFile, match="version 2"):
        parse_progress(packed, "it")


def test_those_of_a_selection_are_found(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.make_directory(kept.DIRECTORY)
    for digest, store in (("a" * 16, "1" * 12), ("a" * 16, "2" * 12), ("b" * 16, "1" * 12)):
        kept.write(files, kept.path_of(digest, store), some(None, []))
    files.write(f"{kept.path_of('a' * 16, '1' * 12)}.lock", b"x")
    found = kept.find(files, "a" * 16)
    assert sorted(found) == [kept.path_of("a" * 16, store * 12) for store in "12"]
