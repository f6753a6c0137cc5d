"""The chosen messages of a pull as ranges that name them for good, and back to rows of the consumer log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import KIND_CODES, KINDS_BY_CODE, ORDINAL_BITS, Group, SubjectFilter
from qmq.broker.journal import record_types
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.batch import EntryRow, made
from qmq.format.lanes import kind_of, kinds_of
from qmq.format.layout import LANE_NORMAL, MAX_RUNS
from qmq.storage.store import NotInMemory, Store

PARTITIONS: Final = record_types.PARTITIONS
#: The bits of ``log`` above the partition are the number of a filter of the group: the range has only messages that it
#: takes. With 0 below the code of a kind of lanes, it has all messages, and the first is of such a lane.
_PREFIX_SHIFT: Final = 16
_PARTITION_BITS: Final = (1 << _PREFIX_SHIFT) - 1
_PREFIX_BITS: Final = (1 << ORDINAL_BITS) - 1
_KIND_SHIFT: Final = _PREFIX_SHIFT + ORDINAL_BITS
_FIRST_ROWS: Final = 8
_CHUNK_ROWS: Final = 8_192
#: Rows among which is looked first whether a prefix takes others: of consumers that share order keys it does.
_PROBED_ROWS: Final = 512
#: Prefixes of a consumer to look for in the chosen messages; further ones are not looked for.
_MOST_PREFIXES: Final = 8
#: Fewer ranges than this stay as they are; more are joined by the prefix that takes them, where possible.
_FEW_RANGES: Final = 4

#: What ``log_of_lane`` adds to a partition, by kind of lanes.
_LOGS_OF_KINDS: Final = np.full(max(KIND_CODES) + 1, PARTITIONS, np.int64)
_LOGS_OF_KINDS[list(KIND_CODES)] = [PARTITIONS + (code << _KIND_SHIFT) for code in KIND_CODES.values()]
#: Makes a range of its fields, in a third of the time of a call of the class.
_MAKE_RANGE: Final = partial(tuple.__new__, MessageRange)

Rows = npt.NDArray[np.void]


class RunPart(NamedTuple):
    """Messages [start, stop) of one run."""

    partition: int
    entry: EntryRow
    start: int
    stop: int


class WholeRuns(NamedTuple):
    """Whole runs, in row order."""

    partition: int
    rows: Rows


MessageParts = list[RunPart | WholeRuns]


def chosen_of(pieces: list[Rows], index: npt.NDArray[np.intp]) -> Rows:
    """Return rows of *pieces*, taken as one array, by their indexes. (By whole words: numpy is slower by fields.)"""
    words = [rows.view(np.uint64).reshape(len(rows), -1) for rows in pieces]
    together = words[0] if len(words) == 1 else np.concatenate(words)
    return together.take(index, axis=0).view(pieces[0].dtype).reshape(len(index))


def ranges_of(store: Store, parts: MessageParts, filters: Sequence[SubjectFilter]) -> list[MessageRange]:
    """Return ranges that name the parts, chosen from *filters*, in their order.

    They go by sequences where all filters are subjects with fixed numbers; else by positions, with one range for
    neighbouring messages that a prefix takes.
    """
    if _keep_numbers(store, filters):
        return _by_sequences(parts)
    if len(parts) == 1 and isinstance(parts[0], RunPart):
        return [_range_of(parts[0])]
    found = _of_runs(parts)
    if found:
        return found
    expected = (-1, -1, -1)  # log, position, run of what goes on from the last range
    for prefix, part in _joined(parts, store, filters[:_MOST_PREFIXES]):
        if isinstance(part, RunPart):
            more, entry = [_range_of(part)], part.entry
            behind = _behind(part.partition, entry) if part.stop == entry[4] else (-1, -1, -1)
        else:
            more = _in_log(store, part.partition, part.rows, prefix)
            behind = _behind(part.partition, part.rows[-1].item())
        head = more[0]
        if expected == head[:3] and not head.skip and found[-1].log == head.log:
            found[-1] = found[-1]._replace(total=found[-1].total + head.total, end=head.end)
            del more[0]
        found += more
        expected = behind
    return found


def _of_runs(parts: MessageParts) -> list[MessageRange]:
    """Return the ranges of parts by position, each of one run; none where one is of several."""
    found = list[MessageRange]()
    log = first = head = skip = total = last = 0
    expected = (-1, -1, -1)
    for part in parts:
        if type(part) is not RunPart:
            return []
        partition, entry, start, stop = part
        _, position, _, _, count, run, lane, runs, _, _, size = entry
        part_log = log_of_lane(partition, lane) if lane else PARTITIONS + partition
        if not start and expected == (part_log, position, run):
            total += stop - start
        else:
            if total:
                found.append(made(MessageRange, (log, first, head, skip, total, last)))
            log, first, head, skip, total = part_log, position, run, start, stop - start
        last = position
        if stop < count:
            expected = (-1, -1, -1)
        else:
            expected = (part_log, position, run + 1) if run + 1 < runs else (part_log, position + size, 0)
    found.append(made(MessageRange, (log, first, head, skip, total, last)))
    return found


def range_of_run(store: Store, partition: int, entry: EntryRow, subject_filter: SubjectFilter) -> MessageRange:
    """Return the range that ``ranges_of`` gives for one whole run that a single filter takes."""
    if subject_filter.exact and entry[3] < store.checkpoints.subjects_claimed:
        return made(MessageRange, (entry[3], entry[0], 0, 0, entry[4], 0))
    log = log_of_lane(partition, entry[6]) if entry[6] else PARTITIONS + partition
    return made(MessageRange, (log, entry[1], entry[5], 0, entry[4], entry[1]))


def log_of_lane(partition: int, lane: int) -> int:
    """Return ``MessageRange.log`` of messages that are named by position, all of them of one kind of lanes."""
    return int(_LOGS_OF_KINDS[kind_of(lane)]) + partition if lane else PARTITIONS + partition


def ranges_of_batch(store: Store, partition: int, position: int, messages: int) -> list[MessageRange]:
    """Return the ranges of all messages of a batch, by position; one where all are of one kind of lanes."""
    with suppress(NotInMemory, StorageError):
        log = store.partitions[partition].consumer_log
        rows = log.rows(log.row_at_position(position), MAX_RUNS if store.subjects.has_lanes else 0)
        rows = rows[rows["position"] == position]
        if len(rows):
            return list(_ranges(partition, rows, _subject_filter(rows)))
    return [MessageRange(PARTITIONS + partition, position, 0, 0, messages, position)]


def _range_of(part: RunPart) -> MessageRange:
    partition, entry, start, stop = part
    log = log_of_lane(partition, entry[6]) if entry[6] else PARTITIONS + partition
    return MessageRange(log, entry[1], entry[5], start, stop - start, entry[1])


def _keep_numbers(store: Store, filters: Sequence[SubjectFilter]) -> bool:
    """Return whether all filters are subjects whose numbers the checkpoint has: a start may renumber others."""
    for subject_filter in filters:
        if not subject_filter.exact:
            return False
        number = subject_filter.subject(store)
        if number is not None and number >= store.checkpoints.subjects_claimed:
            return False
    return True


def _joined(
    parts: MessageParts, store: Store, filters: Sequence[SubjectFilter]
) -> Iterator[tuple[SubjectFilter | None, RunPart | WholeRuns]]:
    """Yield the parts, with the rows of one partition and one prefix as one part, and that prefix."""
    is_named = store.subjects.has_lanes  # the prefix "" takes every row of a log without lanes, so it tells nothing
    prefixes = [one for one in filters if (one.prefix or is_named) and not one.exact]

    def kind(part: RunPart | WholeRuns) -> tuple[int, SubjectFilter | None]:
        if isinstance(part, RunPart):
            return -1, None
        subject = part.rows["subject"][0]
        return part.partition, next((one for one in prefixes if _takes(store, one, subject)), None)

    for (partition, prefix), group in groupby(parts, kind):
        together = list(group)
        if partition < 0 or len(together) == 1:
            yield from ((prefix, part) for part in together)
        else:
            rows = np.concatenate([part.rows for part in together if isinstance(part, WholeRuns)])
            yield prefix, WholeRuns(partition, rows)


def _takes(store: Store, prefix: SubjectFilter, subject: int) -> bool:
    matches = prefix.matches(store)
    return matches is None or bool(matches[subject])


def _behind(partition: int, entry: EntryRow) -> tuple[int, int, int]:
    """Where the run behind that one lies, if it is of the same kind of lanes."""
    position, run, runs, size = entry[1], entry[5], entry[7], entry[10]
    log = log_of_lane(partition, entry[6])
    return (log, position, run + 1) if run + 1 < runs else (log, position + size, 0)


def _by_sequences(parts: MessageParts) -> list[MessageRange]:
    found = list[MessageRange]()
    for part in parts:
        if isinstance(part, RunPart):
            entry = part.entry
            _append(found, MessageRange(entry[3], entry[0] + part.start, 0, 0, part.stop - part.start))
            continue
        for messages in _in_subjects(part.rows):
            _append(found, messages)
    return found


def _append(found: list[MessageRange], messages: MessageRange) -> None:
    """Put it behind the others: in one with the last where its sequences go on from that."""
    if found and found[-1].log == messages.log and found[-1].first + found[-1].total == messages.first:
        found[-1] = found[-1]._replace(total=found[-1].total + messages.total)
    else:
        found.append(messages)


def _in_log(store: Store, partition: int, rows: Rows, prefix: SubjectFilter | None) -> list[MessageRange]:
    """Return the ranges of rows: neighbours in the log are one range, also those between which the log has no row that
    *prefix* takes, within _CHUNK_ROWS.
    """
    subject_filter = _subject_filter(rows)
    if prefix is None or np.count_nonzero(~subject_filter) < _FEW_RANGES:
        return list(_ranges(partition, rows, subject_filter))
    found, done = list[MessageRange](), 0
    log = PARTITIONS + (prefix.ordinal << _PREFIX_SHIFT) + partition
    try:
        part = store.partitions[partition]
        row = part.consumer_log.row_at_position(int(rows["position"][0])) + int(rows["run"][0])
        if not _are_same(rows, _taken(store, prefix, part.consumer_log.rows(row, _PROBED_ROWS))):
            return list(_ranges(partition, rows, subject_filter))
        while done < len(rows) and len(around := part.consumer_log.rows(row, _CHUNK_ROWS)):
            row += len(around)
            taken = _taken(store, prefix, around)[: len(rows) - done]
            mine = rows[done : done + len(taken)]
            if not _are_same(mine, taken):
                break  # some messages that the prefix takes were handed out before
            if len(mine):
                total = int(mine["count"].sum(dtype=np.int64))
                first, run, end = int(mine["position"][0]), int(mine["run"][0]), int(mine["position"][-1])
                found.append(MessageRange(log, first, run, 0, total, end))
            done += len(mine)
    except (NotInMemory, StorageError):
        pass  # the rows are named one by one
    if done < len(rows):
        found += _ranges(partition, rows[done:], subject_filter[done:])
    return found


def _are_same(rows: Rows, others: Rows) -> bool:
    """Return whether rows are the same, as far as there are both."""
    count = min(len(rows), len(others))
    return all(bool((rows[name][:count] == others[name][:count]).all()) for name in ("position", "run"))


def _taken(store: Store, prefix: SubjectFilter, rows: Rows) -> Rows:
    """Return the rows of subjects that the prefix takes."""
    matches = prefix.matches(store)
    return rows if matches is None else chosen_of([rows], np.flatnonzero(matches[rows["subject"]]))


def _ranges(partition: int, rows: Rows, subject_filter: npt.NDArray[np.bool_]) -> Iterator[MessageRange]:
    heads = np.concatenate(([0], np.flatnonzero(~subject_filter) + 1))
    tails = np.append(heads[1:], len(rows))
    totals = np.cumsum(rows["count"], dtype=np.int64)[tails - 1]
    totals[1:] -= totals[:-1].copy()
    positions, runs, lanes = rows["position"], rows["run"], rows["lane"]
    first_lanes = lanes[heads]
    if first_lanes.any():
        logs = _LOGS_OF_KINDS[kinds_of(first_lanes)] + partition
    else:
        logs = np.full(len(heads), PARTITIONS + partition, np.int64)
    columns = (logs, positions[heads], runs[heads], np.zeros(len(heads), np.int64), totals, positions[tails - 1])
    return map(_MAKE_RANGE, zip(*(column.tolist() for column in columns), strict=True))


def _subject_filter(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return for each row but the first whether it follows the one before in the log: bool[n - 1]."""
    positions, runs = rows["position"], rows["run"].astype(np.int64)
    same: npt.NDArray[np.bool_] = (positions[1:] == positions[:-1]) & (runs[1:] == runs[:-1] + 1)
    last = runs[:-1] + 1 == rows["runs"][:-1]
    adjacent: npt.NDArray[np.bool_] = last & (runs[1:] == 0)
    adjacent &= positions[1:] == positions[:-1] + rows["batch_size"][:-1]
    same |= adjacent
    if (lanes := rows["lane"]).any():
        kinds = kinds_of(lanes)
        same &= kinds[1:] == kinds[:-1]
    return same


