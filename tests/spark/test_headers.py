"""Headers side by side give what ``read_header`` gives one by one; headers that they cannot decode they report as
odd.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BadBatch
from qmq.format.build import make_header
from qmq.format.run import read_header
from qmq_spark.headers import KEYS, ORDER_KEYS, PROPERTIES, TAGS, walk

TEXT = st.text(max_size=40)
MADE = st.builds(
    lambda key, tags, properties, order_key: make_header(key, tags, properties, order_key=order_key).packed,
    st.lists(st.text(min_size=1, max_size=40), max_size=4),
    st.lists(TEXT, max_size=20),
    st.dictionaries(TEXT, TEXT, max_size=20),
    st.none() | st.text(min_size=1, max_size=40),
)
STRANGE = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([{"k": []}, {"x": 1, "k": ["a"]}, {"t": ["a"], "k": ["b"]}, {"p": {}}, {"k": [1]}, [], {}]).map(
        msgpack.packb
    ),
    st.sampled_from(["k" * 300, "k" * 70_000]).map(lambda key: bytes(msgpack.packb({"k": [key]}))),
)


def walked(headers: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the decoded headers; None for odd ones. Other bytes lie between them."""
    window = b"".join(b"\xc1" + header for header in headers)
    sizes = np.array([len(header) for header in headers], np.int64)
    ends = np.cumsum(sizes + 1)
    found = walk(memoryview(window), ends - sizes, ends)
    made: list[dict[str, Any] | None] = [{} for _ in headers]
    for field, name in ((KEYS, "k"), (ORDER_KEYS, "o"), (TAGS, "t"), (PROPERTIES, "p")):
        for message, start, end in zip(*(column.tolist() for column in found.fields[field]), strict=True):
            header = made[message]
            assert header is not None
            header.setdefault(name, []).append(window[start:end].decode("utf-8", "surrogateescape"))
    for header in made:
        if header and "p" in header:
            header["p"] = dict(zip(header["p"][::2], header["p"][1::2], strict=True))
    for odd in found.odd.tolist():
        made[odd] = None
    return made


@given(st.lists(MADE, min_size=1, max_size=30))
def test_what_clients_make_is_found(headers: list[bytes]) -> None:
    assert walked(headers) == [read_header(header) for header in headers]


@given(st.lists(MADE | STRANGE, min_size=1, max_size=30))
def test_what_is_not_known_is_said(headers: list[bytes]) -> None:
    for header, found in zip(headers, walked(headers), strict=True):
        if found is None or _lacks_text(header):  # that a text is no UTF-8 is not seen here
            continue
        assert found == {name: value for name, value in read_header(header).items() if value}, header


def _lacks_text(header: bytes) -> bool:
    try:
        read_header(header)
    except BadBatch as error:
        return "utf-8" in str(error)
    return False


def test_strange_headers_are_odd() -> None:
    strange = [b"\x81", b"\xc0", msgpack.packb({"k": [1]}), msgpack.packb({"x": "y"}), b"\x81\xa1k\x91\xa9short"]
    assert walked([b"", *strange]) == [{}, None, None, None, None, None]
