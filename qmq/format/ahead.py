"""How far a batch's stamp was ahead of the wall clock when it was stored: a field that the broker adds to its table.

Stamps may not go back, so after the wall clock was set back they go on ahead of it. Delays and expiries count from when
a batch was really stored. Only batches for which that matters have the field, and only while it says something.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from qmq.format.batch import CheckedBatch, Header, parse_header
from qmq.format.layout import (
    BATCH_HEADER,
    BATCH_HEADER_SIZE,
    DELIVER_UNIT_US,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_ORIGIN_ID,
    RUN_DTYPE,
    RUN_SIZE,
)
from qmq.format.table import AHEAD_FIELD, AHEAD_SIZE, table_of

#: What is delayed, expires, or was delayed and is delivered now.
_TIMED_FLAGS: Final = HAS_DELIVER_AT | HAS_EXPIRE_AT | HAS_ORIGIN_ID


def with_ahead(view: memoryview, batch: CheckedBatch, ahead_us: int) -> tuple[memoryview, CheckedBatch]:
    """The batch, which is to be stored with a stamp so far ahead: with the field if it needs one, else as it is."""
    header = batch.header
    if ahead_us < DELIVER_UNIT_US or not header.flags & _TIMED_FLAGS:
        return view, batch
    table = bytearray(table_of(batch.names))
    assert table[0] == 0x81, "a map of one field"
    table[0] += 1
    table += AHEAD_FIELD + ahead_us.to_bytes(8, "big")
    records = bytes(view[BATCH_HEADER_SIZE : BATCH_HEADER_SIZE + RUN_SIZE * header.runs])
    data = view[header.data_start : header.size]
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = header._replace(size=size, table_size=len(table))
    buffer = memoryview(bytearray(b"".join((BATCH_HEADER.pack(*fields), records, table, data))))
    runs = None
    if batch.runs is not None:
        runs = np.frombuffer(buffer, RUN_DTYPE, header.runs, BATCH_HEADER_SIZE)
    return buffer, CheckedBatch(parse_header(buffer), batch.names, batch.run, runs)


def clock_us_of(view: memoryview, header: Header, stored_at_us: int | None = None) -> int:
    """When the stored batch that *view* begins with was stored by the wall clock of the broker. *stored_at_us* is its
    stamp, where *header* was read before it had one.
    """
    stamp_us, end = header.stored_at_us if stored_at_us is None else stored_at_us, header.data_start
    field = bytes(view[end - AHEAD_SIZE : end])
    if not field.startswith(AHEAD_FIELD):
        return stamp_us
    return max(stamp_us - int.from_bytes(field[len(AHEAD_FIELD) :], "big"), 0)
