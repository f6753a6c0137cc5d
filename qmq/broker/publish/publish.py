"""The send path: check, tell repeats, place, stamp, write, acknowledge, publish.

Batches that arrive in one turn are written with one vectored write a partition. They become visible in append order:
`flush` batches once the fdatasync that covers them is done, and nothing behind one before it. With several partitions a
batch also waits for the earlier batches of its subjects that lie in another one, so each subject is visible in order.

The numbers of the subjects that a batch has messages of; those that are new are registered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.commands import Now, Send
from qmq.broker.ports.effects import Effect, Refused, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.publish.dedup import Producers, RefusedBatches
from qmq.broker.publish.send_replies import Repeat, SendReplies
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
from qmq.errors import QmqError, StorageError, SyncFailed
from qmq.format.batch import (
    ANY_MESSAGE_BYTES,
    BatchLimits,
    CheckedBatch,
    check_batch,
    entries_of,
    entry_of,
    stamp,
    with_ahead,
)
from qmq.format.layout import HANDED_FLAGS, HAS_DELIVER_AT, RUN_REPLAYED
from qmq.format.private import PRIVATE
from qmq.names import check_subject
from qmq.storage.store import Store


class Intake:
    """Takes batches in. Everything it has to say goes to *effects*."""

    def __init__(self, store: Store, limits: BrokerLimits, producers: Producers, effects: list[Effect]) -> None:
        self._store = store
        self._limits = BatchLimits(limits.max_message_bytes)
        self._copy_limits = BatchLimits(ANY_MESSAGE_BYTES, HANDED_FLAGS, RUN_REPLAYED)
        self._producers = producers
        self._refusals = RefusedBatches(limits.producer_window, limits.max_producers)
        self._effects = effects
        logs = [store] if store.delay_log is None else [store, store.delay_log]
        self._stamp_us = max(log.last_stored_at_us for log in logs)
        self._partitions = [StagedPartition(number, store, number) for number in range(store.partitions)]
        self._visibility = Visibility(self._partitions)
        #: Where delayed messages go, once there have been any.
        self.delay_log: DelayLog | None = None
        self._avoided: frozenset[int] = frozenset()
        self._numbering = SubjectNumbering(store)
        self.replies = SendReplies(producers, effects, self._partition, self._all)
        self._repeats: list[Repeat] = []
        self._last_positions: dict[int, LogPosition] = {}  # ends, by subject number; several partitions only

    # --- commands ----------------------------------------------------------------------------------------------------

    def send(self, command: Send, now: Now) -> None:
        """Check and stage one batch; raises QmqError when it is refused. It is answered by ``turn`` or later."""
        batch = check_batch(command.batch, self._copy_limits if command.copy else self._limits)
        try:
            self._take(command, batch, now)
        except QmqError as error:
            if not command.copy:
                self._refuse(batch.header.producer_id, batch.header.producer_sequence, error)
            raise

    def _take(self, command: Send, batch: CheckedBatch, now: Now) -> None:
        header, known = batch.header, None
        if not command.copy:
            known = self._producers.lookup(
                header.producer_id, header.producer_sequence, header.messages, header.data_crc
            )
        if known is not None:
            self._repeats.append(Repeat(command, known))
            return
        view, batch = self._timed(command.batch, batch, now)
        header = batch.header
        own: OwnBatch | None = None
        if header.flags & HAS_DELIVER_AT:
            assert self.delay_log is not None
            own = self.delay_log.arriving(view, batch, now.wall_us)
            partition = self.delay_log.partition()
            self._check_whole(partition)
            numbers = self.delay_log.numbers_of(batch)
        else:
            numbers = self._numbering.of(batch) if command.numbers is None else command.numbers
            partition = self._choose(numbers)
            if len(self._partitions) > 1:
                self._write_before(partition, numbers)
        if not command.copy:
            self._refusals.check(header.producer_id, header.producer_sequence)
        position = self._placed(partition, header.size)
        self._stage(view, batch, partition, position, numbers, now, command, own, command.flush)

    def append(
        self, buffer: bytearray, batch: CheckedBatch, own: OwnBatch, now: Now, answer: Answer | None = None,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Have a batch of the broker's own written by the next ``turn``: to the delay log when there is an *answer*,
        which is then given once it is on disk; else to the message log, where it is seen once it is on disk, for what a
        loss of power took away falls due again. *number* is that of its subject where that is one group's own.

        Raises StorageError: it is not stored then, and *own* is told nothing.
        """
        if answer is not None:
            assert self.delay_log is not None
            partition = self.delay_log.partition()
            self._check_whole(partition)
            numbers = self.delay_log.numbers_of(batch)
        else:
            numbers = self._numbering.of(batch, forced=True) if number is None else number
            partition = self._choose(numbers)
            if len(self._partitions) > 1:
                self._write_before(partition, numbers)
        view, batch = self._timed(memoryview(buffer), batch, now)
        position = self._placed(partition, batch.header.size)
        self._stage(view, batch, partition, position, numbers, now, None, own, True, answer)

    def _timed(self, view: memoryview, batch: CheckedBatch, now: Now) -> tuple[memoryview, CheckedBatch]:
        """The batch, made to say how far its stamp will be ahead of the wall clock, where that matters."""
        ahead_us = self._stamp_us + 1 - now.wall_us
        return with_ahead(view, batch, ahead_us) if ahead_us > 0 else (view, batch)

    def _placed(self, partition: StagedPartition, size: int) -> int:
        try:
            return partition.store.position_for(partition.local, size)
        except StorageError as error:
            self._give_up(partition, error)
            raise

    def _refuse(self, producer_id: bytes, first: int, error: QmqError) -> None:
        """Note that a batch was refused; one that is not sent again keeps nothing back."""
        if error.retryable:
            self._refusals.add(producer_id, first, error)

    def synced(self, number: int, position: int) -> None:
        """The fdatasync of a partition is done up to *position*."""
        partition = self._partition(number)
        partition.sync_running = False
        partition.synced = max(partition.synced, position)
        partition.store.mark_synced(partition.local, position)
        while partition.waiting and partition.waiting[0][0] <= partition.synced:
            self._effects.append(partition.waiting.popleft()[1])
        self._publish(partition)
        self.replies.want_sync(partition)

    def sync_broken(self, number: int, error: QmqError) -> None:
        """The fdatasync failed: what waits for it is not acknowledged, now or later.

        It is handed out even so, as `append` batches are: others wait behind it, here and in other partitions.
        """
        partition = self._partition(number)
        partition.sync_running = False
        if not isinstance(error, SyncFailed):  # it says that nobody knows what became of the batches
            error = SyncFailed(f"{error}; nothing more is stored in partition {number} until a restart")
        partition.broken = error
        partition.store.give_up(partition.local)
        while partition.waiting:
            effect = partition.waiting.popleft()[1]
            self._effects.append(Refused(effect.connection, effect.request, error))
        self._publish(partition)

    def avoid(self, numbers: frozenset[int]) -> None:
        """Give these partitions no more batches, as long as there are others: their disks are far behind."""
        self._avoided = numbers

    # --- the turn ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Write what was staged since the last turn, answer what can be answered, publish, ask for syncs."""
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
        broken = partition.broken or partition.store.broken(partition.local)
        if broken is not None:
            partition.store.unstage(partition.local)
            self._give_up(partition, broken)
            return
        try:
            partition.store.write(partition.local)
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
        """Something is written or synced there: what it hid may be seen now."""
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
        """Write what is staged of the same subjects in other partitions: if that fails, its sequences are given again,
        so nothing may have been given the next ones.
        """
        for number in _each(numbers):
            log_position = self._last_positions.get(number)
            if (
                log_position is not None
                and log_position[0] != partition.number
                and log_position[1] > self._store.end(log_position[0])
            ):
                self._write(self._partitions[log_position[0]])

    def _must_come_first(
        self, partition: StagedPartition, last_positions: dict[int, LogPosition | None]
    ) -> tuple[LogPosition, ...]:
        """Where earlier batches of the same subjects lie that are not visible yet, in other partitions."""
        after: dict[int, int] = {}
        for log_position in last_positions.values():
            if (
                log_position is not None
                and log_position[0] != partition.number
                and self._partitions[log_position[0]].visible < log_position[1]
            ):
                after[log_position[0]] = max(log_position[1], after.get(log_position[0], 0))
        return tuple(after.items())

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _choose(self, numbers: int | Numbers) -> StagedPartition:
        """The partition of a batch: by its first subject, so that a subject mostly stays in one; never a broken one."""
        if len(self._partitions) == 1:
            chosen = self._partitions[0]
        else:
            first = numbers if isinstance(numbers, int) else int(numbers[0])
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
    ) -> None:
        header = batch.header
        self._stamp_us = stored_at_us = max(now.wall_us, self._stamp_us + 1)
        first, messages = _hand_in(partition, view, batch, position, stored_at_us, numbers)
        if command is not None:
            if not command.copy:
                self._producers.remember(
                    header.producer_id, header.producer_sequence, header.messages, header.data_crc, partition.number,
                    position, now.monotonic_us,
                )  # fmt: skip
            answer = Sent(command.connection, command.request, position, stored_at_us, partition.number, first)
        end = position + header.size
        last_positions: dict[int, LogPosition | None] = {}
        after: tuple[LogPosition, ...] = ()
        if len(self._partitions) > 1 and partition.store is self._store:
            last_positions = {number: self._last_positions.get(number) for number in _each(numbers)}
            self._last_positions.update(dict.fromkeys(last_positions, (partition.number, end)))
            after = self._must_come_first(partition, last_positions)
        staged = StagedBatch(
            command, answer, own, flush, position, end, stored_at_us, first, numbers, messages, header.producer_id,
            header.producer_sequence, after, last_positions,
        )  # fmt: skip
        partition.staged.append(staged)

    def _give_up(self, partition: StagedPartition, error: QmqError) -> None:
        """A write failed: nothing that was staged is stored; take back what was given and say so."""
        staged, partition.staged = partition.staged, []
        ends = partition.store.ends
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
        refused = {(partition.number, batch.position) for batch in staged}
        repeats, self._repeats = self._repeats, []
        for repeat in repeats:
            if repeat.known in refused:
                self._effects.append(Refused(repeat.command.connection, repeat.command.request, error))
            else:
                self._repeats.append(repeat)

    def _leave(self, partition: StagedPartition, error: SyncFailed) -> None:
        """A write failed, and what it wrote stays there: whole batches of it come back with the next start.

        So what was given is not given again, and nobody knows whether they are stored.
        """
        staged, partition.staged = partition.staged, []
        for batch in reversed(staged):
            partition.store.skip_sequences(batch.numbers, batch.first_sequences, batch.messages)
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

    # --- what others ask ---------------------------------------------------------------------------------------------

    def on_disk(self, number: int) -> int:
        """The position up to which that partition is on disk; where a sync has failed, its end."""
        partition = self._partitions[number]
        if partition.broken is not None:
            return partition.end()
        return max(partition.synced, partition.store.synced(partition.local))

    def want_on_disk(self, number: int) -> None:
        """Have all that is written there brought to disk, though nobody waits for an answer."""
        partition = self._partitions[number]
        partition.wanted = partition.end()
        self.replies.want_sync(partition)

    def visible(self, partition: int) -> int:
        """The position up to which that partition's messages may be pulled."""
        return self._partitions[partition].visible


