"""The two hash functions that the format fixes: of keys and of tags. Golden values stand in docs/FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import xxhash

#: 64 bits: XXH64 with seed 0.
hash_bytes: Final[Callable[[bytes], int]] = xxhash.xxh64_intdigest


def key_hash(key: str) -> int:
    """64 bits: XXH64 with seed 0 over the key's UTF-8 bytes."""
    return hash_bytes(key.encode())


def tag_bits(tags: Iterable[str]) -> int:
    """32 bits: for each tag, the bit whose number is the low 5 bits of its XXH64."""
    bits = 0
    for tag in tags:
        bits |= 1 << (hash_bytes(tag.encode()) & 31)
    return bits
