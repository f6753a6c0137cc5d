"""Traces at real brokers: over several of them, of copies at another broker, without asyncio, and over a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import qmq
from tests.net.several import connections, several, until


async def test_the_states_and_events_of_a_message(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        receipt = await client.send("shop.order", b"it", key="order-1")
        async with client.subscribe("shop.", group="billing", consumer="one", retry_delays=["1h"]) as consumer:
            (message,) = await consumer.pull(1, timeout=30)
            await message.nack(reason="no card")
            trace = await client.trace(receipt.id)
            assert trace.message is not None
            assert (trace.id, trace.message.body, trace.missed, trace.is_partial) == (receipt.id, b"it", (), False)
            (group,) = trace.groups
            assert (group.group, group.state, group.attempts, group.reason) == ("billing", "retrying", 1, "no card")
            assert group.due_at is not None
            assert group.since is not None
            assert (group.due_at - group.since).total_seconds() == 3_600
            assert [(event.kind, event.consumer, event.reason) for event in group.events] == [
                ("handed_out", "one", ""),
                ("nacked", "one", "no card"),
            ]
            assert receipt.stored_at <= group.events[0].time <= group.events[1].time == group.since
            qmq_broker.clock.advance("1h")
            (message,) = await consumer.pull(1, timeout=30)
            await message.ack()
            (group,) = (await client.trace(receipt.id)).groups
            assert (group.state, group.consumer, group.attempts) == ("acked", "one", 2)
        await client.cancel((later := await client.send("shop.order", b"never", delay="1h")).id)
        assert [group.state for group in (await client.trace(later.id)).groups] == ["cancelled"]


async def test_a_delayed_message_is_traced_by_its_first_id(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client, client.subscribe("shop.", group="g") as consumer:
        receipt = await client.send("shop.order", b"later", delay="1h")
        (group,) = (await client.trace(receipt.id)).groups
        assert (group.state, group.since) == ("delayed", None)
        qmq_broker.clock.advance("1h")
        (message,) = await consumer.pull(1, timeout=30)
        (group,) = (await client.trace(receipt.id)).groups
        assert group.state == "in_flight"
        await message.ack()
        (group,) = (await client.trace(receipt.id)).groups
        assert (group.state, [event.kind for event in group.events]) == ("acked", ["handed_out", "acked"])


async def test_ids_that_name_nothing_are_clear_errors(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        receipt = await client.send("a", b"1")
        for name in ("", "no id", receipt.id[:-1], receipt.id + "0"):
            with pytest.raises(qmq.InvalidOption, match="32 hex digits"):
                await client.trace(name)
        with pytest.raises(qmq.UnknownMessage, match="of store"):
            await client.trace("ff" * 16)
        with pytest.raises(qmq.UnknownMessage, match="no batch"):
            await client.trace(receipt.id[:-8] + "ffffffff")


def test_without_asyncio(qmq_broker: qmq.testing.LocalBroker) -> None:
    with qmq.connect_sync() as client:
        receipt = client.send("a", b"1")
        with client.subscribe("a", group="g"):
            (group,) = client.trace(receipt.id).groups
        assert (group.group, group.state) == ("g", "waiting")


async def test_a_burst_of_traces_is_answered_in_turn(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        receipt = await client.send("a", b"1")
        async with client.subscribe("a", group="g"):
            traces = await asyncio.gather(*(client.trace(receipt.id) for _ in range(40)))
        assert {group.state for trace in traces for group in trace.groups} == {"waiting"}


async def test_a_message_that_was_handed_over_is_traced_at_both_brokers(tmp_path: Path) -> None:
    async with (
        several(tmp_path, session_timeout_ms=600_000) as brokers,
        qmq.connect(brokers.url, failover_after=0.2, admin_timeout=1.0) as client,
        client.subscribe("a", group="g", retry_delays=["1h"]) as consumer,
    ):
        await brokers.stop(1)
        receipt = await client.send("a", b"it")
        (message,) = await consumer.pull(timeout=30)
        await brokers.start(1)
        await until(lambda: connections(client) == [True, True], "it is connected to both")
        await brokers.stop(0)
        await message.nack(reason="broke")
        trace = await client.trace(receipt.id)
        (group,) = trace.groups
        assert (group.state, group.reason) == ("retrying", "broke")
        assert [event.kind for event in group.events] == ["handed_over"]
        assert len(trace.missed) == 1, "the broker of the message is away"
        await brokers.start(0)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        trace = await client.trace(receipt.id)
        assert len({group.broker for group in trace.groups}) == 2
        assert trace.missed == ()
        with pytest.raises(qmq.UnknownMessage, match="no broker here"):
            await client.trace("ff" * 16)
