"""What a pull gets of what is handed out for the first time: chosen by cursors, then sifted by tags and expiry."""

from __future__ import annotations

from typing import Final

from qmq.broker.delivery.at_most_once import OnDisk
from qmq.broker.delivery.filters import FilteredParts, MessageFilter, filter_parts
from qmq.broker.delivery.handing import Handing
from qmq.broker.delivery.select import MAX_PIECES, PullSelection
from qmq.broker.groups.group import Subscription, Waiting
from qmq.broker.groups.message_ranges import Many, Parts
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.ports.limits import BrokerLimits
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import Store

#: Of what may not be wanted at least so much is looked at at a time.
WIDE_COUNT: Final = 8_192
WIDE_BYTES: Final = 16 << 20
#: One pull looks so often at what nothing comes of, before it is put off to the next turn.
_MOST_ROUNDS: Final = 16
_NOTHING: Final = FilteredParts([], 0, [], 0, 0, 0)
_NO_SETTINGS: Final = ResolvedSettings()


class Choosing:
    """For all pulls."""

    def __init__(self, store: Store, limits: BrokerLimits, handing: Handing, on_disk: OnDisk) -> None:
        self._store = store
        self._limits = limits
        self._handing = handing
        self._on_disk = on_disk

    def choose(
        self, waiting: Waiting, max_count: int, need: int, max_bytes: int, undo: bool = False
    ) -> tuple[PullSelection, FilteredParts | None]:
        """A choice whose ``count`` is what the pull would get of it; and that, where it is not all that was chosen.

        What nothing comes of is passed at once.
        """
        rounds = _MOST_ROUNDS
        while True:
            again = rounds < _MOST_ROUNDS
            selection, filtered_parts = self._sifted(waiting, max_count, need, max_bytes, undo=undo, again=again)
            if filtered_parts is None or filtered_parts.matched or not filtered_parts.messages:
                return selection, filtered_parts
            self.passed(waiting.subscription, filtered_parts)
            if filtered_parts.expired:
                self.give(waiting.subscription, filtered_parts, 0)
            rounds -= 1
            if not rounds or not selection.full or selection.wanted is not None or selection.failed is not None:
                return selection, _NOTHING

    def _sifted(
        self, waiting: Waiting, max_count: int, need: int, max_bytes: int, *, undo: bool, again: bool
    ) -> tuple[PullSelection, FilteredParts | None]:
        subscription = waiting.subscription
        ledger = subscription.group.ledger
        settings = _NO_SETTINGS if ledger is None else ledger.settings
        message_filter = MessageFilter(
            self._store, settings, self._handing.now.wall_us, buries=subscription.member is not None
        )
        most, size = max_count, max_bytes
        if settings.tags or settings.expire_after_us or again:
            most, size, undo = max(max_count, WIDE_COUNT), max(max_bytes, WIDE_BYTES), True
        selection = self._select(waiting, most, need, size, undo)
        if not message_filter.has_work(selection.parts):
            return selection, None
        chosen = selection.count
        filtered_parts = filter_parts(message_filter.state_ranges(selection.parts), max_count, MAX_PIECES)
        fits = _fitting(filtered_parts, max_bytes)
        if fits < filtered_parts.matched:
            filtered_parts = filter_parts(message_filter.state_ranges(selection.parts), fits, MAX_PIECES)
        if (
            filtered_parts.messages < chosen
        ):  # what lies behind is for the next pull: choose again, and no more than this
            selection.take_back()
            held_back = selection.held_back
            selection = self._select(waiting, filtered_parts.messages, filtered_parts.messages, size, undo=True)
            selection.held_back |= held_back
            filtered_parts = filter_parts(message_filter.state_ranges(selection.parts), max_count, MAX_PIECES)
        selection.count = filtered_parts.matched
        return selection, filtered_parts

    def _select(self, waiting: Waiting, max_count: int, need: int, max_bytes: int, undo: bool) -> PullSelection:
        """Choose from what the subscription follows, but for what is being read, and what is not on disk where that
        has to be.
        """
        max_count = min(max_count, self._limits.max_pull_count)
        if waiting.subscription.group.mode != AT_MOST_ONCE:
            return self._select_any(waiting, max_count, need, max_bytes, undo or need > 1)
        selection = self._select_any(waiting, max_count, need, max_bytes, True)
        count = self._on_disk.count(selection.parts, selection.count)
        if count == selection.count:
            return selection
        selection.take_back()
        if count < need:
            if selection.count >= need:
                self._on_disk.want(selection.taken())
            selection = PullSelection(self._store, 0, 0, need, True)
        else:
            selection = self._select_any(waiting, count, need, max_bytes, True)
        selection.held_back = True
        return selection

    def _select_any(self, waiting: Waiting, max_count: int, need: int, max_bytes: int, undo: bool) -> PullSelection:
        selection = PullSelection(self._store, max_count, max_bytes, need, undo, self._handing.now.monotonic_us)
        for subject_filter in waiting.subscription.in_turn():
            if not subject_filter.reading:
                selection.take(subject_filter)
                if selection.full:
                    break
        return selection

    def passed(self, subscription: Subscription, filtered_parts: FilteredParts) -> None:
        """What a pull skips is gone for good."""
        subscription.group.skipped += filtered_parts.skipped
        subscription.group.filtered += filtered_parts.filtered
        subscription.group.dirty = True

    def give(self, subscription: Subscription, filtered_parts: FilteredParts, size: int) -> tuple[int, int]:
        """Note that a consumer has it, and that what has expired is dead: the delivery sequences."""
        start, end = self._handing.gave(subscription, filtered_parts.parts, size)
        if filtered_parts.expired:
            self._handing.expire(subscription, [(start + low, start + high) for low, high in filtered_parts.expired])
        return start, end


def _fitting(filtered_parts: FilteredParts, max_bytes: int) -> int:
    """About how many of the messages have room in so many bytes: one at least."""
    size = _bytes(filtered_parts.parts)
    return filtered_parts.matched if size <= max_bytes else max(filtered_parts.matched * max_bytes // size, 1)


def _bytes(parts: Parts) -> int:
    return sum(
        int(part.rows["run_size"].sum(dtype="u8"))
        if isinstance(part, Many)
        else part.entry[9] * (part.stop - part.start) // part.entry[4]
        for part in parts
    )
