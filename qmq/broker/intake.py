"""The send path: check, tell repeats, place, stamp, write, acknowledge, publish.

Batches that arrive in one turn are written with one vectored write a partition. They become visible in append order:
`flush` batches once the fdatasync that covers them is done, and nothing behind one before it. With several partitions a
batch also waits for the earlier batches of its subjects that lie in another one, so each subject is visible in order.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.commands import Effect, LastSequenceIs, Now, Refused, Send, Sent, SyncWanted
from qmq.broker.limits import BrokerLimits
from qmq.broker.producers import Known, Producers, Refusals
from qmq.errors import QmqError, StorageError, SyncFailed
from qmq.format.batch import (
    BatchLimits,
    CheckedBatch,
    check_batch,
    entries_of,
    entry_of,
    parse_header,
    runs_of,
    stamp,
)
from qmq.format.layout import BATCH_HEADER_SIZE, RUN_SIZE
from qmq.names import check_subject
from qmq.storage.store import Store

#: Stretches of a partition that wait for different things, before one waits for the next one's as well.
MAX_BARRIERS: Final = 65_536

#: So many answers wait for a sync before those are looked for that nobody waits for any more.
MOST_WAITING: Final = 16_384

Numbers = npt.NDArray[np.int64]
_Place = tuple[int, int]  # partition, position


class _Staged(NamedTuple):
    """A batch of this turn, stamped and staged but not written."""

    command: Send
    answer: Sent
    end: int
    numbers: int | Numbers
    messages: int | npt.NDArray[Any]
    producer_id: bytes
    producer_sequence: int
    after: tuple[_Place, ...]  # as in _Barrier
    places: dict[int, _Place | None]  # where its subjects were before; several partitions only


class _Repeat(NamedTuple):
    """A batch of this turn that was stored before."""

    command: Send
    known: Known


class _Barrier(NamedTuple):
    """Nothing of the partition from ``start`` on is visible before it is synced up to ``end`` and ``after`` holds."""

    start: int
    end: int
    flush: bool
    after: tuple[_Place, ...]  # positions that must be visible, in other partitions


class _Partition:
    """What the send path keeps of one partition."""

    def __init__(self, number: int, end: int) -> None:
        self.number = number
        self.visible = end
        self.synced = end
        self.staged: list[_Staged] = []
        self.barriers: deque[_Barrier] = deque()
        self.waiting: deque[tuple[int, Sent | LastSequenceIs]] = deque()  # (position to sync, what is said then)
        self.most_waiting = MOST_WAITING
        self.sync_running = False
        self.broken: QmqError | None = None

    def hide(self, barrier: _Barrier) -> None:
        """Add one; where they are many, because a disk has stalled, it makes one with the last."""
        if len(self.barriers) >= MAX_BARRIERS:
            last = self.barriers.pop()
            after = dict(last.after)
            for number, position in barrier.after:
                after[number] = max(position, after.get(number, 0))
            barrier = _Barrier(last.start, barrier.end, last.flush or barrier.flush, tuple(after.items()))
        self.barriers.append(barrier)


class Intake:
    """Takes batches in. Everything it has to say goes to *effects*."""

    def __init__(self, store: Store, limits: BrokerLimits, producers: Producers, effects: list[Effect]) -> None:
        self._store = store
        self._limits = BatchLimits(limits.max_message_bytes)
        self._producers = producers
        self._refusals = Refusals(limits.producer_window, limits.max_producers)
        self._effects = effects
        self._stamp_us = store.last_stored_at_us
        self._partitions = [_Partition(number, store.end(number)) for number in range(store.partitions)]
        self._avoided: frozenset[int] = frozenset()
        self._gone: set[int] = set()  # connections that ended while answers waited
        self._repeats: list[_Repeat] = []
        self._last_places: dict[int, _Place] = {}  # ends, by subject number; several partitions only

    # --- commands ----------------------------------------------------------------------------------------------------

    def send(self, command: Send, now: Now) -> None:
        """Check and stage one batch; raises QmqError when it is refused. It is answered by ``turn`` or later."""
        batch = check_batch(command.batch, self._limits)
        try:
            self._take(command, batch, now)
        except QmqError as error:
            self._refuse(batch.header.producer_id, batch.header.producer_sequence, error)
            raise

    def _take(self, command: Send, batch: CheckedBatch, now: Now) -> None:
        header = batch.header
        known = self._producers.lookup(header.producer_id, header.producer_sequence, header.messages, header.data_crc)
        if known is not None:
            self._repeats.append(_Repeat(command, known))
            return
        numbers = self._numbers_of(batch)
        partition = self._choose(numbers)
        if len(self._partitions) > 1:
            self._write_before(partition, numbers)
        self._refusals.check(header.producer_id, header.producer_sequence)
        try:
            position = self._store.place(partition.number, header.size)
            self._stage(command, batch, partition, position, numbers, now)
        except StorageError as error:
            self._give_up(partition, error)
            raise

    def _refuse(self, producer_id: bytes, first: int, error: QmqError) -> None:
        """Note that a batch was refused; one that is not sent again keeps nothing back."""
        if error.retryable:
            self._refusals.add(producer_id, first, error)

    def last_sequence(self, connection: int, request: int, producer_id: bytes) -> None:
        """Answer with the last producer sequence that is stored for good: after the sync that its batch waits for."""
        last = self._producers.last(producer_id)
        if last is None:
            self._effects.append(LastSequenceIs(connection, request, None))
            return
        sequence, known = last
        self._when_stored(known, False, LastSequenceIs(connection, request, sequence))

    def synced(self, number: int, position: int) -> None:
        """The fdatasync of a partition is done up to *position*."""
        partition = self._partitions[number]
        partition.sync_running = False
        partition.synced = max(partition.synced, position)
        self._store.mark_synced(number, position)
        while partition.waiting and partition.waiting[0][0] <= partition.synced:
            self._effects.append(partition.waiting.popleft()[1])
        self._publish()
        self._want_sync(partition)

    def sync_broken(self, number: int, error: QmqError) -> None:
        """The fdatasync failed: what waits for it is not acknowledged, now or later.

        It is handed out even so, as `append` batches are: others wait behind it, here and in other partitions.
        """
        partition = self._partitions[number]
        partition.sync_running = False
        if not isinstance(error, SyncFailed):  # it says that nobody knows what became of the batches
            error = SyncFailed(f"{error}; nothing more is stored in partition {number} until a restart")
        partition.broken = error
        self._store.give_up(number)
        while partition.waiting:
            effect = partition.waiting.popleft()[1]
            self._effects.append(Refused(effect.connection, effect.request, error))
        self._publish()

    def avoid(self, numbers: frozenset[int]) -> None:
        """Give these partitions no more batches, as long as there are others: their disks are far behind."""
        self._avoided = numbers

    # --- the turn ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Write what was staged since the last turn, answer what can be answered, publish, ask for syncs."""
        for partition in self._partitions:
            if partition.staged:
                self._write(partition)
        if self._repeats:
            repeats, self._repeats = self._repeats, []
            for repeat in repeats:
                self._answer_repeat(repeat)

    def _write(self, partition: _Partition) -> None:
        broken = partition.broken or self._store.broken(partition.number)
        if broken is not None:
            self._store.unstage(partition.number)
            self._give_up(partition, broken)
            return
        try:
            self._store.write(partition.number)
        except SyncFailed as error:
            self._leave(partition, error)
            return
        except QmqError as error:
            self._give_up(partition, error)
            return
        staged, partition.staged = partition.staged, []
        for batch in staged:
            flush = batch.command.flush
            if flush or batch.after:
                partition.hide(_Barrier(batch.answer.position, batch.end, flush, batch.after))
            if flush:
                self._wait(partition, batch.end, batch.answer)
            else:
                self._effects.append(batch.answer)
        self._publish()
        self._want_sync(partition)

    def _want_sync(self, partition: _Partition) -> None:
        if partition.waiting and not partition.sync_running and partition.broken is None:
            partition.sync_running = True
            self._effects.append(SyncWanted(partition.number, self._store.end(partition.number)))

    def _publish(self) -> None:
        """Move each partition's visible end as far as its barriers allow; one that moves may free another."""
        moved = True
        while moved:
            moved = False
            for partition in self._partitions:
                moved |= self._publish_one(partition)
            moved = moved and len(self._partitions) > 1

    def _publish_one(self, partition: _Partition) -> bool:
        barriers = partition.barriers
        while barriers and self._passable(partition, barriers[0]):
            barriers.popleft()
        visible = barriers[0].start if barriers else self._store.end(partition.number)
        if visible <= partition.visible:
            return False
        partition.visible = visible
        self._store.publish(partition.number, visible)
        return True

    def _passable(self, partition: _Partition, barrier: _Barrier) -> bool:
        if barrier.flush and barrier.end > partition.synced and partition.broken is None:
            return False
        return all(self._partitions[number].visible >= position for number, position in barrier.after)

    def _write_before(self, partition: _Partition, numbers: int | Numbers) -> None:
        """Write what is staged of the same subjects in other partitions: if that fails, its sequences are given again,
        so nothing may have been given the next ones.
        """
        for number in _each(numbers):
            place = self._last_places.get(number)
            if place is not None and place[0] != partition.number and place[1] > self._store.end(place[0]):
                self._write(self._partitions[place[0]])

    def _must_come_first(self, partition: _Partition, places: dict[int, _Place | None]) -> tuple[_Place, ...]:
        """Where earlier batches of the same subjects lie that are not visible yet, in other partitions."""
        after: dict[int, int] = {}
        for place in places.values():
            if place is not None and place[0] != partition.number and self._partitions[place[0]].visible < place[1]:
                after[place[0]] = max(place[1], after.get(place[0], 0))
        return tuple(after.items())

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _numbers_of(self, batch: CheckedBatch) -> int | Numbers:
        """The subject number of each run; new subjects are registered."""
        if batch.run is not None:
            name = batch.names[batch.run[0]]
            number = self._store.subject_number(name)
            return self._add(name) if number is None else number
        assert batch.runs is not None
        known = self._store.subject_numbers(batch.names)
        if None in known:
            for name, number in zip(batch.names, known, strict=True):
                if number is None:
                    check_subject(name)  # all of them before any is registered
            known = [
                self._add(name) if number is None else number for name, number in zip(batch.names, known, strict=True)
            ]
        by_run: Numbers = np.array(known, np.int64)[batch.runs["subject"]]
        return by_run

    def _add(self, name: str) -> int:
        """Register a subject; a table may name it twice."""
        number = self._store.subject_number(name)
        return self._store.add_subject(check_subject(name)) if number is None else number

    def _choose(self, numbers: int | Numbers) -> _Partition:
        """The partition of a batch: by its first subject, so that a subject mostly stays in one; never a broken one."""
        if len(self._partitions) == 1:
            chosen = self._partitions[0]
        else:
            first = numbers if isinstance(numbers, int) else int(numbers[0])
            sound = [partition for partition in self._partitions if partition.broken is None]
            if self._avoided:
                sound = [partition for partition in sound if partition.number not in self._avoided] or sound
            chosen = sound[first % len(sound)] if sound else self._partitions[0]
        if chosen.broken is not None:
            raise SyncFailed(f"nothing more is stored in partition {chosen.number} until a restart: {chosen.broken}")
        return chosen

    def _stage(
        self,
        command: Send,
        batch: CheckedBatch,
        partition: _Partition,
        position: int,
        numbers: int | Numbers,
        now: Now,
    ) -> None:
        header = batch.header
        self._stamp_us = stored_at_us = max(now.wall_us, self._stamp_us + 1)
        ends = self._store.ends
        first: int | npt.NDArray[np.uint64]
        messages: int | npt.NDArray[Any]
        if isinstance(numbers, int):
            first, messages = int(ends[numbers]), header.messages
        else:
            assert batch.runs is not None
            first, messages = ends[numbers], batch.runs["count"].astype(np.uint64)
        stamp(
            command.batch, batch, position=position, stored_at_us=stored_at_us, partition=partition.number,
            store_id=self._store.store_id, secret=self._store.secret, first_sequences=first,
        )  # fmt: skip
        if isinstance(numbers, int):
            assert isinstance(first, int)
            self._store.stage(
                partition.number, position, command.batch, entry_of(batch, position, stored_at_us, numbers, first)
            )
        else:
            assert batch.runs is not None
            rows = entries_of(batch.runs, header.size, position, stored_at_us, numbers)
            self._store.stage(partition.number, position, command.batch, rows)
        ends[numbers] += np.uint64(messages) if isinstance(messages, int) else messages
        self._producers.remember(
            header.producer_id, header.producer_sequence, header.messages, header.data_crc, partition.number,
            position, now.monotonic_us,
        )  # fmt: skip
        answer = Sent(command.connection, command.request, position, stored_at_us, partition.number, first)
        end = position + header.size
        places: dict[int, _Place | None] = {}
        if len(self._partitions) > 1:
            places = {number: self._last_places.get(number) for number in _each(numbers)}
            self._last_places.update(dict.fromkeys(places, (partition.number, end)))
        after = self._must_come_first(partition, places)
        producer = header.producer_id, header.producer_sequence
        partition.staged.append(_Staged(command, answer, end, numbers, messages, *producer, after, places))

    def _give_up(self, partition: _Partition, error: QmqError) -> None:
        """A write failed: nothing that was staged is stored; take back what was given and say so."""
        staged, partition.staged = partition.staged, []
        ends = self._store.ends
        for batch in reversed(staged):
            ends[batch.numbers] -= np.uint64(batch.messages) if isinstance(batch.messages, int) else batch.messages
            self._take_back_places(batch)
            self._producers.forget(batch.producer_id, batch.producer_sequence)
            self._refuse(batch.producer_id, batch.producer_sequence, error)
            self._effects.append(Refused(batch.command.connection, batch.command.request, error))
        refused = {(partition.number, batch.answer.position) for batch in staged}
        repeats, self._repeats = self._repeats, []
        for repeat in repeats:
            if repeat.known in refused:
                self._effects.append(Refused(repeat.command.connection, repeat.command.request, error))
            else:
                self._repeats.append(repeat)

    def _leave(self, partition: _Partition, error: SyncFailed) -> None:
        """A write failed, and what it wrote stays there: whole batches of it come back with the next start.

        So what was given is not given again, and nobody knows whether they are stored.
        """
        staged, partition.staged = partition.staged, []
        for batch in reversed(staged):
            self._store.skip_sequences(batch.numbers, batch.answer.first_sequences, batch.messages)
            self._take_back_places(batch)
            self._effects.append(Refused(batch.command.connection, batch.command.request, error))
        self.sync_broken(partition.number, error)

    def _take_back_places(self, batch: _Staged) -> None:
        for number, place in batch.places.items():
            if place is None:
                del self._last_places[number]
            else:
                self._last_places[number] = place

    def _wait(self, partition: _Partition, end: int, effect: Sent | LastSequenceIs) -> None:
        """Answer when the partition is synced up to *end*. Clients that wait for long connect again and ask again."""
        partition.waiting.append((end, effect))
        if len(partition.waiting) > partition.most_waiting:
            self._forget_gone()

    def disconnected(self, connection: int) -> None:
        """Nobody waits for its answers any more."""
        self._gone.add(connection)
        if not self.waiting_for_sync():
            self._gone.clear()
        elif len(self._gone) > MOST_WAITING:
            self._forget_gone()

    def _forget_gone(self) -> None:
        for partition in self._partitions:
            partition.waiting = deque(entry for entry in partition.waiting if entry[1].connection not in self._gone)
            partition.most_waiting = max(MOST_WAITING, 2 * len(partition.waiting))
        self._gone.clear()

    # --- repeats -----------------------------------------------------------------------------------------------------

    def _answer_repeat(self, repeat: _Repeat) -> None:
        command, known = repeat
        broken = self._unknown(known)
        if broken is not None:
            self._effects.append(Refused(command.connection, command.request, broken))
            return
        try:
            view = self._store.peek(known.partition, known.position, BATCH_HEADER_SIZE)
            header = parse_header(view)
            view = self._store.peek(known.partition, known.position, BATCH_HEADER_SIZE + RUN_SIZE * header.runs)
        except QmqError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return
        firsts = runs_of(view, header)["first_sequence"].copy()
        answer = Sent(
            command.connection, command.request, known.position, header.stored_at_us, known.partition,
            int(firsts[0]) if header.runs == 1 else firsts,
        )  # fmt: skip
        self._when_stored(known, command.flush, answer)

    def _when_stored(self, known: Known, flush: bool, effect: Sent | LastSequenceIs) -> None:
        """Say it now, or when the batch is synced: if that is asked for, or if it was asked for when it was stored."""
        partition = self._partitions[known.partition]
        pending = any(barrier.flush and barrier.start <= known.position < barrier.end for barrier in partition.barriers)
        unsynced = self._is_unsynced(known)
        broken = self._unknown(known)
        if broken is not None:
            self._effects.append(Refused(effect.connection, effect.request, broken))
        elif not (pending or (flush and unsynced)):
            self._effects.append(effect)
        else:
            end = self._store.end(known.partition)  # covers the batch; waiting stays in order of position
            self._wait(partition, end, effect)
            self._want_sync(partition)

    def _is_unsynced(self, known: Known) -> bool:
        partition = self._partitions[known.partition]
        return known.position >= max(partition.synced, self._store.synced(known.partition))

    def _unknown(self, known: Known) -> QmqError | None:
        """Why nobody knows whether a batch is stored; None when it is."""
        return self._partitions[known.partition].broken if self._is_unsynced(known) else None

    # --- what others ask ---------------------------------------------------------------------------------------------

    def visible(self, partition: int) -> int:
        """The position up to which that partition's messages may be pulled."""
        return self._partitions[partition].visible

    def waiting_for_sync(self) -> int:
        """Answers that wait for an fdatasync."""
        return sum(len(partition.waiting) for partition in self._partitions)


def _each(numbers: int | Numbers) -> list[int]:
    return [numbers] if isinstance(numbers, int) else numbers.tolist()
