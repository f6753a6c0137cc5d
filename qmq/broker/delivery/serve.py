"""Answering one pull: with messages that are delivered again, with new ones, or not yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from qmq.broker.delivery.at_most_once import AtMostOnce, OnDiskWaits
from qmq.broker.delivery.encode import AnswerEncoder
from qmq.broker.delivery.read_waits import ReadWaits
from qmq.broker.delivery.select import PullSelection
from qmq.broker.delivery.selector import PullSelector
from qmq.broker.delivery.subscriptions import hidden_since
from qmq.broker.delivery.tracker import DeliveryTracker
from qmq.broker.delivery.wakeups import Arrivals, WaitingPulls
from qmq.broker.groups.group import SubjectFilter, Subscription, Waiting
from qmq.broker.groups.membership import MessageKind, Offer
from qmq.broker.ports.commands import Pull
from qmq.broker.ports.effects import Buffer, Effect, PulledMessages, Refused, failed
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InternalError, QmqError, StorageError
from qmq.format.batch import made
from qmq.format.layout import LANE_LOW, LANE_ORDERED_LOW
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import NotInMemory, Store

log = logging.getLogger("qmq.broker")


class TooFew(NamedTuple):
    """How many messages are ready for a pull that waits for more."""

    ready: int
    #: The consumer may get nothing now, whatever is ready.
    is_blocked: bool = False


_NONE_READY: Final = TooFew(0)
_BLOCKED: Final = TooFew(0, is_blocked=True)
#: No retry could be handed out now: its messages are gone, or are not for this consumer. The caller tries again.
_PASSED: Final = TooFew(0)
#: How often one pull tries again within one turn.
_MOST_PASSED: Final = 16
#: The kinds of lanes with low priority.
_LOW_KINDS: Final = (LANE_LOW, LANE_ORDERED_LOW)
#: Globals, since looking up a member of an enum is slow.
_FRESH: Final = MessageKind.FRESH
_AGAIN: Final = MessageKind.AGAIN
#: The most bytes of an answer that is read while everybody waits.
_WAITED_BYTES: Final = 256 << 10


@contextmanager
def blocking_reads(store: Store) -> Iterator[None]:
    """Within it, the store reads from disk what is not in memory, while everybody waits."""
    store.may_wait(True)
    try:
        yield
    finally:
        store.may_wait(False)


class PullServer:
    """Answers new and waiting pulls. The answers go to *effects*."""

    def __init__(
        self, store: Store, limits: BrokerLimits, effects: list[Effect], visible: Callable[[int], int],
        waiting_pulls: WaitingPulls, reads: ReadWaits, arrivals: Arrivals, tracker: DeliveryTracker,
        at_most_once: AtMostOnce, on_disk: OnDiskWaits,
    ) -> None:  # fmt: skip
        """*visible* returns the position before which a partition's messages may be pulled."""
        self._store = store
        self._limits = limits
        self._effects = effects
        self._visible = visible
        self._waiting_pulls = waiting_pulls
        self._reads = reads
        self._arrivals = arrivals
        self._tracker = tracker
        self._at_most_once = at_most_once
        self._selector = PullSelector(store, tracker, on_disk)
        self.damaged: list[QmqError] = []  # failed reads since the last take_damaged

    def need(self, pull: Pull) -> int:
        """Return how many messages a pull waits for."""
        return min(max(pull.min_count, 1), self._limits.max_pull_count)

    def serve(self, waiting: Waiting, final: bool) -> TooFew | None:
        """Answer a pull when enough messages are ready, or when *final* with whatever is ready and needs no read.

        Return None when the pull was answered.
        """
        for _ in range(_MOST_PASSED):
            try:
                too_few = self._try(waiting, final)
            except InternalError as error:  # it would pass messages without a word about them
                log.error("%s", error)
                self.refuse(waiting, error)
                return None
            except (QmqError, NotInMemory):
                raise
            except Exception as error:  # this pull gets an answer, and the others their turn
                self._waiting_pulls.remove(waiting)
                self._effects.append(failed(waiting.pull.connection, waiting.pull.request, error))
                return None
            if too_few is not _PASSED:
                return too_few
        self._arrivals.make_ready(waiting.subscription.filters)  # go on in the next turn
        return _NONE_READY

    def _try(self, waiting: Waiting, final: bool) -> TooFew | None:
        pull, subscription = waiting.pull, waiting.subscription
        try:
            offer = self._tracker.offer(subscription, pull)
        except QmqError as error:
            self.refuse(waiting, error)
            return None
        if offer.kind is not _FRESH and offer.kind is not _AGAIN:
            return self._redeliver(waiting, offer, final)
        if not final and not offer.ranks and not self._may_have(subscription):
            return _NONE_READY
        need = 1 if final or offer.kind is _AGAIN else min(self.need(pull), offer.max_count)
        selection = self._selector.choose(subscription, offer, need)
        if not selection.count:
            self._selector.pass_over(subscription, selection)
            if selection.passed:
                self._wake_freed(subscription)
        if selection.awaits_sync and selection.count < need:
            return _NONE_READY  # also past the deadline: the sync has been asked for, and wakes the pull
        if self._is_ahead(subscription, selection):
            return self._reserve(waiting, selection)
        wanted = selection.wanted
        in_vain = wanted is not None and not self._reads.begin(wanted, selection.stopped_at)
        if in_vain and selection.count < need:
            return self._serve_blocking(waiting, offer)
        if selection.count >= need:
            return self._answer(waiting, selection, final)
        if selection.failed is not None:
            self.refuse(waiting, selection.failed)
            return None
        if offer.ranks and not selection.count:
            rank, most = selection.retries or (offer.ranks[0], offer.max_count)
            return self._redeliver(waiting, offer._replace(kind=_AGAIN, ranks=(rank,), max_count=most), final)
        bound = selection.full and wanted is None
        if bound and not selection.count:
            self._arrivals.make_ready(subscription.filters)  # go on in the next turn
        reading = any(lane.reading for base in subscription.filters for lane in base.with_lanes())
        if not reading and (final or (bound and selection.count)):
            return self._answer(waiting, selection, final)
        return TooFew(selection.count)

    def answer_at_once(self, pull: Pull, subscription: Subscription, offer: Offer) -> PulledMessages | None:
        """Record and return the answer to a pull that gets new messages now. Return None, with none of them handed out,
        where that is not so simple: ``serve`` may wait, read or refuse.
        """
        need = max(pull.min_count, 1)
        selection = self._selector.choose(subscription, offer, need)
        if selection.count < need or selection.wanted is not None:
            if not selection.count and not selection.passed:
                selection.apply()  # what it has read is not read again
            return None
        encoder = AnswerEncoder(self._store, self.damaged)
        buffers = encoder.encode(selection.parts)
        return None if encoder.left_out else self._recorded(pull, subscription, selection, encoder, buffers)

    def _may_have(self, subscription: Subscription) -> bool:
        """Return whether there may be new messages for a subscription. Most pulls come when there are none."""
        for subject_filter in subscription.filters:
            if subject_filter.has_more(self._store):
                return True
        # Finding lanes may change the filters of subjects, too: those of solo consumers then read rows.
        return subscription.find_lanes(self._store) and any(
            lane.has_more(self._store) for lane in subscription.every_lane()
        )

    def _note_handed(self, subscription: Subscription, by_rank: list[int]) -> None:
        """Count messages that were handed out, by rank, for the share of lower priorities, and begin the reads of their
        lanes anew.
        """
        for base in subscription.filters:
            for lane in base.lanes.values():
                lane.reads.clear()
        ledger = subscription.group.ledger
        if ledger is not None:
            has_low = any(not base.lanes.keys().isdisjoint(_LOW_KINDS) for base in subscription.filters)
            subscription.group.share.note_handed(by_rank, ledger.settings.priority_share, has_low=has_low)
        self._wake_freed(subscription)

    def _wake_freed(self, subscription: Subscription) -> None:
        """Wake others when a message that was taken was none to hand out, and its slot is free."""
        ledger = subscription.group.ledger
        if ledger is not None and ledger.order is not None and ledger.order.is_freed:
            ledger.order.is_freed = False
            self._arrivals.make_ready(one for one in subscription.group.filters.values() if one.waiting)

    def _is_ahead(self, subscription: Subscription, selection: PullSelection) -> bool:
        """Return whether the choice of an at-most-once group needs a block that is not on disk yet."""
        is_at_most_once = subscription.group.mode == AT_MOST_ONCE
        return is_at_most_once and selection.count > 0 and not self._at_most_once.covers(selection.taken())

    def _reserve(self, waiting: Waiting, selection: PullSelection) -> TooFew | None:
        """Have a block for the choice written to disk; the pull waits for it, and chooses again then."""
        group = waiting.subscription.group
        ends = self._at_most_once.block_ends(group, selection.taken(), selection.row_cursors)
        visible = [self._visible(partition) for partition in range(len(self._store.partitions))]
        try:
            reserve = self._at_most_once.reserve(group, ends, visible)
        except StorageError as error:
            self.refuse(waiting, error)
            return None
        self._reads.begin(reserve, selection.stopped_at)
        return _NONE_READY

    def _redeliver(self, waiting: Waiting, offer: Offer, final: bool) -> TooFew | None:
        """Answer a pull of a group's consumer with messages that are delivered again, as the *offer* allows."""
        pull, subscription = waiting.pull, waiting.subscription
        redelivery, now_us = self._tracker.redelivery, self._tracker.now.wall_us
        if offer.kind is MessageKind.NOTHING:
            if not final:
                return _BLOCKED
            self.answer_empty(waiting)
            return None
        try:
            answer = redelivery.redeliver(subscription, offer, pull, now_us)
        except NotInMemory as missing:
            if self._reads.begin(missing.read, subscription.filters[0]):
                return _NONE_READY
            with blocking_reads(self._store):
                answer = redelivery.redeliver(subscription, offer, pull, now_us)
        self._wake_freed(subscription)
        if answer is None or not answer.ranges:
            return _PASSED
        self._waiting_pulls.remove(waiting)
        self._tracker.record_redelivery(subscription)
        if offer.kind is _AGAIN:
            self._note_handed(subscription, redelivery.by_rank)
        fields = answer.buffers, answer.size, answer.messages, None, tuple(answer.ranges), _tags_of(subscription)
        self._effects.append(PulledMessages(pull.connection, pull.request, *fields))
        return None

    def _serve_blocking(self, waiting: Waiting, offer: Offer) -> TooFew | None:
        """Answer a pull with up to _WAITED_BYTES that the broker's own thread reads, while everybody waits. Its thread
        for reads has read the same bytes, and they had left memory again.
        """
        subscription = waiting.subscription
        with blocking_reads(self._store):
            limited = offer._replace(max_bytes=min(offer.max_bytes, _WAITED_BYTES))
            selection = self._selector.choose(subscription, limited, 1)
            if not selection.count:
                self._selector.pass_over(subscription, selection)
            if selection.awaits_sync and not selection.count:
                return _NONE_READY
            if self._is_ahead(subscription, selection):
                return self._reserve(waiting, selection)
            encoder = AnswerEncoder(self._store, self.damaged, checks=waiting.pull.checks)
            buffers = encoder.encode(selection.parts)
            failed = encoder.failed or selection.failed
            if failed is None or (buffers and encoder.failed is None):
                return self._complete(waiting, selection, encoder, buffers, False)
            self.refuse(waiting, failed)
            return None

    def _answer(self, waiting: Waiting, selection: PullSelection, final: bool) -> TooFew | None:
        """Answer a pull with the choice. Where none of it could be read, the pull goes on behind it."""
        encoder = AnswerEncoder(self._store, self.damaged, checks=waiting.pull.checks)
        buffers = encoder.encode(selection.parts)
        return self._complete(waiting, selection, encoder, buffers, final)

    def _complete(
        self, waiting: Waiting, selection: PullSelection, encoder: AnswerEncoder, buffers: list[Buffer], final: bool
    ) -> TooFew | None:
        subscription = waiting.subscription
        answer = self._recorded(waiting.pull, subscription, selection, encoder, buffers)
        if selection.count and not answer.buffers and not final:
            self._arrivals.make_ready(subscription.filters)
            return _NONE_READY
        self._waiting_pulls.remove(waiting)
        self._effects.append(answer)
        return None

    def _recorded(
        self, pull: Pull, subscription: Subscription, selection: PullSelection, encoder: AnswerEncoder,
        buffers: list[Buffer],
    ) -> PulledMessages:  # fmt: skip
        """Record that the consumer has the messages of a choice; return the answer."""
        size = sum(map(len, buffers))
        ranges: tuple[tuple[int, int, int], ...] = ()
        if selection.count:
            start, end = self._selector.record(subscription, selection, size)
            if subscription.member is None:
                if subscription.group.mode == AT_MOST_ONCE:
                    subscription.unconfirmed = selection.count
            elif not encoder.left_out and not selection.expired:
                ranges = ((start, end - start, 1),)
            else:
                buffers, size, ranges = self._readable(subscription, start, end)
            subscription.turn += 1  # so that each filter comes first in turn
            for subject_filter in subscription.filters:
                subject_filter.reads.clear()
            if self._store.subjects.has_lanes:
                self._note_handed(subscription, selection.by_rank)
        tags, left_us = _tags_of(subscription), None
        if subscription.group.name is None:
            left_us = self._left_us(subscription)
        return made(
            PulledMessages, (pull.connection, pull.request, buffers, size, selection.count, left_us, ranges, tags)
        )

    def _readable(
        self, subscription: Subscription, start: int, end: int
    ) -> tuple[list[Buffer], int, tuple[tuple[int, int, int], ...]]:
        """Return buffers, size and ranges of what a consumer has in flight in [start, end), without messages that are
        unreadable.
        """
        with blocking_reads(self._store):
            answer = self._tracker.redelivery.encode(
                subscription, start, end, end - start, self._limits.max_pull_bytes, self._tracker.now.wall_us
            )
        return answer.buffers, answer.size, tuple(answer.ranges)

    def answer_empty(self, waiting: Waiting) -> None:
        """Answer a pull with no messages."""
        self._waiting_pulls.remove(waiting)
        left_us = self._left_us(waiting.subscription)
        self._effects.append(PulledMessages(waiting.pull.connection, waiting.pull.request, [], 0, 0, left_us))

    def refuse(self, waiting: Waiting, error: QmqError) -> None:
        """Answer a pull with an error."""
        self._waiting_pulls.remove(waiting)
        self._effects.append(Refused(waiting.pull.connection, waiting.pull.request, error))

    def _left_us(self, subscription: Subscription) -> int | None:
        """Return a time for a solo consumer at several partitions: it has got every message that was stored before.

        Return None for groups, and with one partition, where messages come in the order in which they were stored.
        """
        if subscription.group.name is not None or len(self._store.partitions) == 1:
            return None
        ahead = [
            self._stored_at(subject_filter, partition, row)
            for subject_filter in subscription.filters
            if not subject_filter.exact
            for partition, row in enumerate(subject_filter.row_cursors)
            if row < self._store.partitions[partition].consumer_log.visible_row
        ]
        return min([*ahead, *hidden_since(self._store)], default=None)

    def _stored_at(self, subject_filter: SubjectFilter, partition: int, row: int) -> int:
        """Return when a row was stored, or an earlier time where the row would have to be read."""
        for known in (row, row - 1):
            with suppress(NotInMemory, StorageError):
                return self._store.partitions[partition].consumer_log.read_entry(known)[2]
        return subject_filter.start.value if subject_filter.start.kind == "time" else 0


def _tags_of(subscription: Subscription) -> tuple[str, ...]:
    ledger = subscription.group.ledger
    return () if ledger is None else ledger.settings.tags
