"""A refused batch as two halves, so that the messages that were not the cause are sent without it."""

from __future__ import annotations

from qmq.format.build import cut_batch
from qmq.net.client.producer.batch import BATCH_OVERHEAD, OutgoingBatch, SpanWaiter, Waiter
from qmq.net.client.producer.ordered import OrderedRun
from qmq.net.client.producer.run import OutgoingRun

#: The waiters for messages of a run: index of the first message, count (0: one send), waiter.
_Waiting = dict[OutgoingRun, list[tuple[int, int, Waiter]]]


def halves_of(batch: OutgoingBatch) -> list[OutgoingBatch]:
    """Return two batches with the messages of a built batch, which keep their producer sequences. A batch of several
    subjects is cut between two of them.
    """
    assert batch.buffers is not None
    view = memoryview(b"".join(batch.buffers))
    counts = [run.count if isinstance(run, OutgoingRun) else 1 for run in batch.runs.values()]
    middle = sum(counts[: len(counts) // 2]) if len(counts) > 1 else batch.count // 2
    waiting = _Waiting()
    for run, index, many, waiter in batch.waiters:
        waiting.setdefault(run, []).extend(_by_place(run, index, many, waiter))
    halves = []
    for start, stop in ((0, middle), (middle, batch.count)):
        number = batch.producer_sequence + start
        half = OutgoingBatch(batch.flush, batch.opened_at)
        half.buffers = cut_batch(view, start, stop, number)
        half.count, half.producer_sequence = stop - start, number
        messages_bytes = batch.size - BATCH_OVERHEAD
        half.size += messages_bytes * stop // batch.count - messages_bytes * start // batch.count
        half.first_written_at, half.written_at, half.store_id = batch.first_written_at, batch.written_at, batch.store_id
        half.answer_lost, half.unknown_since, half.moved_s = batch.answer_lost, batch.unknown_since, batch.moved_s
        half.maybe_duplicate, half.broker, half.has_lanes = batch.maybe_duplicate, batch.broker, batch.has_lanes
        half.has_unique = batch.has_unique
        _share(batch, half, start, stop, waiting)
        halves.append(half)
    return halves


def _share(batch: OutgoingBatch, half: OutgoingBatch, start: int, stop: int, waiting: _Waiting) -> None:
    """Give *half*, the messages with ordinals [start, stop), its runs, and the waiters for its messages."""
    ordinal = 0
    for name, known in batch.runs.items():
        count = known.count if isinstance(known, OutgoingRun) else 1
        first, end = max(start - ordinal, 0), min(stop - ordinal, count)
        ordinal += count
        if first >= end:
            continue
        if not isinstance(known, OutgoingRun):
            half.runs[name] = None
            half.singles[name] = batch.singles[name]
            half.built_runs += 1
            continue
        waiters = waiting.get(known, [])
        awaited = [range(index, index + (many or 1)) for of, index, many, _ in batch.waiters if of is known]
        part = known.part(first, end, awaited)
        half.runs[name] = part
        half.built_runs += len(part.lanes) if isinstance(part, OrderedRun) else 1
        for index, many, waiter in waiters:
            low, high = max(index, first), min(index + (many or 1), end)
            if low >= high:
                continue
            if many:
                assert isinstance(waiter, SpanWaiter)
                waiter = waiter.cut(low - index, high - index)
            half.waiters.append((part, low - first, high - low if many else 0, waiter))


def _by_place(run: OutgoingRun, index: int, many: int, waiter: Waiter) -> list[tuple[int, int, Waiter]]:
    """Return the waiters for messages of a run, by their places in the built batch; where the messages of one call lie
    apart, a waiter for each.
    """
    if type(run) is not OrderedRun:
        return [(index, many, waiter)]
    places = run.places()
    if not many:
        return [(places[index], 0, waiter)]
    assert isinstance(waiter, SpanWaiter)
    return [(places[index + at], 1, one) for at, one in enumerate(waiter.cut_up())]
