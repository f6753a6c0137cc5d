"""Restore names that the registry of subjects has lost, from the message log by way of the consumer log.

Every row has its subject's number and lane, and the batch that the row points to has the name. A number without a
readable row gets a name that clients cannot send to, so that the other subjects keep their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq.errors import BadBatch, BadBytes, StorageError
from qmq.format.batch import EntryRow, runs_of, stored_names, validate_stored_header
from qmq.format.layout import LANE_NORMAL
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.disk import Disk, read_fully
from qmq.storage.message_log.segment import Segment
from qmq.storage.meta.checkpoint import PartitionClaim
from qmq.storage.meta.subjects import INTERNAL, SubjectTable

#: The beginning of a name that no client may use; the subject's number follows.
LOST_PREFIX: Final = f"{INTERNAL}lost-"


class NameLookupLog:
    """Looks names up in one partition, as far as the checkpoint covers it. It only reads the consumer log."""

    def __init__(
        self, disk: Disk, directory: Path, consumer: ConsumerLog, secret: bytes, claim: PartitionClaim
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._consumer = consumer
        self._secret = secret
        self._spans = claim.segments
        known = [(span.base, span.end, span != claim.segments[-1]) for span in claim.segments]
        consumer.load(known, claim.position, claim.journal)

    def name_of(self, number: int) -> tuple[str, int] | None:
        """Return the name and lane of a number; None when no row of it is readable in this partition."""
        try:
            rows = self._consumer.subject_rows(number, 0, 1)
            return (self._read(rows[0].item()), int(rows[0]["lane"])) if len(rows) else None
        except (BadBatch, BadBytes, OSError, StorageError):
            return None

    def has_rows(self, number: int) -> bool:
        """Return whether the partition has rows of a subject."""
        return len(self._consumer.subject_rows(number, 0, 1)) > 0

    def _read(self, row: EntryRow) -> str:
        position, run, size = row[1], row[5], row[10]
        base = max(span.base for span in self._spans if span.base <= position)
        segment = Segment.open(self._disk, self._directory, base, 0, writable=False)
        try:
            batch = memoryview(read_fully(self._disk, segment.fd, size, position - base))
        finally:
            segment.close()
        header = validate_stored_header(batch, position, self._secret)
        return stored_names(batch, header)[int(runs_of(batch, header)["subject"][run])]


def restore_names(table: SubjectTable, count: int, readers: list[NameLookupLog]) -> tuple[list[int], list[str]]:
    """Name every damaged record of *table*, and every record missing from *count*, again; on disk when this returns.

    Return the subjects whose names are lost (if the log still has such a name, it gets a new number, and needs new
    sequences), and a note on the restored names, none when no name was lost. Raises StorageFull or StorageFailed.
    """
    lost = [number for number in range(max(table.count, count)) if not _is_known(table, number)]
    if not lost:
        return [], []
    names: dict[int, tuple[str, int]] = {}
    for number in lost:
        found = (reader.name_of(number) for reader in readers)
        name = next((name for name in found if name is not None and table.number(*name) is None), None)
        names[number] = name if name is not None else (f"{LOST_PREFIX}{number}", LANE_NORMAL)
    missing = [number for number in lost if number >= table.count]
    damaged = {number: name for number, name in names.items() if number < table.count}
    if damaged:
        table.restore(damaged)
    for number in missing:
        table.add(*names[number])
    unknown = [number for number, (name, _) in names.items() if name.startswith(LOST_PREFIX)]
    found_again = f"{len(lost) - len(unknown)} were found again in the message log"
    return unknown, [f"{table.path} had lost {len(lost)} names; {found_again}"]


def _is_known(table: SubjectTable, number: int) -> bool:
    if number >= table.count:
        return False
    try:
        table.name(number)
    except BadBytes:
        return False
    return True
