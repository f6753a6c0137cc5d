"""The statistics of a broker: counts since its start and the present state of subjects and groups, at little cost.

Whoever looks often asks again and again, so the row of a group is made anew only when something of it has changed.
Subjects are summed by the first part of their names, so that an answer stays small whatever clients send.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.delay.items import by_prefix
from qmq.broker.delivery.order.blocked import counts
from qmq.broker.groups.counts import COUNT_NAMES, GroupCounts
from qmq.broker.groups.group import Group, SubjectFilter, is_exact
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.lag import oldest_us
from qmq.broker.groups.lag import ready as count_ready
from qmq.broker.groups.member import Member
from qmq.broker.groups.message_ranges import RunPart, parts_of
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import Now
from qmq.broker.ports.work import NUMBERS_A_UNIT, PIECE, Work, whole
from qmq.errors import BadBatch, StorageError
from qmq.format.private import is_private
from qmq.storage.store import FORGOTTEN, NotInMemory, Store

#: Groups of one answer, and the work for them (but one group in any case).
MOST_GROUPS: Final = 1_000
MOST_WORK: Final = 100_000
#: So many rows that have changed are made anew in a second, about a hundredth of the broker's time; where more change
#: all the time, each is as old as that needs.
MOST_MADE_A_SECOND: Final = 200
#: A group is busy for so long after its row has changed.
_BUSY_US: Final = 10_000_000
#: The work of a row that is made anew, and of 50 that are not.
_ROW_WORK: Final = 150
_KEYS: Final = 50
_KEYS_WORK: Final = 250
#: New subjects whose families are found at once.
_NEW: Final = 2_000
#: Makes sums of where subjects begin and end differ when one goes up and another down as much.
_FIRSTS: Final = 3
#: Lanes of a subject that are summed one by one.
_FEW_LANES: Final = 8
#: First parts of names that are told apart; the subjects of further ones are summed under OTHERS.
MOST_FAMILIES: Final = 100
OTHERS: Final = "(others)"
#: Retries in memory that are looked at for the oldest message in retry, besides those that are due.
MOST_RETRIES: Final = 256
#: Logs (subjects or partitions) in which the oldest message in retry is looked up.
_MOST_LOGS: Final = 16
#: The columns of a group's row. ``at_us``: when it was true; ``oldest_unacked_us``: when the oldest message that is
#: ready, in flight or in retry was stored.
GROUP_COLUMNS: Final = (
    "group", "at_us", "mode", "follows", "consumers", "ready", "ready_exact", "oldest_unacked_us", "in_flight",
    "in_flight_since_us", "held_since_us", "held_us", "last_pull_us", "in_retry", "returned", "in_retry_oldest_us",
    "retry_due_us", "crashes", "crashed_messages", "failed_lately", "acked_lately", "dead", "delayed", "skipped",
    "filtered", "blocked", "blocked_slots", "blocked_retrying", *COUNT_NAMES,
)  # fmt: skip
_AT: Final = GROUP_COLUMNS.index("at_us")
_EXACT: Final = GROUP_COLUMNS.index("ready_exact")

Fields = dict[str, Any]


class _KnownRow(NamedTuple):
    """The row of a group, as long as its key is the same."""

    key: tuple[Any, ...]
    row: list[Any]
    made_us: int  # monotonic


class SubjectFamilies:
    """Sums over the subjects whose names begin with the same part, up to the first dot."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names = [OTHERS]
        self._number_of: dict[str, int] = {OTHERS: 0}
        self._subjects: Counter[int] = Counter()  # by family; the lanes of one are one
        self._family: npt.NDArray[np.int16] = np.empty(0, np.int16)  # by subject number; -1: it is private to a group
        self._known = 0
        self._began: npt.NDArray[np.int64] = np.empty(0, np.int64)  # by subject number: its end at the start
        whole(self.caught_up(store.subjects.ends))

    def rows(self) -> Work[list[tuple[str, int, int, int]]]:
        """Return (name, subjects, messages stored, messages received since the start) for each family."""
        yield from self.caught_up()
        subjects, count = self._store.subjects, self._known
        families = len(self._names) + 1  # the last one is that of private subjects
        held, received = np.zeros(families, np.int64), np.zeros(families, np.int64)
        gaps = subjects.gaps
        if len(gaps):
            firsts = subjects.firsts[gaps.subjects].astype(np.int64)
            missing = np.maximum(gaps.ends.astype(np.int64) - np.maximum(gaps.starts.astype(np.int64), firsts), 0)
            inside = gaps.subjects < count
            np.subtract.at(held, self._family[gaps.subjects[inside]], missing[inside])
            yield 1 + len(gaps) // NUMBERS_A_UNIT
        for start in range(0, count, PIECE):
            piece = slice(start, min(start + PIECE, count))
            ends, family = subjects.ends[piece].astype(np.int64), self._family[piece]
            np.add.at(held, family, ends - subjects.firsts[piece].astype(np.int64))
            np.add.at(received, family, ends - self._began[piece])
            yield 1 + len(family) // NUMBERS_A_UNIT
        numbers = [self._subjects[family] for family in range(len(self._names))]
        return list(zip(self._names, numbers, held.tolist(), received.tolist(), strict=False))

    def caught_up(self, began: npt.NDArray[np.uint64] | None = None) -> Work[None]:
        """Find the families of new subjects. They begin at *began*, by number, or where all new ones do."""
        subjects = self._store.subjects
        while (start := self._known) < subjects.count:
            end = min(start + _NEW, subjects.count)
            if len(self._family) < end:
                room = max(end, 2 * len(self._family))
                self._family, self._began = _longer(self._family, room), _longer(self._began, room)
            families = [self._family_of(name) for name in subjects.names_between(start, end)]
            self._family[start:end] = families
            self._began[start:end] = subjects.new_begin if began is None else began[start:end]
            for head in subjects.heads(start, end - start):
                if head < end and families[head - start] >= 0:
                    self._subjects[families[head - start]] += 1
            self._known = end
            yield end - start

    def forget(self, numbers: Sequence[int]) -> None:
        """Take over that numbers are about to be forgotten, whose ends will be 0: what was received stays.

        New subjects may begin elsewhere then, so all are looked at before: see ``caught_up``.
        """
        whole(self.caught_up())
        known = np.array(numbers, np.int64)
        self._began[known] -= self._store.subjects.ends[known].astype(np.int64)

    def recount(self, heads: Iterable[int], change: int) -> None:
        """Count subjects again whose first lanes have these numbers: *change* is 1, or -1 for those that leave."""
        for head in heads:
            if (family := int(self._family[head])) >= 0:
                self._subjects[family] += change

    def _family_of(self, name: str | None) -> int:
        if name is None or name == FORGOTTEN:
            return 0
        if is_private(name):
            return -1
        first = name.partition(".")[0]
        family = self._number_of.get(first)
        if family is None:
            if len(self._names) > MOST_FAMILIES:
                return 0
            family = self._number_of[first] = len(self._names)
            self._names.append(first)
        return family


