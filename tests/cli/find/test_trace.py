"""``qmq trace`` against a real broker: a timeline for people, rows for programs, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import qmq
from qmq.cli.find.trace import _print
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("tracing")) as broker:
        yield broker


@pytest.fixture(scope="module")
def sent(broker: BrokerProcess) -> qmq.Receipt:
    """Send a message that one group rejects, one acknowledges, one has not taken, and one does not follow."""
    with qmq.connect_sync(broker.url) as client:
        receipt = client.send("shop.order", b"it", key="order-4421", tags=["vip"])
        for group in ("billing", "mail", "idle"):
            with client.subscribe("shop.", group=group, consumer=f"{group}-1") as consumer:
                if group != "idle":
                    (message,) = consumer.pull(timeout=30)
                    message.reject("no [red] card") if group == "billing" else message.ack()
                    consumer.flush()
        with client.subscribe("other.", group="returns"):
            pass
    return receipt


def test_a_program_gets_one_object_a_group(broker: BrokerProcess, sent: qmq.Receipt) -> None:
    found = run("trace", sent.id, "--json", server=broker.url)
    assert found.exit_code == 0, found.stderr
    rows = {row["group"]: row for row in map(json.loads, found.stdout.splitlines())}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"billing": "dead", "idle": "waiting", "mail": "acked", "returns": "not_subscribed"}
    assert rows["billing"]["reason"] == "no [red] card"
    assert [event["kind"] for event in rows["mail"]["events"]] == ["handed_out", "acked"]
    assert rows["mail"]["events"][1]["time"] == rows["mail"]["since"]
    assert {row["id"] for row in rows.values()} == {sent.id}
    lines = run("trace", sent.id, "--header", server=broker.url).stdout.splitlines()
    assert lines[0].split("\t")[3:6] == ["group", "state", "consumer"]
    assert lines[3].split("\t")[3:6] == ["mail", "acked", "mail-1"]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_person_gets_a_timeline_that_fits(
    broker: BrokerProcess,
    sent: qmq.Receipt,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with qmq.connect_sync(broker.url) as client:
        _print(client.trace(sent.id))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "billing  dead after 1 attempt, " in shown
    assert "rejected by billing-1: no [red] card" in shown
    assert "mail  acked by mail-1, " in shown
    assert "✔  acked by mail-1" in shown
    assert "idle  waiting" in shown
    assert "not subscribed: returns" in shown
    assert "order-4421" in shown


@pytest.mark.parametrize(
    ("name", "exit_code", "reason"),
    [("abc", 2, "32 hex digits"), ("0" * 32, 1, "of store 000000000000"), ("", 2, "32 hex digits")],
)
def test_wrong_ids_are_errors_that_say_why(broker: BrokerProcess, name: str, exit_code: int, reason: str) -> None:
    found = run("trace", name, server=broker.url)
    assert found.exit_code == exit_code
    assert reason in found.stderr


def test_what_a_consumer_did_and_what_has_a_key(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url, name="worker-9") as client:
        sent = [client.send("did.a", b"x", key="did-1"), client.send("did.b", b"y", key="did-2")]
        with client.subscribe("did.", group="did", consumer="did-c") as consumer:
            for message in consumer.pull(10, min_count=2, timeout=10):
                message.ack()
            consumer.flush()
    done = run("trace", "--consumer", "worker-9", "--json", server=broker.url)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["event"] for row in rows] == ["joined", "handed_out", "handed_out", "acked", "acked", "left"]
    assert [row["id"] for row in rows[1:3]] == [one.id for one in sent]
    assert {(row["group"], row["consumer"]) for row in rows} == {("did", "did-c")}
    later = run("trace", "--consumer", "did-c", "--since", "2030-01-01T00:00:00Z", server=broker.url)
    assert (later.exit_code, later.stdout) == (0, "")
    done = run("trace", "did.", "--key", "did-2", "--json", server=broker.url)
    states = {row["id"]: row["state"] for row in map(json.loads, done.stdout.splitlines()) if row["group"] == "did"}
    assert states == {sent[1].id: "acked"}
    assert run("trace", "did.b", "--key", "did-1", server=broker.url).stdout == ""
    for wrong in ([], ["x", "--consumer", "y"], ["--key", "k", "--consumer", "y"], ["0" * 32, "--since", "1h"]):
        assert run("trace", *wrong, server=broker.url).exit_code == 2
