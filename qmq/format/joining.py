"""Messages that were sent one by one, to be delivered later, and fall due together: one batch of all of them.

Each keeps header, body, tags, key, expiry and its time of creation, which a column says where it is not the same for
all. Columns that only some of them had are 0 for the others, which means the same as none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.format.batch import COLUMN_BYTES, CheckedBatch, header_crc_of, parse_header
from qmq.format.build import records_of, sealed_head
from qmq.format.due import DUE_PRODUCER, Due
from qmq.format.hashing import checks_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    HAS_CREATED_AT,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_TAGS,
    MESSAGE_ID,
    OPTIONAL_COLUMNS,
    RUN,
    RUN_DTYPE,
    RUN_SIZE,
    SENT_FLAGS,
)
from qmq.format.run import column_places
from qmq.format.table import names_of, table_of

#: length u32 | header_size u16
_LENGTHS: Final = struct.Struct("<IH")
_DTYPES: Final = {HAS_TAGS: "<u4", HAS_KEY_HASH: "<u8", HAS_EXPIRE_AT: "<u8"}

Columns = dict[int, npt.NDArray[Any]]


class Single(NamedTuple):
    """A stored batch of one message, whose checksums are right."""

    subject: str
    flags: int
    position: int
    created_at_us: int
    columns: bytes
    payload: bytes


def single_of(batch: memoryview) -> Single | None:
    """The one message of the stored batch that *batch* begins with; None where it has several, or is rotten."""
    header = parse_header(batch)
    start, flags = header.data_start, header.flags
    if header.messages != 1 or header.runs != 1 or flags & ~SENT_FLAGS or header.version != BATCH_VERSION:
        return None
    if not start < header.size <= len(batch) or header_crc_of(batch, start) != header.header_crc:
        return None
    data, width = bytes(batch[start : header.size]), COLUMN_BYTES[flags]
    if crc32c(data) != header.data_crc or len(data) < width:
        return None
    length, header_size = _LENGTHS.unpack_from(data)
    if length != len(data) - width or header_size > length:
        return None
    names = names_of(bytes(batch[BATCH_HEADER_SIZE + RUN_SIZE : start]))
    return Single(names[0], flags, header.position, header.created_at_us, data[:width], data[width:])


def join_singles(singles: list[Single], store_id: bytes, partition: int) -> Due:
    """These messages as one batch, in their order within each subject. Their ids name *partition*."""
    numbers: dict[str, int] = {}
    subjects = [numbers.setdefault(one.subject, len(numbers)) for one in singles]
    counts = [len(singles)]
    if len(numbers) > 1:
        order = sorted(range(len(singles)), key=subjects.__getitem__)
        singles = [singles[at] for at in order]
        counts = np.bincount(subjects).tolist()
    lengths, sizes, columns = _columns_of(singles)
    created = [one.created_at_us for one in singles]
    if min(created) != max(created):
        columns[HAS_CREATED_AT] = np.array(created, "<u8")
    origins = b"".join([MESSAGE_ID.pack(store_id, partition, one.position) for one in singles])
    columns[HAS_ORIGIN_ID] = np.frombuffer(origins, "V16")
    payloads = [one.payload for one in singles]
    checks = checks_of(payloads, _folds(sizes, columns), len(singles))
    datas = _datas([lengths, sizes, checks, *(columns[flag] for flag in sorted(columns))], payloads, counts)
    return Due(*_built(sum(columns), list(numbers), counts, datas, min(created), store_id), 0)


def _columns_of(singles: list[Single]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Columns]:
    """Lengths, header sizes, and the optional columns that one of the messages has, but for deliver_at."""
    count, by_flags = len(singles), dict[int, list[int]]()
    for at, one in enumerate(singles):
        by_flags.setdefault(one.flags, []).append(at)
    lengths, sizes, columns = np.zeros(count, "<u4"), np.zeros(count, "<u2"), Columns()
    for flags, places in by_flags.items():
        joined = b"".join([singles[at].columns for at in places])
        rows = np.frombuffer(joined, np.uint8).reshape(len(places), COLUMN_BYTES[flags])
        lengths[places] = _column(rows, 0, "<u4")
        sizes[places] = _column(rows, 4, "<u2")
        offsets = [offset for offset, _ in column_places(flags, 1)][3:]
        for (flag, _), offset in zip(_there(flags), offsets, strict=True):
            if flag != HAS_DELIVER_AT:
                column = columns.setdefault(flag, np.zeros(count, _DTYPES[flag]))
                column[places] = _column(rows, offset, _DTYPES[flag])
    return lengths, sizes, columns


def _there(flags: int) -> Iterable[tuple[int, int]]:
    return [(flag, size) for flag, size in OPTIONAL_COLUMNS if flags & flag]


def _column(rows: npt.NDArray[np.uint8], offset: int, dtype: str) -> npt.NDArray[Any]:
    size = int(dtype[2:])
    return np.ascontiguousarray(rows[:, offset : offset + size]).view(dtype).ravel()


def _folds(sizes: npt.NDArray[Any], columns: Columns) -> npt.NDArray[Any]:
    """build.fold_of for each message."""
    folds = sizes.astype("<u4")
    for column in columns.values():
        folds ^= np.bitwise_xor.reduce(column.view("<u4").reshape(len(sizes), -1), axis=1)
    return folds


def _datas(columns: list[npt.NDArray[Any]], payloads: list[bytes], counts: list[int]) -> list[bytes]:
    """Of each run its columns, and then its payload."""
    ends = [0, *accumulate(counts)]
    return [
        b"".join([*(column[start:stop].tobytes() for column in columns), *payloads[start:stop]])
        for start, stop in pairwise(ends)
    ]


def _built(
    flags: int, names: list[str], counts: list[int], datas: list[bytes], created_at_us: int, store_id: bytes
) -> tuple[bytearray, CheckedBatch]:
    table, data = table_of(names), b"".join(datas)
    records = records_of(counts, list(map(len, datas)), map(crc32c, datas))
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), sum(counts), len(names), 0, 0, created_at_us, 0,
        store_id, DUE_PRODUCER, 0, crc32c(data), 0, bytes(8),
    )  # fmt: skip
    buffer = bytearray(sealed_head(fields, records + table) + data)
    made = parse_header(memoryview(buffer))
    if len(names) == 1:
        return buffer, CheckedBatch(made, tuple(names), RUN.unpack_from(buffer, BATCH_HEADER_SIZE), None)
    runs = np.frombuffer(memoryview(buffer), RUN_DTYPE, made.runs, BATCH_HEADER_SIZE)
    return buffer, CheckedBatch(made, tuple(names), None, runs)
