"""The events of one message in one group, out of the records of the pull log that may concern it."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

from qmq.broker.find.trace.places import MessagePlace, offset_in
from qmq.broker.find.trace.records import FoundRecords
from qmq.broker.groups.group import Group
from qmq.broker.journal.record_types import LeaveReason, RecordKind
from qmq.net.protocol.types import Disposition
from qmq.storage.store import Store

HANDED_OUT: Final = "handed_out"
ACKED: Final = "acked"
REDRIVEN: Final = "redriven"
_DISPOSITIONS: Final = {
    None: ACKED,
    Disposition.NACK: "nacked",
    Disposition.RELEASE: "released",
    Disposition.REJECT: "rejected",
}
_LEAVES: Final = {LeaveReason.LEFT: "left", LeaveReason.EXPIRED: "session_expired", LeaveReason.CLOSED: "dropped"}
_BROUGHT: Final = {RecordKind.OVER: "handed_over", RecordKind.RESTORED: "restored", RecordKind.RESENT: "resent"}
#: The most events of one group, the last ones.
MOST_EVENTS: Final = 200


class MessageChange(NamedTuple):
    """One event: its position in the pull log, what happened, when, to which consumer, in which attempt, and why."""

    position: int
    kind: str
    time_us: int
    consumer: str | None
    attempt: int
    reason: str


class _Delivery(NamedTuple):
    position: int
    consumer: tuple[int, int]
    sequence: int
    attempt: int
    now_us: int


def events_of(
    store: Store, group: Group, places: list[MessagePlace], found: FoundRecords, redriven_us: int | None
) -> list[MessageChange]:
    """Return what happened to a message in a group, the oldest first; *redriven_us* is when its present retry was made
    of a dead letter. Raises NotInMemory and StorageError.
    """
    assert group.ledger is not None
    number, members = group.ledger.number, group.ledger.members

    def name_of(consumer: tuple[int, int]) -> str | None:
        member = members.get(consumer[1])
        return member.name if member is not None else found.names.get(consumer)

    events = list[MessageChange]()
    for brought in found.brought.get(number, ()):
        if any(offset_in(store, group, brought.messages, place) is not None for place in places):
            kind = _BROUGHT[brought.kind]
            events.append(MessageChange(brought.position, kind, brought.now_us, None, brought.attempt, brought.reason))
    for delivery in _deliveries(store, group, places, found):
        who = name_of(delivery.consumer)
        events.append(MessageChange(delivery.position, HANDED_OUT, delivery.now_us, who, delivery.attempt, ""))
        end = _end_of(delivery, found, who)
        if end is not None:
            events.append(end)
    events.sort()
    return _with_redrives(events, found.redriven.get(number, []), redriven_us)[-MOST_EVENTS:]


def _deliveries(store: Store, group: Group, places: list[MessagePlace], found: FoundRecords) -> list[_Delivery]:
    assert group.ledger is not None
    deliveries = list[_Delivery]()
    for given in found.given.get(group.ledger.number, ()):
        for place in places:
            offset = offset_in(store, group, given.messages, place)
            if offset is not None:
                sequence = given.first + offset
                deliveries.append(_Delivery(given.position, given.consumer, sequence, given.attempt, given.now_us))
                break
    return deliveries


def _end_of(delivery: _Delivery, found: FoundRecords, who: str | None) -> MessageChange | None:
    """Return the first record behind a delivery that ends it."""
    position, sequence, attempt = delivery.position, delivery.sequence, delivery.attempt
    ends = list[MessageChange]()
    for settled in found.settled.get(delivery.consumer, ()):
        if settled.position > position and settled.start <= sequence < settled.end:
            kind = _DISPOSITIONS[settled.disposition]
            ends.append(MessageChange(settled.position, kind, settled.now_us, who, attempt, settled.reason))
    for left in found.departed.get(delivery.consumer, ()):
        if left.position > position and sequence < left.end and left.why in _LEAVES:
            ends.append(MessageChange(left.position, _LEAVES[LeaveReason(left.why)], left.now_us, who, attempt, ""))
    return min(ends, default=None)


def _with_redrives(
    events: list[MessageChange], redriven: list[tuple[int, int]], redriven_us: int | None
) -> list[MessageChange]:
    """Add the redrives. A message that is handed out as if for the first time, although an attempt had ended before,
    was redriven by the last such record before that.
    """
    added = list[MessageChange]()
    for before, after in pairwise(events):
        if after.kind == HANDED_OUT and after.attempt == 1 and before.kind in ("nacked", "rejected"):
            between = [one for one in redriven if before.position < one[0] < after.position]
            if between:
                added.append(MessageChange(between[-1][0], REDRIVEN, between[-1][1], None, 1, ""))
    if redriven_us is not None:
        position = next((at for at, now_us in redriven if now_us == redriven_us), None)
        if position is not None and events:
            added.append(MessageChange(position, REDRIVEN, redriven_us, None, 1, ""))
    return sorted({*events, *added})
