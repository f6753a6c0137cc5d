"""Messages for unit tests of handlers: they are as a consumer gets them, and record their disposition."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

import qmq
from qmq import testing

ID = "7f0000015191" + "0000" + "0000000000000007" + "0000"


def test_it_has_all_that_a_received_message_has() -> None:
    stored_at = datetime(2026, 5, 1, 12, tzinfo=UTC)
    message = testing.message(
        b"body", subject="shop.order", key="order-1", tags=("vip",), properties={"a": "b"}, attempt=3, sequence=7,
        stored_at=stored_at, replayed=True,
    )  # fmt: skip
    assert isinstance(message, qmq.Message)
    assert (message.body, message.subject, message.key, message.tags) == (b"body", "shop.order", "order-1", ("vip",))
    assert (message.properties, message.attempt, message.sequence) == ({"a": "b"}, 3, 7)
    assert (message.stored_at, message.created_at, message.replayed) == (stored_at, stored_at, True)
    again = testing.message(id=message.id)
    assert (again.id, again.subject, again.body, again.replayed) == (message.id, "test", b"", False)
    assert testing.message().id != message.id


def test_json_is_the_body_and_a_property() -> None:
    message = testing.message(json={"total": 125})
    assert json.loads(message.body) == {"total": 125}
    assert message.properties == {"content-type": "application/json"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": 0}, {"sequence": -1}, {"max_attempts": "3"}, {"subject": "a..b"}, {"id": "x"}, {"key": 7},
        {"body": b"1", "json": 1},
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(qmq.UsageError):
        testing.message(**wrong)


async def test_each_disposition_is_recorded() -> None:
    message = testing.message()
    assert (message.disposition, message.delay, message.reason) == (None, None, "")
    message.ack()
    assert message.disposition == "ack"
    message.release()
    assert message.disposition == "ack", "the first one counts"
    message = testing.message()
    await message.nack(delay=90, reason="no stock")
    assert (message.disposition, message.delay, message.reason) == ("nack", 90, "no stock")
    message = testing.message()
    await message.reject("no such customer")
    assert (message.disposition, message.delay, message.reason) == ("reject", None, "no such customer")
    message = testing.message()
    message.release()
    assert message.disposition == "release"


async def test_a_block_gives_the_disposition() -> None:
    message = testing.message()
    async with message:
        pass
    assert message.disposition == "ack"
    message = testing.message()
    with pytest.raises(qmq.Retry):
        async with message:
            raise qmq.Retry("later", after=300)
    assert (message.disposition, message.delay, message.reason) == ("nack", 300, "later")
    message = testing.message()
    with pytest.raises(KeyError):
        async with message:
            raise KeyError("total")
    assert (message.disposition, message.delay, message.reason) == ("nack", None, "KeyError: 'total'")
    message = testing.message()
    with pytest.raises(asyncio.CancelledError):
        async with message:
            raise asyncio.CancelledError
    assert message.disposition == "nack"
    message = testing.message()
    with pytest.raises(qmq.Retry):
        async with message:
            raise qmq.Retry("not paid yet", after=60, counts=False)
    assert (message.disposition, message.delay) == ("release", 60)
    sync_message = testing.sync_message()
    sync_message.release("1m")
    assert (sync_message.disposition, sync_message.delay) == ("release", 60)


def test_the_last_attempt_is_known() -> None:
    assert not testing.message(attempt=2, max_attempts=3).last_attempt
    assert testing.message(attempt=3, max_attempts=3).last_attempt


def test_messages_without_asyncio_record_too() -> None:
    message = testing.sync_message(b"x", attempt=2)
    assert isinstance(message, qmq.SyncMessage)
    assert (message.body, message.attempt, message.disposition) == (b"x", 2, None)
    message.ack()
    assert message.disposition == "ack"
    message = testing.sync_message()
    message.nack(delay="5m", reason="no stock")
    assert (message.disposition, message.delay, message.reason) == ("nack", 300, "no stock")
    message = testing.sync_message()
    message.release()
    assert message.disposition == "release"
    message = testing.sync_message()
    message.reject("bad")
    assert message.disposition == "reject"
    message = testing.sync_message()
    with pytest.raises(ValueError, match="no total"), message:
        raise ValueError("no total")
    assert (message.disposition, message.reason) == ("nack", "ValueError: no total")


async def test_a_message_is_in_flight_until_it_has_a_disposition() -> None:
    acked, nacked, failed = (testing.message(b"x") for _ in range(3))
    assert acked.in_flight
    acked.ack()
    await nacked.nack()
    with suppress(ValueError):
        async with failed:
            assert failed.in_flight
            raise ValueError("no card")
    assert not any(one.in_flight for one in (acked, nacked, failed))
    released = testing.sync_message(b"x")
    assert released.in_flight
    released.release()
    assert not released.in_flight
