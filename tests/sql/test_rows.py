"""A message as a row: what a relay sends of it, however late."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from qmq.sql.rows import SHARDS, NewRow, OutboxRow, new_row, send_options


def sent(row: NewRow, later: float) -> dict[str, object]:
    """The options with which it is sent *later* seconds after it was made."""
    return send_options(OutboxRow(1, row.uid, row.subject, row.body, row.options, 0, None), time.time() + later)


def test_times_count_from_the_call_not_from_the_send() -> None:
    reminder = new_row("shop.reminder", b"", transaction=0, delay="2h", expires_in="1h")
    assert sent(reminder, 3_600) == {"deliver_at": pytest.approx(time.time() + 7_200, abs=60), "expires_in": 3_600}
    offer = new_row("shop.offer", b"", transaction=0, expires_in="30m")
    assert sent(offer, 600)["expires_in"] == pytest.approx(1_200, abs=60)
    assert sent(offer, 3_600) == {"expires_in": 0.001}  # it expires, and is not lost without a trace


def test_options_come_through() -> None:
    row = new_row(
        "shop.order", bytearray(b"1"), transaction=0, keys=["a", "b", "a"], tags=["eu"], properties={"p": "ü"},
        deliver_at=datetime(2027, 1, 1, tzinfo=UTC), order_key="o", durability="append",
    )  # fmt: skip
    assert row.body == b"1"
    assert sent(row, 0) == {
        "keys": ["a", "b"], "tags": ["eu"], "properties": {"p": "ü"}, "deliver_at": 1798761600.0, "order_key": "o",
        "durability": "append",
    }  # fmt: skip
    assert sent(new_row("shop.order", b"", transaction=0, priority="high"), 0) == {"priority": "high"}
    row = new_row("shop.order", b"", transaction=0, priority="high", order_key="order-1")
    assert sent(row, 0) == {"priority": "high", "order_key": "order-1"}
    assert new_row("shop.order", b"", transaction=0, delay=0).options is None


def test_shards_are_of_the_order_key_then_the_key_then_the_transaction() -> None:
    def shard(transaction: int, **options: str) -> int:
        return new_row("shop.order", b"", transaction=transaction, **options).shard  # type: ignore[arg-type]

    assert shard(1, key="a") == shard(2, key="a") == shard(3, order_key="a", key="b")
    assert shard(5) == shard(5) == shard(5 + SHARDS)
    assert len({shard(0, key=str(number)) for number in range(300)}) == SHARDS
