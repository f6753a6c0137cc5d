"""Answers to senders: at once, or when the sync is done that covers what they are about; and to what is sent again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import Effect, LastSequenceIs, Refused, Sent, SyncWanted
from qmq.broker.publish.dedup import Producers, RememberedBatch
from qmq.broker.publish.staging import MOST_WAITING, Answer, StagedPartition
from qmq.errors import QmqError
from qmq.format.batch import parse_header, runs_of
from qmq.format.layout import BATCH_HEADER_SIZE, NO_SEQUENCE, RUN_SIZE


class Repeat(NamedTuple):
    """A batch of this turn that was stored before."""

    command: Send
    known: RememberedBatch


class SendReplies:
    """Of all partitions. Everything it has to say goes to *effects*."""

    def __init__(
        self, producers: Producers, effects: list[Effect], partition_of: Callable[[int], StagedPartition],
        partitions: Callable[[], list[StagedPartition]],
    ) -> None:  # fmt: skip
        self._producers = producers
        self._effects = effects
        self._partition_of = partition_of
        self._partitions = partitions
        self._gone = set[int]()  # connections that ended while answers waited

    def wait(self, partition: StagedPartition, end: int, effect: Answer) -> None:
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
        for partition in self._partitions():
            partition.forget_gone(self._gone)
        self._gone.clear()

    def want_sync(self, partition: StagedPartition) -> None:
        """Ask for a sync if somebody waits for one, and none is under way."""
        if partition.sync_running or partition.broken is not None:
            return
        is_waited_for = partition.waiting or (
            partition.barriers and any(barrier.flush for barrier in partition.barriers)
        )
        if is_waited_for or partition.wanted > partition.synced:
            partition.sync_running = True
            self._effects.append(SyncWanted(partition.number, partition.end()))

    def last_sequence(self, connection: int, request: int, producer_id: bytes) -> None:
        """Answer with the last producer sequence that is stored for good: after the sync that its batch waits for."""
        last = self._producers.last(producer_id)
        if last is None:
            self._effects.append(LastSequenceIs(connection, request, None))
            return
        sequence, known = last
        self._when_stored(known, False, LastSequenceIs(connection, request, sequence))

    # --- repeats -----------------------------------------------------------------------------------------------------

    def answer_repeat(self, repeat: Repeat) -> None:
        """Say what was said when it was stored, or would have been."""
        command, known = repeat
        broken = self._unknown(known)
        if broken is not None:
            self._effects.append(Refused(command.connection, command.request, broken))
            return
        part = self._partition_of(known.partition)
        if part.store.segment_at(part.local, known.position) is None:
            self._effects.append(_sent_long_ago(command, known))
            return
        try:
            view = part.store.peek(part.local, known.position, BATCH_HEADER_SIZE)
            header = parse_header(view)
            view = part.store.peek(part.local, known.position, BATCH_HEADER_SIZE + RUN_SIZE * header.runs)
        except QmqError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return
        firsts = runs_of(view, header)["first_sequence"].copy()
        answer = Sent(
            command.connection, command.request, known.position, header.stored_at_us, known.partition,
            int(firsts[0]) if header.runs == 1 else firsts,
        )  # fmt: skip
        self._when_stored(known, command.flush, answer)

    def _when_stored(self, known: RememberedBatch, flush: bool, effect: Sent | LastSequenceIs) -> None:
        """Say it now, or when the batch is synced: if that is asked for, or if it was asked for when it was stored."""
        partition = self._partition_of(known.partition)
        pending = any(barrier.flush and barrier.start <= known.position < barrier.end for barrier in partition.barriers)
        unsynced = self._is_unsynced(known)
        broken = self._unknown(known)
        if broken is not None:
            self._effects.append(Refused(effect.connection, effect.request, broken))
        elif not (pending or (flush and unsynced)):
            self._effects.append(effect)
        else:
            end = partition.end()  # covers the batch; waiting stays in order of position
            self.wait(partition, end, effect)
            self.want_sync(partition)

    def _is_unsynced(self, known: RememberedBatch) -> bool:
        partition = self._partition_of(known.partition)
        return known.position >= max(partition.synced, partition.store.synced(partition.local))

    def _unknown(self, known: RememberedBatch) -> QmqError | None:
        """Why nobody knows whether a batch is stored; None when it is."""
        return self._partition_of(known.partition).broken if self._is_unsynced(known) else None

    def waiting_for_sync(self) -> int:
        """Answers that wait for an fdatasync."""
        return sum(len(partition.waiting) for partition in self._partitions())


def _sent_long_ago(command: Send, known: RememberedBatch) -> Sent:
    """The answer to a repeat of what is not there any more: nobody knows its sequences and when it was stored, but when
    it was made.
    """
    header = parse_header(command.batch)
    firsts = NO_SEQUENCE if header.runs == 1 else np.full(header.runs, NO_SEQUENCE, np.uint64)
    return Sent(command.connection, command.request, known.position, header.created_at_us, known.partition, firsts)
