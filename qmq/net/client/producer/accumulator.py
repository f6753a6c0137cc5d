"""The accumulator collects messages into batches by subject, in order and bounded, without I/O; time is an argument.

There is one open batch for each BatchKind. Of the delayed ones, and of the others, only one has a subject, so that its
order holds: before a message of it goes into another one, the batch that has the subject is sealed. A message that does
not expire joins the batch that has its subject, also if that is one of messages that expire. A batch is also sealed
when it is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import MessageTooLarge, QueueFull
from qmq.format.build import (
    NO_HEADER,
    SHORT_KEY_OVERHEAD,
    AnyHeader,
    MessageHeader,
    full_header,
    shortened,
    sizes_of_headers,
)
from qmq.format.lanes import ORDERED_KINDS, priority_lane_of
from qmq.format.layout import LANE_NORMAL, LANE_ORDERED, MAX_RUNS, RUN_SIZE
from qmq.names import check_subject
from qmq.net.client.producer.batch import (
    ANY_BROKER,
    BATCH_OVERHEAD,
    DELAYED_OVERHEAD,
    MESSAGE_OVERHEAD,
    RUN_OVERHEAD,
    ManyWaiter,
    OutgoingBatch,
    Waiter,
)
from qmq.net.client.producer.duplicates import no_unique_texts
from qmq.net.client.producer.ordered import OrderedRun, key_of, order_key_of
from qmq.net.client.producer.run import OutgoingRun, RunName, Sizes, name_of
from qmq.net.protocol.frames import FRAME_SIZE

#: A batch is sealed at about this many bytes, so that the broker works on it while the next one is made.
BATCH_BYTES: Final = 1 << 20
_FRAME_MARGIN: Final = 1_024  # bytes of max_frame_bytes that a batch leaves free
_CHECKED_MAX: Final = 200_000
#: Bytes of a message with an order key beside header and body: each may begin a run.
ORDERED_OVERHEAD: Final = MESSAGE_OVERHEAD + RUN_SIZE
#: Bytes of a run of one plain message beside its body and its subject's name.
_SINGLE_OVERHEAD: Final = MESSAGE_OVERHEAD + RUN_OVERHEAD
# Batches of add_single have at most MAX_RUNS runs, without a check.
assert BATCH_BYTES // (_SINGLE_OVERHEAD + 1) < MAX_RUNS


Takes = Callable[[int], bool]
#: The bodies, tickets and headers of a run; None: its messages have no headers.
Appendable = tuple[list[bytes], list[int], list[AnyHeader] | None]


def _takes_any(broker: int) -> bool:
    return True


class BatchKind(NamedTuple):
    """The properties that all messages of a batch share: their durability, whether they are delayed and may expire, the
    broker that they have to go to, and whether they have unique texts.
    """

    flush: bool
    delayed: bool
    expires: bool = False
    broker: int = ANY_BROKER
    unique: bool = False


class SendLimits(NamedTuple):
    """The broker's limits for sends."""

    max_frame_bytes: int = 16 << 20
    max_message_bytes: int = 4 << 20
    producer_window: int = 64
    #: Seconds for which moving bytes may extend a send_timeout: the broker remembers the producer for longer.
    most_moved_s: float = 900.0
    #: The size of batches, of which a larger message alone is one. A link that is too slow for them gets smaller ones.
    batch_bytes: int = BATCH_BYTES
    #: Whether the broker knows unique texts.
    takes_unique: bool = True


