"""What of its group's retries a consumer may have: that which its own prefixes take, as for the first time.

Where consumers of one group follow different prefixes, messages that come back wait for one who follows theirs. Nobody
waits for long behind those of others: they are passed over where nobody takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from qmq.broker.delivery.encode import RangeLookup
from qmq.broker.error_log.error_log import RetryItem
from qmq.broker.groups.group import Group, Share, Subscription, takes
from qmq.broker.groups.message_ranges import PARTITIONS, Parts, Some, prefix_of
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.private import origin_subject
from qmq.storage.store import NotAtHand, Store

#: Places that are looked for at once, of about 50 us each.
MOST_LOOKS: Final = 64
#: Ranges and subjects that are remembered.
_REMEMBERED: Final = 8_192

#: So many messages, and whether they are meant.
ShareRange = tuple[int, bool]


def share_of(store: Store, subscription: Subscription) -> Eligibility | None:
    """Return what that consumer may have; None for one that may have all."""
    group = subscription.group
    if len(subscription.filters) == len(group.filters):
        return None
    share = subscription.share
    if share is None or share.among != len(group.filters):
        share = subscription.share = Share(
            group.filters, [subject_filter.prefix for subject_filter in subscription.filters]
        )
    return None if share.is_all else Eligibility(store, group, share)


class Eligibility:
    """Decides which messages of a group one of its consumers may have, by the consumer's share."""

    def __init__(self, store: Store, group: Group, share: Share) -> None:
        self._store = store
        self._group = group
        self._share = share

    def finding(self) -> RangeLookup:
        """Where what it is asked for is looked up."""
        return RangeLookup(self._store, self._group)

    def has_any(self, retries: Iterable[RetryItem]) -> bool:
        """Whether it takes some of these; also where that is not known yet."""
        finding = self.finding()
        for retry in retries:
            if retry.messages in self._share.others:
                continue
            try:
                found = self.share_ranges(finding, retry.messages)
            except (NotAtHand, StorageError):
                return True
            if found is None or any(meant for _, meant in found):
                return True
        return False

    def share_ranges(self, finding: RangeLookup, messages: MessageRange) -> list[ShareRange] | None:
        """Which of these it takes, from the first on; None when enough was looked at for now. Raises NotAtHand."""
        total = messages.total
        if messages in self._share.others:
            return [(total, False)]
        if messages.log < PARTITIONS:
            found = [(total, self._takes_subject(messages.log))]
        else:
            prefix = self._group.filter_of(prefix_of(messages)) if prefix_of(messages) else None
            if prefix is not None and takes(self._share.prefixes, prefix.prefix):
                return [(total, True)]
            if finding.looks >= MOST_LOOKS:
                return None
            found = self._in_parts(finding.parts(messages), total)
        start = 0
        for count, meant in found:
            if not meant:
                self._pass_over(messages.part(start, start + count))
            start += count
        return found

    def _pass_over(self, messages: MessageRange) -> None:
        if len(self._share.others) >= _REMEMBERED:
            self._share.others.clear()
        self._share.others.add(messages)

    def _in_parts(self, parts: Parts, total: int) -> list[ShareRange]:
        """Of what cannot be found any more nobody knows what it is: it is for whoever asks."""
        rows = list[ShareRange]()
        for part in parts:
            if isinstance(part, Some):
                rows.append((part.stop - part.start, self._takes_subject(part.entry[3])))
            else:
                meant = map(self._takes_subject, part.rows["subject"].tolist())
                rows += zip(part.rows["count"].tolist(), meant, strict=True)
        if sum(count for count, _ in rows) != total:
            return [(total, True)]
        return [(sum(count for count, _ in group), meant) for meant, group in groupby(rows, lambda row: row[1])]

    def _takes_subject(self, number: int) -> bool:
        known = self._share.subjects.get(number)
        if known is None:
            if len(self._share.subjects) >= _REMEMBERED:
                self._share.subjects.clear()
            name = origin_subject(self._store.subject_name(number))
            # What its group follows no more is nobody's: whoever comes upon it has it buried.
            known = takes(self._share.prefixes, name) or self._group.follows_no_more(name)
            self._share.subjects[number] = known
        return known
