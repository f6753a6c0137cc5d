"""Check that a group's cursors have passed as many messages as its totals say, since its cursors were packed last.

Pulls, retention and starts move cursors; records change the totals (totals.py). This reads the cursors themselves. It
knows them as of the last checkpoint, and runs before retention drops a segment, so all messages between are there.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.broker.groups.cursors import Cursors
from qmq.broker.groups.group import Group, SubjectFilter
from qmq.errors import StorageError
from qmq.names import takes
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import NotInMemory, Store

#: Starts at a time that are looked up for one group, at about 50 us each.
MOST_LOOKED_UP: Final = 64
#: Names of subjects that are compared with prefixes for one group.
_MOST_NAMES: Final = 4_096

Numbers = npt.NDArray[np.int64]


class Unaccounted(NamedTuple):
    """Messages of a group that two accounts of them do not agree on. ``counted`` is what the totals say; ``found`` is
    what the cursors have passed, or what is in flight, in retry and dead.
    """

    group: str
    kind: str
    counted: int
    found: int

    def __str__(self) -> str:
        return _TEXTS[self.kind].format(**self._asdict())


#: The cursors have passed other messages than those that were counted.
PASSED: Final = "passed"
#: Other messages are in flight, in retry and dead than must be.
HELD: Final = "held"
_TEXTS: Final = {
    PASSED: "the cursors of group {group} have passed {found:,} messages since the last checkpoint, and records count "
    "{counted:,} of them",
    HELD: "group {group} has {found:,} messages in flight, in retry and dead, and by its records it must have "
    "{counted:,}",
}


def wrongly_passed(store: Store, group: Group) -> Unaccounted | None:
    """Return by how much the messages that the cursors passed differ from those that were counted; None where they
    agree, or where it cannot be known without a read.
    """
    ledger = group.ledger
    if ledger is None or group.mode == AT_MOST_ONCE or not group.is_comparable or _has_missed(store, group):
        return None
    counted = ledger.totals.passed - ledger.totals.passed_before
    try:
        passed = _passed(store, group, counted)
    except (NotInMemory, StorageError):
        return None
    return None if passed in (None, counted) else Unaccounted(str(group.name), PASSED, counted, passed or 0)


def _has_missed(store: Store, group: Group) -> bool:
    """Return whether messages that the group has missed are still there."""
    return any(
        span.base < position
        for partition, position in group.missed_before.items()
        for span in store.partitions[partition].message_log.sealed[:1]
    )


def wrongly_held(group: Group) -> Unaccounted | None:
    """Return by how much the messages that a group has in flight, in retry and dead differ from those that it must
    have; None where they agree.
    """
    ledger = group.ledger
    if ledger is None or (found := ledger.held()) == ledger.totals.held:
        return None
    return Unaccounted(str(group.name), HELD, ledger.totals.held, found)


def _passed(store: Store, group: Group, counted: int) -> int | None:
    """Return how many messages the cursors have passed; None where that is not known."""
    numbers, cursors = group.cursors.items()
    if (
        len(numbers) == group.packed_cursors
        and not len(store.subjects.gaps)
        and int(cursors.sum()) - group.packed_sum == counted
    ):
        return counted  # as most often: nothing has to be looked up
    known = Cursors()
    if group.packed_cursors:
        packed: dict[str, Any] = msgpack.unpackb(group.packed_bytes, strict_map_key=False)
        known.put(*(np.frombuffer(*one) for one in zip(packed["cursors"], ("<u4", "<u8"), strict=True)))
    end, before = cursors.astype(np.int64), known.of(numbers).astype(np.int64)
    changed = end != before
    numbers, end, before = numbers[changed], end[changed], before[changed]
    start = before.copy()
    if len(new := np.flatnonzero(start == 0)):
        beginnings = _beginnings(store, group, numbers[new])
        if beginnings is None:
            return None
        start[new] = beginnings
    start = np.maximum(start, store.subjects.firsts[numbers].astype(np.int64))
    # A cursor never goes back but by a seek; if it does, it passes messages twice.
    return store.subjects.messages_of(numbers, start, end) - store.subjects.messages_of(numbers, end, before)


def _beginnings(store: Store, group: Group, numbers: Numbers) -> Numbers | None:
    """Return where the group has begun in these subjects, of which it had nothing before; None where that is not known,
    or depends on the filter. Raises NotInMemory and StorageError.
    """
    filters = list(group.all_filters())
    if (
        len(store.partitions) > 1
        and store.leaving is not None
        and any(one.begun_behind is store.leaving for one in filters)
    ):
        return None  # other partitions may have earlier messages, which it gets
    if len(store.partitions) > 1 and any(one.start.kind == "time" for one in filters):
        return None  # so may one that was not synced then
    if len(filters) == 1 and filters[0].begun_behind is None and filters[0].start.kind != "time":
        rule = filters[0].start
        return np.where(numbers < rule.subjects, rule.value, 0)  # the value of "first" is 0
    if len(numbers) * len(filters) > _MOST_NAMES:
        return None
    lookups, found = 0, list[int]()
    for number in numbers.tolist():
        name, begins = store.subjects.name(number), set[int]()
        for subject_filter in filters:
            if takes((subject_filter.prefix,), name):
                lookups += subject_filter.start.kind == "time" and number < subject_filter.start.subjects
                begins.add(_beginning(store, group, subject_filter, number))
        if len(begins) != 1 or lookups > MOST_LOOKED_UP:
            return None
        found += begins
    return np.array(found, np.int64)


def _beginning(store: Store, group: Group, subject_filter: SubjectFilter, number: int) -> int:
    begin = group.beginning(store, subject_filter, number) or 0
    if subject_filter.begun_behind is not None and subject_filter.begun_behind is store.leaving:
        begin = max(begin, store.offered_sequence(number))
    return max(begin, int(store.subjects.firsts[number]))
