"""qmq/cli/manage/blocked.py: which order keys hold messages up, in groups, consumers, trace, doctor and top."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest

import qmq
from qmq.cli.common import listing
from qmq.cli.manage import consumers, doctor
from qmq.cli.manage.blocked import blocked_text
from qmq.net.client.admin.results import BlockedSlot, GroupInfo
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run

NOW = datetime.now(UTC)
ID = "7f00000174b9000008bbfce045ed99c1"


def slot(reason: str = "in_flight", **values: Any) -> BlockedSlot:
    """A slot that two messages wait for, with all that is known."""
    known: dict[str, Any] = {"consumer": "worker-1", "since": NOW - timedelta(seconds=300), "attempts": 1}
    if reason == "retrying":
        known = {
            "consumer": None,
            "since": NOW,
            "due": NOW + timedelta(hours=9.5),
            "attempts": 2,
            "failure": "no card",
        }
    known |= {"message_id": ID, "order_key": "order-4421", **values}
    return BlockedSlot("shop.order", 12, 2, reason, **known)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (slot(), f"worker-1 has an earlier one ({ID}) in flight for 5m"),
        (slot(attempts=3), f"worker-1 has an earlier one ({ID}) in flight for 5m, attempt 3"),
        (slot(message_id=None, attempts=0), "worker-1 has an earlier one in flight for 5m"),
        (slot("retrying"), f"an earlier one ({ID}) comes again in 9h after 2 failed attempts: no card"),
        (slot("retrying", attempts=0, failure="released"), f"an earlier one ({ID}) comes again in 9h: released"),
        (
            slot("retrying", due=NOW - timedelta(seconds=300)),
            f"an earlier one ({ID}) has been due for 5m after 2 failed attempts, and no consumer has taken it: no card",
        ),
        (
            slot("retrying", due=None, since=None, attempts=0, failure="", message_id=None),
            "an earlier one is to be delivered again first",
        ),
    ],
)
def test_the_reason_is_said_in_words(one: BlockedSlot, text: str) -> None:
    assert blocked_text(one, NOW) == f"2 messages wait for order key order-4421 (slot 12) of shop.order: {text}"


def test_a_slot_without_a_known_key_has_its_number_and_controls_are_shown() -> None:
    assert blocked_text(slot(order_key=None)).startswith("2 messages wait for slot 12 of shop.order: ")
    said = blocked_text(slot("retrying", order_key="\x1b[31m", failure="a\nb"))
    assert "\x1b" not in said
    assert "\n" not in said


class Blocked(NamedTuple):
    """A broker with a group that two consumers serve; two messages wait for each of two order keys."""

    url: str
    #: The message that worker-2 has in flight, the one that is to come again, and the last one of each key.
    held: str
    failed: str
    last: dict[str, str]


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blocked]:
    with broker_process(tmp_path_factory.mktemp("blocked")) as broker, qmq.connect_sync(broker.url) as client:
        last = {}
        for _ in range(3):
            for key in ("fails [red]", "slow"):
                last[key] = client.send("pay.order", b"x", order_key=key).id
        settings: Any = {"start": "first", "retry_delays": ["1h"]}
        with client.subscribe("pay.", group="pay", consumer="worker-1", **settings) as one:
            (failed,) = one.pull(max_count=1, min_count=1, timeout=60)
            failed.nack(reason="card service is down")
            one.flush()
            with client.subscribe("pay.", group="pay", consumer="worker-2") as two:
                (held,) = two.pull(max_count=1, min_count=1, timeout=60)
                assert (failed.order_key, held.order_key) == ("fails [red]", "slow")
                yield Blocked(broker.url, held.id, failed.id, last)


def shown(broker: Blocked | BrokerProcess, *arguments: str) -> str:
    done = run(*arguments, server=broker.url)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_group_has_all_that_is_known_in_json(blocked: Blocked) -> None:
    (group,) = map(json.loads, shown(blocked, "groups", "show", "pay", "--json").splitlines())
    by_key = {one["order_key"]: one for one in group["blocked"]}
    failing, slow = by_key["fails [red]"], by_key["slow"]
    assert [failing[name] for name in ("reason", "waiting", "consumer", "attempts", "failure", "message_id")] == [
        "retrying", 2, None, 1, "card service is down", blocked.failed,
    ]  # fmt: skip
    assert [slow[name] for name in ("reason", "waiting", "consumer", "attempts", "due", "message_id")] == [
        "in_flight", 2, "worker-2", 1, None, blocked.held,
    ]  # fmt: skip
    hour = datetime.fromisoformat(failing["due"]) - datetime.fromisoformat(failing["since"])
    assert hour == timedelta(hours=1)


@pytest.mark.parametrize("command", [("groups", "show", "pay"), ("consumers", "pay")])
@pytest.mark.parametrize("columns", ["80", "120", "200"])
def test_a_person_reads_who_holds_a_key_up_and_why(
    blocked: Blocked, command: tuple[str, ...], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (listing, consumers):
        monkeypatch.setattr(module, "is_for_people", lambda as_json: True)
    monkeypatch.setenv("COLUMNS", columns)
    lines = shown(blocked, *command).splitlines()
    assert max(map(len, lines)) <= int(columns)
    text = " ".join(" ".join(lines).replace("blocked", "").split())
    says = rf"2 messages wait for order key fails \[red\] \(slot \d+\) of pay.order: an earlier one \({blocked.failed}"
    assert re.search(says, text)
    assert "after 1 failed attempt: card service is down" in text
    assert f"of pay.order: worker-2 has an earlier one ({blocked.held}) in flight for " in text


def test_a_consumer_has_the_keys_that_it_holds_up(blocked: Blocked) -> None:
    rows = {row["consumer"]: row for row in map(json.loads, shown(blocked, "consumers", "pay", "--json").splitlines())}
    assert rows["worker-1"]["blocks"] == []
    assert [one["order_key"] for one in rows["worker-2"]["blocks"]] == ["slow"]
    assert (rows["worker-1"]["order_slots"], rows["worker-2"]["order_slots"]) == (0, 1)


def test_a_trace_says_what_the_message_waits_for(blocked: Blocked) -> None:
    reasons = {
        key: json.loads(shown(blocked, "trace", name, "--json").splitlines()[0]) for key, name in blocked.last.items()
    }
    assert {row["state"] for row in reasons.values()} == {"waiting"}
    slow, failing = reasons["slow"]["reason"], reasons["fails [red]"]["reason"]
    assert slow.startswith("consumer worker-2 has an earlier message of order key 'slow' (slot ")
    assert f"{blocked.held}) in flight since 20" in slow
    assert failing.startswith("an earlier message of order key 'fails [red]' (slot ")
    assert f"{blocked.failed}) is to be delivered again first, due 20" in failing
    assert failing.endswith(": card service is down")


def test_top_says_why_at_first_sight(blocked: Blocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert "all wait: their keys are in flight or retry" in shown(blocked, "top", "--once")


def test_statistics_count_what_is_blocked(blocked: Blocked) -> None:
    with qmq.connect_sync(blocked.url) as client:
        (stats,) = client.admin.stats()
    (group,) = stats.groups
    assert (group.ready, group.blocked, group.blocked_slots, group.blocked_retrying) == (4, 4, 2, 1)


def group(*slots: BlockedSlot, oldest: timedelta) -> GroupInfo:
    return GroupInfo("pay", "reliable", ["pay."], 1, 2, NOW - oldest, 1, 0, 0, 0, {}, blocked=slots)


@pytest.mark.parametrize(
    ("one", "oldest_s", "is_named"),
    [
        (slot(since=NOW - timedelta(seconds=50)), 3_000, False),
        (slot(since=NOW - timedelta(seconds=70)), 3_000, True),
        (slot("retrying"), 500, False),
        (slot("retrying"), 700, True),
    ],
)
def test_the_doctor_names_what_holds_a_key_up_for_long(one: BlockedSlot, oldest_s: int, is_named: bool) -> None:
    found = list(doctor._of_order_keys([group(one, oldest=timedelta(seconds=oldest_s))], NOW))
    assert [code for _, code, _ in found] == ["order_key"] * is_named
    for _, _, text in found:
        assert text.startswith("group pay: 2 messages wait for order key order-4421 (slot 12) of shop.order: ")
        assert f"see `qmq trace {ID}`" in text


def test_the_doctor_looks_at_groups_whose_messages_wait(blocked: Blocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_HELD", timedelta())
    found = asyncio.run(doctor._examine(blocked.url, 10))
    (text,) = [one.message for one in found if one.code == "order_key"]
    assert f"worker-2 has an earlier one ({blocked.held}) in flight" in text