def _longer(column: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    grown = np.zeros(room, column.dtype)
    grown[: len(column)] = column
    return grown


class GroupStatistics:
    """The rows of groups."""

    def __init__(self, store: Store, order: NameOrder, times: TimeStarts, delayed: Mapping[str, int]) -> None:
        """*delayed* is the number of delayed messages by subject."""
        self._store = store
        self._order = order
        self._times = times
        self._delayed = delayed
        self._known: dict[int, _KnownRow] = {}  # by the number of the ledger
        self._oldest: dict[tuple[int, int], tuple[int, int]] = {}  # by ledger and consumer: ack floor, stored at
        self._retried: dict[int, dict[MessageRange, int]] = {}  # by ledger: first messages in retry, stored at
        self._names: list[str] = []  # of all groups, sorted
        self._changed: dict[int, int] = {}  # by ledger: when its row was last found to have changed
        self._busy = 0  # groups whose rows have changed of late

    def page(
        self, groups: Mapping[str, Group], after: str, most: int, now: Now
    ) -> Work[tuple[list[list[Any]], str | None]]:  # fmt: skip
        """Return the rows of the groups behind the name *after*, in the order of names, and the name to go on from
        (None: there are no more).

        A row that has changed is made anew, but where very many change all the time only from time to time.
        """
        if not after:
            since_us = now.monotonic_us - _BUSY_US
            self._changed = {number: us for number, us in self._changed.items() if us >= since_us}
            self._busy = len(self._changed)
        made_by_us = now.monotonic_us - self._busy * 1_000_000 // MOST_MADE_A_SECOND
        if len(self._names) != len(groups) or not after:
            self._names = sorted(groups)
        names, at = self._names, bisect_right(self._names, after)
        yield from self._order.caught_up()
        delayed, sums = (yield from by_prefix(self._delayed)), _PrefixSums(self._store, self._order)
        rows, work = list[list[Any]](), 0
        for name in names[at : at + most]:
            group = groups.get(name)
            at += 1
            if group is None or group.ledger is None:
                continue
            taken = self._known_row(group, group.ledger, delayed, sums, made_by_us, now)
            while True:
                try:
                    piece = next(taken)
                except StopIteration as done:
                    rows.append(done.value)
                    break
                work += piece
                yield piece
            if len(rows) % _KEYS == 0:
                yield _KEYS_WORK
            if work > MOST_WORK:
                break
        return rows, names[at - 1] if at < len(names) else None

    def _known_row(
        self, group: Group, ledger: Ledger, delayed: Mapping[str, int], sums: _PrefixSums, made_by_us: int, now: Now
    ) -> Work[list[Any]]:
        """Return the row of a group, made anew where that is due."""
        key = yield from self._key(group, ledger, delayed, sums, now)
        known = self._known.get(ledger.number)
        if known is not None and known.key == key:
            known.row[_AT] = now.wall_us  # it is still true
        else:
            if known is not None:
                self._changed[ledger.number] = now.monotonic_us
            if known is None or known.made_us <= made_by_us or self._busy <= MOST_MADE_A_SECOND:
                row = yield from self._row(group, ledger, delayed, now)
                known = _KnownRow(key if row[_EXACT] else (), row, now.monotonic_us)
                self._known[ledger.number] = known
        return known.row

    def forget_all_but(self, ledgers: Iterable[int]) -> None:
        """Forget what is remembered of other groups than these."""
        kept = set(ledgers)
        if len(self._known) > len(kept):
            self._known = {number: known for number, known in self._known.items() if number in kept}
            self._oldest = {key: known for key, known in self._oldest.items() if key[0] in kept}
            self._retried = {number: known for number, known in self._retried.items() if number in kept}

    def _key(
        self, group: Group, ledger: Ledger, delayed: Mapping[str, int], sums: _PrefixSums, now: Now
    ) -> Work[tuple[Any, ...]]:
        """Return what a row follows from: while it is the same, so is the row."""
        counts, sums_of = ledger.counts, list[int]()
        for subject_filter in list(group.filters.values()):
            sums_of.append((yield from sums.of(subject_filter)))
        return (
            _setbacks(ledger, now) if ledger.setbacks else None, group.readers, ledger.retries.is_quarantined_due,
            ledger.version, counts.delivered, counts.acked, group.skipped, ledger.filtered, group.cursors,
            len(self._store.subjects.gaps), len(group.filters), len(group.ended), ledger.retries.count,
            len(ledger.dead),
            *sums_of,
            *[delayed[prefix] for prefix in group.filters if prefix in delayed],
        )  # fmt: skip

    def _row(self, group: Group, ledger: Ledger, delayed: Mapping[str, int], now: Now) -> Work[list[Any]]:
        """Return the row of a group.

        ``held_since_us`` is since when a consumer has had messages and handled none of them, the longest such time;
        ``held_us`` how long consumers took for a message lately, that of the slowest. ``returned`` of the messages in
        retry came back without a failed attempt. ``crashes`` sessions ended lately with the same messages in flight,
        some of which still wait.
        """
        store = self._store
        ready, exact = yield from count_ready(store, group, self._order, self._times)
        oldest = (yield from oldest_us(store, group)) if ready else None
        yield _ROW_WORK
        in_flight, since_us, held_since_us, held_us, last_pull_us = 0, None, None, None, None
        for member in ledger.members.values():
            if member.is_there and member.in_flight.held_us:
                held_us = max(held_us or 0, member.in_flight.held_us)
            if member.pulled_us:
                last_pull_us = max(last_pull_us or 0, member.pulled_us)
            if count := member.in_flight.count:
                in_flight += count
                taken_us, stored_us = member.in_flight.pulls[0].taken_us, self._oldest_of(group, ledger, member)
                since_us = taken_us if since_us is None else min(since_us, taken_us)
                handled_us = max(taken_us, member.handled_us)
                held_since_us = handled_us if held_since_us is None else min(held_since_us, handled_us)
                oldest = stored_us if oldest is None else min(oldest, stored_us)
        retried_us, failed_us = self._oldest_retries(group, ledger)
        if retried_us is not None:
            oldest = retried_us if oldest is None else min(oldest, retried_us)
        follows, blocked, retries = group.outermost(), counts(store, group), ledger.retries
        return [
            group.name, now.wall_us, group.mode, follows, group.consumers_there(), ready, exact, oldest, in_flight,
            since_us, held_since_us, held_us, last_pull_us, retries.count, retries.count - retries.failed, failed_us,
            None if retries.is_due or retries.is_quarantined_due else retries.next_due_us(),
            *_setbacks(ledger, now), len(ledger.dead), sum(delayed.get(prefix, 0) for prefix in follows),
            group.skipped, ledger.filtered, blocked.messages, blocked.slots, blocked.retrying, *ledger.counts.row(),
        ]  # fmt: skip

    def _oldest_retries(self, group: Group, ledger: Ledger) -> tuple[int | None, int | None]:
        """Return about when the oldest message in retry was stored, and the oldest that has failed: of very many
        retries only some are looked at.

        Where it would need a read, it is when it came back. None without any.
        """
        if not ledger.retries.count:
            self._retried.pop(ledger.number, None)
            return None, None
        known, found = self._retried.get(ledger.number, {}), dict[MessageRange, int]()
        times, failed = list[int](), list[int]()
        retries = sorted(ledger.retries.first_of_logs(MOST_RETRIES), key=lambda retry: retry.failed_at_us)
        for retry in retries[:_MOST_LOGS]:
            first = retry.messages.part(0, 1)
            stored_us = known.get(first)
            if stored_us is None:
                stored_us = self._stored_at(group, first)
            if stored_us is not None:
                found[first] = stored_us
            times.append(retry.failed_at_us if stored_us is None else stored_us)
            if retry.attempt > 1:
                failed.append(times[-1])
        self._retried[ledger.number] = found
        return min(times, default=None), min(failed or times, default=None) if ledger.retries.failed else None

    def _oldest_of(self, group: Group, ledger: Ledger, member: Member) -> int:
        """Return when the oldest message in flight at a consumer was stored; where that would need a read, when it was
        handed out.
        """
        key, floor = (ledger.number, member.number), member.in_flight.ack_floor
        known = self._oldest.get(key)
        if known is not None and known[0] == floor:
            return known[1]
        stored_us = self._stored_us(group, member)
        self._oldest[key] = floor, stored_us
        return stored_us

    def _stored_us(self, group: Group, member: Member) -> int:
        in_flight = member.in_flight
        first = next(iter(in_flight.unhandled()), None)
        if first is not None:
            start = first[0]
            for one in in_flight.between(start, start + 1):
                stored_us = self._stored_at(group, one.messages)
                if stored_us is not None:
                    return stored_us
        return in_flight.pulls[0].taken_us

    def _stored_at(self, group: Group, messages: MessageRange) -> int | None:
        """Return when the first of these messages was stored; None where that would need a read."""
        with suppress(NotInMemory, StorageError, BadBatch):
            for part in parts_of(self._store, group, messages):
                return part.entry[2] if isinstance(part, RunPart) else int(part.rows["stored_at_us"][0])
        return None


def _setbacks(ledger: Ledger, now: Now) -> tuple[int, int, int, int]:
    """Return the columns from ``crashes`` to ``acked_lately``."""
    setbacks, retries = ledger.setbacks, ledger.retries
    waits = retries.is_quarantined_due or any(member.quarantined for member in ledger.members.values())
    crashes = setbacks.crashes(now.wall_us) if waits else (0, 0)
    return *crashes, *setbacks.attempts(ledger.counts.acked, now.wall_us)


class _PrefixSums:
    """How far all subjects of a prefix have come, for one answer: it changes when one gets or loses messages."""

    def __init__(self, store: Store, order: NameOrder) -> None:
        self._store = store
        self._order = order
        self._sums: dict[str, int] = {}

    def of(self, subject_filter: SubjectFilter) -> Work[int]:
        """Return the sum of a filter's subjects."""
        prefix, subjects = subject_filter.prefix, self._store.subjects
        if prefix in self._sums:
            return self._sums[prefix]
        total = 0
        if is_exact(prefix):
            numbers = subjects.numbers_of(prefix)
            if len(numbers) <= _FEW_LANES:
                return sum(subjects.ends.item(number) + _FIRSTS * subjects.firsts.item(number) for number in numbers)
            pieces: Iterable[npt.NDArray[np.int64]] = (np.array(numbers, np.int64),)
        else:
            pieces = self._order.pieces(prefix)
        for piece in pieces:
            total += int(subjects.ends[piece].sum()) + _FIRSTS * int(subjects.firsts[piece].sum())
            yield 1 + len(piece) // NUMBERS_A_UNIT
        self._sums[prefix] = total
        return total


class BrokerStatistics:
    """Answers the action stats, but for what only the daemon knows."""

    def __init__(
        self, store: Store, groups: Mapping[str, Group], ended: GroupCounts, order: NameOrder, times: TimeStarts,
        delayed: Mapping[str, int], state: Callable[[], Fields],
    ) -> None:  # fmt: skip
        """*groups* are by name, *ended* has the counts of those that were deleted. *delayed* is the number of delayed
        messages by subject; *state* returns further fields of the whole broker.
        """
        self._store = store
        self._groups = groups
        self._state = state
        self._delayed = delayed
        #: The sums over subjects.
        self.families = SubjectFamilies(store)
        self._rows = GroupStatistics(store, order, times, delayed)
        self._ended = ended
        self._begin = [part.message_log.end for part in store.partitions]

    def answer(self, after: str, limit: int, now: Now) -> Work[Fields]:
        """Return the rows of the groups behind the name *after*; for the first ones, with all of the whole broker."""
        most = max(1, min(limit, MOST_GROUPS))
        rows, last = yield from self._rows.page(self._groups, after, most, now)
        fields: Fields = {"columns": GROUP_COLUMNS, "groups": rows, "after": last, "now_us": now.wall_us}
        if after:
            return fields
        ledgers = [group.ledger for group in self._groups.values() if group.ledger is not None]
        self._rows.forget_all_but(ledger.number for ledger in ledgers)
        yield 1 + len(ledgers) // 8
        families, store = (yield from self.families.rows()), self._store
        return {
            **fields,
            **self._state(),
            "subject_count": store.subjects.name_count,
            "group_count": len(self._groups),
            "families": families,
            "ended": self._ended.row(),
            "delayed": sum(self._delayed.values()),
            "received_bytes": sum(
                part.message_log.end - begin for part, begin in zip(store.partitions, self._begin, strict=True)
            ),
            "log_bytes": sum(part.log_bytes() for part in store.partitions),
            "segments": sum(len(part.message_log.spans()) for part in store.partitions),
        }
