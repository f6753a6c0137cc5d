"""Answer senders: at once, or when the sync that covers their batch is done; and answer repeats."""

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
    """The answers to the senders of all partitions. They go to *effects*."""

    def __init__(
        self, producers: Producers, effects: list[Effect], partition_of: Callable[[int], StagedPartition],
        partitions: Callable[[], list[StagedPartition]],
    ) -> None:  # fmt: skip
        self._producers = producers
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

    def answer_repeat(self, repeat: Repeat) -> None:
        """Repeat the answer that the batch got when it was stored, or would have got."""
        command, known = repeat
        broken = self._unknown_since(known)
        if broken is not None:
            self._effects.append(Refused(command.connection, command.request, broken))
            return
        part = self._partition_of(known.partition)
        if part.stored.message_log.segment_at(known.position) is None:
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
        answer = Sent(
            command.connection, command.request, known.position, header.stored_at_us, known.partition,
            int(firsts[0]) if header.runs == 1 else firsts,
        )  # fmt: skip
        self._when_stored(known, command.flush, answer)

    def _when_stored(self, known: RememberedBatch, flush: bool, effect: Sent | LastSequenceIs) -> None:
        """Send *effect* now, or after the sync when *flush* asks for it or the batch was stored with ``flush``."""
        partition = self._partition_of(known.partition)
        pending = any(barrier.flush and barrier.start <= known.position < barrier.end for barrier in partition.barriers)
        unsynced = self._is_unsynced(known)
        broken = self._unknown_since(known)
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
