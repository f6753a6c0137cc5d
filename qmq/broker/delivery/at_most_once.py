"""At-most-once groups: a message is delivered once or never. No pull is recorded, only how far pulls may go.

Before the first message of a block is delivered, a record says that the group has come to the end of the block, and is
synced. A start after a crash goes on at that end: messages before it may have been delivered, so they are passed and
counted as skipped. For a prefix a block ends at a stamp, for an exact subject at a sequence.

Such groups get only messages that are on disk; the rest is delivered after a sync. A power loss may take a batch that
was not flushed. Its sender then sends it again as another message, and a group that had got the first one would get
both. Where a sync has failed, all messages are delivered: their senders have been told that the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from qmq.broker.groups.group import Group, SubjectFilter, is_exact
from qmq.broker.groups.message_ranges import MessageParts, Rows, RunPart, WholeRuns, chosen_of
from qmq.broker.journal.record_types import RecordKind
from qmq.errors import StorageError
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import Hole, NotInMemory, PullRecord, PullSync, Store

#: A block that contains all ready messages of a prefix goes on for this long behind them.
AHEAD_US: Final = 1_000_000
_CHUNK_ROWS: Final = 8_192
_MOST_DOUBLED: Final = 16
#: A block that ends before this, in 2005, ends at a sequence, not at a stamp.
_STAMPS_FROM_US: Final = 1 << 50

#: Chosen messages by the filter that they were chosen for; no filter without any.
ChosenByFilter = list[tuple[SubjectFilter, MessageParts]]
#: By filter: the stamp, or for an exact subject the sequence, at which a block ends.
BlockEnds = list[tuple[SubjectFilter, int]]


class Reserve:
    """New blocks on their way to disk; pulls wait for them as for a read."""

    partition = 0

    def __init__(self, sync: PullSync, ends: BlockEnds) -> None:
        self.key = object()
        self.sync = sync
        self.ends = ends

    def step(self) -> bool:
        """[thread] Sync. Raises SyncFailed."""
        self.sync.run()
        return False


class AtMostOnce:
    """The blocks of all at-most-once groups."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # --- deliveries --------------------------------------------------------------------------------------------------

    def covers(self, taken: ChosenByFilter) -> bool:
        """Return whether all *taken* messages lie in blocks that are on disk."""
        if any(_need(subject_filter, parts) > subject_filter.reserved for subject_filter, parts in taken):
            return False
        for subject_filter, _ in taken:
            subject_filter.reserves = 0
        return True

    def reserve(self, group: Group, ends: BlockEnds, visible: list[int]) -> Reserve:
        """Begin blocks up to *ends*, from where the cursors are.

        Raises StorageFull, StorageFailed or SyncFailed.
        """
        assert group.ledger is not None
        blocks = [[subject_filter.prefix, self._begin_of(subject_filter, visible), end] for subject_filter, end in ends]
        files = self._store.groups
        files.write()  # while nothing can be written, nothing is staged
        packed = msgpack.packb([group.ledger.number, group.skipped, blocks])
        for _ in range(2):  # where one of the two is rotten, the other counts
            files.stage(RecordKind.RESERVE, packed)
        files.write()
        reserve = Reserve(files.begin_sync(), ends)
        for subject_filter, end in ends:
            subject_filter.recorded = max(subject_filter.recorded, end)
            subject_filter.reserving = reserve
            subject_filter.reserves += 1
        group.dirty = True
        return reserve

    def reserved(self, reserve: Reserve, error: Exception | None) -> None:
        """End a reserve: its blocks are on disk, or with an *error* are not."""
        self._store.groups.end_sync(reserve.sync, error)
        for subject_filter, end in reserve.ends:
            if subject_filter.reserving is reserve:  # a seek since then has cleared it
                subject_filter.reserving = None
                if error is None:
                    subject_filter.reserved = end

    def block_ends(
        self, group: Group, taken: ChosenByFilter, row_cursors: Callable[[SubjectFilter], list[int]]
    ) -> BlockEnds:
        """Return where new blocks for *taken* messages are to end; *row_cursors* are those behind these."""
        assert group.ledger is not None
        size = group.ledger.settings.max_unacked
        return [
            (subject_filter, self._block_end(subject_filter, parts, row_cursors(subject_filter), size))
            for subject_filter, parts in taken
        ]

    def _block_end(self, subject_filter: SubjectFilter, parts: MessageParts, rows: list[int], block: int) -> int:
        """Return where a block of about *block* messages ends that contains all *parts*, which come before *rows*."""
        need = _need(subject_filter, parts)
        # Where a block was too small for the messages that came during its sync, the next one is twice as large.
        more = min(subject_filter.reserves, _MOST_DOUBLED)
        if subject_filter.exact:
            return need + (block << more)
        runs = sum(len(part.rows) if isinstance(part, WholeRuns) else 1 for part in parts)
        count = sum(
            int(part.rows["count"].sum()) if isinstance(part, WholeRuns) else part.stop - part.start for part in parts
        )
        ahead = max(1, block * runs // count)
        ends = []
        for partition, row in enumerate(rows):
            stored_part = self._store.partitions[partition]
            if row + ahead < stored_part.consumer_log.visible_row:
                try:
                    ends.append(stored_part.consumer_log.read_entry(row + ahead)[2])
                except (NotInMemory, StorageError):
                    return need
        return max(need, min(ends) if ends else self._store.last_stored_at_us + (AHEAD_US << more))

    def _begin_of(self, subject_filter: SubjectFilter, visible: list[int]) -> int | list[int]:
        """Return the position by partition, or the sequence, before which the group has got all messages."""
        if not subject_filter.exact:
            return subject_filter.positions_now(self._store, visible)
        number = subject_filter.subject(self._store)
        assert number is not None
        return subject_filter.group.cursor(self._store, subject_filter, number) or 0

    def stop(self, groups: Iterable[Group]) -> None:
        """Clear the blocks at a stop: nothing more is delivered, so the next start goes on at the cursors."""
        for group in groups:
            if group.mode == AT_MOST_ONCE:
                for subject_filter in group.all_filters():
                    subject_filter.clear_blocks()
                group.dirty = True

    # --- after a start -----------------------------------------------------------------------------------------------

    def replay(self, group: Group, skipped: int, blocks: list[Any]) -> None:
        """Apply a record of new blocks at the start."""
        group.skipped = skipped
        for prefix, begin, end in blocks:
            subject_filter = group.filters.get(prefix) or group.ended.get(prefix)
            if subject_filter is None:  # the record that the group follows it is lost
                continue
            if isinstance(begin, list):
                for partition, position in enumerate(begin):
                    self._pass_rows(
                        subject_filter,
                        partition,
                        self._store.partitions[partition].consumer_log.row_at_position(position),
                    )
            else:
                self._pass_sequences(subject_filter, begin)
            # Lower where the record of a seek is lost.
            subject_filter.reserved = subject_filter.recorded = max(subject_filter.recorded, end)

    def resume(self, groups: Iterable[Group], *, lost: bool) -> None:
        """Move the groups behind their blocks after all records; with *lost* records, behind everything."""
        for group in groups:
            if group.mode != AT_MOST_ONCE:
                continue
            for subject_filter in group.all_filters():
                end = 1 << 62 if lost else subject_filter.reserved
                subject_filter.clear_blocks()
                subject_filter.find_lanes(self._store)
                if is_exact(subject_filter.prefix) and (subject_filter.exact or end < _STAMPS_FROM_US):
                    # Also a block of a subject that has had one lane when the block was written.
                    group.skipped += self._pass_sequences(subject_filter, end)
                    continue
                ends = [part.consumer_log.row_at_time(end + 1) if end else 0 for part in self._store.partitions]
                # Count all rows before any is passed: a subject may lie in several partitions.
                group.skipped += sum(self._count(subject_filter, partition, row) for partition, row in enumerate(ends))
                for partition, row in enumerate(ends):
                    self._pass_rows(subject_filter, partition, row)
            group.dirty = True

    def _pass_rows(self, subject_filter: SubjectFilter, partition: int, end: int) -> None:
        """Move a group behind the rows before row *end*."""
        for row, rows in self._rows_before(subject_filter, partition, end):
            if len(rows):
                subject_filter.group.cursors.raise_to(rows["subject"], rows["first_sequence"] + rows["count"])
            subject_filter.row_cursors[partition] = row

    def _count(self, subject_filter: SubjectFilter, partition: int, end: int) -> int:
        """Return how many messages in the rows before row *end* have not been delivered."""
        counted = 0
        for _, rows in self._rows_before(subject_filter, partition, end):
            ends = rows["first_sequence"] + rows["count"]
            starts = np.maximum(rows["first_sequence"], subject_filter.group.floor(subject_filter, rows["subject"]))
            counted += int((np.maximum(ends, starts) - starts).sum())
        return counted

    def _rows_before(self, subject_filter: SubjectFilter, partition: int, end: int) -> Iterator[tuple[int, Rows]]:
        """Yield the rows before row *end* that the filter takes, from its cursor on, each with the row behind them."""
        row, matches = subject_filter.row_cursors[partition], subject_filter.matches(self._store)
        while row < end and len(
            rows := self._store.partitions[partition].consumer_log.rows(row, min(end - row, _CHUNK_ROWS))
        ):
            row += len(rows)
            yield row, rows if matches is None else chosen_of([rows], np.flatnonzero(matches[rows["subject"]]))

    def _pass_sequences(self, subject_filter: SubjectFilter, end: int) -> int:
        store, group = self._store, subject_filter.group
        number = subject_filter.subject(store)
        if number is None:
            return 0
        cursor, end = group.cursor(store, subject_filter, number) or 0, min(end, int(store.subjects.ends[number]))
        if cursor >= end:
            return 0
        group.cursors.set(number, end)
        return store.subjects.message_count(number, cursor, end)


def may_lack_reserves(holes: Sequence[Hole], torn: int, records: Sequence[PullRecord]) -> bool:
    """Return whether bad bytes of the pull log may hide a block of which no record is left.

    They hide none where each hole, and the *torn* bytes behind the last record, have the size of one copy of a block's
    record whose other copy is intact.
    """
    single = _without_twin(records)
    starts = {record.position: record.size for record in single}
    ends = {record.end: record.size for record in single}
    end = records[-1].end if records else 0
    explained = [hole.end - hole.start in (starts.get(hole.end), ends.get(hole.start)) for hole in holes]
    return not all(explained) or torn > ends.get(end, 0)


def _without_twin(records: Sequence[PullRecord]) -> list[PullRecord]:
    """Return the records of blocks that are not there twice."""
    single, number = list[PullRecord](), 0
    while number < len(records):
        record = records[number]
        number += 1
        if record.kind != RecordKind.RESERVE:
            continue
        if number < len(records) and records[number].payload == record.payload:
            number += 1
        else:
            single.append(record)
    return single


def _need(subject_filter: SubjectFilter, parts: MessageParts) -> int:
    """Return where a block that contains all *parts* has to end."""
    if subject_filter.exact:
        last = parts[-1]
        if isinstance(last, WholeRuns):
            return int(last.rows["first_sequence"][-1]) + int(last.rows["count"][-1])
        return last.entry[0] + last.stop
    return max(int(part.rows["stored_at_us"].max()) if isinstance(part, WholeRuns) else part.entry[2] for part in parts)


class OnDiskWaits:
    """Says which messages are on disk, and which filters wait for more of them."""

    def __init__(self, upto: Callable[[int], int], want: Callable[[int], None]) -> None:
        """*upto* returns the position before which a partition's batches are on disk; *want* has the rest synced."""
        self._upto = upto
        self._want = want
        self._waiting: dict[int, SubjectFilter] = {}

    def count(self, parts: MessageParts, total: int) -> int:
        """Return how many of the *total* messages in *parts* come before the first that is not on disk."""
        if all(_last_position(part) < self._upto(part.partition) for part in parts):
            return total
        count = 0
        for part in parts:
            upto = self._upto(part.partition)
            if _last_position(part) < upto:
                count += int(part.rows["count"].sum()) if isinstance(part, WholeRuns) else part.stop - part.start
                continue
            if isinstance(part, WholeRuns):
                count += int(part.rows["count"][: int(np.searchsorted(part.rows["position"], np.uint64(upto)))].sum())
            break
        return count

    def want(self, taken: ChosenByFilter) -> None:
        """Have the *taken* messages synced; their filters wait for that."""
        for partition in sorted({part.partition for _, parts in taken for part in parts}):
            self._want(partition)
        self._waiting.update((id(subject_filter), subject_filter) for subject_filter, _ in taken)

    def synced(self) -> Iterable[SubjectFilter]:
        """Return the filters that waited: more messages are on disk, or a sync has failed."""
        waiting, self._waiting = self._waiting, {}
        return waiting.values()


def _last_position(part: WholeRuns | RunPart) -> int:
    return int(part.rows["position"][-1]) if isinstance(part, WholeRuns) else part.entry[1]