class Accumulator:
    """Takes messages, and returns batches. ``flush`` is the durability that most messages have."""

    def __init__(self, flush: bool, linger: float, max_queued_bytes: int) -> None:
        # The short cut of send_nowait: the runs by subject that take plain messages of the usual durability, and the
        # bytes that still fit into their batch. The next call of a method counts the used part of ``room``.
        self.plain: dict[str, Appendable] = {}
        #: The runs that take messages with a short key and nothing else: it stands for the header.
        self.keyed: dict[str, Appendable] = {}
        #: The runs that take messages with a short order key and nothing else; it stands for the header.
        self.ordered: dict[str, Appendable] = {}
        self.room = 0
        self.ticket = 0
        # The short cut of add_single: the runs of the open batch, and the tickets of its single messages.
        self._single_runs: dict[RunName, OutgoingRun | bytes | None] | None = None
        self._single_tickets: dict[RunName, int] = {}
        # The short cut of _place: the run of plain messages with unique texts that got the last one, and its batch.
        self._unique_run: tuple[str, bool, OutgoingBatch, OutgoingRun] | None = None
        # The short cut of _append: the runs of the open batch of the usual durability, and its waiters.
        self._open_runs: dict[RunName, OutgoingRun | bytes | None] = {}
        self._open_waiters: list[tuple[OutgoingRun, int, int, Waiter]] = []
        # Its last run of messages with order keys.
        self._last_ordered: OutgoingRun | None = None
        #: With several brokers: returns the one to which messages of an order key go. None: there is one.
        self.broker_of: Callable[[str], int] | None = None
        #: Batches that have not ended, oldest first.
        self.unfinished: dict[OutgoingBatch, None] = {}
        self._flush = flush
        self._usual = BatchKind(flush, False)
        self._linger = linger
        self._max_queued_bytes = max_queued_bytes
        self._queued_bytes = 0
        self._room_before = 0
        self._open: dict[BatchKind, OutgoingBatch] = {}
        self._sealed: deque[OutgoingBatch] = deque()
        self._checked: set[str] = set()  # subjects
        self.set_limits(SendLimits())

    def set_limits(self, limits: SendLimits) -> None:
        """Use the limits of another broker."""
        self._settle()
        self._close_short_cut()  # it depends on the limits
        self._limits = limits
        self._batch_bytes = min(limits.batch_bytes, limits.max_frame_bytes - _FRAME_MARGIN)
        self._may_cut_short = self._batch_bytes <= limits.max_message_bytes
        # A message up to this size is within all limits.
        self._free_bytes = min(self._batch_bytes - _FRAME_MARGIN, limits.max_message_bytes)

    # --- in ----------------------------------------------------------------------------------------------------------

    def check(self, subject: str, body_size: int, header_size: int) -> None:
        """Check the subject and size of a message. Raises InvalidName, MessageTooLarge."""
        if subject not in self._checked:
            check_subject(subject)
            if len(self._checked) >= _CHECKED_MAX:
                self._checked.clear()
            self._checked.add(subject)
        if body_size + header_size <= self._free_bytes:
            return
        limits = self._limits
        frame_room = limits.max_frame_bytes - FRAME_SIZE - BATCH_OVERHEAD - RUN_OVERHEAD - MESSAGE_OVERHEAD
        most = min(limits.max_message_bytes, frame_room - len(subject))
        if body_size + header_size > most:
            raise MessageTooLarge(
                f"a message to {subject!r} has {body_size + header_size} bytes; the broker takes at most {most} "
                "(its max_message_bytes and max_frame_bytes); send it in parts or raise the limit"
            )

    def check_nowait(self, subject: str, body_size: int, header_size: int, more_queued: int = 0) -> None:
        """Do as ``check``, and raise QueueFull if the queue is full; *more_queued*: bytes queued outside of here."""
        if subject not in self._checked or body_size + header_size > self._free_bytes:
            self.check(subject, body_size, header_size)
        queued = self._queued_bytes + self._room_before - self.room + more_queued
        if queued + body_size + header_size + MESSAGE_OVERHEAD > self._max_queued_bytes:
            raise QueueFull(
                f"{queued} bytes are queued, and max_queued_bytes is {self._max_queued_bytes}; "
                "call drain() between calls of send_nowait"
            )

    def check_unique(self) -> None:
        """Raise InvalidOption where the broker knows no unique texts."""
        if not self._limits.takes_unique:
            raise no_unique_texts()

    def add(
        self, subject: str, body: bytes, header: MessageHeader, flush: bool, waiter: Waiter, now: float,
        unique: str | None = None,
    ) -> bool:  # fmt: skip
        """Add a message with a waiter; return whether a turn of the link has to look for a batch. *unique* is its
        unique text, whose hash is in the header. Raises InvalidName, MessageTooLarge.
        """
        run = self._append(subject, body, header, flush) if unique is None else None
        if run is not None:
            self._open_waiters.append((run, len(run.bodies) - 1, 0, waiter))
            return False
        self.check(subject, len(body), len(header.packed))
        batch, run = self._place(subject, body, header, flush, now, unique)
        batch.waiters.append((run, len(run.bodies) - 1, 0, waiter))
        return True

    def add_plain(self, subject: str, body: bytes, waiter: Waiter) -> bool:
        """Add a plain message of the usual durability with a waiter to the open run of its subject; return False, with
        nothing changed, where there is none, or where it has headers or no room.
        """
        run = self._open_runs.get(subject)
        room = self.room - len(body) - MESSAGE_OVERHEAD
        if type(run) is not OutgoingRun or room < 0 or run.headers is not None:
            return False
        self.room = room
        bodies = run.bodies
        self._open_waiters.append((run, len(bodies), 0, waiter))
        bodies.append(body)
        return True

    def append_unique(self, subject: str, body: bytes, unique: bytes, flush: bool) -> OutgoingRun | None:
        """Append a message that has a unique text, of that hash, and nothing else, to the open run that got the last
        such message, if that is of its subject and durability and has room; return the run.
        """
        if (known := self._unique_run) is None:
            return None
        last, last_flush, batch, run = known
        size = len(body) + SHORT_KEY_OVERHEAD + len(unique) + MESSAGE_OVERHEAD
        if last != subject or last_flush is not flush or run.headers is None or size > self._free_bytes:
            return None
        if batch.size + size > self._batch_bytes:
            return None
        self._settle()
        run.headers.append(unique)
        run.bodies.append(body)
        batch.size += size
        self._queued_bytes += size
        self._measure_room()
        return run

    def add_unique(self, subject: str, body: bytes, unique: bytes, flush: bool, waiter: Waiter) -> bool:
        """Do as ``append_unique``, with a waiter; return False, with nothing changed, where there is no such run."""
        run = self.append_unique(subject, body, unique, flush)
        if run is None:
            return False
        assert self._unique_run is not None
        self._unique_run[2].waiters.append((run, len(run.bodies) - 1, 0, waiter))
        return True

    def append_unique_nowait(self, subject: str, body: bytes, unique: bytes, flush: bool) -> int:
        """Do as ``append_unique``, without a waiter, for a message that was checked; return its ticket. 0: there is no
        such run.
        """
        run = self.append_unique(subject, body, unique, flush)
        if run is None:
            return 0
        self.ticket = ticket = self.ticket + 1
        run.add_ticket(ticket)
        return ticket

    def append_nowait(self, subject: str, body: bytes, header: MessageHeader, flush: bool) -> int:
        """Append a message without a waiter to the open run of its subject; return its ticket. 0: there is no such run,
        or no room in it.
        """
        run = self._append(subject, body, header, flush)
        if run is None:
            return 0
        self.ticket = ticket = self.ticket + 1
        tickets = run.tickets
        if tickets is not None:
            tickets.append(ticket)
        else:
            self._add_ticket(run, ticket)
        return ticket

    def _add_ticket(self, run: OutgoingRun, ticket: int) -> None:
        """Give the last message a ticket. The second one opens the short cut of plain messages, or of those with a
        key.
        """
        run.add_ticket(ticket)
        if run.tickets is None or not self._may_cut_short:
            return
        if run.headers is None:
            if run.lane == LANE_NORMAL:
                self.plain[run.subject] = run.bodies, run.tickets, None
            return
        if run.lane == LANE_NORMAL:
            runs = self.keyed
        elif run is self._last_ordered and run.lane == LANE_ORDERED:
            runs = self.ordered
        else:
            return
        if run.subject not in runs:  # as texts, all headers of a batch are packed at once
            run.headers[:] = map(shortened, run.headers)
            runs[run.subject] = run.bodies, run.tickets, run.headers

    def _append(self, subject: str, body: bytes, header: MessageHeader, flush: bool) -> OutgoingRun | None:
        """Append a message to the run of its subject in the open batch of the usual durability, if it is there and has
        room, so that the message needs no check; return the run.
        """
        if header is NO_HEADER:
            run = self._open_runs.get(subject)
            room = self.room - len(body) - MESSAGE_OVERHEAD
            if type(run) is not OutgoingRun or room < 0 or flush != self._flush:
                return None
            self.room = room
            if run.headers is not None:
                run.headers.append(header)
            run.bodies.append(body)
            return run
        lane = header.lane
        run = self._open_runs.get(name_of(subject, lane) if lane else subject)
        if lane >= LANE_ORDERED and run is not self._last_ordered:
            return None  # a message of its order key may be in a run behind this one
        room = self.room - len(body) - len(header.packed) - (ORDERED_OVERHEAD if lane else MESSAGE_OVERHEAD)
        if (
            not isinstance(run, OutgoingRun) or room < 0 or flush != self._flush
            or header.deliver_at or header.expire_at or (lane >= LANE_ORDERED and self.broker_of is not None)
        ):  # fmt: skip
            return None
        self.room = room
        if lane:
            run.append(body, header)
            return run
        if run.headers is None:
            run.headers = [NO_HEADER] * len(run.bodies)
            self.plain.pop(subject, None)
        run.headers.append(header)
        run.bodies.append(body)
        return run

    def take_single(self, subject: str, body: bytes, waiter: Waiter, now: float) -> OutgoingBatch | None:
        """Return a batch of one plain message of the usual durability, to which the hash of a unique text may be added;
        None if it has to queue or to be checked.
        """
        if self.unfinished or self._linger or subject not in self._checked or len(body) > self._free_bytes:
            return None
        batch = OutgoingBatch(self._flush, now)
        self._queued_bytes += batch.add_single(subject, body, waiter)
        self.unfinished[batch] = None
        return batch

    def add_nowait(
        self, subject: str, body: bytes, header: MessageHeader, flush: bool, now: float, unique: str | None = None
    ) -> int:
        """Add a checked message without a waiter; return its ticket."""
        batch, run = self._place(subject, body, header, flush, now, unique)
        self.ticket = ticket = self.ticket + 1
        if batch.runs is self._open_runs:
            self._add_ticket(run, ticket)
        else:
            run.add_ticket(ticket)
        return ticket

    def add_single(self, subject: str, body: bytes) -> int:
        """Add the first or second message of a subject to the open batch of the usual durability; return its ticket.

        0: this short cut does not apply.
        """
        runs = self._single_runs
        if runs is None:
            return 0
        if subject in runs:
            return self._add_second(runs, subject, body)
        if subject not in self._checked:
            return 0
        room = self.room - len(body) - len(subject) - _SINGLE_OVERHEAD
        if room < 0:
            return 0
        self.room = room
        runs[subject] = body
        self.ticket = ticket = self.ticket + 1
        self._single_tickets[subject] = ticket
        return ticket

    def _add_second(self, runs: dict[RunName, OutgoingRun | bytes | None], subject: str, body: bytes) -> int:
        """Add the second message of a subject; the next ones take the short cut of *plain*. 0: it does not apply."""
        first = runs[subject]
        room = self.room - len(body) - MESSAGE_OVERHEAD
        if type(first) is not bytes or room < 0:
            return 0
        self.room = room
        run = runs[subject] = OutgoingRun(subject)
        run.bodies = bodies = [first, body]
        self.ticket = ticket = self.ticket + 1
        run.tickets = tickets = [self._single_tickets.pop(subject), ticket]
        self.plain[subject] = bodies, tickets, None
        return ticket

    def add_many(
        self, subject: str, bodies: Sequence[bytes], flush: bool, waiter: Waiter, now: float,
        header: MessageHeader = NO_HEADER, headers: Sequence[AnyHeader] | None = None,
        unique: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Add the bodies (at least one) to as few batches as their size allows. *headers*: one for each body, with the
        times of *header*, and with order keys if that has one of ORDERED_KINDS as lane; without them *header* is that
        of all. *unique*: the unique texts, whose hashes are in *headers*. Raises as ``add``.
        """
        start, count = 0, len(bodies)
        sizes = np.fromiter(map(len, bodies), np.int64, count)
        known = sizes.astype("<u4")
        if headers is None:
            sizes += len(header.packed)
        else:
            sizes += sizes_of_headers(headers)
        total = int(sizes.sum())
        self.check(subject, total if total <= self._limits.max_message_bytes else int(sizes.max()), 0)
        self._settle()
        if (headers is not None or header is not NO_HEADER) and not header.lane:
            self.plain.pop(subject, None)
        many = ManyWaiter(waiter)
        has_bound = header.lane in ORDERED_KINDS or (unique is not None and header.lane < LANE_ORDERED)
        if headers is not None and has_bound and self.broker_of is not None:
            texts: Iterable[str | None] = repeat(None) if unique is None else unique
            lane, has_unique = priority_lane_of(header.lane), unique is not None
            for body, one, text in zip(bodies, headers, texts, strict=False):  # each may go to another broker
                full = full_header(one, has_unique, lane)
                batch, run = self._place(subject, body, full, flush, now, text)
                batch.waiters.append((run, len(run.bodies) - 1, 1, many.part(1)))
            many.seal()
            return
        overhead = ORDERED_OVERHEAD if header.lane else MESSAGE_OVERHEAD
        step = max(1, self._batch_bytes // (total // count + overhead))  # the count that fits on average
        while start < count:
            some = slice(start, start + step)
            part = bodies if count <= step else bodies[some]
            own = None if headers is None else headers[some]
            text = None if unique is None else unique[0]
            start += self._place_some(subject, part, known[some], sizes[some], flush, many, now, header, own, text)
        many.seal()

    def _place(
        self, subject: str, body: bytes, header: MessageHeader, flush: bool, now: float, unique: str | None = None
    ) -> tuple[OutgoingBatch, OutgoingRun]:
        """Add a message to an open batch; return the batch and the run, whose last message it is."""
        if unique is not None and (known := self._unique_run) is not None:
            last, last_flush, into, last_run = known
            size = len(body) + len(header.packed) + MESSAGE_OVERHEAD
            is_like = last == subject and last_flush is flush and not _has_own_batch(header)
            if is_like and into.size + size <= self._batch_bytes:
                self._settle()
                last_run.append(body, header)
                into.size += size
                self._queued_bytes += size
                self._measure_room()
                return into, last_run
        self._settle()
        lane = header.lane
        name = name_of(subject, lane) if lane else subject
        kind = self._kind_of(subject, name, flush, header, unique)
        size = len(body) + len(header.packed) + MESSAGE_OVERHEAD + _more_of(kind, lane)
        self._seal_disorder(name, kind, header)
        batch = self._open.get(kind)
        run = batch.run_of(name) if batch is not None else None
        if batch is None or run is None or batch.size + size > self._batch_bytes:
            batch, run = self._open_for(name, size, kind, now)
        run.append(body, header)
        if type(run) is OrderedRun and run is not batch.ordered[-1]:
            batch.note_keys(run)
        batch.size += size
        self._queued_bytes += size
        if unique is not None and kind == BatchKind(flush, False, unique=True) and not lane:
            self._unique_run = subject, flush, batch, run
        if header is not NO_HEADER and not lane:
            self.plain.pop(subject, None)
        self._measure_room()
        return batch, run

    def _place_some(
        self, subject: str, bodies: Sequence[bytes], sizes: Sizes, sizes_with_headers: npt.NDArray[np.int64],
        flush: bool, many: ManyWaiter, now: float, header: MessageHeader, headers: Sequence[AnyHeader] | None,
        unique: str | None,
    ) -> int:  # fmt: skip
        """Add as many of the bodies as fit (at least one) to an open batch; return their count. *unique* is one of
        their unique texts.
        """
        name = name_of(subject, header.lane)
        kind = self._kind_of(subject, name, flush, header, unique)
        size = int(sizes_with_headers.sum()) + (MESSAGE_OVERHEAD + _more_of(kind, header.lane)) * len(bodies)
        if size > self._batch_bytes and len(bodies) > 1:  # larger than the average: halve until they fit
            half = len(bodies) // 2
            own = None if headers is None else headers[:half]
            return self._place_some(
                subject, bodies[:half], sizes[:half], sizes_with_headers[:half], flush, many, now, header, own, unique
            )
        if (before := self._open.get(kind)) is not None and len(before.ordered) > 1:
            for one in (header,) if headers is None else headers:
                self._seal_disorder(name, kind, one)
        batch, run = self._open_for(name, size, kind, now)
        index = run.extend(bodies, header, sizes, headers)
        if type(run) is OrderedRun and run is not batch.ordered[-1]:
            batch.note_keys(run)
        batch.waiters.append((run, index, len(bodies), many.part(len(bodies))))
        batch.size += size
        self._queued_bytes += size
        self._measure_room()
        return len(bodies)

    def _open_for(self, name: RunName, size: int, kind: BatchKind, now: float) -> tuple[OutgoingBatch, OutgoingRun]:
        """Return an open batch of that kind with space for *size* bytes, and its run of that name; maybe new ones."""
        batch, run_bytes = self._open.get(kind), RUN_OVERHEAD + len(name if type(name) is str else name[0])
        if batch is not None:
            run = batch.run_of(name)
            needed = size if run is not None else size + run_bytes
            if batch.size + needed > self._batch_bytes or (run is None and len(batch.runs) == MAX_RUNS):
                self._seal(kind)
                batch = None
            elif run is not None:
                return batch, run
        is_ordered = type(name) is tuple and name[1] >= LANE_ORDERED
        for other in list(self._open):
            same_order = other.delayed == kind.delayed and other.broker == kind.broker
            before = self._open[other]
            if same_order and other != kind and (name in before.runs or (is_ordered and before.ordered)):
                self._seal(other)
        if batch is None:
            batch = self._open[kind] = OutgoingBatch(kind.flush, now)
            batch.broker, batch.has_unique = kind.broker, kind.unique
            self.unfinished[batch] = None
            if kind == self._usual and self._may_cut_short:
                self._open_runs, self._open_waiters = batch.runs, batch.waiters
            self._open_single()
        run = batch.new_run(name)
        if is_ordered and batch.runs is self._open_runs:
            self.ordered, self._last_ordered = {}, run
        batch.size += run_bytes
        self._queued_bytes += run_bytes
        return batch, run

    def _seal_disorder(self, name: RunName, kind: BatchKind, header: AnyHeader) -> None:
        """Seal the open batch of that kind where a message of that name would come before an earlier one of its order
        key in another subject: runs lie in the order in which they were begun.
        """
        batch = self._open.get(kind)
        if type(name) is not tuple or name[1] < LANE_ORDERED or batch is None or len(batch.ordered) < 2:
            return
        run = batch.run_of(name)
        if isinstance(run, OrderedRun) and run is not batch.ordered[-1] and not batch.may_follow(run, key_of(header)):
            self._seal(kind)

    def _kind_of(
        self, subject: str, name: RunName, flush: bool, header: MessageHeader, unique: str | None
    ) -> BatchKind:
        """Return the kind of batch for a message to the run of that name."""
        broker = ANY_BROKER
        if self.broker_of is not None:
            if header.lane >= LANE_ORDERED:
                broker = self.broker_of(order_key_of(header))
            elif unique is not None:
                broker = self.broker_of(unique)
        delayed, has_unique = header.deliver_at > 0, unique is not None
        kind = BatchKind(flush, delayed, True, broker, has_unique)
        if header.expire_at or ((batch := self._open.get(kind)) is not None and name in batch.runs):
            return kind
        return BatchKind(flush, delayed, False, broker, has_unique)

    def _seal(self, kind: BatchKind) -> None:
        """Seal the open batch of that kind: no more messages go into it."""
        self._settle()
        self._unique_run = None
        self._sealed.append(self._open.pop(kind))
        if kind == self._usual:
            self._close_short_cut()
        self._open_single()

    def _open_single(self) -> None:
        """Enable add_single while only the batch of the usual durability is open: then no other one has the subject."""
        batch = self._open.get(self._usual)
        if batch is not None and len(self._open) == 1 and self._may_cut_short:
            self._single_runs, self._single_tickets = batch.runs, batch.singles
        else:
            self._single_runs = None

    # --- out ---------------------------------------------------------------------------------------------------------

    # *takes* says whether a window takes a batch for that broker.

    def take(self, now: float, hurry: bool, takes: Takes = _takes_any) -> OutgoingBatch | None:
        """Return the next batch to send: a sealed one, else the oldest open one after its linger (or in a *hurry*)."""
        for batch in self._sealed:
            if takes(batch.broker):
                self._sealed.remove(batch)
                return batch
        for kind, batch in self._open.items():  # in the order in which they were opened
            if takes(kind.broker):
                if hurry or now >= batch.opened_at + self._linger:
                    self._seal(kind)
                    return self._sealed.pop()
                break
        return None

    def next_at(self, takes: Takes = _takes_any) -> float | None:
        """Return the time from which ``take`` has a batch; None: there are no messages."""
        for batch in self._sealed:
            if takes(batch.broker):
                return batch.opened_at
        for batch in self._open.values():
            if takes(batch.broker):
                return batch.opened_at + self._linger
        return None

    def has_sealed(self, takes: Takes = _takes_any) -> bool:
        """Return whether there is a sealed batch."""
        return any(takes(batch.broker) for batch in self._sealed)

    def has_any(self, takes: Takes = _takes_any) -> bool:
        """Return whether there are messages that ``take`` has not returned."""
        return self.has_sealed(takes) or any(takes(batch.broker) for batch in self._open.values())

    def has_bound(self) -> bool:
        """Return whether there are messages that have to go to a certain broker."""
        return self.broker_of is not None and self.has_any(lambda broker: broker != ANY_BROKER)

    def remove(self, is_over: Callable[[float], bool], takes: Takes = _takes_any) -> list[OutgoingBatch]:
        """Remove and return the batches whose messages wait since a time for which *is_over* is true."""
        removed = [batch for batch in self._sealed if takes(batch.broker) and is_over(batch.opened_at)]
        for batch in removed:
            self._sealed.remove(batch)
        for kind, batch in list(self._open.items()):
            if takes(kind.broker) and is_over(batch.opened_at + self._linger):
                self._seal(kind)
                self._sealed.remove(batch)
                removed.append(batch)
        return removed

    def seal_due(self, now: float, takes: Takes = _takes_any) -> None:
        """Seal the open batches that could be sent: messages that come later wait in others, and for their own time."""
        for kind, batch in list(self._open.items()):
            if takes(kind.broker) and now >= batch.opened_at + self._linger:
                self._seal(kind)

    def ended(self, batch: OutgoingBatch) -> None:
        """Forget a batch that is stored or has failed."""
        if self._open:
            self._settle()
        self._queued_bytes -= batch.size - BATCH_OVERHEAD
        if self._open:
            self._measure_room()
        del self.unfinished[batch]

    def replaced(self, batch: OutgoingBatch, parts: Sequence[OutgoingBatch]) -> None:
        """Replace a batch by *parts*, which have its messages."""
        del self.unfinished[batch]
        self.unfinished.update(dict.fromkeys(parts))

    def unawaited(self) -> int:
        """[any thread] Return the count of messages without a waiter that have not ended."""
        return sum(batch.unawaited() for batch in list(self.unfinished))

    # --- bytes -------------------------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """The bytes of all messages that have not ended, with their columns."""
        return self._queued_bytes + self._room_before - self.room

    def is_crowded(self, more_queued: int = 0) -> bool:
        """Return whether a fuller queue would not make sends faster; *more_queued*: bytes queued outside of here."""
        return self.queued_bytes + more_queued > self._max_queued_bytes // 4

    def is_drained(self) -> bool:
        """Return whether the queue has shrunk so far that more sends make sense."""
        return self.queued_bytes <= self._max_queued_bytes // 8

    def _measure_room(self) -> None:
        batch = self._open.get(self._usual)
        if batch is not None:
            in_batch, in_queue = self._batch_bytes - batch.size, self._max_queued_bytes - self._queued_bytes
            self.room = self._room_before = in_batch if in_batch < in_queue else in_queue

    def _settle(self) -> None:
        """Count the bytes that came by the short cuts."""
        used = self._room_before - self.room
        if used:
            self._open[self._usual].size += used
            self._queued_bytes += used
            self._room_before = self.room

    def _close_short_cut(self) -> None:
        self.plain = {}
        self.keyed = {}
        self.ordered, self._last_ordered = {}, None
        self.room = self._room_before = 0
        self._open_runs, self._open_waiters = {}, []
        self._single_runs = None


def _has_own_batch(header: MessageHeader) -> bool:
    """Return whether messages with that header are in other batches, or runs, than plain ones."""
    return bool(header.lane or header.deliver_at or header.expire_at)


def _more_of(kind: BatchKind, lane: int) -> int:
    """Return the bytes of a message in the columns of delayed and expiring messages, and in a run of its slot."""
    return DELAYED_OVERHEAD * (kind.delayed + kind.expires) + RUN_SIZE * (lane > 0)
