"""A batch as a client sent it, without some of its messages: the broker leaves out repeats of unique texts."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import numpy as np
from crc32c import crc32c

from qmq.format.batch import CheckedBatch, parse_header, stored_table
from qmq.format.build import name_runs, records_of, sealed_head
from qmq.format.layout import BATCH_HEADER_SIZE, RUN, RUN_DTYPE
from qmq.format.pieces import stored_runs
from qmq.format.run import cut_data
from qmq.format.source import source_in
from qmq.format.table import sent_as, table_of, unique_field, with_field


def without(batch: memoryview, checked: CheckedBatch, left_out: Collection[int]) -> tuple[memoryview, CheckedBatch]:
    """Return a checked batch without the messages with these ordinals; at least one is left.

    It keeps its producer sequence, and the field ``unique`` of its table says as what it was sent.
    """
    header = checked.header
    kept = np.ones(header.messages, np.bool_)
    kept[list(left_out)] = False
    subjects, lanes, counts, datas = list[str](), list[int](), list[int](), list[bytes]()
    for run in stored_runs(batch, header):
        some = kept[run.ordinal : run.ordinal + run.count]
        count = int(some.sum())
        if not count:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], some, [False])))).reshape(-1, 2).tolist()
        parts = [cut_data(run.data, header.flags, run.count, start, stop) for start, stop in edges]
        subjects.append(run.subject)
        lanes.append(run.lane)
        counts.append(count)
        datas.append(b"".join(chain.from_iterable(zip(*parts, strict=True))))
    named = name_runs(subjects, lanes)
    data, sent = b"".join(datas), stored_table(batch, header)
    table = table_of(named.names, source_in(sent))
    table = with_field(table, unique_field(*(sent_as(sent) or (header.messages, header.data_crc))))
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas), named=named)
    fields = header._replace(
        size=BATCH_HEADER_SIZE + len(records) + len(table) + len(data), table_size=len(table), messages=sum(counts),
        runs=len(counts), data_crc=crc32c(data), header_crc=0,
    )  # fmt: skip
    buffer = memoryview(bytearray(sealed_head(tuple(fields), records + table) + data))
    made, names = parse_header(buffer), tuple(named.names)
    if len(counts) == 1:
        return buffer, CheckedBatch(made, names, RUN.unpack_from(buffer, BATCH_HEADER_SIZE), None, True)
    runs = np.frombuffer(buffer, RUN_DTYPE, len(counts), BATCH_HEADER_SIZE)
    return buffer, CheckedBatch(made, names, None, runs, True)
