"""One batch on its way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qmq.errors import QmqError, SendFailed, SendUnknown, StorageFull
from qmq.format.batch import BatchLimits, check_batch, parse_header
from qmq.format.build import NO_HEADER, AnyHeader, make_header
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, NO_SEQUENCE
from qmq.net.client.producer.batch import (
    BATCH_OVERHEAD,
    MESSAGE_OVERHEAD,
    RUN_OVERHEAD,
    ManyWaiter,
    OutgoingBatch,
    OutgoingRun,
    failure_of,
)
from qmq.net.client.producer.receipts import Receipt

PRODUCER = b"p" * 16


class Waiting:
    """A waiter that remembers what it was told."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: Any = None
        self.told = False
        self.cancelled = False

    def done(self) -> bool:
        return self.cancelled or self.told

    def set_result(self, result: Any, /) -> None:
        assert not self.done()
        self.told = True
        self.result = result

    def set_exception(self, error: Any, /) -> None:
        assert not self.done()
        self.told = True
        self.error = error


def batch_with(*subjects: str) -> OutgoingBatch:
    batch = OutgoingBatch(True, 0.0)
    for subject in subjects:
        batch.runs[subject] = OutgoingRun(subject)
    return batch


def test_a_broker_takes_a_built_batch() -> None:
    batch = batch_with("a", "b")
    batch.runs["a"].append(b"1", NO_HEADER)
    batch.runs["a"].append(b"2", make_header("k"))
    batch.runs["b"].extend([b"3", b"4", b"5"])
    batch.build(77, PRODUCER, 1_000)
    assert batch.buffers is not None
    checked = check_batch(memoryview(b"".join(batch.buffers)), BatchLimits())
    assert checked.names == ("a", "b")
    assert checked.header.messages == batch.count == 5
    assert (checked.header.producer_id, checked.header.producer_sequence) == (PRODUCER, 1_000)
    assert checked.header.created_at_us == 77
    assert batch.runs["a"].bodies == []  # only what is said of it is kept


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("header", [NO_HEADER, make_header("k"), "k"])
def test_sizes_that_are_known_change_nothing(before: int, after: int, header: AnyHeader) -> None:
    parts = [[b"x" * size for size in sizes] for sizes in ([1, 0, 70_000], [5] * 20)]
    known, unknown = batch_with("a"), batch_with("a")
    for batch in (known, unknown):
        run = batch.runs["a"]
        assert isinstance(run, OutgoingRun)
        for _ in range(before):
            run.append(b"first", NO_HEADER)
        for part in parts:
            sizes = np.array(list(map(len, part)), "<u4") if batch is known else None
            run.extend(part, sizes=sizes, headers=None if header is NO_HEADER else [header] * len(part))
        for _ in range(after):
            run.append(b"last", NO_HEADER)
        if batch is known:
            assert (run.lengths() is None) == bool(before or after)
        batch.build(0, PRODUCER, 0)
    assert known.buffers == unknown.buffers


def test_the_counted_size_is_never_below_the_built_size() -> None:
    for bodies in ([b""], [b"x" * 100] * 50):
        for header in (NO_HEADER, make_header("k", ("t",), {"p": "v"})):
            subjects = ["s", "t" * 200, "u.v"]
            batch = batch_with(*subjects)
            counted = BATCH_OVERHEAD
            for subject in subjects:
                counted += RUN_OVERHEAD + len(subject)
                for body in bodies:
                    batch.runs[subject].append(body, header)
                    counted += len(body) + len(header.packed) + MESSAGE_OVERHEAD
            batch.build(0, PRODUCER, 0)
            assert batch.buffers is not None
            assert sum(map(len, batch.buffers)) <= counted


def test_renumber_changes_the_producer_sequence_only() -> None:
    batch = batch_with("a")
    batch.runs["a"].extend([b"1", b"2"])
    batch.build(0, PRODUCER, 5)
    assert batch.buffers is not None
    before = b"".join(batch.buffers)
    batch.renumber(1 << 40)
    after = b"".join(batch.buffers)
    assert check_batch(memoryview(after), BatchLimits()).header.producer_sequence == batch.producer_sequence == 1 << 40
    old, new = parse_header(before), parse_header(after)
    assert old == new._replace(producer_sequence=5, header_crc=old.header_crc)
    assert before[96:] == after[96:]


