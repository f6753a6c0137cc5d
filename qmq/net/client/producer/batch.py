"""One batch that a client sends: from its first message to the broker's answer, or to its failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol

from crc32c import crc32c

from qmq.errors import QmqError, SendFailed, SendFailure, SendUnknown
from qmq.format.build import NO_HEADER, AnyHeader, build_flat, build_single, build_single_unique
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_PREFIX_SIZE,
    DELAY_PARTITION,
    HEADER_CRC_OFFSET,
    LANE_NORMAL,
    LANE_ORDERED,
    NO_SEQUENCE,
    RUN_SIZE,
)
from qmq.format.source import MAX_SENT_BYTES, NO_SOURCE
from qmq.format.table import UNIQUE_SIZE
from qmq.net.client.producer.duplicates import Duplicate
from qmq.net.client.producer.ordered import OrderedRun, key_of
from qmq.net.client.producer.receipts import AnySpan, OrderedSpan, Receipt, Receipts, ReceiptSpan, StoredSpan
from qmq.net.client.producer.run import LaneRun, OutgoingRun, RunName
from qmq.net.protocol.frames import made

#: Most bytes of a message in a batch beside header and body: length, header size, crc, tags, key hash.
MESSAGE_OVERHEAD: Final = 22
#: Bytes of a time in a message that is delayed or expires.
DELAYED_OVERHEAD: Final = 8
#: Bytes of a run beside its messages and its subject's name: its record, and the size of the name in the table.
RUN_OVERHEAD: Final = RUN_SIZE + 5
#: Bytes of a run of one plain message beside its body and its subject's name.
_SINGLE_OVERHEAD: Final = MESSAGE_OVERHEAD + RUN_OVERHEAD
#: Bytes of a batch beside its runs.
BATCH_OVERHEAD: Final = BATCH_HEADER_SIZE + 16 + UNIQUE_SIZE + MAX_SENT_BYTES

#: The broker of a batch that may go to any.
ANY_BROKER: Final = -1

_SEQUENCE_OFFSET: Final = BATCH_PREFIX_SIZE - 12  # producer_sequence u64, before data_crc


class Waiter(Protocol):
    """The waiter for the outcome of messages: an asyncio.Future, or an object that takes a result like one."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: Any, /) -> None: ...


