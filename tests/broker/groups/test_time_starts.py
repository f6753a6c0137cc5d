"""Where groups begin that start at a time: as each subject says, for all of them at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qmq.broker.groups import time_starts
from qmq.broker.groups.time_starts import KEPT, NOTHING, TimeStarts
from qmq.broker.ports.work import whole
from tests.broker.harness import Driven


def filled(driven: Driven, rounds: int) -> list[int]:
    """Store messages of some of ten subjects, at several times; return the times."""
    times = list[int]()
    for number in range(rounds):
        times.append(driven.now.wall_us)
        driven.do(driven.send_command({f"a.{one}": [b"x"] * (1 + one) for one in range(10) if (one + number) % 3}))
        driven.advance(1_000)
    return times


def wanted(driven: Driven, time_us: int) -> list[int]:
    found = [driven.store.sequence_at_time(number, time_us) for number in range(driven.store.subjects.count)]
    return [NOTHING if sequence is None else sequence for sequence in found]


@pytest.mark.parametrize("partitions", [1, 2])
def test_they_are_those_of_each_subject(tmp_path: Path, partitions: int) -> None:
    driven = Driven(tmp_path, partitions=partitions)
    starts, times = TimeStarts(driven.store), filled(driven, KEPT + 2)
    for _ in range(2):
        for time_us in (0, *times, times[-1] + 1, driven.now.wall_us):
            found = whole(starts.at(time_us))
            assert found is not None
            assert found.of(np.arange(driven.store.subjects.count)).tolist() == wanted(driven, time_us)
        filled(driven, 2)  # what comes later is read too
    driven.close()


def test_rows_are_read_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (time_us, *_) = filled(driven, 3)
    starts = TimeStarts(driven.store)
    assert sum(starts.at(time_us)) > 0
    assert sum(starts.at(time_us)) == 0
    driven.send("a.1", b"new")
    assert sum(starts.at(time_us)) == 1
    driven.close()


def test_too_many_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    times, starts = filled(driven, 3), TimeStarts(driven.store)
    monkeypatch.setattr(time_starts, "MOST_ROWS", 10)
    assert whole(starts.at(times[0])) is None
    assert whole(starts.at(times[-1])) is not None
    filled(driven, 3)
    assert whole(starts.at(times[-1])) is None
    driven.close()
