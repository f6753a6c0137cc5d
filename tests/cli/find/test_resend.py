"""``qmq resend`` against a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

import pytest

import qmq
from qmq.cli.common import confirm
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("resending")) as broker:
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[qmq.SyncClient]:
    with qmq.connect_sync(broker.url) as client:
        yield client


@pytest.fixture
def name(client: qmq.SyncClient) -> str:
    """Create a subject and a group of the same name: of four messages three are acknowledged, and one is dead."""
    name = f"g-{uuid4().hex}"
    client.send_many(name, [b"0", b"1", b"2", b"3"], keys=["k", "k", "l", "m"])
    with client.subscribe(name, group=name) as consumer:
        first, *rest = consumer.pull(min_count=4, timeout=30)
        first.reject("bad")
        for message in rest:
            message.ack()
        consumer.flush()
    return name


def in_retry(client: qmq.SyncClient, group: str) -> int:
    return sum(row.in_retry for row in client.admin.groups(group))


def test_a_dry_run_counts_and_changes_nothing(broker: BrokerProcess, client: qmq.SyncClient, name: str) -> None:
    found = run("resend", name, "--group", name, "--dry-run", server=broker.url)
    assert (found.exit_code, found.stdout) == (0, f"would resend 4 messages to {name}, 1 of them dead letters\n")
    assert in_retry(client, name) == 0
    assert len(list(client.admin.dead_letters(name))) == 1


def test_messages_come_again(broker: BrokerProcess, client: qmq.SyncClient, name: str) -> None:
    found = run("resend", name, "--group", name, "--yes", server=broker.url)
    assert (found.exit_code, found.stdout) == (0, f"resent 4 messages to {name}, 1 of them dead letters\n")
    again = run("resend", name, "--all-groups", "--yes", server=broker.url)
    assert again.stdout == "resent 0 messages to 1 group (left alone: 4 in retry)\n"
    with client.subscribe(name, group=name) as consumer:
        messages = consumer.pull(min_count=4, timeout=30)
        assert sorted(message.body for message in messages if message.replayed) == [b"0", b"1", b"2", b"3"]
        for message in messages:
            message.ack()


def test_json_has_all_counts(broker: BrokerProcess, client: qmq.SyncClient, name: str) -> None:
    found = run("resend", name, "--all-groups", "--yes", "--json", server=broker.url)
    assert json.loads(found.stdout) == {
        "resent": 4, "groups": 1, "redriven": 1, "waiting": 0, "in_flight": 0, "retrying": 0, "gone": 0,
        "dry_run": False,
    }  # fmt: skip


def test_ids_keys_and_times_choose(broker: BrokerProcess, client: qmq.SyncClient, name: str) -> None:
    ids = [message.id for message in client.find(name)]
    chosen = run("resend", "--id", ids[1], "--id", ids[2].upper(), "--group", name, "--dry-run", server=broker.url)
    assert chosen.stdout == f"would resend 2 messages to {name}\n"
    by_key = run("resend", name, "--key", "k", "--group", name, "--dry-run", server=broker.url)
    assert by_key.stdout == f"would resend 2 messages to {name}, 1 of them dead letters\n"
    lately = run("resend", name, "--since", "1h", "--group", name, "--dry-run", server=broker.url)
    assert lately.stdout.startswith("would resend 4 messages")
    before = run("resend", name, "--until", "1h", "--group", name, "--dry-run", server=broker.url)
    assert before.exit_code == 2
    assert f"nothing is selected: no message of that time of subject '{name}' is stored here" in before.stderr


def test_it_asks_on_a_terminal(
    broker: BrokerProcess, client: qmq.SyncClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = run("resend", name, "--group", name, server=broker.url)
    assert asked.exit_code == 2
    assert "add --yes to do it" in asked.stderr
    monkeypatch.setattr(confirm, "can_ask", lambda: True)
    refused = run("resend", name, "--group", name, stdin=b"n\n", server=broker.url)
    assert f"resend 4 messages to {name}, 1 of them dead letters? [y/N]" in refused.stderr
    assert refused.exit_code == 1
    assert in_retry(client, name) == 0
    agreed = run("resend", name, "--group", name, stdin=b"y\n", server=broker.url)
    assert agreed.exit_code == 0
    assert in_retry(client, name) == 4


WRONG = [
    ((), "give either the PREFIX"),
    (("shop.", "--id", "0" * 32), "give either the PREFIX"),
    (("--id", "0" * 32, "--since", "2h"), "with --id leave them out"),
    (("shop.",), "give either --group G, or --all-groups"),
    (("shop.", "--group", "g", "--all-groups"), "give either --group G, or --all-groups"),
    (("shop.", "--group", "g", "--since", "yesterday"), "--since 'yesterday' is not a time"),
    (("--id", "0123", "--group", "g"), "is not a message id"),
    (("sh op.", "--group", "g"), "prefix 'sh op' is not a valid name"),
    (("shop.", "--group", "no group"), "no group"),
    (("shop.", "--group", "absent"), "absent"),
    (("shop.", "--group", "g", "--since", "1h", "--until", "2h"), "is not before until"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_wrong_use_is_told(broker: BrokerProcess, arguments: tuple[str, ...], text: str) -> None:
    found = run("resend", *arguments, "--yes", server=broker.url)
    assert found.exit_code in (1, 2)
    assert text in found.stderr
    assert found.stdout == ""


def test_a_time_with_its_zone(broker: BrokerProcess, client: qmq.SyncClient, name: str) -> None:
    later = datetime.now(UTC).isoformat()
    found = run("resend", name, "--until", later, "--group", name, "--dry-run", server=broker.url)
    assert found.stdout.startswith("would resend 4 messages")
