"""The events of one message in one group, out of the records of the pull log that may concern it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from qmq.broker.delivery.filters import FILTERED, MessageFilter
from qmq.broker.find.trace.places import MessagePlace, offset_in
from qmq.broker.find.trace.records import ChangedLetters, FoundRecords, Sought
from qmq.broker.groups.group import Group
from qmq.broker.journal.record_types import LeaveReason, RecordKind
from qmq.net.protocol.types import Disposition
from qmq.storage.store import Store

HANDED_OUT: Final = "handed_out"
ACKED: Final = "acked"
PASSED_OVER: Final = "filtered"
REDRIVEN: Final = "redriven"
DELETED: Final = "deleted"
SOUGHT: Final = "sought"
DISPOSITIONS: Final = {
    None: ACKED,
    Disposition.NACK: "nacked",
    Disposition.RELEASE: "released",
    Disposition.REJECT: "rejected",
    Disposition.FILTER: PASSED_OVER,
}
LEAVES: Final = {LeaveReason.LEFT: "left", LeaveReason.EXPIRED: "session_expired"}
_BROUGHT: Final = {RecordKind.OVER: "handed_over", RecordKind.RESTORED: "restored", RecordKind.RESENT: "resent"}
_REDRIVE: Final = RecordKind.REDRIVE
#: The most events of one group, the last ones.
MOST_EVENTS: Final = 200
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The message became no dead letter.
_NO_LETTER: Final = (0, 0)


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
    session_expiries: int


class _End(NamedTuple):
    """The end of a delivery; *letters* are the numbers, from the first to the last, of which the message has one if it
    became a dead letter by that.
    """

    change: MessageChange
    letters: tuple[int, int] = _NO_LETTER


def events_of(
    store: Store, group: Group, places: list[MessagePlace], found: FoundRecords, state: str, redriven_us: int | None
) -> list[MessageChange]:
    """Return what happened to a message in a group, the oldest first. *state* is its present one, and *redriven_us* is
    when its present retry was made of a dead letter. Raises NotInMemory and StorageError.
    """
    assert group.ledger is not None
    number, members = group.ledger.number, group.ledger.members

    def name_of(consumer: tuple[int, int]) -> str | None:
        member = members.get(consumer[1])
        return member.name if member is not None else found.names.get(consumer)

    sought = [_sought(one) for one in found.sought.get(number, ())]
    ends = list[_End]()
    begun = list[tuple[MessageChange, int]]()  # with the session expiries before
    for brought in found.brought.get(number, ()):
        if any(offset_in(store, group, brought.messages, place) is not None for place in places):
            change = MessageChange(
                brought.position, _BROUGHT[brought.kind], brought.now_us, None, brought.attempt, brought.reason
            )
            begun.append((change, 0))
            if brought.kind == RecordKind.OVER:
                ends.append(_End(change, (brought.letter, brought.letter)))
    for delivery in _deliveries(store, group, places, found):
        who = name_of(delivery.consumer)
        change = MessageChange(delivery.position, HANDED_OUT, delivery.now_us, who, delivery.attempt, "")
        begun.append((change, delivery.session_expiries))
        end = _end_of(delivery, found, sought, who)
        if end is not None:
            ends.append(end)
    begun.sort()
    events = {one for one, _ in begun} | {one.change for one in ends}
    handed = {change.position for change, _ in begun}
    for passed in found.passed.get(number, ()):
        if passed.position in handed:
            continue
        place = next((one for one in places if offset_in(store, group, passed.messages, one) is not None), None)
        if place is not None and (not passed.has_others or _lacks_tags(store, group, place)):
            events.add(MessageChange(passed.position, PASSED_OVER, passed.now_us, None, 0, ""))
    if events:
        events |= _changed_letters(found.letters.get(number, []), ends, begun, state, redriven_us)
    return _with_seeks(sorted(events), sought)[-MOST_EVENTS:]


def _lacks_tags(store: Store, group: Group, place: MessagePlace) -> bool:
    """Return whether a message has none of the group's present tags."""
    assert group.ledger is not None
    chosen = MessageFilter(store, group.ledger.settings, 0)
    return any(one.state == FILTERED for one in chosen.state_ranges([place.run_part]))


