"""The short way for a few whole batches: the newest, or those at a prefix's cursor, if about as much as was asked for.

Most pulls go this way where messages are few and handled at once, or batches are large. Anything less simple (several
partitions or prefixes, tags, expiries, bad bytes, limits that cut) is left to select.py, which chooses the same
messages, or more of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from qmq.broker.delivery.encode import entry_bytes
from qmq.broker.groups.group import SubjectFilter, Subscription
from qmq.broker.groups.message_ranges import MessageParts, RunPart
from qmq.broker.ports.effects import Buffer
from qmq.errors import StorageError
from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY_HAS_EXPIRE_AT
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import NotInMemory, Store

#: Rows that are looked at.
MOST_ROWS: Final = 8


class FastAnswer(NamedTuple):
    """The answer to a pull. Nothing changes before ``apply``."""

    parts: MessageParts
    buffers: list[Buffer]
    size: int
    messages: int
    subject_filter: SubjectFilter
    #: The runs, and the row to read next.
    entries: list[EntryRow]
    row: int

    def apply(self) -> None:
        """Move the group's cursors behind the messages."""
        subject_filter = self.subject_filter
        cursors = subject_filter.group.cursors
        for entry in self.entries:
            cursors.set(entry[3], entry[0] + entry[4])
        if subject_filter.exact:
            subject_filter.passed = self.row
        else:
            subject_filter.row_cursors[0] = self.row
        subject_filter.group.dirty = True


class FastPath:
    """Chooses a few whole batches of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def take(
        self, subscription: Subscription, max_count: int, max_bytes: int, need: int, now_us: int
    ) -> FastAnswer | None:
        """Choose all messages that are ready for a subscription, or at least half as many as it may have. *now_us* is
        monotonic time.

        Return None where that is not simple or there are fewer than *need* messages.
        """
        filters, group, store = subscription.filters, subscription.group, self._store
        subject_filter, ledger = filters[0], group.ledger
        if len(filters) > 1 or len(store.partitions) > 1 or subject_filter.reading or group.mode == AT_MOST_ONCE:
            return None
        if ledger is not None and (ledger.settings.tags or ledger.settings.expire_after_us):
            return None
        start = subject_filter.passed if subject_filter.exact else subject_filter.row_cursors[0]
        entries = store.partitions[0].newest_entries(start, MOST_ROWS)
        is_backlog = not entries
        if is_backlog:
            entries = self._first_entries(start)
        wanted = self._wanted(subject_filter, entries)
        if wanted and is_backlog:
            wanted = self._at_hand(wanted, max_count, now_us)
            need = max(need, (max_count + 1) // 2)
        end = start + len(entries)
        if not wanted:
            return None
        count, size, answer = 0, 0, 0
        for entry in wanted:
            count, size, answer = count + entry[4], size + entry[10], answer + entry_bytes(entry)
        if not need <= count <= max_count or answer > max_bytes:
            return None
        try:
            buffers = self._buffers(wanted, size)
        except StorageError:
            return None
        if is_backlog:
            end = start + entries.index(wanted[-1]) + 1
        parts: MessageParts = [RunPart(0, entry, 0, entry[4]) for entry in wanted]
        return FastAnswer(parts, buffers, size, count, subject_filter, wanted, end)

    def _first_entries(self, start: int) -> list[EntryRow]:
        """Return MOST_ROWS entries from row *start* on, if more follow; none where that is not simple, as where
        retention has removed that row.
        """
        part = self._store.partitions[0]
        log = part.consumer_log
        if not log.first_row <= start < log.visible_row - MOST_ROWS or part.message_log.unreadable:
            return []
        try:
            return [log.read_entry(row) for row in range(start, start + MOST_ROWS)]
        except (NotInMemory, StorageError):
            return []

    def _at_hand(self, entries: list[EntryRow], max_count: int, now_us: int) -> list[EntryRow]:
        """Return the first of the entries, up to *max_count* messages; none if their batches are not in memory."""
        count = taken = 0
        for entry in entries:
            count += entry[4]
            if count > max_count:
                break
            taken += 1
        if not taken:
            return []
        first, last = entries[0][1], entries[taken - 1]
        at_hand = self._store.partitions[0].page_cache.has(first, last[1] + last[10] - first, now_us)
        return entries[:taken] if at_hand else []

    def _wanted(self, subject_filter: SubjectFilter, entries: list[EntryRow]) -> list[EntryRow]:
        """Return the entries that the filter takes; none where one of them is not simple."""
        wanted, expected = list[EntryRow](), -1
        exact, cursors = subject_filter.exact, subject_filter.group.cursors
        matches = None if exact else subject_filter.matches(self._store)
        number = subject_filter.subject(self._store) if exact else None
        for entry in entries:
            first, subject = entry[0], entry[3]
            if subject != number if exact else matches is not None and not matches[subject]:
                continue
            if entry[7] != 1 or entry[8] & ENTRY_HAS_EXPIRE_AT:
                return []
            if expected < 0 or not exact:
                expected = cursors.get(subject)
            # A cursor of 0 may stand for the group's start. Only for a prefix may an entry lie beyond the cursor.
            if not expected or first < expected or (exact and first != expected):
                return []
            expected = first + entry[4]
            wanted.append(entry)
        return wanted

    def _buffers(self, entries: list[EntryRow], size: int) -> list[Buffer]:
        """Return the batches as they lie, as one slice where nothing lies between."""
        start, last = entries[0][1], entries[-1]
        part = self._store.partitions[0]
        if last[1] + last[10] - start == size:
            return [part.message_log.view(start, size)]
        return [part.message_log.view(entry[1], entry[10]) for entry in entries]