def _in_subjects(rows: Rows) -> Iterator[MessageRange]:
    firsts, numbers = rows["first_sequence"], rows["subject"]
    goes_on = (firsts[1:] == firsts[:-1] + rows["count"][:-1]) & (numbers[1:] == numbers[:-1])
    heads = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(rows)]
    totals = np.concatenate(([0], np.cumsum(rows["count"], dtype=np.int64)))[heads].tolist()
    starts = zip(numbers[heads[:-1]].tolist(), firsts[heads[:-1]].tolist(), pairwise(totals), strict=True)
    for number, first, (before, behind) in starts:
        yield MessageRange(number, first, 0, 0, behind - before)


# ---------------------------------------------------------------------------------------------------------------------
# Back


def partition_of(messages: MessageRange) -> int:
    """Return the partition of a range by position."""
    return messages.log & _PARTITION_BITS


def prefix_of(messages: MessageRange) -> int:
    """Return the number of the filter whose messages are meant, in its group; 0 for all messages."""
    ordinal = max(messages.log - PARTITIONS, 0) >> _PREFIX_SHIFT
    return ordinal if ordinal & _PREFIX_BITS else 0


def lane_kind_of(store: Store, messages: MessageRange) -> int:
    """Return the kind of lanes of a range's messages, one of KIND_CODES."""
    if messages.log < PARTITIONS:
        return kind_of(store.subjects.lane(messages.log))
    return KINDS_BY_CODE.get(messages.log - PARTITIONS >> _KIND_SHIFT, LANE_NORMAL)