def test_everybody_gets_the_receipts_of_their_messages() -> None:
    batch = batch_with("a", "b")
    single, other, whole, part = Waiting(), Waiting(), Waiting(), Waiting()
    batch.runs["a"].append(b"1", NO_HEADER)
    batch.waiters.append((batch.runs["a"], 0, 0, single))
    batch.runs["a"].append(b"2", NO_HEADER)
    batch.waiters.append((batch.runs["a"], 1, 0, other))
    many = ManyWaiter(whole)
    batch.runs["b"].extend([b"3", b"4", b"5"])
    batch.waiters.append((batch.runs["b"], 0, 3, many.part(3)))
    many.seal()
    batch.runs["b"].extend([b"6", b"7"])
    cut = ManyWaiter(part)
    batch.waiters.append((batch.runs["b"], 3, 2, cut.part(2)))
    cut.seal()
    other.cancelled = True
    batch.build(0, PRODUCER, 0)
    batch.stored(500, 42, 1, b"store1", (10, 20))
    assert single.result == Receipt(single.result._span)
    assert (single.result.subject, single.result.sequence, single.result.stored_at_us) == ("a", 10, 42)
    assert single.result.id.endswith(f"{500:016x}")
    assert other.result is None
    assert [receipt.sequence for receipt in whole.result] == [20, 21, 22]
    assert [receipt.id[-16:] for receipt in whole.result] == [f"{position:016x}" for position in (502, 503, 504)]
    assert [receipt.sequence for receipt in part.result] == [23, 24]
    assert [receipt.id[-16:] for receipt in part.result] == [f"{position:016x}" for position in (505, 506)]


@pytest.mark.parametrize(("partition", "first"), [(1, NO_SEQUENCE), (DELAY_PARTITION, 10)])
def test_what_is_delayed_or_long_gone_has_no_sequence(partition: int, first: int) -> None:
    batch = batch_with("a")
    single = Waiting()
    batch.runs["a"].append(b"1", NO_HEADER)
    batch.waiters.append((batch.runs["a"], 0, 0, single))
    batch.build(0, PRODUCER, 0)
    batch.stored(500, 42, partition, b"store1", (first,))
    assert single.result.sequence is None


def test_a_failed_batch_tells_everybody_which_messages() -> None:
    batch = batch_with("a", "b")
    single, whole = Waiting(), Waiting()
    run = batch.runs["a"]
    run.append(b"1", make_header("k1"))
    run.add_ticket(7)
    run.append(b"2", make_header("k2"))
    batch.waiters.append((run, 1, 0, single))
    run.append(b"3", NO_HEADER)
    run.add_ticket(8)
    batch.runs["b"].extend([b"4", b"5"])
    many = ManyWaiter(whole)
    batch.waiters.append((batch.runs["b"], 0, 2, many.part(2)))
    many.seal()
    batch.build(0, PRODUCER, 0)
    cause = StorageFull("the disk is full")
    failures = batch.failed(cause, unknown=False)
    assert [(f.ticket, f.subject, f.key, f.outcome) for f in failures] == [
        (7, "a", "k1", "refused"),
        (8, "a", None, "refused"),
    ]
    assert type(single.error) is SendFailed
    assert single.error.__cause__ is cause
    assert [(f.ticket, f.key) for f in single.error.failures] == [(0, "k2")]
    assert "the disk is full" in str(single.error)
    assert [(f.ticket, f.subject) for f in whole.error.failures] == [(0, "b"), (1, "b")]


