"""The file of a key index: what it finds, how it is laid out, and that no changed byte passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.errors import BadBytes
from qmq.format.layout import KEY_FILTER_PROBES, KEY_PAGE_ENTRIES, KEY_PAGE_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.key_index.build import KeyIndexBuilder, sort_entries
from qmq.storage.key_index.key_file import (
    KeyFile,
    base_of,
    keys_path,
    owner_of,
    probes_of,
    probes_of_one,
    sizes_of,
)
from qmq.storage.key_index.walk import WalkStep
from tests.effort import part_of
from tests.storage.histories import quick_directory
from tests.storage.key_index.keyed import make

BASE, END = 1 << 20, 2 << 20
OWNER = owner_of(3, b"qmqqmq", BASE, END)
Entries = list[tuple[int, int]]


class GivenWalk:
    """A walk over a segment whose batches have these hashes: (hash, offset), by offset, some a step."""

    path = Path("given")

    def __init__(self, entries: Entries, step: int) -> None:
        self._entries = entries
        self._step = step

    @property
    def is_done(self) -> bool:
        return not self._entries

    def step(self) -> WalkStep:
        count = self._step
        while count < len(self._entries) and self._entries[count][1] == self._entries[count - 1][1]:
            count += 1  # a batch is never split
        part, self._entries = self._entries[:count], self._entries[count:]
        hashes, offsets = np.array([one[0] for one in part], np.uint64), np.array([one[1] for one in part], np.uint64)
        return WalkStep(hashes, offsets + np.uint64(BASE), 1, 0)

    def close(self) -> None:
        pass


def made(directory: Path, entries: Entries, *, step: int = 1_000, part_entries: int = 1 << 20) -> KeyFile:
    """Make a key index of these entries, and open it."""
    disk = Disk()
    walk = GivenWalk(sorted(entries, key=lambda entry: entry[1]), step)
    make(KeyIndexBuilder(disk, directory, OWNER, walk, part_entries=part_entries))
    return KeyFile.open(disk, directory, OWNER)


def read_all(disk: Disk, directory: Path) -> None:
    """Read every page of the file."""
    file = KeyFile.open(disk, directory, OWNER)
    try:
        file.all_entries()
        file.filter_bytes()
    finally:
        file.close()


def random_entries(count: int, *, seed: int = 0, hot: int = 0) -> Entries:
    """Return entries of random hashes, and *hot* batches of one."""
    chance = np.random.default_rng(seed)
    hashes = chance.integers(1, 1 << 64, count, np.uint64).tolist()
    return [(value, 64 + 10 * at) for at, value in enumerate([*hashes, *[hashes[0]] * hot])]


SMALL = st.lists(st.tuples(st.sampled_from([1, 2, 5 << 40, (1 << 64) - 1]), st.integers(64, 4_000)), max_size=2_000)


@settings(max_examples=part_of(40), deadline=None)
@given(SMALL, st.integers(1, 500), st.integers(1, 300), st.integers(0, 4_100), st.integers(0, 4_100))
def test_a_look_up_finds_what_a_set_has(entries: Entries, step: int, part: int, low: int, high: int) -> None:
    with quick_directory() as directory:
        file = made(directory, entries, step=step, part_entries=part)
        assert file.count == len(set(entries))
        for value in (1, 2, 3, 5 << 40, (1 << 64) - 1):
            offsets = sorted({offset for found, offset in entries if found == value and low <= offset < high})
            assert file.offsets(value, low, high) == offsets
            assert file.offsets(value, low, high, newest=True) == offsets[::-1]
            assert file.may_have(value) or value not in {found for found, _ in entries}
        file.close()


def test_a_million_random_hashes_are_found_with_few_reads(tmp_path: Path) -> None:
    entries = random_entries(200_000, hot=3_000)
    file = made(tmp_path, entries, part_entries=50_000, step=20_000)
    for value, offset in entries[1:200_000:2_001]:
        assert file.may_have(value)
        assert file.offsets(value, 0, 1 << 32) == [offset]
    hot = [offset for value, offset in entries if value == entries[0][0]]
    assert file.offsets(entries[0][0], 0, 1 << 32) == hot
    newest = file.offsets(entries[0][0], 0, 1 << 32, newest=True, limit=100)
    assert newest == hot[::-1][: len(newest)]
    assert 100 <= len(newest) < 100 + KEY_PAGE_ENTRIES
    others = np.random.default_rng(1).integers(1, 1 << 64, 5_000, np.uint64).tolist()
    assert sum(map(file.may_have, others)) < 5_000 * 0.01
    assert file.sizes.file_bytes < 14 * file.count + 3 * KEY_PAGE_SIZE
    file.close()


def test_a_file_is_the_same_however_it_was_made(tmp_path: Path) -> None:
    entries = random_entries(3_000, hot=500)
    files = []
    for step, part in ((1_000, 1 << 20), (7, 100), (10_000, 1)):
        made(tmp_path, entries, step=step, part_entries=part).close()
        files.append(keys_path(tmp_path, BASE).read_bytes())
        assert [path.name for path in tmp_path.iterdir()] == [keys_path(tmp_path, BASE).name]
    assert len(set(files)) == 1
    assert len(files[0]) == sizes_of(3_500).file_bytes


def test_an_index_without_keys_is_one_page(tmp_path: Path) -> None:
    file = made(tmp_path, [])
    assert not file.may_have(1)
    assert file.offsets(1, 0, 1 << 32) == []
    assert keys_path(tmp_path, BASE).stat().st_size == KEY_PAGE_SIZE
    file.close()


def test_no_changed_byte_passes(tmp_path: Path) -> None:
    entries = random_entries(1_000)
    made(tmp_path, entries).close()
    path = keys_path(tmp_path, BASE)
    good = path.read_bytes()
    disk = Disk()
    for at in range(0, len(good), 37):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(BadBytes):
            read_all(disk, tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 63, KEY_PAGE_SIZE, KEY_PAGE_SIZE + 1, -1, -KEY_PAGE_SIZE])
def test_a_torn_file_is_not_opened(tmp_path: Path, cut: int) -> None:
    made(tmp_path, random_entries(1_000)).close()
    path = keys_path(tmp_path, BASE)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadBytes):
        KeyFile.open(Disk(), tmp_path, OWNER)


@pytest.mark.parametrize(
    "other",
    [
        owner_of(4, b"qmqqmq", BASE, END),
        owner_of(3, b"others", BASE, END),
        owner_of(3, b"qmqqmq", BASE, END + 1),
    ],
    ids=["partition", "store", "end"],
)
def test_the_file_of_another_segment_is_not_opened(tmp_path: Path, other: object) -> None:
    made(tmp_path, random_entries(10)).close()
    with pytest.raises(BadBytes, match="not the key index of this segment"):
        KeyFile.open(Disk(), tmp_path, other)  # type: ignore[arg-type]  # it is a header


def test_probes_of_many_and_of_one_are_the_same() -> None:
    hashes = np.random.default_rng(2).integers(0, 1 << 64, 200, np.uint64)
    assert probes_of(hashes).tolist() == [probes_of_one(value) for value in hashes.tolist()]
    assert len(probes_of_one(5)) == KEY_FILTER_PROBES


def test_entries_are_sorted_by_hash_and_offset_and_stand_once() -> None:
    hashes, offsets = sort_entries(np.array([5, 5, 3, 5, 3], np.uint64), np.array([9, 2, 4, 2, 1], np.uint32))
    assert list(zip(hashes.tolist(), offsets.tolist(), strict=True)) == [(3, 1), (3, 4), (5, 2), (5, 9)]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("00000000000000ff.keys", 255),
        ("00000000000000ff.keys.tmp", 255),
        ("00000000000000ff.keys.parts", 255),
        ("00000000000000ff.index", None),
        ("ff.keys", None),
        ("00000000000000fg.keys", None),
    ],
)
def test_base_of(name: str, base: int | None) -> None:
    assert base_of(name) == base
