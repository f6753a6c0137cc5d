"""Priorities and order keys: all ways to send them, through a real broker and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qmq
import qmq.testing
from qmq.format.hashing import key_hash
from qmq.format.layout import ORDER_SLOTS
from tests.broker_process import running_broker


def seen(message: qmq.Message) -> tuple[bytes, str, str | None]:
    return message.body, message.priority, message.order_key


async def test_all_ways_to_send_keep_priority_and_order_key(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url, durability="append") as client,
        client.subscribe("a.", start="first") as consumer,
    ):
        await client.send("a.b", b"0", priority="high")
        await client.send("a.b", b"1", priority=0)
        await client.send("a.b", b"2", priority=1)
        await client.send("a.b", b"3", order_key="order-1", key="k", tags=["t"])
        await client.send_many("a.b", [b"4", b"5"], priority=2, keys=["x", None])
        receipts = await client.send_many("a.b", [b"6", b"7", b"8"], order_keys=["order-1", "ž" * 300, "order-1"])
        await client.send_many("a.b", [b"9"], order_key="order-2", keys=["y"], properties={"p": "1"})
        for number, key in enumerate(("order-1", "order-2", "order-1", "order-3"), 10):
            client.send_nowait("a.b", b"%d" % number, order_key=key)
        client.send_nowait("a.c", b"14", priority="low")
        client.send_nowait("a.c", b"15", priority="low")
        client.send_nowait("a.c", b"16", delay=0.001, order_key="order-1")
        client.send_nowait("a.c", b"17", delay=0.001, priority="high")
        await client.send("a.b", b"18", priority="high", order_key="order-1")
        await client.send_many("a.b", [b"19", b"20"], priority="low", order_keys=["order-1", "order-9"])
        await client.send_many("a.b", [b"21"], priority="low", order_key="order-9", keys=["y"])
        for number in (22, 23, 24):
            client.send_nowait("a.b", b"%d" % number, priority="high", order_key="order-9")
        await client.flush()
        found = [message for _ in range(25) for message in await consumer.pull(1, timeout=10)]
        with pytest.raises(qmq.UsageError, match="priority must be"):
            client.send_nowait("a.b", b"", priority="urgent")  # type: ignore[arg-type]
    by_body = {message.body: message for message in found}
    assert sorted(map(seen, found), key=lambda one: int(one[0])) == [
        (b"0", "high", None), (b"1", "low", None), (b"2", "normal", None), (b"3", "normal", "order-1"),
        (b"4", "high", None), (b"5", "high", None), (b"6", "normal", "order-1"), (b"7", "normal", "ž" * 300),
        (b"8", "normal", "order-1"), (b"9", "normal", "order-2"), (b"10", "normal", "order-1"),
        (b"11", "normal", "order-2"), (b"12", "normal", "order-1"), (b"13", "normal", "order-3"),
        (b"14", "low", None), (b"15", "low", None), (b"16", "normal", "order-1"), (b"17", "high", None),
        (b"18", "high", "order-1"), (b"19", "low", "order-1"), (b"20", "low", "order-9"), (b"21", "low", "order-9"),
        (b"22", "high", "order-9"), (b"23", "high", "order-9"), (b"24", "high", "order-9"),
    ]  # fmt: skip
    assert (by_body[b"3"].key, by_body[b"3"].tags, by_body[b"9"].key) == ("k", ("t",), "y")
    assert by_body[b"9"].properties == {"p": "1"}
    assert [message.body for message in found if message.order_key == "order-1" and message.subject == "a.b"] == [
        b"3", b"6", b"8", b"10", b"12", b"18", b"19"
    ]  # fmt: skip
    assert [receipt.id for receipt in receipts] == [by_body[body].id for body in (b"6", b"7", b"8")]
    assert [receipt.sequence for receipt in receipts] == [by_body[body].sequence for body in (b"6", b"7", b"8")]
    batch = qmq.MessageBatch([message._run for message in found[:1]])
    assert batch.to_arrow().select(["priority", "order_key"]).to_pylist()[0] == {
        "priority": found[0].priority, "order_key": found[0].order_key
    }  # fmt: skip


async def test_receipts_of_many_order_keys_name_their_messages(tmp_path: Path) -> None:
    keys = [f"order-{number % 900}" for number in range(2_000)]
    bodies = [b"%d" % number for number in range(2_000)]
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url, durability="append") as client,
        client.subscribe("a.", start="first") as consumer,
    ):
        await client.send("a.b", b"first")
        receipts = await client.send_many("a.b", bodies, order_keys=keys)
        found = list[qmq.Message]()
        while len(found) < 2_001 and (more := await consumer.pull(3_000, timeout=10)):
            found += more
    by_body = {message.body: message for message in found}
    assert [(one.id, one.sequence) for one in receipts] == [(by_body[b].id, by_body[b].sequence) for b in bodies]
    for key in set(keys):
        assert [message.body for message in found if message.order_key == key] == [
            body for body, own in zip(bodies, keys, strict=True) if own == key
        ]
    slots = {key_hash(key) % ORDER_SLOTS for key in keys}
    assert {message._run.lane & 0xFFF for message in found if message.order_key} == slots


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"priority": "urgent"}, "priority must be 'low', 'normal' or 'high', or 0, 1 or 2, not 'urgent'"),
    ({"priority": "High"}, "not 'High'"),
    ({"priority": ""}, "priority must be 'low', 'normal' or 'high', or 0, 1 or 2, not ''"),
    ({"priority": 3}, "priority must be 'low', 'normal' or 'high', or 0, 1 or 2, not 3"),
    ({"priority": -1}, "not -1"),
    ({"priority": True}, "not True"),
    ({"priority": 1.5}, "not 1.5"),
    ({"priority": 1.0}, "not 1.0"),
    ({"priority": b"high"}, "not b'high'"),
    ({"priority": []}, "priority must be"),
    ({"priority": {}}, "priority must be"),
    ({"order_key": ""}, "an order key has 1 to 1,024 bytes as UTF-8, not 0 as ''; leave an empty one out"),
    ({"order_key": "k" * 1_025}, f"not 1,025 as '{'k' * 40}'"),
    ({"order_key": "ž" * 513}, f"not 1,026 as '{'ž' * 40}'"),
    ({"order_key": b"bytes"}, "an order key must be a str that UTF-8 can hold, not b'bytes'"),
    ({"order_key": 4421}, "an order key must be a str that UTF-8 can hold, not 4421"),
    ({"order_key": 1.5}, "not 1.5"),
    ({"order_key": False}, "not False"),
    ({"order_key": ["k"]}, r"not \['k'\]"),
    ({"order_key": "\ud800"}, r"an order key must be a str that UTF-8 can hold, not '\\ud800'"),
    ({"order_key": "k" * 300 + "\udfff"}, "an order key must be a str that UTF-8 can hold, not 'kkk"),
    ({"order_key": "k", "priority": "urgent"}, "priority must be"),
]


@pytest.mark.parametrize(("options", "reason"), WRONG)
async def test_wrong_options_are_refused_before_anything_is_sent(options: dict[str, Any], reason: str) -> None:
    client = qmq.connect("qmq://127.0.0.1:1")  # nobody is there
    with pytest.raises(qmq.UsageError, match=reason):
        await client.send("a", b"", **options)
    with pytest.raises(qmq.UsageError, match=reason):
        client.send_nowait("a", b"", **options)
    with pytest.raises(qmq.UsageError, match=reason):
        await client.send_many("a", [b""], **options)
    with pytest.raises(qmq.UsageError, match=reason):
        qmq.testing.message(**options)
    if "order_key" in options:
        each = {name: value for name, value in options.items() if name != "order_key"}
        with pytest.raises(qmq.UsageError, match=reason):
            await client.send_many("a", [b"", b""], order_keys=["k", options["order_key"]], **each)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"order_keys": "ab"}, "order_keys must be a list of 2 elements"),
        ({"order_keys": ["a"]}, "order_keys must be a list of 2 elements"),
        ({"order_keys": ["a", "b", "c"]}, r"of 2 elements, one for each body, not \['a', 'b', 'c'\]"),
        ({"order_keys": []}, r"order_keys must be a list of 2 elements, one for each body, not \[\]"),
        ({"order_keys": b"ab"}, "order_keys must be a list of 2 elements, one for each body, not b'ab'"),
        ({"order_keys": 2}, "order_keys must be a list of 2 elements, one for each body, not 2"),
        ({"order_keys": {"a", "b"}}, "order_keys must be a list of 2 elements"),
        ({"order_keys": {"a": 1, "b": 2}}, "order_keys must be a list of 2 elements"),
        ({"order_keys": iter("ab")}, "order_keys must be a list of 2 elements"),
        ({"order_keys": ["a", "b"], "keys": {"c", "d"}}, "keys must be a list of 2 elements"),
        ({"keys": {"c", "d"}}, "keys must be a list of 2 elements, a key or a list of keys for each body"),
        ({"keys": {"c": 1, "d": 2}}, "keys must be a list of 2 elements, a key or a list of keys for each body"),
        ({"keys": 2}, "keys must be a list of 2 elements, a key or a list of keys for each body, not 2"),
        ({"order_keys": ["a", "b"], "priority": "lowest"}, "priority must be"),
        ({"order_keys": ["a", "b"], "keys": ["c"]}, "keys must be a list of 2 elements"),
        ({"order_keys": ["a", "b"], "order_key": "c"}, "either order_key, for all bodies, or order_keys"),
        ({"order_keys": ["a", None]}, "order_keys has None"),
    ],
)
async def test_order_keys_go_by_body(options: dict[str, Any], reason: str) -> None:
    client = qmq.connect("qmq://127.0.0.1:1")
    with pytest.raises(qmq.UsageError, match=reason):
        await client.send_many("a", [b"1", b"2"], **options)


@pytest.fixture(scope="module")
def sync_client() -> Iterator[qmq.SyncClient]:
    with qmq.testing.broker() as here, qmq.connect_sync(here.url) as client:
        yield client


@pytest.mark.parametrize(("options", "reason"), WRONG)
def test_the_sync_client_refuses_the_same(sync_client: qmq.SyncClient, options: dict[str, Any], reason: str) -> None:
    for send in (sync_client.send, sync_client.send_nowait):
        with pytest.raises(qmq.UsageError, match=reason):
            send("a", b"", **options)
    with pytest.raises(qmq.UsageError, match=reason):
        sync_client.send_many("a", [b""], **options)
    sync_client.send_nowait("a", b"", order_key="k")  # the next one may go a short way
    with pytest.raises(qmq.UsageError, match=reason):
        sync_client.send_nowait("a", b"", **options)
    sync_client.flush()
    assert {message.order_key for message in sync_client.find("a")} == {"k"}


def test_the_sync_client_has_all_of_it(tmp_path: Path) -> None:
    with qmq.testing.broker() as here, qmq.connect_sync(here.url) as client:
        client.send("a.b", b"0", priority="high")
        client.send("a.b", b"1", order_key="k")
        client.send_many("a.b", [b"2", b"3"], order_keys=["k", "l"])
        client.send_many("a.b", [b"4"], priority="low")
        client.send_nowait("a.b", b"5", order_key="k")
        client.send_nowait("a.b", b"6", priority=2)
        client.flush()
        with client.subscribe("a.", start="first") as consumer:
            found = [message for _ in range(7) for message in consumer.pull(1, timeout=10)]
        got = client.get(found[0].id)
        assert (got.priority, got.order_key) == (found[0].priority, found[0].order_key)
        stored = {one.body: (one.priority, one.order_key) for one in client.find("a.b")}
    expected = [
        (b"0", "high", None), (b"1", "normal", "k"), (b"2", "normal", "k"), (b"3", "normal", "l"), (b"4", "low", None),
        (b"5", "normal", "k"), (b"6", "high", None),
    ]  # fmt: skip
    assert sorted((one.body, one.priority, one.order_key) for one in found) == expected
    assert stored == {body: (priority, key) for body, priority, key in expected}


def test_a_message_for_tests_has_both() -> None:
    assert qmq.testing.message(priority="low").priority == "low"
    message = qmq.testing.message(order_key="order-4421", key="k")
    assert (message.priority, message.order_key, message.key) == ("normal", "order-4421", "k")
    assert (qmq.testing.message().priority, qmq.testing.message().order_key) == ("normal", None)
