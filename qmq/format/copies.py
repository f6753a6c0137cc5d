"""Messages of a run as a batch for one group alone, under the ids that they have: what is carried forward when the
segment that holds them goes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from crc32c import crc32c

from qmq.format.build import records_of, sealed_head
from qmq.format.hashing import checks_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    DELAY_END_US,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_ORIGIN_ID,
    MESSAGE_ID,
    MESSAGE_ID_SIZE,
    OPTIONAL_COLUMNS,
    RUN_REPLAYED,
)
from qmq.format.private import origin_subject, private_subject
from qmq.format.run import Run, cut_data
from qmq.format.table import table_of

#: The producer of such batches: no client is called that, as theirs are random or hashes.
COPY_PRODUCER: Final = b"qmq: carrying on"


def copied_batch(run: Run, group: str, clock_us: int) -> bytearray:
    """All messages of a run whose checksums hold, ready to be stamped. They keep header, body, tags, key, expiry, time
    of creation, and their ids as origin ids. *clock_us*: when they were stored, by the wall clock.
    """
    flags, count = (run.flags & ~HAS_DELIVER_AT) | HAS_ORIGIN_ID, run.count
    lengths, header_sizes, _, *given, payload = map(bytes, cut_data(run.data, run.flags, count, 0, count))
    order = [flag for flag, _ in OPTIONAL_COLUMNS if run.flags & flag]
    columns = dict(zip(order, given, strict=True))
    columns.setdefault(HAS_ORIGIN_ID, b"".join(MESSAGE_ID.pack(*run.id(index)) for index in range(count)))
    if HAS_EXPIRE_AT in columns:
        columns[HAS_EXPIRE_AT] = _absolute(columns[HAS_EXPIRE_AT], clock_us)
    kept = [columns[flag] for flag, _ in OPTIONAL_COLUMNS if flags & flag]
    folds = np.frombuffer(header_sizes, "<u2").astype(np.uint32)
    for column in kept:
        folds ^= np.bitwise_xor.reduce(np.frombuffer(column, "<u4").reshape(count, -1), axis=1)
    ends = np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64).tolist()
    view = memoryview(payload)
    checks = checks_of(map(view.__getitem__, map(slice, [0, *ends[:-1]], ends)), folds, count)
    data = b"".join([lengths, header_sizes, checks.tobytes(), *kept, payload])
    table = table_of([private_subject(group, origin_subject(run.subject))])
    records = records_of([count], [len(data)], [crc32c(data)], run.run_flags & RUN_REPLAYED)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), count, 1, 0, 0, run.created_at_us, 0, bytes(6),
        COPY_PRODUCER, 0, crc32c(data), 0, bytes(8),
    )  # fmt: skip
    return bytearray(sealed_head(fields, records + table) + data)


def _absolute(times: bytes, stored_at_us: int) -> bytes:
    """A copy is stored later: what expires so long after it was stored expires then even so."""
    column = np.frombuffer(times, "<u8").copy()
    column[(column > 0) & (column < DELAY_END_US)] += np.uint64(stored_at_us)
    return column.tobytes()


assert len(COPY_PRODUCER) == MESSAGE_ID_SIZE
