"""A part of a batch that a client has built, as a batch of its own: what is left once others of it were refused."""

from __future__ import annotations

from crc32c import crc32c

from qmq.format.batch import parse_header
from qmq.format.build import records_of, sealed_head
from qmq.format.layout import BATCH_HEADER_SIZE
from qmq.format.pieces import stored_runs
from qmq.format.run import cut_data
from qmq.format.table import table_of


def cut_batch(batch: memoryview, start: int, stop: int, producer_sequence: int) -> list[bytes]:
    """The buffers of a batch of messages [start, stop), by ordinal, of a batch that a client has built. The first of
    these gets that producer sequence.
    """
    header = parse_header(batch)
    subjects, counts, datas = list[str](), list[int](), list[bytes]()
    for run in stored_runs(batch, header):
        first, end = max(start - run.ordinal, 0), min(stop - run.ordinal, run.count)
        if first < end:
            subjects.append(run.subject)
            counts.append(end - first)
            datas.append(b"".join(cut_data(run.data, header.flags, run.count, first, end)))
    data, table = b"".join(datas), table_of(subjects)
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas))
    fields = header._replace(
        size=BATCH_HEADER_SIZE + len(records) + len(table) + len(data), table_size=len(table), messages=sum(counts),
        runs=len(counts), producer_sequence=producer_sequence, data_crc=crc32c(data), header_crc=0,
    )  # fmt: skip
    return [sealed_head(tuple(fields), records + table), data]
