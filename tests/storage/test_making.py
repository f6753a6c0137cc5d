"""Making a data directory, and adding partitions to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import InvalidOption
from tests.storage.disks import HastyDisk
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
    store = open_store(tmp_path, HastyDisk(), partitions=3)
    check_stored(store, sender.sent)
    more = Sender(store)
    for partition in range(3):
        more.send("a.0", b"x", partition=partition)
    check_stored(store, sender.sent + more.sent)
    close_cleanly(store)
    verified(tmp_path)
    with pytest.raises(InvalidOption, match="has 3 partitions"):
        open_store(tmp_path, HastyDisk(), partitions=2)


def test_partitions_on_other_disks(tmp_path: Path) -> None:
    places = (tmp_path / "disk1" / "qmq", tmp_path / "disk2")
    store = open_store(tmp_path / "data", HastyDisk(), partitions=2, partition_dirs=places)
    sender = Sender(store)
    sender.send("a", b"1", partition=1)
    close_cleanly(store)
    assert [len(list(place.glob("*.messages"))) for place in places] == [1, 1]
    store = open_store(tmp_path / "data", HastyDisk(), partitions=2)  # it knows where they are
    check_stored(store, sender.sent)
    kill(store)
    with pytest.raises(InvalidOption, match="1 directories for 2"):
        open_store(tmp_path / "data", HastyDisk(), partitions=2, partition_dirs=places[:1])


def test_the_hint_of_a_store_id_has_its_size(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="store_id_hint has 5 bytes; give 6"):
        open_store(tmp_path, store_id_hint=b"short")
    store = open_store(tmp_path / "right", HastyDisk(), store_id_hint=b"hinted")
    assert store.store_id == b"hinted"
    kill(store)
