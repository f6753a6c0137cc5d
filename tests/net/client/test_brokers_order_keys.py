"""Order keys and several brokers: each key has one broker, the same for all clients, also while that one is away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from qmq.net.client.address import Address
from qmq.net.client.brokers import OrderKeyBrokers
from tests.broker_process import BrokerProcess

KEYS = [f"order-{number}" for number in range(200)]
ADDRESSES = [Address("127.0.0.1", 20_881 + number) for number in range(4)]


def brokers_of(addresses: list[Address]) -> dict[str, Address]:
    brokers = OrderKeyBrokers(addresses)
    return {key: addresses[brokers.broker_of(key)] for key in KEYS}


def test_the_choice_is_by_address_and_moves_few_keys() -> None:
    of_all = brokers_of(ADDRESSES)
    assert of_all == brokers_of(ADDRESSES[::-1])
    counts = [list(of_all.values()).count(address) for address in ADDRESSES]
    assert min(counts) > 25
    without = brokers_of(ADDRESSES[:3])
    assert all(without[key] == broker for key, broker in of_all.items() if broker != ADDRESSES[3])
    upper = [Address("LocalHost", 1), Address("other", 1)]
    lower = [Address("localhost", 1), Address("other", 1)]
    assert [one.host.lower() for one in brokers_of(upper).values()] == [one.host for one in brokers_of(lower).values()]


def test_golden_choices() -> None:
    """What PROTOCOL.md says, so that clients in other languages and of other versions agree."""
    brokers = OrderKeyBrokers(ADDRESSES)
    assert [brokers.broker_of(f"order-{number}") for number in range(8)] == GOLDEN
    assert brokers.broker_of("ž") == GOLDEN_OTHER


GOLDEN = [0, 0, 2, 0, 2, 3, 3, 0]
GOLDEN_OTHER = 3

PROGRAM = """
import asyncio, sys, qmq
async def main(url):
    async with qmq.connect(url) as client:
        for number in range(40):
            print((await client.send("a.b", b"%d" % number, order_key=f"order-{number}")).id[:12])
asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def several(tmp_path: Path) -> Iterator[list[BrokerProcess]]:
    brokers = [BrokerProcess(tmp_path / str(number)) for number in range(2)]
    for broker in brokers:
        broker.start()
    yield brokers
    for broker in brokers:
        broker.close()


def url_of(brokers: list[BrokerProcess]) -> str:
    return ",".join([brokers[0].url, *(broker.url.rpartition("/")[2] for broker in brokers[1:])])


async def test_every_process_sends_a_key_to_the_same_broker(several: list[BrokerProcess]) -> None:
    urls = url_of(several), url_of(several[::-1])
    found = []
    for url in urls:
        command = [sys.executable, "-c", PROGRAM, url]
        found.append(await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True))
    stores = found[0].stdout.split()
    assert stores == found[1].stdout.split()
    assert len(set(stores)) == 2
    async with qmq.connect(urls[0], durability="append") as client:
        keys = [f"order-{number}" for number in range(40)]
        receipts = await client.send_many("a.b", [b""] * 40, order_keys=keys)
        assert [receipt.id[:12] for receipt in receipts] == stores
        tickets = [client.send_nowait("a.b", b"", order_key=key) for key in keys]
        await client.flush()
        assert len(set(tickets)) == 40
        plain = {(await client.send("a.b", b"", key=key)).id[:12] for key in keys}
        assert len(plain) == 1  # other messages go to one broker


async def test_sends_wait_for_their_broker_and_fail_after_a_while(several: list[BrokerProcess]) -> None:
    addresses = [Address("127.0.0.1", int(broker.url.rpartition(":")[2])) for broker in several]
    brokers = OrderKeyBrokers(addresses)
    here, there = (next(key for key in KEYS if brokers.broker_of(key) == number) for number in range(2))
    async with qmq.connect(url_of(several), send_timeout=2.0, failover_after=0.2) as client:
        first = await client.send("a.b", b"1", order_key=there)
        several[1].kill()
        waiting = asyncio.ensure_future(client.send("a.b", b"2", order_key=there))
        await client.send("a.b", b"", order_key=here)  # others go on
        await client.send("a.b", b"")
        with pytest.raises(qmq.SendFailed, match="no other broker could keep the order") as failed:
            await waiting
        assert failed.value.failures[0].error.retryable
        client.send_nowait("a.b", b"3", order_key=there)
        several[1].start()
        await client.flush()
        last = await client.send("a.b", b"4", order_key=there)
        assert (last.id[:12], first.sequence, last.sequence) == (first.id[:12], 0, 2)


async def test_a_failed_message_with_an_order_key_waits_for_its_own_broker(several: list[BrokerProcess]) -> None:
    addresses = [Address("127.0.0.1", int(broker.url.rpartition(":")[2])) for broker in several]
    brokers = OrderKeyBrokers(addresses)
    there = next(key for key in KEYS if brokers.broker_of(key) == 1)
    async with (
        qmq.connect(url_of(several), failover_after=0.1) as client,
        client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer,
    ):
        await client.send_many("a.b", [b"1", b"2"], order_key=there)
        (message,) = await consumer.pull(1, timeout=20)
        assert message.body == b"1"
        several[1].kill()
        nack = asyncio.ensure_future(message.nack())
        assert await consumer.pull(1, timeout=1) == []  # no other broker got it
        several[1].start()
        await nack
        found = [again for _ in range(2) for again in await consumer.pull(1, timeout=20)]
        assert [(one.body, one.attempt) for one in found] == [(b"1", 2), (b"2", 1)]
