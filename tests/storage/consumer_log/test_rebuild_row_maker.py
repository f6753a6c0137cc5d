"""Rows made from stored batches equal those that the broker made."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qmq.format.batch import parse_header
from qmq.format.build import RunContent
from qmq.format.layout import ENTRY_DTYPE, LANE_HIGH, LANE_LOW, LANE_ORDERED
from qmq.storage.consumer_log.rebuild import Damaged, RowMaker
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.store import Store
from tests.fake_disk import FakeDisk
from tests.storage.stores import NOW_US, Sender, kill, options


def test_rows_are_made_as_the_broker_makes_them(tmp_path: Path) -> None:
    store = Store.open(tmp_path, options(), FakeDisk(), NOW_US)
    sender = Sender(store)
    sender.stage(("one", [b"1", b"2"]))
    sender.stage(("two", [b"1"]), ("one", [b"2"]), ("three", [b"3"] * 4))
    sender.stage(RunContent("one", [b"5"], None, LANE_HIGH))
    two = [RunContent("two", [b"7"], None, lane) for lane in (LANE_ORDERED, LANE_LOW)]
    sender.stage(("one", [b"6"]), *two)
    sender.write()
    subjects = SubjectTable.open(FakeDisk(), tmp_path / "other", store.store_id)
    for name in ("one", "two"):
        subjects.add(name)
    maker = RowMaker(subjects)
    made = []
    for sent in sender.sent:
        view = store.partitions[0].message_log.view(sent.position, len(sent.data))
        for _ in range(2):  # the second time from what it remembers
            rows = maker.rows(parse_header(view), view)
        made += [rows] if isinstance(rows, tuple) else rows.tolist()
    expected = store.partitions[0].consumer_log.rows(0, 10)
    lanes = (("one", 0), ("two", 0), ("three", 0), ("one", LANE_HIGH), ("two", LANE_ORDERED), ("two", LANE_LOW))
    numbers = {store.subjects.number(*lane): number for number, lane in enumerate(lanes)}
    assert np.array(made, ENTRY_DTYPE)["subject"].tolist() == [numbers[n] for n in expected["subject"].tolist()]
    fields = ("first_sequence", "position", "stored_at_us", "count", "run", "runs", "lane", "run_size", "batch_size")
    for field in fields:
        assert np.array(made, ENTRY_DTYPE)[field].tolist() == expected[field].tolist()
    assert subjects.count == 6
    damaged = maker.damaged(sender.sent[1].data)
    assert sorted(damaged) == [Damaged(0, 2, 3), Damaged(1, 0, 1), Damaged(2, 0, 4)]
    subjects.close()
    kill(store)


def test_a_name_that_was_forgotten_gets_its_new_number(tmp_path: Path) -> None:
    store = Store.open(tmp_path, options(), FakeDisk(), NOW_US)
    sent = Sender(store).send("one", b"1")
    view = store.partitions[0].message_log.view(sent.position, len(sent.data))
    subjects = SubjectTable.open(FakeDisk(), tmp_path / "other", store.store_id)
    maker = RowMaker(subjects)
    assert maker.rows(parse_header(view), view)[3] == 0
    subjects.forget([0])
    assert maker.rows(parse_header(view), view)[3] == 1
    subjects.close()
    kill(store)
