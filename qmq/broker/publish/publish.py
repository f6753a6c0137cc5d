"""The send path: check a batch, recognise a repeat, choose the partition, stamp, write, answer, publish.

Batches that arrive in one turn are written with one vectored write for each partition. They become visible in the order
of the log: a batch sent with `flush` once the fdatasync that covers it is done, and no batch before those ahead of it.
With several partitions, a batch also waits for earlier batches of its subjects and slots of order keys in other
partitions, so each of these becomes visible in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.broker.ports.commands import Connected, Now, Send
from qmq.broker.ports.effects import Effect, Refused, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.rights import Rights
from qmq.broker.publish.dedup import Producers, RefusedBatches, RememberedBatch
from qmq.broker.publish.send_replies import DuplicateBatch, Repeat, SendReplies
from qmq.broker.publish.staging import (
    Answer,
    Barrier,
    DelayLog,
    LogPosition,
    Numbers,
    OwnBatch,
    StagedBatch,
    StagedPartition,
    Visibility,
)
from qmq.broker.publish.unique_sends import UniqueArrival, answer_to, duplicates_of, unique_batch
from qmq.broker.publish.unique_texts import UniqueTexts, hash_of_subject, rows_of
from qmq.errors import (
    BadBatch,
    Forbidden,
    InvalidOption,
    Overloaded,
    QmqError,
    StorageError,
    SyncFailed,
    TooManySubjects,
)
from qmq.format.batch import (
    ANY_MESSAGE_BYTES,
    BatchLimits,
    CheckedBatch,
    EntryRow,
    Header,
    PlainBatch,
    RunRecord,
    Runs,
    check_batch,
    check_plain,
    entries_of,
    entry_of,
    mark_maker,
    numbers_by_run,
    parse_header,
    stamp,
    stamp_plain,
    stored_table,
    with_ahead,
)
from qmq.format.lanes import SLOT_BITS
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    ENTRY_BATCH_FLAGS,
    HANDED_FLAGS,
    HAS_DELIVER_AT,
    LANE_NORMAL,
    LANE_ORDERED,
    RUN,
    RUN_REPLAYED,
    RUN_SIZE,
    UNIQUE_ROW,
)
from qmq.format.left_out import without
from qmq.format.private import PRIVATE
from qmq.format.source import ADDRESS_SIZE, NO_ADDRESS, has_room, stamped_front
from qmq.format.table import plain_table, sent_as, without_unique
from qmq.format.unique import hash_in_data
from qmq.names import check_subject
from qmq.storage.store import MOST_LANES, Store

#: Refusals for a message or subject of a batch, whose rest clients send again.
_OF_A_PART: Final = (Forbidden, InvalidOption, TooManySubjects)
#: The time after which rows that could not be read are tried again.
_AGAIN_US: Final = 100_000


class Intake:
    """Takes batches in. Answers, and syncs that it needs, go to *effects*."""

    def __init__(
        self, store: Store, limits: BrokerLimits, producers: Producers, effects: list[Effect],
        rights: dict[int, Rights], unique_texts: UniqueTexts,
    ) -> None:  # fmt: skip
        """*rights* are those of the connections that have a token."""
        self._store = store
        self._unique_texts = unique_texts
        self._rights = rights
        self._limits = BatchLimits(limits.max_message_bytes)
        self._copy_limits = BatchLimits(ANY_MESSAGE_BYTES, HANDED_FLAGS, RUN_REPLAYED)
        self._producers = producers
        self._refusals = RefusedBatches(limits.producer_window, limits.max_producers)
        self._effects = effects
        logs = [store] if store.delay_log is None else [store, store.delay_log]
        self._stamp_us = max(log.last_stored_at_us for log in logs)
        self._partitions = [StagedPartition(number, store, number) for number in range(len(store.partitions))]
        self._visibility = Visibility(self._partitions)
        #: The delay log; the part that delays messages sets it.
        self.delay_log: DelayLog | None = None
        self._avoided: frozenset[int] = frozenset()
        #: Gives subjects and lanes their numbers.
        self.numbering = SubjectNumbering(store)
        self._mark = mark_maker(store.secret)
        #: What is stamped as the source of batches, by connection.
        self._sources: dict[int, bytes] = {}
        #: The batches that come again over a connection: producer id, the sequence behind them, and when they were
        #: written at the earliest.
        self._unanswered: dict[int, tuple[bytes, int, int]] = {}
        #: For the short way, by connection and table: the number of the subject, to which the connection may send, and
        #: what is stamped as the source.
        self._senders: dict[tuple[int, bytes], tuple[int, bytes]] = {}
        self.replies = SendReplies(producers, effects, self._partition, self._all, unique_texts)
        self._repeats: list[Repeat | DuplicateBatch] = []
        self._last_positions: dict[
            int, LogPosition
        ] = {}  # end of the last batch, see _orders; with several partitions only

    def connected(self, command: Connected, now: Now) -> None:
        """Stamp the source of a connection into the batches that come over it, and know which come again.

        A known connection has other rights by now. No number is used for two connections.
        """
        connection = command.connection
        if connection in self._sources:
            self._senders.clear()
        self._sources[connection] = command.source
        if command.unanswered is not None:
            producer_id, end, age_us = command.unanswered
            self._unanswered[connection] = producer_id, end, now.monotonic_us - age_us

    def forget_numbers(self, numbers: Iterable[int]) -> None:
        """Forget the numbers of subjects that are forgotten."""
        self._senders.clear()
        self.numbering.forget()
        for number in numbers:
            self._last_positions.pop(number, None)

    def disconnected(self, connection: int) -> None:
        """Forget a connection."""
        self._sources.pop(connection, None)
        self._unanswered.pop(connection, None)
        self._producers.disconnected(connection)
        self.replies.disconnected(connection)

    # --- commands -----------------------------------------------------------------------------------------------------

    def send(self, command: Send, now: Now) -> None:
        """Check and stage one batch; ``turn``, or a later sync, answers it. Raises QmqError when it is refused."""
        batch = check_batch(command.batch, self._copy_limits if command.copy else self._limits)
        try:
            if self._rights and not command.copy and (rights := self._rights.get(command.connection)) is not None:
                rights.check_produce(batch.names)
            self._take(command, batch, now)
        except QmqError as error:
            if not command.copy:
                self._refuse_batch(batch.header, error)
            raise

    def _take(self, command: Send, batch: CheckedBatch, now: Now) -> None:
        known = None
        if not command.copy:
            header = batch.header
            producer_id, first = header.producer_id, header.producer_sequence
            self._producers.attach(command.connection, producer_id)
            written_us = self._written_us(command.connection, producer_id, first) if self._unanswered else None
            known = self._producers.lookup(producer_id, first, header.messages, header.data_crc, written_us)
        if batch.has_unique:
            self._take_unique(command, batch, known, now)
        elif known is not None:
            self._repeats.append(Repeat(command, known))
        else:
            self._take_new(command, command.batch, batch, now)

    def _take_unique(self, command: Send, batch: CheckedBatch, known: RememberedBatch | None, now: Now) -> None:
        """Take a batch with unique texts, without the messages that repeat some."""
        texts = self._unique_texts
        texts.expire(now.monotonic_us)
        sent = unique_batch(command.batch, batch)
        if known is not None:
            self._repeats.append(Repeat(command, known, sent))
            return
        duplicates, view = duplicates_of(sent, texts), command.batch
        texts.duplicates += len(duplicates)
        if len(duplicates) == batch.header.messages:
            rows = {ordinal: row for ordinal, row in duplicates.items() if isinstance(row, bytes)}
            self._repeats.append(DuplicateBatch(command, batch, rows))
            return
        if duplicates:
            view, batch = without(view, batch, duplicates)
        arrival = UniqueArrival(texts, duplicates, now)
        partition = self._take_new(command, view, batch, now, arrival)
        staged = partition.staged[-1]
        rows = arrival.stage(sent, batch, staged, partition.number)
        if rows:
            known = RememberedBatch(partition.number, staged.position)
            answer = answer_to(command, sent.batch, rows, known, staged.stored_at_us, staged.first_sequences)
            partition.staged[-1] = staged._replace(answer=answer)

    def _take_new(
        self, command: Send, view: memoryview, batch: CheckedBatch, now: Now, unique: UniqueArrival | None = None
    ) -> StagedPartition:
        """Stage a batch that is no repeat; return the partition. *unique* hears of the outcome of its write."""
        view, batch = self._timed(view, batch, now)
        header = batch.header
        source = None if command.copy else self._source_of(command.connection, view, header.runs)
        own: OwnBatch | None = unique
        flush = command.flush
        if header.flags & HAS_DELIVER_AT:
            assert self.delay_log is not None
            own = self.delay_log.arriving(view, batch, now.wall_us)
            partition = self.delay_log.partition()
            self._check_whole(partition)
            numbers = self.delay_log.numbers_of(batch)
            if unique is not None:
                unique.other, own = own, unique
        else:
            rights = self._rights.get(command.connection) if self._rights and not command.copy else None
            numbers = self.numbering.of(batch, rights=rights) if command.numbers is None else command.numbers
            if batch.run is not None and not command.copy and batch.run[1] == LANE_NORMAL:
                self._know(command.connection, view, header, numbers)
            partition = self._choose(numbers)
            if len(self._partitions) > 1:
                self._write_before(partition, numbers)
        if unique is not None and unique.duplicates:
            flush = self.replies.must_flush(partition, unique.duplicates, flush)
        if not command.copy:
            self._refusals.check(header.producer_id, header.producer_sequence)
        position = self._placed(partition, header.size)
        self._stage(view, batch, partition, position, numbers, now, command, own, flush, source=source)
        return partition

    def _written_us(self, connection: int, producer_id: bytes, first: int) -> int | None:
        """Return when a batch was written at the earliest that comes again; None for one that does not."""
        known_id, end, written_us = self._unanswered.get(connection, (b"", 0, 0))
        return written_us if producer_id == known_id and first < end else None

    def _know(self, connection: int, view: memoryview, header: Header, number: int | Numbers) -> None:
        """Let later batches of the same subject go the short way."""
        assert isinstance(number, int)
        self.numbering.know(view, header, number)
        if self._rights and (rights := self._rights.get(connection)) is not None:
            rights.note_number(number)

    def append(
        self, buffer: bytearray, batch: CheckedBatch, own: OwnBatch, now: Now, answer: Answer | None = None,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Stage a batch that the broker made; the next ``turn`` writes it.

        A batch with an *answer* goes to the delay log, and the answer is given when it is on disk. Any other goes to
        the message log and becomes visible once it is on disk, because messages that a power loss takes away fall due
        again. *number* is the number of its subject when that is private to a group.

        Raises StorageError; then nothing is stored, and *own* is not called.
        """
        if answer is not None:
            assert self.delay_log is not None
            partition = self.delay_log.partition()
            self._check_whole(partition)
            numbers = self.delay_log.numbers_of(batch)
        else:
            numbers = self.numbering.of(batch, forced=True) if number is None else number
            partition = self._choose(numbers)
            if len(self._partitions) > 1:
                self._write_before(partition, numbers)
        view, batch = self._timed(memoryview(buffer), batch, now)
        position = self._placed(partition, batch.header.size)
        self._stage(view, batch, partition, position, numbers, now, None, own, True, answer)

    def take_one(
        self, connection: int, request: int, view: memoryview, size: int, flush: bool, now: Now,
        checked: PlainBatch | None = None,
    ) -> EntryRow | None:  # fmt: skip
        """Check, stamp and store one plain batch, of *size* bytes, at once, and publish it; return its row. Only for
        a store with one partition. *checked*: the batch, if it was checked.

        Return None, with nothing changed, where that is not simple. With *flush*, the answer follows the next sync,
        which ``want_sync`` asks for.
        """
        partition = self._partitions[0]
        if partition.staged or self._refusals.by_producer:  # after a failed sync, the log writes nothing
            return None
        batch = checked or check_plain(view, size, self._limits.max_message_bytes)
        if batch is None:
            return None
        table, messages, created_at_us, producer_id, sequence, data_crc, flags, run_size = batch
        sender, producer = self._senders.get((connection, table)), self._producers.by_id.get(producer_id)
        if producer is None or sequence < producer.next_sequence:
            return None  # a producer that sends a repeat, or for the first time
        if sender is None:
            sender = self._sender(connection, table)
            if sender is None:
                return self._take_one_unique(connection, request, view, size, flush, now, batch)
            self._producers.attach(connection, producer_id)
        number, front = sender
        monotonic_us, wall_us = now
        stored_at_us = self._stamp_us + 1
        if wall_us > stored_at_us:
            stored_at_us = wall_us
        data_start = size - run_size
        position, ends = partition.stored.message_log.end, self._store.subjects.ends
        first, before = ends.item(number), bytes(view[:data_start])
        stamp_plain(
            view, data_start, created_at_us, position, stored_at_us, 0, self._store.store_id, self._mark, first, front
        )
        row = (
            first, position, stored_at_us, number, messages, 0, 0, 1, (flags & ENTRY_BATCH_FLAGS) << 8, run_size, size
        )  # fmt: skip
        if not partition.stored.write_one(view, row):
            view[:data_start] = before
            return None
        self._stamp_us = stored_at_us
        ends[number] = first + messages
        self._producers.remember(producer_id, sequence, messages, data_crc, 0, position, monotonic_us)
        if flush:
            end = position + size
            partition.hide(Barrier(position, end, True, ()))
            self.replies.wait(partition, end, Sent(connection, request, position, stored_at_us, 0, first))
        else:
            self._visibility.publish_one(partition)
        return row

    def _take_one_unique(
        self, connection: int, request: int, view: memoryview, size: int, flush: bool, now: Now, batch: PlainBatch
    ) -> EntryRow | None:  # fmt: skip
        """Do as ``take_one`` for a batch with unique texts that repeats none. Its table is like no other."""
        table, messages, _, producer_id, _, data_crc, flags, run_size = batch
        plain = plain_table(table, messages, data_crc)
        if plain is None:
            return None
        sender = self._senders.get((connection, plain)) or self._sender(connection, plain)
        if sender is None:
            return None
        texts, name = self._unique_texts, self._store.subjects.name(sender[0])
        texts.expire(now.monotonic_us)
        several, keys = None, list[bytes]()
        if messages > 1:
            run: RunRecord = RUN.unpack_from(view, BATCH_HEADER_SIZE)
            several = unique_batch(view, CheckedBatch(parse_header(view), (name,), run, None))
            if duplicates_of(several, texts):
                return None
            keys = several.keys
        elif (unique := hash_in_data(view[size - run_size :], flags)) is not None:
            keys = [hash_of_subject(name) + unique]
            if keys[0] in texts.by_key:
                return None
        self._producers.attach(connection, producer_id)
        self._senders[connection, table] = sender
        try:
            entry = self.take_one(connection, request, view, size, flush, now, batch)
        finally:
            del self._senders[connection, table]
        if entry is None:
            return None
        first, position, stored_at_us = entry[:3]
        if several is not None:
            rows = rows_of(several.batch, several.ordinals, position, stored_at_us, 0, first)
        else:
            rows = [UNIQUE_ROW.pack(position, stored_at_us, first, 0)] * len(keys)
        texts.stage(keys, rows)
        texts.keep(keys, rows, now.monotonic_us)
        return entry

    def _sender(self, connection: int, table: bytes) -> tuple[int, bytes] | None:
        """Return the number of the subject that a table names, and what is stamped as the source, for batches of a
        connection, and remember both. Return None where the table is not known, where it was not checked yet whether
        the connection may send there, or where the sender has no room.
        """
        number = self.numbering.by_table.get(table)
        if number is None:
            return None
        if self._rights and (rights := self._rights.get(connection)) is not None and number not in rights.numbers:
            return None
        front = stamped_front(table, self._sources.get(connection, NO_ADDRESS))
        if front is None:
            return None
        if len(self._senders) >= _KNOWN_TABLES:
            self._senders.clear()
        sender = self._senders[connection, table] = number, front
        return sender

    def want_sync(self) -> None:
        """Ask for the sync that the batches of ``take_one`` wait for."""
        self.replies.want_sync(self._partitions[0])

    def _source_of(self, connection: int, view: memoryview, runs: int) -> bytes:
        """Return what to stamp as the source of a batch that came over a connection. Raises BadBatch."""
        source = self._sources.get(connection, NO_ADDRESS)
        if not has_room(view, BATCH_HEADER_SIZE + RUN_SIZE * runs, source):
            raise BadBatch(
                f"the source of a batch of this client needs {len(source) - ADDRESS_SIZE} bytes for the sender's name"
            )
        return source

    def _timed(self, view: memoryview, batch: CheckedBatch, now: Now) -> tuple[memoryview, CheckedBatch]:
        """Return the batch, with a field that says how far its stamp will be ahead of the wall clock where that
        matters.
        """
        ahead_us = self._stamp_us + 1 - now.wall_us
        return with_ahead(view, batch, ahead_us) if ahead_us > 0 else (view, batch)

    def _placed(self, partition: StagedPartition, size: int) -> int:
        try:
            return partition.stored.position_for(size)
        except StorageError as error:
            self._give_up(partition, error)
            raise

    def _refuse_batch(self, header: Header, error: QmqError) -> None:
        """Do as ``_refuse``; of a batch that has more than the refused message or subject, the rest is sent again."""
        has_rest = header.runs > 1 or (header.messages > 1 and isinstance(error, InvalidOption))
        if has_rest and isinstance(error, _OF_A_PART):
            error = Overloaded("a batch before this one was refused for a part of it, and its rest comes first")
        self._refuse(header.producer_id, header.producer_sequence, error)

    def _refuse(self, producer_id: bytes, first: int, error: QmqError) -> None:
        """Remember a refused batch that will be sent again, so that none overtakes it."""
        if error.retryable:
            self._refusals.add(producer_id, first, error)

    def synced(self, number: int, position: int) -> None:
        """Note that the fdatasync of a partition up to *position* is done; answer and publish what waited for it."""
        partition = self._partition(number)
        partition.sync_running = False
        partition.synced = max(partition.synced, position)
        partition.stored.message_log.mark_synced(position)
        while partition.waiting and partition.waiting[0][0] <= partition.synced:
            self._effects.append(partition.waiting.popleft()[1])
        self._publish(partition)
        self.replies.want_sync(partition)

    def sync_broken(self, number: int, error: QmqError) -> None:
        """Note that an fdatasync failed: batches that wait for it are never acknowledged.

        They become visible even so, as `append` batches do: other batches wait behind them, here and in other
        partitions.
        """
        partition = self._partition(number)
        partition.sync_running = False
        if not isinstance(error, SyncFailed):  # whether the batches are on disk is unknown
            error = SyncFailed(f"{error}; nothing more is stored in partition {number} until a restart")
        partition.broken = error
        partition.stored.give_up()
        while partition.waiting:
            effect = partition.waiting.popleft()[1]
            self._effects.append(Refused(effect.connection, effect.request, error))
        self._publish(partition)

    def next_deadline_us(self, now_us: int) -> int | None:
        """Return when a turn is to publish again what could not be read; None where nothing is behind."""
        return now_us + _AGAIN_US if self._visibility.is_behind else None

    def avoid(self, numbers: frozenset[int]) -> None:
        """Give these partitions no new batches while there are others: their disks are far behind."""
        self._avoided = numbers

    # --- the turn -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Write the batches staged since the last turn, send the answers that are ready, publish, and ask for syncs."""
        if self._visibility.is_behind:
            self._visibility.is_behind = False
            for partition in self._all():
                partition.store.may_wait(True)  # a few rows, which nothing else would read
                try:
                    self._publish(partition)
                finally:
                    partition.store.may_wait(False)
        for partition in self._partitions:
            if partition.staged:
                self._write(partition)
        if self.delay_log is not None and self.delay_log.has_staged():
            self._write(self.delay_log.partition())
        if self._repeats:
            repeats, self._repeats = self._repeats, []
            for repeat in repeats:
                self.replies.answer_repeat(repeat)

    def _write(self, partition: StagedPartition) -> None:
        broken = partition.broken or partition.stored.broken()
        if broken is not None:
            partition.stored.unstage()
            self._give_up(partition, broken)
            return
        try:
            partition.stored.write()
        except SyncFailed as error:
            self._leave(partition, error)
            return
        except QmqError as error:
            self._give_up(partition, error)
            return
        staged, partition.staged = partition.staged, []
        for batch in staged:
            if batch.own is not None:
                batch.own.stored(partition.number, batch)
            if batch.flush or batch.after:
                partition.hide(Barrier(batch.position, batch.end, batch.flush, batch.after))
            if batch.answer is None:
                continue
            if batch.flush:
                self.replies.wait(partition, batch.end, batch.answer)
            else:
                self._effects.append(batch.answer)
        self._publish(partition)
        self.replies.want_sync(partition)

    def _publish(self, partition: StagedPartition) -> None:
        """Make visible what a write or sync of *partition* has freed."""
        if self.delay_log is not None and self.delay_log.has(partition):
            if self._visibility.publish_one(partition):
                self.delay_log.publish(partition.visible)
        else:
            self._visibility.publish()

    def _partition(self, number: int) -> StagedPartition:
        if number < len(self._partitions):
            return self._partitions[number]
        assert self.delay_log is not None
        return self.delay_log.partition()

    def _all(self) -> list[StagedPartition]:
        return self._partitions + (self.delay_log.partitions() if self.delay_log is not None else [])

    def _write_before(self, partition: StagedPartition, numbers: int | Numbers) -> None:
        """Write staged batches of the same subjects or slots in other partitions first.

        If such a write fails, its sequences are given again; so no later sequences may have been given by then.
        """
        for number in self._orders(numbers):
            log_position = self._last_positions.get(number)
            if (
                log_position is not None
                and log_position[0] != partition.number
                and log_position[1] > self._store.partitions[log_position[0]].message_log.end
            ):
                self._write(self._partitions[log_position[0]])

    def _orders(self, numbers: int | Numbers) -> list[int]:
        """Return what messages of these subjects become visible in the order of: the subjects, and for those with order
        keys the slots, whatever their subjects, as numbers below 0.
        """
        if not self._store.subjects.has_lanes:
            return _each(numbers)
        several = np.atleast_1d(np.asarray(numbers, np.int64))
        lanes = self._store.subjects.lanes[several].astype(np.int64)
        orders: list[int] = np.where(lanes >= LANE_ORDERED, ~(lanes & SLOT_BITS), several).tolist()
        return orders

    def _must_come_first(
        self, partition: StagedPartition, last_positions: dict[int, LogPosition | None]
    ) -> tuple[LogPosition, ...]:
        """Return where earlier batches of the same subjects or slots lie in other partitions, and are not visible."""
        after: dict[int, int] = {}
        for log_position in last_positions.values():
            if (
                log_position is not None
                and log_position[0] != partition.number
                and self._partitions[log_position[0]].visible < log_position[1]
            ):
                after[log_position[0]] = max(log_position[1], after.get(log_position[0], 0))
        return tuple(after.items())

    # --- one batch ----------------------------------------------------------------------------------------------------

    def _choose(self, numbers: int | Numbers) -> StagedPartition:
        """Return the partition for a batch: by its first subject, so that a subject mostly stays in one; never a broken
        one. All slots of order keys of a subject go to one.
        """
        if len(self._partitions) == 1:
            chosen = self._partitions[0]
        else:
            first = numbers if isinstance(numbers, int) else int(numbers[0])
            if self._store.subjects.lane(first) >= LANE_ORDERED:
                first = crc32c(self._store.subjects.name(first).encode())
            sound = [partition for partition in self._partitions if partition.broken is None]
            if self._avoided:
                sound = [partition for partition in sound if partition.number not in self._avoided] or sound
            chosen = sound[first % len(sound)] if sound else self._partitions[0]
        self._check_whole(chosen)
        return chosen

    def _check_whole(self, partition: StagedPartition) -> None:
        if partition.broken is not None:
            raise SyncFailed(
                f"nothing more is stored in partition {partition.number} until a restart: {partition.broken}"
            )

    def _stage(
        self,
        view: memoryview,
        batch: CheckedBatch,
        partition: StagedPartition,
        position: int,
        numbers: int | Numbers,
        now: Now,
        command: Send | None,
        own: OwnBatch | None,
        flush: bool,
        answer: Answer | None = None,
        source: bytes | None = None,
    ) -> None:
        header = batch.header
        self._stamp_us = stored_at_us = max(now.wall_us, self._stamp_us + 1)
        first, messages = _hand_in(partition, view, batch, position, stored_at_us, numbers, source)
        if command is not None:
            if not command.copy:
                sent = (header.messages, header.data_crc)
                if batch.has_unique:
                    sent = sent_as(stored_table(view, header)) or sent
                self._producers.remember(
                    header.producer_id, header.producer_sequence, *sent, partition.number, position, now.monotonic_us
                )
            answer = Sent(command.connection, command.request, position, stored_at_us, partition.number, first)
        end = position + header.size
        last_positions: dict[int, LogPosition | None] = {}
        after: tuple[LogPosition, ...] = ()
        if len(self._partitions) > 1 and partition.store is self._store:
            last_positions = {number: self._last_positions.get(number) for number in self._orders(numbers)}
            self._last_positions.update(dict.fromkeys(last_positions, (partition.number, end)))
            after = self._must_come_first(partition, last_positions)
        staged = StagedBatch(
            command, answer, own, flush, position, end, stored_at_us, first, numbers, messages, header.producer_id,
            header.producer_sequence, after, last_positions,
        )  # fmt: skip
        partition.staged.append(staged)

    def _give_up(self, partition: StagedPartition, error: QmqError) -> None:
        """Take back everything given to the staged batches of a partition whose write failed, and refuse them."""
        staged, partition.staged = partition.staged, []
        ends = partition.store.subjects.ends
        for batch in reversed(staged):
            ends[batch.numbers] -= np.uint64(batch.messages) if isinstance(batch.messages, int) else batch.messages
            self._take_back_positions(batch)
            if batch.own is not None:
                batch.own.refused(error)
            if batch.command is not None and not batch.command.copy:
                self._producers.forget(batch.producer_id, batch.producer_sequence)
                self._refuse(batch.producer_id, batch.producer_sequence, error)
            if batch.answer is not None:
                self._effects.append(Refused(batch.answer.connection, batch.answer.request, error))
        start, end = (staged[0].position, staged[-1].end) if staged else (0, 0)
        repeats, self._repeats = self._repeats, []
        for repeat in repeats:
            if any(place[0] == partition.number and start <= place[1] < end for place in repeat.places()):
                self._effects.append(Refused(repeat.command.connection, repeat.command.request, error))
            else:
                self._repeats.append(repeat)

    def _leave(self, partition: StagedPartition, error: SyncFailed) -> None:
        """Refuse the staged batches of a failed write that may come back whole with the next start.

        Their sequences are not given again, since it is unknown whether they are stored.
        """
        staged, partition.staged = partition.staged, []
        for batch in reversed(staged):
            partition.store.subjects.skip_sequences(batch.numbers, batch.first_sequences, batch.messages)
            self._take_back_positions(batch)
            if batch.own is not None:
                batch.own.unknown(error)
            if batch.answer is not None:
                self._effects.append(Refused(batch.answer.connection, batch.answer.request, error))
        self.sync_broken(partition.number, error)

    def _take_back_positions(self, batch: StagedBatch) -> None:
        for number, log_position in batch.last_positions.items():
            if log_position is None:
                del self._last_positions[number]
            else:
                self._last_positions[number] = log_position

    # --- positions for other parts ------------------------------------------------------------------------------------

    def on_disk(self, number: int) -> int:
        """Return the position up to which a partition is on disk; after a failed sync, its end."""
        partition = self._partitions[number]
        if partition.broken is not None:
            return partition.end()
        return max(partition.synced, partition.stored.message_log.synced)

    def want_on_disk(self, number: int) -> None:
        """Ask for a sync of everything written to a partition, though no answer waits for it."""
        partition = self._partitions[number]
        partition.wanted = partition.end()
        self.replies.want_sync(partition)

    def visible(self, partition: int) -> int:
        """Return the position up to which messages of a partition may be pulled."""
        return self._partitions[partition].visible


