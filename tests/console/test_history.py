"""The last hour: what is kept, for which groups, and how much at most."""

from __future__ import annotations

import numpy as np

from qmq.console.history import History
from qmq.console.snapshot import Snapshot, make_snapshot
from tests.console.made_up import at, broker_stats, group_stats, received


def snapshot_at(seconds: float, *names: str, count: int = 0) -> Snapshot:
    groups = [
        group_stats(name, ready=index, oldest_unacked=at(-index), acked=count) for index, name in enumerate(names)
    ]
    return make_snapshot(1, at(seconds), [received(broker_stats(seconds, *groups), count)], {}, None)


def test_a_row_every_5_s_has_the_rate_since_the_row_before() -> None:
    history = History()
    for second in range(11):
        history.add(snapshot_at(second, "billing", count=second * second))
    whole, billing = history.columns(None, 3600), history.columns("billing", 3600)
    assert whole.times.tolist() == [at(0).timestamp(), at(5).timestamp(), at(10).timestamp()]
    assert whole.received_rate.tolist() == [0, 5, 15]
    assert billing.acked_rate.tolist() == [0, 5, 15]
    assert np.isnan(billing.received_rate).all()
    assert (np.diff(whole.times) * whole.received_rate[1:]).sum() == 100


def test_it_forgets_what_is_older_than_an_hour() -> None:
    history = History()
    for step in range(800):
        history.add(snapshot_at(step * 5, "old" if step < 10 else "new"))
    times = history.columns(None, 10_000).times
    assert len(times) == 720
    assert times[-1] - times[0] == 3595
    assert len(history.columns(None, 60).times) == 12
    assert history.group_names == ["new"]
    assert len(history.columns("old", 3600).times) == 0


def test_of_too_many_groups_it_keeps_those_furthest_behind() -> None:
    history = History(most_groups=3)
    history.add(snapshot_at(0, *"abcdef"))
    assert history.group_names == ["d", "e", "f"]
    history.add(snapshot_at(5, *"fedcba"))
    assert history.group_names == ["a", "b", "c"]
    assert np.isnan(history.columns("a", 60).ready[0])
    history.add(snapshot_at(10, *"xyaz"))
    assert history.group_names == ["a", "y", "z"]
    assert history.columns("a", 60).ready.tolist()[1:] == [5, 2]


def test_a_time_without_any_broker_is_a_gap() -> None:
    history = History()
    history.add(snapshot_at(0, "billing"))
    history.add(make_snapshot(2, at(5), [], {}, None))
    history.add(snapshot_at(10, "billing"))
    assert np.isnan(history.columns(None, 60).ready).tolist() == [False, True, False]
    assert np.isnan(history.columns("billing", 60).ready).tolist() == [False, True, False]


def test_it_is_empty_at_first() -> None:
    assert len(History().columns(None, 60).times) == 0
    assert len(History().columns("billing", 60).dead) == 0
