"""The source of messages: what the client sends, what the broker stamps, and what readers see of it."""

from __future__ import annotations

from ipaddress import ip_address

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BadBatch
from qmq.format.batch import (
    CheckedBatch,
    check_batch,
    check_plain,
    mark_maker,
    parse_header,
    stamp,
    stamp_plain,
    stored_table,
    validate_stored,
)
from qmq.format.build import RunContent, build_batch, cut_batch, make_header
from qmq.format.copies.due import cut_due, join_singles, single_of
from qmq.format.copies.for_group import Origin, copied_batch, private_batch
from qmq.format.copies.restored import restored_batches
from qmq.format.layout import BATCH_HEADER_SIZE, HAS_SOURCE, RUN_SIZE
from qmq.format.pieces import Run, StoredBatch, piece_of_run, read_answer, stored_runs
from qmq.format.source import (
    ADDRESS_SIZE,
    MAX_APP_BYTES,
    MAX_SENDER_BYTES,
    NO_SOURCE,
    UNKNOWN_SOURCE,
    Source,
    check_sent,
    has_room,
    new_source,
    packed,
    records_in,
    source_in,
    sources_of,
    stamp_of,
    stamped_front,
    with_producer,
)
from tests.format.contents import CREATED_US, LIMITS, POSITION, PRODUCER, SECRET, STORE, STORED_US

V4 = stamp_of(ip_address("10.0.0.7").packed, 51_234)
V6 = stamp_of(ip_address("2001:db8::1").packed, 80, "billing")
MINE = Source("10.0.0.7:51234", None, PRODUCER.hex(), "shop-api")
OTHERS = Source("[2001:db8::1]:80", "billing", bytes(range(32, 48)).hex(), "café")


def batch(subjects: dict[str, int], source: bytes, producer: bytes = PRODUCER, deliver_at: int = 0) -> memoryview:
    """Return a batch of so many messages for each subject, as a client sends it."""
    header = make_header("k", deliver_at=deliver_at)
    runs = [RunContent(name, [b"%d" % at for at in range(count)], [header] * count) for name, count in subjects.items()]
    parts = build_batch(runs, created_at_us=CREATED_US, producer_id=producer, producer_sequence=1, source=source)
    return memoryview(bytearray(b"".join(parts)))


def stamped(view: memoryview, source: bytes | None = V4, position: int = POSITION) -> memoryview:
    checked: CheckedBatch = check_batch(view, LIMITS)
    firsts = 5 if checked.run is not None else np.arange(checked.header.runs, dtype=np.uint64)
    stamp(
        view, checked, position=position, stored_at_us=STORED_US, partition=3, store_id=STORE, secret=SECRET,
        first_sequences=firsts, source=source,
    )  # fmt: skip
    validate_stored(view, position, SECRET, STORE)
    return view


def only(answer: memoryview | bytes | bytearray) -> list[Run]:
    runs, damaged = read_answer(memoryview(answer))
    assert damaged == []
    return runs


def sources(runs: list[Run]) -> list[Source]:
    return [run.source(index) for run in runs for index in range(run.count)]


def test_a_client_leaves_room_that_the_broker_fills() -> None:
    view = batch({"a": 1}, new_source("shop-api"))
    before = bytes(view)
    assert sources(only(stamped(view))) == [MINE]
    assert len(view) == len(before), "nothing is moved"
    larger = batch({"a": 2, "b": 1}, new_source("café", 16), producer=bytes(range(32, 48)))
    assert sources(only(stamped(larger, V6))) == [OTHERS] * 3


def test_both_ways_of_stamping_make_the_same_bytes() -> None:
    for source, own in ((new_source("x"), V4), (new_source("x", 7), V6)):
        one, other = batch({"a": 3}, source), batch({"a": 3}, source)
        plain = check_plain(other, len(other), LIMITS.max_message_bytes)
        assert plain is not None
        front = stamped_front(plain.table, own)
        assert front is not None
        stamp_plain(
            other, len(other) - plain.run_size, plain.created_at_us, POSITION, STORED_US, 3, STORE, mark_maker(SECRET),
            5, front,
        )  # fmt: skip
        assert bytes(stamped(one, own)) == bytes(other)


def test_a_batch_without_a_connection_has_an_unknown_address() -> None:
    view = stamped(batch({"a": 1}, NO_SOURCE, producer=bytes(16)), None)
    assert sources(only(view)) == [UNKNOWN_SOURCE]


def test_a_sender_needs_its_room() -> None:
    start = BATCH_HEADER_SIZE + RUN_SIZE
    assert has_room(batch({"a": 1}, NO_SOURCE), start, V4)
    assert not has_room(batch({"a": 1}, new_source("x", 6)), start, V6)
    assert has_room(batch({"a": 1}, new_source("x", 7)), start, V6)
    tables = [bytes(batch({"a": 1}, source)[start:]) for source in (NO_SOURCE, new_source("x", 6), new_source("x", 7))]
    assert [stamped_front(table, V4) == V4 for table in tables] == [True] * 3
    assert [stamped_front(table, V6) is not None for table in tables] == [False, False, True]


FORGED = {
    "an address": V4 + bytes((0, 0, 0)),
    "a port": bytes(16) + b"\1\0" + bytes((0, 0, 0)),
    "a sender": bytes(18) + bytes((3, 0, 0)) + b"bob",
    "a producer": packed(MINE),
    "two records": NO_SOURCE * 2,
    "cut short": NO_SOURCE[:-1],
    "nothing": b"",
    "too long a size": bytes(18) + bytes((0, 9, 0)),
    "too long an app": bytes(18) + bytes((0, MAX_APP_BYTES + 1, 0)) + bytes(MAX_APP_BYTES + 1),
    "too much room": bytes(18) + bytes((MAX_SENDER_BYTES + 1, 0, 0)) + bytes(MAX_SENDER_BYTES + 1),
}


