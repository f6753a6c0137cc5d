"""The lag of a group over many subjects is counted in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.groups import lag
from qmq.broker.groups.lag import FollowedSubjects, ready, walk_followed
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.ports.work import whole
from tests.broker.harness import Driven


def test_prefixes_within_others_are_counted_once_and_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({f"{letter}.{one}": [b"x"] for letter in "ab" for one in range(100)}))
    subscription = driven.subscribe("a.", "a.7", group="g")
    driven.subscribe("", group="g", connection=2)
    driven.do(driven.pull_command(subscription, max_count=30))
    store, group = driven.store, driven.broker.groups["g"]
    order, times, found = NameOrder(store.subjects), TimeStarts(store), list[FollowedSubjects]()
    monkeypatch.setattr(lag, "PIECE", 16)
    assert whole(walk_followed(store, group, order, times, found.append))
    assert max(len(one.numbers) for one in found) <= 16
    numbers = [number for one in found for number in one.numbers.tolist()]
    assert sorted(numbers) == list(range(200))
    assert whole(ready(store, group, order, times)) == (170, True)
    driven.close()
