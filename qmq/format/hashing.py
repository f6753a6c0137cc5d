"""The hash functions that the format fixes: of keys, of tags and of messages. Golden values stand in docs/FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

#: 64 bits: XXH64 with seed 0.
hash_bytes: Final[Callable[[bytes], int]] = xxhash.xxh64_intdigest

#: 64 bits: XXH3 with seed 0. A call takes a third of one of crc32c, which is most of what a small message costs.
_hash_message: Final[Callable[[bytes | memoryview], int]] = xxhash.xxh3_64_intdigest
_LOW: Final = 0xFFFFFFFF

#: u32 a message.
Folds = npt.NDArray[Any] | Sequence[int]


def key_hash(key: str) -> int:
    """64 bits: XXH64 with seed 0 over the key's UTF-8 bytes."""
    return hash_bytes(key.encode())


def tag_bits(tags: Iterable[str]) -> int:
    """32 bits: for each tag, the bit whose number is the low 5 bits of its XXH64."""
    bits = 0
    for tag in tags:
        bits |= 1 << (hash_bytes(tag.encode()) & 31)
    return bits


def check_of(message: bytes | memoryview, fold: int) -> int:
    """A message's own checksum, 32 bits: the low ones of XXH3 over its header and body, xored with a *fold* of its
    columns (see `build.fold_of`), so that a rotten column shows as well.
    """
    return _hash_message(message) & _LOW ^ fold


def checks_of(messages: Iterable[bytes | memoryview], folds: Folds | None, count: int) -> npt.NDArray[np.uint32]:
    """``check_of`` for *count* messages; *folds* None: all are 0."""
    checks = np.fromiter(map(_hash_message, messages), np.uint64, count).astype("<u4")
    return checks if folds is None else checks ^ np.asarray(folds, "<u4")