@pytest.mark.parametrize("source", FORGED.values(), ids=FORGED)
def test_a_client_cannot_say_where_it_is(source: bytes) -> None:
    with pytest.raises(BadBatch, match=r"address and the sender|sizes in the source|app has at most"):
        check_batch(batch({"a": 1}, source), LIMITS)


def test_the_name_of_a_program_is_cut_between_letters() -> None:
    check_sent(new_source("é" * 200))
    assert sources_of(new_source("é" * 200))[0].app == "é" * 32
    assert sources_of(new_source("x" + "é" * 200))[0].app == "x" + "é" * 31
    assert sources_of(new_source("\ud800"))[0].app == "?"


@given(
    st.none() | st.ip_addresses(), st.integers(1, 65_535), st.none() | st.text("abcé", min_size=1, max_size=30),
    st.none() | st.text("abcé", min_size=1, max_size=30), st.none() | st.binary(min_size=16, max_size=16).filter(any),
)  # fmt: skip
def test_a_source_is_what_was_packed(
    address: object, port: int, sender: str | None, app: str | None, producer: bytes | None
) -> None:
    known = stamp_of(address.packed, port) if address is not None and int(address) else bytes(ADDRESS_SIZE)  # type: ignore[attr-defined, call-overload]
    (source,) = sources_of(known + packed(Source(None, sender, producer and producer.hex(), app))[ADDRESS_SIZE:])
    assert (source.sender, source.app, source.producer) == (sender, app, producer and producer.hex())
    assert packed(source)[:ADDRESS_SIZE] == known
    assert sources_of(packed(source)) == (source,)


@given(st.binary(max_size=120))
def test_any_bytes_are_sources_or_none(raw: bytes) -> None:
    assert all(isinstance(source, Source) for source in sources_of(raw))
    assert sources_of(raw)


def test_pieces_have_the_source() -> None:
    view = stamped(batch({"a": 5, "b": 1, "c": 2}, new_source("shop-api")))
    for piece in (piece_of_run(view, 0, 1, 3)[0], piece_of_run(view, 2, 0, None)[0]):
        assert set(sources(only(b"".join(piece)))) == {MINE}
    runs = StoredBatch(view).runs_piece(np.array([0, 2]))
    assert sources(only(b"".join(runs))) == [MINE] * 7


def test_halves_of_a_batch_keep_the_source() -> None:
    source = new_source("shop-api", 4)
    view = batch({"a": 4}, source)
    half = memoryview(b"".join(cut_batch(view, 1, 3, 9)))
    assert source_in(stored_table(half, parse_header(half))) == source


def test_copies_keep_the_source_of_their_original() -> None:
    (run,) = only(stamped(batch({"a": 3}, new_source("shop-api"))))
    for copy in (private_batch(run, 1, "g", b"h" * 16, 1), copied_batch(run, "g", 0, Origin(1, 0))):
        (again,) = only(copy)
        assert set(sources([again])) == {MINE}
        assert set(sources(only(private_batch(again, 0, "g", b"i" * 16, 1)))) == {MINE}, "of a copy, too"
    (restored,) = restored_batches([("b", run)], CREATED_US, 1 << 20)
    assert sources(only(restored.buffer)) == [MINE] * 3


def test_messages_that_fall_due_keep_their_sources() -> None:
    first = stamped(batch({"a": 1}, new_source("shop-api"), deliver_at=5))
    second = stamped(batch({"a": 1}, new_source("café", 16), bytes(range(32, 48)), deliver_at=5), V6, POSITION + 999)
    for view, count in ((first, 1), (stamped(batch({"a": 3, "b": 2}, new_source("shop-api"), deliver_at=5)), 5)):
        due = cut_due(view, 0, count, 0x8000)
        assert due is not None
        assert sources(only(due.buffer)) == [MINE] * count
    singles = [single_of(view) for view in (first, second, first)]
    joined = join_singles([single for single in singles if single is not None], STORE, 0x8000)
    assert joined.checked.header.flags & HAS_SOURCE
    runs = only(joined.buffer)
    assert sources(runs) == [MINE, OTHERS, MINE]
    one_source = join_singles([single for single in singles[::2] if single is not None], STORE, 0x8000)
    assert not one_source.checked.header.flags & HAS_SOURCE
    assert sources(only(one_source.buffer)) == [MINE, MINE]
    # Whatever is made of them keeps each message's own.
    stored = memoryview(joined.buffer)
    (run,) = stored_runs(stored, parse_header(stored))
    assert sources(only(b"".join(piece_of_run(stored, 0, 1, 3)[0]))) == [OTHERS, MINE]
    assert sources(only(copied_batch(run, "g", 0, Origin(1, 0)))) == [MINE, OTHERS, MINE]
    assert sources(only(private_batch(run, 1, "g", PRODUCER, 1))) == [OTHERS]
    (restored,) = restored_batches([("a", run)], CREATED_US, 1 << 20)
    assert sources(only(restored.buffer)) == [MINE, OTHERS, MINE]
    several = list(restored_batches([("a", run)], CREATED_US, 1_130))
    assert [source for part in several for source in sources(only(part.buffer))] == [MINE, OTHERS, MINE]


def test_records_are_told_apart() -> None:
    both = packed(MINE) + packed(OTHERS)
    assert records_in(both) == [packed(MINE), packed(OTHERS)]
    assert sources_of(both) == (MINE, OTHERS)
    assert with_producer(both, b"p" * 16) == both
    with pytest.raises(BadBatch, match="sizes in the source"):
        records_in(both[:-1])
