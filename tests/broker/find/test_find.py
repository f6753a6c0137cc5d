"""Searches against a list of messages: whatever the partitions, batches, bounds and order, each message comes once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.broker.find import find, hash_search, rows
from qmq.broker.ports.commands import Disconnected, Find, ReadDone, Send
from qmq.broker.ports.effects import Effect, FoundMessages, Refused, Sent
from qmq.errors import Overloaded, StorageFailed
from qmq.format.build import Keys, RunContent, build_batch, make_header
from qmq.format.layout import LANE_NORMAL, LANE_ORDERED
from qmq.format.pieces import read_answer
from qmq.net.protocol.selection import Boundary, Selection
from tests.broker.harness import START_US, Driven
from tests.broker.test_admin_turns import Opcodes
from tests.effort import part_of
from tests.fake_disk import FakeDisk

SUBJECTS = ("shop.order.paid", "shop.order.new", "shop.mail", "house", "shop.orders")
PREFIXES = ("", "shop.", "shop.order.", "shop.order.paid", "house", "nothing.", "shop.order")
KEYS = (None, "a", "b", "order-4421")


class Stored(NamedTuple):
    """One message of the model."""

    stored_at_us: int
    ordinal: int
    subject: str
    key: str | None
    body: bytes
    position: int = 0  # of the batch


def send(
    driven: Driven, contents: list[tuple[str, list[tuple[str | None, bytes]]]], delay_us: int = 0,
    lanes: Iterable[int] = repeat(LANE_NORMAL),
) -> list[Stored]:  # fmt: skip
    """Send one batch, with each of its runs in a lane, and return its messages."""
    headers = [[make_header(key, deliver_at=delay_us) for key, _ in messages] for _, messages in contents]
    runs = [
        RunContent(subject, [body for _, body in messages], heads, lane)
        for (subject, messages), heads, lane in zip(contents, headers, lanes, strict=False)
    ]
    count = sum(len(messages) for _, messages in contents)
    parts = build_batch(runs, created_at_us=START_US, producer_id=driven.producer, producer_sequence=driven.produced)
    driven.produced += count
    said = driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    (sent,) = [effect for effect in said if isinstance(effect, Sent | Refused)]
    assert isinstance(sent, Sent), sent
    flat = [(subject, key, body) for subject, messages in contents for key, body in messages]
    return [Stored(sent.stored_at_us, ordinal, *one, sent.position) for ordinal, one in enumerate(flat)]


def page(driven: Driven, selection: Selection, connection: int = 1, **limits: object) -> FoundMessages:
    """Return the answer to one request."""
    command = Find(connection, driven.request(), selection, **limits)  # type: ignore[arg-type]
    answers = driven.do(command)
    while not answers:
        answers = driven.advance(0)
    (answer,) = answers
    assert isinstance(answer, FoundMessages), answer
    return answer


def messages_of(answer: FoundMessages) -> list[Stored]:
    runs, damaged = read_answer(memoryview(b"".join(answer.buffers)))
    assert not damaged
    return [
        Stored(
            run.stored_at_us,
            run.ordinal + index,
            run.subject,
            (run.header(index).get("k") or [None])[0],
            body,
            run.position,
        )
        for run in runs
        for index, body in enumerate(run.bodies())
    ]


def search(driven: Driven, selection: Selection, *, newest: bool = False, **limits: object) -> list[Stored]:
    """Return all messages of a search, page by page."""
    found: list[Stored] = []
    after: Boundary | None = None
    upto_us: int | None = None
    for _ in range(10_000):
        answer = page(driven, selection, newest=newest, after=after, upto_us=upto_us, **limits)
        messages = messages_of(answer)
        assert len(messages) <= int(limits.get("max_count", 1_000))  # type: ignore[call-overload]
        found += messages[::-1] if newest else messages
        if answer.after is None:
            assert answer.left == 0
            return found
        assert answer.after != after, "the search stands still"
        after, upto_us = answer.after, answer.upto_us
    raise AssertionError("the search does not end")


def expected(stored: list[Stored], selection: Selection, newest: bool) -> list[Stored]:
    chosen = [
        one
        for one in stored
        if selection.since_us <= one.stored_at_us < selection.until_us
        and selection.takes(one.subject)
        and (selection.key is None or selection.key == one.key)
    ]
    return sorted(chosen, reverse=newest)


MESSAGES = st.lists(st.tuples(st.sampled_from(KEYS), st.binary(max_size=40)), min_size=1, max_size=5)
LANES = (LANE_NORMAL, LANE_ORDERED + 7, LANE_ORDERED + 9)
CONTENTS = st.dictionaries(
    st.tuples(st.sampled_from(SUBJECTS), st.sampled_from(LANES)), MESSAGES, min_size=1, max_size=4
)


class TestAgainstAModel:
    @settings(max_examples=part_of(40), deadline=None)
    @given(
        batches=st.lists(CONTENTS, min_size=0, max_size=25),
        partitions=st.sampled_from((1, 1, 3)),
        prefix=st.sampled_from(PREFIXES),
        key=st.sampled_from(KEYS),
        newest=st.booleans(),
        max_count=st.sampled_from((1, 2, 7, 1_000)),
        max_bytes=st.sampled_from((1, 300, 256 << 10)),
        rows_a_step=st.sampled_from((1, 2, 5, 1_000)),
        lookups=st.sampled_from((1, 9)),
        edges=st.tuples(st.integers(-2, 25), st.integers(-2, 25), st.integers(0, 1)),
    )
    def test_each_selected_message_comes_once_in_order(
        self, tmp_path_factory: pytest.TempPathFactory,
        batches: list[dict[tuple[str, int], list[tuple[str | None, bytes]]]], partitions: int, prefix: str,
        key: str | None, newest: bool, max_count: int, max_bytes: int, rows_a_step: int, lookups: int,
        edges: tuple[int, int, int],
    ) -> None:  # fmt: skip
        driven = Driven(
            tmp_path_factory.mktemp("find"), partitions=partitions, segment_bytes=16 << 10, max_frame_bytes=8 << 10
        )
        stored: list[Stored] = []
        for contents in batches:
            runs = [(subject, messages) for (subject, _), messages in contents.items()]
            stored += send(driven, runs, lanes=[lane for _, lane in contents])
            driven.advance(1)
        stamps = sorted({one.stored_at_us for one in stored}) or [START_US]
        low, high, more = edges
        since_us = stamps[low % len(stamps)] + more if low >= 0 else 0
        until_us = stamps[high % len(stamps)] + 1 - more if high >= 0 else 1 << 63
        selection = Selection(prefix, key, since_us, max(until_us, since_us + 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(find, "ROWS", rows_a_step)
            patch.setattr(find, "BATCHES", rows_a_step)
            patch.setattr(hash_search, "BATCHES", rows_a_step)
            patch.setattr(hash_search, "STEPS", rows_a_step)
            patch.setattr(rows, "MOST_LOOKUPS", lookups)
            found = search(driven, selection, newest=newest, max_count=max_count, max_bytes=max_bytes)
        assert found == expected(stored, selection, newest)
        driven.store.close()


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_rare_subject_is_found_without_a_look_at_all_rows(
    tmp_path: Path, newest: bool, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "ROWS", 50)
    driven = Driven(tmp_path, partitions=partitions, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    stored = list[Stored]()
    for number in range(600):
        name = "house" if number % 100 == 7 else "shop.mail"
        stored += send(driven, [(name, [(None, b"%d" % number), (None, b"-")])])
    driven.checkpoint()
    edge_us = stored[2 * 210].stored_at_us
    for selection in (Selection("house"), Selection("house", since_us=edge_us), Selection("house", until_us=edge_us)):
        answer = page(driven, selection, newest=newest)
        assert answer.after is None, "one step finds all"
        assert messages_of(answer) == expected(stored, selection, newest=False)
        assert (answer.looked, answer.left) == (len(messages_of(answer)) // 2, 0)
    assert page(driven, Selection("nobody")).after is None
    assert page(driven, Selection("shop.mail"), newest=newest).after is not None
    driven.close()


@pytest.mark.parametrize("newest", [False, True])
def test_no_step_is_long_where_a_subject_has_many_slots(
    tmp_path: Path, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "ROWS", 500)
    driven = Driven(tmp_path)
    stored = list[Stored]()
    for first in range(0, 2_000, 400):
        send(driven, [(f"other.{number}", [(None, b"-")]) for number in range(first, first + 400)])
        slots = range(first // 2, first // 2 + 200)
        runs = [("ordered", [(None, b"%d" % slot)]) for slot in slots]
        stored += send(driven, runs, lanes=[LANE_ORDERED + slot for slot in slots])
    opcodes, said, after, steps = Opcodes(), list[Stored](), None, list[int]()
    while after is not None or not steps:
        answers = list[FoundMessages]()
        command = partial(page, driven, Selection("ordered"), newest=newest, after=after)
        steps.append(opcodes.of(lambda: answers.append(command())))  # noqa: B023  # it is called at once
        said += messages_of(answers[0])[:: -1 if newest else 1]
        after = answers[0].after
    assert said == expected(stored, Selection("ordered"), newest)
    assert len(steps) < 10
    assert max(steps) < 30_000, "a look-up of each slot takes ten times as many, one of each name twice"
    driven.close()


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("partitions", [1, 3])
def test_lanes_come_in_order_where_one_has_more_messages_than_others(
    tmp_path: Path, newest: bool, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "ROWS", 60)
    driven = Driven(tmp_path, partitions=partitions)
    stored = list[Stored]()
    for number in range(300):
        lane = LANES[1 if number % 50 == 0 else 2 if number % 7 == 0 else 0]
        stored += send(driven, [("house", [(None, b"%d" % number)]), ("shop.mail", [(None, b"-")])], lanes=[lane] * 2)
    selection = Selection("house")
    assert search(driven, selection, newest=newest) == expected(stored, selection, newest)
    driven.close()


@pytest.mark.parametrize("newest", [False, True])
def test_a_step_looks_at_so_many_rows_of_all_partitions(
    tmp_path: Path, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "ROWS", 60)
    driven = Driven(tmp_path, partitions=4)
    for number in range(400):
        send(driven, [(f"shop.{number % 4}", [(None, b"%d" % number)])])
    used = [part.consumer_log.visible_row for part in driven.store.partitions]
    assert min(used) > 60
    answer = page(driven, Selection("nothing."), newest=newest)
    assert 0 < answer.looked <= 60
    assert answer.looked + answer.left == sum(used)
    driven.close()


def test_pages_are_stable_while_more_arrive(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    stored = [one for n in range(20) for one in send(driven, [("shop.mail", [("a", b"%d" % n), (None, b"-")])])]
    for newest in (False, True):
        before, found, after, upto_us = list(stored), list[Stored](), None, None
        while True:
            answer = page(driven, Selection("shop.", "a"), newest=newest, after=after, upto_us=upto_us, max_count=3)
            found += messages_of(answer)[:: -1 if newest else 1]
            stored += send(driven, [("shop.mail", [("a", b"new")])])
            if answer.after is None:
                break
            after, upto_us = answer.after, answer.upto_us
        assert found == expected(before, Selection("shop.", "a"), newest)
    driven.close()


def test_keys_whose_hashes_collide_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.format.build.hash_bytes", lambda key: 7)
    monkeypatch.setattr("qmq.net.protocol.matches.key_hash", lambda key: 7)
    driven = Driven(tmp_path)
    stored = send(driven, [("shop.mail", [("k1", b"1"), ("k2", b"2"), ("k1", b"3"), ("k3", b"4")])])
    for key in ("k1", "k2", "k3", "k4"):  # keys of this test alone: their headers are remembered
        selection = Selection("", key)
        assert search(driven, selection) == expected(stored, selection, newest=False)
    driven.close()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("keys", ["order-0000086416R5QPH15t", ["order-0000086416R5QPH15t", "other"]])
def test_a_key_whose_hash_would_be_0_is_found(tmp_path: Path, indexed: bool, keys: Keys) -> None:
    driven = Driven(tmp_path, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    for number in range(40):
        headers = [make_header(some) for some in (None, keys, "another")]
        content = RunContent("shop.mail", [b"%d" % at + b"x" * 200 for at in range(3)], headers)
        parts = build_batch([content], created_at_us=START_US, producer_id=bytes(16), producer_sequence=3 * number)
        driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    driven.checkpoint()
    if indexed:
        assert make_indexes(driven, 1) > 1
    found = search(driven, Selection("", "order-0000086416R5QPH15t"))
    assert bytes(one.body[0] for one in found) == b"1" * 40
    driven.close()


@pytest.mark.parametrize("indexed", [False, True])
def test_each_of_several_keys_finds_a_message(tmp_path: Path, indexed: bool) -> None:
    driven = Driven(tmp_path, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    keys = (["n1"], ["n2", "n1"], ["n3"], [], ["n3", "n2", "n1"])
    bodies = [b"%d" % at for at in range(len(keys))]
    for number in range(40):
        content = RunContent("shop.mail", [body + b"x" * 200 for body in bodies], [make_header(some) for some in keys])
        parts = build_batch([content], created_at_us=START_US, producer_id=bytes(16), producer_sequence=5 * number)
        driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))
    driven.checkpoint()
    if indexed:
        assert make_indexes(driven, 1) > 1
    for key, having in (("n1", b"014"), ("n2", b"14"), ("n3", b"24"), ("n4", b"")):
        selection = Selection("", key)
        found = bytes(one.body[0] for one in search(driven, selection, max_count=7))
        assert found == having * 40
    driven.close()


def make_indexes(driven: Driven, each: int) -> int:
    """Make the key index of every *each*-th sealed segment; return how many these are."""
    index = driven.store.partitions[0].key_index
    spans = index.missing(driven.store.partitions[0].message_log.sealed)[::each]
    for span in spans:
        builder = index.builder(span)
        while builder.step():
            """One megabyte after another."""
        builder.close()
        assert index.built(span.base)
    return len(spans)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("newest", [False, True])
def test_a_key_is_found_in_segments_with_and_without_an_index(tmp_path: Path, each: int, newest: bool) -> None:
    driven = Driven(tmp_path, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    keys = ["a", "b", "rare"]
    stored = [
        one
        for n in range(200)
        for one in send(driven, [("shop.mail", [(keys[n % 2], b"x" * 500)]), ("house", [("rare", b"%d" % n)])])
    ]
    driven.checkpoint()
    assert make_indexes(driven, each) > 3
    for selection in (Selection("", "a"), Selection("shop.", "rare"), Selection("house", "rare"), Selection("", "no")):
        found = search(driven, selection, newest=newest, max_count=30)
        assert found == expected(stored, selection, newest)
    driven.close()


def test_a_search_covers_what_was_stored_when_it_began(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    stored = send(driven, [("shop.mail", [("a", b"1")])])
    driven.auto_read = False
    assert driven.do(Find(1, driven.request(), Selection("shop.", "a"))) == []
    assert driven.reads, "threads look for the key"
    driven.auto_read, late = True, driven.reads
    driven.reads = []
    later = send(driven, [("shop.mail", [("a", b"2")])])
    driven.reads = late
    (answer,) = driven.read() or driven.advance(0)
    assert isinstance(answer, FoundMessages)
    assert messages_of(answer) == stored
    assert answer.upto_us <= later[0].stored_at_us, "what came meanwhile is for another search"
    driven.close()


def filled(tmp_path: Path) -> tuple[Driven, FakeDisk, list[Stored]]:
    """Return a broker with some segments of messages, on a disk that can forget what is in memory."""
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = Driven(tmp_path, disk=disk, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    stored = [one for n in range(60) for one in send(driven, [("shop.mail", [("a", b"%d" % n + b"x" * 900)])])]
    driven.checkpoint()
    return driven, disk, stored


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("key", [None, "a"])
def test_messages_that_are_not_in_memory_are_read_beside_the_loop(
    tmp_path: Path, key: str | None, newest: bool
) -> None:
    driven, disk, stored = filled(tmp_path)
    disk.forget()
    driven.auto_read = False
    assert driven.do(Find(1, driven.request(), Selection("shop.", key), newest=newest)) == []
    assert driven.reads, "the bytes are read by a thread"
    answers: list[Effect] = []
    while not answers:
        answers = driven.read() or driven.advance(0)
    assert isinstance(answers[0], FoundMessages)
    driven.auto_read = True
    assert search(driven, Selection("shop.", key), newest=newest) == expected(stored, Selection(), newest)
    driven.close()


def test_a_disk_that_fails_is_no_empty_answer(tmp_path: Path) -> None:
    driven, disk, _ = filled(tmp_path)
    disk.forget()
    driven.auto_read = False
    assert driven.do(Find(1, driven.request(), Selection("shop."))) == []
    (read,) = driven.reads
    driven.reads.clear()
    (refused,) = driven.do(ReadDone(read.number, StorageFailed("the disk is gone")))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, StorageFailed)


def test_waiting_searches_of_a_connection_are_bounded(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    send(driven, [("shop.mail", [("a", b"1")])])
    for connection in [1] * (find.MAX_WAITING + 1) + [2]:
        driven.broker.handle(Find(connection, driven.request(), Selection()), driven.now)
    (refused,) = driven.broker.take_effects()
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Overloaded)
    driven.broker.turn(driven.now)
    assert [type(one) for one in driven.broker.take_effects()] == [FoundMessages], "one step in a turn"
    assert driven.broker.tick(driven.now) == driven.now.monotonic_us, "another turn follows at once"
    driven.do(Disconnected(1))
    left = [one for _ in range(find.MAX_WAITING) for one in driven.advance(0)]
    assert all(isinstance(one, FoundMessages) and one.connection == 2 for one in left)
    driven.close()
