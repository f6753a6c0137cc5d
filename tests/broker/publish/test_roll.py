"""Segments sealed on request; the answer comes once their files no longer change."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Administer, Disconnected
from qmq.broker.ports.effects import Administered, CheckpointWanted, Effect, Refused
from qmq.errors import StorageFailed
from tests.broker.harness import Driven, bodies_of


def seal(driven: Driven) -> list[Effect]:
    return driven.do(Administer(1, driven.request(), "roll", {}))


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_roll_is_answered_once_a_checkpoint_has_it(tmp_path: Path, partitions: int) -> None:
    driven = Driven(tmp_path, partitions=partitions)
    for number in range(6):
        driven.send(f"a.{number}", b"%d" % number)
    ends = [driven.store.partitions[partition].message_log.end for partition in range(partitions)]
    assert seal(driven) == []
    assert driven.broker.wants_checkpoint()
    assert driven.advance(20) == []
    driven.checkpoint()
    (answer,) = driven.advance(20)
    assert isinstance(answer, Administered)
    assert answer.fields == {"rows": [{"partition": number, "end": end} for number, end in enumerate(ends)]}
    assert [driven.store.partitions[number].message_log.sealed[-1].end for number in range(partitions)] == ends
    assert not driven.broker.wants_checkpoint()
    (again,) = seal(driven)
    assert isinstance(again, Administered)
    assert again.fields == answer.fields, "nothing was written since"
    subscription = driven.subscribe("a.")
    driven.send("a.0", b"more")
    assert bodies_of(driven.pull(subscription)) == [b"0", b"1", b"2", b"3", b"4", b"5", b"more"]
    driven.close()


def test_a_roll_asks_for_the_checkpoint_that_it_waits_for(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", b"1")
    driven.broker.handle(Administer(1, driven.request(), "roll", {}), driven.now)
    assert CheckpointWanted() in driven.broker.take_effects()
    driven.close()


def test_an_empty_log_is_not_sealed(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    base = driven.store.partitions[0].message_log.end - 64
    (answer,) = seal(driven)
    assert isinstance(answer, Administered)
    assert answer.fields == {"rows": [{"partition": 0, "end": base}]}
    assert not driven.store.partitions[0].message_log.sealed
    driven.close()


def test_a_roll_without_a_checkpoint_times_out(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", b"1")
    assert seal(driven) == []
    assert driven.do(Administer(2, driven.request(), "roll", {}), Disconnected(2)) == []
    (answer,) = driven.advance(30_000)
    assert isinstance(answer, Refused)
    assert answer.connection == 1
    assert isinstance(answer.error, StorageFailed)
    assert answer.error.retryable
    driven.close()
