"""The two hash functions that the format fixes: of keys and of tags. Golden values stand in docs/FORMAT.md."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def key_hash(key: str) -> int:
    """64 bits: XXH64 with seed 0 over the key's UTF-8 bytes."""
    return xxhash.xxh64_intdigest(key.encode())


def tag_bits(tags: Iterable[str]) -> int:
    """32 bits: for each tag, the bit whose number is the low 5 bits of its XXH64."""
    bits = 0
    for tag in tags:
        bits |= 1 << (xxhash.xxh64_intdigest(tag.encode()) & 31)
    return bits
