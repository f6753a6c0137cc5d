"""Making a data directory, and adding partitions to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import InvalidOption
from tests.fake_disk import FakeDisk
from tests.storage.stops import killed
from tests.storage.stores import (
    Sender,
    check_stored,
    close_cleanly,
    kill,
    open_store,
    verified,
)


def test_partitions_can_be_added_not_taken_away(tmp_path: Path) -> None:
    sender = killed(tmp_path, partitions=1)
    store = open_store(tmp_path, FakeDisk(), partitions=3)
    check_stored(store, sender.sent)
    more = Sender(store)
    for partition in range(3):
        more.send("a.0", b"x", partition=partition)
    check_stored(store, sender.sent + more.sent)
    close_cleanly(store)
    verified(tmp_path)
    with pytest.raises(InvalidOption, match="has 3 partitions"):
        open_store(tmp_path, FakeDisk(), partitions=2)


def test_partitions_on_other_disks(tmp_path: Path) -> None:
    places = (tmp_path / "disk1" / "qmq", tmp_path / "disk2")
    store = open_store(tmp_path / "data", FakeDisk(), partitions=2, partition_dirs=places)
    sender = Sender(store)
    sender.send("a", b"1", partition=1)
    close_cleanly(store)
    assert [len(list(place.glob("*.messages"))) for place in places] == [1, 1]
    store = open_store(tmp_path / "data", FakeDisk(), partitions=2)  # it knows where they are
    check_stored(store, sender.sent)
    kill(store)
    with pytest.raises(InvalidOption, match="1 directories for 2"):
        open_store(tmp_path / "data", FakeDisk(), partitions=2, partition_dirs=places[:1])


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("a", "a", "a of partition 0 is the same directory as .* of partition 1"),
        ("a", "link", "a of partition 0 is the same directory as .* of partition 1"),
        ("a", "a/", "a of partition 0 is the same directory as .* of partition 1"),
        ("a", "./b/../a", "a of partition 0 is the same directory as .* of partition 1"),
        ("a", "a/b", "of partition 0 and .* of partition 1 lie one in the other"),
        ("link/b", "a", "of partition 0 and .* of partition 1 lie one in the other"),
        ("a", "data", "of partition 1 and .*data/consumer-log of the data directory lie one in the other"),
        ("a", ".", "of partition 0 and .* of partition 1 lie one in the other"),
        ("a", "data/pulls", "pulls of partition 1 is the same directory as .*pulls of the data directory"),
        ("data/delayed/log-0", "a", "lie one in the other"),
    ],
)
def test_each_partition_has_a_directory_of_its_own(tmp_path: Path, first: str, second: str, says: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    places = (tmp_path / first, Path(f"{tmp_path}/{second}"))
    with pytest.raises(InvalidOption, match=says):
        open_store(tmp_path / "data", FakeDisk(), partitions=2, partition_dirs=places)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "link"]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["lock"]


def test_a_partition_that_is_added_gets_no_directory_of_another(tmp_path: Path) -> None:
    first = tmp_path / "data" / "log-1"
    kill(open_store(tmp_path / "data", FakeDisk(), partitions=1, partition_dirs=(first,)))
    with pytest.raises(InvalidOption, match=r"log-1 of partition 0 is the same directory as .*log-1 of partition 1"):
        open_store(tmp_path / "data", FakeDisk(), partitions=2)


def test_directories_whose_names_begin_alike_are_apart(tmp_path: Path) -> None:
    places = (tmp_path / "disk", tmp_path / "disk2", tmp_path / "data" / "log-2")
    kill(open_store(tmp_path / "data", FakeDisk(), partitions=3, partition_dirs=places))
    assert [len(list(place.glob("*.messages"))) for place in places] == [1, 1, 1]


def test_the_hint_of_a_store_id_has_its_size(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="store_id has 5 bytes; give 6"):
        open_store(tmp_path, store_id=b"short")
    store = open_store(tmp_path / "right", FakeDisk(), store_id=b"hinted")
    assert store.store_id == b"hinted"
    kill(store)
