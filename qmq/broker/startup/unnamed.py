"""Hand-overs whose record in the pull log is lost: the message lies in the message log, and nothing names it.

Each was answered for only once its record was on disk; so where records are bad, what was stored since the checkpoint
for one group alone, and is not known to have been named, is handed out as if it had just come. One that was not
answered for, and is sent again, is known by its name then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qmq.broker.groups.group import Group
from qmq.broker.groups.in_flight import MessageRange
from qmq.broker.journal.record_types import Verdict
from qmq.errors import BadBatch, StorageError
from qmq.format.batch import Header, parse_header
from qmq.format.copies import COPY_PRODUCER
from qmq.format.layout import BATCH_HEADER_SIZE, MESSAGE_ID, RUN_REPLAYED
from qmq.format.pieces import stored_runs
from qmq.format.private import private_subject
from qmq.storage.store import Store

REASON = "what became of it is lost"


def name_again(store: Store, groups: list[Group], now_us: int) -> None:
    """Have handed out what nobody has named. May wait for rows."""
    if not store.has_private:
        return
    for group in groups:
        ledger, own = group.ledger, own_subjects(store, group)
        if ledger is None or not own:
            continue
        restored = dict[bytes, tuple[Header, list[MessageRange]]]()  # by the first origin id: what came again counts
        for messages, header, is_restored in _stored(store, own):
            if is_restored:
                first_id = _first_origin(store, header)
                if restored.get(first_id, (None,))[0] != header:
                    restored[first_id] = header, []
                restored[first_id][1].append(messages)
                continue
            name = header.producer_id + header.producer_sequence.to_bytes(8, "little")
            if name not in ledger.handed:
                ledger.take_over(messages, 1, Verdict.NACK, REASON, 0, now_us, name)
        for header, ranges in restored.values():
            run, first = header.producer_id, header.producer_sequence
            if first >= ledger.restored.end(run):  # else it was named, or others have come in its place
                ledger.bring_back(ranges, run, first, first + header.messages, now_us)


def _first_origin(store: Store, header: Header) -> bytes:
    """The id of the first message of a batch that was restored; its place where that cannot be read."""
    try:
        run = stored_runs(store.peek(header.partition, header.position, header.size), header)[0]
        return MESSAGE_ID.pack(*run.id(0))
    except (BadBatch, StorageError):
        return b"%d" % header.position


def own_subjects(store: Store, group: Group) -> list[int]:
    """The numbers of the subjects that are that group's alone."""
    if group.name is None:
        return []
    prefix = private_subject(group.name, "")
    return store.subjects_under(prefix, 0, store.subject_count)


def _stored(store: Store, own: list[int]) -> Iterator[tuple[MessageRange, Header, bool]]:
    """The messages of these subjects behind the checkpoint, with their batches, and whether they were restored."""
    for partition in range(store.partitions):
        row = store.row_at_position(partition, store.claimed(partition))
        while len(rows := store.rows(partition, row, 8_192)):
            row += len(rows)
            mine = rows[np.isin(rows["subject"], own)]
            names = "subject", "first_sequence", "count", "flags", "position"
            for subject, sequence, count, flags, position in zip(*(mine[name].tolist() for name in names), strict=True):
                try:
                    header = parse_header(store.peek(partition, position, BATCH_HEADER_SIZE))
                except (BadBatch, StorageError):  # nobody can read it: a pull would tell
                    continue
                if header.producer_id == COPY_PRODUCER:
                    continue  # what it is a copy of is named
                yield MessageRange(subject, sequence, 0, 0, count), header, bool(flags & RUN_REPLAYED)
