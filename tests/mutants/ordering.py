"""The safeguards of priorities and of order keys."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_PRIORITIES: Final = ("tests/broker/groups/test_priorities.py",)
_ORDER: Final = ("tests/broker/delivery/order/test_order.py",)
_WAITING: Final = ("tests/broker/delivery/order/test_order_waiting.py",)
_RETRIES: Final = ("tests/broker/groups/test_priorities_retries.py",)
_RETENTION: Final = ("tests/broker/delivery/order/test_order_retention.py",)
_BLOCKED: Final = ("tests/broker/delivery/order/test_blocked.py",)
_CLIENT: Final = ("tests/net/client/consumer/test_order_keys.py",)

OF_ORDER: Final = (
    Mutant(
        "leave lower priorities their share",
        "PriorityShare.coming",
        instead("int(self._coming[rank] + _EPSILON)", "0"),
        _PRIORITIES,
    ),
    Mutant(
        "save nothing up for priorities that do not wait",
        "PriorityShare.none_wait",
        skip("self._coming[rank] = 0.0"),
        _PRIORITIES,
    ),
    Mutant(
        "put due retries in the order of their priorities",
        "Retries._put",
        always("not queue or self.rank(queue[-1].messages) <= rank"),
        _PRIORITIES,
    ),
    Mutant(
        "hand out new messages of a higher priority before retries",
        "PullServer._ranked",
        always("rank == HIGH or coming"),
        _PRIORITIES,
    ),
    Mutant(
        "begin a narrower prefix where its slowest lane is",
        "SubjectFilter.first_cursors",
        instead("list(self.with_lanes())", "[self]"),
        _PRIORITIES,
    ),
    Mutant(
        "pass an at_most_once block of the time before a second lane",
        "AtMostOnce.resume",
        never("is_exact(subject_filter.prefix) and (subject_filter.exact or end < _STAMPS_FROM_US)"),
        _PRIORITIES,
    ),
    Mutant(
        "save nothing up for low messages before there are any",
        "PriorityShare.note_handed",
        instead("(HIGH, NORMAL) if has_low else (HIGH,)", "(HIGH, NORMAL)"),
        _RETRIES,
    ),
    Mutant(
        "leave low messages their share beside normal retries",
        "PullServer._ranked",
        never("coming and not is_again"),
        _RETRIES,
    ),
    Mutant(
        "heed retries that the consumer may have only",
        "_due_for",
        instead("None if first is None else retries.rank(first.messages)", "retries.due_rank"),
        _RETRIES,
    ),
    Mutant(
        "hand out retries of one rank before new messages of a higher one than others",
        "Retries.take",
        never("lowest is not None and self.rank(retry.messages) > lowest"),
        _RETRIES,
    ),
    Mutant(
        "put retries back among those of their rank",
        "Retries.put_back",
        always("not queue or rank <= self.rank(queue[0].messages)"),
        _RETRIES,
    ),
    Mutant(
        "serve others when a pull has too few of its slots",
        "Delivery._serve_waiting",
        instead("single and found is not None and not has_slots", "single and found is not None"),
        _WAITING,
    ),
    Mutant(
        "give a pull more slots than its part where it lacks messages",
        "OrderedScan.take",
        never("chooser.left_slots and taker.lacks and not taker.full"),
        _WAITING,
    ),
    Mutant(
        "grant slots for messages only",
        "scan:_take",
        instead("np.flatnonzero(~is_done)", "np.flatnonzero(chooser.may_have(subjects) & ~is_done)"),
        _WAITING,
    ),
    Mutant(
        "wake others when a pull has buried what held a slot up",
        "PullServer._wake_freed",
        never("ledger is not None and ledger.order is not None and ledger.order.is_freed"),
        _WAITING,
    ),
    Mutant(
        "choose from all slots where a filter leaves too few",
        "PullSelector._filtered",
        never("filtered_parts.matched < need and selection.left_slots"),
        ("tests/broker/delivery/order/test_order_filters.py",),
    ),
    Mutant(
        "hand out no low messages while slots with messages are left",
        "_take_lower",
        always("not selection.full and not selection.left_slots"),
        ("tests/broker/delivery/order/test_order_modes.py",),
    ),
    Mutant(
        "give copies the places of their originals",
        "place_of_copy",
        never("header.producer_id == COPY_PRODUCER"),
        _RETENTION,
    ),
    Mutant(
        "give copies of copies the places of their originals",
        "for_group:_place_of",
        never("isinstance(header, Header) and header.producer_id == COPY_PRODUCER"),
        _RETENTION,
    ),
    Mutant(
        "find the slot of copies that were there before it",
        "StoreSlots.changed",
        always("not self._copies_only or self._looked == subjects.count"),
        ("tests/broker/delivery/order/test_order_transfer.py",),
    ),
    Mutant(
        "take back what a filter leaves for the next pull",
        "PullSelection._set",
        skip("self._undo.append((group.cursors, numbers, cursors[numbers].copy()))"),
        ("tests/broker/delivery/test_filters.py",),
    ),
    Mutant(
        "hand out a slot to its owner alone",
        "OrderSlots.may_have",
        instead("(owners == 0) | (owners == consumer)", "owners == owners"),
        _ORDER,
    ),
    Mutant(
        "hand out nothing behind a retry",
        "OrderSlots.may_have",
        skip("allowed &= ~self._is_retrying[slots]"),
        _ORDER,
    ),
    Mutant(
        "hand out the first retry of a slot first",
        "OrderSlots.may_come_again",
        never("before is None or not before.covers(low, min(high, start))"),
        _ORDER,
    ),
    Mutant(
        "hand out a retry to the owner of its slot",
        "OrderSlots.may_come_again",
        never("self._owners[slot] not in (0, consumer)"),
        _ORDER,
    ),
    Mutant(
        "take back what follows a message that is to come again",
        "Ledger.hand_back",
        never("self.order is not None"),
        _ORDER,
    ),
    Mutant(
        "know after a start which slots are held",
        "OrderSlots.renew",
        never("self.is_stale"),
        _ORDER,
    ),
    Mutant(
        "forget the slots of pulls that are handled",
        "OrderSlots.settled",
        skip("del pulls[at]"),
        _ORDER,
    ),
    Mutant(
        "forget in the client slots of messages with a disposition",
        "InFlightWindow._note_ordered",
        never("len(ordered) >= self._most_ordered"),
        ("tests/net/client/consumer/test_in_flight.py",),
    ),
    Mutant(
        "remember the rows that were passed",
        "OrderedScan._read_on",
        never("left.any()"),
        _ORDER,
    ),
    Mutant(
        "go back to the first row that was passed",
        "OrderedScan._set_cursors",
        never("len(left)"),
        _ORDER,
    ),
    Mutant(
        "find forgotten slots again",
        "OrderedScan._take_some",
        never("self._forgotten"),
        _ORDER,
    ),
    Mutant(
        "go back to forgotten rows of slots that are free",
        "OrderedScan._read_again",
        skip("self._next_rows = firsts"),
        _ORDER,
    ),
    Mutant(
        "go back no further than retention allows",
        "OrderedScan._read_again",
        instead("map(max, rows, self._filter.row_cursors)", "rows"),
        _ORDER,
    ),
    Mutant(
        "leave slots to other consumers",
        "_SlotChooser.__init__",
        never("consumers > 1"),
        _ORDER,
    ),
    Mutant(
        "serve others when a pull may have nothing of a slot",
        "Delivery._serve_waiting",
        never("found == 0 and has_slots"),
        _ORDER,
    ),
    Mutant(
        "wake others when a slot is free",
        "Delivery._wake_own",
        never("ledger is not None and ledger.order is not None and ledger.order.is_freed"),
        _ORDER,
    ),
    Mutant(
        "refuse lanes that are neither priorities nor slots",
        "_check_runs",
        never("len(unknown)"),
        ("tests/broker/publish/test_publish_lanes.py",),
    ),
    Mutant(
        "restore messages whose order keys no client sends",
        "_order_key_of",
        instead(
            "order_key if order_key is not None and 0 < len(order_key.encode()) <= MAX_KEY_BYTES else None", "order_key"
        ),
        ("tests/restore/test_parquet.py",),
    ),
    Mutant(
        "refuse order keys in no order",
        "_is_listed",
        instead("isinstance(values, str | bytes | bytearray | Mapping | Set)", "isinstance(values, str | bytes)"),
        ("tests/net/client/test_lanes.py",),
    ),
    Mutant(
        "read the message that holds a slot up beside the turns",
        "blocked:_with_message",
        never("not partition.page_cache.has(position, size)"),
        _BLOCKED,
    ),
    Mutant(
        "know after a start which slots hold messages up",
        "current_order",
        skip("ledger.order.renew()"),
        _BLOCKED,
    ),
    Mutant(
        "release in the client what follows a failed message",
        "NackSender._release_behind",
        always("back.disposition == Disposition.REJECT"),
        _CLIENT,
    ),
    Mutant(
        "skip in a loop what goes back",
        "MessageFeed._open_messages",
        always("not run.in_flight.goes_back(number)"),
        _CLIENT,
    ),
    Mutant(
        "skip in a pull what goes back",
        "Puller._drop_early_returns",
        skip("self._received.keep_open()"),
        _CLIENT,
    ),
    Mutant(
        "skip in a pull what came while an earlier message went back",
        "NackSender.return_early",
        skip("in_flight.has_early_returns = True"),
        _CLIENT,
    ),
    Mutant(
        "end a nack that waits when its message is no longer in flight",
        "AckSender.fence",
        skip("self.nack_sender.fenced(self.in_flight)"),
        ("tests/net/client/test_heartbeat.py",),
    ),
)
