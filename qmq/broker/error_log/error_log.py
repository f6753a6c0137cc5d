"""The error log of a group: retries, by due time, with their attempts.

Retries that are due lie in two queues in memory, one of them for quarantined retries; the others lie in a schedule on
disk. Every decision here follows from the arguments, so that a start that replays the pull log ends in the same state.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from qmq.broker.journal.record_types import InFlightRange, MessageRange, whole
from qmq.format.layout import RETRY_DTYPE, RETRY_QUARANTINED
from qmq.intervals import Intervals
from qmq.net.protocol.types import cut_reason
from qmq.storage.store import RETRY_ITEMS, Schedule, ScheduleClaim, pack_items, unpack_items

#: An expired range becomes so many retries.
PIECES: Final = 10


class RetryItem(NamedTuple):
    """Messages to hand out again, with what is known of them."""

    number: int
    due_us: int
    messages: MessageRange
    attempt: int
    session_expiries: int
    quarantined: bool
    consumer: int
    delivery_sequence: int
    failed_at_us: int
    reason: str


class TakenRetry(NamedTuple):
    """The first ``total`` messages of a retry, for a pull."""

    retry: RetryItem
    total: int
    in_flight: InFlightRange


def taken_of(retry: RetryItem, total: int) -> TakenRetry:
    """Return the first *total* messages of a retry."""
    return TakenRetry(retry, total, InFlightRange(retry.messages.part(0, total), retry.attempt, retry.session_expiries))


class Failure(NamedTuple):
    """The reason why messages come back, the consumer that had them, and when they are due."""

    reason: str
    consumer: int
    delivery_sequence: int
    now_us: int
    due_us: int


def rest_of(messages: MessageRange, taken: list[MessageRange]) -> list[MessageRange]:
    """Return the parts of a range that are in none of *taken*."""
    left = [messages]
    for one in taken:
        left = [part for messages in left for part in without(messages, one)]
    return left


def without(messages: MessageRange, taken: MessageRange) -> list[MessageRange]:
    """Return the parts of a range that are not in *taken*."""
    if not messages.overlaps(taken):
        return [messages]
    start, end = max(taken.skip - messages.skip, 0), min(taken.skip + taken.total - messages.skip, messages.total)
    parts = (messages.part(0, start), messages.part(end, messages.total))
    return [part for part in parts if part.total]


def split(messages: MessageRange) -> list[MessageRange]:
    """Return *messages* in PIECES of nearly one size, or in fewer."""
    size = -(-messages.total // PIECES)
    return [messages.part(start, min(start + size, messages.total)) for start in range(0, messages.total, size)]


def packed(retries: list[RetryItem]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the retries as items of a schedule: RETRY_ITEMS[n]."""
    items = np.zeros(len(retries), RETRY_ITEMS)
    if not retries:
        return items
    number, due_us, messages, attempt, session_expiries, quarantined, consumer, sequence, failed_us, reason = zip(
        *retries, strict=True
    )
    columns = {
        "due_us": due_us, "number": number, "attempt": attempt, "session_expiries": session_expiries,
        "consumer": consumer, "delivery_sequence": sequence, "failed_at_us": failed_us,
        "reason": list(map(_encoded, reason)),
        **dict(zip(("log", "first", "run", "skip", "count", "end"), zip(*messages, strict=True), strict=True)),
    }  # fmt: skip
    for name, column in columns.items():
        items[name] = column
    items["flags"][np.array(quarantined, np.bool_)] = RETRY_QUARANTINED
    return items


@functools.lru_cache(1_024)  # retries with the same reason share it
def _encoded(reason: str) -> bytes:
    return cut_reason(reason).encode()


@functools.lru_cache(1_024)
def _decoded(reason: bytes) -> str:
    return reason.decode("utf-8", "replace")


def to_record(retry: RetryItem) -> bytes:
    """Return a retry, or a dead letter, for a record of the pull log."""
    return pack_items(packed([retry]), RETRY_DTYPE)


def from_record(data: bytes) -> RetryItem:
    """Return the retry of a record. Raises ValueError."""
    (retry,) = unpacked(unpack_items(data, RETRY_DTYPE))
    return retry


def unpacked(items: np.ndarray[Any, np.dtype[np.void]]) -> list[RetryItem]:
    """Return the retries that items of a schedule describe."""
    found = []
    for item in items.tolist():
        due_us, number, log, run, first, skip, count, end, *rest, why, _ = item
        attempt, session_expiries, flags, consumer, sequence, failed_us = rest
        messages = MessageRange(log, first, run, skip, count, end)
        quarantined, reason = bool(flags & RETRY_QUARANTINED), _decoded(why)
        found.append(
            RetryItem(
                number, due_us, messages, attempt, session_expiries, quarantined, consumer, sequence, failed_us, reason
            )
        )
    return found