def _hand_in(
    partition: StagedPartition, view: memoryview, batch: CheckedBatch, position: int, stored_at_us: int,
    numbers: int | Numbers,
) -> tuple[int | npt.NDArray[np.uint64], int | npt.NDArray[Any]]:  # fmt: skip
    """Stamp a batch and stage it in its store; its first sequences and messages, by run where it has several."""
    header, store = batch.header, partition.store
    ends = store.ends
    first: int | npt.NDArray[np.uint64]
    messages: int | npt.NDArray[Any]
    if isinstance(numbers, int):
        first, messages = int(ends[numbers]), header.messages
    else:
        assert batch.runs is not None
        first, messages = ends[numbers], batch.runs["count"].astype(np.uint64)
    stamp(
        view, batch, position=position, stored_at_us=stored_at_us, partition=partition.local,
        store_id=store.store_id, secret=store.secret, first_sequences=first,
    )  # fmt: skip
    if isinstance(numbers, int):
        assert isinstance(first, int)
        store.stage(partition.local, position, view, entry_of(batch, position, stored_at_us, numbers, first))
    else:
        assert batch.runs is not None
        rows = entries_of(batch.runs, header, position, stored_at_us, numbers)
        store.stage(partition.local, position, view, rows)
    ends[numbers] = first + messages
    return first, messages