def _hand_in(
    partition: StagedPartition, view: memoryview, batch: CheckedBatch, position: int, stored_at_us: int,
    numbers: int | Numbers, source: bytes | None,
) -> tuple[int | npt.NDArray[np.uint64], int | npt.NDArray[Any]]:  # fmt: skip
    """Stamp a batch and stage it in its store; return its first sequences and message counts, by run when it has
    several.
    """
    header, store, stored = batch.header, partition.store, partition.stored
    ends = store.subjects.ends
    first: int | npt.NDArray[np.uint64]
    messages: int | npt.NDArray[Any]
    if isinstance(numbers, int):
        first, messages = int(ends[numbers]), header.messages
    else:
        assert batch.runs is not None
        first, messages = ends[numbers], batch.runs["count"].astype(np.uint64)
    stamp(
        view, batch, position=position, stored_at_us=stored_at_us, partition=stored.number,
        store_id=store.store_id, secret=store.secret, first_sequences=first, source=source,
    )  # fmt: skip
    if isinstance(numbers, int):
        assert isinstance(first, int)
        stored.stage(position, view, entry_of(batch, position, stored_at_us, numbers, first))
    else:
        assert batch.runs is not None
        rows = entries_of(batch.runs, header, position, stored_at_us, numbers)
        stored.stage(position, view, rows)
    ends[numbers] = first + messages
    return first, messages


