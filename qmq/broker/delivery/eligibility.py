"""The rules for retries: a consumer is handed those that its own prefixes take, and of a slot in order.

Where the consumers of a group follow different prefixes, a retry waits for a consumer that follows its subject.
Retries that nobody takes are passed over, so that they hold up no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
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

#: Ranges that are looked up in one go, of about 50 us each.
MOST_LOOKS: Final = 64
#: Ranges and subjects whose eligibility is remembered.
_REMEMBERED: Final = 8_192

#: A count of messages, and whether the consumer takes them.
ShareRange = tuple[int, bool]


def share_of(store: Store, subscription: Subscription) -> Eligibility | OrderEligibility | None:
    """Return the eligibility of a consumer; None for one that may have all messages of its group now."""
    share, member = _prefix_share_of(store, subscription), subscription.member
    order = None if subscription.group.ledger is None else subscription.group.ledger.order
    if order is None or member is None or not order.has_retries:
        return share
    return OrderEligibility(store, subscription.group, order, member.number, share)


def _prefix_share_of(store: Store, subscription: Subscription) -> Eligibility | None:
    group = subscription.group
    if len(subscription.filters) == len(group.filters):
        return None
    share = subscription.share
    if share is None or share.among != len(group.filters):
        share = subscription.share = ConsumerShare(
            group.filters, [subject_filter.prefix for subject_filter in subscription.filters]
        )
    return None if share.is_all else Eligibility(store, group, share)


class Eligibility:
    """Decides which messages of a group one of its consumers may have, by the consumer's share."""

    def __init__(self, store: Store, group: Group, share: ConsumerShare) -> None:
        self._store = store
        self._group = group
        self._share = share

    def lookup(self) -> RangeLookup:
        """Return a lookup for the ranges of one answer."""
        return RangeLookup(self._store, self._group)

    def begin(self) -> None:
        """Begin to choose for one answer."""

    def first(self, retries: Iterable[RetryItem]) -> RetryItem | None:
        """Return the first of the retries that the consumer takes any of, or may take."""
        return _first(retries, partial(self.share_ranges, self.lookup()))

    def share_ranges(self, lookup: RangeLookup, messages: MessageRange) -> list[ShareRange] | None:
        """Return which of the messages the consumer takes, in order; None after enough lookups. Raises NotInMemory."""
        total = messages.total
        if messages in self._share.others:
            return [(total, False)]
        if messages.log < PARTITIONS:
            found = [(total, self._takes_subject(messages.log))]
        else:
            prefix = self._group.filter_of(prefix_of(messages)) if prefix_of(messages) else None
            if prefix is not None and takes(self._share.prefixes, prefix.prefix):
                return [(total, True)]
            if lookup.looks >= MOST_LOOKS:
                return None
            found = self._in_parts(lookup.parts(messages), total)
        start = 0
        for count, is_taken in found:
            if not is_taken:
                self._pass_over(messages.part(start, start + count))
            start += count
        return found

    def _pass_over(self, messages: MessageRange) -> None:
        if len(self._share.others) >= _REMEMBERED:
            self._share.others.clear()
        self._share.others.add(messages)

    def _in_parts(self, parts: MessageParts, total: int) -> list[ShareRange]:
        """Return which messages of *parts* the consumer takes.

        Messages that no longer exist match no prefix; any consumer may take them.
        """
        rows = list[ShareRange]()
        for part in parts:
            if isinstance(part, RunPart):
                rows.append((part.stop - part.start, self._takes_subject(part.entry[3])))
            else:
                taken = map(self._takes_subject, part.rows["subject"].tolist())
                rows += zip(part.rows["count"].tolist(), taken, strict=True)
        if sum(count for count, _ in rows) != total:
            return [(total, True)]
        return [(sum(count for count, _ in group), is_taken) for is_taken, group in groupby(rows, lambda row: row[1])]

    def _takes_subject(self, number: int) -> bool:
        known = self._share.subjects.get(number)
        if known is None:
            if len(self._share.subjects) >= _REMEMBERED:
                self._share.subjects.clear()
            name = origin_subject(self._store.subjects.name(number))
            # A message that the group no longer follows becomes a dead letter, whoever takes it.
            known = takes(self._share.prefixes, name) or self._group.follows_no_more(name)
            self._share.subjects[number] = known
        return known


class OrderEligibility:
    """Decides which retries one of a group's consumers may have by the order of their slots, and by its share."""

    def __init__(
        self, store: Store, group: Group, order: OrderSlots, consumer: int, share: Eligibility | None
    ) -> None:  # fmt: skip
        """*share* is that of the consumer's prefixes; None: it takes all."""
        self._store = store
        self._group = group
        self._order = order
        self._consumer = consumer
        self._share = share
        self._before: dict[int, Intervals] = {}  # by slot: the places that it gets in this answer

    def begin(self) -> None:
        """Begin to choose for one answer."""
        self._before.clear()

    def first(self, retries: Iterable[RetryItem]) -> RetryItem | None:
        """Return the first of the retries that the consumer may have any of, as far as that is known."""
        lookup = RangeLookup(self._store, self._group)

        def alone(messages: MessageRange) -> list[ShareRange] | None:
            self.begin()
            return self.share_ranges(lookup, messages)

        return _first(retries, alone)

    def share_ranges(self, lookup: RangeLookup, messages: MessageRange) -> list[ShareRange] | None:
        """Return which of the messages the consumer may have behind those that it was asked about since ``begin``, in
        order; None after enough lookups. Raises NotInMemory.
        """
        found = [(messages.total, True)] if self._share is None else self._share.share_ranges(lookup, messages)
        if found is None or not any(is_taken for _, is_taken in found):
            return found
        slots = self._order.looked_up.get(messages)
        if slots is None:
            if lookup.looks >= MOST_LOOKS:
                return None
            slots = slots_of(self._store, lookup.parts(messages))
            if len(self._order.looked_up) >= _REMEMBERED:
                self._order.looked_up.clear()
            self._order.looked_up[messages] = slots
        if sum(count for _, _, count in slots) != messages.total:
            return found  # messages are missing: whoever reads the others finds out which
        return _joined(self._taken(found, slots))

    def _taken(self, found: list[ShareRange], slots: list[tuple[int, int, int]]) -> Iterator[ShareRange]:
        shares, left, is_mine = iter(found), 0, False
        for slot, place, count in slots:
            while count:
                if not left:
                    left, is_mine = next(shares)
                some = min(count, left)
                yield some, is_mine and (slot < 0 or self._takes(slot, place, some))
                place, count, left = place + some, count - some, left - some

    def _takes(self, slot: int, place: int, count: int) -> bool:
        before = self._before.get(slot)
        if not self._order.may_come_again(self._consumer, slot, place, before):
            return False
        self._before.setdefault(slot, Intervals()).add(place, place + count)
        return True


def _joined(found: Iterable[ShareRange]) -> list[ShareRange]:
    return [(sum(count for count, _ in group), is_taken) for is_taken, group in groupby(found, lambda one: one[1])]


def _first(
    retries: Iterable[RetryItem], share_ranges: Callable[[MessageRange], list[ShareRange] | None]
) -> RetryItem | None:
    """Return the first of the retries that a consumer takes any of, or of which that is not known yet."""
    for retry in retries:
        try:
            found = share_ranges(retry.messages)
        except (NotInMemory, StorageError):
            return retry
        if found is None or any(is_taken for _, is_taken in found):
            return retry
    return None
