"""``client.admin`` without asyncio, against a real broker."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("admin") / "data") as started:
        yield started


def reject(client: qmq.SyncClient, group: str, count: int) -> list[str]:
    """Dead letters of a new group; returns their ids."""
    client.send_many(group, [b"%d" % number for number in range(count)])
    with client.subscribe(group, group=group) as consumer:
        messages = consumer.pull(count, count, timeout=30)
        for message in messages:
            message.reject("bad")
    return [message.id for message in messages]


@pytest.mark.parametrize("action", ["redrive", "delete_dead"])
def test_dead_letters_are_changed_by_ids_or_all_of_them_on_purpose(broker: BrokerProcess, action: str) -> None:
    with qmq.connect_sync(broker.url) as client:
        ids, change = reject(client, action, 5), getattr(client.admin, action)
        for wrong in ((), (None,)):
            with pytest.raises(qmq.InvalidOption, match=f"give ids, or all=True .* group '{action}'"):
                change(action, *wrong)
        with pytest.raises(qmq.InvalidOption, match="give either ids or all=True, not both"):
            change(action, ids, all=True)
        for wrong_ids in (ids[0], [7]):
            with pytest.raises(qmq.InvalidOption, match="ids must be a list of message ids, not"):
                change(action, wrong_ids)
        assert change(action, []) == 0
        assert len(list(client.admin.dead_letters(action))) == 5
        assert change(action, ids[:2]) == 2
        assert change(action, all=True) == 3
        assert list(client.admin.dead_letters(action)) == []


def test_settings_of_a_group_are_changed_tags_too(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        with client.subscribe("settings", group="settings"):
            pass
        changed = client.admin.set_group("settings", tags=["vip"], max_attempts=3)
        assert (changed["tags"], changed["max_attempts"]) == (["vip"], 3)
        assert client.admin.set_group("settings", tags=[])["tags"] == []


def test_a_delayed_message_is_cancelled(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        receipt = client.send("cancelled", b"", delay=3_600)
        assert client.admin.cancel(receipt.id) is True
        assert [subject.delayed for subject in client.subjects("cancelled")] == [0]


@pytest.mark.parametrize(
    ("asynchronous", "synchronous"),
    [
        (qmq.Admin, qmq.SyncAdmin),
        (qmq.Client, qmq.SyncClient),
        (qmq.Consumer, qmq.SyncConsumer),
        (qmq.Message, qmq.SyncMessage),
        (qmq.MessageBatch, qmq.SyncMessageBatch),
    ],
)
def test_the_client_without_asyncio_has_the_same_calls(asynchronous: type, synchronous: type) -> None:
    """Where asyncio awaits an ack or a release, the other client has wait=True."""

    def calls(of: type) -> dict[str, list[str] | None]:
        members = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
        return {
            name: [one for one in inspect.signature(member).parameters if one != "wait"] if callable(member) else None
            for name, member in members.items()
        }

    assert calls(synchronous) == calls(asynchronous)
