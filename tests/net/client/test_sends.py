"""What sends carry: JSON, keys of many messages, durations; through a real broker and back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qmq
from qmq.format.build import Keys, headers_of, make_header
from qmq.net.client.options import NO_JSON, decode_json, json_body_of, json_of
from tests.broker_process import running_broker


@asynccontextmanager
async def solo(path: Path, subject: str) -> AsyncIterator[tuple[qmq.Client, qmq.Consumer]]:
    async with (
        running_broker(path) as url,
        qmq.connect(url) as client,
        client.subscribe(subject, start="first") as consumer,
    ):
        yield client, consumer


ORDER = {"id": "order-4421", "guests": ["Žofie", "Ann"], "price": 19.5, "paid": True, "note": None, "big": 2**70}


async def test_json_goes_with_its_content_type_and_comes_back(tmp_path: Path) -> None:
    async with solo(tmp_path / "data", "a") as (client, consumer):
        await client.send("a", json=ORDER, key="order-4421")
        await client.send("a", json=None, properties={"lang": "cs"})
        client.send_nowait("a", json=[1], properties={"content-type": "application/vnd.order+json"})
        await client.flush()
        order, nothing, own = await consumer.pull(3, 3)
    assert order.json() == ORDER
    assert order.body.startswith('{"id":"order-4421","guests":["Žofie","Ann"]'.encode())
    assert order.properties == {"content-type": "application/json"}
    assert (nothing.json(), nothing.properties) == (None, {"content-type": "application/json", "lang": "cs"})
    assert own.properties == {"content-type": "application/vnd.order+json"}


async def test_a_body_that_is_no_json_says_which_message(tmp_path: Path) -> None:
    async with solo(tmp_path / "data", "a") as (client, consumer):
        receipt = await client.send("a", b"{")
        (message,) = await consumer.pull(1)
    with pytest.raises(ValueError, match=f"the body of message {receipt.id} is no JSON: "):
        message.json()


NESTED: list[Any] = []
NESTED.append(NESTED)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), "\ud800", NESTED, {"a": b"b"}])
def test_a_value_that_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(qmq.UsageError, match="cannot be written as JSON"):
        json_body_of(value, None)


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b"[Infinity]", b"\xff", b'{"a":1}x'])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    for decode in (json_of, decode_json):
        with pytest.raises(ValueError):  # noqa: PT011  # the words are those of the decoder
            decode(body)


@pytest.mark.parametrize("value", [ORDER, None, [], "ž", -1.5e300, 2**80, {"": {"a": [None, True]}}])
def test_both_decoders_read_the_same(value: object) -> None:
    body, _ = json_body_of(value, None)
    assert json_of(body) == decode_json(body) == value


async def test_a_message_has_one_body(tmp_path: Path) -> None:
    async with solo(tmp_path / "data", "a") as (client, _):
        with pytest.raises(qmq.UsageError, match="needs a body"):
            await client.send("a")
        with pytest.raises(qmq.UsageError, match="either a body or json"):
            await client.send("a", b"1", json=1)
        with pytest.raises(qmq.UsageError, match="needs a body"):
            client.send_nowait("a")
        with pytest.raises(qmq.UsageError, match="either a body or json"):
            client.send_nowait("a", b"1", json=1)
    assert NO_JSON is not None


@pytest.mark.parametrize("count", [1, 5, 30_000])
async def test_many_messages_have_keys_tags_and_properties(tmp_path: Path, count: int) -> None:
    keys = [
        None if number % 7 == 3 else f"klíč-{number}" if number % 7 == 5 else f"key-{number}" for number in range(count)
    ]
    bodies = [b"%d" % number for number in range(count)]
    async with solo(tmp_path / "data", "a") as (client, consumer):
        client.send_nowait("a", b"before")
        client.send_nowait("a", b"before")
        sending = client.send_many("a", bodies, keys=keys, tags=["eu"], properties={"lang": "cs"})
        receipts = await sending
        client.send_nowait("a", b"after")
        await client.flush()
        messages = list[qmq.Message]()
        while len(messages) < count + 3:
            messages += await consumer.pull(50_000)
    assert [message.body for message in messages] == [b"before", b"before", *bodies, b"after"]
    assert [message.key for message in messages[2:-1]] == keys
    assert {(message.tags, *message.properties.items()) for message in messages[2:-1]} == {(("eu",), ("lang", "cs"))}
    assert {(message.key, message.tags) for message in (*messages[:2], messages[-1])} == {(None, ())}
    assert len(receipts) == count


async def test_many_messages_share_tags_without_keys(tmp_path: Path) -> None:
    async with solo(tmp_path / "data", "a") as (client, consumer):
        await client.send_many("a", [b"1", b"2"], tags=["eu"])
        assert [message.tags for message in await consumer.pull(2, 2)] == [("eu",), ("eu",)]


@pytest.mark.parametrize("keys", [["a"], "ab", ["a", 5], ["a", "\ud800"], ["a", ""], ["a", ["b", ""]], ["a", ["b", 5]]])
async def test_keys_that_fit_no_bodies_are_refused(tmp_path: Path, keys: Any) -> None:
    async with solo(tmp_path / "data", "a") as (client, _):
        with pytest.raises(qmq.InvalidOption, match="key"):
            await client.send_many("a", [b"1", b"2"], keys=keys)


KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=250)


@given(
    st.lists(st.none() | KEYS | st.lists(KEYS, max_size=3), max_size=4),
    st.lists(st.text("abc"), max_size=2),
)
def test_headers_of_many_are_those_of_one_by_one(keys: list[Keys], tags: list[str]) -> None:
    properties = {"lang": "cs"} if len(keys) % 2 else None
    shared = make_header(None, tags, properties, 5, 7)
    one_by_one = [make_header(key, tags, properties, 5, 7) for key in keys]
    assert headers_of(keys, len(keys), shared, tags, properties) == one_by_one


async def test_messages_have_all_their_keys(tmp_path: Path) -> None:
    async with solo(tmp_path / "data", "a") as (client, consumer):
        await client.send("a", b"0", keys=["order-1", "user-7", "order-1"])
        await client.send_many("a", [b"1", b"2", b"3"], keys=["order-2", ["order-3", "user-8"], None])
        client.send_nowait("a", b"4", keys=("order-4", "user-9"), tags=["eu"])
        client.send_nowait("a", b"5", keys=[])
        client.send_nowait("a", b"6", keys=["order-5"], delay=0.001)
        await client.flush()
        found = [message for _ in range(7) for message in await consumer.pull(1, timeout=10)]
        assert [(message.keys, message.key) for message in sorted(found, key=lambda message: message.body)] == [
            (("order-1", "user-7"), "order-1"), (("order-2",), "order-2"), (("order-3", "user-8"), "order-3"),
            ((), None), (("order-4", "user-9"), "order-4"), ((), None), (("order-5",), "order-5"),
        ]  # fmt: skip


async def test_messages_with_short_keys_mix_with_others(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"key": "order"}] * 3 + [
        {}, {"key": "ž"}, {"key": "k" * 300}, {"tags": ["eu"]}, {"keys": ["a", "b"]}, {"key": "k" * 255},
        {"key": "order", "properties": {"p": "v"}}, {"key": "order", "durability": "append"},
    ]  # fmt: skip
    chance = random.Random(4)
    sent = [chance.choice(kinds) if number > 100 else kinds[0] for number in range(600)]
    async with solo(tmp_path / "data", "a") as (client, consumer):
        tickets = [client.send_nowait("a", b"%d" % number, **options) for number, options in enumerate(sent)]
        assert tickets == sorted(set(tickets))
        await client.send_many("a", [b"600", b"601"], keys=["x", "y"])
        await client.flush()
        found = list[qmq.Message]()
        while len(found) < 602:
            found += await consumer.pull(602, timeout=10)
    by_body = {int(message.body): message for message in found}
    assert len(by_body) == 602
    for number, options in enumerate(sent):
        keys = tuple(options.get("keys", [options["key"]] if "key" in options else ()))
        message = by_body[number]
        assert (message.keys, message.tags) == (keys, tuple(options.get("tags", ())))
    assert [by_body[number].keys for number in (600, 601)] == [("x",), ("y",)]
