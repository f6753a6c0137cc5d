"""qmq/cli/messages/peek.py: messages are looked at, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import qmq
from qmq.cli.messages import message_text, peek
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("peek")) as broker:
        with qmq.connect_sync(broker.url) as client:
            for number in range(12):
                client.send(
                    f"shop.{'ab'[number % 2]}", b"%d" % number, key=f"k-{number}", tags=["vip"] * (number == 11)
                )
            client.send("bytes", b"\xff")
            client.send("late", b"x", delay=3_600)
        yield broker


def bodies(*arguments: str, server: str) -> list[str]:
    shown = run("peek", *arguments, "--json", server=server)
    assert (shown.exit_code, shown.stderr) == (0, ""), shown.stderr
    return [json.loads(line).get("body") for line in shown.stdout.splitlines()]


def test_the_last_messages_in_the_order_in_which_they_were_stored(broker: BrokerProcess) -> None:
    assert bodies("shop.", server=broker.url) == [str(number) for number in range(2, 12)]
    assert bodies("shop.a", server=broker.url) == ["0", "2", "4", "6", "8", "10"]
    assert bodies("shop.", "--last", "3", server=broker.url) == ["9", "10", "11"]
    assert bodies("shop.", "--first", "3", server=broker.url) == ["0", "1", "2"]
    assert bodies("", "--last", "2", server=broker.url) == ["11", None]
    assert bodies("late", server=broker.url) == bodies("unknown", server=broker.url) == []


#: The settings of messages with the bodies 0, 1, 2 and so on, in the order in which they are stored.
LANES: list[dict[str, Any]] = [
    {"priority": "low"}, {}, {"priority": "high"}, {"order_key": "a"}, {"order_key": "b"}, {}, {"order_key": "a"},
    {"priority": "high"}, {"priority": "low"},
]  # fmt: skip


@pytest.fixture(scope="module")
def with_lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("lanes")) as broker:
        with qmq.connect_sync(broker.url) as client:
            for number, settings in enumerate(LANES):
                client.send("shop.mail", b"%d" % number, **settings)
        yield broker


@pytest.mark.parametrize("name", ["shop.mail", "shop.", ""])
def test_messages_of_all_lanes_are_shown_as_they_were_stored(with_lanes: BrokerProcess, name: str) -> None:
    everything = [str(number) for number in range(len(LANES))]
    assert bodies(name, server=with_lanes.url) == everything
    assert bodies(name, "--last", "3", server=with_lanes.url) == everything[-3:]
    assert bodies(name, "--first", "4", server=with_lanes.url) == everything[:4]


def test_priority_and_order_key_are_shown(with_lanes: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [(one.get("priority", "normal"), one.get("order_key")) for one in LANES]
    lines = run("peek", "shop.mail", "--json", server=with_lanes.url).stdout.splitlines()
    assert [(row["priority"], row["order_key"]) for row in map(json.loads, lines)] == wanted
    header, *lines = run("peek", "shop.mail", "--header", server=with_lanes.url).stdout.splitlines()
    rows = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    assert [(row["priority"], row["order_key"] or None) for row in rows] == wanted
    monkeypatch.setattr(message_text, "is_for_people", lambda as_json: True)
    shown = run("peek", "shop.mail", server=with_lanes.url).stdout
    assert shown.count("\n  priority high\n") == shown.count("\n  priority low\n") == 2
    assert shown.count("\n  order key a\n") == 2


def test_a_message_may_have_both() -> None:
    message = qmq.testing.message(b"x", priority="low", order_key="order-1")
    assert message_text.lane_lines(message) == ["  priority low", "  order key order-1"]


@pytest.mark.parametrize("follows", ["shop.", "shop.mail", ""])
def test_higher_priorities_come_next(with_lanes: BrokerProcess, follows: str) -> None:
    in_order, group = [2, 7, 1, 3, 4, 5, 6, 0, 8], f"ranks-{len(follows)}"
    with qmq.connect_sync(with_lanes.url) as client, client.subscribe(follows, group=group, start="first"):
        assert bodies("--group", group, server=with_lanes.url) == [str(number) for number in in_order]
        for count in range(1, len(in_order)):
            few = bodies("--group", group, "--first", str(count), server=with_lanes.url)
            assert few == [str(number) for number in in_order[:count]]
        assert bodies("--group", group, "--last", "2", server=with_lanes.url) == ["7", "8"]


@pytest.mark.parametrize("follows", ["shop.", "shop.mail"])
def test_what_consumers_had_does_not_come_next(
    with_lanes: BrokerProcess, monkeypatch: pytest.MonkeyPatch, follows: str
) -> None:
    group = f"some-{len(follows)}"
    with qmq.connect_sync(with_lanes.url) as client, client.subscribe(follows, group=group, start="first") as consumer:
        taken = consumer.pull(max_count=5, min_count=5, timeout=60)
        assert sorted(message.body for message in taken) == [b"1", b"2", b"3", b"5", b"7"]
        assert bodies("--group", group, server=with_lanes.url) == ["4", "6", "0", "8"]
        monkeypatch.setattr(peek, "is_for_people", lambda as_json: True)
        shown = run("peek", "--group", group, "--first", "1", server=with_lanes.url).stdout
    says = f"1 message waits for an earlier one of the same order key: see `qmq groups show {group}`"
    assert shown.splitlines()[-2:] == ["not shown: 5 in flight", says]


def test_lines_have_the_fields_of_a_message(broker: BrokerProcess) -> None:
    shown = run("peek", "shop.b", "--last", "1", "--header", server=broker.url)
    header, line = (one.split("\t") for one in shown.stdout.splitlines())
    row = dict(zip(header, line, strict=True))
    wanted = {"subject": "shop.b", "sequence": "5", "key": "k-11", "tags": "vip", "attempt": "1", "body": "11"}
    assert row | wanted == row
    assert row["encoding"] == "text"
    assert run("peek", "bytes", server=broker.url).stdout.endswith("\tbase64\t/w==\n")
    with qmq.connect_sync(broker.url) as client:
        client.send("empty", b"")
    assert run("peek", "empty", server=broker.url).stdout.endswith("\tempty\t\n")


@pytest.mark.parametrize("mode", ["reliable", "at_most_once", "broadcast"])
def test_what_a_group_gets_next_is_shown_and_stays(broker: BrokerProcess, mode: Any) -> None:
    group, settings = f"peeked-{mode}", {"start": "first"}
    with qmq.connect_sync(broker.url) as client:
        with client.subscribe("shop.", group=group, consumer="c", mode=mode, **settings) as consumer:  # type: ignore[arg-type]
            taken = consumer.pull(max_count=4, min_count=4, timeout=60)
            if mode != "at_most_once":
                for message in taken:
                    message.ack()
                consumer.flush()
        before = client.admin.groups(group)
        left = [str(number) for number in range(12) if str(number).encode() not in {one.body for one in taken}]
        assert sorted(bodies("--group", group, server=broker.url)) == sorted(left)
        assert len(bodies("--group", group, "--first", "3", server=broker.url)) == 3
        assert bodies("--group", group, "--last", "2", server=broker.url) == ["10", "11"]
        assert client.admin.groups(group) == before
        assert {one.name for one in client.admin.consumers(group)} <= {"c"}


def test_a_person_sees_how_many_wait_elsewhere(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peek, "is_for_people", lambda as_json: True)
    settings: Any = {"retry_delays": [3_600]}
    with qmq.connect_sync(broker.url) as client, client.subscribe("shop.", group="bad", **settings) as consumer:
        first, second, third, *_ = consumer.pull(max_count=4, min_count=4)
        first.reject("no such address")
        second.nack(reason="later")
        third.nack(reason="later")
        shown = run("peek", "--group", "bad", "--first", "1", server=broker.url).stdout
    rest = "2 in retry, delivered again when due; 1 in flight; 1 dead (`qmq dead-letters list bad`)"
    assert shown.splitlines()[-1] == f"not shown: {rest}"


def test_a_group_with_tags_is_shown_what_has_them(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client, client.subscribe("shop.", group="vips", tags=["vip"]):
        pass
    assert bodies("--group", "vips", server=broker.url) == ["11"]


@pytest.mark.parametrize(
    ("arguments", "says", "exit_code"),
    [
        ([], "either a SUBJECT or --group", 2),
        (["a", "--group", "g"], "either a SUBJECT or --group", 2),
        (["a", "--first", "1", "--last", "1"], "either --first or --last", 2),
        (["a..b"], "not a valid name", 2),
        (["a", "--last", "0"], "--last", 2),
        (["--group", "nobody"], "there is no group 'nobody'", 1),
        (["--group", "nobody", "--last", "1"], "there is no group 'nobody'", 1),
    ],
)
def test_wrong_calls(broker: BrokerProcess, arguments: list[str], says: str, exit_code: int) -> None:
    done = run("peek", *arguments, server=broker.url)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert says in done.stderr
