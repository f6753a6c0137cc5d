"""Delayed messages that fall due become a batch of the same messages, under the ids that they had."""

from __future__ import annotations

from functools import partial

import pytest
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import check_batch, parse_header, stamp, validate_stored
from qmq.format.build import MessageHeader, RunContent, build_batch, make_header
from qmq.format.copies.due import DUE_PRODUCER, cut_due, due_times, origins_of, runs_between
from qmq.format.ids import MessageId
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    DELAY_END_US,
    DELIVER_UNIT_US,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_TAGS,
)
from qmq.format.pieces import bad_messages, read_answer, stored_runs
from tests.broker.test_admin_turns import Opcodes
from tests.format.contents import CREATED_US, LIMITS, POSITION, PRODUCER, SECRET, STORE, STORED_US

PARTITION = 0x8000


def header_of(number: int, deliver_at: int, expire_at: int = 0) -> MessageHeader:
    return make_header(f"key-{number}", ["vip"][: number % 2], {"n": str(number)}, deliver_at, expire_at)


def delayed(counts: dict[str, int], deliver_at: int = 1_000_000, expire_at: int = 0) -> memoryview:
    """Return a stored batch of delayed messages: subjects with so many each."""
    runs, number = list[RunContent](), 0
    for subject, count in counts.items():
        headers = [header_of(number + index, deliver_at + index, expire_at) for index in range(count)]
        runs.append(RunContent(subject, [b"body %d" % (number + index) for index in range(count)], headers))
        number += count
    made = build_batch(runs, created_at_us=CREATED_US, producer_id=PRODUCER, producer_sequence=7)
    view = memoryview(bytearray(b"".join(made)))
    checked = check_batch(view, LIMITS)
    stamp(
        view, checked, position=POSITION, stored_at_us=STORED_US, partition=0, store_id=STORE, secret=SECRET,
        first_sequences=0 if checked.runs is None else checked.runs["first_sequence"],
    )  # fmt: skip
    return view


