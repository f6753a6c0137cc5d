"""Unique texts: their hashes in the headers of messages, and the field of a table that says that a batch has some.

The header of a message with a unique text begins with the hash of that text, ``{"u": 16 bytes, ...}``, so it lies at
one place in each message. Only batches whose table has the field ``unique`` are looked at. Its value is how many
messages the batch had as its client sent it, and the checksum of its data: where the broker left out some, this tells a
repeat of the batch.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import InvalidOption
from qmq.format.batch import COLUMN_BYTES, CheckedBatch, Header, gather_lengths
from qmq.format.layout import BATCH_HEADER_SIZE, MAX_UNIQUE_BYTES, RUN_DTYPE, UNIQUE_HASH_SIZE

#: What stands before the hash in a header: the name "u", and the head of a bin of 16 bytes. The byte before it is the
#: head of the map.
HASH_FIELD: Final = b"\xa1u\xc4\x10"
_HASH_AT: Final = 1 + len(HASH_FIELD)
_HEADER_BYTES: Final = _HASH_AT + UNIQUE_HASH_SIZE
_FIELD_WORD: Final = np.uint32(int.from_bytes(HASH_FIELD, "little"))
_HEADER_SIZE: Final = struct.Struct("<4xH")
#: The characters of a text that an error shows.
_SHOWN: Final = 40

_Ints = npt.NDArray[np.int64]


def hash_of(text: str) -> bytes:
    """Return the hash of a unique text. Raises InvalidOption for one that is no text, empty, or too long."""
    if type(text) is not str:
        raise InvalidOption(f"a unique text must be a str that UTF-8 can hold, not {text!r:.80}")
    try:
        raw = text.encode()
    except UnicodeError:
        raise InvalidOption(f"a unique text must be a str that UTF-8 can hold, not {text!r:.80}") from None
    if not 0 < len(raw) <= MAX_UNIQUE_BYTES:
        raise InvalidOption(
            f"a unique text has 1 to {MAX_UNIQUE_BYTES:,} bytes as UTF-8, not {len(raw):,} as {text[:_SHOWN]!r}; "
            "leave an empty one out"
        )
    return blake2b(raw, digest_size=UNIQUE_HASH_SIZE).digest()


def header_part(unique: bytes) -> bytes:
    """Return the part of a message's header, the first one, that has the hash of its unique text."""
    return HASH_FIELD + unique


def hashes_in(batch: memoryview, header: Header) -> tuple[_Ints, npt.NDArray[np.void]]:
    """Return the ordinals of the messages of a checked batch that have unique texts, ascending, and the hashes of
    these texts: V16.
    """
    columns = COLUMN_BYTES[header.flags]
    data = batch[header.data_start : header.size]
    if header.messages == 1:
        (size,) = _HEADER_SIZE.unpack_from(data)
        found = bytes(data[columns + 1 : columns + _HEADER_BYTES])
        has_text = size >= _HEADER_BYTES and found.startswith(HASH_FIELD)
        hashes = np.frombuffer(found[len(HASH_FIELD) :] if has_text else b"", f"V{UNIQUE_HASH_SIZE}")
        return np.zeros(len(hashes), np.int64), hashes
    runs = np.frombuffer(batch, RUN_DTYPE, header.runs, BATCH_HEADER_SIZE)
    counts, offsets = runs["count"].astype(np.int64), runs["offset"].astype(np.int64)
    lengths, sizes = gather_lengths(data, offsets, counts)
    firsts, starts = np.cumsum(counts) - counts, np.cumsum(lengths) - lengths
    starts += np.repeat(offsets + columns * counts - starts[firsts], counts)
    # every byte offset seen as the start of a word, and of a hash
    words = np.ndarray((max(len(data) - 3, 0),), "<u4", data, 0, (1,))
    ordinals: _Ints = np.flatnonzero(sizes >= _HEADER_BYTES)
    ordinals = ordinals[words[starts[ordinals] + 1] == _FIELD_WORD]
    hashes = np.ndarray((max(len(data) - UNIQUE_HASH_SIZE + 1, 0),), f"V{UNIQUE_HASH_SIZE}", data, 0, (1,))
    return ordinals, hashes[starts[ordinals] + _HASH_AT]


def counts_of(batch: CheckedBatch) -> _Ints:
    """Return how many messages each run of a checked batch has."""
    if batch.runs is None:
        return np.array([batch.header.messages], np.int64)
    counts: _Ints = batch.runs["count"].astype(np.int64)
    return counts
