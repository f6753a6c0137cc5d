"""Messages on their way into batches: grouped by subject, kept in order, bounded. Without I/O; time is an argument.

Messages gather in a batch for each durability, and delayed ones in batches of their own. Of the same sort a subject is
in one of them: where a message of it would go into the other, the one that has it is sealed first. A batch is sealed
too when it is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import MessageTooLarge, QueueFull
from qmq.format.build import NO_HEADER, MessageHeader
from qmq.format.layout import MAX_RUNS
from qmq.names import check_subject
from qmq.net.client.producer.batch import (
    BATCH_OVERHEAD,
    DELAYED_OVERHEAD,
    MESSAGE_OVERHEAD,
    RUN_OVERHEAD,
    ManyWaiter,
    Outgoing,
    OutgoingRun,
    Sizes,
    Waiter,
)
from qmq.net.protocol.frames import FRAME_SIZE

#: A batch is sealed at about this many bytes, so that the broker works on it while the next one is made.
BATCH_BYTES: Final = 1 << 20
_FRAME_ROOM: Final = 1_024  # left of max_frame_bytes
_CHECKED_MAX: Final = 200_000
#: What a run of one plain message takes beside its body and its subject's name.
_SINGLE_OVERHEAD: Final = MESSAGE_OVERHEAD + RUN_OVERHEAD
# So that no batch has too many runs for its counts.
assert BATCH_BYTES // (_SINGLE_OVERHEAD + 1) < MAX_RUNS


class Sort(NamedTuple):
    """Messages that may go as one batch: those of one durability, delayed or not, that expire or not."""

    flush: bool
    delayed: bool
    expires: bool = False


class SendLimits(NamedTuple):
    """What the broker takes."""

    max_frame_bytes: int = 16 << 20
    max_message_bytes: int = 4 << 20
    producer_window: int = 64


class Accumulator:
    """Takes messages, gives batches. ``flush`` is the durability that most messages will have."""

    def __init__(self, flush: bool, linger: float, max_queued_bytes: int) -> None:
        # send_nowait's short cut: bodies and tickets of the runs that take plain messages of the usual durability, and
        # the bytes that still fit into their batch. What it uses of ``room`` is booked by the next call of any other.
        self.plain: dict[str, tuple[list[bytes], list[int]]] = {}
        self.room = 0
        self.ticket = 0
        # Another one: the runs of the open batch and the tickets of its single messages, for add_single.
        self._single_runs: dict[str, OutgoingRun | bytes | None] | None = None
        self._single_tickets: dict[str, int] = {}
        #: Batches that have not ended, oldest first.
        self.unfinished: dict[Outgoing, None] = {}
        self._flush = flush
        self._usual = Sort(flush, False)
        self._linger = linger
        self._max_queued_bytes = max_queued_bytes
        self._queued_bytes = 0
        self._room_before = 0
        self._open: dict[Sort, Outgoing] = {}
        self._sealed: deque[Outgoing] = deque()
        self._checked: set[str] = set()  # subjects
        self.set_limits(SendLimits())

    def set_limits(self, limits: SendLimits) -> None:
        """What the broker takes from now on."""
        self._settle()
        self._close_short_cut()  # it relies on the limits
        self._limits = limits
        self._batch_bytes = min(BATCH_BYTES, limits.max_frame_bytes - _FRAME_ROOM)
        # A message up to this size needs no look at the limits.
        self._may_cut_short = self._batch_bytes <= limits.max_message_bytes
        self._free_bytes = min(self._batch_bytes - _FRAME_ROOM, limits.max_message_bytes)

    # --- in ----------------------------------------------------------------------------------------------------------

    def check(self, subject: str, body_size: int, header_size: int) -> None:
        """Raise InvalidName or MessageTooLarge for what can't be sent."""
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
                f"a message of {body_size + header_size} bytes to {subject!r} is over what the broker takes "
                f"({most} bytes, from its max_message_bytes and max_frame_bytes); send it in parts or raise the limit"
            )

    def check_nowait(self, subject: str, body_size: int, header_size: int, elsewhere: int = 0) -> None:
        """As ``check``, and raise QueueFull when it does not fit; *elsewhere* as many bytes wait already."""
        if subject not in self._checked or body_size + header_size > self._free_bytes:
            self.check(subject, body_size, header_size)
        queued = self._queued_bytes + self._room_before - self.room + elsewhere
        if queued + body_size + header_size + MESSAGE_OVERHEAD > self._max_queued_bytes:
            raise QueueFull(
                f"{queued} bytes are queued, and max_queued_bytes is {self._max_queued_bytes}; "
                "drain() between calls of send_nowait"
            )

    def add(self, subject: str, body: bytes, header: MessageHeader, flush: bool, waiter: Waiter, now: float) -> None:
        """Take a message that somebody awaits. Raises InvalidName, MessageTooLarge."""
        self.check(subject, len(body), len(header.packed))
        batch, run = self._place(subject, body, header, flush, now)
        batch.waiters.append((run, len(run.bodies) - 1, 0, waiter))

    def add_nowait(self, subject: str, body: bytes, header: MessageHeader, flush: bool, now: float) -> int:
        """Take a message that nobody awaits and that was checked; returns its ticket."""
        _, run = self._place(subject, body, header, flush, now)
        self.ticket = ticket = self.ticket + 1
        run.add_ticket(ticket)
        if run.headers is None and run.tickets is not None and flush == self._flush and self._may_cut_short:
            self.plain[subject] = run.bodies, run.tickets
        return ticket

    def add_single(self, subject: str, body: bytes) -> int:
        """Take the first or second message of a subject into the open batch of the usual durability: its ticket.

        0: not by this short cut.
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

    def _add_second(self, runs: dict[str, OutgoingRun | bytes | None], subject: str, body: bytes) -> int:
        """From here on its messages take the short cut of *plain*. 0: it has more already, or there is no room."""
        first = runs[subject]
        room = self.room - len(body) - MESSAGE_OVERHEAD
        if type(first) is not bytes or room < 0:
            return 0
        self.room = room
        run = runs[subject] = OutgoingRun(subject)
        run.bodies = bodies = [first, body]
        self.ticket = ticket = self.ticket + 1
        run.tickets = tickets = [self._single_tickets.pop(subject), ticket]
        self.plain[subject] = bodies, tickets
        return ticket

    def add_many(
        self, subject: str, bodies: Sequence[bytes], flush: bool, waiter: Waiter, now: float,
        header: MessageHeader = NO_HEADER,
    ) -> None:  # fmt: skip
        """Take the bodies (at least one) into as few batches as their size allows. Raises as ``add``."""
        start, count = 0, len(bodies)
        sizes = np.fromiter(map(len, bodies), np.int64, count)
        total = int(sizes.sum())
        self.check(subject, total if total <= self._limits.max_message_bytes else int(sizes.max()), 0)
        known = sizes.astype("<u4")
        self._settle()
        many = ManyWaiter(waiter)
        step = max(1, self._batch_bytes // (total // count + MESSAGE_OVERHEAD))  # as many as fit on average
        while start < count:
            part = bodies if count <= step else bodies[start : start + step]
            start += self._place_some(subject, part, known[start : start + step], flush, many, now, header)
        many.seal()

    def _place(
        self, subject: str, body: bytes, header: MessageHeader, flush: bool, now: float
    ) -> tuple[Outgoing, OutgoingRun]:
        """Put a message into the batch that is open; returns the batch and its run, where it is the last one."""
        self._settle()
        size = len(body) + len(header.packed) + MESSAGE_OVERHEAD
        sort = self._usual
        if flush != self._flush or header.deliver_at or header.expire_at:
            sort, size = _sort_of(flush, header), size + _more_of(header)
        batch = self._open.get(sort)
        run = batch.run_of(subject) if batch is not None else None
        if batch is None or run is None or batch.size + size > self._batch_bytes:
            batch, run = self._open_for(subject, size, sort, now)
        run.append(body, header)
        batch.size += size
        self._queued_bytes += size
        if header is not NO_HEADER:
            self.plain.pop(subject, None)
        self._measure_room()
        return batch, run

    def _place_some(
        self, subject: str, bodies: Sequence[bytes], sizes: Sizes, flush: bool, many: ManyWaiter, now: float,
        header: MessageHeader,
    ) -> int:  # fmt: skip
        """Put as many of the bodies as fit (at least one) into the batch that is open; returns how many."""
        overhead = MESSAGE_OVERHEAD + _more_of(header)
        size = int(sizes.sum(dtype=np.int64)) + overhead * len(bodies)
        if size > self._batch_bytes and len(bodies) > 1:  # longer than the average: halve until it fits
            half = len(bodies) // 2
            return self._place_some(subject, bodies[:half], sizes[:half], flush, many, now, header)
        batch, run = self._open_for(subject, size, _sort_of(flush, header), now)
        index = run.extend(bodies, header, sizes)
        batch.waiters.append((run, index, len(bodies), many.part(len(bodies))))
        batch.size += size
        self._queued_bytes += size
        self._measure_room()
        return len(bodies)

    def _open_for(self, subject: str, size: int, sort: Sort, now: float) -> tuple[Outgoing, OutgoingRun]:
        """The open batch of that sort with room for *size* bytes, and its run of *subject*; maybe new ones."""
        batch = self._open.get(sort)
        if batch is not None:
            run = batch.run_of(subject)
            needed = size if run is not None else size + RUN_OVERHEAD + len(subject)
            if batch.size + needed > self._batch_bytes or (run is None and len(batch.runs) == MAX_RUNS):
                self._seal(sort)
                batch = None
            elif run is not None:
                return batch, run
        other = sort._replace(flush=not sort.flush)
        if other in self._open and subject in self._open[other].runs:
            self._seal(other)
        if batch is None:
            batch = self._open[sort] = Outgoing(sort.flush, now)
            self.unfinished[batch] = None
            self._open_single()
        run = batch.runs[subject] = OutgoingRun(subject)
        batch.size += RUN_OVERHEAD + len(subject)
        self._queued_bytes += RUN_OVERHEAD + len(subject)
        return batch, run

    def _seal(self, sort: Sort) -> None:
        """Nothing more goes into the open batch of that sort."""
        self._settle()
        self._sealed.append(self._open.pop(sort))
        if sort == self._usual:
            self._close_short_cut()
        self._open_single()

    def _open_single(self) -> None:
        """add_single works while only the batch of the usual durability is open: no other one has the subject then."""
        batch = self._open.get(self._usual)
        if batch is not None and len(self._open) == 1 and self._may_cut_short:
            self._single_runs, self._single_tickets = batch.runs, batch.singles
        else:
            self._single_runs = None

    # --- out ---------------------------------------------------------------------------------------------------------

    def take(self, now: float, hurry: bool) -> Outgoing | None:
        """The next batch to send: a sealed one, else the oldest open one that has lingered enough (in a hurry: any)."""
        if self._sealed:
            return self._sealed.popleft()
        for sort, batch in self._open.items():  # in the order in which they were opened
            if hurry or now >= batch.opened_at + self._linger:
                self._seal(sort)
                return self._sealed.popleft()
            break
        return None

    def next_at(self) -> float | None:
        """When ``take`` gives a batch; None: when there are messages."""
        if self._sealed:
            return self._sealed[0].opened_at
        for batch in self._open.values():
            return batch.opened_at + self._linger
        return None

    def has_sealed(self) -> bool:
        """There is a batch that nothing more goes into."""
        return bool(self._sealed)

    def has_any(self) -> bool:
        """There are messages that were not taken."""
        return bool(self._sealed or self._open)

    def remove(self, is_over: Callable[[float], bool]) -> list[Outgoing]:
        """Take the batches away whose messages wait since a time for which *is_over* says True."""
        removed = []
        while self._sealed and is_over(self._sealed[0].opened_at):
            removed.append(self._sealed.popleft())
        for sort, batch in list(self._open.items()):
            if is_over(batch.opened_at + self._linger):
                self._seal(sort)
                self._sealed.remove(batch)
                removed.append(batch)
        return removed

    def ended(self, batch: Outgoing) -> None:
        """That batch is stored, or has failed."""
        self._settle()
        self._queued_bytes -= batch.size - BATCH_OVERHEAD
        self._measure_room()
        del self.unfinished[batch]

    def replaced(self, batch: Outgoing, parts: Sequence[Outgoing]) -> None:
        """The messages of that batch go as these from now on."""
        del self.unfinished[batch]
        self.unfinished.update(dict.fromkeys(parts))

    # --- bytes -------------------------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Bytes of all messages that have not ended, with their columns."""
        return self._queued_bytes + self._room_before - self.room

    def is_crowded(self, elsewhere: int = 0) -> bool:
        """So much is queued that more would not make anything faster; *elsewhere* as many bytes wait already."""
        return self.queued_bytes + elsewhere > self._max_queued_bytes // 4

    def is_drained(self) -> bool:
        """So little is queued that there is reason for more."""
        return self.queued_bytes <= self._max_queued_bytes // 8

    def _measure_room(self) -> None:
        batch = self._open.get(self._usual)
        if batch is not None:
            in_batch, in_queue = self._batch_bytes - batch.size, self._max_queued_bytes - self._queued_bytes
            self.room = self._room_before = in_batch if in_batch < in_queue else in_queue

    def _settle(self) -> None:
        """Take into the books what came by the short cut."""
        used = self._room_before - self.room
        if used:
            self._open[self._usual].size += used
            self._queued_bytes += used
            self._room_before = self.room

    def _close_short_cut(self) -> None:
        self.plain = {}
        self.room = self._room_before = 0
        self._single_runs = None


def _sort_of(flush: bool, header: MessageHeader) -> Sort:
    return Sort(flush, header.deliver_at > 0, header.expire_at > 0)


def _more_of(header: MessageHeader) -> int:
    """What it takes in the columns that only such messages have."""
    return DELAYED_OVERHEAD * ((header.deliver_at > 0) + (header.expire_at > 0))