def _each(numbers: int | Numbers) -> list[int]:
    return [numbers] if isinstance(numbers, int) else numbers.tolist()


#: Tables that are remembered, and the bytes of the largest: an untrusted client must not fill the memory.
_KNOWN_TABLES: Final = 16_384
_KNOWN_TABLE_BYTES: Final = 384
#: Prefixes of tokens whose subjects are counted.
_SHARES: Final = 10_000


class SubjectNumbering:
    """The numbers of the subjects and lanes of batches, in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: The number of a subject's normal lane by the table of a batch that names it alone, for small tables that were
        #: checked.
        self.by_table: dict[bytes, int] = {}
        self._shares = SubjectShares(store)

    def of(self, batch: CheckedBatch, *, forced: bool = False, rights: Rights | None = None) -> int | Numbers:
        """Return the subject number of each run; register new subjects, with *forced* also beyond the limit, and of the
        prefixes of a token with *rights* no more than its share.

        Raises the errors of check_subject and Store.add_subject.
        """
        if self._store.subjects.has_private and PRIVATE in "".join(batch.names):
            for name in batch.names:
                check_subject(name)
        if batch.run is not None:
            name, lane = batch.names[batch.run[0]], batch.run[1]
            number = self._store.subjects.number(name, lane)
            return self._add(name, lane, forced, rights) if number is None else number
        assert batch.runs is not None
        if batch.runs["lane"].any():
            return self._of_lanes(batch.names, batch.runs, forced, rights)
        known = self._store.subjects.numbers(batch.names)
        if None in known:
            for name, number in zip(batch.names, known, strict=True):
                if number is None:
                    check_subject(name)  # all of them before any is registered
            known = [
                self._add(name, LANE_NORMAL, forced, rights) if number is None else number
                for name, number in zip(batch.names, known, strict=True)
            ]
        by_run: Numbers = np.array(known, np.int64)[batch.runs["subject"]]
        return by_run

    def _of_lanes(self, names: Sequence[str], runs: Runs, forced: bool, rights: Rights | None) -> Numbers:
        number, by_name = self._store.subjects.number, list(map(self._store.subjects.other_lanes, names))
        by_run = map(by_name.__getitem__, runs["subject"].tolist())
        numbers = list(map(dict.get, by_run, runs["lane"].tolist()))
        if None not in numbers:  # as in most batches of order keys
            return np.array(numbers, np.int64)
        for name in names:
            if number(name) is None:
                check_subject(name)  # all of them before any is registered

        def number_of(name: str, lane: int) -> int:
            known = number(name, lane)
            return self._add(name, lane, forced, rights) if known is None else known

        return numbers_by_run(names, runs, number_of)

    def of_private(self, names: Sequence[str], runs: Runs, *, forced: bool = False) -> int | Numbers:
        """Return the subject number of each run of copies for one group alone, whose subjects are checked; one int for
        one run. Raises TooManySubjects, unless it is *forced*.
        """

        def number_of(name: str, lane: int) -> int:
            number = self._store.subjects.number(name, lane)
            return self._store.add_subject(name, lane, forced=forced) if number is None else number

        if len(runs) == 1:
            return number_of(names[int(runs["subject"][0])], int(runs["lane"][0]))
        return numbers_by_run(names, runs, number_of)

    def know(self, view: memoryview, header: Header, number: int) -> None:
        """Remember the table of a batch of one run of a normal lane, which a client sent, and which names the subject
        of that number.
        """
        if header.table_size <= _KNOWN_TABLE_BYTES:
            if len(self.by_table) >= _KNOWN_TABLES:
                self.by_table.clear()
            self.by_table[without_unique(bytes(view[BATCH_HEADER_SIZE + RUN_SIZE : header.data_start]))] = number

    def forget(self) -> None:
        """Forget what is remembered of the numbers: some are forgotten."""
        self.by_table.clear()
        self._shares.forget()

    def _add(self, name: str, lane: int, forced: bool, rights: Rights | None) -> int:
        """Register a lane of a subject, whose name is checked first."""
        check_subject(name)
        if rights is not None and not forced:
            self._shares.check(name, rights)
        return self._store.add_subject(name, lane, forced=forced)


class SubjectShares:
    """Keeps tokens from using up the room for subjects: a token gets a new one only while the prefix by which it may
    send there has fewer than are free. So whoever comes next finds half of the room that was left.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counted: dict[str, tuple[int, int]] = {}  # by prefix: the names, and how many subjects were looked at

    def check(self, name: str, rights: Rights) -> None:
        """Raise TooManySubjects where a new lane of a subject would be more than the token's share."""
        store, subjects = self._store, self._store.subjects
        if subjects.has_name(name):
            used, most, count = subjects.further_lane_count, MOST_LANES, subjects.count_lanes_under
        else:
            used, most, count = store.live_subjects, store.max_subjects, self._names_under
        prefix = _prefix_of(name, rights.produce)
        if 2 * used < most or not prefix or (share := count(prefix)) < most - used:
            return  # most often nothing is counted
        what = "priorities and slots of order keys" if subjects.has_name(name) else "subjects"
        raise TooManySubjects(
            f"the broker has room for {most - used:,} more {what}, and {prefix!r}, by which token {rights.name!r} may "
            f"send to {name!r}, has {share:,} already: the rest is for others; use fewer, or raise max_subjects"
        )

    def forget(self) -> None:
        """Count anew: some subjects are forgotten."""
        self._counted.clear()

    def _names_under(self, prefix: str) -> int:
        count, place = self._counted.get(prefix, (0, 0))
        count += self._store.subjects.count_under(prefix, place)
        if len(self._counted) >= _SHARES:
            self._counted.clear()
        self._counted[prefix] = count, self._store.subjects.name_count
        return count


def _prefix_of(name: str, prefixes: Collection[str]) -> str:
    """Return the shortest of these prefixes that takes a name."""
    end = 0
    while name[:end] not in prefixes and end < len(name):
        end = name.find(".", end) + 1 or len(name)
    return name[:end]
