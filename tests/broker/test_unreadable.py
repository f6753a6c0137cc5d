"""Answers leave out messages that are known to be unreadable, and have all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.harness import Driven, bodies_of


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
def test_neighbours_of_an_unreadable_batch_are_served(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    sent = [driven.send("a.x", b"%d" % number) for number in range(12)]
    assert driven.store.partitions[0].message_log.unreadable.add(sent[5].position + 20, 1)
    assert not driven.store.partitions[0].message_log.unreadable.add(sent[5].position + 20, 1)
    got = bodies_of(driven.pull(driven.subscribe(prefix, group=None, start="first"), left_out=1))
    assert got == [b"%d" % number for number in range(12) if number != 5]
    assert not driven.broker.take_damaged()  # it was reported when it was marked
    driven.close()


def test_an_unreadable_batch_of_many_runs_costs_no_other(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for number in range(6):
        driven.do(driven.send_command({subject: [b"%d" % number] for subject in ("a.x", "a.y", "b")}))
    driven.store.partitions[0].message_log.unreadable.add(
        driven.store.partitions[0].consumer_log.read_entry(3 * 2)[1], 1
    )
    got = bodies_of(driven.pull(driven.subscribe("a."), left_out=2))
    assert sorted(got) == sorted(b"%d" % number for number in range(6) if number != 2 for _ in range(2))
    driven.close()
