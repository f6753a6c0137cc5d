"""The order of names against a plain sort, with parts so small that they are split."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.broker.groups import name_order
from qmq.broker.groups.name_order import NameOrder
from qmq.format.layout import LANE_HIGH, LANE_NORMAL, LANE_ORDERED
from qmq.format.private import is_private
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.subjects import SubjectTable

NAMES = st.sampled_from([f"{first}{rest}" for first in "abc" for rest in ("", ".a", ".b", ".b.c", ".bb", "-x", "0")])
LANES = st.sampled_from([LANE_NORMAL, LANE_HIGH, LANE_ORDERED, LANE_ORDERED + 7])
PRIVATE = ("~g~a.b", "~lost-3")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    steps=st.lists(st.lists(st.tuples(NAMES | st.sampled_from(PRIVATE), LANES), max_size=25), max_size=4),
    gone=st.sets(st.integers(0, 60)),
)
def test_those_under_a_prefix_are_found_after_every_step(
    steps: list[list[tuple[str, int]]], gone: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_order, "_PART", 4)
    monkeypatch.setattr(name_order, "_NAMES", 3)
    monkeypatch.setattr(name_order, "PIECE", 5)
    with tempfile.TemporaryDirectory() as directory:
        table = SubjectTable.open(Disk(), Path(directory) / "subjects", b"store!")
        order = NameOrder(table)
        for step in steps:
            for name, lane in dict.fromkeys(step):
                if table.number(name, lane) is None and not (name == PRIVATE[1] and lane):
                    table.add(name, lane)
            some = [number for number in gone if number < table.count and not table.is_forgotten[number]]
            names = {table.name(number) for number in some}
            table.forget(some)
            order.forget(names)
            for prefix in ("", "a.", "a.b.", "b.", "zz."):
                found = order.under(prefix).tolist()
                expected = [
                    number
                    for number in range(table.count)
                    if not table.is_forgotten[number]
                    and table.name(number).startswith(prefix)
                    and not is_private(table.name(number))
                ]
                assert sorted(found) == expected, prefix
        table.close()
