"""At-most-once groups get only messages that are on disk: others may come again as another message."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Send, SyncBroken
from qmq.errors import SyncFailed
from tests.broker.delivery.test_at_most_once import joined, taken
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.test_consuming import many
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, SMALL, check_files


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
def test_only_what_is_on_disk_is_handed_out(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    subscription, other = joined(driven, prefix), driven.subscribe("", group="h", connection=2)
    driven.send("a.x", b"0", b"1")
    driven.auto_sync = False
    driven.send("a.x", b"2", flush=False)
    driven.send("a.x", b"3", flush=False)
    assert taken(driven, subscription) == many(2), "what is there is not kept back by what is not"
    assert not driven.wanted
    assert bodies_of(driven.pull(other, connection=2)) == many(4), "other groups get all"
    pull = driven.pull_command(subscription)
    assert driven.do(pull) == []
    assert driven.advance(1_000) == []
    assert len(driven.wanted) == 1
    (answer,) = driven.sync()
    assert (answer.request, bodies_of(runs_of_answer(answer))) == (pull.request, many(4)[2:])  # type: ignore[union-attr]
    driven.auto_sync = True
    driven.close()


def test_of_many_small_batches_those_on_disk_are_told_from_the_others_exactly(tmp_path: Path) -> None:
    """The positions are too large for a float to tell them apart."""
    driven = Driven(tmp_path)
    subscription = joined(driven, "a.")
    assert driven.store.partitions[0].message_log.end > 1 << 54
    for number in range(20):
        driven.send("a.x", b"%d" % number)
    driven.auto_sync = False
    for number in range(20, 40):
        driven.send("a.x", b"%d" % number, flush=False)
    assert taken(driven, subscription) == many(20)
    driven.auto_sync = True
    driven.close()


def test_a_pull_waits_for_as_many_on_disk_as_it_wants(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = joined(driven, "a.")
    driven.send("a.x", b"0")
    driven.auto_sync = False
    pull = driven.pull_command(subscription, min_count=3, timeout_ms=60_000)
    assert driven.do(pull) == []
    for body in (b"1", b"2"):
        driven.send("a.x", body, flush=False)
    (answer,) = driven.sync()
    assert bodies_of(runs_of_answer(answer)) == many(3)
    driven.auto_sync = True
    driven.close()


def test_where_a_sync_has_failed_all_is_handed_out(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = joined(driven, "a.")
    driven.auto_sync = False
    driven.send("a.x", b"0", flush=False)
    assert driven.do(driven.pull_command(subscription, timeout_ms=60_000)) == []
    (wanted,) = driven.wanted
    (answer,) = driven.do(SyncBroken(wanted.partition, SyncFailed("the disk is gone")))
    assert bodies_of(runs_of_answer(answer)) == [b"0"]
    driven.store.close(clean=False)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_send_that_is_tried_again_after_a_loss_of_power_comes_once(partitions: int, seed: int) -> None:
    disk = SimulatedDisk(seed)
    driven = Driven(DIRECTORY, disk=disk, partitions=partitions, **SMALL)
    subscription, got, unanswered = joined(driven), Counter[bytes](), []
    for body in many(30):
        command = driven.send_command({f"a.{int(body) % 3}": [body]}, flush=False)
        unanswered.append(bytes(command.batch))
        driven.do(command)
        if int(body) % 4 == seed:
            got.update(taken(driven, subscription, max_count=3))
    disk.stop(power=True)
    check_files(disk)
    driven.wanted.clear()
    driven.open()
    subscription = joined(driven)
    for batch in unanswered:
        driven.do(Send(1, driven.request(), memoryview(bytearray(batch)), True))
    while bodies := taken(driven, subscription):
        got.update(bodies)
    assert got
    assert set(got.values()) == {1}, got