#: The most retries in memory; further retries that are due stay in the schedule.
LOADED_ITEMS: Final = 256
#: The most retries in one answer.
MOST_TAKEN: Final = 1_024
#: Retries in memory that no consumer takes for this time, while more are due behind them, are put back.
PASSED_AFTER_US: Final = 1_000_000
#: They are due again after this time, or after 100 us for each item of the schedule, up to five minutes: putting back
#: takes little time, however many there are.
_PASSED_FOR_US: Final = 1_000_000
_PASSED_EACH_US: Final = 100
_PASSED_MOST_US: Final = 300_000_000

#: Returns for a range, from its first message on, (count, whether a consumer may have them); None: look no further now.
Split = Callable[[MessageRange], list[tuple[int, bool]] | None]


class RetryChanges(NamedTuple):
    """The changes to the retries of a group while a walk over all of them runs: the retries that were added, and the
    numbers of those that are not in the schedule, or not any more; and those that were put back into it.
    """

    added: list[RetryItem]
    left: set[int]
    cleared: int
    passed: list[RetryItem]


def _one_rank(messages: MessageRange) -> int:
    """Return the rank of messages in a group that heeds no priorities."""
    return 0


class Retries:
    """The retries of one group. Those that are due and in memory come by rank, and of one rank by due time."""

    def __init__(self, schedule: Schedule, rank: Callable[[MessageRange], int] = _one_rank) -> None:
        """*rank* returns the rank of a retry's messages: the lowest number comes first."""
        self._schedule = schedule
        self.rank = rank
        self._due: deque[RetryItem] = deque()
        self._quarantined: deque[RetryItem] = deque()
        self._next_number = 1
        #: By number: messages that were taken of retries not loaded yet. Older programs have put parts of one into the
        #: schedule as several items.
        self._taken: dict[int, list[MessageRange]] = {}
        #: Numbers of retries in the schedule that others replace.
        self._void = Intervals()
        #: The changes since each walk over all retries that is under way began.
        self._watches: list[RetryChanges] = []
        self._cleared = 0
        #: Messages of all retries, due or not, and those of them that have failed. The others came back untried, such
        #: as released ones, or are to come again from the first attempt on.
        self.count = self._failed = 0
        self._is_new = True  # retries in memory were taken or loaded since the last look
        self._stuck_us = 0  # when that became False
        #: The retries in memory changed since this was last set to False.
        self.changed = True

    def add(
        self, messages: MessageRange, attempt: int, session_expiries: int, quarantined: bool, failure: Failure
    ) -> int:
        """Add a retry of these messages; return its number."""
        return self.add_all([(messages, attempt, session_expiries)], quarantined, failure)

    def add_all(self, several: list[tuple[MessageRange, int, int]], quarantined: bool, failure: Failure) -> int:
        """Add a retry for each (messages, attempt, session_expiries), in order; return the number of the last."""
        return self.add_each([(*one, failure) for one in several], quarantined)

    def add_each(self, several: list[tuple[MessageRange, int, int, Failure]], quarantined: bool) -> int:
        """Add a retry for each (messages, attempt, session_expiries, failure); return the number of the last."""
        self.changed = True
        room, later = LOADED_ITEMS - len(self._due) - len(self._quarantined), list[RetryItem]()
        for number, (messages, attempt, session_expiries, failure) in enumerate(several, self._next_number):
            reason, consumer, delivery_sequence, now_us, due_us = failure
            retry = RetryItem(
                number, due_us, messages, attempt, session_expiries, quarantined, consumer, delivery_sequence, now_us,
                reason
            )  # fmt: skip
            self._change(messages.total, attempt)
            for watch in self._watches:
                watch.added.append(retry)
            if room > 0 and due_us <= now_us:
                self._enqueue(retry)
                room -= 1
            else:
                later.append(retry)
        self._next_number += len(several)
        if later:
            self._schedule.push(packed(later))
        return self._next_number - 1

    def _change(self, messages: int, attempt: int) -> None:
        """Count so many *messages* more, which are to be handed out for that attempt."""
        self.count += messages
        if attempt > 1:
            self._failed += messages

    def counted(self) -> int:
        """Return how many messages all retries have, counted one by one where all are in memory; else ``count``."""
        if len(self._schedule):
            return self.count
        return sum(retry.messages.total for queue in (self._due, self._quarantined) for retry in queue)

    def counted_in_files(self) -> int:
        """Return how many messages all retries have, counted one by one. Reads files."""
        total = sum(retry.messages.total for queue in (self._due, self._quarantined) for retry in queue)
        for items in self.scheduled():
            is_touched = np.isin(items["number"], list(self._taken))
            for start, end in self._void:
                is_touched |= (items["number"] >= start) & (items["number"] < end)
            total += int(items["count"][~is_touched].sum())
            parts = [part for retry in unpacked(items[is_touched]) for part in self.left_of(retry)]
            total += sum(part.messages.total for part in parts)
        return total

    @property
    def failed(self) -> int:
        """The messages that have failed, of ``count``."""
        return max(min(self._failed, self.count), 0)

    def _enqueue(self, retry: RetryItem) -> None:
        queue = self._quarantined if retry.quarantined else self._due
        taken = self._taken.pop(retry.number, None)
        if taken is not None and (others := [part for part in taken if not part.overlaps(retry.messages)]):
            self._taken[retry.number] = others  # they are of other parts of it, which are in the schedule
        for watch in self._watches:
            watch.left.add(retry.number)
        if retry.number in self._void:
            return
        if taken is None:
            self._put(queue, retry)
        else:
            for messages in rest_of(retry.messages, taken):
                self._put(queue, retry._replace(messages=messages))

    def _put(self, queue: deque[RetryItem], retry: RetryItem) -> None:
        """Put a retry behind those of its rank."""
        rank = self.rank(retry.messages)
        if not queue or self.rank(queue[-1].messages) <= rank:
            queue.append(retry)
        else:
            queue.insert(bisect_right(queue, rank, key=lambda one: self.rank(one.messages)), retry)

    @property
    def has_ranks(self) -> bool:
        """Whether the retries that are due and in memory are of several ranks."""
        return bool(self._due) and self.rank(self._due[0].messages) != self.rank(self._due[-1].messages)

    def due_by_rank(self) -> Iterator[tuple[int, Iterator[RetryItem]]]:
        """Yield the retries in memory that any consumer may have by rank, the highest first."""
        start = 0
        while start < len(self._due):
            rank = self.rank(self._due[start].messages)
            end = bisect_right(self._due, rank, start, key=lambda one: self.rank(one.messages))
            yield rank, itertools.islice(self._due, start, end)
            start = end

    def waiting(self) -> list[RetryItem]:
        """Return the retries that are due and in memory."""
        return [*self._due, *self._quarantined]

    def scheduled(self) -> Iterator[np.ndarray[Any, np.dtype[np.void]]]:
        """Return the retries in the schedule, in blocks: RETRY_ITEMS[n]; see ``left_of``. Reads files."""
        return self._schedule.all()

    def in_memory(self, most: int) -> np.ndarray[Any, np.dtype[np.void]]:
        """Return the retries that are due and in memory, and up to *most* others, about those that fall due first:
        RETRY_ITEMS[n]; see ``left_of``. Reads no file.
        """
        return np.concatenate((packed(self.waiting()), self._schedule.some_in_memory(most)))

    def first_of_logs(self, most: int) -> list[RetryItem]:
        """Return the first retry of each log (subject or partition), of the retries that are due and of up to *most*
        others in memory, for *most* logs at most. Reads no file.
        """
        items = self._schedule.some_in_memory(most)
        order = np.lexsort((items["skip"], items["run"], items["first"], items["log"]))
        logs = items["log"][order]
        heads = order[np.concatenate(([True], logs[1:] != logs[:-1]))] if len(order) else order
        found = dict[int, RetryItem]()
        for retry in (*self.waiting(), *(left for one in unpacked(items[heads]) for left in self.left_of(one))):
            log = retry.messages.log
            if log not in found or retry.messages < found[log].messages:
                found[log] = retry
        return list(found.values())[:most]

    def left_of(self, retry: RetryItem) -> list[RetryItem]:
        """Return the parts of a retry in the schedule that are still to be handed out."""
        if retry.number in self._void:
            return []
        left = rest_of(retry.messages, self._taken.get(retry.number, []))
        return [retry._replace(messages=messages) for messages in left]

    def has(self, retry: RetryItem, watch: RetryChanges) -> bool:
        """Return whether a retry is still as a walk found it, since *watch* began."""
        if watch.cleared != self._cleared:
            return False
        if any(one.number == retry.number and one.messages == retry.messages for one in self.waiting()):
            return True
        return retry.number not in watch.left and retry in self.left_of(retry)

    def look(self) -> RetryChanges:
        """Begin a walk over all retries; ``end_look`` must follow."""
        watch = RetryChanges([], {retry.number for retry in self.waiting()}, self._cleared, [])
        self._watches.append(watch)
        return watch

    def end_look(self, watch: RetryChanges) -> None:
        """End a walk. A second call does nothing."""
        self._watches = [one for one in self._watches if one is not watch]

    def replace(self, retry: RetryItem, parts: list[MessageRange], *, whole: bool) -> None:
        """Let *parts* replace a retry. With *whole* it lay in the schedule, and no part of it was taken."""
        number = retry.number
        self.take([(number, InFlightRange(retry.messages, retry.attempt, retry.session_expiries))])
        if whole and self._taken.get(number) == [retry.messages]:
            del self._taken[number]
            self._void.add(number, number + 1)
        failure = Failure(retry.reason, retry.consumer, retry.delivery_sequence, retry.failed_at_us, retry.due_us)
        self.add_all(
            [(messages, retry.attempt, retry.session_expiries) for messages in parts], retry.quarantined, failure
        )

    def load(self, now_us: int, most: int = 0) -> bool:
        """Load retries that are due by now, about *most* (0: LOADED_ITEMS), without too much reading; return whether
        any is in memory.
        """
        if not self._due and not self._quarantined:
            self._is_new = True
            if not self._schedule.is_due(now_us) and not self._void.size:
                return False
        while len(self._due) + len(self._quarantined) < (most or LOADED_ITEMS) and self._schedule.is_due(now_us):
            items = self._schedule.pop(now_us, LOADED_ITEMS)
            self.changed = True
            for retry in unpacked(items):
                self._enqueue(retry)
            if len(items) < LOADED_ITEMS:  # no more are due, or enough was read for now
                break
        if self._void and not len(self._schedule):
            self._void = Intervals()
        return bool(self._due or self._quarantined)

    @property
    def is_due(self) -> bool:
        """Whether a retry is in memory that any consumer may have."""
        return bool(self._due)

    @property
    def is_quarantined_due(self) -> bool:
        """Whether a quarantined retry is in memory."""
        return bool(self._quarantined)

    @property
    def is_blank(self) -> bool:
        """Whether there is no retry, and nothing is left in the schedule of retries that were taken or replaced."""
        return self.is_empty and not len(self._schedule) and not self._void.size

    @property
    def is_empty(self) -> bool:
        """Whether there is no retry, due or not."""
        return not self.count and not self._due and not self._quarantined

    def next_due_us(self) -> int | None:
        """Return when the next retry of the schedule is due."""
        return self._schedule.next_due_us()

    def choose(self, max_count: int, split: Split | None = None, *, quarantined: bool = False) -> list[TakenRetry]:
        """Choose up to *max_count* messages of MOST_TAKEN retries in memory, or of one *quarantined* retry; with
        *split* only messages that it allows. Nothing changes before ``take``. Raises what *split* raises.
        """
        most = 1 if quarantined else MOST_TAKEN
        taken = list[TakenRetry]()
        for retry in self._quarantined if quarantined else self._due:
            if not max_count or len(taken) >= most:
                break
            ranges = [(retry.messages.total, True)] if split is None else split(retry.messages)
            if ranges is None:
                break
            start = 0
            for count, is_meant in ranges:
                fits = min(count, max_count) if is_meant and len(taken) < most else 0
                if fits:
                    taken.append(taken_of(_cut_of(retry, start, start + fits), fits))
                start, max_count = start + count, max_count - fits
        return taken

    def pass_over(self, now_us: int) -> bool:
        """Put the retries in memory, which others may have, back into the schedule, and load those behind them.

        Return False, and do nothing, where no more are due there or the retries in memory were taken from of late.
        """
        if not self.is_more_due(now_us):
            return False
        if self._is_new:
            self._is_new, self._stuck_us = False, now_us
        if now_us - self._stuck_us < PASSED_AFTER_US:
            return False
        later_us = min(max(_PASSED_FOR_US, _PASSED_EACH_US * len(self._schedule)), _PASSED_MOST_US)
        passed = [retry._replace(due_us=now_us + later_us) for retry in (*self._due, *self._quarantined)]
        for watch in self._watches:  # it may have read the schedule to its end before
            watch.passed.extend(passed)
            watch.left.difference_update(retry.number for retry in passed)
        self._due.clear()
        self._quarantined.clear()
        self._schedule.push(packed(self._joined(passed)))
        self.load(now_us)
        self._is_new = False  # no pull took any of them
        return True

    def _joined(self, parts: list[RetryItem]) -> list[RetryItem]:
        """Return the parts of each retry as one item, and note as taken what is between them: so a number in the
        schedule stands for one item, and what replaces that replaces all of it.
        """
        by_number = dict[int, list[RetryItem]]()
        for part in parts:
            by_number.setdefault(part.number, []).append(part)
        items = list[RetryItem]()
        for number, several in by_number.items():
            item = several[0]
            if len(several) > 1:
                ranges = [part.messages for part in several]
                start, end = min(one.skip for one in ranges), max(one.skip + one.total for one in ranges)
                messages = ranges[0]._replace(skip=start, total=end - start)
                item = item._replace(messages=messages)
                self._taken.setdefault(number, []).extend(rest_of(messages, ranges))
            items.append(item)
        return items

    def is_more_due(self, now_us: int) -> bool:
        """Return whether retries of the schedule are due."""
        return self._schedule.is_due(now_us)

    @property
    def due(self) -> Iterable[RetryItem]:
        """The retries in memory that any consumer may have."""
        return self._due

    @property
    def due_quarantined(self) -> Iterable[RetryItem]:
        """The quarantined retries in memory."""
        return self._quarantined

    def take(self, several: Sequence[tuple[int, InFlightRange]]) -> None:
        """Take these messages, each of the retry with that number, for an attempt: they were chosen now, or a record
        says so. A retry may not be loaded yet.
        """
        self.changed = self._is_new = True
        wanted = dict[int, list[MessageRange]]()
        for number, (messages, attempt, _) in several:
            self._change(-messages.total, attempt)
            wanted.setdefault(number, []).append(messages)
        for queue in (self._due, self._quarantined):
            left, looked_at = list[RetryItem](), 0
            for retry in queue:
                if not wanted:
                    break
                looked_at += 1
                taken = [messages for messages in wanted.get(retry.number, ()) if retry.messages.overlaps(messages)]
                if not taken:
                    left.append(retry)
                    continue
                left += [retry._replace(messages=messages) for messages in rest_of(retry.messages, taken)]
                wanted[retry.number] = [messages for messages in wanted[retry.number] if messages not in taken]
                if not wanted[retry.number]:
                    del wanted[retry.number]
            for _ in range(looked_at):
                queue.popleft()
            queue.extendleft(reversed(left))
        for number, ranges in wanted.items():
            self._taken.setdefault(number, []).extend(ranges)

    @property
    def next_number(self) -> int:
        """The number of the next retry."""
        return self._next_number

    def skip_to(self, number: int) -> None:
        """Give the next retry that number at least: the records of those before it are lost."""
        self._next_number = max(self._next_number, number)

    def clear(self) -> None:
        """Remove all retries."""
        self.changed = True
        self._schedule.clear()
        self._due.clear()
        self._quarantined.clear()
        self._taken.clear()
        self._void = Intervals()
        self._cleared += 1
        self.count = self._failed = 0

    # --- checkpoint --------------------------------------------------------------------------------------------------

    def packed(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        claim = self._schedule.claim()
        return {
            "next_number": self._next_number,
            "count": self.count,
            "failed": self.failed,
            "due": pack_items(packed([*self._due, *self._quarantined]), RETRY_DTYPE),
            "taken": self._taken,
            "void": list(self._void),
            "next_run": claim.next_run,
            "runs": [tuple(run) for run in claim.runs],
            "kept": claim.kept,
        }

    def restore(self, fields: dict[str, Any]) -> None:
        """Take over a state from ``packed``. Raise ValueError, TypeError or KeyError."""
        self._next_number = whole(fields["next_number"])
        self.count = int(fields["count"])
        self._failed = int(fields.get("failed", self.count))
        self._taken = {number: [MessageRange(*one) for one in taken] for number, taken in fields["taken"].items()}
        for start, end in fields["void"]:
            self._void.add(start, end)
        for retry in unpacked(unpack_items(fields["due"], RETRY_DTYPE)):
            (self._quarantined if retry.quarantined else self._due).append(retry)
        self._schedule.restore(ScheduleClaim(fields["next_run"], fields["runs"], fields["kept"]))


def _cut_of(retry: RetryItem, start: int, end: int) -> RetryItem:
    return retry._replace(messages=retry.messages.part(start, end))
