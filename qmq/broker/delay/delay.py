"""Schedule delayed messages, deliver them when they are due, and cancel them.

A message falls due by being appended to the message log, as a new message whose origin id names the one in the delay
log. That append is the only record of the delivery: at a start, the broker reads from the message log what was
delivered since the last checkpoint, and delivers batches again that a power loss took away. A cancellation is a batch
of the delay log, from which a start updates the schedule. So both survive any crash, and no move between two logs can
be torn apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from qmq.broker.delay.due_batches import DueBatch
from qmq.broker.delay.intake import Arrived, DelayIntake, subjects_of
from qmq.broker.delay.items import DelayedRange, PositionSet, delayed_ranges_of, items_of, without
from qmq.broker.delay.reads import DelayReads
from qmq.broker.delay.segments import DelaySegments
from qmq.broker.ports.commands import Administer, Now, ReadDone
from qmq.broker.ports.effects import Administered, Effect, Refused
from qmq.broker.ports.rights import Rights
from qmq.broker.publish.publish import Intake
from qmq.broker.publish.staging import StagedBatch
from qmq.errors import BadBatch, InvalidOption, QmqError, StorageError
from qmq.format.batch import (
    BatchLimits,
    CheckedBatch,
    Header,
    check_batch,
    clock_us_of,
    parse_header,
    runs_of,
    stored_names,
)
from qmq.format.build import RunContent, build_batch
from qmq.format.copies.due import DUE_PRODUCER, Due, cut_due, due_times, origins_of, runs_between
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_DTYPE, DELAY_PARTITION, HAS_DELIVER_AT, HAS_ORIGIN_ID, MESSAGE_ID
from qmq.names import takes
from qmq.storage.store import NotInMemory, Schedule, ScheduleClaim, Store

#: The most items, messages that were sent one by one, and messages that one tick delivers: about 10 ms at most.
_SLICE_ITEMS: Final = 64
_SLICE_SINGLES: Final = 512
_SLICE_MESSAGES: Final = 4_096
#: The most work of one tick, about 4 ms, as several turns may follow each other. A run that is cut out of a batch
#: counts 1, about 40 us; a batch that is appended counts 2, a message that was sent one by one a quarter, and so many
#: bytes count 1.
_SLICE_WORK: Final = 100
_BATCH_WORK: Final = 2
_BYTES_A_WORK: Final = 64 << 10
#: Items in memory among which a late message is looked for: those of two ticks.
_MOST_LATE: Final = 2 * _SLICE_SINGLES
#: When a failed delivery (a full disk) is tried again, and how often the wall clock is read at least.
_AGAIN_US: Final = 100_000
_LOOK_US: Final = 1_000_000
#: The producer of batches that cancel messages; consumers get nothing of their subject.
CANCEL_PRODUCER: Final = b"qmq: cancelling\0"
_CANCEL_SUBJECT: Final = "cancelled"
#: How many cancellations are remembered for clients that lost the answer, also after the messages would have been due.
_MOST_ANSWERS: Final = 10_000


class DelayedState(NamedTuple):
    """A message of the delay log: delayed, cancelled or dropped; its subject, and when it falls due, or fell."""

    state: str
    subject: str
    due_us: int


class DelayedMessages:
    """The delayed messages of a broker."""

    def __init__(self, store: Store, intake: Intake, effects: list[Effect], rights: Mapping[int, Rights]) -> None:
        """*rights* are those of the connections that have a token."""
        self._store = store
        self._intake = intake
        self._rights = rights
        self._effects = effects
        self._delayed = intake.delay_log = DelayIntake(store, intake.numbering, self._arrived)
        self._reads = DelayReads(store, effects)
        self._segments = DelaySegments(store)
        self._schedule: Schedule = store.groups.delayed()
        self._cancelled = PositionSet()
        #: The newest cancellations: position and subject of the message.
        self._newest_cancelled: dict[int, str] = {}
        #: Messages delivered since a checkpoint that still has them in the schedule.
        self._delivered = PositionSet()
        #: Delivered messages, with where they were stored: no checkpoint has these batches yet.
        self._unclaimed: list[tuple[int, int, DelayedRange]] = []  # partition, end, delivered range
        self._late_us = 0  # messages due by then may have been delivered
        self._try_at_us = 0
        self._most_items = _SLICE_SINGLES  # of the next tick
        #: The number of waiting messages, by subject.
        self.counts: Counter[str] = Counter()
        #: Errors from reading messages that were due.
        self.damaged: list[QmqError] = []

    # --- in -----------------------------------------------------------------------------------------------------------

    def _arrived(self, batch: Arrived) -> None:
        for subject, count in batch.subjects:
            self.counts[subject] += count
        self._push(items_of(batch.position, batch.due))

    def _push(self, items: Any) -> None:
        self._segments.entered(items)
        try:
            self._schedule.push(items)
        except StorageError as error:  # the items are in memory all the same, and the next push writes them
            self.damaged.append(error)

    def cancel(self, command: Administer, now: Now, tries: int = 0) -> None:
        """Cancel one message and answer once the cancellation is on disk. Where bytes must be read first, begin that
        read; *tries* counts the reads made for this command. Raises InvalidOption, StorageError, BadBatch.
        """
        text = command.fields.get("id")
        if not isinstance(text, str):
            raise InvalidOption("cancel needs the id of a message")
        name = MessageId.parse(text)
        answer = Administered(command.connection, command.request, {"cancelled": True})
        if self._was_cancelled(name, command.connection):
            self._intake.replies.answer_on_disk(self._delayed.partition(), answer)
            return
        try:
            with self._reads.looking_up(tries):
                found = self._find(name)
        except NotInMemory as missing:
            self._reads.begin_lookup(command, missing, tries + 1)
            return
        if (
            found is None
            or found[2] <= max(self._late_us, now.wall_us)
            or not self._may_cancel(command.connection, found[1])
        ):
            self._effects.append(answer._replace(fields={"cancelled": False}))
            return
        position, subject, _ = found
        body = MESSAGE_ID.pack(self._store.store_id, DELAY_PARTITION, position)
        parts = build_batch(
            [RunContent(_CANCEL_SUBJECT, [body], None)],
            created_at_us=now.wall_us,
            producer_id=CANCEL_PRODUCER,
            producer_sequence=0,
        )
        buffer = bytearray(b"".join(parts))
        checked = check_batch(memoryview(buffer), BatchLimits())
        self._intake.append(buffer, checked, _CancelBatch(self, position, subject), now, answer)

    def _was_cancelled(self, name: MessageId, connection: int) -> bool:
        """Return whether the message is one of the newest cancelled ones, and the connection may know it."""
        subject = self._newest_cancelled.get(name.position) if self._is_delayed(name) else None
        return subject is not None and self._may_cancel(connection, subject)

    def _may_cancel(self, connection: int, subject: str) -> bool:
        rights = self._rights.get(connection)
        return rights is None or takes(rights.produce, subject)

    def _is_delayed(self, name: MessageId) -> bool:
        return (name.store_id, name.partition) == (self._store.store_id, DELAY_PARTITION)

    def _find(self, name: MessageId) -> tuple[int, str, int] | None:
        """Return the position, subject and due time of a delayed message; None when no message has that id."""
        log = self._store.delay_log
        if log is None or not self._is_delayed(name):
            return None
        part = log.partitions[0]
        row = part.consumer_log.row_at_position(name.position + 1) - 1
        if row < part.consumer_log.first_row:
            return None
        position = part.consumer_log.read_entry(row)[1]
        batch = self._reads.batch(position)
        header = parse_header(batch)
        ordinal = name.position - position
        if ordinal >= header.messages or not header.flags & HAS_DELIVER_AT:
            return None
        due_us = int(due_times(batch, header, clock_us_of(batch, header))[ordinal])
        ends = np.cumsum(runs_of(batch, header)["count"])
        run = int(np.searchsorted(ends, ordinal, side="right"))
        return name.position, stored_names(batch, header)[int(runs_of(batch, header)["subject"][run])], due_us

    def is_cancelled(self, position: int) -> bool:
        """Return whether the message at a position of the delay log was cancelled, and is still remembered."""
        return position in self._cancelled

    def find(self, name: MessageId, tries: int) -> DelayedState | None:
        """Return what is known of a delayed message that no copy in the message log keeps; None when no message has
        that id, or its batch is gone.

        Raises NotInMemory, until *tries* reads were too many; BadBytes, StorageFailed, BadBatch.
        """
        with self._reads.looking_up(tries):
            found = self._find(name)
        if found is None:
            return None
        position, subject, due_us = found
        if self.is_cancelled(position):
            return DelayedState("cancelled", subject, due_us)
        if due_us > self._late_us or self._is_late(position):
            return DelayedState("delayed", subject, due_us)
        # It is not in the message log although it fell due: it was cancelled, or delivered and dropped since.
        logs = [part.consumer_log for part in self._store.partitions if part.consumer_log.first_row]  # others are whole
        is_dropped = any(log.first_row == log.visible_row or due_us < log.read_entry(log.first_row)[2] for log in logs)
        return DelayedState("dropped" if is_dropped else "cancelled", subject, due_us)

    def _is_late(self, position: int) -> bool:
        """Return whether the message at a position was taken out of the schedule and is not delivered: it waits for a
        read, or lies in the schedule again, in memory, as no more of them fit into a tick or into a full disk.
        """
        items = self._schedule.some_in_memory(_MOST_LATE)
        is_scheduled = (items["number"] <= position) & (position < items["number"] + items["count"])
        if is_scheduled.any():
            return True
        return any(one.position + one.start <= position < one.position + one.stop for one in self._reads.cold)

    def cancelled(self, position: int, subject: str, cancelled_at: int) -> None:
        """Leave out the message at *position*, which the batch at *cancelled_at* cancels."""
        self._segments.cancelled(position, cancelled_at)
        if self._cancelled.add(position):
            self._count_off(subject, 1)
        self._newest_cancelled[position] = subject
        if len(self._newest_cancelled) > _MOST_ANSWERS:
            del self._newest_cancelled[next(iter(self._newest_cancelled))]

    def _count_off(self, subject: str, count: int) -> None:
        self.counts[subject] -= count
        if self.counts[subject] <= 0:
            del self.counts[subject]

    # --- out ----------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> None:
        """Deliver some of the messages that are due."""
        if now.monotonic_us < self._try_at_us:
            return
        due_us = self._schedule.next_due_us()
        is_due = due_us is not None and due_us <= now.wall_us and not self._reads.is_full
        if not is_due and (self._reads.is_reading or not self._reads.cold):
            return
        delayed_ranges = self._reads.ready(self._take_due(now) if is_due else [])
        try:
            self._deliver(delayed_ranges, now)
        except StorageError:
            self._try_at_us = now.monotonic_us + _AGAIN_US
        self._reads.clear_ready()
        self._intake.turn()

    def _take_due(self, now: Now) -> list[DelayedRange]:
        """Take some of the due messages out of the schedule."""
        items = self._schedule.pop(now.wall_us, _SLICE_ITEMS)
        if int(items["count"].sum(dtype=np.int64)) <= 2 * len(items):  # most were sent one by one
            items = np.concatenate([items, self._schedule.pop(now.wall_us, self._most_items - len(items))])
        if not len(items):
            return []
        counts = np.cumsum(items["count"], dtype=np.int64)
        fit = int(np.searchsorted(counts, _SLICE_MESSAGES)) + 1
        if fit < len(items):
            self._schedule.push(items[fit:])
            items, counts = items[:fit], counts[:fit]
        self._segments.left(items)
        delayed_ranges = delayed_ranges_of(items)
        self._late_us = max(self._late_us, int(items["due_us"].max()))
        last = delayed_ranges[-1]
        most = max(last.stop - (int(counts[-1]) - _SLICE_MESSAGES), last.start + 1)
        if most < last.stop:  # the next tick delivers the rest of a large batch
            delayed_ranges[-1] = last._replace(stop=most)
            self._push(last._replace(start=most).item())
        return delayed_ranges

    def _deliver(self, delayed_ranges: list[DelayedRange], now: Now) -> None:
        """Append to the message log what is left of these ranges, and schedule again what is too much for a tick.

        Raises StorageError after scheduling again what was not appended.
        """
        left, due_batch, work = deque(self._left_of(delayed_ranges)), DueBatch(self._store.segment_bytes), 0
        try:
            while left and work < _SLICE_WORK:
                batch = self._batch_of(left[0])
                if batch is None:
                    left.popleft()
                elif due_batch.add(batch, left[0]):
                    left.popleft()
                    if due_batch.is_full:
                        work += self._append_due_batch(due_batch, now)
                else:
                    work += self._append_due_batch(due_batch, now)
                    work += self._append_part(batch, left, max(1, _SLICE_WORK - work), now)
            self._append_due_batch(due_batch, now)
        except StorageError:
            left.extendleft(reversed(due_batch.parts))
            raise
        finally:
            self._most_items = min(self._most_items + self._most_items // 8, _SLICE_SINGLES)
            if left:
                self._most_items = max(len(delayed_ranges) - len(left), _SLICE_ITEMS)
                self._push(np.concatenate([part.item() for part in left]))

    def _left_of(self, delayed_ranges: list[DelayedRange]) -> list[DelayedRange]:
        """Return the ranges without messages that are cancelled or already delivered, and forget these messages."""
        first = min((one.position + one.start for one in delayed_ranges), default=0)
        end = max((one.position + one.stop for one in delayed_ranges), default=0)
        for gone in (self._cancelled, self._delivered):
            if len(gone) and len(gone.within(first, end)):
                left = [part for one in delayed_ranges for part in without(one, gone)]
                for one in delayed_ranges:
                    gone.discard(one.position + one.start, one.position + one.stop)
                delayed_ranges = left
        return delayed_ranges

    def _batch_of(self, part: DelayedRange) -> memoryview | None:
        """Return the batch that holds *part*; None when it is lost. Raises StorageError when a later read may
        succeed.
        """
        try:
            return self._reads.batch(part.position)
        except QmqError as error:
            if isinstance(error, StorageError) and error.retryable:
                raise
            self._lost(error)
            return None

    def _append_due_batch(self, due_batch: DueBatch, now: Now) -> int:
        """Append the messages that are collected; return how much work that was."""
        if not due_batch.parts:
            return 0
        parts, due = due_batch.made(self._store.store_id)
        self._intake.append(due.buffer, due.checked, _FallingDue(self, parts, due, now), now)
        due_batch.clear()
        return _BATCH_WORK + len(parts) // 4 + len(due.buffer) // _BYTES_A_WORK

    def _append_part(self, batch: memoryview, left: deque[DelayedRange], most_runs: int, now: Now) -> int:
        """Append the messages of *batch* that the first range of *left* has, of so many runs at most, and leave the
        others in *left*; return how much work that was.
        """
        part, runs, due = left[0], 1, None
        try:
            runs, stop = runs_between(batch, part.start, part.stop, most_runs)
            part = part._replace(stop=stop)
            due = cut_due(batch, part.start, stop, DELAY_PARTITION)
            if due is None or due.lost:
                raise BadBatch(f"delayed messages of the batch at position {part.position} are rotten and left out")
        except BadBatch as error:
            self._lost(error)
        if due is not None:
            self._intake.append(due.buffer, due.checked, _FallingDue(self, [part], due, now), now)
        if part.stop < left[0].stop:
            left[0] = left[0]._replace(start=part.stop)
        else:
            left.popleft()
        return _BATCH_WORK + runs + (0 if due is None else len(due.buffer) // _BYTES_A_WORK)

    def _lost(self, error: QmqError) -> None:
        self.damaged.append(error)

    def delivered(self, parts: list[DelayedRange], batch: CheckedBatch, partition: int, end: int) -> None:
        """Note that the messages of *parts* are written to *partition* before position *end*."""
        self._unclaimed += [(partition, end, part) for part in parts]
        for subject, count in subjects_of(batch):
            self._count_off(subject, count)

    def not_delivered(self, parts: list[DelayedRange], now: Now) -> None:
        """Schedule *parts* again: they could not be written."""
        for part in parts:
            self._push(part.item())
        self._try_at_us = now.monotonic_us + _AGAIN_US

    def read_done(self, done: ReadDone, now: Now) -> None:
        """Note the errors of a read of due batches; the next tick delivers the batches that it brought into memory."""
        self.damaged += self._reads.done(done)
        if done.error is not None:
            self._try_at_us = now.monotonic_us + _AGAIN_US

    def lookup_done(self, done: ReadDone, now: Now) -> None:
        """Go on with a cancellation whose read is done."""
        command, tries = self._reads.lookup_done(done)
        try:
            if done.error is not None:
                raise done.error
            self.cancel(command, now, tries)
        except QmqError as error:
            self._effects.append(Refused(command.connection, command.request, error))

    def next_deadline_us(self, now: Now) -> int | None:
        """Return when ``tick`` has something to do, by the monotonic clock; at least every second, in case the wall
        clock is set.
        """
        if self._reads.cold and not self._reads.is_reading:
            return max(now.monotonic_us, self._try_at_us)
        due_us = self._schedule.next_due_us()
        if due_us is None or self._reads.is_full:
            return None
        wait_us = min(max(0, due_us - now.wall_us), _LOOK_US)
        return max(now.monotonic_us + wait_us, self._try_at_us)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def packed(self) -> bytes | None:
        """Return the state for a checkpoint; None while there has been no delayed message."""
        if self._store.delay_log is None:
            return None
        claimable = [part.claimable for part in self._store.partitions]
        self._unclaimed = [entry for entry in self._unclaimed if not self._is_claimed(entry)]
        late = [part.item().tobytes() for partition, end, part in self._unclaimed if end > claimable[partition]]
        late += [delayed.item().tobytes() for delayed in self._reads.cold]
        pinned = {part.position for _, _, part in self._unclaimed} | {part.position for part in self._reads.cold}
        self._segments.remove_idle(self._cancelled, self.seen(), pinned)
        packed: bytes = msgpack.packb(
            {
                "schedule": list(self._schedule.claim()),
                "seen": self.seen(),
                "log": claimable,
                "late": b"".join(late),
                "late_us": self._late_us,
                "cancelled": self._cancelled.pack(),
                "newest_cancelled": self._packed_newest(),
                "delivered": self._delivered.pack(),
                "counts": dict(self.counts),
                "segments": self._segments.packed(),
            }
        )
        return packed

    def _packed_newest(self) -> list[Any]:
        subjects = {subject: number for number, subject in enumerate(dict.fromkeys(self._newest_cancelled.values()))}
        numbers = [subjects[subject] for subject in self._newest_cancelled.values()]
        return [list(subjects), list(self._newest_cancelled), numbers]

    def _is_claimed(self, entry: tuple[int, int, DelayedRange]) -> bool:
        """Return whether a checkpoint has the batch that was delivered."""
        partition, end, _ = entry
        return end <= self._store.partitions[partition].claimed

    def wants_checkpoint(self) -> bool:
        """Return whether another checkpoint would remove something that is no longer needed, though nothing has
        changed.
        """
        return self._segments.are_pending or any(map(self._is_claimed, self._unclaimed))

    def restore(self, packed: bytes | None) -> None:
        """Restore the state that ``packed`` returned, and apply what both logs have since."""
        log = self._store.delay_log
        if log is None:
            return
        seen, claimed = 0, list[int]()
        if packed is not None:
            state = msgpack.unpackb(packed, strict_map_key=False)
            next_run, runs, kept = state["schedule"]
            self._schedule.restore(ScheduleClaim(next_run, runs, kept))
            self._segments.restore(state["segments"])
            self._push(np.frombuffer(state["late"], DELAY_DTYPE))
            self._cancelled, self._delivered = (
                PositionSet.unpack(state["cancelled"]),
                PositionSet.unpack(state["delivered"]),
            )
            subjects, positions, numbers = state.get("newest_cancelled", ([], [], []))  # older brokers wrote none
            self._newest_cancelled = {
                position: subjects[number] for position, number in zip(positions, numbers, strict=True)
            }
            self.counts.update(state["counts"])
            seen, claimed, self._late_us = state["seen"], state["log"], state["late_us"]
        self._read_delay_log(log, seen)
        self._read_message_log(claimed)

    def headers_since(self, position: int) -> Iterator[tuple[int, Header]]:
        """Return the batches that clients sent and that lie in the delay log from *position* on, as Store.headers_since
        does.
        """
        if self._store.delay_log is not None:
            for _, header in self._store.delay_log.headers_since([position]):
                if header.producer_id != CANCEL_PRODUCER:
                    yield DELAY_PARTITION, header

    def seen(self) -> int:
        """Return the position up to which a checkpoint knows the delay log; 0 while there is none."""
        return self._delayed.partition().visible if self._store.delay_log is not None else 0

    def _read_delay_log(self, log: Store, seen: int) -> None:
        for _, header in log.headers_since([seen]):
            batch = self._reads.batch(header.position)
            if header.producer_id == CANCEL_PRODUCER:
                self._cancel_again(bytes(batch[header.data_start :]), header.position)
            elif header.flags & HAS_DELIVER_AT:
                due = due_times(batch, header, clock_us_of(batch, header))
                self._arrived(Arrived(header.position, header.position + header.size, due, _subjects(batch, header)))

    def _cancel_again(self, data: bytes, cancelled_at: int) -> None:
        name = MessageId._make(MESSAGE_ID.unpack(data[-MESSAGE_ID.size :]))
        if name.store_id in self._store.store_ids:  # also from before the directory got another id
            name = name._replace(store_id=self._store.store_id)
        found = self._find(name)
        if found is not None:
            self.cancelled(*found[:2], cancelled_at)

    def _read_message_log(self, claimed: list[int]) -> None:
        """Note what was delivered since the checkpoint."""
        store = self._store
        for partition, header in store.headers_since(claimed):
            if header.producer_id != DUE_PRODUCER or not header.flags & HAS_ORIGIN_ID:
                continue
            batch = store.partitions[partition].page_cache.peek(header.position, header.size)
            for store_id, number, positions in origins_of(batch):
                if store_id in store.store_ids and number == DELAY_PARTITION:
                    self._delivered.extend(positions)
            for subject, count in _subjects(batch, header):
                self._count_off(subject, count)
            self._late_us = max(self._late_us, clock_us_of(batch, header))


def _subjects(batch: memoryview, header: Header) -> list[tuple[str, int]]:
    names, runs = stored_names(batch, header), runs_of(batch, header)
    return [
        (names[subject], count) for subject, count in zip(runs["subject"].tolist(), runs["count"].tolist(), strict=True)
    ]


class _CancelBatch:
    """The batch that cancels a message."""

    def __init__(self, delaying: DelayedMessages, position: int, subject: str) -> None:
        self._delaying = delaying
        self._position = position
        self._subject = subject

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """Leave the message out from now on."""
        self._delaying.cancelled(self._position, self._subject, batch.position)

    def refused(self, error: QmqError) -> None:
        """Do nothing: the client gets the error."""

    def unknown(self, error: QmqError) -> None:
        """Do nothing: the client gets the error."""


class _FallingDue:
    """A batch of messages that are due."""

    def __init__(self, delaying: DelayedMessages, parts: list[DelayedRange], due: Due, now: Now) -> None:
        self._delaying = delaying
        self._parts = parts
        self._due = due
        self._now = now

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """Note that the messages are delivered."""
        self._delaying.delivered(self._parts, self._due.checked, partition, batch.end)

    def refused(self, error: QmqError) -> None:
        """Schedule the messages again."""
        self._delaying.not_delivered(self._parts, self._now)

    def unknown(self, error: QmqError) -> None:
        """Take the messages as delivered; the next start delivers them if it does not find the batch."""
        self._delaying.delivered(self._parts, self._due.checked, partition=-1, end=1 << 63)
