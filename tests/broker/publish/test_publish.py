"""The send path acknowledges and publishes batches as soon as it may and no earlier, and stores none twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qmq.broker.ports.commands import Disconnected, LastSequence, Send, SyncBroken, Synced
from qmq.broker.ports.effects import Effect, LastSequenceIs, Refused, Sent
from qmq.errors import BadBatch, InvalidName, MessageTooLarge, SyncFailed
from tests.broker.harness import PRODUCER, BrokerLimits, Driven, batch_of, bodies_of

BOTH_FLAGS = list(itertools.product((False, True), repeat=2))


def test_append_is_acknowledged_in_its_turn(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    (sent,) = driven.do(driven.send_command({"a.b": [b"x", b"y"]}, flush=False))
    assert isinstance(sent, Sent)
    assert sent.first_sequences == 0
    assert driven.wanted == []
    assert bodies_of(driven.pull(driven.subscribe("a."))) == [b"x", b"y"]
    driven.close()


def test_flush_waits_for_its_sync_and_hides_later_batches(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    subscription = driven.subscribe("")
    assert driven.do(driven.send_command({"a": [b"1"]}, flush=True)) == []
    said = driven.do(driven.send_command({"a": [b"2"]}, flush=False))
    assert [type(effect) for effect in said] == [
        Sent
    ]  # append: acknowledged, but not visible before the batches ahead of it
    assert driven.pull(subscription) == []
    (want,) = driven.wanted
    said = driven.sync()
    assert [type(effect) for effect in said] == [Sent]
    assert want.position <= driven.store.partitions[0].message_log.end
    assert bodies_of(driven.pull(subscription)) == [b"1", b"2"]
    driven.close()


def test_batches_that_arrive_during_a_sync_wait_for_the_next(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    first, second = driven.send_command({"a": [b"1"]}), driven.send_command({"a": [b"2"]})
    driven.do(first)
    (running,) = driven.wanted
    driven.wanted.clear()
    assert driven.do(second) == []
    assert driven.wanted == []  # one at a time
    driven.store.partition(running.partition).sync()
    said = driven.do(Synced(running.partition, running.position))
    assert [effect.request for effect in said if isinstance(effect, Sent)] == [first.request]
    assert len(driven.wanted) == 1
    assert [effect.request for effect in driven.sync() if isinstance(effect, Sent)] == [second.request]
    driven.close()


@pytest.mark.parametrize("between", ["nothing", "turn", "restart"])
def test_a_repeated_batch_gets_the_original_receipt(tmp_path: Path, between: str) -> None:
    driven = Driven(tmp_path)
    contents = {"a": [b"1", b"2"], "b": [b"3"]}
    original = Send(1, 1, batch_of(contents, 0), True)
    again = Send(2, 2, batch_of(contents, 0), True)
    if between == "nothing":
        said = driven.do(original, again)
    else:
        said = driven.do(original)
        if between == "restart":
            driven.restart()
        said += driven.do(again)
    first, second = [effect for effect in said if isinstance(effect, Sent)]
    assert first.position == second.position
    assert first.stored_at_us == second.stored_at_us
    assert np.array_equal(first.first_sequences, second.first_sequences)
    assert bodies_of(driven.pull(driven.subscribe(""))) == [b"1", b"2", b"3"]
    driven.close()


def test_the_same_batch_on_two_connections_is_stored_once(tmp_path: Path) -> None:
    """One of the two connections may close; between any two events there may be a turn and a sync."""
    driven = Driven(tmp_path, auto_sync=False)
    between: dict[str, Callable[[], list[Effect]]] = {"": list, "turn": driven.do, "sync": driven.sync}
    orders = ["one other leaves", "one leaves other", "other one leaves", "one other", "other one"]
    numbers = itertools.count()
    for order, pauses, flags in itertools.product(orders, itertools.product(between, repeat=3), BOTH_FLAGS):
        number = next(numbers)
        said: list[Effect] = []
        for what, pause in zip(order.split(), pauses, strict=False):
            if what == "leaves":
                driven.broker.handle(Disconnected(10), driven.now)
            else:
                place = ("one", "other").index(what)
                batch = batch_of({"a": [b"%d" % number]}, number)
                driven.broker.handle(Send(10 + place, 1 + number, batch, flags[place]), driven.now)
            said += between[pause]()
        said += driven.do() + driven.sync() + driven.sync()
        told = {effect.connection: effect[2:] for effect in said if isinstance(effect, Sent)}
        assert len(told) == len(said), "somebody was told twice, or refused"
        assert 11 in told
        assert 10 in told or "leaves" in order
        assert len(set(map(str, told.values()))) == 1, "they were told different things"
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"%d" % number for number in range(next(numbers))]
    driven.close()


def test_a_repeat_is_acknowledged_under_the_stronger_durability(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    driven.do(Send(1, 1, batch_of({"a": [b"1"]}, 0), False))
    assert driven.do(Send(1, 2, batch_of({"a": [b"1"]}, 0), True)) == []  # flush, while the original asked for append
    assert [effect.request for effect in driven.sync() if isinstance(effect, Sent)] == [2]
    driven.do(Send(1, 3, batch_of({"a": [b"2"]}, 1), True))
    assert driven.do(Send(1, 4, batch_of({"a": [b"2"]}, 1), False)) == []  # the original is not there yet
    assert [effect.request for effect in driven.sync() if isinstance(effect, Sent)] == [3, 4]
    driven.close()


def test_a_repeat_with_other_bytes_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(Send(1, 1, batch_of({"a": [b"1"]}, 0), True))
    (refused,) = driven.do(Send(1, 2, batch_of({"a": [b"other"]}, 0), True))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, BadBatch)
    driven.close()


def test_the_same_body_sent_twice_on_purpose_stays_two(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", b"same")
    driven.send("a", b"same")
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"same", b"same"]
    driven.close()


def test_last_sequence_waits_until_the_batch_is_on_disk(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    assert driven.do(LastSequence(1, 9, PRODUCER)) == [LastSequenceIs(1, 9, None)]
    driven.do(driven.send_command({"a": [b"1", b"2"]}))
    assert driven.do(LastSequence(1, 10, PRODUCER)) == []
    assert LastSequenceIs(1, 10, 1) in driven.sync()
    driven.close()


def test_after_a_broken_sync_nothing_is_acknowledged(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    subscription = driven.subscribe("")
    driven.do(driven.send_command({"a": [b"1"]}))
    said = driven.do(SyncBroken(0, SyncFailed("fdatasync of log-0 failed: EIO; restart the broker")))
    said += driven.do(driven.send_command({"a": [b"2"]}), driven.send_command({"a": [b"3"]}, flush=False))
    assert [type(effect) for effect in said] == [Refused, Refused, Refused]
    assert all(isinstance(effect.error, SyncFailed) for effect in said if isinstance(effect, Refused))
    assert bodies_of(driven.pull(subscription)) == [b"1"]  # its sender got an error that leaves it open
    driven.store.close(clean=False)


@pytest.mark.parametrize("name", ["", ".", "a..b", "a.", "~g", "ü", "a b", "../a", "x" * 201])
def test_a_bad_subject_is_refused_and_harms_no_other_send(tmp_path: Path, name: str) -> None:
    driven = Driven(tmp_path)
    good = driven.send_command({"a": [b"1"]})
    bad = Send(2, driven.request(), batch_of({name: [b"x"]}, 0, b"q" * 16), True)
    said = {effect.request: effect for effect in driven.do(good, bad) if isinstance(effect, Sent | Refused)}
    assert isinstance(said[good.request], Sent)
    refused = said[bad.request]
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidName)
    driven.close()


@pytest.mark.parametrize(("size", "fits"), [(999, True), (1_000, True), (1_001, False)])
def test_a_message_at_the_limit_and_one_over(tmp_path: Path, size: int, fits: bool) -> None:
    driven = Driven(tmp_path, BrokerLimits(max_message_bytes=1_000))
    (answer,) = driven.do(driven.send_command({"a": [bytes(size)]}, flush=False))
    if fits:
        assert isinstance(answer, Sent)
    else:
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, MessageTooLarge)
    driven.close()


def test_sequences_of_runs_go_on_by_subject(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"a": [b"1", b"2"], "b": [b"3"]}))
    (sent,) = driven.do(driven.send_command({"b": [b"4"], "c": [b"5"], "a": [b"6"]}))
    assert isinstance(sent, Sent)
    assert np.asarray(sent.first_sequences).tolist() == [1, 0, 2]
    driven.close()


def test_stamps_never_repeat_nor_go_back(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    stamps = [driven.send("a", b"1").stored_at_us, driven.send("a", b"2").stored_at_us]
    driven.now = driven.now._replace(wall_us=driven.now.wall_us - 3_600_000_000)
    stamps.append(driven.send("b", b"3").stored_at_us)
    driven.restart()
    stamps.append(driven.send("b", b"4").stored_at_us)
    assert stamps == sorted(set(stamps))
    driven.close()
