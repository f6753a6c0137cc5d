"""The rule for retries: a consumer is handed those that its own prefixes take.

Where the consumers of a group follow different prefixes, a retry waits for a consumer that follows its subject.
Retries that nobody takes are passed over, so that they hold up no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from qmq.broker.delivery.encode import RangeLookup
from qmq.broker.error_log.error_log import RetryItem
from qmq.broker.groups.group import ConsumerShare, Group, Subscription
from qmq.broker.groups.message_ranges import PARTITIONS, MessageParts, RunPart, prefix_of
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.private import origin_subject
from qmq.names import takes
from qmq.storage.store import NotInMemory, Store

#: Ranges that are looked up in one go, of about 50 us each.
MOST_LOOKS: Final = 64
#: Ranges and subjects whose eligibility is remembered.
_REMEMBERED: Final = 8_192

#: A count of messages, and whether the consumer takes them.
ShareRange = tuple[int, bool]


def share_of(store: Store, subscription: Subscription) -> Eligibility | None:
    """Return the eligibility of a consumer; None for one that may have all messages of its group."""
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

    def has_any(self, retries: Iterable[RetryItem]) -> bool:
        """Return whether the consumer takes any of the retries, or that is not known yet."""
        lookup = self.lookup()
        for retry in retries:
            if retry.messages in self._share.others:
                continue
            try:
                found = self.share_ranges(lookup, retry.messages)
            except (NotInMemory, StorageError):
                return True
            if found is None or any(is_taken for _, is_taken in found):
                return True
        return False

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