def due(view: memoryview, start: int, stop: int) -> memoryview:
    """Return the due part of it, stored."""
    made = cut_due(view, start, stop, PARTITION)
    assert made is not None
    out = memoryview(made.buffer)
    firsts = 0 if made.checked.runs is None else made.checked.runs["first_sequence"]
    stamp(
        out, made.checked, position=POSITION + 4_096, stored_at_us=STORED_US + 9, partition=1, store_id=STORE,
        secret=SECRET, first_sequences=firsts,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("counts", [{"a": 1}, {"a": 40}, {"a": 2, "b": 1, "c": 20}, {"a": 1, "b": 1}])
def test_due_messages_are_the_same_messages(counts: dict[str, int]) -> None:
    total = sum(counts.values())
    for start in range(0, total, 3):
        for stop in range(start + 1, total + 1, 4):
            view = due(delayed(counts), start, stop)
            header = validate_stored(view, POSITION + 4_096, SECRET, STORE)
            assert header.flags & HAS_ORIGIN_ID
            assert not header.flags & HAS_DELIVER_AT
            assert (header.created_at_us, header.producer_id, header.messages) == (
                CREATED_US, DUE_PRODUCER, stop - start,
            )  # fmt: skip
            runs, damaged = read_answer(view)
            assert damaged == []
            found = [(run.body(i), run.header(i)["p"]["n"], run.id(i)) for run in runs for i in range(run.count)]
            assert found == [
                (b"body %d" % number, str(number), MessageId(STORE, PARTITION, POSITION + number))
                for number in range(start, stop)
            ]
            assert [bad_messages(run) for run in runs] == [[]] * len(runs)


def test_runs_are_counted_up_to_the_most() -> None:
    counts = {"a": 2, "b": 1, "c": 4, "d": 1}
    view, ends = delayed(counts), [2, 3, 7, 8]
    for start in range(8):
        for stop in range(start + 1, 9):
            runs = 1 + sum(start < end < stop for end in ends)
            for most in range(1, 6):
                behind = [end for end in ends if end > start][most - 1 : most]
                expected = (runs, stop) if runs <= most else (most, *behind)
                assert runs_between(view, start, stop, most) == expected
    assert runs_between(delayed({"a": 9}), 2, 5, 1) == (1, 5)


def test_runs_of_a_rotten_header_are_not_counted() -> None:
    view = delayed({"a": 2, "b": 1})
    view[BATCH_HEADER_SIZE + 9] ^= 1
    with pytest.raises(BadBatch, match="is rotten"):
        runs_between(view, 0, 3, 1)


def test_other_runs_of_a_batch_cost_a_cut_little() -> None:
    opcodes = Opcodes()
    few, many = (
        opcodes.of(partial(due, delayed({f"a.{number}": 1 for number in range(runs)}), 3, 5)) for runs in (10, 2_000)
    )
    assert many < 2 * few


def test_other_columns_are_unchanged() -> None:
    view = due(delayed({"a": 4}, expire_at=5_000), 1, 4)
    (run,) = stored_runs(view, parse_header(view))
    assert run.flags == HAS_TAGS | HAS_KEY_HASH | HAS_EXPIRE_AT | HAS_ORIGIN_ID
    expire = run.column(HAS_EXPIRE_AT)
    assert expire is not None
    assert expire.tolist() == [5_000] * 3


def test_a_rotten_origin_id_shows_in_a_cut_run() -> None:
    (run,) = stored_runs(view := due(delayed({"a": 20}), 0, 20), parse_header(view))
    part = run.slice(3, 9)
    assert bad_messages(part) == []
    offset = bytes(part.data).index(MessageIdBytes(POSITION + 5))
    for bit in range(128):
        data = bytearray(part.data)
        data[offset + bit // 8] ^= 1 << bit % 8
        rotten = part.slice(0, 6)
        rotten._view = memoryview(data)
        assert bad_messages(rotten) == [2]


def MessageIdBytes(position: int) -> bytes:  # noqa: N802  # it makes what MessageId packs
    return bytes.fromhex(str(MessageId(STORE, PARTITION, position)))


def test_rotten_messages_are_left_out_and_counted() -> None:
    view = delayed({"a": 5})
    body = bytes(view).index(b"body 2")
    view[body] ^= 1
    made = cut_due(view, 0, 5, PARTITION)
    assert made is not None
    assert (made.lost, made.checked.header.messages) == (1, 4)
    run = stored_runs(memoryview(made.buffer), made.checked.header)[0]
    assert run.bodies() == [b"body 0", b"body 1", b"body 3", b"body 4"]
    assert [run.id(index).position - POSITION for index in range(4)] == [0, 1, 3, 4]
    assert cut_due(view, 2, 3, PARTITION) is None


def test_due_times_are_absolute_and_never_early() -> None:
    late = STORED_US + 60_000_001
    for asked, expected in ((1, STORED_US + 1), (30_000_000, STORED_US + 30_000_000), (late, late)):
        view = delayed({"a": 1}, deliver_at=asked)
        (due_us,) = due_times(view, parse_header(view), STORED_US).tolist()
        assert expected <= due_us < expected + DELIVER_UNIT_US
        assert due_us % DELIVER_UNIT_US == 0
        several = delayed({"a": 3, "b": 2}, deliver_at=asked)
        found = due_times(several, parse_header(several), STORED_US).tolist()
        for number, due_us in zip((0, 1, 2, 0, 1), found, strict=True):  # each is a microsecond behind, in its subject
            assert expected + number <= due_us < expected + number + DELIVER_UNIT_US
            assert due_us % DELIVER_UNIT_US == 0
    assert DELAY_END_US < STORED_US  # so delays differ from times


def test_origins_say_which_messages_they_are() -> None:
    view = due(delayed({"a": 3, "b": 2}), 1, 5)
    found = [
        (store, partition, number) for store, partition, numbers in origins_of(view) for number in numbers.tolist()
    ]
    assert found == [(STORE, PARTITION, POSITION + number) for number in range(1, 5)]


def test_columns_are_under_the_checksum_of_each_message() -> None:
    view = delayed({"a": 3})
    (run,) = stored_runs(view, parse_header(view))
    column = run.column(HAS_DELIVER_AT)
    assert column is not None
    assert column.tolist() == [1_000_000, 1_000_001, 1_000_002]
    assert bad_messages(run) == []
    place = bytes(view).index((1_000_001).to_bytes(8, "little"))
    view[place] ^= 4
    (run,) = stored_runs(view, parse_header(view))
    assert bad_messages(run) == [1]
    assert crc32c(run.data) != parse_header(view).data_crc
