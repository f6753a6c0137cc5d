"""The state of one message in one group, from what the broker acts on: cursors, retries, messages in flight and dead
letters. Nothing is kept for traces.

    in_flight    a consumer has it, and no disposition of it was taken
    retrying     it is in the error log
    waiting      it is behind the group's cursor: a pull will bring it
    filtered     it has none of the group's tags, so a pull passes it, or has passed it
    expired      its time to live is over, so a pull will reject it
    before_start the group begins behind it
    dead         it is a dead letter
    handed_out   an at-most-once group has passed it; such a group keeps no more
    acked        it is before the cursor, and nothing is left of it
    deleted      the same, but the pull log says that its last attempt failed: its dead letter or retry was deleted
    dropped      retention dropped it; a copy for another group may exist
    not_subscribed   the group does not follow its subject
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from qmq.broker.delivery.filters import EXPIRED, FILTERED, SKIPPED, MessageFilter
from qmq.broker.delivery.order.blocked import blocked_by
from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.find.trace.events import ACKED, DELETED, HANDED_OUT, PASSED_OVER, REDRIVEN, SOUGHT, MessageChange
from qmq.broker.find.trace.places import MessagePlace, may_have, offset_in
from qmq.broker.groups.group import Group, SubjectFilter
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import PARTITIONS, MessageParts
from qmq.names import takes
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import Store

#: Ranges in flight, or items of an error log, that are looked at in one step.
_STEP: Final = 512
#: How often a group that changes while it is looked at is looked at again.
_MOST_LOOKS: Final = 3
_PARTITION_BITS: Final = 0xFFFF


class GroupMessage(NamedTuple):
    """The state of a message in a group. Times are microseconds; None where the state has no such thing."""

    state: str
    consumer: str | None = None
    since_us: int | None = None
    attempts: int = 0
    due_us: int | None = None
    reason: str = ""


class GroupView:
    """Finds the state of one message in one group."""

    def __init__(self, store: Store, group: Group, places: list[MessagePlace], now_us: int) -> None:
        """*places* are those where the group has the message."""
        assert group.ledger is not None
        self._store = store
        self._group = group
        self._ledger: Ledger = group.ledger
        self._places = places
        self._now_us = now_us
        #: When its present retry was made of a dead letter, if it was.
        self.redriven_us: int | None = None
        self.found = GroupMessage("waiting")

    def look(self) -> Iterator[None]:
        """Look, step by step; ``found`` has the state then. Raises NotInMemory and StorageError."""
        for _ in range(_MOST_LOOKS):
            before = self._ledger.version, self._cursor_state()
            steps = 0
            held: GroupMessage | None = None
            for held in self._held():
                if held is not None:
                    break
                steps += 1
                yield
            if held is not None and held.state == "retrying" and (why := self._without_tags()):
                held = held._replace(reason=f"{held.reason}; {why}: it is not handed out again")
            after = self._cursor_state()
            self.found = after if held is None or (held.state == "dead" and after.state == "waiting") else held
            if not steps or before == (self._ledger.version, after):
                return

    def _held(self) -> Iterator[GroupMessage | None]:
        """Yield None after each step, and at last the state, if messages in flight, retries or dead letters have it."""
        ledger = self._ledger
        if ledger.retries.count:
            for items in ledger.retries.scheduled():
                for retry in self._touched(items):
                    for left in ledger.retries.left_of(retry):
                        if self._has(left.messages):
                            yield self._retrying(left)
                yield None
            for retry in ledger.retries.waiting():
                if self._has(retry.messages):
                    yield self._retrying(retry)
        yield from self._in_flight()
        if len(ledger.dead):
            for items in ledger.dead.after(0):
                for letter in self._touched(items):
                    if self._has(letter.messages):
                        yield GroupMessage(
                            "dead", self._name_of(letter.consumer), letter.due_us, letter.attempt, None, letter.reason
                        )
                yield None

    def _in_flight(self) -> Iterator[GroupMessage | None]:
        ranges = 0
        for member in list(self._ledger.members.values()):
            if not member.in_flight.count:
                continue
            for pull in list(member.in_flight.pulls):
                ranges += len(pull.ranges)
                if ranges > _STEP:
                    ranges = 0
                    yield None
                first = pull.first
                for in_flight in list(pull.ranges):
                    offset = self._offset(in_flight.messages)
                    if offset is not None and member.in_flight.holds(first + offset, first + offset + 1):
                        yield GroupMessage("in_flight", member.name, pull.taken_us, in_flight.attempt)
                    first += in_flight.messages.total

    def _retrying(self, retry: RetryItem) -> GroupMessage:
        if retry.attempt == 1 and retry.reason != "released":
            self.redriven_us = retry.failed_at_us
        who = self._name_of(retry.consumer)
        return GroupMessage("retrying", who, retry.failed_at_us, retry.attempt - 1, retry.due_us, retry.reason)

    def _name_of(self, number: int) -> str | None:
        member = self._ledger.members.get(number)
        return None if member is None else member.name

    # --- ranges -------------------------------------------------------------------------------------------------------

    def _offset(self, messages: Any) -> int | None:
        for place in self._places:
            if may_have(messages, place):
                offset = offset_in(self._store, self._group, messages, place)
                if offset is not None:
                    return offset
        return None

    def _has(self, messages: Any) -> bool:
        return self._offset(messages) is not None

    def _touched(self, items: np.ndarray[Any, np.dtype[np.void]]) -> list[RetryItem]:
        """Return the retries or dead letters among *items* whose range may have the message."""
        logs, firsts = items["log"].astype(np.int64), items["first"].astype(np.int64)
        found = np.zeros(len(items), np.bool_)
        starts = firsts + items["skip"]
        for place in self._places:
            position = place.entry[1]
            by_position = (logs >= PARTITIONS) & ((logs & _PARTITION_BITS) == place.partition)
            found |= by_position & (firsts <= position) & (items["end"].astype(np.int64) >= position)
            by_sequence = (logs == place.entry[3]) & (starts <= place.sequence)
            found |= by_sequence & (place.sequence < starts + items["count"])
        return unpacked(items[found & (items["number"] > 0)])

    # --- cursors ------------------------------------------------------------------------------------------------------

    def _cursor_state(self) -> GroupMessage:
        """Return the state by the group's cursors alone."""
        group = self._group
        place = next((place for place in self._places if place.is_shared), None)
        if place is None:  # retention has dropped it, and copied it for groups that had it in hand
            return GroupMessage("acked" if self._places else "dropped")
        filters = [one for one in group.filters.values() if takes((one.prefix,), place.name)]
        if not filters:
            return GroupMessage("not_subscribed")
        starts = [reason for one in filters if (reason := self._begins_behind(one, place)) is not None]
        if len(starts) == len(filters):
            return GroupMessage("before_start", reason=starts[0])
        settings = self._ledger.settings
        buries = group.mode != AT_MOST_ONCE
        chosen = MessageFilter(self._store, settings, self._now_us, buries=buries)
        (state,) = {one.state for one in chosen.state_ranges([place.run_part])}
        if state == FILTERED:
            return GroupMessage("filtered", reason=self._without_tags())
        number = place.entry[3]
        if place.sequence >= group.cursors.get(number):
            if state in (EXPIRED, SKIPPED):
                return GroupMessage("expired", since_us=place.entry[2])
            return GroupMessage("waiting", since_us=place.entry[2], reason=blocked_by(self._store, group, number))
        return GroupMessage("handed_out" if group.mode == AT_MOST_ONCE else "acked")

    def _without_tags(self) -> str:
        """Return why the group would filter the message if it were to be handed out; "" if it would not."""
        settings = self._ledger.settings
        parts: MessageParts = [place.run_part for place in self._places[:1]]
        states = {one.state for one in MessageFilter(self._store, settings, 0).state_ranges(parts)}
        return f"it has none of the tags {', '.join(settings.tags)}" if FILTERED in states else ""

    def _begins_behind(self, subject_filter: SubjectFilter, place: MessagePlace) -> str | None:
        """Return how a filter begins behind the message; None where it does not."""
        start = subject_filter.start
        if place.entry[3] >= start.subjects:
            return None
        if start.kind == "sequence" and place.sequence < start.value:
            return f"the group begins at sequence {start.value}"
        if start.kind == "time" and place.entry[2] < start.value:
            return "the group begins at a later time"
        return None


def with_events(found: GroupMessage, events: list[MessageChange]) -> GroupMessage:
    """Return the state of a message that is past with what the pull log says of its end."""
    last = next((event for event in reversed(events) if event.kind not in (REDRIVEN, DELETED, SOUGHT)), None)
    if last is None or found.state not in ("acked", "filtered", "before_start", "dropped", "not_subscribed"):
        return found
    if last.kind == ACKED:
        return GroupMessage("acked", last.consumer, last.time_us, last.attempt)
    if last.kind == PASSED_OVER:
        reason = found.reason or last.reason or "it had none of the group's tags then"
        return GroupMessage("filtered", None, last.time_us, last.attempt, None, reason)
    deleted = next((event for event in events if event.kind == DELETED and event.position > last.position), None)
    if deleted is not None or (found.state == "acked" and last.kind != HANDED_OUT):
        since_us = last.time_us if deleted is None else deleted.time_us
        return GroupMessage("deleted", last.consumer, since_us, last.attempt, None, last.reason)
    return found