def parts_of(store: Store, group: Group, messages: MessageRange) -> MessageParts:
    """Return the messages of a group's range that still exist. Raise NotInMemory if rows have to be read first, and
    StorageError.
    """
    if messages.log < PARTITIONS:
        return list(_by_sequence(store, messages))
    return list(_by_position(store, group, messages))


def _by_sequence(store: Store, messages: MessageRange) -> Iterator[RunPart | WholeRuns]:
    start = messages.first + messages.skip
    end, chunk = start + messages.total, _FIRST_ROWS
    while start < end and (found := store.subject_rows(messages.log, start, chunk)):
        for partition, rows in found:
            firsts = rows["first_sequence"].astype(np.int64)
            inside = int(np.searchsorted(firsts, end, "left"))
            if not inside:
                return
            yield from _between(partition, rows[:inside], start - int(firsts[0]), end - int(firsts[inside - 1]))
            start = int(firsts[inside - 1]) + int(rows["count"][inside - 1])
        chunk = min(chunk * 16, _CHUNK_ROWS)


def _by_position(store: Store, group: Group, messages: MessageRange) -> Iterator[RunPart | WholeRuns]:
    """Yield the parts of a range by position, counted from its beginning; where rows are missing, up to its end."""
    partition = partition_of(messages)
    number = prefix_of(messages)
    prefix = group.filter_of(number) if number else None
    if number and prefix is None:
        return
    part = store.partitions[partition]
    if part.message_log.segment_at(messages.first) is None:
        return  # the first message is gone, so the others cannot be counted
    row = part.consumer_log.row_at_position(messages.first)
    if messages.run and int(part.consumer_log.rows(row, 1)["position"][:1].sum()) == messages.first:
        row += messages.run
    skip, left, chunk = messages.skip, messages.total, _FIRST_ROWS
    while left and len(rows := part.consumer_log.rows(row, chunk)):
        row += len(rows)
        chunk = min(chunk * 16, _CHUNK_ROWS)
        rows = rows[: int(np.searchsorted(rows["position"], np.uint64(messages.end), "right"))]
        if not len(rows):
            return
        if prefix is not None and not len(rows := _taken(store, prefix, rows)):
            continue
        ends = np.cumsum(rows["count"].astype(np.int64))
        first = int(np.searchsorted(ends, skip, "right"))
        if first == len(rows):
            skip -= int(ends[-1])
            continue
        stop = min(int(ends[-1]), skip + left)
        last = int(np.searchsorted(ends, stop, "left"))
        before = int(ends[first - 1]) if first else 0
        before_last = int(ends[last - 1]) if last else 0
        yield from _between(partition, rows[first : last + 1], skip - before, stop - before_last)
        left -= stop - skip
        skip = 0


def _between(partition: int, rows: Rows, start: int, stop: int) -> Iterator[RunPart | WholeRuns]:
    """Yield the parts from message *start* of the first row to *stop* of the last."""
    start, whole = max(start, 0), int(rows["count"][-1])
    stop = min(stop, whole)
    if len(rows) == 1:
        yield RunPart(partition, rows[0].item(), start, stop)
        return
    if start:
        yield RunPart(partition, rows[0].item(), start, int(rows["count"][0]))
        rows = rows[1:]
    tail = len(rows) - (stop < whole)
    if tail:
        yield WholeRuns(partition, rows[:tail])
    if stop < whole:
        yield RunPart(partition, rows[-1].item(), 0, stop)
