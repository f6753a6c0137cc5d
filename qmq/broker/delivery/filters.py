"""What of chosen messages a group gets: those with one of its tags, and not those past their expiry.

Entries say which batches have tags and expiries, so whole runs are passed without a look at them, and where no column
has to be read nothing is. The columns are looked at run by run, never message by message.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.message_ranges import Many, Parts, Rows, Some
from qmq.broker.groups.settings import ResolvedSettings
from qmq.errors import QmqError
from qmq.format.batch import EntryRow
from qmq.format.hashing import tag_bits
from qmq.format.layout import DELAY_END_US, ENTRY_HAS_EXPIRE_AT, ENTRY_HAS_TAGS, HAS_EXPIRE_AT, HAS_TAGS
from qmq.format.pieces import StoredBatch
from qmq.storage.store import Store

#: What becomes of messages.
MATCHED: Final = 0
SKIPPED: Final = 1
EXPIRED: Final = 2
FILTERED: Final = 3
_LOOK: Final = 4  # it goes by their columns

States = npt.NDArray[np.uint8]


class StateRange(NamedTuple):
    """Messages in a row with the same state."""

    state: int
    part: Some | Many
    total: int


class MessageFilter:
    """Of one group, at one time."""

    def __init__(
        self, store: Store, settings: ResolvedSettings, now_us: int, *, tags: bool = True, buries: bool = True
    ) -> None:
        """Without *tags* those do not count: what is handed out again had one. *buries*: not skipped, dead."""
        self._store = store
        self._bits = tag_bits(settings.tags) if tags else 0
        self._expired = EXPIRED if buries else SKIPPED
        self._now_us = now_us
        #: What was stored at or before that has expired; below 0: nothing.
        self._stale_us = now_us - settings.expire_after_us if settings.expire_after_us else -1
        self._batch: tuple[int, int, StoredBatch | None] = (-1, -1, None)

    def has_work(self, parts: Parts) -> bool:
        """Whether anything but KEPT may come of these."""
        if self._bits or self._stale_us >= 0:
            return True
        return any(
            bool((part.rows["flags"] & ENTRY_HAS_EXPIRE_AT).any())
            if isinstance(part, Many)
            else part.entry[8] & ENTRY_HAS_EXPIRE_AT
            for part in parts
        )

    def state_ranges(self, parts: Parts) -> Iterator[StateRange]:
        """The same messages in the same order."""
        for part in parts:
            if isinstance(part, Some):
                yield from self._of_run(part)
            else:
                yield from self._of_rows(part)

    def _of_rows(self, part: Many) -> Iterator[StateRange]:
        states = self._states_of_rows(part.rows)
        for start, end in _same(states, apart=_LOOK):
            rows = part.rows[start:end]
            if states[start] == _LOOK:
                entry = rows[0].item()
                yield from self._of_run(Some(part.partition, entry, 0, entry[4]))
            else:
                yield StateRange(int(states[start]), Many(part.partition, rows), int(rows["count"].sum()))

    def _states_of_rows(self, rows: Rows) -> States:
        flags = rows["flags"]
        states = np.zeros(len(rows), np.uint8)
        if self._bits:
            states[:] = _LOOK
        states[(flags & ENTRY_HAS_EXPIRE_AT) != 0] = _LOOK
        if self._stale_us >= 0:
            stale = rows["stored_at_us"] <= self._stale_us
            states[stale] = _LOOK if self._bits else self._expired
        if self._bits:
            states[(flags & ENTRY_HAS_TAGS) == 0] = FILTERED
        return states

    def _of_run(self, part: Some) -> Iterator[StateRange]:
        states = self._states_of_run(part)
        if not states.any():
            yield StateRange(MATCHED, part, part.stop - part.start)
            return
        for start, end in _same(states):
            piece = part._replace(start=part.start + start, stop=part.start + end)
            yield StateRange(int(states[start]), piece, end - start)

    def _states_of_run(self, part: Some) -> States:
        """One each: u8[n]. Of what cannot be read all is kept: whoever carries it tells of that."""
        entry = part.entry
        states = np.zeros(part.stop - part.start, np.uint8)
        if 0 <= entry[2] <= self._stale_us:
            states[:] = self._expired
        if entry[8] & ENTRY_HAS_EXPIRE_AT:
            batch = self._batch_of(part.partition, entry)
            if batch is not None:
                expire_at = batch.column(entry[5], HAS_EXPIRE_AT)[part.start : part.stop]
                since = expire_at + np.uint64(batch.clock_us) * (expire_at < DELAY_END_US)
                states[(expire_at != 0) & (since <= self._now_us)] = self._expired
        if self._bits:
            tags = self._column(part, HAS_TAGS) if entry[8] & ENTRY_HAS_TAGS else np.zeros(len(states), np.uint32)
            if tags is not None:
                states[(tags & np.uint32(self._bits)) == 0] = FILTERED
        return states

    def _column(self, part: Some, flag: int) -> npt.NDArray[Any] | None:
        entry = part.entry
        batch = self._batch_of(part.partition, entry)
        return None if batch is None else batch.column(entry[5], flag)[part.start : part.stop]

    def _batch_of(self, partition: int, entry: EntryRow) -> StoredBatch | None:
        position = entry[1]
        if self._batch[:2] != (partition, position):
            try:
                found = StoredBatch(self._store.view(partition, position, entry[10]))
            except QmqError:
                found = None
            self._batch = partition, position, found
        return self._batch[2]


def _same(states: States, apart: int = -1) -> Iterator[tuple[int, int]]:
    """Where ranges of the same state begin and end; each of state *apart* is one of its own."""
    if not len(states):
        return
    breaks = states[1:] != states[:-1]
    if apart >= 0:
        breaks |= states[1:] == apart
    yield from pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(states)])


class FilteredParts(NamedTuple):
    """What a pull gets of what was chosen for it."""

    parts: Parts  # kept and expired, in order
    matched: int
    expired: list[tuple[int, int]]  # in these places of what is in ``parts``
    skipped: int
    filtered: int  # which have none of the group's tags
    messages: int  # of all that was chosen


def filter_parts(state_ranges: Iterator[StateRange], max_matched: int, max_parts: int) -> FilteredParts:
    """Up to *max_matched* messages of what was chosen, in up to *max_parts* parts."""
    parts, expired = Parts(), list[tuple[int, int]]()
    matched = skipped = filtered = messages = place = 0
    for state, part, count in state_ranges:
        if matched == max_matched or len(parts) >= max_parts:
            break
        if state == MATCHED and count > max_matched - matched:
            return FilteredParts(parts, max_matched, expired, skipped, filtered, messages + max_matched - matched)
        messages += count
        if state == FILTERED:
            filtered += count
            continue
        if state == SKIPPED:
            skipped += count
            continue
        if state == EXPIRED:
            expired.append((place, place + count))
        else:
            matched += count
        place += count
        parts.append(part)
    return FilteredParts(parts, matched, expired, skipped, filtered, messages)
