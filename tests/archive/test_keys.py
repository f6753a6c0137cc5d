"""Key indexes of archived segments: as the data directory has them, or made; look-ups with and without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.archive.archive import archived_segments, manifests
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import LocalFiles
from qmq.archive.keys import batches_with, key_file_of
from qmq.format.hashing import key_hash
from tests.archive.archives import archive
from tests.fake_disk import FakeDisk
from tests.storage.key_index.keyed import make_all, send_keyed
from tests.storage.stores import Sender, checkpoint, close_cleanly, open_store, verified

KEYS = [f"order-{number}" for number in range(20)]
Stored = dict[str, list[int]]


def write(directory: Path, *, with_indexes: bool) -> Stored:
    """Write a stopped store of several segments; return the positions of each key."""
    store = open_store(directory, FakeDisk())
    sender, stored = Sender(store), defaultdict[str, list[int]](list)
    for number in range(60):
        keys = {KEYS[number % 20], KEYS[number * 7 % 20]}
        position = send_keyed(sender, *keys, body=bytes(2_000)).position
        for key in keys:
            stored[key].append(position)
    if with_indexes:
        checkpoint(store)
        assert make_all(store) >= 2
    close_cleanly(store)
    verified(directory)
    return stored


def check_found(files: LocalFiles, segments: list, stored: Stored) -> None:  # type: ignore[type-arg]
    """Every key is found in both directions."""
    for key in [*KEYS, "nobody's"]:
        value = key_hash(key)
        found = [position for segment in segments for part in batches_with(files, segment, value) for position in part]
        assert found == stored.get(key, [])
        newest = [
            position
            for segment in reversed(segments)
            for part in batches_with(files, segment, value, newest=True)
            for position in part
        ]
        assert newest == found[::-1]


@pytest.mark.parametrize("with_indexes", [True, False])
def test_an_archive_has_the_key_index_of_each_segment(tmp_path: Path, with_indexes: bool) -> None:
    stored = write(tmp_path / "data", with_indexes=with_indexes)
    archive(tmp_path / "data", tmp_path / "to")
    files = LocalFiles(tmp_path / "to")
    for segment in (segments := archived_segments(files)):
        file = key_file_of(files, segment)
        assert file is not None
        file.check_body()
        file.close()
    for path, manifest in manifests(files):
        data = (tmp_path / "to" / f"{path}.keys").read_bytes()
        assert len(data) == manifest.keys_bytes
        original = tmp_path / "data" / f"log-0/{manifest.base:016x}.keys"
        assert not original.exists() or original.read_bytes() == data
    check_found(files, segments, stored)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    data[4_100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [Path.unlink, cut, rot])
def test_without_a_good_index_a_segment_is_read(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    stored = write(tmp_path / "data", with_indexes=True)
    archive(tmp_path / "data", tmp_path / "to")
    for path in (tmp_path / "to").rglob("*.keys"):
        spoil(path)
    files = LocalFiles(tmp_path / "to")
    check_found(files, archived_segments(files), stored)


@pytest.mark.parametrize("spoil", [cut, rot])
def test_a_bad_index_is_made_anew_and_not_copied(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    write(tmp_path / "data", with_indexes=True)
    originals = sorted((tmp_path / "data" / "log-0").glob("*.keys"))
    good = {path.name: path.read_bytes() for path in originals}
    for path in originals:
        spoil(path)
    archive(tmp_path / "data", tmp_path / "to")
    copies = {path.name: path.read_bytes() for path in (tmp_path / "to").rglob("*.keys")}
    assert good.items() <= copies.items()


def test_a_stopped_brokers_directory_is_searched_as_it_lies(tmp_path: Path) -> None:
    stored = write(tmp_path, with_indexes=True)
    found = open_data_directory(tmp_path)
    check_found(found.files, found.segments, stored)  # type: ignore[arg-type]  # its files are local


def test_batches_behind_bad_bytes_are_found(tmp_path: Path) -> None:
    store = open_store(tmp_path, FakeDisk())
    sender = Sender(store)
    sent = [send_keyed(sender, f"key-{number}") for number in range(20)]
    close_cleanly(store)
    archive(tmp_path, tmp_path / "to")
    (segment,) = (tmp_path / "to").rglob("*.messages")
    segment.with_suffix(".keys").unlink()
    data = bytearray(segment.read_bytes())
    for lost in (4, 5, 11):
        at = sent[lost].position - int(segment.stem, 16)
        data[at : at + 8] = bytes(8)
    segment.write_bytes(data)
    files = LocalFiles(tmp_path / "to")
    (archived,) = archived_segments(files)
    found = [
        number for number in range(20) for part in batches_with(files, archived, key_hash(f"key-{number}")) if part
    ]
    assert found == [number for number in range(20) if number not in (4, 5, 11)]
