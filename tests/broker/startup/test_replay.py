"""Records that are applied again at a start, where subjects have other numbers than when they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Subscribe
from tests.broker.harness import Driven, bodies_of
from tests.broker.test_admin import ask


def send_to(driven: Driven, partition: int, subject: str, body: bytes) -> None:
    driven.broker.avoid(frozenset({1 - partition}))
    assert driven.send(subject, body).partition == partition


@pytest.mark.parametrize("prefix", ["old", ""])
@pytest.mark.parametrize("begins_by", ["start", "seek"])
def test_a_start_at_a_time_holds_for_subjects_that_get_other_numbers(
    tmp_path: Path, prefix: str, begins_by: str
) -> None:
    """A start after a kill numbers subjects that no checkpoint has anew: those of the first partition come first."""
    driven = Driven(tmp_path, partitions=2)
    send_to(driven, 1, "old", b"before")
    driven.subscribe(prefix, start="new" if begins_by == "start" else None)
    if begins_by == "seek":
        ask(driven, "seek_group", group="g", to="new")
    send_to(driven, 0, "late", b"after")
    driven.store.close(clean=False)
    driven.open()
    (row,) = ask(driven, "groups", group="g")["rows"]
    assert row["ready"] == (1 if prefix == "" else 0)
    command = Subscribe(1, driven.request(), "g", (prefix,), "c", None)
    subscription = driven.do(command)[-1].subscription  # type: ignore[union-attr]
    assert bodies_of(driven.pull(subscription)) == ([b"after"] if prefix == "" else []), "nothing from before the start"
    send_to(driven, 0, "old", b"more")
    assert bodies_of(driven.pull(subscription)) == [b"more"]
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a."])
@pytest.mark.parametrize("begins_by", ["start", "seek"])
def test_a_start_at_a_sequence_holds_for_subjects_that_get_other_numbers(
    tmp_path: Path, prefix: str, begins_by: str
) -> None:
    driven = Driven(tmp_path, partitions=2)
    for number in range(3):
        send_to(driven, 1, "a.old", b"old %d" % number)
    driven.subscribe(prefix, start=("sequence", 2) if begins_by == "start" else None)
    if begins_by == "seek":
        ask(driven, "seek_group", group="g", to=["sequence", 2])
    for number in range(3):
        send_to(driven, 0, "a.late", b"late %d" % number)
    driven.store.close(clean=False)
    driven.open()
    for _ in range(2):
        (row,) = ask(driven, "groups", group="g")["rows"]
        assert row["ready"] == 4
        driven.restart()
    command = Subscribe(1, driven.request(), "g", (prefix,), "c", None)
    subscription = driven.do(command)[-1].subscription  # type: ignore[union-attr]
    assert sorted(bodies_of(driven.pull(subscription))) == [b"late 0", b"late 1", b"late 2", b"old 2"]
    driven.close()
