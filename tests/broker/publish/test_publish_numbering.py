"""Numbers of subjects: a name keeps its number, new names get the next, and bad names get none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qmq.broker.publish.publish import SubjectNumbering
from qmq.errors import InvalidName
from qmq.format.batch import BatchLimits, CheckedBatch, check_batch
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store, StoreOptions
from tests.broker.harness import batch_of


def checked(**subjects: int) -> CheckedBatch:
    contents = {name.replace("_", "."): [b"x"] * count for name, count in subjects.items()}
    return check_batch(batch_of(contents, 0), BatchLimits(1 << 20))


def test_names_get_numbers_once_in_order(tmp_path: Path) -> None:
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    numbering = SubjectNumbering(store)
    first = numbering.of(checked(a_x=1))
    assert first == 0
    several = numbering.of(checked(a_y=2, a_x=1, b=1))
    assert isinstance(several, np.ndarray)
    assert sorted(several.tolist()) == [0, 1, 2]
    assert [store.subjects.name(number) for number in range(3)] == ["a.x", "a.y", "b"]
    again = numbering.of(checked(a_y=2, a_x=1, b=1))
    assert isinstance(again, np.ndarray)
    assert again.tolist() == several.tolist()
    assert store.subjects.count == 3
    store.close(clean=False)


def test_a_bad_name_registers_none(tmp_path: Path) -> None:
    store = Store.open(tmp_path, StoreOptions(), Disk(), 1)
    bad = check_batch(batch_of({"good": [b"x"], "~bad": [b"x"]}, 0), BatchLimits(1 << 20))
    with pytest.raises(InvalidName, match="~bad"):
        SubjectNumbering(store).of(bad)
    assert store.subjects.count == 0
    store.close(clean=False)
