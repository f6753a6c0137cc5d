"""qmq/console/metrics.py: counters that never fall, a bounded number of series, and a text that Prometheus takes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import qmq
from qmq.console import metrics as metrics_module
from qmq.console.metrics import MOST_GROUPS, OTHERS, Metrics
from qmq.console.snapshot import Away, Snapshot, make_snapshot
from qmq.net.client.admin.broker_info import DiskInfo
from qmq.net.client.admin.statistics import ArchiveStats, BrokerStats, Histogram, SubjectStats
from tests.broker_process import broker_process, running_broker
from tests.console.consoles import Browser, running_console
from tests.console.made_up import at, broker_stats, group_stats
from tests.console.test_sign_in import guarded_console, token_of

TOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")


def series(text: bytes) -> dict[tuple[str, ...], float]:
    """The value of each series: by its name and the values of its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


class Scraped:
    """Metrics of one snapshot after another."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.number = 0

    def text(self, *brokers: BrokerStats, **away: Away) -> bytes:
        self.number += 1
        return self.metrics.text(make_snapshot(self.number, at(self.number), brokers, away, None))

    def __call__(self, *brokers: BrokerStats, **away: Away) -> dict[tuple[str, ...], float]:
        return series(self.text(*brokers, **away))


def full(*groups: qmq.GroupStats, families: int = 2) -> BrokerStats:
    """The statistics of a broker that has some of everything."""
    buckets = [((1 << power) / 1e6, power) for power in range(26)]
    subjects = [SubjectStats(f"first-{number}", 1_000, 5, 7) for number in range(families)]
    return broker_stats(
        30, *groups, subjects=subjects, refused={"overloaded": 2}, file_bytes={"message_log": 4096, "indexes": 1},
        disks=[DiskInfo("/data", 100, 50, 10), DiskInfo("/other", None, None, 0)],
        durations={name: Histogram(30, 1.5, buckets) for name in ("send", "fsync", "turn")},
        archive=ArchiveStats(10, 1, at(10), at(20)),
    )  # fmt: skip


def test_a_snapshot_becomes_series() -> None:
    group = group_stats(
        "billing", at=at(30), ready=3, in_flight=2, in_retry=3, returned=2, dead=4, delayed=5, acked=6,
        oldest_unacked=at(10), in_retry_oldest=at(12), consumers=1, blocked=2,
    )  # fmt: skip
    found = Scraped()(full(group), **{"10.0.0.5:20881": Away(at(0), "refused")})
    broker = "127.0.0.1:20881"
    assert {
        ("qmq_up", broker): 1, ("qmq_up", "10.0.0.5:20881"): 0, ("qmq_build_info", broker, "3.11.7", "0.1.0"): 1,
        ("qmq_received_messages_total", broker): 14, ("qmq_acked_messages_total", broker): 6,
        ("qmq_refused_requests_total", broker, "overloaded"): 2, ("qmq_file_bytes", broker, "message_log"): 4096,
        ("qmq_disk_free_bytes", broker, "/data"): 50, ("qmq_archive_lag_seconds", broker): 20,
        ("qmq_group_ready_messages", "billing"): 3, ("qmq_group_in_flight_messages", "billing"): 2,
        ("qmq_group_oldest_unacked_age_seconds", "billing"): 20, ("qmq_group_retrying_messages", "billing"): 1,
        ("qmq_group_oldest_retrying_age_seconds", "billing"): 18, ("qmq_group_dead_messages", "billing"): 4,
        ("qmq_group_blocked_messages", "billing"): 2, ("qmq_group_returned_messages", "billing"): 2,
        ("qmq_group_delayed_messages", "billing"): 5, ("qmq_group_acked_messages_total", "billing"): 6,
        ("qmq_subject_received_messages_total", "first-0"): 7, ("qmq_subject_subjects", "first-1"): 1_000,
        ("qmq_send_duration_seconds_count", broker): 30, ("qmq_send_duration_seconds_sum", broker): 1.5,
    }.items() <= found.items()  # fmt: skip
    assert ("qmq_disk_free_bytes", broker, "/other") not in found


def test_series_are_bounded_whatever_clients_do() -> None:
    scraped = Scraped()
    groups = [group_stats(f"group-{number:05}", ready=1, dead=2, acked=3) for number in range(10_000)]
    found = scraped(*(replace(full(*groups, families=101), broker=f"10.0.0.{number}") for number in range(3)))
    assert len(found) < 10_000
    ready = {key[1]: value for key, value in found.items() if key[0] == "qmq_group_ready_messages"}
    assert len(ready) == MOST_GROUPS + 1
    assert ready[OTHERS] == 3 * (10_000 - MOST_GROUPS)
    assert sum(value for key, value in found.items() if key[0] == "qmq_group_dead_messages") == 3 * 20_000
    assert sum(value for key, value in found.items() if key[0] == "qmq_group_acked_messages_total") == 3 * 30_000
    assert sum(value for key, value in found.items() if key[0] == "qmq_subject_subjects") == 3 * 101 * 1_000


def test_groups_that_need_a_look_have_series_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MOST_GROUPS", 3)
    scraped = Scraped()

    def named(seconds: float, **groups: dict[str, object]) -> set[str]:
        rows = [group_stats(name, **values) for name, values in groups.items()]
        snapshot = make_snapshot(scraped.number + 1, at(seconds), [broker_stats(seconds, *rows)], {}, None)
        scraped.number += 1
        return {key[1] for key in series(scraped.metrics.text(snapshot)) if key[0] == "qmq_group_ready_messages"}

    idle = {name: dict[str, object]() for name in "abcd"}
    assert named(0, **idle) == {"a", "b", "c", OTHERS}
    busy: dict[str, dict[str, object]] = {"x": {"in_flight": 1, "oldest_unacked": at(5)}, "y": {"dead": 1}}
    assert named(10, **idle, **busy) == {"x", "y", "a", OTHERS}
    behind: dict[str, dict[str, object]] = {"z": {"ready": 1, "oldest_unacked": at(0)}}
    assert named(10, **idle, **busy, **behind, e={"in_flight": 1}) == {"x", "y", "z", OTHERS}
    assert named(100, **idle, **busy, **behind, e={"in_flight": 1, "dead": 2}) == {"x", "y", "z", OTHERS}
    busy["x"] = {"in_flight": 1, "oldest_unacked": at(95)}
    assert named(100, **idle, **busy, **behind, e={"in_flight": 1, "dead": 2}) == {"e", "y", "z", OTHERS}


def test_the_reason_why_messages_wait_is_a_label() -> None:
    crash = group_stats("crash", in_retry=1, crashes=3, crashed_messages=1, oldest_unacked=at(0), session_expired=3)
    found = Scraped()(broker_stats(0, crash, group_stats("nobody", ready=1), group_stats("idle")))
    reasons = {key[1:]: value for key, value in found.items() if key[0] == "qmq_group_waiting_reason"}
    assert reasons == {("crash", "consumers_crash"): 1, ("nobody", "no_consumer"): 1}
    assert found["qmq_group_session_expired_messages_total", "crash"] == 3


def test_a_named_group_stays_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MOST_GROUPS", 2)
    monkeypatch.setattr(metrics_module, "MOST_DETAILED", 2)
    scraped = Scraped()

    def named(*names: str) -> set[str]:
        found = scraped(broker_stats(0, *(group_stats(name, ready=1) for name in names)))
        return {key[1] for key in found if key[0] == "qmq_group_ready_messages"}

    assert named("m", "n") == {"m", "n"}
    assert named("a", "m", "n") == {"m", "n", OTHERS}
    assert named("a", "b", "n") == {"a", "n", OTHERS}, "the series of a deleted group go"
    assert named("n") == {"n"}
    assert named() == set()


def test_counters_stay_counters() -> None:
    scraped = Scraped()

    def counts(broker: BrokerStats) -> tuple[float, float, float]:
        found, name = scraped(broker), broker.broker
        return (
            found["qmq_group_acked_messages_total", "g"],
            found["qmq_acked_messages_total", name],
            found["qmq_received_messages_total", name],
        )

    def broker(acked: int, received: int, started: float = 0) -> BrokerStats:
        group = group_stats("g", acked=acked, delivered=acked)
        return broker_stats(100, group, subjects=[SubjectStats("a", 1, received, received)], started_at=at(started))

    assert counts(broker(5, 8)) == (5, 5, 8)
    assert counts(broker(7, 9)) == (7, 7, 9)
    assert counts(broker(2, 1, started=50)) == (9, 9, 10), "the broker started again"
    assert counts(broker(2, 1, started=50)) == (9, 9, 10)
    away = scraped(**{"127.0.0.1:20881": Away(at(60), "away")})
    assert ("qmq_group_acked_messages_total", "g") not in away
    assert scraped(broker_stats(100, subjects=[]))["qmq_up", "127.0.0.1:20881"] == 1


def test_a_group_that_is_made_again_begins_anew() -> None:
    scraped = Scraped()
    assert scraped(broker_stats(0, group_stats("g", acked=5, delivered=5)))["qmq_group_acked_messages_total", "g"] == 5
    found = scraped(broker_stats(0, group_stats("g", acked=1, delivered=2)))
    assert found["qmq_group_acked_messages_total", "g"] == 6
    assert found["qmq_group_delivered_messages_total", "g"] == 7
    scraped(broker_stats(0))
    assert scraped(broker_stats(0, group_stats("g", acked=1)))["qmq_group_acked_messages_total", "g"] == 1


def test_the_same_snapshot_is_made_into_text_once() -> None:
    metrics = Metrics()
    first = make_snapshot(1, at(0), [full()], {}, None)
    assert metrics.text(first) is metrics.text(first)
    assert metrics.text(replace(first, number=2)) is not metrics.text(first)


def test_a_name_that_looks_like_a_series_is_a_value() -> None:
    strange = 'a"} 1\nqmq_up{broker="evil\\'
    found = Scraped()(broker_stats(0, group_stats(strange, ready=1)))
    assert found["qmq_group_ready_messages", strange] == 1
    assert ("qmq_up", "evil") not in found


def test_before_the_first_snapshot_there_is_little() -> None:
    assert {key[0] for key in series(Metrics().text(Snapshot(0, at(0))))} == {"qmq_console_snapshot_timestamp_seconds"}


def checked(text: bytes) -> str:
    assert TOOL is not None, "make env-ops installs promtool"
    done = subprocess.run([TOOL, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    return (done.stdout + done.stderr).decode()


def test_prometheus_has_nothing_to_say() -> None:
    scraped = Scraped()
    assert checked(scraped.text(full(group_stats("billing", ready=1, oldest_unacked=at(1))))) == ""
    assert checked(b"qmq_wrong_total{} 1\n") != ""


def test_a_real_broker_gives_all_of_it(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker, qmq.connect_sync(broker.url) as client:
        client.send_many("shop.order", [b"x"] * 5)
        with client.subscribe("shop.", group="billing") as consumer:
            for message in consumer.pull(3):
                message.ack()
            client.admin.groups()
            found = client.admin.stats()
            text = Metrics().text(make_snapshot(1, at(0), found, {}, None))
    assert checked(text) == ""
    values = series(text)
    assert values["qmq_group_ready_messages", "billing"] == 2
    assert values["qmq_subject_received_messages_total", "shop"] == 5
    assert {key[2] for key in values if key[0] == "qmq_file_bytes"} >= {"message_log", "pull_log"}


async def test_a_console_has_them_at_metrics(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, running_console(url) as console:
        await console.app.state.watch.newer_than(0)
        reply = await (await console.browser()).ask("GET", "/metrics")
    assert (reply.status, reply.headers["content-type"]) == (200, metrics_module.CONTENT_TYPE)
    assert ("qmq_up", url.removeprefix("qmq://")) in series(reply.body)


async def test_metrics_are_refused_to_who_may_not_browse_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded_console(tmp_path, monkeypatch) as (console, keys, ops, _):
        await console.app.state.watch.newer_than(0)
        answers = {}
        for token in (None, "console:wrong", token_of(keys, "member"), token_of(keys, "part")):
            reply = await Browser(console.port, token=token).ask("GET", "/metrics")
            assert b"qmq_up" not in reply.body
            answers[token and token.partition(":")[0]] = (reply.status, reply.json()["error"])
        assert answers == {
            None: (401, "unauthorized"), "console": (401, "unauthorized"), "member": (403, "forbidden"),
            "part": (403, "forbidden"),
        }  # fmt: skip
        for token in (token_of(keys, "looker"), ops):
            assert (await Browser(console.port, token=token).ask("GET", "/metrics")).status == 200
