"""Histories of consumers (consumption.py) on a broker that keeps messages for a moment only: what is dropped is
counted as skipped by each group that had not been given it, and everything else is handled or dead as ever.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Sent
from tests.fake_disk import Operation
from tests.sim.consumption import GROUPS, LIMITS, Consumption
from tests.sim.runs import run_one

#: Seeds from this one on drop only segments whose messages every group has taken.
ONLY_TAKEN = 100_000
#: The time between two looks for subjects without messages.
IDLE_US = 20_000
SMALL = {"segment_bytes": 2_600, "max_frame_bytes": 2_400, "reserve_bytes": 60_000}


class Retaining(Consumption):
    """One history."""

    options = SMALL

    def __init__(self, seed: int, *, has_lanes: bool | None = None) -> None:
        age_ms, size = (100, 1_000)[seed % 2], (0, 20_000)[seed // 2 % 2]
        if seed >= ONLY_TAKEN:
            self.limits = LIMITS._replace(retention_ms=age_ms)
        else:
            self.limits = LIMITS._replace(retention_max_ms=age_ms, retention_bytes=size)
        self.where: dict[int, tuple[int, int]] = {}
        #: What was gone when a group was made, or made again: it begins behind that.
        self.before: dict[str, set[int]] = {group: set() for group, _, _ in GROUPS}
        #: What was on its way out when the broker stopped: groups had been moved behind it, and it may be there still.
        self.leaving = set[int]()
        #: With the power may go that a message was handed out: by group.
        self.forgotten: dict[str, set[int]] = {group: set() for group, _, _ in GROUPS}
        self._forgotten_count = 0
        super().__init__(seed, has_lanes=has_lanes)
        self.order.may_be_skipped = self._may_be_skipped

    def step(self, is_late: bool = False) -> None:
        """As ever, with a checkpoint where retention wants one."""
        if self.driven.broker.wants_checkpoint() and self.chance.random() < 0.5:
            self.checkpoint()
        self._look_for_idle_subjects()
        absent = [group for group, _, _ in GROUPS if group not in self.driven.broker.groups]
        super().step(is_late)
        for group in absent:
            self.driven.store.may_wait(True)
            self.before[group] |= {message for message, place in self.where.items() if self._is_gone(*place)}
            self.driven.store.may_wait(False)
        for dropped in self.driven.broker.take_dropped():
            self.count["segments dropped"] += 1
            self.count["messages carried"] += dropped.carried
            self.count["groups moved"] += len(dropped.skipped)
            assert not dropped.lost

    def _look_for_idle_subjects(self) -> None:
        """Have the broker look often, not once in an hour, for subjects that have no messages."""
        idle, subjects = self.driven.broker._idle_subjects, self.driven.store.subjects
        idle.every_us = IDLE_US
        idle._look_us = min(idle._look_us, self.driven.now.monotonic_us + IDLE_US)
        self.count["subjects forgotten"] += subjects.forgotten_count > self._forgotten_count
        self._forgotten_count = subjects.forgotten_count

    def _may_be_skipped(self, group: str, message: int) -> bool:
        """Return whether a group may have missed a message that has gone."""
        self.driven.store.may_wait(True)
        is_gone = message in self.leaving or self._is_gone(*self.where[message])
        self.driven.store.may_wait(False)
        letter = self.tallies[group].letter(message)
        return is_gone and (not letter.deliveries or message in self.forgotten[group] or message in self.before[group])

    def _is_gone(self, partition: int, position: int) -> bool:
        store = self.driven.store
        if store.partitions[partition].message_log.segment_at(position) is None:
            return True
        return (
            store.partitions[partition].consumer_log.row_at_position(position) < store.partitions[partition].offered_row
        )

    def _stop(self, operation: Operation) -> None:
        dropping = self.driven.broker._retention._dropping
        self.count["crashed while a segment was leaving"] += dropping is not None
        self.count["crashed while messages were carried"] += (
            dropping is not None
            and dropping.carry_forward is not None
            and dropping.carry_forward._copy_read is not None
        )
        self.driven.read_outcomes.clear()
        self.driven.store.may_wait(True)
        self.leaving |= {message for message, place in self.where.items() if self._is_gone(*place)}
        self.driven.store.may_wait(False)
        before = self.count["power lost"]
        super()._stop(operation)
        if self.count["power lost"] > before:
            for group, tally in self.tallies.items():
                self.forgotten[group] |= {message for message, letter in tally.letters.items() if not letter.handled}

    def administer(self, action: str) -> None:
        """A group that begins anew drops what it holds, and may not find it again: that is its own doing."""
        super().administer("redrive")

    def _acknowledged(self, sent: Sent) -> None:
        batch = self._sends[sent.request]
        if self.driven.store.partitions[sent.partition].message_log.segment_at(sent.position) is None:
            # It is a repeat of what has gone by now, so nobody can tell its sequences any more.
            sent = sent._replace(first_sequences=-1_000_000 - batch.messages[0])
        for message in batch.messages:
            self.where[message] = sent.partition, sent.position
        super()._acknowledged(sent)

    def _rows(self, action: str, group: str, after: Any) -> dict[str, Any]:
        request = self.driven.request()
        self.do([Administer(1, request, action, {"group": group, "after": after})])
        return self._administered.pop(request)

    def dead(self, group: str) -> dict[int, str]:
        """By message; copies go by the ids that they have."""
        found: dict[int, str] = {}
        after: int | None = 0
        while after is not None:
            fields = self._rows("dead_letters", group, after)
            found |= {self.ids[row["id"]]: row["reason"] for row in fields["rows"]}
            after = fields["after"]
        return found

    def check(self) -> None:
        """What a group was never given was counted when it was dropped."""
        for group, prefixes, _ in GROUPS:
            tally, dead = self.tallies[group], self.dead(group)
            (row,) = self._rows("groups", group, "")["rows"]
            mine = [one for subject in self.sent if subject.startswith(prefixes) for one in self.sent[subject]]
            missed = [one for one in mine if one not in dead and not tally._is_done(one)]
            for message in self.before[group].intersection(missed):
                missed.remove(message)
                tally.letter(message).handled = True
            never = [one for one in missed if not tally.letter(one).deliveries or one in self.forgotten[group]]
            assert missed == never, f"group {group} has lost {set(missed) - set(never)}, which it was given"
            assert len(missed) <= row["skipped"], f"group {group} misses {missed}, and {row['skipped']} were skipped"
            self.count["skipped"] += row["skipped"]
            for message in missed:
                tally.letter(message).handled = True
        super().check()


def run(seed: int, commands: int = 600, *, has_lanes: bool | None = None) -> Counter[str]:
    """One history, and what happened in it."""
    return run_one(Retaining(seed, has_lanes=has_lanes), commands, f"retaining {seed}")
