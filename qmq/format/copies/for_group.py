"""Copies of messages for one group alone, under its private subjects. They keep their ids as origin ids.

One message becomes a batch for a handover; the messages of a run become a batch when they are carried forward.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from crc32c import crc32c

from qmq.format.batch import Header
from qmq.format.build import fold_of, sealed_head
from qmq.format.hashing import check_of, checks_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    DELAY_END_US,
    HANDED_FLAGS,
    HAS_CREATED_AT,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_SOURCE,
    HAS_TAGS,
    MESSAGE_ID,
    MESSAGE_ID_SIZE,
    OPTIONAL_COLUMNS,
    RUN,
    RUN_REPLAYED,
)
from qmq.format.private import is_private, origin_subject, private_subject
from qmq.format.run import Run, cut_data
from qmq.format.source import NO_SOURCE
from qmq.format.table import table_of


def private_batch(run: Run, index: int, group: str, producer_id: bytes, producer_sequence: int) -> bytes:
    """Return message *index* of a run as a batch of its own for one group alone, as a client sends it.

    It keeps lane, header, body, tags, keys, expiry, time of creation and source, and its id as origin id.
    """
    one = run.slice(index, index + 1)
    flags = (one.flags & HANDED_FLAGS & ~(HAS_CREATED_AT | HAS_SOURCE)) | HAS_ORIGIN_ID
    length, header_size, _, *optional, payload = map(bytes, cut_data(one.data, one.flags, 1, 0, 1))
    order = [flag for flag, _ in OPTIONAL_COLUMNS if one.flags & flag]
    columns = dict(zip(order, optional, strict=True))
    columns[HAS_ORIGIN_ID] = MESSAGE_ID.pack(*one.id(0))
    tags, key, expire_at = (_number(columns.get(flag)) for flag in (HAS_TAGS, HAS_KEY_HASH, HAS_EXPIRE_AT))
    fold = fold_of(_number(header_size), tags, key, 0, expire_at)
    for at in range(0, 16, 4):
        fold ^= int.from_bytes(columns[HAS_ORIGIN_ID][at : at + 4], "little")
    check = check_of(payload, fold).to_bytes(4, "little")
    kept = [columns[flag] for flag, _ in OPTIONAL_COLUMNS if flags & flag]
    data = b"".join([length, header_size, check, *kept, payload])
    table = table_of([private_subject(group, origin_subject(one.subject))], one.source_record(0))
    records = RUN.pack(0, one.lane, one.run_flags, 0, 1, 0, len(data), crc32c(data), 0)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), 1, 1, 0, 0, one.created_us(0), 0, bytes(6), producer_id,
        producer_sequence, crc32c(data), 0, bytes(8),
    )  # fmt: skip
    return sealed_head(fields, records + table) + data


def _number(column: bytes | None) -> int:
    return 0 if column is None else int.from_bytes(column, "little")


#: The producer of copies that are carried forward; no client has this id, since theirs are random or hashes.
COPY_PRODUCER: Final = b"qmq: carrying on"
#: The places of messages that came from another broker or an archive to this group alone are from here on.
FOREIGN_PLACES: Final = 1 << 61


def place_of_copy(header: Header, first_sequence: int) -> int:
    """Return the place of a private batch's first message among all that were ever in its lane of the subject: the
    sequence of the message that it is a copy of; or FOREIGN_PLACES and *first_sequence*, its own, where it came from
    another broker or an archive.
    """
    if header.producer_id == COPY_PRODUCER:
        return header.producer_sequence
    return FOREIGN_PLACES | first_sequence


def _place_of(run: Run) -> int:
    """Return the place of a run's first message."""
    if not is_private(run.subject):
        return run.first_sequence
    header = run.origin
    if isinstance(header, Header) and header.producer_id == COPY_PRODUCER:
        return header.producer_sequence + run.ordinal  # such a batch has one run
    return FOREIGN_PLACES | run.first_sequence


def copied_batch(run: Run, group: str, clock_us: int, *, replayed: bool = False) -> bytearray:
    """Return all messages of a sound run as a batch for one group alone, ready to be stamped.

    They keep lane, header, body, tags, keys, expiry, time of creation and source, and their ids as origin ids; the
    producer sequence is the place of the first one. *clock_us* is when they were stored, by the wall clock. With
    *replayed* they are marked as messages that a resend hands out again.
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
    table = table_of([private_subject(group, origin_subject(run.subject))], run.packed_source() or NO_SOURCE)
    run_flags = run.run_flags & RUN_REPLAYED | replayed * RUN_REPLAYED
    records = RUN.pack(0, run.lane, run_flags, 0, count, 0, len(data), crc32c(data), 0)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), count, 1, 0, 0, run.created_at_us, 0, bytes(6),
        COPY_PRODUCER, _place_of(run), crc32c(data), 0, bytes(8),
    )  # fmt: skip
    return bytearray(sealed_head(fields, records + table) + data)


def _absolute(times: bytes, stored_at_us: int) -> bytes:
    """Return expiry times that count from the time of storing as absolute times: a copy is stored later."""
    column = np.frombuffer(times, "<u8").copy()
    column[(column > 0) & (column < DELAY_END_US)] += np.uint64(stored_at_us)
    return column.tobytes()


assert len(COPY_PRODUCER) == MESSAGE_ID_SIZE