def _deliveries(store: Store, group: Group, places: list[MessagePlace], found: FoundRecords) -> list[_Delivery]:
    assert group.ledger is not None
    deliveries = list[_Delivery]()
    for given in found.given.get(group.ledger.number, ()):
        for place in places:
            offset = offset_in(store, group, given.messages, place)
            if offset is not None:
                position, consumer, first, _, attempt, now_us, expiries = given
                deliveries.append(_Delivery(position, consumer, first + offset, attempt, now_us, expiries))
                break
    return deliveries


def _end_of(delivery: _Delivery, found: FoundRecords, sought: list[MessageChange], who: str | None) -> _End | None:
    """Return the first record behind a delivery that ends it."""
    position, sequence, attempt = delivery.position, delivery.sequence, delivery.attempt
    ends = [_End(one) for one in sought if one.position > position]
    for settled in found.settled.get(delivery.consumer, ()):
        if settled.position > position and settled.start <= sequence < settled.end:
            kind, letters = DISPOSITIONS[settled.disposition], _NO_LETTER
            if settled.disposition in (Disposition.NACK, Disposition.REJECT):
                offset = sequence - settled.start
                first = settled.first_letter + (offset if settled.disposition == Disposition.REJECT else 0)
                letters = first, settled.last_letter + offset
            change = MessageChange(settled.position, kind, settled.now_us, who, attempt, settled.reason)
            ends.append(_End(change, letters))
    for left in found.departed.get(delivery.consumer, ()):
        if left.position > position and sequence < left.end and left.why in LEAVES:
            change = MessageChange(left.position, LEAVES[LeaveReason(left.why)], left.now_us, who, attempt, "")
            is_expired = left.why == LeaveReason.EXPIRED  # a dead letter only where the message was alone in flight
            ends.append(_End(change, (left.first_letter, left.first_letter) if is_expired else _NO_LETTER))
    return min(ends, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# Dead letters


def _changed_letters(
    changes: list[ChangedLetters], ends: list[_End], begun: list[tuple[MessageChange, int]], state: str,
    redriven_us: int | None,
) -> set[MessageChange]:  # fmt: skip
    """Return the redrives and deletions of the message's dead letters.

    No record says which messages became dead letters: a failed attempt made one if the next delivery is a first attempt
    again, or if nothing is left of the message.
    """
    added = set[MessageChange]()
    for end, letters in ends:
        if letters == _NO_LETTER:
            continue
        following = next((one for one in begun if one[0].position > end.position), None)
        if following is not None:
            after, expiries = following
            if after.kind == HANDED_OUT and (after.attempt > 1 or expiries):
                continue  # it was a retry
        elif state in ("dead", "waiting"):  # waiting: it was sought back, and had a retry or a letter before
            continue
        last = following[0].position if following is not None else 1 << 64
        change = next((one for one in changes if end.position < one.position < last and one.has_any(*letters)), None)
        if change is None:
            continue
        if following is None and state == "retrying" and (change.kind, change.now_us) != (_REDRIVE, redriven_us):
            continue
        added.add(_change(change, end.attempt))
    if redriven_us is not None:
        added.update(_change(one, 1) for one in changes if one.kind == _REDRIVE and one.now_us == redriven_us)
    return added


def _change(letters: ChangedLetters, attempt: int) -> MessageChange:
    is_redriven = letters.kind == _REDRIVE
    kind, attempt = (REDRIVEN, 1) if is_redriven else (DELETED, attempt)
    return MessageChange(letters.position, kind, letters.now_us, None, attempt, "")


# ---------------------------------------------------------------------------------------------------------------------
# Seeks


def _sought(seek: Sought) -> MessageChange:
    """Return the event of a seek, whose reason says where to."""
    kind, value, *_ = seek.start
    if kind == "time":
        where = f"to {(_EPOCH + timedelta(microseconds=value)).isoformat(timespec='milliseconds')[:-6]}Z"
    else:
        where = f"to sequence {value}" if kind == "sequence" else "to the first message"
    return MessageChange(
        seek.position, SOUGHT, seek.now_us, None, 0, where + (", retries were dropped" if seek.clears else "")
    )


def _with_seeks(events: list[MessageChange], sought: list[MessageChange]) -> list[MessageChange]:
    """Return the events with the seeks behind the first of them: of several in a row the first and the last."""
    if not events or not sought:
        return events
    merged = sorted({*events, *(one for one in sought if one.position > events[0].position)})
    kinds = ["", *(one.kind for one in merged), ""]
    return [one for at, one in enumerate(merged) if not (one.kind == kinds[at] == kinds[at + 2] == SOUGHT)]
