"""The rules for retries: a consumer is handed those that its own prefixes take, and of a slot in order.

Where the consumers of a group follow different prefixes, a retry waits for a consumer that follows its subject.
Retries that nobody takes are passed over, so that they hold up no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from qmq.broker.delivery.encode import RangeLookup
from qmq.broker.delivery.order.places import slots_of
from qmq.broker.error_log.error_log import RetryItem
from qmq.broker.groups.group import ConsumerShare, Group, Subscription
from qmq.broker.groups.message_ranges import PARTITIONS, MessageParts, RunPart, prefix_of
from qmq.broker.groups.order_slots import OrderSlots
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.private import origin_subject
from qmq.intervals import Intervals
from qmq.names import takes
from qmq.storage.store import NotInMemory, Store

#: Ranges that are looked up in one go (about 50 us each), since everybody waits meanwhile.
MOST_LOOKS: Final = 64
#: Ranges and subjects whose eligibility is remembered.
_REMEMBERED: Final = 8_192

#: A count of messages, and whether the consumer may have them.
ShareRange = tuple[int, bool]


def eligibility_of(store: Store, subscription: Subscription) -> Eligibility | None:
    """Return the eligibility of a consumer; None for one that may have all messages of its group now."""
    group, member = subscription.group, subscription.member
    order = None if group.ledger is None else group.ledger.order
    if order is None or member is None or not order.has_retries:
        order = None
    share = _share_of(subscription)
    if share is None and order is None:
        return None
    return Eligibility(store, group, share, order, 0 if member is None else member.number)


def _share_of(subscription: Subscription) -> ConsumerShare | None:
    """Return the part of its group's subjects that a consumer follows; None for all."""
    group, share = subscription.group, subscription.share
    if len(subscription.filters) == len(group.filters):
        return None
    if share is None or share.among != len(group.filters):
        share = subscription.share = ConsumerShare(
            group.filters, [subject_filter.prefix for subject_filter in subscription.filters]
        )
    return None if share.is_all else share


