"""One batch that a client sends: from its first message to the broker's answer, or to its failure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, Final, Protocol

import msgpack
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import QmqError, SendFailed, SendFailure, SendUnknown
from qmq.format.build import NO_HEADER, AnyHeader, MessageHeader, build_flat, build_single
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_PREFIX_SIZE,
    DELAY_PARTITION,
    HEADER_CRC_OFFSET,
    NO_SEQUENCE,
    RUN_SIZE,
)
from qmq.format.source import MAX_SENT_BYTES, NO_SOURCE
from qmq.net.client.producer.receipts import Receipt, Receipts, StoredSpan
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
BATCH_OVERHEAD: Final = BATCH_HEADER_SIZE + 16 + MAX_SENT_BYTES

#: The sizes of bodies: little-endian u32.
Sizes = npt.NDArray[np.uint32]

_SEQUENCE_OFFSET: Final = BATCH_PREFIX_SIZE - 12  # producer_sequence u64, before data_crc


class Waiter(Protocol):
    """The waiter for the outcome of messages: an asyncio.Future, or an object that takes a result like one."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: Any, /) -> None: ...


class OutgoingRun:
    """The messages of one subject in a batch.

    ``tickets`` are those of the messages without a waiter, in order. It is None while there are fewer than two: one
    object less for the garbage collector.
    """

    __slots__ = ("bodies", "count", "first_ticket", "headers", "sizes", "subject", "tickets")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.bodies: list[bytes] = []
        self.headers: list[AnyHeader] | None = None
        self.first_ticket = 0
        self.tickets: list[int] | None = None
        self.sizes: list[Sizes] | None = None  # sizes of the bodies that came from send_many
        self.count = 0  # set when the batch is built

    def append(self, body: bytes, header: MessageHeader) -> None:
        """Add a message."""
        if self.headers is not None:
            self.headers.append(header)
        elif header is not NO_HEADER:
            self.headers = [*repeat(NO_HEADER, len(self.bodies)), header]
        self.bodies.append(body)

    def extend(
        self,
        bodies: Sequence[bytes],
        header: MessageHeader = NO_HEADER,
        sizes: Sizes | None = None,
        headers: Sequence[AnyHeader] | None = None,
    ) -> int:
        """Add messages with the same header, or each with its own of *headers*; return the index of the first. *sizes*:
        those of the bodies, if known.
        """
        index = len(self.bodies)
        if self.headers is None and (headers is not None or header is not NO_HEADER):
            self.headers = [NO_HEADER] * index
        if self.headers is not None:
            self.headers += [header] * len(bodies) if headers is None else headers
        self.bodies += bodies
        if sizes is not None:
            if self.sizes is None:
                self.sizes = []
            self.sizes.append(sizes)
        return index

    def lengths(self) -> bytes | None:
        """Return the sizes of the bodies as little-endian u32; None if unknown, or if messages have headers."""
        if self.sizes is None or self.headers is not None or sum(map(len, self.sizes)) != len(self.bodies):
            return None
        return np.concatenate(self.sizes).tobytes()

    def add_ticket(self, ticket: int) -> None:
        """Give the last message, which has no waiter, a ticket."""
        if self.tickets is not None:
            self.tickets.append(ticket)
        elif self.first_ticket:
            self.tickets = [self.first_ticket, ticket]
        else:
            self.first_ticket = ticket

    def all_tickets(self) -> list[int]:
        """Return all tickets."""
        if self.tickets is not None:
            return self.tickets
        return [self.first_ticket] if self.first_ticket else []

    def part(self, start: int, stop: int, awaited: Sequence[range]) -> OutgoingRun:
        """Return messages [start, stop) of a built run, in which the messages in *awaited* have no tickets."""
        part = OutgoingRun(self.subject)
        part.count = stop - start
        part.headers = None if self.headers is None else self.headers[start:stop]
        before, within = (
            end - first - sum(max(0, min(end, one.stop) - max(first, one.start)) for one in awaited)
            for first, end in ((0, start), (start, stop))
        )
        for ticket in self.all_tickets()[before : before + within]:
            part.add_ticket(ticket)
        return part

    def key(self, index: int) -> str | None:
        """Return the key of message *index*."""
        header = NO_HEADER if self.headers is None else self.headers[index]
        if type(header) is str:
            return header
        assert type(header) is MessageHeader
        packed = header.packed
        return msgpack.unpackb(packed).get("k", (None,))[0] if packed else None


class OutgoingBatch:
    """A batch that collects messages, is sealed, built, written (once or several times), and ends stored or failed."""

    buffers: Sequence[bytes] | None = None
    count = 0
    producer_sequence = 0
    first_written_at = 0.0
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
        #: Runs by subject. A single plain message without a waiter is only its body, and None once the batch is built:
        #: with many subjects, an object for each message would take most of the time, half of it in the collector.
        self.runs: dict[str, OutgoingRun | bytes | None] = {}
        self.singles: dict[str, int] = {}  # tickets of single messages by subject
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

    def run_of(self, subject: str) -> OutgoingRun | None:
        """Return the run of *subject* for more messages; None if there is none."""
        found = self.runs.get(subject)
        if type(found) is not bytes:
            return found  # type: ignore[return-value]  # None and OutgoingRun are all that is left
        run = self.runs[subject] = OutgoingRun(subject)
        run.bodies.append(found)
        run.first_ticket = self.singles.pop(subject)
        return run

    def build(self, created_at_us: int, producer_id: bytes, producer_sequence: int, source: bytes = NO_SOURCE) -> None:
        """Build the bytes of the batch, and free the bodies."""
        bodies, counts, headers = self._flat()
        self.buffers = build_flat(
            list(self.runs),
            counts,
            bodies,
            headers,
            created_at_us=created_at_us,
            producer_id=producer_id,
            producer_sequence=producer_sequence,
            lengths=self._lengths(),
            source=source,
        )
        runs = {subject: run for subject, run in self.runs.items() if type(run) is OutgoingRun}
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
        return run.lengths() if type(run) is OutgoingRun else None

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
            assert type(run) is OutgoingRun
            if run.headers is not None:
                headers = [NO_HEADER] * len(bodies) if headers is None else headers
                headers += [NO_HEADER] * (len(bodies) - len(headers))
                headers += run.headers
            bodies += run.bodies
            counts.append(len(run.bodies))
        if headers is not None:
            headers += [NO_HEADER] * (len(bodies) - len(headers))
        return bodies, counts, headers

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
        is_delayed = partition >= DELAY_PARTITION
        for run, first in zip(self.runs.values(), first_sequences, strict=True):
            if type(run) is OutgoingRun:
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
            if not count:
                waiter.set_result(Receipt(span, index))
            elif index == 0 and count == span.messages:
                waiter.set_result(span)
            else:
                waiter.set_result(span.part(index, count))

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
        for subject, known in self.runs.items():
            if type(known) is not OutgoingRun:
                failures.append(SendFailure(self.singles[subject], subject, None, error, outcome))
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
        self.span: StoredSpan | None = None
        self.failures: list[SendFailure] = []

    def done(self) -> bool:
        return self._many.cancelled()

    def cut(self, start: int, stop: int) -> Waiter:
        """Return the waiter for messages [start, stop) of this part."""
        return self._many.cut(self, start, stop)

    def set_result(self, result: StoredSpan, /) -> None:
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