def test_send_many_over_several_batches_ends_once_with_indexes_of_the_call() -> None:
    waiting = Waiting()
    many = ManyWaiter(waiting)
    batches = []
    for count in (2, 3):
        batch = batch_with("a")
        batch.runs["a"].extend([b"x"] * count)
        batch.waiters.append((batch.runs["a"], 0, count, many.part(count)))
        batch.build(0, PRODUCER, 0)
        batches.append(batch)
    many.seal()
    batches[1].failed(QmqError("no"), unknown=True)
    assert not waiting.done()
    batches[0].stored(1, 1, 0, b"store1", (0,))
    assert type(waiting.error) is SendUnknown
    assert [failure.ticket for failure in waiting.error.failures] == [2, 3, 4]


def test_a_cancelled_send_many_is_left_alone() -> None:
    waiting = Waiting()
    many = ManyWaiter(waiting)
    batch = batch_with("a")
    batch.runs["a"].extend([b"x"])
    batch.waiters.append((batch.runs["a"], 0, 1, many.part(1)))
    many.seal()
    waiting.cancelled = True
    batch.build(0, PRODUCER, 0)
    batch.stored(1, 1, 0, b"store1", (0,))
    assert waiting.result is None


@pytest.mark.parametrize(("outcomes", "kind"), [
    (["refused"], SendFailed), (["unknown"], SendUnknown), (["unknown", "refused"], SendFailed),
    (["unknown", "unknown"], SendUnknown),
])  # fmt: skip
def test_the_error_is_unknown_only_when_all_are(outcomes: list[str], kind: type[SendFailed]) -> None:
    batch = batch_with("a.b")
    run = batch.runs["a.b"]
    failures = []
    for outcome in outcomes:
        one = batch_with("a.b")
        one.runs["a.b"].append(b"", NO_HEADER)
        one.runs["a.b"].add_ticket(1)
        failures += one.failed(QmqError("because"), outcome == "unknown")
    error = failure_of(failures, more=3)
    assert type(error) is kind
    assert f"{len(outcomes) + 3} messages, the first to 'a.b'" in str(error)
    assert "because" in str(error)
    assert run.count == 0


def with_singles() -> OutgoingBatch:
    """Runs of one message that nobody awaits, around one with a header."""
    batch = batch_with("a")
    run = batch.run_of("a")
    assert run is not None
    run.append(b"1", make_header("k"))
    run.add_ticket(7)
    batch.runs["b"], batch.singles["b"] = b"2", 8
    batch.runs["c"], batch.singles["c"] = b"3", 9
    batch.runs["d"] = OutgoingRun("d")
    return batch


@pytest.mark.parametrize("built", [False, True])
def test_single_messages_fail_by_their_tickets(built: bool) -> None:
    batch = with_singles()
    del batch.runs["d"]
    if built:
        batch.build(1, PRODUCER, 5)
    failures = batch.failed(StorageFull("full"), unknown=False)
    assert [(one.ticket, one.subject, one.key) for one in failures] == [(7, "a", "k"), (8, "b", None), (9, "c", None)]


def test_receipts_count_the_single_messages_before_them() -> None:
    batch, waiting = with_singles(), Waiting()
    last = batch.run_of("d")
    assert last is not None
    last.append(b"4", NO_HEADER)
    batch.waiters.append((last, 0, 0, waiting))
    batch.build(1, PRODUCER, 5)
    assert batch.buffers is not None
    checked = check_batch(memoryview(bytearray(b"".join(batch.buffers))), BatchLimits())
    assert checked.names == ("a", "b", "c", "d")
    assert checked.header.messages == batch.count == 4
    batch.stored(1_000, 5, 0, b"s" * 6, [10, 20, 30, 40])
    assert isinstance(waiting.result, Receipt)
    assert waiting.result.sequence == 40
    assert waiting.result.id == str(MessageId(b"s" * 6, 0, 1_003))


def test_a_second_message_makes_a_run_of_a_single_one() -> None:
    batch = with_singles()
    run = batch.run_of("b")
    assert run is not None
    assert run is batch.run_of("b")
    assert (run.bodies, run.all_tickets(), batch.singles) == ([b"2"], [8], {"c": 9})
    assert list(batch.runs) == ["a", "b", "c", "d"]
    assert batch.run_of("e") is None
