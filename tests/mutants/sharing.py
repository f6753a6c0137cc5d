"""The safeguards of who gets what comes back, of work that is done in parts, and of messages that fall due together."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_SHARING: Final = ("tests/broker/test_sharing.py",)
_LEAVING: Final = ("tests/broker/test_leaving.py",)
_COLD: Final = ("tests/broker/test_cold_reads.py",)

OF_SHARING: Final = (
    Mutant(
        "ask again what is in memory",
        "qmq/storage/at_hand.py",
        "if now_us is not None and now_us < self._found_until_us and self._found <= start",
        "if now_us is not None and self._found_until_us and self._found <= start",
        ("tests/storage/test_at_hand.py",),
    ),
    Mutant(
        "take no more for found than was in memory",
        "qmq/storage/at_hand.py",
        "        if found_end < end:\n            return False\n",
        "",
        (*_COLD, "tests/storage/test_at_hand.py"),
    ),
    Mutant(
        "hand out again to who follows it",
        "qmq/broker/sharing.py",
        "    return None if share.is_all else share\n",
        "    return None\n",
        _SHARING,
    ),
    Mutant(
        "look in vain once only",
        "qmq/broker/handing.py",
        "        return share is None or share.has_any(ledger.retries.due)\n",
        "        return True\n",
        _SHARING,
    ),
    Mutant(
        "pass over what nobody takes",
        "qmq/broker/handing.py",
        "        if retries.pass_over(now_us):\n",
        "        if False:\n",
        _SHARING,
    ),
    Mutant(
        "go by the subject that a message of another broker was sent to",
        "qmq/broker/sharing.py",
        "name = origin_subject(self._store.subject_name(number))",
        "name = self._store.subject_name(number)",
        _SHARING,
    ),
    Mutant(
        "put back pieces of one retry whole",
        "qmq/broker/retries.py",
        "            if count < retry.messages.total:\n",
        "            if queue and queue[0].number == retry.number:\n",
        _SHARING,
    ),
    Mutant(
        "have what another one took over lapse in parts",
        "qmq/broker/ledger.py",
        "        if member.held.end_of_first(LEAVING_RANGES[Leaving.LAPSED]) < member.held.next_sequence:\n",
        "        if False:\n",
        _LEAVING,
    ),
    Mutant(
        "go on with what another one took over",
        "qmq/broker/handing.py",
        "            self.members.leaves(ledger, before)\n",
        "            pass\n",
        _LEAVING,
    ),
    Mutant(
        "take back some of what is overdue in each turn",
        "qmq/broker/overdue.py",
        "min(over[-1].first + over[-1].total, held.end_of_first(most))",
        "over[-1].first + over[-1].total",
        ("tests/broker/test_overdue.py",),
    ),
    Mutant(
        "hand out named dead letters again in parts",
        "qmq/broker/reviving.py",
        "        return self.named[start : self.done], self.done < len(self.named)\n",
        "        return self.named[start:], False\n",
        ("tests/broker/test_reviving.py",),
    ),
    Mutant(
        "read beside the loop where a group is to go on",
        "qmq/broker/handling.py",
        "                if parts.delivery.begin_read(missing, wanted):\n                    return\n",
        "                pass\n",
        _COLD,
    ),
    Mutant(
        "read beside the loop what is to be cancelled",
        "qmq/broker/delay_reading.py",
        "        if self._is_looking and (size := self._missing(position)) is not None:\n",
        "        if False and (size := self._missing(position)) is not None:\n",
        ("tests/broker/test_delay_reading.py",),
    ),
    Mutant(
        "keep each message's time of creation",
        "qmq/format/joining.py",
        "    if min(created) != max(created):\n",
        "    if False:\n",
        ("tests/format/test_joining.py",),
    ),
    Mutant(
        "schedule again what is joined and could not be stored",
        "qmq/broker/delaying.py",
        "            for part in (*joining.parts, *left):\n",
        "            for part in left:\n",
        ("tests/broker/test_due_batches.py",),
    ),
    Mutant(
        "look at a few groups in one turn",
        "qmq/broker/members.py",
        "        for _ in range(MOST_LOOKS):\n",
        "        for _ in range(1 << 30):\n",
        ("tests/broker/test_members.py",),
    ),
    Mutant(
        "read a few blocks of retries at once",
        "qmq/storage/schedule.py",
        "        while len(found) < limit and self._blocks_read < until:\n",
        "        while len(found) < limit:\n",
        ("tests/storage/test_schedule.py",),
    ),
)
