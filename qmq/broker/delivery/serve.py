"""One pull, answered: with what was handed out before, with what is chosen for the first time, or not yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from qmq.broker.delivery.at_most_once import MostOnce, OnDisk
from qmq.broker.delivery.encode import Carrier
from qmq.broker.delivery.fast_path import FastPath, Handed
from qmq.broker.delivery.filters import FilteredParts
from qmq.broker.delivery.handing import Handing
from qmq.broker.delivery.read_waits import Reads
from qmq.broker.delivery.select import Choosing, PullSelection
from qmq.broker.delivery.subscriptions import hidden_since
from qmq.broker.delivery.wakeups import Arrivals, WaitingPulls
from qmq.broker.groups.group import SubjectFilter, Subscription, Waiting
from qmq.broker.groups.membership import Offer, What
from qmq.broker.ports.commands import Pull
from qmq.broker.ports.effects import Buffer, Effect, PulledMessages, Refused
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import QmqError, StorageError
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import NotAtHand, Store

#: A consumer may be given nothing now, whatever is ready.
BLOCKED: Final = -1
#: What a consumer was to have again is gone: there may be something else for it.
_PASSED: Final = -2
#: So often a pull passes over what is gone, within one turn.
_MOST_PASSED: Final = 16
#: At hand: an enum is asked for its members by name.
_FRESH: Final = What.FRESH
#: What an answer that waits for the disk may have.
_WAITED_BYTES: Final = 256 << 10


@contextmanager
def waits(store: Store) -> Iterator[None]:
    """Read what is not in memory at once, while everybody waits."""
    store.may_wait(True)
    try:
        yield
    finally:
        store.may_wait(False)


class Serving:
    """Answers pulls, waiting ones and others. Everything it has to say goes to *effects*."""

    def __init__(
        self, store: Store, limits: BrokerLimits, effects: list[Effect], visible: Callable[[int], int],
        waiting_pulls: WaitingPulls, reads: Reads, arrivals: Arrivals, handing: Handing, at_most_once: MostOnce,
        on_disk: OnDisk,
    ) -> None:  # fmt: skip
        """*visible* tells up to which position a partition's messages may be pulled."""
        self._store = store
        self._limits = limits
        self._effects = effects
        self._visible = visible
        self._waiting_pulls = waiting_pulls
        self._reads = reads
        self._arrivals = arrivals
        self._handing = handing
        self._at_most_once = at_most_once
        self._choosing = Choosing(store, limits, handing, on_disk)
        self._fast_path = FastPath(store)
        self.damaged: list[QmqError] = []  # what could not be read of late

    def need(self, pull: Pull) -> int:
        """How many messages a pull waits for."""
        return min(max(pull.min_count, 1), self._limits.max_pull_count)

    def serve(self, waiting: Waiting, final: bool) -> int | None:
        """Answer the pull when enough is ready (``final``: with whatever is ready, once nothing is to be read for it).
        None when it was answered, else how many messages were ready.
        """
        for _ in range(_MOST_PASSED):
            found = self._try(waiting, final)
            if found != _PASSED:
                return found
        self._arrivals.make_ready(waiting.subscription.filters)  # much to pass over: go on later
        return 0

    def _try(self, waiting: Waiting, final: bool) -> int | None:
        pull, filters = waiting.pull, waiting.subscription.filters
        most, size = min(pull.max_count, self._limits.max_pull_count), min(pull.max_bytes, self._limits.max_pull_bytes)
        try:
            offer = self._handing.offer(waiting.subscription, pull)
        except QmqError as error:
            self.refuse(waiting, error)
            return None
        if offer is not None:
            if offer.what is not _FRESH:
                return self._serve_again(waiting, offer, final)
            most, size = min(most, offer.max_count), min(size, offer.max_bytes)
        if not final and not self._may_have(waiting.subscription):
            return 0
        need = 1 if final else min(self.need(pull), most)
        handed = None if pull.checks else self._fast_path.take(waiting.subscription, most, size, need)
        if handed is not None:
            self._hand(waiting, handed)
            return None
        selection, filtered_parts = self._choosing.choose(waiting, most, need, size)
        if selection.held_back and selection.count < need:
            selection.take_back()
            return 0  # whatever its deadline: it is asked for, and comes with the sync
        if self._is_ahead(waiting, selection):
            return self._reserve(waiting, selection)
        wanted = selection.wanted
        in_vain = wanted is not None and not self._reads.begin(wanted, selection.stopped_at)
        if in_vain and selection.count < need:
            selection.take_back()
            return self._serve_with_waits(waiting)
        if selection.count >= need:
            return self._answer(waiting, selection, filtered_parts, final)
        if selection.failed is not None:
            selection.take_back()
            self.refuse(waiting, selection.failed)
            return None
        if offer is not None and not selection.count and self._handing.is_due(waiting.subscription):
            return self._serve_again(waiting, offer._replace(what=What.AGAIN), final)
        bound = selection.full and wanted is None
        if bound and not selection.count:
            self._arrivals.make_ready(filters)  # much to pass over: go on later
        reading = any(subject_filter.reading for subject_filter in filters)
        if not reading and (final or (bound and selection.count)):
            return self._answer(waiting, selection, filtered_parts, final)
        if selection.count:
            selection.take_back()  # else all that was passed is for others, and need not be looked at again
        return selection.count

    def _may_have(self, subscription: Subscription) -> bool:
        """Whether there may be something for it: mostly a pull comes when there is nothing."""
        for subject_filter in subscription.filters:
            if subject_filter.has_more(self._store):
                return True
        return self._handing.is_due(subscription)

    def _hand(self, waiting: Waiting, handed: Handed) -> None:
        """Answer with what has just come."""
        pull, subscription = waiting.pull, waiting.subscription
        ranges: tuple[tuple[int, int, int], ...] = ()
        if subscription.member is not None:
            start, end = self._handing.gave(subscription, handed.parts, handed.size)
            ranges = ((start, end - start, 1),)
        self._waiting_pulls.remove(waiting)
        subscription.filters[0].reads.clear()
        said = handed.buffers, handed.size, handed.messages, None, ranges
        self._effects.append(PulledMessages(pull.connection, pull.request, *said))

    def _is_ahead(self, waiting: Waiting, selection: PullSelection) -> bool:
        """What was chosen may not be handed out before a block is on disk that has it."""
        is_at_most_once = waiting.subscription.group.mode == AT_MOST_ONCE
        return is_at_most_once and selection.count > 0 and not self._at_most_once.covers(selection.taken())

    def _reserve(self, waiting: Waiting, selection: PullSelection) -> int | None:
        """Have the block brought to disk; the pull waits for it."""
        group = waiting.subscription.group
        ends = self._at_most_once.block_ends(group, selection.taken())
        selection.take_back()  # the pull chooses again once the block is on disk
        visible = [self._visible(partition) for partition in range(self._store.partitions)]
        try:
            reserve = self._at_most_once.reserve(group, ends, visible)
        except StorageError as error:
            self.refuse(waiting, error)
            return None
        self._reads.begin(reserve, selection.stopped_at)
        return 0

    def _serve_again(self, waiting: Waiting, offer: Offer, final: bool) -> int | None:
        """Answer a pull of a group's consumer with what has been handed out before, if it may have something."""
        pull, subscription = waiting.pull, waiting.subscription
        redelivery, now_us = self._handing.redelivery, self._handing.now.wall_us
        if offer.what is What.NOTHING:
            if not final:
                return BLOCKED
            self.answer_empty(waiting)
            return None
        try:
            answer = redelivery.give_again(subscription, offer, pull, now_us)
        except NotAtHand as missing:
            if self._reads.begin(missing.read, subscription.filters[0]):
                return 0
            with waits(self._store):
                answer = redelivery.give_again(subscription, offer, pull, now_us)
        if answer is None or not answer.ranges:
            return _PASSED
        self._waiting_pulls.remove(waiting)
        self._handing.gave_again(subscription)
        said = answer.buffers, answer.size, answer.messages, None, tuple(answer.ranges), _tags_of(subscription)
        self._effects.append(PulledMessages(pull.connection, pull.request, *said))
        return None

    def _serve_with_waits(self, waiting: Waiting) -> int | None:
        """Answer a pull for which the same was read twice and is not in memory again: a little, with waits."""
        with waits(self._store):
            most = waiting.pull.max_count
            selection, filtered_parts = self._choosing.choose(waiting, most, 1, _WAITED_BYTES, undo=True)
            if selection.held_back and not selection.count:
                return 0
            if self._is_ahead(waiting, selection):
                return self._reserve(waiting, selection)
            carrier = Carrier(self._store, self.damaged, checks=waiting.pull.checks)
            buffers = carrier.carry(selection.parts if filtered_parts is None else filtered_parts.parts)
            failed = carrier.failed or selection.failed
            if failed is None or (buffers and carrier.failed is None):
                return self._say(waiting, selection, filtered_parts, carrier, buffers, False)
            selection.take_back()
            self.refuse(waiting, failed)
            return None

    def _answer(
        self, waiting: Waiting, selection: PullSelection, filtered_parts: FilteredParts | None, final: bool
    ) -> int | None:
        """Answer with what was chosen; 0 when nothing of it could be read, and what comes after it is waited for."""
        carrier = Carrier(self._store, self.damaged, checks=waiting.pull.checks)
        buffers = carrier.carry(selection.parts if filtered_parts is None else filtered_parts.parts)
        return self._say(waiting, selection, filtered_parts, carrier, buffers, final)

    def _say(
        self,
        waiting: Waiting,
        selection: PullSelection,
        filtered_parts: FilteredParts | None,
        carrier: Carrier,
        buffers: list[Buffer],
        final: bool,
    ) -> int | None:
        pull, subscription = waiting.pull, waiting.subscription
        size = sum(map(len, buffers))
        ranges: tuple[tuple[int, int, int], ...] = ()
        if selection.count and filtered_parts is not None:
            self._choosing.passed(subscription, filtered_parts)
        if subscription.member is not None and selection.count:
            given = filtered_parts or FilteredParts(selection.parts, selection.count, [], 0, 0, selection.count)
            buffers, size, ranges = self._given(subscription, given, carrier, buffers, size)
        if selection.count and not buffers and not final:
            self._arrivals.make_ready(subscription.filters)
            return 0
        self._waiting_pulls.remove(waiting)
        if selection.count:
            # The next pull begins with the next filter, so that each is the first of one of as many answers.
            subscription.turn = (subscription.turn + 1) % len(subscription.filters)
            for subject_filter in subscription.filters:
                subject_filter.reads.clear()
        left_us = self._left_us(subscription)
        said = buffers, size, selection.count, left_us, ranges, _tags_of(subscription)
        self._effects.append(PulledMessages(pull.connection, pull.request, *said))
        return None

    def _given(
        self,
        subscription: Subscription,
        filtered_parts: FilteredParts,
        carrier: Carrier,
        buffers: list[Buffer],
        size: int,
    ) -> tuple[list[Buffer], int, tuple[tuple[int, int, int], ...]]:
        """Note who has it, and which delivery sequences that is; without what has expired or could not be read."""
        start, end = self._choosing.give(subscription, filtered_parts, size)
        if not carrier.left_out and not filtered_parts.expired:
            return buffers, size, ((start, end - start, 1),)
        with waits(self._store):
            answer = self._handing.redelivery.carry(
                subscription, start, end, end - start, self._limits.max_pull_bytes, self._handing.now.wall_us
            )
        return answer.buffers, answer.size, tuple(answer.ranges)

    def answer_empty(self, waiting: Waiting) -> None:
        """Nothing is there for a pull, or nobody wants it any more."""
        self._waiting_pulls.remove(waiting)
        left_us = self._left_us(waiting.subscription)
        self._effects.append(PulledMessages(waiting.pull.connection, waiting.pull.request, [], 0, 0, left_us))

    def refuse(self, waiting: Waiting, error: QmqError) -> None:
        """Answer a pull with an error."""
        self._waiting_pulls.remove(waiting)
        self._effects.append(Refused(waiting.pull.connection, waiting.pull.request, error))

    def _left_us(self, subscription: Subscription) -> int | None:
        """Nothing stored before that time is still to come; None where order of time is what it comes in anyway."""
        if subscription.group.name is not None or self._store.partitions == 1:
            return None
        ahead = [
            self._stored_at(subject_filter, partition, row)
            for subject_filter in subscription.filters
            if not subject_filter.exact
            for partition, row in enumerate(subject_filter.row_cursors)
            if row < self._store.visible_row(partition)
        ]
        return min([*ahead, *hidden_since(self._store)], default=None)

    def _stored_at(self, subject_filter: SubjectFilter, partition: int, row: int) -> int:
        """When a row was stored; a time before it for one that would have to be read."""
        for known in (row, row - 1):
            with suppress(NotAtHand, StorageError):
                return self._store.read_entry(partition, known)[2]
        return subject_filter.start.value if subject_filter.start.kind == "time" else 0


def _tags_of(subscription: Subscription) -> tuple[str, ...]:
    ledger = subscription.group.ledger
    return () if ledger is None else ledger.settings.tags
