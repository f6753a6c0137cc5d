"""Columns of messages that no store of the tests has: copies, and headers that cannot be decoded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from qmq.format.batch import BatchLimits, check_batch, parse_header, stamp
from qmq.format.build import MessageHeader, RunContent, build_batch, make_header
from qmq.format.copies.due import join_singles, single_of
from qmq.format.copies.for_group import private_batch
from qmq.format.ids import MessageId
from qmq.format.layout import KNOWN_FLAGS
from qmq.format.pieces import stored_runs
from qmq_spark.columns import MessageColumns, gather
from qmq_spark.heads import Subjects, check_headers, read_heads
from tests.spark.reads import SCHEMA, schema_of

STORE = b"store!"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stored(data: bytes, position: int) -> bytes:
    """Return a batch of one run as a broker stores it."""
    buffer = bytearray(data)
    view = memoryview(buffer)
    batch = check_batch(view, BatchLimits(flags=KNOWN_FLAGS))
    stamp(
        view, batch, position=position, stored_at_us=5, partition=3, store_id=STORE, secret=b"s" * 16, first_sequences=7
    )
    return bytes(buffer)


def batch_of(*messages: tuple[bytes, MessageHeader]) -> bytes:
    bodies, headers = zip(*messages, strict=True)
    run = RunContent("orders", list(bodies), list(headers))
    return b"".join(build_batch([run], created_at_us=1, producer_id=bytes(16), producer_sequence=0))


def messages_of(*batches: bytes) -> MessageColumns:
    """Return the messages of adjacent batches."""
    window = memoryview(b"".join(batches))
    sizes = np.array([len(batch) for batch in batches], np.int64)
    offsets = np.cumsum(sizes) - sizes
    positions = np.array([parse_header(batch).position for batch in batches], np.int64)
    headers, wrong = check_headers(window, offsets, positions, STORE, data=True)
    assert wrong == [None] * len(batches)
    names = Subjects()
    heads, bad = read_heads(window, offsets, headers, names)
    assert not bad
    return MessageColumns(window, heads, names.names)


def delayed(number: int, created_at_us: int, key: str | None) -> memoryview:
    """Return a stored batch of one delayed message."""
    run = RunContent("orders", [b"body %d" % number], [make_header(key, deliver_at=1_000_000)])
    parts = build_batch([run], created_at_us=created_at_us, producer_id=bytes(16), producer_sequence=0)
    return memoryview(stored(b"".join(parts), 1_000 * number))


def test_messages_that_fell_due_together_show_when_each_was_made() -> None:
    singles = [single_of(delayed(number, 70 + number % 7, "k" if number % 2 else None)) for number in range(9)]
    due = join_singles([single for single in singles if single is not None], STORE, 0x8000)
    plain = stored(batch_of((b"one", make_header("k", ["t"]))), 1 << 40)
    rows = messages_of(plain, stored(bytes(due.buffer), 1 << 41), plain).record_batch(SCHEMA).to_pylist()
    made = [int((row["created_at"] - EPOCH) / timedelta(microseconds=1)) for row in rows]
    assert made == [1, *(70 + number % 7 for number in range(9)), 1]
    assert rows[4]["message_id"] == str(MessageId(STORE, 0x8000, 3_000))
    assert rows[4]["key"] == "k"


def test_a_copy_shows_the_id_of_its_origin() -> None:
    first = stored(batch_of((b"one", make_header("k", ["t"])), (b"two", make_header())), 1 << 40)
    (run,) = stored_runs(memoryview(first), parse_header(first))
    copy = stored(private_batch(run, 1, "billing", bytes(16), 0), 1 << 50)
    rows = messages_of(first, copy, first).record_batch(SCHEMA).to_pylist()
    assert [row["message_id"] for row in rows] == [str(run.id(at)) for at in (0, 1, 1, 0, 1)]
    assert [row["body"] for row in rows] == [b"one", b"two", b"two", b"one", b"two"]
    assert rows[2]["position"] == 1 << 50
    assert rows[2]["subject"] == "~billing~orders"


def test_headers_that_nobody_can_decode_are_named() -> None:
    later, broken = MessageHeader(b"\x82\xa1k\x91\xa1a\xa1z\x05", 0, 0), MessageHeader(b"\x81\xa1k\x91\xa1\xff", 0, 0)
    messages = messages_of(
        stored(batch_of((b"0", make_header("x")), (b"1", later), (b"2", broken), (b"3", make_header("y"))), 64)
    )
    rows = messages.record_batch(SCHEMA).to_pylist()
    assert [row["key"] for row in rows] == ["x", "a", None, "y"]
    assert [message for message, _ in messages.undecodable] == [2]
    assert "utf-8" in messages.undecodable[0].reason
    assert messages_of(stored(batch_of((b"2", broken)), 64)).record_batch(schema_of("body")).to_pylist() == [
        {"body": b"2"}
    ]


@pytest.mark.parametrize("places", [[], [(0, 4), (4, 4), (4, 9)], [(1, 3), (5, 5), (7, 9)], [(5, 6), (0, 2)]])
def test_gathers_what_lies_anywhere(places: list[tuple[int, int]]) -> None:
    data = b"abcdefghi"
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    found = gather(memoryview(data), starts, ends, pa.binary())
    found.validate(full=True)
    assert found.to_pylist() == [data[start:end] for start, end in places]
