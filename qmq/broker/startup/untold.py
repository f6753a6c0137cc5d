"""What the pull log cannot tell any more, after a start that found bad records in it.

A group's cursors and scans move on by each record of a pull. Where records between are lost, what they told of is what
the group has passed since, less what the records tell of that are there: it is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.encode import Rows
from qmq.broker.groups.group import Following, Group
from qmq.broker.groups.in_flight import MessageRange
from qmq.broker.groups.message_ranges import prefix_of, stretches_of
from qmq.format.private import private_subject
from qmq.intervals import Intervals
from qmq.storage.store import Store

_CHUNK_ROWS: Final = 8_192


class _Before:
    """Where a group was before the first record of it that may be lost, and what it was given since, as far as told."""

    def __init__(self, group: Group) -> None:
        self.cursors: npt.NDArray[np.uint64] = group.cursors.upto(0).copy()
        self.scans = {prefix: list(following.scan) for prefix, following in group.followings.items()}
        self.told: dict[int, Intervals] = {}

    def cursor(self, subject: int) -> int:
        return int(self.cursors[subject]) if subject < len(self.cursors) else 0


class Untold:
    """Of all groups, while a start reads the pull log. May wait for rows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before: dict[Group, _Before] = {}
        #: Something is lost.
        self.active = False

    def begin(self, groups: Iterable[Group]) -> None:
        """Records of these groups may be lost from here on."""
        self.active = True
        for group in groups:
            if group not in self._before:
                self._before[group] = _Before(group)

    def follows(self, group: Group, following: Following) -> None:
        """It begins to follow a prefix."""
        if group in self._before:
            self._before[group].scans[following.prefix] = list(following.scan)

    def told(self, group: Group, ranges: list[MessageRange]) -> None:
        """These are known to have been given to it: it has come so far, though the record of that may be lost."""
        before = self._before.get(group)
        for subject, start, end in stretches_of(self._store, group, ranges) if before is not None else ():
            assert before is not None
            if self._is_own(group, subject):
                continue
            before.told.setdefault(subject, Intervals()).add(start, end)
            cursors = group.cursors.upto(subject + 1)
            cursors[subject] = max(int(cursors[subject]), end)
            group.dirty = True

    def settle(self, group: Group) -> None:
        """What is lost of it has been told of since, or does not matter any more."""
        self._before.pop(group, None)

    def groups(self) -> list[Group]:
        """Those that may lack something."""
        return list(self._before)

    def takes(self, group: Group, ranges: list[MessageRange]) -> bool:
        """Whether the group follows what these are of; if not, the record that it does is lost."""
        if not self.active:
            return True
        if any(prefix_of(messages) and group.following(prefix_of(messages)) is None for messages in ranges):
            return False
        return all(
            self._following(group, subject) is not None or self._is_own(group, subject)
            for subject, _, _ in stretches_of(self._store, group, ranges)
        )

    def missing(self, group: Group) -> list[MessageRange]:
        """What nobody can tell of, by subject and sequence."""
        before, found = self._before[group], list[MessageRange]()
        for subject, (lowest, end) in sorted(self._passed(group, before).items()):
            following = self._following(group, subject)
            start = before.cursor(subject)
            if not start and following is not None:
                first = group.beginning(self._store, following, subject)
                start = lowest if first is None else first
            told = before.told.get(subject, Intervals())
            passed = [MessageRange(subject, start, 0, 0, end - start)] if start < end else []
            for _, low, high in stretches_of(self._store, group, passed):
                for gap_low, gap_high in told.missing(max(low, start), min(high, end)):
                    _append(found, subject, gap_low, gap_high)
        return found

    def _passed(self, group: Group, before: _Before) -> dict[int, tuple[int, int]]:
        """By subject: the first sequence that a scan has passed, and where the group is now."""
        now = group.cursors.upto(0)
        passed = {number: (0, int(now[number])) for number in np.flatnonzero(now).tolist()}
        for prefix, following in group.followings.items():
            scan = before.scans.get(prefix)
            for rows in self._scanned(following, scan) if scan is not None and not following.exact else ():
                for subject in np.unique(rows["subject"]).tolist():
                    mine = rows[rows["subject"] == subject]
                    start = int(mine["first_sequence"].min())
                    end = int((mine["first_sequence"] + mine["count"]).max())
                    low, high = passed.get(subject, (start, end))
                    passed[subject] = min(low, start), max(high, end)
        return passed

    def _scanned(self, following: Following, scan: list[int]) -> Iterator[Rows]:
        """The rows that a prefix has passed, those that it takes."""
        matches = following.matches(self._store)
        for partition, row in enumerate(scan):
            stop = following.scan[partition]
            while row < stop and len(rows := self._store.rows(partition, row, min(_CHUNK_ROWS, stop - row))):
                row += len(rows)
                yield rows if matches is None else rows[matches[rows["subject"]]]

    def _is_own(self, group: Group, subject: int) -> bool:
        """It is of that group alone: what is lost of it unnamed.py finds again."""
        name = self._store.subject_name(subject)
        return group.name is not None and name.startswith(private_subject(group.name, ""))

    def _following(self, group: Group, subject: int) -> Following | None:
        name = self._store.subject_name(subject)
        for following in group.all_followings():
            if name == following.prefix if following.exact else name.startswith(following.prefix):
                return following
        return None


def _append(found: list[MessageRange], subject: int, start: int, end: int) -> None:
    if found and found[-1].log == subject and found[-1].first + found[-1].total == start:
        found[-1] = found[-1]._replace(total=found[-1].total + end - start)
    else:
        found.append(MessageRange(subject, start, 0, 0, end - start))
