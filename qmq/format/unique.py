"""Unique texts: their hashes in the headers of messages, and the field of a table that says that a batch has some.

The header of a message with a unique text begins with the hash of that text, ``{"u": 16 bytes, ...}``, so it lies at
one place in each message. Only batches whose table has the field ``unique`` are looked at. Its value is how many
messages the batch had as its client sent it, and the checksum of its data: where the broker left out some, this tells a
repeat of the batch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
#: A hash without input: to copy it takes half as long as to make one.
_NO_TEXT: Final = blake2b(digest_size=UNIQUE_HASH_SIZE)
#: The characters of a text that an error shows.
_SHOWN: Final = 40

_Ints = npt.NDArray[np.int64]


def hash_of(text: object) -> bytes:
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
    hashing = _NO_TEXT.copy()
    hashing.update(raw)
    return hashing.digest()


def hashes_of(texts: Sequence[object]) -> list[bytes]:
    """Return ``hash_of`` of each text."""
    sizes = set(map(len, texts)) if set(map(type, texts)) == {str} else {0}  # type: ignore[arg-type]  # all are text
    is_plain = min(sizes, default=0) and max(sizes) <= MAX_UNIQUE_BYTES and "".join(texts).isascii()  # type: ignore[arg-type]
    if not is_plain:
        return list(map(hash_of, texts))
    copy, hashes = _NO_TEXT.copy, list[bytes]()
    for raw in map(str.encode, texts):  # type: ignore[arg-type]
        hashing = copy()
        hashing.update(raw)
        hashes.append(hashing.digest())
    return hashes


def hash_in_data(data: memoryview, flags: int) -> bytes | None:
    """Return the hash of the unique text of the only message in the data of a checked batch; None if it has none."""
    (size,) = _HEADER_SIZE.unpack_from(data)
    columns = COLUMN_BYTES[flags]
    found = bytes(data[columns + 1 : columns + _HEADER_BYTES])
    return found[len(HASH_FIELD) :] if size >= _HEADER_BYTES and found.startswith(HASH_FIELD) else None


def unique_hashes(batch: memoryview, header: Header) -> tuple[_Ints, npt.NDArray[np.void]]:
    """Return the ordinals of the messages of a checked batch that have unique texts, ascending, and the hashes of
    these texts: V16.
    """
    columns = COLUMN_BYTES[header.flags]
    data = batch[header.data_start : header.size]
    if header.messages == 1:
        hashes = np.frombuffer(hash_in_data(data, header.flags) or b"", f"V{UNIQUE_HASH_SIZE}")
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
