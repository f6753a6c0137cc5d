"""Cursors never pass a message that was not delivered."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.delivery import select
from qmq.broker.ports.commands import Synced
from qmq.broker.ports.effects import PulledMessages
from tests.broker.harness import Driven, bodies_of, runs_of_answer


@pytest.mark.parametrize("prefix", ["a", ""])
@pytest.mark.parametrize("start", ["new", "time"])
def test_a_start_by_time_takes_what_is_stored_but_not_visible_yet(tmp_path: Path, prefix: str, start: str) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    driven.send("a", b"before", flush=False)
    subscription = driven.subscribe(prefix, start="new" if start == "new" else ("time", driven.now.wall_us + 100))
    assert driven.do(driven.send_command({"a": [b"1"]})) == []
    assert driven.pull(subscription) == []
    driven.sync()
    assert bodies_of(driven.pull(subscription)) == [b"1"]
    driven.close()


def test_a_pull_stopped_at_the_bound_goes_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "PASS_ROWS", 100)
    driven = Driven(tmp_path)
    driven.do(*[driven.send_command({"b": [b"x"]}, flush=False) for _ in range(1_000)])
    driven.send("a.x", b"1")
    pull = driven.pull_command(driven.subscribe("a."), timeout_ms=60_000)
    said = driven.do(pull)
    for _ in range(1_000):
        if driven.broker.tick(driven.now) != driven.now.monotonic_us:
            break
        said += driven.do()
    (answer,) = said
    assert isinstance(answer, PulledMessages)
    assert bodies_of(runs_of_answer(answer)) == [b"1"]
    driven.close()


def test_a_narrower_prefix_of_the_same_group_begins_where_the_group_is(tmp_path: Path) -> None:
    for group, narrow in (("g", "a."), ("h", "a.x")):
        driven = Driven(tmp_path / group)
        driven.send("a.x", b"1")
        wide, narrower = driven.subscribe(""), driven.subscribe(narrow, start="new")
        driven.send("a.x", b"2")
        got = bodies_of(driven.pull(narrower)) + bodies_of(driven.pull(wide))
        assert got == [b"1", b"2"]
        driven.close()


def test_one_arrival_looks_for_few_of_many_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    for connection in range(1, 101):
        subscription = driven.subscribe("a", connection=connection)
        driven.do(driven.pull_command(subscription, timeout_ms=60_000, connection=connection))
    driven.do(driven.send_command({"a": [b"1"]}))
    driven.do(driven.send_command({"a": [b"2"]}))  # stored behind the running sync, so not visible with the first
    made, selection = [], select.PullSelection
    monkeypatch.setattr(select, "PullSelection", lambda *limits: made.append(1) or selection(*limits))
    (want,) = driven.wanted
    driven.store.partition(want.partition).sync()
    said = driven.do(Synced(want.partition, want.position))
    assert [effect.connection for effect in said if isinstance(effect, PulledMessages)] == [1]
    assert len(made) <= 2
    driven.wanted = driven.wanted[1:]
    driven.sync()
    driven.close()
