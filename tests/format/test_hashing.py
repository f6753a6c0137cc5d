"""The hash functions: golden values, also in docs/FORMAT.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from qmq.format.hashing import check_of, checks_of, hash_bytes, key_hash, tag_bits

KEYS = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "order-4421": 0x8993E492FDCCD224,
    "Zürich": 0x85F1DEBCBB1A8279,
    "0123456789abcdef0123456789abcdef": 0x642A94958E71E6C5,
    "order-0000086416R5QPH15t": 1,  # its XXH64 is 0
}
TAGS = {("vip",): 0x100, ("vip", "new"): 0x180, ("",): 0x0200_0000, ("grün",): 0x8000_0000}
CHECKS = {b"": 0x38D394C2, b"hello": 0x5C62DCFD, b"123456789": 0x67A17DFF, b"0123456789abcdef" * 64: 0xF24EA528}


@pytest.mark.parametrize(("key", "value"), KEYS.items())
def test_golden_key_hashes(key: str, value: int) -> None:
    assert key_hash(key) == value == (hash_bytes(key.encode()) or 1)


@pytest.mark.parametrize(("tags", "value"), TAGS.items())
def test_golden_tag_bits(tags: tuple[str, ...], value: int) -> None:
    assert tag_bits(tags) == value


@pytest.mark.parametrize(("message", "value"), CHECKS.items())
def test_golden_checks(message: bytes, value: int) -> None:
    assert check_of(message, 0) == value == check_of(memoryview(message), 0)
    assert check_of(message, 0xF0F0F0F0) == value ^ 0xF0F0F0F0


def test_checks_of_many_are_those_of_each() -> None:
    folds = [number * 0x0101_0101 for number in range(len(CHECKS))]
    assert checks_of(CHECKS, None, len(CHECKS)).tolist() == list(CHECKS.values())
    expected = list(map(check_of, CHECKS, folds))
    assert checks_of(CHECKS, folds, len(CHECKS)).tolist() == expected
    assert checks_of(CHECKS, np.array(folds, np.uint32), len(CHECKS)).tolist() == expected


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_check_shows_every_single_bit(message: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    flipped = bytearray(message)
    flipped[bit >> 3] ^= 1 << (bit & 7)
    assert check_of(bytes(flipped), 0) != check_of(message, 0)


def test_the_documentation_has_the_same_values() -> None:
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text("utf-8")
    for key, value in KEYS.items():
        assert f'| `"{key}"` | `{value:016x}` |' in text
    for tags, value in TAGS.items():
        shown = ", ".join(f'"{tag}"' for tag in tags)
        assert f"| `{shown}` | `{value:08x}` |" in text
    for message, value in CHECKS.items():
        assert f"`{message[:16].decode()}`{' 64 times' * (len(message) > 16)} | `{value:08x}` |" in text


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_key_hash_is_xxh64(key: str) -> None:
    assert key_hash(key) == (int.from_bytes(xxhash.xxh64_digest(key.encode(), 0), "big") or 1)


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=4), max_size=5))
def test_tag_bits_is_the_union_of_one_bit_a_tag(tags: list[str]) -> None:
    bits = tag_bits(tags)
    assert 0 <= bits < 1 << 32
    union = 0
    for tag in tags:
        single = tag_bits([tag])
        assert single.bit_count() == 1
        union |= single
    assert bits == union
