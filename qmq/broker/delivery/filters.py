"""Filters on chosen messages: a group gets those with one of its tags that have not expired.

Entries say which batches have tags and expiries, so runs without either pass unread. Columns are compared run by run,
not message by message.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.message_ranges import MessageParts, Rows, RunPart, WholeRuns
from qmq.broker.groups.settings import ResolvedSettings
from qmq.errors import QmqError
from qmq.format.batch import EntryRow
from qmq.format.hashing import tag_bits
from qmq.format.layout import DELAY_END_US, ENTRY_HAS_EXPIRE_AT, ENTRY_HAS_TAGS, HAS_EXPIRE_AT, HAS_TAGS
from qmq.format.pieces import StoredBatch
from qmq.storage.store import Store

#: States of chosen messages. EXPIRED ones become dead letters, SKIPPED ones have expired where none are kept.
MATCHED: Final = 0
SKIPPED: Final = 1
EXPIRED: Final = 2
FILTERED: Final = 3
_LOOK: Final = 4  # the columns of the run decide

States = npt.NDArray[np.uint8]


class StateRange(NamedTuple):
    """Messages in a row with the same state."""

    state: int
    part: RunPart | WholeRuns
    total: int


class MessageFilter:
    """The filter of one group at one time."""

    def __init__(self, store: Store, settings: ResolvedSettings, now_us: int, *, buries: bool = True) -> None:
        """With *buries*, expired messages are EXPIRED, else SKIPPED."""
        self._store = store
        self._bits = tag_bits(settings.tags)
        self._expired = EXPIRED if buries else SKIPPED
        self._now_us = now_us
        #: Messages stored at or before this time have expired; below 0 means none.
        self._stale_us = now_us - settings.expire_after_us if settings.expire_after_us else -1
        self._batch: tuple[int, int, StoredBatch | None] = (-1, -1, None)
        self._decides_always = bool(self._bits) or self._stale_us >= 0
        #: Runs that were looked at message by message.
        self.runs_read = 0

    def has_work(self, parts: MessageParts) -> bool:
        """Return whether any message may be in another state than MATCHED."""
        if self._decides_always:
            return True
        return any(
            bool((part.rows["flags"] & ENTRY_HAS_EXPIRE_AT).any())
            if isinstance(part, WholeRuns)
            else part.entry[8] & ENTRY_HAS_EXPIRE_AT
            for part in parts
        )

    def state_ranges(self, parts: MessageParts) -> Iterator[StateRange]:
        """Yield the same messages in the same order, with their states."""
        for part in parts:
            if isinstance(part, RunPart):
                yield from self._of_run(part)
            else:
                yield from self._of_rows(part)

    def _of_rows(self, part: WholeRuns) -> Iterator[StateRange]:
        states = self._states_of_rows(part.rows)
        for start, end in _same(states, apart=_LOOK):
            rows = part.rows[start:end]
            if states[start] == _LOOK:
                entry = rows[0].item()
                yield from self._of_run(RunPart(part.partition, entry, 0, entry[4]))
            else:
                yield StateRange(int(states[start]), WholeRuns(part.partition, rows), int(rows["count"].sum()))

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

    def _of_run(self, part: RunPart) -> Iterator[StateRange]:
        states = self._states_of_run(part)
        if not states.any():
            yield StateRange(MATCHED, part, part.stop - part.start)
            return
        for start, end in _same(states):
            piece = part._replace(start=part.start + start, stop=part.start + end)
            yield StateRange(int(states[start]), piece, end - start)

    def _states_of_run(self, part: RunPart) -> States:
        """Return the state of each message: u8[n]. Unreadable messages match; the encoder reports them."""
        entry = part.entry
        self.runs_read += 1
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

    def _column(self, part: RunPart, flag: int) -> npt.NDArray[Any] | None:
        entry = part.entry
        batch = self._batch_of(part.partition, entry)
        return None if batch is None else batch.column(entry[5], flag)[part.start : part.stop]

    def _batch_of(self, partition: int, entry: EntryRow) -> StoredBatch | None:
        position = entry[1]
        if self._batch[:2] != (partition, position):
            try:
                found = StoredBatch(self._store.partitions[partition].message_log.view(position, entry[10]))
            except QmqError:
                found = None
            self._batch = partition, position, found
        return self._batch[2]


def _same(states: States, apart: int = -1) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range of equal states; each element with state *apart* is a range of its own."""
    if not len(states):
        return
    breaks = states[1:] != states[:-1]
    if apart >= 0:
        breaks |= states[1:] == apart
    yield from pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(states)])
