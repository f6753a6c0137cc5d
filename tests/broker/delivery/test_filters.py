"""Tags and expiry of groups: matched, skipped and dead messages, against one message at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.delivery import tracker
from qmq.broker.ports.commands import Administer, Send, Subscribe
from qmq.broker.ports.effects import Administered, Refused, Subscribed
from qmq.errors import InternalError
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.hashing import tag_bits
from qmq.net.protocol.types import Disposition
from tests.broker.harness import START_US, Driven, bodies_of
from tests.broker.test_consuming import Consumer, killed
from tests.effort import part_of

SECOND = 1_000_000


def sent(driven: Driven, contents: dict[str, list[tuple[bytes, tuple[str, ...], int]]]) -> None:
    """Send a batch of messages with tags and expiry (0: never)."""
    runs = [
        RunContent(
            subject,
            [body for body, _, _ in messages],
            [make_header(None, tags, None, 0, at) for _, tags, at in messages],
        )
        for subject, messages in contents.items()
    ]
    driven.change_producer()
    parts = build_batch(runs, created_at_us=START_US, producer_id=driven.producer, producer_sequence=0)
    driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    driven.change_producer()


def row(driven: Driven) -> dict[str, Any]:
    (answer,) = driven.do_whole(Administer(1, driven.request(), "groups", {"group": "g"}))
    assert isinstance(answer, Administered)
    return dict(answer.fields["rows"][0])


def dead(driven: Driven) -> list[tuple[str, int]]:
    (answer,) = driven.do_whole(Administer(1, driven.request(), "dead_letters", {"group": "g"}))
    assert isinstance(answer, Administered)
    return [(letter["reason"], letter["sequence"]) for letter in answer.fields["rows"]]


def numbered(count: int, tags: list[tuple[str, ...]], expire_at: int = 0) -> list[tuple[bytes, tuple[str, ...], int]]:
    return [(b"%d" % number, tags[number % len(tags)], expire_at) for number in range(count)]


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
@pytest.mark.parametrize("stop", [Driven.restart, killed, None])
def test_only_messages_with_one_of_the_tags_come(tmp_path: Path, prefix: str, stop: Any) -> None:
    driven = Driven(tmp_path)
    sent(driven, {"a.x": numbered(100, [("vip",), ("eu",), ("eu", "vip"), ()])})
    driven.send("a.x", b"plain")
    consumer = Consumer(driven, "c", prefix, tags=["vip"])
    assert consumer.pull(30) == [b"%d" % number for number in range(60) if number % 2 == 0]
    consumer.ack()
    if stop is not None:
        stop(driven)
        consumer.join()
    assert consumer.pull(3) == [b"60", b"62", b"64"]
    assert consumer.pull() == [b"%d" % number for number in range(66, 100) if number % 2 == 0]
    consumer.ack()
    assert consumer.pull() == []
    assert row(driven)["in_flight"] == 0
    assert (row(driven)["filtered"], row(driven)["ready"]) == (51, 0)
    assert row(driven)["skipped"] == 0
    driven.close()


def test_the_first_of_many_is_found_and_the_window_is_kept(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for start in range(0, 30_000, 10_000):
        sent(
            driven,
            {"a.x": [(b"%d" % n, ("vip",) if n % 9_999 == 5 else ("eu",), 0) for n in range(start, start + 10_000)]},
        )
    consumer = Consumer(driven, "c", "a.", tags=["vip"], max_unacked=2)
    assert consumer.pull(1) == [b"5"]
    assert consumer.pull() == [b"10004"]
    assert consumer.pull() == []
    consumer.ack()
    assert consumer.pull() == [b"20003"]
    driven.close()


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("stop", [Driven.restart, killed, None])
def test_after_the_clock_was_ahead_expiry_counts_from_what_it_says(tmp_path: Path, stop: Any, count: int) -> None:
    driven = Driven(tmp_path)
    ahead = driven.now
    driven.now = ahead._replace(wall_us=ahead.wall_us + 3_600 * SECOND)
    driven.send("a.x", b"plain")
    driven.now = ahead
    sent(driven, {"a.x": numbered(count, [()], 30 * SECOND), "a.y": numbered(1, [()], 30 * SECOND)})
    if stop is not None:
        stop(driven)
    consumer = Consumer(driven, "c", "a.")
    assert consumer.pull(1) + consumer.pull(1) == [b"plain", b"0"]
    driven.advance(29_000)
    consumer.back(1, 2, Disposition.RELEASE)
    assert consumer.pull(1) == [b"0"]
    driven.advance(1_000)
    assert consumer.pull() == []
    assert len(dead(driven)) == count
    driven.close()


def test_a_client_cannot_say_how_far_a_stamp_is_ahead(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    was = driven.now
    driven.now = was._replace(wall_us=was.wall_us + 3_600 * SECOND)
    driven.send("a", b"x")
    driven.now = was
    sent(driven, {"a": numbered(1, [()], 30 * SECOND)})
    batch = bytearray(
        driven.store.partitions[0].message_log.view(*driven.store.partitions[0].consumer_log.read_entry(1)[1:11:9])
    )
    batch[88:96] = bytes(8)
    (answer,) = driven.do(Send(1, driven.request(), memoryview(batch), True))
    assert isinstance(answer, Refused)
    assert "ahead" in str(answer.error)
    driven.close()


def test_a_pull_that_waits_gets_what_has_the_tag(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    consumer = Consumer(driven, "c", "a.", tags=["vip"])
    waiting = driven.pull_command(consumer.subscription, timeout_ms=60_000)._replace(expected=0)
    assert driven.do(waiting) == []
    sent(driven, {"a.x": numbered(3, [("eu",)])})
    assert (row(driven)["skipped"], row(driven)["filtered"]) == (0, 3)
    runs = [RunContent("a.x", [b"yes", b"no"], [make_header(None, ("vip",)), make_header(None, ("eu",))])]
    driven.change_producer()
    batch = b"".join(build_batch(runs, created_at_us=START_US, producer_id=driven.producer, producer_sequence=0))
    said = driven.do(Send(1, driven.request(), memoryview(bytearray(batch)), True))
    assert consumer.take([effect for effect in said if getattr(effect, "request", 0) == waiting.request]) == [b"yes"]
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.x"])
def test_what_has_expired_is_dead_when_it_would_be_handed_out(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    now = driven.now.wall_us
    sent(driven, {"a.x": [*numbered(5, [()], now + 10 * SECOND), (b"last", (), 0)]})
    consumer = Consumer(driven, "c", prefix)
    assert consumer.pull(2) == [b"0", b"1"]
    consumer.back(0, 1, delay_us=20 * SECOND)
    driven.advance(9_000)
    assert consumer.pull(1) == [b"2"]
    driven.advance(1_000)
    assert consumer.pull() == [b"last"]
    assert dead(driven) == [("expired", 3), ("expired", 4)]
    consumer.ack()
    driven.advance(20_000)
    assert consumer.pull() == []  # the nacked message has expired meanwhile
    assert dead(driven) == [("expired", 3), ("expired", 4), ("expired", 0)]
    killed(driven)
    consumer.join()
    assert consumer.pull() == []
    assert len(dead(driven)) == 3
    assert row(driven)["in_flight"] == 0
    driven.close()


def test_a_time_to_live_counts_from_when_it_was_stored(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    sent(driven, {"a.x": [(b"short", (), 2 * SECOND), (b"long", (), 60 * SECOND), (b"for ever", (), 0)]})
    driven.advance(2_000)
    consumer = Consumer(driven, "c")
    assert consumer.pull() == [b"long", b"for ever"]
    assert dead(driven) == [("expired", 0)]
    driven.close()


def test_a_group_may_have_all_expire(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for _ in range(20):
        sent(driven, {"a.x": numbered(1_000, [()])})
    driven.advance(60_000)
    driven.send("a.x", b"fresh")
    consumer = Consumer(driven, "c", "a.", expire_after_us=30 * SECOND, max_unacked=100)
    assert consumer.pull() + consumer.pull() == [b"fresh"]
    assert row(driven)["dead"] == 20_000
    driven.close()


@pytest.mark.parametrize("seed", range(part_of(12)))
def test_as_one_message_at_a_time(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    driven = Driven(tmp_path, partitions=1 + seed % 2)
    mode = chance.choice(["reliable", "at_most_once"])
    tags = chance.choice([(), ("a",), ("a", "b")])
    bits, expected, late = tag_bits(tags), set[bytes](), set[bytes]()
    number, now = 0, driven.now.wall_us
    for _ in range(chance.randrange(1, 12)):
        contents: dict[str, list[tuple[bytes, tuple[str, ...], int]]] = {}
        has_tags, has_expiry = chance.random() < 0.7, chance.random() < 0.5
        for _ in range(chance.choice([1, 5, 200])):
            mine = tuple(chance.sample(["a", "b", "c", "d"], chance.randrange(3))) if has_tags else ()
            at = chance.choice([0, now + 1, now + 3_600 * SECOND]) if has_expiry else 0
            body = b"%d" % number
            contents.setdefault(chance.choice(["a.x", "a.y", "b"]), []).append((body, mine, at))
            number += 1
            if not bits or tag_bits(mine) & bits:
                (late if at == now + 1 else expected).add(body)
        sent(driven, contents)
    driven.advance(1_000)
    command = Subscribe(1, driven.request(), "g", ("",), "c", None, b"n", b"c", settings=(("tags", tags),), mode=mode)
    answer = driven.do(command)[-1]
    assert isinstance(answer, Subscribed)
    got = list[bytes]()
    limits = {"max_count": chance.choice([1, 7, 1_000]), "max_bytes": chance.choice([300, 4 << 20])}
    while runs := driven.pull(answer.subscription, **limits):
        assert sum(run.count for run in runs) <= limits["max_count"]
        got += bodies_of(runs)
    assert sorted(got) == sorted(expected), f"seed {seed}"
    lost = (len(late), 0) if mode == "at_most_once" else (0, len(late))
    assert (row(driven)["skipped"], row(driven)["dead"]) == lost
    assert row(driven)["filtered"] == number - len(expected) - len(late)
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
def test_messages_that_expire_between_others_in_many_pieces_lose_none(tmp_path: Path, prefix: str) -> None:
    """One answer has so many pieces at most; the messages behind them are for the next pull."""
    driven = Driven(tmp_path)
    consumer = Consumer(driven, "c", prefix, max_unacked=4_000)
    messages = [(b"%d" % number, (), 1 if number % 2 else 0) for number in range(2_100)]
    sent(driven, {"a.x": messages})
    driven.advance(100)
    found = list[bytes]()
    while some := consumer.pull():
        found += some
        consumer.ack()
        consumer.got.clear()
    assert found == [b"%d" % number for number in range(0, 2_100, 2)]
    assert row(driven)["dead"] == 1_050
    driven.close()


@pytest.mark.parametrize("solo", [False, True])
def test_messages_that_expire_some_day_are_cut_by_bytes_and_none_is_lost(tmp_path: Path, *, solo: bool) -> None:
    """The first ones are smaller than the average of their run."""
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.", group=None, start="first") if solo else driven.subscribe("a.")
    bodies = [b"%d" % number for number in range(9)] + [b"9".ljust(100_000, b"."), b"10"]
    sent(driven, {"a.x": [(body, (), 10_000 * SECOND) for body in bodies]})
    found = list[bytes]()
    while some := bodies_of(driven.pull(subscription, max_bytes=5_000)):
        found += some
    assert found == bodies
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.", "a.x"])
@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_what_was_filtered_last_is_not_ready_after_a_start(tmp_path: Path, prefix: str, stop: Any) -> None:
    driven = Driven(tmp_path)
    consumer = Consumer(driven, "c", prefix, tags=["vip"])
    sent(driven, {"a.x": numbered(10, [("vip",), ("eu",)])})
    assert len(consumer.pull(5)) == 5
    consumer.ack()
    assert consumer.pull() == []  # the last one is filtered by a pull of its own
    before = row(driven)
    assert (before["ready"], before["filtered"], before["skipped"]) == (0, 5, 0)
    stop(driven)
    assert {name: row(driven)[name] for name in ("ready", "filtered", "skipped")} == {
        "ready": 0,
        "filtered": 5,
        "skipped": 0,
    }
    driven.close()


@pytest.mark.parametrize("ways", ["general", "fast"])
def test_a_pull_that_does_not_account_for_a_message_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ways: str
) -> None:
    driven = Driven(tmp_path)
    tags = ["vip"] if ways == "general" else []
    consumer = Consumer(driven, "c", "a.", tags=tags)
    driven.send("a.x", b"first")
    if not tags:
        assert consumer.pull() == [b"first"]
        consumer.ack()
    sent(driven, {"a.x": numbered(4, [("vip",), ("eu",)])})
    before, find = row(driven), tracker.ranges_of
    with monkeypatch.context() as patch:
        patch.setattr(tracker, "ranges_of", lambda *asked: [one._replace(total=one.total - 1) for one in find(*asked)])
        with pytest.raises(InternalError, match="nothing was changed"):
            consumer.pull()
    assert row(driven) == before
    assert "a pull of group g would pass" in caplog.text
    assert consumer.pull() == ([b"0", b"2"] if tags else [b"0", b"1", b"2", b"3"])
    driven.close()