def _each(numbers: int | Numbers) -> list[int]:
    return [numbers] if isinstance(numbers, int) else numbers.tolist()


class SubjectNumbering:
    """Of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def of(self, batch: CheckedBatch, *, forced: bool = False) -> int | Numbers:
        """The subject number of each run; new subjects are registered, *forced* also beyond their limit.

        Raises what check_subject and Store.add_subject do.
        """
        if self._store.has_private and PRIVATE in "".join(batch.names):
            for name in batch.names:
                check_subject(name)
        if batch.run is not None:
            name = batch.names[batch.run[0]]
            number = self._store.subject_number(name)
            return self._add(name, forced) if number is None else number
        assert batch.runs is not None
        known = self._store.subject_numbers(batch.names)
        if None in known:
            for name, number in zip(batch.names, known, strict=True):
                if number is None:
                    check_subject(name)  # all of them before any is registered
            known = [
                self._add(name, forced) if number is None else number
                for name, number in zip(batch.names, known, strict=True)
            ]
        by_run: Numbers = np.array(known, np.int64)[batch.runs["subject"]]
        return by_run

    def _add(self, name: str, forced: bool) -> int:
        """Register a subject; a table may name it twice."""
        number = self._store.subject_number(name)
        return self._store.add_subject(check_subject(name), forced=forced) if number is None else number
