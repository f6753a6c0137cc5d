"""Hand-overs whose record in the pull log is lost: the message lies in the message log, and nothing names it.

Each was answered for only once its record was on disk; so where records are bad, what was stored since the checkpoint
for one group alone, and is not known to have been named, is handed out as if it had just come. One that was not
answered for, and is sent again, is known by its name then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qmq.broker.groups import Group
from qmq.broker.held import MessageRange
from qmq.broker.kinds import Verdict
from qmq.errors import BadBatch, StorageError
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE
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
        for messages, name in _stored(store, own):
            if name not in ledger.handed:
                ledger.take_over(messages, 1, Verdict.NACK, REASON, 0, now_us, name)


def own_subjects(store: Store, group: Group) -> list[int]:
    """The numbers of the subjects that are that group's alone."""
    if group.name is None:
        return []
    prefix = private_subject(group.name, "")
    return store.subjects_under(prefix, 0, store.subject_count)


def _stored(store: Store, own: list[int]) -> Iterator[tuple[MessageRange, bytes]]:
    """The messages of these subjects behind the checkpoint, with the names of their hand-overs."""
    for partition in range(store.partitions):
        row = store.row_at_position(partition, store.claimed(partition))
        while len(rows := store.rows(partition, row, 8_192)):
            row += len(rows)
            mine = rows[np.isin(rows["subject"], own)]
            columns = (mine[column].tolist() for column in ("subject", "first_sequence", "position"))
            for subject, sequence, position in zip(*columns, strict=True):
                try:
                    header = parse_header(store.peek(partition, position, BATCH_HEADER_SIZE))
                except (BadBatch, StorageError):  # nobody can read it: a pull would tell
                    continue
                name = header.producer_id + header.producer_sequence.to_bytes(8, "little")
                yield MessageRange(subject, sequence, 0, 0, 1), name
