"""Answer senders: at once, or when the sync that covers their batch is done; and answer repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import Administered, Effect, LastSequenceIs, Refused, Sent, SentDuplicates, SyncWanted
from qmq.broker.publish.dedup import Producers, RememberedBatch
from qmq.broker.publish.staging import MOST_WAITING, Answer, StagedPartition
from qmq.broker.publish.unique_sends import Duplicates, UniqueBatch, answer_to, left_out_before, places_of
from qmq.broker.publish.unique_texts import UniqueTexts
from qmq.errors import Overloaded, QmqError, SequenceForgotten
from qmq.format.batch import CheckedBatch, Header, parse_header, runs_of
from qmq.format.layout import BATCH_HEADER_SIZE, NO_SEQUENCE, RUN_SIZE

_NOWHERE: Final = RememberedBatch(0, 0)


class Repeat(NamedTuple):
    """A batch of this turn that was stored before; *unique* is what it has of unique texts."""

    command: Send
    known: RememberedBatch
    unique: UniqueBatch | None = None

    def places(self) -> Iterable[RememberedBatch]:
        """Return where the messages are that it repeats."""
        return (self.known,)


class DuplicateBatch(NamedTuple):
    """A batch of this turn of which nothing is stored, as all messages repeat unique texts."""

    command: Send
    batch: CheckedBatch
    #: The UNIQUE_ROW of the first message by the ordinal of its repeat.
    duplicates: dict[int, bytes]

    def places(self) -> Iterable[RememberedBatch]:
        """Return where the messages are that it repeats."""
        return places_of(self.duplicates)


class SendReplies:
    """The answers to the senders of all partitions. They go to *effects*."""

    def __init__(
        self, producers: Producers, effects: list[Effect], partition_of: Callable[[int], StagedPartition],
        partitions: Callable[[], list[StagedPartition]], unique_texts: UniqueTexts,
    ) -> None:  # fmt: skip
        self._producers = producers
        self._unique_texts = unique_texts
        self._effects = effects
        self._partition_of = partition_of
        self._partitions = partitions
        self._gone = set[int]()  # connections that closed while answers waited

    def wait(self, partition: StagedPartition, end: int, effect: Answer) -> None:
        """Send *effect* when the partition is synced up to *end*. A client that waits too long connects and asks
        again.
        """
        partition.waiting.append((end, effect))
        if len(partition.waiting) > partition.most_waiting:
            self._forget_gone()

    def disconnected(self, connection: int) -> None:
        """Note that a connection is gone; the waiting answers of many such connections are dropped together."""
        self._gone.add(connection)
        if not self.waiting_for_sync():
            self._gone.clear()
        elif len(self._gone) > MOST_WAITING:
            self._forget_gone()

    def _forget_gone(self) -> None:
        for partition in self._partitions():
            partition.forget_gone(self._gone)
        self._gone.clear()

    def want_sync(self, partition: StagedPartition) -> None:
        """Ask for a sync when something waits for one and none is under way."""
        if partition.sync_running or partition.broken is not None:
            return
        is_waited_for = partition.waiting or (
            partition.barriers and any(barrier.flush for barrier in partition.barriers)
        )
        if is_waited_for or partition.wanted > partition.synced:
            partition.sync_running = True
            self._effects.append(SyncWanted(partition.number, partition.end()))

    def last_sequence(self, connection: int, request: int, producer_id: bytes) -> None:
        """Answer with the last stored producer sequence, after the sync that its batch waits for."""
        last = self._producers.last(producer_id)
        if last is None:
            self._effects.append(LastSequenceIs(connection, request, None))
            return
        sequence, known = last
        self._when_stored(known, False, LastSequenceIs(connection, request, sequence))

    # --- repeats ------------------------------------------------------------------------------------------------------

    def answer_repeat(self, repeat: Repeat | DuplicateBatch) -> None:
        """Repeat the answer that the batch got when it was stored, or would have got; say of a batch that is a
        duplicate where its first messages are.
        """
        if isinstance(repeat, DuplicateBatch):
            command, batch, duplicates = repeat
            left_out = answer_to(command, batch, duplicates, _NOWHERE, 0, NO_SEQUENCE)
            self._when_all_stored(repeat.places(), command.flush, left_out)
            return
        command, known, unique = repeat
        broken = self._unknown_since(known)
        if broken is not None:
            self._effects.append(Refused(command.connection, command.request, broken))
            return
        part = self._partition_of(known.partition)
        if part.stored.message_log.segment_at(known.position) is None:
            if unique is None or not self._answer_without(repeat, None, NO_SEQUENCE):
                self._effects.append(_sent_long_ago(command, known))
            return
        try:
            view = part.stored.page_cache.peek(known.position, BATCH_HEADER_SIZE)
            header = parse_header(view)
            view = part.stored.page_cache.peek(known.position, BATCH_HEADER_SIZE + RUN_SIZE * header.runs)
        except QmqError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return
        firsts = runs_of(view, header)["first_sequence"].copy()
        if unique is not None and header.messages < unique.batch.header.messages:
            self._answer_without(repeat, header, firsts)
            return
        answer = Sent(
            command.connection, command.request, known.position, header.stored_at_us, known.partition,
            int(firsts[0]) if header.runs == 1 else firsts,
        )  # fmt: skip
        self._when_stored(known, command.flush, answer)

    def _answer_without(
        self, repeat: Repeat, stored: Header | None, first_sequences: int | npt.NDArray[np.uint64]
    ) -> bool:
        """Answer a repeat of which messages were left out; return False where none were. *stored* is the header of the
        rest; None: it is gone.
        """
        command, known, unique = repeat
        assert unique is not None
        left_out = left_out_before(unique, self._unique_texts, known)
        if left_out is None:
            error = SequenceForgotten(
                "the batch was stored without some messages, as they repeated unique texts, and the broker has "
                "forgotten which: unique_for_ms is over, or max_unique_texts are remembered"
            )
            self._effects.append(Refused(command.connection, command.request, error))
            return True
        if not left_out:
            return False
        stored_at_us = unique.batch.header.created_at_us if stored is None else stored.stored_at_us
        answer = answer_to(command, unique.batch, left_out, known, stored_at_us, first_sequences)
        self._when_all_stored((known, *places_of(left_out)), command.flush, answer)
        return True

    def _when_all_stored(self, places: Iterable[RememberedBatch], flush: bool, effect: SentDuplicates) -> None:
        """Do as ``_when_stored`` for messages at several places. Where they wait in several partitions, the client is
        to ask again.
        """
        waiting = dict[int, RememberedBatch]()
        for place in places:
            if (broken := self._unknown_since(place)) is not None:
                self._effects.append(Refused(effect.connection, effect.request, broken))
                return
            if self._waits(place, flush):
                waiting[place.partition] = place
        if len(waiting) > 1:
            error = self._in_several_partitions(map(self._partition_of, waiting))
            self._effects.append(Refused(effect.connection, effect.request, error))
        elif waiting:
            self._when_stored(next(iter(waiting.values())), flush, effect)
        else:
            self._effects.append(effect)

    def _waits(self, place: RememberedBatch, flush: bool) -> bool:
        """Return whether what is stored at a place waits for a sync; *flush*: the one who asks wants it on disk."""
        partition = self._partition_of(place.partition)
        pending = any(barrier.flush and barrier.start <= place.position < barrier.end for barrier in partition.barriers)
        return pending or (flush and self._is_unsynced(place))

    def must_flush(self, partition: StagedPartition, duplicates: Duplicates, flush: bool) -> bool:
        """Return whether a batch for *partition*, of which *duplicates* are left out, is to be answered after a sync:
        it was sent with *flush*, or the first messages may wait for one. Raises Overloaded where these are in another
        partition and wait there, and the error of a failed sync.
        """
        for place in places_of({ordinal: row for ordinal, row in duplicates.items() if isinstance(row, bytes)}):
            if (broken := self._unknown_since(place)) is not None:
                raise broken
            if place.partition == partition.number:
                flush = flush or self._is_unsynced(place)
            elif place.position >= self._partition_of(place.partition).end() or self._waits(place, flush):
                raise self._in_several_partitions([self._partition_of(place.partition)])
        return flush

    def _in_several_partitions(self, partitions: Iterable[StagedPartition]) -> Overloaded:
        """Return the error for what waits for the disk in these partitions, and have them synced, so that the client
        soon gets an answer.
        """
        for partition in partitions:
            partition.wanted = partition.end()
            self.want_sync(partition)
        return Overloaded("the messages that were sent first wait for the disk in another partition")

    def _when_stored(self, known: RememberedBatch, flush: bool, effect: Sent | SentDuplicates | LastSequenceIs) -> None:
        """Send *effect* now, or after the sync when *flush* asks for it or the batch was stored with ``flush``."""
        partition = self._partition_of(known.partition)
        broken = self._unknown_since(known)
        if broken is not None:
            self._effects.append(Refused(effect.connection, effect.request, broken))
        elif not self._waits(known, flush):
            self._effects.append(effect)
        else:
            end = partition.end()  # covers the batch; waiting stays in order of position
            self.wait(partition, end, effect)
            self.want_sync(partition)

    def answer_on_disk(self, partition: StagedPartition, effect: Administered) -> None:
        """Send *effect* once all that a partition has is on disk; after a failed sync, the error instead."""
        end = partition.end()
        if end <= max(partition.synced, partition.stored.message_log.synced):
            self._effects.append(effect)
        elif partition.broken is not None:
            self._effects.append(Refused(effect.connection, effect.request, partition.broken))
        else:
            self.wait(partition, end, effect)
            self.want_sync(partition)

    def _is_unsynced(self, known: RememberedBatch) -> bool:
        partition = self._partition_of(known.partition)
        return known.position >= max(partition.synced, partition.stored.message_log.synced)

    def _unknown_since(self, known: RememberedBatch) -> QmqError | None:
        """Return the sync failure since which it is unknown whether the batch is on disk; None when that is known."""
        return self._partition_of(known.partition).broken if self._is_unsynced(known) else None

    def waiting_for_sync(self) -> int:
        """Return how many answers wait for an fdatasync."""
        return sum(len(partition.waiting) for partition in self._partitions())


def _sent_long_ago(command: Send, known: RememberedBatch) -> Sent:
    """Return the answer to a repeat whose segment is gone: without sequences, and with the time of creation as stored
    time.
    """
    header = parse_header(command.batch)
    firsts = NO_SEQUENCE if header.runs == 1 else np.full(header.runs, NO_SEQUENCE, np.uint64)
    return Sent(command.connection, command.request, known.position, header.created_at_us, known.partition, firsts)
