"""A disk that stalls: waiting messages take bounded memory, and the other partitions go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Disconnected, LastSequence, Send
from qmq.broker.ports.effects import Sent
from qmq.broker.publish import send_replies, staging
from tests.broker.harness import Driven, bodies_of


def stalled(directory: Path) -> Driven:
    """Return two partitions, the first with a sync under way; subject a is at home in the first, b in the second."""
    driven = Driven(directory, auto_sync=False, partitions=2)
    assert driven.do(driven.send_command({"a": [b"a0"]})) == []
    driven.do(driven.send_command({"b": [b"b0"]}))
    assert [wanted.partition for wanted in driven.wanted] == [0, 1]
    return driven


def finish_sync(driven: Driven, partition: int) -> int:
    """Run the wanted syncs of one partition, and return how many answers came."""
    later = [wanted for wanted in driven.wanted if wanted.partition != partition]
    driven.wanted = [wanted for wanted in driven.wanted if wanted.partition == partition]
    said = driven.sync()
    driven.wanted += later
    return sum(isinstance(effect, Sent) for effect in said)


def test_the_other_partition_goes_on(tmp_path: Path) -> None:
    driven = stalled(tmp_path)
    group = driven.subscribe("")
    assert finish_sync(driven, 1) == 1
    assert bodies_of(driven.pull(group)) == [b"b0"]
    for number in range(1, 5):
        driven.do(driven.send_command({"b": [b"b%d" % number]}))
        assert finish_sync(driven, 1) == 1
        assert bodies_of(driven.pull(group)) == [b"b%d" % number]
    assert driven.broker.waiting_for_sync() == 1
    assert finish_sync(driven, 0) == 1
    assert bodies_of(driven.pull(group)) == [b"a0"]
    driven.close()


def test_batches_go_elsewhere_and_stay_in_order_where_a_partition_is_to_be_avoided(tmp_path: Path) -> None:
    driven = stalled(tmp_path)
    driven.broker.avoid(frozenset({0}))
    (a1,) = driven.do(driven.send_command({"a": [b"a1"]}, flush=False))
    assert isinstance(a1, Sent)
    assert a1.partition == 1
    finish_sync(driven, 1)
    group = driven.subscribe("a")
    assert driven.pull(group) == []  # it lies behind a message that is not on disk yet
    driven.broker.avoid(frozenset({0, 1}))  # with all avoided, none is better
    (a2,) = driven.do(driven.send_command({"a": [b"a2"]}, flush=False))
    assert isinstance(a2, Sent)
    assert a2.partition == 0
    driven.broker.avoid(frozenset())
    finish_sync(driven, 0)
    finish_sync(driven, 1)
    assert bodies_of(driven.pull(group)) == [b"a0", b"a1", b"a2"]
    driven.close()


def test_what_waits_for_a_stalled_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_BARRIERS", 4)
    driven = stalled(tmp_path)
    finish_sync(driven, 1)
    expected = {"a": [b"a0"], "b": [b"b0"]}
    for number in range(1, 40):  # each waits for the messages of a in the first partition
        batch = {name: [b"%s%d" % (name.encode(), number)] for name in ("b", "a")}
        again = driven.send_command(batch, flush=number % 3 == 0)
        driven.do(again)
        for name, bodies in batch.items():
            expected[name] += bodies
        finish_sync(driven, 1)
        assert all(len(partition.barriers) <= 4 for partition in driven.broker._intake._partitions)
    assert bodies_of(driven.pull(driven.subscribe("", group="all"))) == [b"b0"]
    while driven.wanted:
        driven.sync()
    for name, bodies in expected.items():
        assert bodies_of(driven.pull(driven.subscribe(name, group=name))) == bodies
    assert not any(partition.barriers for partition in driven.broker._intake._partitions)
    driven.auto_sync = True
    driven.close()


def test_who_connects_again_and_again_meanwhile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (send_replies, staging):
        monkeypatch.setattr(module, "MOST_WAITING", 8)
    driven = stalled(tmp_path)
    command = driven.send_command({"a": [b"a1"]})
    data = bytes(command.batch)
    for connection in range(10, 200):
        driven.do(Send(connection, 1, memoryview(bytearray(data)), True))
        driven.do(LastSequence(connection, 2, driven.producer))
        driven.do(Disconnected(connection))
        assert driven.broker.waiting_for_sync() <= 8 + 4
    driven.do(Send(200, 1, memoryview(bytearray(data)), True))
    said = []
    while driven.wanted:
        said += driven.sync()
    assert 200 in {answer.connection for answer in said if isinstance(answer, Sent)}
    assert driven.broker.waiting_for_sync() == 0
    driven.do(Disconnected(200))
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"a0", b"a1"]
    driven.close()