class Eligibility:
    """Decides which retries of a group one consumer may have. A retry must be of its subjects, and in its slot nothing
    earlier may wait and nobody else may have messages.
    """

    def __init__(
        self, store: Store, group: Group, share: ConsumerShare | None, order: OrderSlots | None, consumer: int
    ) -> None:  # fmt: skip
        """*share* is the part of the subjects that the consumer follows, None for all; *order* has the group's slots,
        None where these decide nothing.
        """
        self._store = store
        self._group = group
        self._share = share
        self._order = order
        self._consumer = consumer
        self._before: dict[int, Intervals] = {}  # by slot: the places that it gets in this answer

    def begin(self) -> None:
        """Begin to choose for one answer."""
        self._before.clear()

    def first(self, retries: Iterable[RetryItem]) -> RetryItem | None:
        """Return the first of the retries that the consumer may have any of, or of which that is not known yet."""
        lookup = RangeLookup(self._store, self._group)
        for retry in retries:
            self.begin()
            try:
                ranges = self.ranges(lookup, retry.messages)
            except (NotInMemory, StorageError):
                return retry
            if ranges is None or any(is_taken for _, is_taken in ranges):
                return retry
        return None

    def ranges(self, lookup: RangeLookup, messages: MessageRange) -> list[ShareRange] | None:
        """Return which of the messages the consumer may have behind those that it was asked about since ``begin``, in
        order; None after enough lookups. Raises NotInMemory.
        """
        own = [(messages.total, True)] if self._share is None else self._own_ranges(self._share, lookup, messages)
        if self._order is None or own is None or not any(is_taken for _, is_taken in own):
            return own
        slots = self._slots_of(self._order, lookup, messages)
        if slots is None:
            return None
        if sum(count for _, _, count in slots) != messages.total:
            return own  # messages are missing: whoever reads the others finds out which
        return _joined(self._in_order(self._order, own, slots))

    # --- its own subjects --------------------------------------------------------------------------------------------

    def _own_ranges(
        self, share: ConsumerShare, lookup: RangeLookup, messages: MessageRange
    ) -> list[ShareRange] | None:  # fmt: skip
        """Return which of the messages are of its subjects, in order; None after enough lookups. Raises NotInMemory."""
        total = messages.total
        if messages.log < PARTITIONS:
            return [(total, self._takes_subject(share, messages.log))]
        ranges = share.known.get(messages)
        if ranges is None:
            prefix = self._group.filter_of(prefix_of(messages)) if prefix_of(messages) else None
            if prefix is not None and takes(share.prefixes, prefix.prefix):
                return [(total, True)]
            if lookup.looks < MOST_LOOKS:
                ranges = self._in_parts(share, lookup.parts(messages), total)
                _remember(share, messages, ranges)
        return ranges

    def _in_parts(self, share: ConsumerShare, parts: MessageParts, total: int) -> list[ShareRange]:
        """Return which messages of *parts* are of its subjects. Messages that no longer exist match no prefix; any
        consumer may take them.
        """
        rows = list[ShareRange]()
        for part in parts:
            if isinstance(part, RunPart):
                rows.append((part.stop - part.start, self._takes_subject(share, part.entry[3])))
            else:
                taken = (self._takes_subject(share, number) for number in part.rows["subject"].tolist())
                rows += zip(part.rows["count"].tolist(), taken, strict=True)
        if sum(count for count, _ in rows) != total:
            return [(total, True)]
        return _joined(rows)

    def _takes_subject(self, share: ConsumerShare, number: int) -> bool:
        known = share.subjects.get(number)
        if known is None:
            if len(share.subjects) >= _REMEMBERED:
                share.subjects.clear()
            name = origin_subject(self._store.subjects.name(number))
            # A message that the group no longer follows becomes a dead letter, whoever takes it.
            known = takes(share.prefixes, name) or self._group.follows_no_more(name)
            share.subjects[number] = known
        return known

    # --- the order of slots ------------------------------------------------------------------------------------------

    def _slots_of(
        self, order: OrderSlots, lookup: RangeLookup, messages: MessageRange
    ) -> list[tuple[int, int, int]] | None:  # fmt: skip
        """Return (slot, place, count) of each run of the messages; None after enough lookups. Raises NotInMemory."""
        slots = order.looked_up.get(messages)
        if slots is None and lookup.looks < MOST_LOOKS:
            if len(order.looked_up) >= _REMEMBERED:
                order.looked_up.clear()
            slots = order.looked_up[messages] = slots_of(self._store, lookup.parts(messages))
        return slots

    def _in_order(
        self, order: OrderSlots, own: list[ShareRange], slots: list[tuple[int, int, int]]
    ) -> Iterator[ShareRange]:  # fmt: skip
        """Yield the ranges of *own*, cut by slots, without those that have to wait."""
        shares, left, is_own = iter(own), 0, False
        for slot, place, count in slots:
            while count:
                if not left:
                    left, is_own = next(shares)
                some = min(count, left)
                yield some, is_own and (slot < 0 or self._is_next(order, slot, place, some))
                place, count, left = place + some, count - some, left - some

    def _is_next(self, order: OrderSlots, slot: int, place: int, count: int) -> bool:
        if not order.may_come_again(self._consumer, slot, place, self._before.get(slot)):
            return False
        self._before.setdefault(slot, Intervals()).add(place, place + count)
        return True


def _remember(share: ConsumerShare, messages: MessageRange, ranges: list[ShareRange]) -> None:
    """Note which of the messages are for the consumer, and the ranges of others, which stay when those are gone."""
    if len(share.known) >= _REMEMBERED:
        share.known.clear()
    share.known[messages] = ranges
    start = 0
    for count, is_taken in ranges:
        if not is_taken:
            share.known[messages.part(start, start + count)] = [(count, False)]
        start += count


def _joined(ranges: Iterable[ShareRange]) -> list[ShareRange]:
    """Return the ranges with neighbours that are alike as one."""
    return [(sum(count for count, _ in alike), is_taken) for is_taken, alike in groupby(ranges, lambda part: part[1])]
