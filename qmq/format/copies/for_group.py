"""Copies of messages for one group alone, under its private subjects. They keep their ids as origin ids.

One message becomes a batch for a handover; the messages of a run become a batch when they are carried forward.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
    OPTIONAL_COLUMNS,
    PRODUCER_ID_SIZE,
    RUN,
    RUN_REPLAYED,
)
from qmq.format.private import origin_subject, private_subject
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


#: The producer of copies that are carried forward begins so; no client has such an id, since theirs are random or
#: hashes.
COPY_PRODUCER: Final = b"qmq:copy"
#: The same of messages that had come from another broker or an archive.
_FOREIGN_PRODUCER: Final = b"qmq:from"
#: The producer of copies that older programs made: these do not say where their originals lay.
_OLD_COPY_PRODUCER: Final = b"qmq: carrying on"
_OFFSET_SIZE: Final = PRODUCER_ID_SIZE - len(COPY_PRODUCER)


class Origin(NamedTuple):
    """The place of a message in the order of the store: when its batch was stored, and its offset there, which grows
    from run to run and from message to message.
    """

    stored_at_us: int
    offset: int
    #: It came from another broker or an archive to one group alone, and is before all messages that did not.
    is_foreign: bool = False


def is_copy(producer_id: bytes) -> bool:
    """Return whether a batch has copies that were carried forward."""
    return producer_id.startswith((COPY_PRODUCER, _FOREIGN_PRODUCER)) or producer_id == _OLD_COPY_PRODUCER


def origin_of(header: Header) -> Origin:
    """Return the place of a private batch's first message: of the one that it is a copy of, also as a copy of a copy.
    What came from another broker or an archive, and what an older program has copied, has its own.
    """
    if not header.producer_id.startswith((COPY_PRODUCER, _FOREIGN_PRODUCER)):
        return Origin(header.stored_at_us, 0, True)
    offset = int.from_bytes(header.producer_id[-_OFFSET_SIZE:], "little")
    return Origin(header.producer_sequence, offset, header.producer_id.startswith(_FOREIGN_PRODUCER))


def copied_batch(run: Run, group: str, clock_us: int, origin: Origin, *, replayed: bool = False) -> bytearray:
    """Return all messages of a sound run as a batch for one group alone, ready to be stamped.

    They keep lane, header, body, tags, keys, expiry, time of creation and source, and their ids as origin ids; producer
    and sequence say *origin*, the place of the first one. *clock_us* is when they were stored, by the wall clock. With
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
    producer_id = _FOREIGN_PRODUCER if origin.is_foreign else COPY_PRODUCER
    producer_id += origin.offset.to_bytes(_OFFSET_SIZE, "little")
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), count, 1, 0, 0, run.created_at_us, 0, bytes(6),
        producer_id, origin.stored_at_us, crc32c(data), 0, bytes(8),
    )  # fmt: skip
    return bytearray(sealed_head(fields, records + table) + data)


def _absolute(times: bytes, stored_at_us: int) -> bytes:
    """Return expiry times that count from the time of storing as absolute times: a copy is stored later."""
    column = np.frombuffer(times, "<u8").copy()
    column[(column > 0) & (column < DELAY_END_US)] += np.uint64(stored_at_us)
    return column.tobytes()


assert len(_OLD_COPY_PRODUCER) == PRODUCER_ID_SIZE
