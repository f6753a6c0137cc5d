"""The hashes of the keys and of the origin ids of stored batches, found without unpacking their messages.

Batches are read one after another, as far as their headers lead. Headers are compared with their position and nothing
else: a batch whose header has rotten is not served, so it does not matter which hashes are found in it.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES
from qmq.format.hashing import hash_bytes
from qmq.format.keys import hashes_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    FIXED_COLUMN_BYTES,
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    HAS_ORIGIN_ID,
    KNOWN_FLAGS,
    MESSAGE_ID_SIZE,
    OPTIONAL_COLUMNS,
    RUN,
    RUN_SIZE,
)

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.uint64]

#: magic, version, flags, size, table_size, messages, runs, position
_FIELDS: Final = struct.Struct("<IBxHIIIIQ")
_NO_ORIGIN: Final = bytes(MESSAGE_ID_SIZE)
_NONE: Final = np.empty(0, np.uint64)


class FoundHashes(NamedTuple):
    """Hashes of batches one after another, each with the position of its batch."""

    hashes: Hashes
    positions: Positions
    #: The bytes from the start of the view that are whole batches.
    size: int


def hash_of_id(message_id: bytes) -> int:
    """Return the hash by which the key index has the origin id of a message: XXH64 of its 16 bytes."""
    return hash_bytes(message_id)


def _column_offset(flags: int, column: int) -> int:
    """Return the bytes a message in the columns before the optional one with the flag *column*."""
    return FIXED_COLUMN_BYTES + sum(size for flag, size in OPTIONAL_COLUMNS if flag & flags and flag < column)


class _Columns:
    """Runs of batches with the same flags: where each run's columns begin, its messages, and its batch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.positions: list[int] = []


def hashes_in(view: memoryview, position: int) -> FoundHashes:
    """Return the hashes of the batches in *view*, whose first byte lies at *position*, up to the first bytes that are
    no whole batch. A batch may have a hash more than once.
    """
    offset, end = 0, len(view)
    groups: dict[int, _Columns] = {}
    several: list[int] = []  # where batches begin that have messages with several keys
    unpack = _FIELDS.unpack_from
    while offset + BATCH_HEADER_SIZE <= end:
        magic, version, flags, size, table_size, messages, runs, stated = unpack(view, offset)
        following, data = offset + size, offset + BATCH_HEADER_SIZE + RUN_SIZE * runs + table_size
        if magic != BATCH_MAGIC or version != BATCH_VERSION or stated != position + offset or data > following:
            break
        if following > end:
            break
        if flags & (HAS_KEY_HASH | HAS_ORIGIN_ID) and flags <= KNOWN_FLAGS:
            group = groups.get(flags)
            if group is None:
                group = groups[flags] = _Columns()
            if flags & HAS_MORE_KEYS:
                several.append(offset)
            if runs == 1:
                _add(group, data, following, messages, stated, flags)
            else:
                for run in range(runs):
                    record = RUN.unpack_from(view, offset + BATCH_HEADER_SIZE + run * RUN_SIZE)
                    _add(group, data + record[5], following, record[4], stated, flags)
        offset = following
    parts = [part for flags, group in groups.items() for part in _gather(view, flags, group)]
    parts += [_other_keys(view[start:], position + start) for start in several]
    if not parts:
        return FoundHashes(_NONE, _NONE, offset)
    hashes, positions = (np.concatenate(column) for column in zip(*parts, strict=True))
    return FoundHashes(hashes, positions, offset)


def _add(group: _Columns, start: int, end: int, count: int, position: int, flags: int) -> None:
    if start + count * COLUMN_BYTES[flags] <= end:  # else its header has rotten
        group.starts.append(start)
        group.counts.append(count)
        group.positions.append(position)


def _gather(view: memoryview, flags: int, group: _Columns) -> list[tuple[Hashes, Positions]]:
    """Return the hashes of keys, and those of origin ids, each with the positions of their batches."""
    counts = np.array(group.counts, np.int64)
    starts, positions = np.array(group.starts, np.int64), np.array(group.positions, np.uint64)
    within = np.arange(int(counts.sum()), dtype=np.int64)
    within -= np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(positions, counts)
    found = []
    if flags & HAS_KEY_HASH:
        at = np.repeat(starts + counts * _column_offset(flags, HAS_KEY_HASH), counts) + 8 * within
        hashes = _seen_as(view, "<u8", 8)[at]
        found.append(_without(hashes == 0, hashes, positions))  # 0: a message without a key
    if flags & HAS_ORIGIN_ID:
        at = np.repeat(starts + counts * _column_offset(flags, HAS_ORIGIN_ID), counts) + MESSAGE_ID_SIZE * within
        ids = _seen_as(view, f"V{MESSAGE_ID_SIZE}", MESSAGE_ID_SIZE)[at].tobytes()
        each = [ids[start : start + MESSAGE_ID_SIZE] for start in range(0, len(ids), MESSAGE_ID_SIZE)]
        hashes = np.fromiter(map(hash_of_id, each), np.uint64, len(each))
        found.append(_without(np.array([one == _NO_ORIGIN for one in each], np.bool_), hashes, positions))
    return found


def _other_keys(batch: memoryview, position: int) -> tuple[Hashes, Positions]:
    """Return the hashes of all keys of a batch that has messages with several."""
    try:
        hashes, _ = hashes_of(batch)
    except (BadBatch, IndexError, ValueError):  # its runs have rotten; the first keys are found all the same
        hashes = _NONE
    return hashes, np.full(len(hashes), position, np.uint64)


def _seen_as(view: memoryview, dtype: str, size: int) -> npt.NDArray[Any]:
    """Return every byte of *view* as the start of a value: columns are not aligned."""
    return np.ndarray((max(len(view) - size + 1, 0),), dtype, view, 0, (1,))


def _without(left_out: npt.NDArray[np.bool_], hashes: Hashes, positions: Positions) -> tuple[Hashes, Positions]:
    return (hashes[~left_out], positions[~left_out]) if left_out.any() else (hashes, positions)
