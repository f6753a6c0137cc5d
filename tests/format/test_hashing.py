"""The two hash functions: golden values, also in docs/FORMAT.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from qmq.format.hashing import hash_bytes, key_hash, tag_bits

KEYS = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "order-4421": 0x8993E492FDCCD224,
    "Zürich": 0x85F1DEBCBB1A8279,
    "0123456789abcdef0123456789abcdef": 0x642A94958E71E6C5,
}
TAGS = {("vip",): 0x100, ("vip", "new"): 0x180, ("",): 0x0200_0000, ("grün",): 0x8000_0000}


@pytest.mark.parametrize(("key", "value"), KEYS.items())
def test_key_hash_is_what_it_was(key: str, value: int) -> None:
    assert key_hash(key) == value == hash_bytes(key.encode())


@pytest.mark.parametrize(("tags", "value"), TAGS.items())
def test_tag_bits_are_what_they_were(tags: tuple[str, ...], value: int) -> None:
    assert tag_bits(tags) == value


def test_the_documentation_has_the_same_values() -> None:
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text("utf-8")
    for key, value in KEYS.items():
        assert f'| `"{key}"` | `{value:016x}` |' in text
    for tags, value in TAGS.items():
        shown = ", ".join(f'"{tag}"' for tag in tags)
        assert f"| `{shown}` | `{value:08x}` |" in text


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_key_hash_is_xxh64(key: str) -> None:
    assert key_hash(key) == int.from_bytes(xxhash.xxh64_digest(key.encode(), 0), "big")


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
