"""qmq/cli/manage/info.py and doctor.py: what a broker is, what is wrong, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import qmq
from qmq.cli.manage import doctor
from qmq.console.snapshot import make_snapshot
from qmq.net.client.admin.results import ConsumerInfo, GroupInfo, SubjectInfo
from qmq.net.client.failover.spool import Spool, SpooledDispositions
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq as run
from tests.console.made_up import broker_stats, group_stats

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("info"), max_groups=17) as broker:
        yield broker


def test_a_broker_says_what_it_is(broker: BrokerProcess) -> None:
    done = run("info", "--json", server=broker.url)
    assert (done.exit_code, done.stderr) == (0, "")
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["broker"] == broker.url.removeprefix("qmq://")
    assert row["started_at"].endswith("Z")
    assert row["settings"]["max_groups"] == 17
    assert "max_groups" in row["changed_settings"]
    assert row["disks"][0]["free_bytes"] > 0
    assert row["connections"][0]["since"].endswith("Z")
    lines = [line.split("\t") for line in run("info", server=broker.url).stdout.splitlines()]
    assert ["max_groups", "17"] in lines
    assert all(len(line) == 2 for line in lines)
    assert {name for name, _ in lines} >= {"broker", "version", "store_id", "uptime", "disks", "connections"}


def test_nothing_is_wrong_with_a_new_broker(broker: BrokerProcess) -> None:
    done = run("doctor", server=broker.url)
    wrong = [line for line in done.stdout.splitlines() if "\tdisk_" not in line]  # this machine's disk may be full
    assert (wrong, done.stderr) == ([], "")


def test_a_broker_that_is_away_is_an_error(broker: BrokerProcess) -> None:
    done = run("doctor", "--json", server=f"{broker.url},qmq://127.0.0.1:1")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1
    assert (rows[0]["level"], rows[0]["code"], rows[0]["broker"]) == ("error", "not_reached", "127.0.0.1:1")
    assert "qmq serve" in rows[0]["message"]


def test_failed_messages_that_no_broker_takes_are_found(broker: BrokerProcess) -> None:
    spool = Spool(["127.0.0.1:1"])
    ack = SpooledDispositions(b"store.", "g", "c", 1, 2, [0, 1])._asdict()
    fields = {"attempt": 1, "disposition": 1, "delay_us": None, "reason": "broken", "batch": b"x", "ack": ack}
    now_us = int(datetime.now(UTC).timestamp() * 1_000_000)
    spool.put({"group": "new", "at_us": now_us + 3_600_000_000, **fields})  # a client may bring it soon
    for _ in range(3):
        spool.put({"group": "billing", "at_us": now_us - 7_200_000_000, **fields})
    done = run("doctor", "--json", server=broker.url)
    (row,) = [row for row in map(json.loads, done.stdout.splitlines()) if row["code"] == "spool_waits"]
    assert (row["level"], row["broker"]) == ("warning", "127.0.0.1:1")
    assert f"3 failed messages of group billing in {spool.directory} on this machine, for 2h" in row["message"]
    spool.close()


def test_dead_letters_and_mistyped_names_are_found(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send("shop", b"x")
        with client.subscribe("shop", "shop.", "shpo", group="mistyped") as consumer:
            consumer.pull()[0].reject("no")
            consumer.flush()
        found = [line.split("\t") for line in run("doctor", "--header", server=broker.url).stdout.splitlines()]
        client.admin.delete_group("mistyped")
    assert found[0] == ["level", "code", "broker", "message"]
    messages = {(code, message) for _, code, _, message in found if not code.startswith("disk")}
    texts = " ".join(message for _, message in messages)
    assert [code for code, _ in sorted(messages)] == ["code", "dead_letters", "no_subject", "no_subject"]
    assert "`qmq dead-letters redrive mistyped --all`" in texts
    assert "follows 'shop.', and no subject begins so: there is a subject 'shop', which it does not take" in texts
    assert "follows the subject 'shpo', which is not there: is it mistyped?" in texts


def group(name: str = "g", **changed: object) -> GroupInfo:
    fields = {"consumers": 1, "ready": 0, "oldest": None, "in_flight": 0, "in_retry": 0, "dead": 0, "skipped": 0}
    return GroupInfo(name=name, mode="reliable", follows=["a."], settings={}, **{**fields, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "codes"),
    [
        ({}, []),
        ({"ready": 5, "oldest": NOW - timedelta(seconds=30), "consumers": 0}, []),
        ({"ready": 5, "oldest": NOW - timedelta(minutes=2), "consumers": 0}, ["nobody"]),
        ({"ready": 5, "oldest": NOW - timedelta(minutes=59)}, []),
        ({"ready": 5, "oldest": NOW - timedelta(minutes=61)}, ["lag"]),
        ({"dead": 1, "skipped": 2}, ["dead_letters", "skipped"]),
    ],
)
def test_what_is_wrong_with_a_group(changed: dict[str, object], codes: list[str]) -> None:
    assert [code for _, code, _ in doctor._of_groups([group(**changed)], {}, NOW)] == codes


@pytest.mark.parametrize(
    ("counted", "code", "text"),
    [
        (
            {"crashes": 3, "crashed_messages": 1}, "consumers_crash",
            "group g: consumers crash (3 sessions ended with this message in flight): see the log of its program; ",
        ),
        (
            {"in_flight": 1, "held_since": NOW - timedelta(minutes=5)}, "held",
            "group g: a consumer holds messages without an ack for 5m: see with `qmq consumers g` who has them, ",
        ),
        ({"failed_lately": 3}, "attempts_fail", "group g: most attempts fail: see the log of its program "),
        ({}, "nothing_taken", "group g: consumers take nothing: see whether its program still pulls"),
        (
            {"in_flight": 2, "held": 3.0, "held_since": NOW}, "lag",
            "group g lags: 5 messages ready, the oldest for 2h, all hands are full (handlers take 3s): add consumers, ",
        ),
        ({"consumers": 0, "ready": 0, "in_retry": 5, "returned": 2}, "nobody",
         "group g has 2 messages to hand out again, 3 messages in retry and no consumer: start one"),
    ],
)  # fmt: skip
def test_a_group_that_is_behind_says_why(counted: dict[str, Any], code: str, text: str) -> None:
    oldest = NOW - timedelta(hours=2)
    known = {"ready": 5, "consumers": 1, "oldest_unacked": oldest, **counted}
    snapshot = make_snapshot(1, NOW, [broker_stats(0, group_stats("g", **known))], {}, None)
    info = group(**{name: known.get(name, 0) for name in ("ready", "consumers", "in_flight", "in_retry")})
    (found,) = doctor._of_groups([replace(info, oldest=oldest)], snapshot.groups, NOW)
    assert found[:2] == ("warning", code)
    assert found[2].startswith(text), found[2]


@pytest.mark.parametrize(
    ("before_s", "after_s", "text"),
    [
        (-1, 1, None),
        (-30, 1, None),  # the answer took long
        (-1, 30, None),
        (7, 9, "the broker's clock is 7s behind this machine's"),
        (-90, -20, "the broker's clock is 20s ahead of this machine's"),
    ],
)
def test_a_clock_is_wrong_only_beyond_the_time_of_the_answer(before_s: int, after_s: int, text: str | None) -> None:
    clock = doctor._Clock(NOW + timedelta(seconds=before_s), NOW, NOW + timedelta(seconds=after_s))
    found = list(doctor._of_clock(clock))
    assert [code for _, code, _ in found] == ["clock"] * (text is not None)
    assert text is None or found[0][2].startswith(text)


def test_a_blocked_loop_is_named() -> None:
    slow = ConsumerInfo("c", 1, True, 1, NOW, NOW, 0.0, 2.5)
    assert [code for _, code, _ in doctor._of_consumers([("g", slow)])] == ["blocked"]


def test_a_prefix_without_subjects_is_named() -> None:
    subjects = [SubjectInfo("a.b", 0, 1, 1, 0, "here")]
    assert list(doctor._of_names([group()], subjects)) == []
    assert [code for _, code, _ in doctor._of_names([group()], [])] == ["no_subject"]
