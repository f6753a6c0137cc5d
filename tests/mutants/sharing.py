"""The safeguards of who gets what comes back, of work that is done in parts, and of messages that fall due together."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_SHARING: Final = ("tests/broker/delivery/test_eligibility.py",)
_LEAVING: Final = ("tests/broker/groups/test_membership_leaving.py",)
_COLD: Final = ("tests/broker/test_cold_reads.py",)

OF_SHARING: Final = (
    Mutant(
        "ask again what is in memory",
        "PageCache._finds",
        instead("now_us < self._found_until_us", "self._found_until_us"),
        ("tests/storage/message_log/test_page_cache.py",),
    ),
    Mutant(
        "take no more for found than was in memory",
        "PageCache._finds",
        never("found_end < end"),
        (*_COLD, "tests/storage/message_log/test_page_cache.py"),
    ),
    Mutant(
        "hand out again to who follows it",
        "_share_of",
        instead("None if share.is_all else share", "None"),
        _SHARING,
    ),
    Mutant(
        "remember which retries a consumer may have",
        "eligibility:_remember",
        skip("share.known[messages] = ranges"),
        _SHARING,
    ),
    Mutant(
        "hand out no more retries than an answer has room and look-ups for",
        "Redelivery.redeliver",
        skip("taken = _first_of(taken, fits)"),
        _SHARING,
    ),
    Mutant(
        "pass over what nobody takes",
        "DeliveryTracker._waits_for",
        never("retries.pass_over(now_us)"),
        _SHARING,
    ),
    Mutant(
        "go by the subject that a message of another broker was sent to",
        "Eligibility._takes_subject",
        instead("origin_subject(self._store.subjects.name(number))", "self._store.subjects.name(number)"),
        _SHARING,
    ),
    Mutant(
        "have what another one took over expire in parts",
        "Ledger._expire_at_takeover",
        never("member.in_flight.end_of_first(LEAVING_RANGES[LeaveReason.EXPIRED]) < member.in_flight.next_sequence"),
        _LEAVING,
    ),
    Mutant(
        "go on with what another one took over",
        "DeliveryTracker.join",
        skip("self.members.leaves(ledger, before)"),
        _LEAVING,
    ),
    Mutant(
        "take back some of what is overdue in each turn",
        "AckDeadlines._nack_overdue",
        instead(
            "min(over[-1].first + over[-1].total, in_flight.end_of_first(most))", "over[-1].first + over[-1].total"
        ),
        ("tests/broker/delivery/test_ack_deadline.py",),
    ),
    Mutant(
        "hand out named dead letters again in parts",
        "_Work.next_some",
        instead("(self.named[start:self.done], self.done < len(self.named))", "(self.named[start:], False)"),
        ("tests/broker/error_log/test_dead_letters_redrive.py",),
    ),
    Mutant(
        "read beside the loop where a group is to go on",
        "CommandDispatch._do",
        never("parts.delivery.begin_read(missing, deferred)"),
        _COLD,
    ),
    Mutant(
        "answer with no more than the pull asked for where everybody waits for the read",
        "PullServer._serve_blocking",
        instead("min(offer.max_bytes, _WAITED_BYTES)", "_WAITED_BYTES"),
        _COLD,
    ),
    Mutant(
        "read beside the loop what is to be cancelled",
        "DelayReads.batch",
        never("self._is_looking_up"),
        ("tests/broker/delay/test_reads.py",),
    ),
    Mutant(
        "keep each message's time of creation",
        "join_singles",
        never("min(created) != max(created)"),
        ("tests/format/copies/test_due_joining.py",),
    ),
    Mutant(
        "schedule again what is joined and could not be stored",
        "DelayedMessages._deliver",
        skip("left.extendleft(reversed(due_batch.parts))"),
        ("tests/broker/delay/test_due_batches.py",),
    ),
    Mutant(
        "look at a few groups in one turn",
        "Membership.tick",
        instead("MOST_LOOKS", "1 << 30"),
        ("tests/broker/groups/test_membership.py",),
    ),
    Mutant(
        "read a few blocks of retries at once",
        "Schedule.pop",
        always("self._blocks_read < until"),
        ("tests/storage/error_log/test_timer_queue.py",),
    ),
)
