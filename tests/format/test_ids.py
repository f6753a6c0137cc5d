"""Message ids: 16 bytes, shown as hex that sorts by store, partition and position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidOption
from qmq.format.ids import MessageId
from qmq.format.layout import MESSAGE_ID_SIZE

ids = st.builds(
    MessageId,
    st.binary(min_size=6, max_size=6),
    st.integers(0, (1 << 16) - 1),
    st.integers(0, (1 << 64) - 1),
)


def test_golden_id() -> None:
    text = "7f0000015191000300000100000000ff"
    assert str(MessageId(bytes.fromhex("7f0000015191"), 3, (1 << 40) + 255)) == text
    assert MessageId.parse(text) == (bytes.fromhex("7f0000015191"), 3, (1 << 40) + 255)


@given(ids)
def test_round_trip(message: MessageId) -> None:
    text = str(message)
    assert len(text) == 2 * MESSAGE_ID_SIZE
    assert MessageId.parse(text) == message == MessageId.parse(text.upper())


@given(ids, ids)
def test_text_sorts_as_the_id_does(one: MessageId, other: MessageId) -> None:
    assert (str(one) < str(other)) == (tuple(one) < tuple(other))


@pytest.mark.parametrize("text", ["", "7f", "7f0000015191000300000100000000", "zz" * 16, "7f0000015191" * 3, "é" * 32])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="is not a message id; give its 32 hex digits"):
        MessageId.parse(text)


@pytest.mark.parametrize("text", [" " + "00" * 16, "00 " * 15 + "00", "00" * 15 + "0 0"])
def test_spaces_are_no_digits(text: str) -> None:
    with pytest.raises(InvalidOption):
        MessageId.parse(text)
