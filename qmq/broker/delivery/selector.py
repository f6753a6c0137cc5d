"""The choice for a pull: what it may get, by rank, and in which order.

Of each rank there are new messages and retries that are due. A higher rank comes first, but for the share that lower
ones have coming. Of one rank each of the two comes first in turn, and the choice ends at retries, since no answer has
both. A group without priorities and order keys has one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from qmq.broker.delivery.at_most_once import OnDiskWaits
from qmq.broker.delivery.chosen_cursors import CursorScratch
from qmq.broker.delivery.select import PullSelection
from qmq.broker.delivery.tracker import NOTHING_LEFT_OUT, DeliveryTracker, LeftOut
from qmq.broker.groups.group import SubjectFilter, Subscription
from qmq.broker.groups.membership import MessageKind, Offer
from qmq.broker.groups.priorities import HIGH, LOW, NORMAL, RANKS, rank_of
from qmq.format.lanes import ORDERED_KINDS
from qmq.format.layout import LANE_NORMAL
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import Store

_AGAIN: Final = MessageKind.AGAIN  # at hand: an enum looks its members up by name


class Candidate(NamedTuple):
    """Up to *most* messages of one rank: new ones, of these filters in turn, or retries, where *filters* is None."""

    rank: int
    filters: Sequence[SubjectFilter] | None
    most: int


class PullSelector:
    """Chooses messages for pulls."""

    def __init__(self, store: Store, tracker: DeliveryTracker, on_disk: OnDiskWaits) -> None:
        self._store = store
        self._tracker = tracker
        self._on_disk = on_disk
        self._scratch = CursorScratch()

    def choose(self, subscription: Subscription, offer: Offer, need: int) -> PullSelection:
        """Return the choice for a pull that may get what is in *offer*; nothing changes. For an at-most-once group it
        has only what is on disk.
        """
        selection = self._choose(subscription, offer, need)
        if subscription.group.mode != AT_MOST_ONCE:
            return selection
        awaits_sync = False
        while (count := self._on_disk.count(selection.parts, selection.count)) < selection.count:
            awaits_sync = True
            if count < need:
                if selection.count >= need:
                    self._on_disk.want(selection.taken())
                selection = PullSelection(self._store, subscription, 0, 0, need)
            else:
                selection = self._choose(subscription, offer._replace(max_count=count), need)
        selection.awaits_sync = awaits_sync
        return selection

    def _choose(self, subscription: Subscription, offer: Offer, need: int) -> PullSelection:
        selection = PullSelection(
            self._store, subscription, offer.max_count, offer.max_bytes, need, self._tracker.now, self._scratch
        )
        if not subscription.find_lanes(self._store) and not offer.ranks:
            selection.take_some(NORMAL, subscription.in_turn(), offer.max_count)
            return selection
        ranked, passed = _ranked(subscription), -1
        # Where a choice has only passed some, others of their order keys and of higher priority may be the next ones.
        while not selection.count and selection.passed != passed:
            passed = selection.passed
            for rank, filters, most in _candidates(selection, subscription, ranked, offer):
                if filters is not None:
                    selection.take_some(rank, filters, most)
                    if selection.full:
                        return selection
                elif selection.count or selection.passed == passed:
                    selection.retries = None if selection.count else (rank, most)
                    return selection
                else:
                    break
        return selection

    def pass_over(self, subscription: Subscription, selection: PullSelection) -> None:
        """Apply a choice that has nothing for the pull, so that what it passed is not looked at again; record messages
        that were filtered, skipped or have expired. Raises InternalError, with nothing changed.
        """
        if selection.passed:
            self.record(subscription, selection, 0)
            selection.parts = []
        else:
            selection.apply()

    def record(self, subscription: Subscription, selection: PullSelection, size: int) -> tuple[int, int]:
        """Record what has become of all messages that the choice has passed: the consumer has them, or they were
        filtered or skipped; and that expired ones are dead. Return the delivery sequences.

        Raises InternalError where that is not all of them; nothing has changed then.
        """
        left_out = NOTHING_LEFT_OUT
        if selection.looked_at:
            left_out = LeftOut(selection.filtered, selection.skipped, selection.looked_at)
        start, end = self._tracker.record_pull(
            subscription, selection.parts, size, selection.passed, selection.apply, left_out
        )
        if selection.expired:
            self._tracker.expire(subscription, [(start + low, start + high) for low, high in selection.expired])
        return start, end


def _ranked(subscription: Subscription) -> list[list[SubjectFilter]]:
    """Return the filters of a subscription by rank, each list in the order in which they are chosen from."""
    ranked: list[list[SubjectFilter]] = [[] for _ in range(RANKS)]
    chosen = set[int]()
    for base in subscription.in_turn():
        for subject_filter in base.with_lanes():
            kind = subject_filter.kind or LANE_NORMAL
            if kind not in chosen:  # the slots of all subjects are chosen from at once
                ranked[rank_of(kind)].append(subject_filter)
                chosen |= {kind}.intersection(ORDERED_KINDS)
    if subscription.begins_with_order_keys:
        for filters in ranked:
            filters.sort(key=lambda subject_filter: subject_filter.kind not in ORDERED_KINDS)
    return ranked


def _candidates(
    selection: PullSelection, subscription: Subscription, ranked: list[list[SubjectFilter]], offer: Offer
) -> Iterator[Candidate]:
    """Yield what a pull may get, in order. The caller chooses from each before it asks for the next one, and ends where
    the pull is full.
    """
    share, max_count = subscription.group.share, offer.max_count

    def of(rank: int, most: int) -> Iterator[Candidate]:
        is_due = rank in offer.ranks
        if most > 0 and ranked[rank] and not (is_due and offer.kind is _AGAIN):
            yield Candidate(rank, ranked[rank], most)
        if most > 0 and is_due:
            yield Candidate(rank, None, most)

    def lower(most: int) -> Iterator[Candidate]:
        before = selection.count
        coming = min(share.coming(NORMAL) - selection.by_rank[LOW], most)
        if coming > 0:
            yield from of(LOW, coming)
            if selection.count == before:
                selection.save_nothing(NORMAL)
        yield from of(NORMAL, most - (selection.count - before))
        if not selection.left_slots:  # others may have these, and they are ready
            yield from of(LOW, most - (selection.count - before))

    coming = min(share.coming(HIGH), max_count)
    if coming:
        yield from lower(coming)
        if not selection.count:
            selection.save_nothing(HIGH)
    selection.left_slots = False
    yield from of(HIGH, max_count)
    if not selection.left_slots:
        yield from lower(max_count)
