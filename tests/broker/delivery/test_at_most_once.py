"""At-most-once groups: no message is delivered twice, and missing ones are counted as skipped."""

from __future__ import annotations

import errno
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.ports.commands import (
    Ack,
    Administer,
    Disconnected,
    DispositionRange,
    HandBack,
    Subscribe,
    Unsubscribe,
    Withdraw,
)
from qmq.broker.ports.effects import Administered, PulledMessages, Refused, Subscribed
from qmq.errors import InvalidOption, SyncFailed
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.broker.test_consuming import filled, killed, many
from tests.effort import part_of
from tests.fake_disk import FakeDisk


def joining(driven: Driven, *prefixes: str, connection: int = 1, **settings: Any) -> Subscribe:
    return Subscribe(
        connection, driven.request(), "g", prefixes or ("",), f"c{connection}", None,
        settings=tuple(settings.items()), mode="at_most_once",
    )  # fmt: skip


def joined(driven: Driven, *prefixes: str, connection: int = 1, **settings: Any) -> int:
    answer = driven.do(joining(driven, *prefixes, connection=connection, **settings))[-1]
    assert isinstance(answer, Subscribed), answer
    assert answer.consumer_state is None
    return answer.subscription


def taken(driven: Driven, subscription: int, max_count: int = 1_000_000, connection: int = 1) -> list[bytes]:
    return bodies_of(driven.pull(subscription, max_count=max_count, connection=connection))


def skipped(driven: Driven) -> int:
    (answer,) = driven.do(Administer(1, driven.request(), "groups", {"group": "g"}))
    assert isinstance(answer, Administered)
    return int(answer.fields["rows"][0]["skipped"])


def stopped(driven: Driven) -> None:
    """Stop the broker cleanly, and start it again."""
    driven.broker.stop()
    driven.restart()


@pytest.mark.parametrize("prefixes", [("",), ("a.",), ("a.x",)])
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_crash_skips_a_block_and_a_stop_nothing(tmp_path: Path, prefixes: tuple[str, ...], partitions: int) -> None:
    driven = Driven(tmp_path, partitions=partitions)
    for body in many(100):
        driven.send("a.x", body)
    subscription = joined(driven, *prefixes, max_unacked=10)
    assert taken(driven, subscription, 5) == many(5)
    assert taken(driven, subscription, 3) == many(8)[5:]
    stopped(driven)
    subscription = joined(driven, *prefixes)
    assert taken(driven, subscription, 2) == many(10)[8:]
    assert skipped(driven) == 0
    killed(driven)
    subscription = joined(driven, *prefixes)
    (body,) = taken(driven, subscription, 1)
    assert 10 <= int(body) <= 10 + 10 * partitions + 1
    assert int(body) - 10 <= skipped(driven) <= int(body) - 8
    again = skipped(driven)
    stopped(driven)
    assert skipped(driven) == again
    driven.close()


def test_an_answer_that_no_pull_has_confirmed_is_counted_when_its_connection_ends(tmp_path: Path) -> None:
    driven = filled(tmp_path, 20)
    subscription = joined(driven, "a.")
    assert len(taken(driven, subscription, 5)) == 5
    assert len(taken(driven, subscription, 3)) == 3  # this pull says that the five have arrived
    driven.do(Disconnected(1))
    assert skipped(driven) == 3
    subscription = joined(driven, "a.")
    assert len(taken(driven, subscription, 2)) == 2
    assert driven.do(driven.pull_command(subscription, max_count=1, min_count=1, timeout_ms=0))
    assert len(taken(driven, subscription)) == 9
    assert driven.do(driven.pull_command(subscription, timeout_ms=60_000)) == []  # it waits, and has the others
    driven.do(Disconnected(1))
    assert skipped(driven) == 3
    stopped(driven)
    assert skipped(driven) == 3
    driven.close()


def test_an_answer_that_the_clients_system_has_or_that_its_consumer_has_left_with_is_not_counted(
    tmp_path: Path,
) -> None:
    driven = filled(tmp_path, 20)
    assert len(taken(driven, joined(driven, "a."), 5)) == 5
    driven.do(Disconnected(1, has_read_all=True))
    subscription = joined(driven, "a.")
    assert len(taken(driven, subscription, 5)) == 5
    driven.do(Unsubscribe(1, driven.request(), subscription))
    driven.do(Disconnected(1))
    assert skipped(driven) == 0
    driven.close()


def test_an_answer_that_crosses_the_end_of_its_pull_and_of_its_consumer_is_counted(tmp_path: Path) -> None:
    driven = filled(tmp_path, 20)
    subscription = joined(driven, "a.")
    pull = driven.pull_command(subscription, max_count=4)
    driven.do(pull)
    driven.do(Withdraw(1, pull.request))
    driven.do(Unsubscribe(1, driven.request(), subscription))
    assert skipped(driven) == 4
    driven.close()


def test_what_is_skipped_is_told_of_where_a_subject_lies_in_several_partitions(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2)
    for number in range(6):
        driven.broker.avoid(frozenset({number % 2}))
        driven.send("a.x", b"%d" % number)
    assert taken(driven, joined(driven, "a."), 1) == [b"0"]
    killed(driven)
    assert skipped(driven) == 6
    assert taken(driven, joined(driven, "a.")) == []
    driven.close()