class OutgoingBatch:
    """A batch that collects messages, is sealed, built, written (once or several times), and ends stored or failed."""

    buffers: Sequence[bytes] | None = None
    count = 0
    #: How many runs it was built of, if that differs from ``runs``: an ordered run becomes one for each slot.
    built_runs = 0
    #: Its runs of messages with order keys, in the order in which they were begun.
    ordered: Sequence[OrderedRun] = ()
    #: The broker that it has to go to, by the number of its address; ANY_BROKER: to that of new batches.
    broker = ANY_BROKER
    #: Whether its messages have unique texts.
    has_unique = False
    producer_sequence = 0
    first_written_at = 0.0
    #: Seconds in which it was in flight and bytes moved: these do not count against the send_timeout.
    moved_s = 0.0
    written_at = 0.0  # the last time
    store_id = b""  # the store that it was last written to
    answer_lost = False  # it was written to that store without an answer
    unknown_since = 0.0
    #: Another store, from which it has moved, may have it, too.
    maybe_duplicate = False
    #: The broker refused it as a bad batch; the first time the bytes may have been damaged on the way.
    is_doubted = False
    last_error: QmqError | None = None

    def __init__(self, flush: bool, opened_at: float) -> None:
        self.flush = flush
        self.opened_at = opened_at
        self.has_lanes = False
        #: Runs by name. A single plain message without a waiter is only its body, and None once the batch is built:
        #: with many subjects, an object for each message would take most of the time, half of it in the collector.
        self.runs: dict[RunName, OutgoingRun | bytes | None] = {}
        self.singles: dict[RunName, int] = {}  # tickets of single messages by subject
        # By order key: the number of the last of ``ordered`` that has it, but for messages at the end of the last one.
        self._last_runs: dict[str, int] = {}
        self.size = BATCH_OVERHEAD  # counts against limits; never below the size of the built batch
        self.waiters: list[tuple[OutgoingRun, int, int, Waiter]] = []  # run, first index, count (0: one send), waiter

    def add_single(self, subject: str, body: bytes, waiter: Waiter) -> int:
        """Put the only message, which has a waiter, into the batch; return its size in the batch."""
        run = self.runs[subject] = OutgoingRun(subject)
        run.bodies = [body]
        self.waiters.append((run, 0, 0, waiter))
        size = _SINGLE_OVERHEAD + len(body) + len(subject)
        self.size += size
        return size

    def build_single(self, created_at_us: int, producer_id: bytes, producer_sequence: int, source: bytes) -> None:
        """As ``build``, for the only message of a batch that has a waiter and no header."""
        run = self.waiters[0][0]
        self.buffers = build_single(run.subject, run.bodies[0], created_at_us, producer_id, producer_sequence, source)
        run.bodies = []
        self.count = run.count = 1
        self.producer_sequence = producer_sequence

    def build_single_unique(
        self, unique: bytes, created_at_us: int, producer_id: bytes, producer_sequence: int, source: bytes
    ) -> None:
        """As ``build_single``, for a message with the hash of a unique text."""
        run = self.waiters[0][0]
        self.buffers = build_single_unique(
            run.subject, run.bodies[0], unique, created_at_us, producer_id, producer_sequence, source
        )
        run.bodies = []
        self.count = run.count = 1
        self.producer_sequence = producer_sequence
        self.has_unique = True

    def run_of(self, name: RunName) -> OutgoingRun | None:
        """Return the run of that name for more messages; None if there is none."""
        found = self.runs.get(name)
        if type(found) is not bytes:
            return found  # type: ignore[return-value]  # None and OutgoingRun are all that is left
        assert type(name) is str
        run = self.runs[name] = OutgoingRun(name)
        run.bodies.append(found)
        run.first_ticket = self.singles.pop(name)
        return run

    def new_run(self, name: RunName) -> OutgoingRun:
        """Begin the run of that name."""
        run: OutgoingRun
        if type(name) is str:
            run = OutgoingRun(name)
        else:
            assert type(name) is tuple
            self.has_lanes = True
            run = LaneRun(name)
            if name[1] >= LANE_ORDERED:
                run = self._new_ordered(name)
        self.runs[name] = run
        return run

    def _new_ordered(self, name: tuple[str, int]) -> OrderedRun:
        run = OrderedRun(name)
        if not self.ordered:
            self.ordered = []
        else:
            self.note_keys(self.ordered[-1])
            run.number = len(self.ordered)
        self.ordered.append(run)  # type: ignore[attr-defined]  # only one that is empty is no list
        return run

    def note_keys(self, run: OrderedRun) -> None:
        """Remember that a run has the order keys of the messages that came to it since the last call. To be called
        when messages came to another run than the last one.
        """
        last, number = self._last_runs, run.number
        for header in (run.headers or ())[run.noted :]:
            order_key = key_of(header)
            last[order_key] = max(number, last.get(order_key, 0))
        run.noted = len(run.bodies)

    def may_follow(self, run: OrderedRun, order_key: str) -> bool:
        """Return whether a message with that order key may go to the end of *run*: no run behind that has the key."""
        self.note_keys(self.ordered[-1])
        return self._last_runs.get(order_key, -1) <= run.number

    def build(self, created_at_us: int, producer_id: bytes, producer_sequence: int, source: bytes = NO_SOURCE) -> None:
        """Build the bytes of the batch, and free the bodies."""
        lanes: list[int] | None = None
        subjects: Sequence[str] = list(self.runs)  # type: ignore[arg-type]  # without lanes, the names are subjects
        bodies, counts, headers = self._flat()
        if self.has_lanes:
            subjects, lanes, counts = self._lanes(counts)
            self.built_runs = len(counts)
        self.buffers = build_flat(
            subjects,
            counts,
            bodies,
            headers,
            created_at_us=created_at_us,
            producer_id=producer_id,
            producer_sequence=producer_sequence,
            lengths=self._lengths(),
            source=source,
            lanes=lanes,
            has_unique=self.has_unique,
        )
        runs = {name: run for name, run in self.runs.items() if isinstance(run, OutgoingRun)}
        for run in runs.values():
            run.count = len(run.bodies)
            run.bodies, run.sizes = [], None
        self.runs = dict.fromkeys(self.runs)
        self.runs.update(runs)
        self.count = len(bodies)
        self.producer_sequence = producer_sequence

    def _lengths(self) -> bytes | None:
        if len(self.runs) != 1:
            return None
        (run,) = self.runs.values()
        return run.lengths() if isinstance(run, OutgoingRun) else None

    def _lanes(self, counts: list[int]) -> tuple[list[str], list[int], list[int]]:
        """Return the subject, lane and count of each run to build; *counts* are those of ``runs``."""
        subjects, lanes, built = list[str](), list[int](), list[int]()
        for (name, run), count in zip(self.runs.items(), counts, strict=True):
            if isinstance(run, OrderedRun):
                subjects += [run.subject] * len(run.lanes)
                lanes += run.lanes
                built += run.counts
            else:
                subjects.append(name if type(name) is str else name[0])
                lanes.append(run.lane if isinstance(run, LaneRun) else LANE_NORMAL)
                built.append(count)
        return subjects, lanes, built

    def _flat(self) -> tuple[list[bytes], list[int], list[AnyHeader] | None]:
        """Return the bodies of all runs, the count of each run, and the headers, if any message has one."""
        bodies: list[bytes] = []
        counts: list[int] = []
        headers: list[AnyHeader] | None = None
        for run in self.runs.values():
            if type(run) is bytes:
                bodies.append(run)
                counts.append(1)
                continue
            assert isinstance(run, OutgoingRun)
            own, own_headers = run.bodies, run.headers
            if type(run) is OrderedRun:
                own, own_headers = run.by_slot()
            if own_headers is not None:
                headers = [NO_HEADER] * len(bodies) if headers is None else headers
                headers += [NO_HEADER] * (len(bodies) - len(headers))
                headers += own_headers
            bodies += own
            counts.append(len(own))
        if headers is not None:
            headers += [NO_HEADER] * (len(bodies) - len(headers))
        return bodies, counts, headers

    def unawaited(self) -> int:
        """Return the count of messages without a waiter."""
        sizes = (len(run.bodies) if isinstance(run, OutgoingRun) else 1 for run in self.runs.values())
        return (self.count or sum(sizes)) - sum(count or 1 for _, _, count, _ in self.waiters)

    def renumber(self, producer_sequence: int) -> None:
        """Change the producer sequence of a batch that the store it goes to cannot have yet."""
        assert self.buffers is not None
        head = bytearray(self.buffers[0])
        head[_SEQUENCE_OFFSET : _SEQUENCE_OFFSET + 8] = producer_sequence.to_bytes(8, "little")
        crc = crc32c(head[BATCH_HEADER_SIZE:], crc32c(head[:BATCH_PREFIX_SIZE]))
        head[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = crc.to_bytes(4, "little")
        self.buffers = [bytes(head), *self.buffers[1:]]
        self.producer_sequence = producer_sequence

    def stored(
        self, position: int, stored_at_us: int, partition: int, store_id: bytes, first_sequences: Sequence[int]
    ) -> None:
        """Wake the waiters with their receipts."""
        waiters = self.waiters
        if not waiters:
            return
        if self.count == 1 and partition < DELAY_PARTITION:  # the common case of a send that is alone
            only, _, many, waiter = waiters[0]
            if not waiter.done():
                (first,) = first_sequences
                sequence = None if first == NO_SEQUENCE else first
                fields = only.subject, 1, store_id, partition, position, sequence, stored_at_us, self.maybe_duplicate
                waiter.set_result(made(StoredSpan, fields) if many else Receipt(made(StoredSpan, fields)))
            return
        spans: dict[OutgoingRun, StoredSpan] = {}
        ordered: dict[OutgoingRun, OrderedSpan] = {}
        is_delayed = partition >= DELAY_PARTITION
        if self.has_lanes:
            first_sequences = self._ordered_spans(position, stored_at_us, partition, store_id, first_sequences, ordered)
        for run, first in zip(self.runs.values(), first_sequences, strict=True):
            if isinstance(run, OutgoingRun):
                sequence = None if is_delayed or first == NO_SEQUENCE else first
                spans[run] = StoredSpan(
                    run.subject, run.count, store_id, partition, position, sequence, stored_at_us, self.maybe_duplicate
                )
                position += run.count
            else:
                position += 1
        for run, index, count, waiter in waiters:
            if waiter.done():
                continue
            span = spans[run]
            if run in ordered:
                waiter.set_result(ordered[run].part(index, count) if count else ordered[run].receipt(index))
            elif not count:
                waiter.set_result(Receipt(span, index))
            elif index == 0 and count == span.messages:
                waiter.set_result(span)
            else:
                waiter.set_result(span.part(index, count))

    def stored_without(
        self, left_out: Mapping[int, Duplicate], position: int, stored_at_us: int, partition: int, store_id: bytes,
        first_sequences: Sequence[int],
    ) -> None:  # fmt: skip
        """As ``stored``, for a batch without the messages of these ordinals, which repeat unique texts."""
        starts, receipts, firsts = dict[OutgoingRun, int](), list[Receipt](), iter(first_sequences)
        is_delayed = partition >= DELAY_PARTITION
        for name, run in self.runs.items():
            subject, counts = name if type(name) is str else name[0], [1]
            if isinstance(run, OutgoingRun):
                starts[run] = len(receipts)
                counts = run.counts if isinstance(run, OrderedRun) else [run.count]
            for count in counts:
                sequence = next(firsts)
                has_sequence = not is_delayed and sequence != NO_SEQUENCE
                for ordinal in range(len(receipts), len(receipts) + count):
                    first = left_out.get(ordinal)
                    if first is not None:
                        receipts.append(first.receipt(subject, store_id))
                        continue
                    span = StoredSpan(
                        subject, 1, store_id, partition, position, sequence if has_sequence else None, stored_at_us
                    )
                    receipts.append(Receipt(span))
                    position, sequence = position + 1, sequence + 1
        for run, index, count, waiter in self.waiters:
            if waiter.done():
                continue
            places = run.places() if isinstance(run, OrderedRun) else range(run.count)
            own = [receipts[starts[run] + place] for place in places[index : index + (count or 1)]]
            waiter.set_result(ReceiptSpan(tuple(own)) if count else own[0])

    def _ordered_spans(
        self, position: int, stored_at_us: int, partition: int, store_id: bytes, first_sequences: Sequence[int],
        spans: dict[OutgoingRun, OrderedSpan],
    ) -> list[int]:  # fmt: skip
        """Add the spans of ordered runs, and return a first sequence for each of ``runs``."""
        firsts, at = list[int](), 0
        for run in self.runs.values():
            firsts.append(first_sequences[at])
            if isinstance(run, OrderedRun):
                some = first_sequences[at : at + len(run.lanes)]
                known = partition < DELAY_PARTITION and NO_SEQUENCE not in some
                stored = StoredSpan(
                    run.subject, run.count, store_id, partition, position, None, stored_at_us, self.maybe_duplicate
                )
                spans[run] = run.span(stored, some if known else None)
                at += len(run.lanes) - 1
            position += run.count if isinstance(run, OutgoingRun) else 1
            at += 1
        return firsts

    def failed(self, error: QmqError, unknown: bool) -> list[SendFailure]:
        """Wake the waiters with the error; return the failures of the messages without a waiter."""
        outcome = "unknown" if unknown else "refused"
        awaited: dict[OutgoingRun, list[range]] = {}
        for run, index, count, waiter in self.waiters:
            awaited.setdefault(run, []).append(range(index, index + (count or 1)))
            if not waiter.done():
                failures = [
                    SendFailure(number, run.subject, run.key(index + number), error, outcome)
                    for number in range(count or 1)
                ]
                waiter.set_exception(failure_of(failures))
        failures = []
        for name, known in self.runs.items():
            if not isinstance(known, OutgoingRun):
                assert type(name) is str
                failures.append(SendFailure(self.singles[name], name, None, error, outcome))
            elif tickets := known.all_tickets():
                run = known
                taken = set(chain.from_iterable(awaited.get(run, ())))
                left = (index for index in range(len(tickets) + len(taken)) if index not in taken)
                failures += [
                    SendFailure(ticket, run.subject, run.key(index), error, outcome)
                    for ticket, index in zip(tickets, left, strict=True)
                ]
        return failures


class ManyWaiter:
    """Joins the outcomes of one ``send_many``, whose spans may lie in several batches, for one future.

    Make a ``part`` for every span, then call ``seal``; the future gets its result once all parts have ended.
    """

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._parts: list[SpanWaiter] = []
        self._left = 1  # seal counts as one

    def part(self, count: int) -> Waiter:
        """Return the waiter for the next *count* messages."""
        start = self._parts[-1].start + self._parts[-1].count if self._parts else 0
        part = SpanWaiter(self, start, count)
        self._parts.append(part)
        self._left += 1
        return part

    def cut(self, part: SpanWaiter, start: int, stop: int) -> Waiter:
        """Return the waiter for messages [start, stop) of a part. The cuts of a part come in order, and cover it."""
        if start == 0 and stop == part.count:
            return part
        cut = SpanWaiter(self, part.start + start, stop - start)
        at = self._parts.index(part)
        if stop == part.count:
            self._parts[at] = cut
        else:
            self._parts.insert(at, cut)
            self._left += 1
        return cut

    def cut_up(self, part: SpanWaiter) -> list[Waiter]:
        """Return a waiter for each message of a part."""
        singles = [SpanWaiter(self, part.start + index, 1) for index in range(part.count)]
        at = self._parts.index(part)
        self._parts[at : at + 1] = singles
        self._left += len(singles) - 1
        return list(singles)

    def seal(self) -> None:
        """End the list of parts."""
        self.ended()

    def cancelled(self) -> bool:
        """Return whether the future has ended, so that nothing waits any more."""
        return self._waiter.done()

    def ended(self) -> None:
        """Count a part that has ended; after the last one, give the future its result."""
        self._left -= 1
        if self._left or self._waiter.done():
            return
        failures = [failure for part in self._parts for failure in part.failures]
        if failures:
            self._waiter.set_exception(failure_of(failures))
        else:
            self._waiter.set_result(Receipts([part.span for part in self._parts if part.span is not None]))


class SpanWaiter:
    """The waiter for one span of a ManyWaiter: messages [start, start + count) of the call."""

    __slots__ = ("_many", "count", "failures", "span", "start")

    def __init__(self, many: ManyWaiter, start: int, count: int) -> None:
        self._many = many
        self.start = start
        self.count = count
        self.span: AnySpan | None = None
        self.failures: list[SendFailure] = []

    def done(self) -> bool:
        return self._many.cancelled()

    def cut(self, start: int, stop: int) -> Waiter:
        """Return the waiter for messages [start, stop) of this part."""
        return self._many.cut(self, start, stop)

    def cut_up(self) -> list[Waiter]:
        """Return a waiter for each message of this part."""
        return self._many.cut_up(self)

    def set_result(self, result: AnySpan, /) -> None:
        self.span = result
        self._many.ended()

    def set_exception(self, error: SendFailed, /) -> None:
        self.failures = error.failures
        for failure in self.failures:
            failure.ticket += self.start
        self._many.ended()


def failure_of(failures: list[SendFailure], more: int = 0) -> SendFailed:
    """Return the error for *failures*, at least one; *more*: the count of further ones, which are not listed."""
    first = failures[0]
    kind = SendUnknown if all(failure.outcome == "unknown" for failure in failures) else SendFailed
    total = len(failures) + more
    if kind is SendUnknown:
        outcome = "it is not known whether they were stored" if total > 1 else "it is not known whether it was stored"
    else:
        outcome = "not stored"
    messages = f"1 message to {first.subject!r}" if total == 1 else f"{total} messages, the first to {first.subject!r}"
    error = kind(f"{messages}: {outcome}: {first.error}", failures)
    error.__cause__ = first.error
    return error
