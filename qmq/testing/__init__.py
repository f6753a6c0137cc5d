"""Tests of programs that use QMQ: messages for handlers, and a real broker whose time a test moves.

A handler is a function of a message, so a unit test needs no broker::

    async def test_an_order_is_charged() -> None:
        message = qmq.testing.message(json={"total": 125}, subject="shop.order.created", key="order-4421")
        async with message:
            await charge(message)
        assert message.disposition == "ack"

A test of the whole needs one: a broker in a temporary directory, with the real rules, files and network. pytest has it
as the fixture ``qmq_broker``, without a conftest; every other program as a block, with ``with`` or ``async with``::

    async def test_a_failed_order_comes_again(qmq_broker: qmq.testing.LocalBroker) -> None:
        async with qmq.connect() as client:  # QMQ_SERVER is the test's broker
            await client.send("shop.order.created", b"{}")
            async with client.subscribe("shop.order.", group="billing", retry_delays=["5m"]) as consumer:
                (message,) = await consumer.pull(1)
                await message.nack()
                qmq_broker.clock.advance("5m")
                (again,) = await consumer.pull(1)
                assert again.attempt == 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qmq.net.client.options import Priority
    from qmq.testing.local_broker import BrokerClock, LocalBroker
    from qmq.testing.messages import RecordedMessage, RecordedSyncMessage

__all__ = ["BrokerClock", "LocalBroker", "RecordedMessage", "RecordedSyncMessage", "broker", "message", "sync_message"]

#: Names that are imported at their first use: pytest imports this package in suites that use none of it.
_LAZY: Final = {
    "BrokerClock": "qmq.testing.local_broker",
    "LocalBroker": "qmq.testing.local_broker",
    "RecordedMessage": "qmq.testing.messages",
    "RecordedSyncMessage": "qmq.testing.messages",
}

if not TYPE_CHECKING:  # a type checker would accept every name because of it

    def __getattr__(name: str) -> Any:
        module = _LAZY.get(name)
        if module is None:
            raise AttributeError(f"module 'qmq.testing' has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(module), name)
        return value


def message(
    body: bytes = b"",
    *,
    subject: str = "test",
    json: object = None,
    key: str | None = None,
    keys: Sequence[str] | None = None,
    tags: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
    priority: Priority | None = None,
    order_key: str | None = None,
    attempt: int = 1,
    max_attempts: int = 16,
    sequence: int = 0,
    id: str | None = None,
    stored_at: datetime | None = None,
    replayed: bool = False,
) -> RecordedMessage:
    """Return a message as a consumer of a group gets it, which records its disposition.

    Give *body*, or *json*: a value that becomes the body and sets the property ``content-type``. *attempt* counts from
    1; with *max_attempts* it is the last one. Without *id* the message gets a random one; without *stored_at* it was
    stored now. Raises UsageError, as a send of such a message does.

        >>> order = message(json={"total": 125}, key="order-4421", attempt=2)
        >>> order.ack()
        >>> order.disposition
        'ack'
    """
    from qmq.testing.messages import MessageFields, RecordedMessage, recorded

    fields = MessageFields(
        body, subject, json, key, keys, tags, properties, priority, order_key, attempt, max_attempts, sequence, id,
        stored_at, replayed,
    )  # fmt: skip
    return recorded(RecordedMessage, fields)


def sync_message(
    body: bytes = b"",
    *,
    subject: str = "test",
    json: object = None,
    key: str | None = None,
    keys: Sequence[str] | None = None,
    tags: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
    priority: Priority | None = None,
    order_key: str | None = None,
    attempt: int = 1,
    max_attempts: int = 16,
    sequence: int = 0,
    id: str | None = None,
    stored_at: datetime | None = None,
    replayed: bool = False,
) -> RecordedSyncMessage:
    """Return a message as a consumer of ``connect_sync`` gets it, which records its disposition. See ``message``.

    >>> order = sync_message(b"{}")
    >>> order.nack(delay="5m", reason="no stock")
    >>> order.disposition, order.delay, order.reason
    ('nack', 300.0, 'no stock')
    """
    from qmq.testing.messages import MessageFields, RecordedSyncMessage, recorded

    fields = MessageFields(
        body, subject, json, key, keys, tags, properties, priority, order_key, attempt, max_attempts, sequence, id,
        stored_at, replayed,
    )  # fmt: skip
    return recorded(RecordedSyncMessage, fields)


def broker(**settings: Any) -> LocalBroker:
    """Return a real broker in a temporary directory: use it with ``with`` or ``async with``, within which it runs.

    It listens on a free port of 127.0.0.1, and in the block QMQ_SERVER is its URL, so that ``qmq.connect()`` finds it.
    Files that consumers keep lie in its directory, too. *settings* are those of ``qmq serve``, such as
    ``max_message_bytes="1 MiB"``. Raises InvalidOption at once. It needs what ``qmq serve`` needs.

        >>> with broker() as here:
        ...     print(here.url.rpartition(":")[0])
        qmq://127.0.0.1
    """
    from qmq.testing.local_broker import LocalBroker

    return LocalBroker(settings)
