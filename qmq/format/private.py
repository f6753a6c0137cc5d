"""Messages that are one group's alone: their subjects, and how one is made of a message that was received.

Their subject is ``~GROUP~SUBJECT``, which no client may send to or follow: so every file and check that knows subjects
keeps them apart. They carry the id that they had before as origin id.
"""

from __future__ import annotations

from typing import Final

from crc32c import crc32c

from qmq.errors import InvalidName
from qmq.format.build import fold_of, records_of, sealed_head
from qmq.format.hashing import check_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    HANDED_FLAGS,
    HAS_CREATED_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_TAGS,
    MESSAGE_ID,
    OPTIONAL_COLUMNS,
)
from qmq.format.run import Run, cut_data
from qmq.format.table import table_of
from qmq.names import check_subject

#: Begins names that no client may use.
PRIVATE: Final = "~"


def private_subject(group: str, subject: str) -> str:
    """Where messages of *subject* lie that are that group's alone."""
    return f"{PRIVATE}{group}{PRIVATE}{subject}"


def is_private(name: str) -> bool:
    """Whether that is a subject of one group's own."""
    return name[:1] == PRIVATE and PRIVATE in name[1:]


def origin_subject(name: str) -> str:
    """The subject that messages of subject *name* were sent to: another one where that is a group's own."""
    return name.split(PRIVATE, 2)[2] if is_private(name) else name


def check_private(name: str, group: str) -> str:
    """Return *name* if it is a subject of that group's own (or of a broadcast member's). Raises InvalidName."""
    if not is_private(name) or name.split(PRIVATE, 2)[1] != group:
        raise InvalidName(f"subject {name!r} is not one of group {group!r} alone, which begins with ~{group}~")
    check_subject(origin_subject(name))
    return name


def private_batch(run: Run, index: int, group: str, producer_id: bytes, producer_sequence: int) -> bytes:
    """Message *index* of a run as a batch of its own for that group alone, as a client sends it.

    It keeps header, body, tags, key, expiry and time of creation, and its id as origin id.
    """
    one = run.slice(index, index + 1)
    flags = (one.flags & HANDED_FLAGS & ~HAS_CREATED_AT) | HAS_ORIGIN_ID
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
    table = table_of([private_subject(group, origin_subject(one.subject))])
    records = records_of([1], [len(data)], [crc32c(data)], one.run_flags)
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = (
        BATCH_MAGIC, BATCH_VERSION, 0, flags, size, len(table), 1, 1, 0, 0, one.created_us(0), 0, bytes(6), producer_id,
        producer_sequence, crc32c(data), 0, bytes(8),
    )  # fmt: skip
    return sealed_head(fields, records + table) + data


def _number(column: bytes | None) -> int:
    return 0 if column is None else int.from_bytes(column, "little")
