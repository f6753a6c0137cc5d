"""Lists of subjects, page by page. The lanes of a subject make one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from qmq.broker.ports.effects import SubjectRow
from qmq.broker.ports.rights import Rights
from qmq.broker.ports.work import NUMBERS_A_UNIT, Work
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_ORDERED
from qmq.format.private import is_private
from qmq.names import check_prefix
from qmq.storage.store import Store

#: Rows of one list.
_MOST_ROWS: Final = 10_000
#: Subjects whose names are compared for one answer, since a prefix may take none of a million.
_MOST_LOOKED_AT: Final = 200_000
#: Subjects that are looked at in one piece.
_SUBJECTS: Final = 500
#: The work of a row whose subject has other lanes.
_LANES_WORK: Final = 20


class SubjectLists:
    """Lists the subjects of one store."""

    def __init__(self, store: Store, delayed: Mapping[str, int]) -> None:
        """*delayed* is the number of delayed messages by subject."""
        self._subjects = store.subjects
        self._delayed = delayed

    def page(
        self, prefix: str, after: int, limit: int, rights: Rights | None
    ) -> Work[tuple[list[SubjectRow], int | None]]:  # fmt: skip
        """Return the rows of subjects of *prefix* that *rights* allow to see, from number *after* on, and the number to
        go on from (None: there are no more). Raises InvalidName.
        """
        subjects, rows, most = self._subjects, list[SubjectRow](), max(1, min(limit, _MOST_ROWS))
        is_exact = check_prefix(prefix) != "" and not prefix.endswith(".")
        looked = 0
        while True:
            if is_exact:
                heads = [number for number in subjects.numbers_of(prefix)[:1] if number >= after]
            else:
                heads = subjects.heads(after, _SUBJECTS)
            chosen = [
                (head, name)
                for head, name in zip(heads, subjects.names_of(heads), strict=True)
                if name is not None
                and name.startswith(prefix)
                and not is_private(name)
                and (rights is None or rights.may_see(name))
            ]
            left = most - len(rows)
            yield from self._add_rows(chosen[:left], rows)
            if len(chosen) > left:
                return rows, chosen[left][0]
            if is_exact or len(heads) < _SUBJECTS:
                return rows, None
            after, looked = heads[-1] + 1, looked + len(heads)
            if looked >= _MOST_LOOKED_AT:
                return rows, after
            yield len(heads) // 4

    def _add_rows(self, chosen: list[tuple[int, str]], rows: list[SubjectRow]) -> Work[None]:
        subjects = self._subjects
        heads = [head for head, _ in chosen]
        firsts, ends = subjects.firsts[heads].tolist(), subjects.ends[heads].tolist()
        yield 2 * len(heads)
        for (head, name), first, end in zip(chosen, firsts, ends, strict=True):
            if subjects.other_lanes(name):
                row = self._row_of_lanes(name, head)
                yield _LANES_WORK + len(subjects.other_lanes(name)) // NUMBERS_A_UNIT
            else:
                messages = subjects.message_count(head, first, end)
                row = name, first, end, messages, self._delayed.get(name, 0), 0, 0, 0
            rows.append(row)

    def _row_of_lanes(self, name: str, head: int) -> SubjectRow:
        """Return the row of a subject with several lanes: the sequences of its normal lane (without one, of its first
        lane), and the messages of all its lanes, and of each kind of lanes.
        """
        subjects, lanes = self._subjects, self._subjects.other_lanes(name)
        normal = subjects.number(name)
        shown = head if normal is None else normal
        numbers = np.fromiter(lanes.values(), np.int64, len(lanes))
        of_slots = numbers[subjects.lanes[numbers] >= LANE_ORDERED]
        firsts, ends = subjects.firsts[of_slots].astype(np.int64), subjects.ends[of_slots].astype(np.int64)
        ordered = subjects.messages_of(of_slots, firsts, ends)
        plain, high, low = map(self._stored, (normal, lanes.get(LANE_HIGH), lanes.get(LANE_LOW)))
        sequences = int(subjects.firsts[shown]), int(subjects.ends[shown])
        total, delayed = plain + high + low + ordered, self._delayed.get(name, 0)
        return name, *sequences, total, delayed, high, low, ordered

    def _stored(self, number: int | None) -> int:
        """Return how many messages of a number are stored; 0 for None."""
        if number is None:
            return 0
        subjects = self._subjects
        return subjects.message_count(number, subjects.firsts.item(number), subjects.ends.item(number))
