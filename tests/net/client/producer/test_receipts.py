"""Receipts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from qmq.format.ids import MessageId
from qmq.net.client.producer.receipts import Receipt, Receipts, StoredSpan, utc_from_us

SPAN = StoredSpan("a.b", 3, b"store1", 2, 1_000, 50, 1_700_000_000_123_456)
NEXT = StoredSpan("a.b", 2, b"store1", 2, 2_000, 53, 1_700_000_000_123_457)


def test_a_receipt_says_where_its_message_is() -> None:
    receipt = Receipt(SPAN, 2)
    assert MessageId.parse(receipt.id) == MessageId(b"store1", 2, 1_002)
    assert (receipt.subject, receipt.sequence, receipt.stored_at_us) == ("a.b", 52, 1_700_000_000_123_456)
    assert receipt.stored_at == datetime(2023, 11, 14, 22, 13, 20, 123_456, tzinfo=UTC)
    assert receipt.id in repr(receipt)


def test_of_some_messages_no_sequence_is_known() -> None:
    receipts = Receipts([SPAN._replace(sequence=None), NEXT])
    assert [receipt.sequence for receipt in receipts] == [None, None, None, 53, 54]
    assert SPAN.part(1, 2) == SPAN._replace(messages=2, position=1_001, sequence=51)
    assert SPAN._replace(sequence=None).part(1, 2).sequence is None


def test_receipts_of_the_same_message_are_equal() -> None:
    assert Receipt(SPAN, 1) == Receipt(SPAN._replace(position=1_001))
    assert Receipt(SPAN, 1) != Receipt(SPAN, 2)
    assert len({Receipt(SPAN, 1), Receipt(SPAN, 1), Receipt(SPAN, 0)}) == 2
    assert Receipt(SPAN) != "receipt"


def test_receipts_are_a_sequence_over_spans() -> None:
    receipts = Receipts([SPAN, NEXT])
    assert len(receipts) == 5
    assert [receipt.sequence for receipt in receipts] == [50, 51, 52, 53, 54]
    assert [receipts[i].id for i in range(5)] == [receipt.id for receipt in receipts]
    assert receipts[-1].sequence == 54
    assert [receipt.sequence for receipt in receipts[1:4]] == [51, 52, 53]
    assert receipts[3] in receipts
    for index in (5, -6):
        with pytest.raises(IndexError, match="of 5"):
            receipts[index]
    assert "5" in repr(receipts)
    assert list(Receipts(())) == []


def test_times_keep_their_microseconds() -> None:
    assert utc_from_us(253_402_300_799_999_999).microsecond == 999_999
    assert utc_from_us(0) == datetime(1970, 1, 1, tzinfo=UTC)
