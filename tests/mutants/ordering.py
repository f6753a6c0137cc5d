"""The safeguards of priorities and of order keys."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_MODEL: Final = ("tests/broker/test_group_model.py",)
_PRIORITIES: Final = ("tests/broker/groups/test_priorities.py",)
_RANKS: Final = ("tests/broker/delivery/test_select_ranks.py",)
_SLOTS: Final = ("tests/broker/groups/test_order_slots.py",)
_SCAN: Final = ("tests/broker/delivery/order/test_scan.py",)
_ORDER: Final = ("tests/broker/delivery/order/test_order.py",)
_SUBJECTS: Final = ("tests/broker/delivery/order/test_order_subjects.py",)
_WAITING: Final = ("tests/broker/delivery/order/test_order_waiting.py",)
_RETRIES: Final = ("tests/broker/groups/test_priorities_retries.py",)
_RETENTION: Final = ("tests/broker/delivery/order/test_order_retention.py",)
_BLOCKED: Final = ("tests/broker/delivery/order/test_blocked.py",)
_CLIENT: Final = ("tests/net/client/consumer/test_order_keys.py",)
_SYNC: Final = ("tests/net/client/sync/test_consumer.py",)

OF_ORDER: Final = (
    Mutant(
        "leave lower priorities their share",
        "PriorityShare.coming",
        instead("int(self._coming[rank] + _EPSILON)", "0"),
        _PRIORITIES + _MODEL,
    ),
    Mutant(
        "save nothing up for priorities that do not wait",
        "PriorityShare.none_wait",
        skip("self._coming[rank] = 0.0"),
        _PRIORITIES + _MODEL,
    ),
    Mutant(
        "put due retries in the order of their priorities",
        "Retries._put",
        always("not queue or self.rank(queue[-1].messages) <= rank"),
        _PRIORITIES + _MODEL,
    ),
    Mutant(
        "end at retries that are due",
        "PullSelector._choose",
        always("filters is not None"),
        _RANKS + _MODEL,
    ),
    Mutant(
        "look again at higher priorities before retries, where messages were passed",
        "PullSelector._choose",
        always("selection.count or selection.passed == passed"),
        ("tests/broker/delivery/order/test_order_ranks.py",),
    ),
    Mutant(
        "hand out retries and new messages of a priority in turn",
        "_candidates.of",
        never("is_due and offer.kind is _AGAIN"),
        _RANKS + _MODEL,
    ),
    Mutant(
        "hand out no more retries than their share",
        "PullServer._try",
        instead("selection.retries or (offer.ranks[0], offer.max_count)", "(offer.ranks[0], offer.max_count)"),
        _RANKS + _MODEL,
    ),
    Mutant(
        "hand out retries of one priority",
        "Redelivery.redeliver",
        never("retries.has_ranks"),
        _RANKS + _MODEL,
    ),
    Mutant(
        "give low ones their share of a pull once",
        "_candidates.lower",
        instead("selection.by_rank[LOW]", "0"),
        _RANKS + _MODEL,
    ),
    Mutant(
        "ask only for the priorities of retries that the consumer may have",
        "_due_for",
        always("eligibility.first(several) is not None"),
        _RANKS + _MODEL,
    ),
    Mutant(
        "begin with order keys in turn",
        "Subscription.begins_with_order_keys",
        never("self.turn // len(self.filters) % 2"),
        _RANKS,
    ),
    Mutant(
        "grant a consumer no slot for messages that were handed out",
        "scan:_take",
        instead("are_left.all()", "(chooser.may_take(some), are_left.all())[1]"),
        _WAITING + _SCAN,
    ),
    Mutant(
        "look a slot up from the start of the group on",
        "_SlotChooser.cursors_of",
        instead(
            "self._group.started_in_slots(self._store, numbers, self.cursors.of(numbers))", "self.cursors.of(numbers)"
        ),
        _SCAN,
    ),
    Mutant(
        "grant a consumer the slot whose message waits longest",
        "_SlotChooser._stretches",
        skip("lengths[own] = ORDER_SLOTS"),
        _SCAN,
    ),
    Mutant(
        "cut a stretch of slots so that it has the one that waits longest",
        "_SlotChooser._stretches",
        skip("starts[own] += skipped"),
        _SCAN,
    ),
    Mutant(
        "pass no rows again that were handed out",
        "OrderedScan._read_on",
        instead("chooser.have_messages(rows)", "True"),
        _SCAN,
    ),
    Mutant(
        "grant a pull of few messages the slots that wait longest",
        "_SlotChooser.begin",
        instead("most > self._room()", "True"),
        _SCAN,
    ),
    Mutant(
        "let lower priorities have the slots of which higher ones had nothing",
        "OrderedScan.take",
        always("not chooser.give_back()"),
        _SCAN,
    ),
    Mutant(
        "leave slots to others after a choice of few messages",
        "_SlotChooser.took",
        never("self._consumers > 1"),
        _SCAN,
    ),
    Mutant(
        "read again what is younger than rows that are read again",
        "OrderedScan._read_again",
        instead(
            'self._rows["stored_at_us"] >= self._first_stamp(firsts)',
            "self._numbers >= np.array(firsts)[self._partitions]",
        ),
        _ORDER,
    ),
    Mutant(
        "go back for forgotten slots in partitions that had none of their rows",
        "OrderedScan._has_room",
        instead("known is None", "row == self._next_rows[partition]"),
        _ORDER,
    ),
    Mutant(
        "decide once a pull which slots a consumer gets",
        "OrderedScan.take",
        always("chooser is None"),
        _SCAN,
    ),
    Mutant(
        "settle a message once that an ack names twice",
        "Ledger._apply_ack",
        instead("named", "list(zip(intervals[::2], intervals[1::2]))", at=2),
        _SLOTS + _MODEL,
    ),
    Mutant(
        "hold a slot for the second retry of a message",
        "OrderSlots.given_again",
        never("slot in self._doubled"),
        _SLOTS,
    ),
    Mutant(
        "delay only what is behind the failed message",
        "OrderSlots._delayed",
        instead(
            "back._replace(start=start, end=begin)", "back._replace(start=start, end=begin, delay_us=first[slot][1])"
        ),
        _SLOTS,
    ),
    Mutant(
        "delay a release that is behind the failed message",
        "OrderSlots._delayed",
        instead(
            "back._replace(start=begin, end=start, delay_us=retries[slot][1], reason=EARLIER_FAILED)",
            "back._replace(start=begin, end=start)",
        ),
        ("tests/broker/delivery/order/test_order.py",),
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
        _RETRIES + _MODEL,
    ),
    Mutant(
        "heed retries that the consumer may have only",
        "DeliveryTracker._offer",
        always("eligibility is None"),
        _RETRIES,
    ),
    Mutant(
        "serve others when a pull has too few of its slots",
        "Delivery._serve_waiting",
        instead("single and too_few is not None and not has_slots", "single and too_few is not None"),
        _WAITING,
    ),
    Mutant(
        "give a pull more slots than its part where it lacks messages",
        "OrderedScan.take",
        always("not taker.lacks"),
        _WAITING,
    ),
    Mutant(
        "wake others when a pull has buried what held a slot up",
        "PullServer._wake_freed",
        never("ledger is not None and ledger.order is not None and ledger.order.is_freed"),
        _WAITING,
    ),
    Mutant(
        "hand out no low messages while slots with messages are left",
        "_candidates.lower",
        always("not selection.left_slots"),
        ("tests/broker/delivery/order/test_order_modes.py",),
    ),
    Mutant(
        "give copies the places of their originals",
        "places:_columns",
        never("may_be_copies and store.subjects.has_private"),
        _RETENTION,
    ),
    Mutant(
        "give copies of copies the places of their originals",
        "CopyRead._origin",
        always("not is_private(run.subject)"),
        _RETENTION,
    ),
    Mutant(
        "keep the order of a key over subjects",
        "_SlotChooser.may_take",
        always("self.kind is None and self._follows_all"),
        _SUBJECTS,
    ),
    Mutant(
        "wake consumers of other subjects when a message is left out",
        "PullSelection._free_slots",
        never("self.passed > self.count and any(len(one.filters) < len(group.filters) for one in several)"),
        _SUBJECTS,
    ),
    Mutant(
        "leave with a consumer what it was given before a message that failed",
        "OrderSlots.with_followers",
        instead("max(start + before + 1 - place, sequence + 1, start)", "max(start + before + 1 - place, start)"),
        _SUBJECTS,
    ),
    Mutant(
        "begin in a subject that is followed later at its start",
        "OrderedScan._followed",
        never("any(row > lowest for row, lowest in zip(subject_filter.row_cursors, self._cursors, strict=True))"),
        _SUBJECTS,
    ),
    Mutant(
        "seal a batch in which a message would come before an earlier one of its order key",
        "Accumulator._seal_disorder",
        instead("batch.may_follow(run, key_of(header))", "True"),
        ("tests/net/client/producer/test_accumulator.py",),
    ),
    Mutant(
        "let a batch of order keys wait for those of its slots in other partitions",
        "Intake._orders",
        instead("np.where(lanes >= LANE_ORDERED, ~(lanes & SLOT_BITS), several).tolist()", "several.tolist()"),
        ("tests/broker/publish",),
    ),
    Mutant(
        "choose once what a pull that chooses again has chosen",
        "ChosenCursors.of",
        never("self._moves"),
        ("tests/broker/delivery/test_chosen_cursors.py",),
    ),
    Mutant(
        "forget what the choice before has noted",
        "CursorScratch.begin",
        skip("self._last += 1"),
        ("tests/broker/delivery/test_chosen_cursors.py",),
    ),
    Mutant(
        "hand out a slot to its owner alone",
        "OrderSlots.may_have",
        instead("(owners == 0) | (owners == consumer)", "owners == owners"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "hand out nothing behind a retry",
        "OrderSlots.may_have",
        skip("allowed &= ~self.are_retrying[slots]"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "hand out the first retry of a slot first",
        "OrderSlots.may_come_again",
        never("before is None or not before.covers(low, min(high, start))"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "hand out a retry to the owner of its slot",
        "OrderSlots.may_come_again",
        never("self.owners[slot] not in (0, consumer)"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "take back what follows a message that is to come again",
        "Ledger.hand_back",
        never("self.order is not None"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "know after a start which slots are held",
        "OrderSlots.renew",
        never("self.is_stale"),
        _ORDER + _MODEL,
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
        never("len(self._ends) >= self._most_ordered"),
        ("tests/net/client/consumer/test_in_flight.py",),
    ),
    Mutant(
        "remember the rows that were passed",
        "OrderedScan._read_on",
        never("len(left)"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "go back to the first row that was passed",
        "OrderedScan._set_cursors",
        never("len(left)"),
        _ORDER + _MODEL,
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
        instead("map(max, rows, self._lowest())", "rows"),
        _ORDER,
    ),
    Mutant(
        "leave slots to other consumers",
        "_SlotChooser.begin",
        instead("may_find and most > self._room()", "False"),
        _ORDER + _MODEL,
    ),
    Mutant(
        "serve others when a pull may have nothing of a slot",
        "Delivery._serve_waiting",
        never("has_none and has_slots"),
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
        "count no message as blocked that lies before the start of a group",
        "blocked:_blocked",
        instead("group.started_in_slots(store, numbers, group.cursors.of(numbers))", "group.cursors.of(numbers)"),
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
        "take back what follows a message that is dead by its nack",
        "order_slots:_stopping",
        skip("yield (start, end, None)"),
        ("tests/broker/delivery/order/test_order.py",),
    ),
    Mutant(
        "let the broker choose the delay of what follows a nack",
        "NackSender._release_behind",
        instead(
            "PendingDisposition(start, end, Disposition.RELEASE, delay_us)",
            "PendingDisposition(start, end, Disposition.RELEASE, back.delay_us)",
        ),
        _CLIENT,
    ),
    Mutant(
        "set aside about a second of work of a busy slot",
        "OrderTurns.begin",
        instead("len(turn.aside) >= fits", "False"),
        ("tests/net/client/consumer/test_order_turns.py",),
    ),
    Mutant(
        "release what was set aside when a run stops",
        "MessageFeed.take_rest",
        instead("self._turns.take()", "()"),
        ("tests/net/client/consumer/test_order_turns.py",),
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
        "InFlightWindow.take_back",
        skip("self.has_early_returns = True"),
        _CLIENT,
    ),
    Mutant(
        "remember what was taken back",
        "InFlightWindow.take_back",
        skip("_add_newest(self.taken_back, start, end)"),
        _CLIENT,
    ),
    Mutant(
        "remember what the broker gave up while a consumer was away",
        "InFlightWindow._drop_below",
        skip("_add_newest(self._given_up, start, end)"),
        ("tests/net/client/consumer/test_in_flight.py",),
    ),
    Mutant(
        "refuse the ack of a message that was taken back",
        "InFlightWindow.ack",
        never("gone.overlaps(start, end)"),
        _CLIENT,
    ),
    Mutant(
        "end a nack that waits when its message is no longer in flight",
        "AckSender.fence",
        skip("self.nack_sender.fenced(self.in_flight)"),
        ("tests/net/client/test_heartbeat.py",),
    ),
    Mutant(
        "reach nothing behind a release of another thread",
        "SyncMessage._call_from_thread",
        always("self._run.lane < LANE_ORDERED"),
        _SYNC,
    ),
    Mutant(
        "send acks before what takes back those behind it",
        "NackSender._deliver_some",
        skip("self._send_acks(subscribed)"),
        _CLIENT,
    ),
    Mutant(
        "refuse no ack of what the client itself passes over",
        "with_tags",
        instead(
            "run.in_flight.ack(run.delivery_sequence + start, run.delivery_sequence + stop, each=False)",
            "run.in_flight.ack(run.delivery_sequence + start, run.delivery_sequence + stop, each=True)",
        ),
        _CLIENT,
    ),
    Mutant(
        "know at once what a withdrawn pull has brought",
        "Puller._answered",
        skip("self._accept_unwaited()"),
        _CLIENT,
    ),
    Mutant(
        "know at once what a cancelled pull has brought",
        "Puller.pull",
        never("self._request.answer is not None"),
        _CLIENT,
    ),
    Mutant(
        "pull nothing while a nack is sent once more",
        "NackSender._deliver_some",
        skip("self.unsure.add(task)"),
        _CLIENT,
    ),
    Mutant(
        "pull nothing before what came too early is released",
        "NackSender.return_early",
        skip("self.unsure.add(waiter)"),
        _CLIENT,
    ),
)
