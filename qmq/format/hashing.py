"""The hash functions of the format: of keys, tags and messages. docs/FORMAT.md has golden values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

#: 64 bits: XXH64 with seed 0.
hash_bytes: Final[Callable[[bytes], int]] = xxhash.xxh64_intdigest

#: 64 bits: XXH3 with seed 0. A call costs a third of a crc32c call, which would be most of the cost of a small message.
_hash_message: Final[Callable[[bytes | memoryview], int]] = xxhash.xxh3_64_intdigest
_LOW: Final = 0xFFFFFFFF

#: The hash of a key whose XXH64 is 0, since 0 in the column says that a message has no key.
HASH_FOR_ZERO: Final = 1

#: u32 a message.
Folds = npt.NDArray[Any] | Sequence[int]


def key_hash(key: str) -> int:
    """Return the 64-bit hash of a key: XXH64 with seed 0 over its UTF-8 bytes, but never 0."""
    return hash_bytes(key.encode()) or HASH_FOR_ZERO


def tag_bits(tags: Iterable[str]) -> int:
    """Return the 32 bits of tags: for each, the bit whose number is the low 5 bits of its XXH64."""
    bits = 0
    for tag in tags:
        bits |= 1 << (hash_bytes(tag.encode()) & 31)
    return bits


def check_of(message: bytes | memoryview, fold: int) -> int:
    """Return a message's own checksum of 32 bits: the low bits of XXH3 over header and body, xored with *fold*.

    The fold is of the message's columns (see `build.fold_of`), so bad bytes in a column fail the check too.
    """
    return _hash_message(message) & _LOW ^ fold


def checks_of(messages: Iterable[bytes | memoryview], folds: Folds | None, count: int) -> npt.NDArray[np.uint32]:
    """Return ``check_of`` of *count* messages; *folds* None: all folds are 0."""
    checks = np.fromiter(map(_hash_message, messages), np.uint64, count).astype("<u4")
    return checks if folds is None else checks ^ np.asarray(folds, "<u4")
