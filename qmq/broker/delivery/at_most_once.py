"""Groups in which a message is handed out once, or never: nothing is noted of a pull, but how far pulls may go.

Before the first message of a block is handed out, a record says that the group has come to the block's end, and is
synced. A start after a crash goes on there: what lies before may have been handed out, is passed, and counted as
skipped. Of a prefix a block ends at a stamp, of an exact subject at a sequence.

What may be handed to groups that get a message once: what a loss of power cannot take away any more.

A batch that was not flushed may be gone then, and its sender tries it again: as another message, which a group that had
been given the first one would get as well. So such groups are given what is on disk, and the rest after a sync. Where a
sync has failed all is handed out: the senders were told that nobody knows, and send anew or not, as they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from qmq.broker.groups.group import Group, SubjectFilter
from qmq.broker.groups.message_ranges import Many, Parts, Rows, Some, chosen_of
from qmq.broker.journal.record_types import RecordKind
from qmq.errors import StorageError
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import Hole, NotAtHand, PullRecord, PullSync, Store

#: A block that takes in all that is there goes on for so long behind it.
AHEAD_US: Final = 1_000_000
_CHUNK_ROWS: Final = 8_192
_MOST_DOUBLED: Final = 16


#: Chosen messages by the filter that they were chosen for; no filter without any.
Taken = list[tuple[SubjectFilter, Parts]]
#: By filter: the stamp, or for an exact subject the sequence, at which a block ends.
BlockEnds = list[tuple[SubjectFilter, int]]


class Reserve:
    """Blocks on their way to disk; read as what pulls wait for."""

    partition = 0

    def __init__(self, sync: PullSync, ends: BlockEnds) -> None:
        self.key = object()
        self.sync = sync
        self.ends = ends

    def step(self) -> bool:
        """[thread] Sync. Raises SyncFailed."""
        self.sync.run()
        return False


class MostOnce:
    """Of all such groups."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # --- while messages are handed out -------------------------------------------------------------------------------

    def covers(self, taken: Taken) -> bool:
        """Return whether all *taken* messages lie in blocks that are on disk."""
        if any(_need(subject_filter, parts) > subject_filter.reserved for subject_filter, parts in taken):
            return False
        for subject_filter, _ in taken:
            subject_filter.reserves = 0
        return True

    def reserve(self, group: Group, ends: BlockEnds, visible: list[int]) -> Reserve:
        """Begin blocks up to *ends*. The cursors must be those from before the choice that needs the blocks.

        Raises StorageFull, StorageFailed or SyncFailed.
        """
        assert group.ledger is not None
        blocks = [[subject_filter.prefix, self._place(subject_filter, visible), end] for subject_filter, end in ends]
        files = self._store.groups
        files.write()  # while nothing can be written, nothing is staged
        packed = msgpack.packb([group.ledger.number, group.skipped, blocks])
        for _ in range(2):  # where one of the two is rotten, the other holds
            files.stage(RecordKind.RESERVE, packed)
        files.write()
        reserve = Reserve(files.begin_sync(), ends)
        for subject_filter, _ in ends:
            subject_filter.reserving = reserve
            subject_filter.reserves += 1
        return reserve

    def reserved(self, reserve: Reserve, error: Exception | None) -> None:
        """They are on disk, or are not."""
        self._store.groups.end_sync(reserve.sync, error)
        for subject_filter, end in reserve.ends:
            if subject_filter.reserving is reserve:  # else the group has gone elsewhere
                subject_filter.reserving = None
                if error is None:
                    subject_filter.reserved = end
                    subject_filter.group.dirty = True

    def block_ends(self, group: Group, taken: Taken) -> BlockEnds:
        """Return where new blocks for *taken* messages are to end."""
        assert group.ledger is not None
        size = group.ledger.settings.max_unacked
        return [(subject_filter, self._block_end(subject_filter, parts, size)) for subject_filter, parts in taken]

    def _block_end(self, subject_filter: SubjectFilter, parts: Parts, block: int) -> int:
        """Return where a block of about *block* messages ends that contains all *parts*."""
        need = _need(subject_filter, parts)
        # Where more came while one was brought to disk than it had room for, the next one has twice as much.
        more = min(subject_filter.reserves, _MOST_DOUBLED)
        if subject_filter.exact:
            return need + (block << more)
        runs = sum(len(part.rows) if isinstance(part, Many) else 1 for part in parts)
        count = sum(
            int(part.rows["count"].sum()) if isinstance(part, Many) else part.stop - part.start for part in parts
        )
        ahead = max(1, block * runs // count)
        ends = []
        for partition, row in enumerate(subject_filter.row_cursors):
            if row + ahead < self._store.visible_row(partition):
                try:
                    ends.append(self._store.read_entry(partition, row + ahead)[2])
                except (NotAtHand, StorageError):
                    return need
        return max(need, min(ends) if ends else self._store.last_stored_at_us + (AHEAD_US << more))

    def _place(self, subject_filter: SubjectFilter, visible: list[int]) -> int | list[int]:
        """Before it all is handed out."""
        if not subject_filter.exact:
            return subject_filter.positions_now(self._store, visible)
        number = subject_filter.subject(self._store)
        assert number is not None
        return subject_filter.group.cursor(self._store, subject_filter, number) or 0

    def stop(self, groups: Iterable[Group]) -> None:
        """Nothing is handed out any more, so the next start may go on where the groups are."""
        for group in groups:
            if group.mode == AT_MOST_ONCE:
                for subject_filter in group.all_filters():
                    subject_filter.reserved, subject_filter.reserving = 0, None
                group.dirty = True

    # --- after a start -----------------------------------------------------------------------------------------------

    def replay(self, group: Group, skipped: int, blocks: list[Any]) -> None:
        """A record says that blocks began."""
        group.skipped = skipped
        for prefix, place, end in blocks:
            subject_filter = group.filters.get(prefix) or group.ended.get(prefix)
            if subject_filter is None:  # the record that it is followed is lost
                continue
            if isinstance(place, list):
                for partition, position in enumerate(place):
                    self._pass_rows(subject_filter, partition, self._store.row_at_position(partition, position))
            else:
                self._pass_sequences(subject_filter, place)
            subject_filter.reserved = max(subject_filter.reserved, end)  # where a seek between is lost, it is lower

    def resume(self, groups: Iterable[Group], *, lost: bool) -> None:
        """All is told: go on behind the blocks. With *lost* records nobody knows where they end: behind everything."""
        for group in groups:
            if group.mode != AT_MOST_ONCE:
                continue
            for subject_filter in group.all_filters():
                end = 1 << 62 if lost else subject_filter.reserved
                subject_filter.reserved = 0
                if subject_filter.exact:
                    group.skipped += self._pass_sequences(subject_filter, end)
                    continue
                ends = [
                    self._store.row_at_time(partition, end + 1) if end else 0
                    for partition in range(self._store.partitions)
                ]
                # All is counted before anything is passed: a subject may lie in several partitions.
                group.skipped += sum(self._count(subject_filter, partition, row) for partition, row in enumerate(ends))
                for partition, row in enumerate(ends):
                    self._pass_rows(subject_filter, partition, row)
            group.dirty = True

    def _pass_rows(self, subject_filter: SubjectFilter, partition: int, end: int) -> None:
        """Pass the rows before row *end*."""
        for row, rows in self._rows_before(subject_filter, partition, end):
            if len(rows):
                cursors = subject_filter.group.cursors.upto(int(rows["subject"].max()) + 1)
                np.maximum.at(cursors, rows["subject"], rows["first_sequence"] + rows["count"])
            subject_filter.row_cursors[partition] = row

    def _count(self, subject_filter: SubjectFilter, partition: int, end: int) -> int:
        """How many messages of the rows before row *end* had not been handed out."""
        counted = 0
        for _, rows in self._rows_before(subject_filter, partition, end):
            ends = rows["first_sequence"] + rows["count"]
            starts = np.maximum(rows["first_sequence"], subject_filter.group.floor(subject_filter, rows["subject"]))
            counted += int((np.maximum(ends, starts) - starts).sum())
        return counted

    def _rows_before(self, subject_filter: SubjectFilter, partition: int, end: int) -> Iterator[tuple[int, Rows]]:
        """From where its scan is: rows that it takes, and the row behind them."""
        row, matches = subject_filter.row_cursors[partition], subject_filter.matches(self._store)
        while row < end and len(rows := self._store.rows(partition, row, min(end - row, _CHUNK_ROWS))):
            row += len(rows)
            yield row, rows if matches is None else chosen_of([rows], np.flatnonzero(matches[rows["subject"]]))

    def _pass_sequences(self, subject_filter: SubjectFilter, end: int) -> int:
        store, group = self._store, subject_filter.group
        number = subject_filter.subject(store)
        if number is None:
            return 0
        cursor, end = group.cursor(store, subject_filter, number) or 0, min(end, int(store.ends[number]))
        if cursor >= end:
            return 0
        group.cursors.upto(number + 1)[number] = end
        return store.message_count(number, cursor, end)


def may_lack_reserves(holes: Sequence[Hole], torn: int, records: Sequence[PullRecord]) -> bool:
    """Whether bad bytes of the pull log may have told of a block of which no record is left: not where each hole, and
    the *torn* bytes behind the last record, have the size of one copy of a block's record whose other copy is there.
    """
    single = _without_twin(records)
    starts = {record.position: record.size for record in single}
    ends = {record.end: record.size for record in single}
    end = records[-1].end if records else 0
    is_told = [hole.end - hole.start in (starts.get(hole.end), ends.get(hole.start)) for hole in holes]
    return not all(is_told) or torn > ends.get(end, 0)


def _without_twin(records: Sequence[PullRecord]) -> list[PullRecord]:
    """The records of blocks that stand there once."""
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


def _need(subject_filter: SubjectFilter, parts: Parts) -> int:
    """How far a block has to go that has all of these."""
    if subject_filter.exact:
        last = parts[-1]
        if isinstance(last, Many):
            return int(last.rows["first_sequence"][-1]) + int(last.rows["count"][-1])
        return last.entry[0] + last.stop
    return max(int(part.rows["stored_at_us"].max()) if isinstance(part, Many) else part.entry[2] for part in parts)


class OnDisk:
    """Says which messages are on disk, and which filters wait for more of them."""

    def __init__(self, upto: Callable[[int], int], want: Callable[[int], None]) -> None:
        """*upto* returns the position before which a partition's batches are on disk; *want* has the rest synced."""
        self._upto = upto
        self._want = want
        self._waiting: dict[int, SubjectFilter] = {}

    def count(self, parts: Parts, total: int) -> int:
        """Return how many of the *total* messages in *parts* come before the first that is not on disk."""
        if all(_last_position(part) < self._upto(part.partition) for part in parts):
            return total
        count = 0
        for part in parts:
            upto = self._upto(part.partition)
            if _last_position(part) < upto:
                count += int(part.rows["count"].sum()) if isinstance(part, Many) else part.stop - part.start
                continue
            if isinstance(part, Many):
                count += int(part.rows["count"][: int(np.searchsorted(part.rows["position"], np.uint64(upto)))].sum())
            break
        return count

    def want(self, taken: Taken) -> None:
        """Have the *taken* messages synced; their filters wait for that."""
        for partition in sorted({part.partition for _, parts in taken for part in parts}):
            self._want(partition)
        self._waiting.update((id(subject_filter), subject_filter) for subject_filter, _ in taken)

    def synced(self) -> Iterable[SubjectFilter]:
        """Return the filters that waited: more messages are on disk, or a sync has failed."""
        waiting, self._waiting = self._waiting, {}
        return waiting.values()


def _last_position(part: Many | Some) -> int:
    return int(part.rows["position"][-1]) if isinstance(part, Many) else part.entry[1]