def test_what_arrives_while_a_consumer_waits_is_given_to_one(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscriptions = {connection: joined(driven, "a.", connection=connection) for connection in (1, 2)}
    for connection, subscription in subscriptions.items():
        assert driven.do(driven.pull_command(subscription, timeout_ms=60_000, connection=connection)) == []
    got = Counter[bytes]()
    for body in many(2):
        for effect in driven.do(driven.send_command({"a.x": [body]})):
            if isinstance(effect, PulledMessages):
                got.update(bodies_of(runs_of_answer(effect)))
    assert got == Counter(many(2))
    killed(driven)
    subscription = joined(driven, "a.")
    driven.send("a.x", b"new")
    assert taken(driven, subscription) == [b"new"]
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.x"])
def test_nothing_is_handed_out_before_the_block_is_on_disk(tmp_path: Path, prefix: str) -> None:
    driven = filled(tmp_path, 10)
    subscription = joined(driven, prefix, max_unacked=5)
    driven.auto_read = False
    assert driven.do(driven.pull_command(subscription, max_count=3)) == []
    driven.advance(60_000)
    assert driven.effects() == []
    driven.run_reads()
    driven.finish_reads()
    (answer,) = driven.effects()
    assert bodies_of(runs_of_answer(answer)) == many(3)
    assert taken(driven, subscription, 2) == many(5)[3:]  # the block has room for it
    driven.auto_read = True
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.x"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_block_counts_where_a_checkpoint_comes_before_its_sync_has_ended(
    tmp_path: Path, prefix: str, follows: bool
) -> None:
    """The record of the block lies before the checkpoint, so no start reads it again."""
    driven = filled(tmp_path, 10)
    subscription = joined(driven, prefix, max_unacked=5)
    driven.auto_read = False
    driven.do(driven.pull_command(subscription, max_count=3, timeout_ms=60_000))
    if follows:  # another filter of the same prefix comes in the place of the one that the block is for
        for prefixes in (["b"], [prefix]):
            driven.do(Administer(1, driven.request(), "set_group", {"group": "g", "follows": prefixes}))
    driven.checkpoint()
    driven.auto_read = True
    answers = [effect for effect in driven.read() if isinstance(effect, PulledMessages)]
    got = [body for answer in answers for body in bodies_of(runs_of_answer(answer))] or taken(driven, subscription, 3)
    assert got == many(3)
    killed(driven)
    assert not set(got) & set(taken(driven, joined(driven, prefix)))
    driven.close()


def test_a_stop_clears_a_block_whose_sync_has_not_ended(tmp_path: Path) -> None:
    driven = filled(tmp_path, 10)
    subscription = joined(driven, "a.", max_unacked=5)
    driven.auto_read = False
    driven.do(driven.pull_command(subscription, max_count=6))
    stopped(driven)
    driven.auto_read = True
    assert taken(driven, joined(driven, "a.")) == many(10)
    assert skipped(driven) == 0
    driven.close()


def test_a_block_that_cannot_be_synced_is_not_handed_out(tmp_path: Path) -> None:
    disk = FakeDisk()
    driven = Driven(tmp_path, disk=disk)
    for body in many(4):
        driven.send("a.x", body)
    subscription = joined(driven, "a.", max_unacked=1)
    disk.fail_always("fdatasync", errno.EIO)
    for _ in range(2):
        (answer,) = driven.do(driven.pull_command(subscription, max_count=1))
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, SyncFailed)
    disk.heal()
    killed(driven)
    subscription = joined(driven, "a.")
    assert len(taken(driven, subscription)) + skipped(driven) >= 4
    driven.close()


def test_there_is_nothing_to_hand_back(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    subscription = joined(driven)
    assert taken(driven, subscription) == [b"0"]
    for command in (
        Ack(1, driven.request(), subscription, (0, 1)),
        HandBack(1, driven.request(), subscription, [DispositionRange(0, 1, 1, None, "")]),
    ):
        (answer,) = driven.do(command)
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, InvalidOption)
    driven.close()


@pytest.mark.parametrize(("seed", "partitions"), [(seed, 1 + seed % 3) for seed in range(part_of(12))])
def test_nothing_comes_twice_whatever_happens(tmp_path: Path, seed: int, partitions: int) -> None:
    chance = random.Random(seed)
    driven = Driven(tmp_path, partitions=partitions)
    prefixes = chance.choice([("",), ("a.",), ("a.x",), ("a.x", "b"), ("a.", "a.x"), ("", "a.", "b")])
    settings = {"max_unacked": chance.choice([1, 7, 100])}
    sent, wanted, got, crashes = 0, set[bytes](), Counter[bytes](), 0
    subscription = joined(driven, *prefixes, **settings)
    for _ in range(120):
        what = chance.random()
        driven.advance(chance.choice([0, 1, 50, 2_000]))
        if what < 0.4:
            contents: dict[str, list[bytes]] = {}
            for _ in range(chance.randrange(1, 12)):
                subject = chance.choice(["a.x", "a.y", "b", "c"])
                contents.setdefault(subject, []).append(b"%d" % sent)
                if any(subject == one or (one[-1:] in ("", ".") and subject.startswith(one)) for one in prefixes):
                    wanted.add(b"%d" % sent)
                sent += 1
            driven.change_producer()
            driven.do(driven.send_command(contents, flush=chance.random() < 0.5))
        elif what < 0.85:
            got.update(taken(driven, subscription, chance.randrange(1, 30)))
        elif what < 0.9:
            driven.checkpoint()
        else:
            stop = chance.choice([stopped, killed])
            crashes += stop is killed
            stop(driven)
            subscription = joined(driven, *prefixes)
    while bodies := taken(driven, subscription):
        got.update(bodies)
    assert max(got.values(), default=1) == 1, f"seed {seed}: twice {[body for body in got if got[body] > 1]}"
    missing = len(wanted) - len(got)
    assert wanted >= set(got)
    assert skipped(driven) >= missing, f"seed {seed}: {missing} are missing, {skipped(driven)} are told of"
    assert crashes or not missing
    driven.close()
