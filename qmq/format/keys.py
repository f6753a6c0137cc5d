"""The hashes of the keys of a stored batch: all of them, with the messages that they belong to."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES, gather_lengths, parse_header, runs_of
from qmq.format.hashing import key_hash
from qmq.format.layout import HAS_KEY_HASH, HAS_MORE_KEYS, MAX_KEYS
from qmq.format.run import read_header

Hashes = npt.NDArray[np.uint64]
Ordinals = npt.NDArray[np.uint32]

_NONE: Final = np.empty(0, np.uint64), np.empty(0, np.uint32)
#: The bytes of a header behind its first one when it begins with a list of one key: ``"k"``, a list of one.
_ONE_KEY: Final = b"\xa1k\x91"


def hashes_of(batch: memoryview) -> tuple[Hashes, Ordinals]:
    """Return the hashes of all keys of the batch at the start of *batch*, and for each the ordinal of its message in
    the batch: by message, and in the order of its keys.

    The batch must have passed its check. Headers are read only where messages have several keys. Of a header that
    cannot be decoded, or that has more keys than a message may have, the first keys count.
    """
    header = parse_header(batch)
    flags = header.flags
    if not flags & HAS_KEY_HASH:
        return _NONE
    data = batch[header.data_start : header.size]
    before = COLUMN_BYTES[flags & (HAS_KEY_HASH - 1)]
    if header.runs == 1:
        column = np.frombuffer(data, "<u8", header.messages, before * header.messages)
    else:
        records = runs_of(batch, header)
        counts = records["count"].astype(np.int64)
        starts = np.repeat(records["offset"] + before * counts - 8 * (np.cumsum(counts) - counts), counts)
        # every byte offset seen as the start of an integer
        column = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))[starts + 8 * np.arange(header.messages)]
    found = np.flatnonzero(column)
    if not flags & HAS_MORE_KEYS:
        return column[found], found.astype(np.uint32)
    return _with_more(batch, data, column[found], found)


def _with_more(
    batch: memoryview, data: memoryview, firsts: Hashes, ordinals: npt.NDArray[np.int64]
) -> tuple[Hashes, Ordinals]:
    """Return the hashes of all keys; *firsts* are those of the first keys, of the messages *ordinals*."""
    header = parse_header(batch)
    records = runs_of(batch, header)
    counts, offsets = records["count"].astype(np.int64), records["offset"].astype(np.int64)
    lengths, sizes = gather_lengths(data, offsets, counts)
    ends = np.cumsum(lengths)
    payloads = offsets + COLUMN_BYTES[header.flags] * counts  # where the payload of each run begins
    before = ends[np.cumsum(counts) - 1] - np.add.reduceat(lengths, np.cumsum(counts) - counts)  # bytes in earlier runs
    starts = ((ends - lengths) + np.repeat(payloads - before, counts))[ordinals]
    sizes = sizes[ordinals]
    raw = np.frombuffer(data, np.uint8)
    has_one = sizes > len(_ONE_KEY)
    for ahead, byte in enumerate(_ONE_KEY, 1):
        has_one &= raw[np.minimum(starts + ahead, len(raw) - 1)] == byte
    more, owners = list[int](), list[int]()
    for at in np.flatnonzero(~has_one).tolist():
        start = int(starts[at])
        hashes = [key_hash(key) for key in _keys_in(bytes(data[start : start + int(sizes[at])]))[1:]]
        more += hashes
        owners += [int(ordinals[at])] * len(hashes)
    every = np.concatenate((ordinals, np.array(owners, np.int64)))
    order = np.argsort(every, kind="stable")
    return np.concatenate((firsts, np.array(more, np.uint64)))[order], every[order].astype(np.uint32)


def _keys_in(packed: bytes) -> list[str]:
    """Return the keys in a message header, at most as many as a message may have; none when it cannot be decoded."""
    try:
        keys: list[str] = read_header(packed).get("k", [])
    except BadBatch:
        return []
    return keys[:MAX_KEYS]
