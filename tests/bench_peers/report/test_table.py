"""Markdown of the results; it names absent peers and failed steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.peers import registry
from bench.peers.__main__ import cli
from bench.peers.peer import Installed, Peer, Promise
from bench.peers.plan import Step
from bench.peers.report import published, table
from bench.peers.running import Amount, Row
from bench.peers.suite import Suite, failure
from qmq.bench.values import BenchFailed


def suite(tmp_path: Path, missing: Peer) -> Suite:
    qmq, kafka = registry.chosen(["kafka"])
    made = Suite([qmq, kafka, missing], ["move"], 2, Amount(), tmp_path / "home", tmp_path, "make bench-peers")
    told: list[str] = []
    made.peers = [missing]
    made.install(told.append)
    assert told == ["Missing MQ is absent: nobody publishes it"]
    made.peers = [qmq, kafka, missing]
    made.installed |= {"qmq": Installed("0.1.0", 75_000_000), "kafka": Installed("4.3.1", 56_000_000)}
    for number, (ours, theirs) in enumerate([(2_000_000.0, 800_000.0), (1_000_000.0, 500_000.0)]):
        made.rows += [
            (number, Row("send", "qmq", "qmq", "bulk", "page cache", "100 B", ours, "msg/s")),
            (number, Row("send", "kafka", "confluent-kafka", "bulk", "page cache", "100 B", theirs, "msg/s")),
            (number, Row("server", "kafka", "server", "", "page cache", "start", 2.5, "s")),
        ]
    step = Step(1, "move", kafka, Promise.FSYNC)
    made.failures.append(failure(step, BenchFailed("5 messages came,\n10 were sent")))
    return made


def found(tmp_path: Path, missing: Peer) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(suite(tmp_path, missing).found()))
    return told


def test_only_peers_that_are_there_are_planned(tmp_path: Path, missing: Peer) -> None:
    assert {step.peer.name for step in suite(tmp_path, missing).plan()} == {"qmq", "kafka"}


def test_a_number_shows_median_spread_and_ratio(tmp_path: Path, missing: Peer) -> None:
    lines = table.render([found(tmp_path, missing)]).splitlines()
    assert "| broker | client | way | 100 B, msg/s |" in lines
    assert "| QMQ | qmq | bulk | 1.5 M (1 M to 2 M) |" in lines
    assert "| Apache Kafka | confluent-kafka | bulk | 650 k (500 k to 800 k) [2.25] |" in lines
    assert "- qmq, bulk: send_many of 1,000, 64 calls in flight" in lines


def test_nothing_is_left_out_silently(tmp_path: Path, missing: Peer) -> None:
    text = table.render([found(tmp_path, missing)])
    assert "| Missing MQ | absent | nobody publishes it |" in text
    assert "- kafka, move, fsync, round 2: 5 messages came, 10 were sent" in text
    assert "| 2.5 s | 56 MB |" in text


def test_a_promise_that_cannot_be_kept_says_why(tmp_path: Path, missing: Peer) -> None:
    told = found(tmp_path, missing)
    told["peers"][2] |= {"absent": None, "version": "1", "size_bytes": 1}
    assert "| no: it always syncs | always |" in table.render([told])


def test_a_work_that_cannot_be_done_says_why(tmp_path: Path, missing: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(missing), "lacks", {"move": "it only listens", "idle": "nobody asked for this"})
    made = suite(tmp_path, missing)
    made.rows.append((0, Row("move", "qmq", "qmq", "bulk", "page cache", "100 B", 1.0, "msg/s")))
    text = table.render([json.loads(json.dumps(made.found()))])
    assert "\nMissing MQ can't do this: it only listens.\n" in text
    assert "nobody asked" not in text


def test_saved_json_is_shown_again(tmp_path: Path, missing: Peer) -> None:
    saved = tmp_path / "found.json"
    saved.write_text(json.dumps(found(tmp_path, missing)), "utf-8")
    done = CliRunner().invoke(cli, ["show", str(saved), str(saved), "--out", str(tmp_path / "out"), "--no-draw"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "found.md").read_text("utf-8")
    assert text.count("### Send, acknowledged") == 2
    assert text in done.output


def test_a_long_failure_keeps_its_first_and_last_words(missing: Peer) -> None:
    told = failure(Step(0, "move", missing, Promise.FSYNC), BenchFailed("first " + "x" * 1_000 + " last"))
    assert told["why"].startswith("first")
    assert told["why"].endswith("last")
    assert len(told["why"]) < 400


def test_servers_have_a_line_a_work(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    for work, value in (("move", 40 << 20), ("idle", 50 << 20)):
        made.rows.append(
            (0, Row("server", "qmq", "server", "", "fsync", f"{work}: most memory of its own", value, "bytes"))
        )
    lines = table.render([made.found()]).splitlines()
    assert "| broker | client | way | most memory of its own, MiB |" in lines
    assert "| QMQ | server | during move | 40 |" in lines
    assert "| QMQ | server | during idle | 50 |" in lines


def test_a_rate_and_what_it_is_of_another_have_columns_of_their_own(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    for value, unit in ((300_000.0, "msg/s"), (0.9, "of the same without")):
        made.rows.append((0, Row("backlog", "qmq", "qmq", "bulk", "fsync", "send, 5 waiting", value, unit)))
    lines = table.render([made.found()]).splitlines()
    assert "| broker | client | way | send, 5 waiting, msg/s | send, 5 waiting, of the same without |" in lines
    assert "| QMQ | qmq | bulk | 300 k | 0.9 |" in lines


def test_tools_stand_beside_clients_and_small_brokers_have_a_size(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    made.installed["kafka"] = Installed("4.3.1", 133_120)
    line = next(
        line for line in table.render([made.found()]).splitlines() if line.startswith("| Apache Kafka | 4.3.1 |")
    )
    assert "its Java tools |" in line
    assert line.endswith("| 0.133 MB |")


def test_a_document_shows_its_plots_and_tells_of_brokers_once(tmp_path: Path, missing: Peer) -> None:
    told = found(tmp_path, missing)
    text = table.render([told, told], {(0, "send"): "benchmarks/send.svg"})
    assert text.count("![send](benchmarks/send.svg)") == 1
    assert text.count("| Missing MQ | absent |") == 1


def test_percentiles_share_a_column(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    for share, value in (("p50", 0.25), ("p99", 1.5), ("p99.9", 7.25)):
        row = Row("latency", "qmq", "qmq", "paced", "fsync", f"1 k msg/s end to end {share}", value, "ms")
        made.rows.append((0, row))
    lines = table.render([made.found()]).splitlines()
    assert "| broker | client | way | 1 k msg/s end to end, ms |" in lines
    assert "| QMQ | qmq | paced | 0.25 / 1.5 / 7.25 |" in lines


def test_a_spread_is_told_where_it_tells_something(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    made.rows = [
        (number, Row("send", "qmq", "qmq", way, "fsync", "100 B", value, "msg/s"))
        for way, values in (("bulk", (100.0, 119.0)), ("queued", (100.0, 130.0)))
        for number, value in enumerate(values)
    ]
    lines = table.render([made.found()]).splitlines()
    assert "| QMQ | qmq | bulk | 110 |" in lines
    assert "| QMQ | qmq | queued | 115 (100 to 130) |" in lines


def test_ratios_of_percentiles_share_their_brackets(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    made.rows = [
        (0, Row("latency", peer, client, "paced", "fsync", f"1 k msg/s end to end {share}", value, "ms"))
        for peer, client, values in (("qmq", "qmq", (1.0, 2.0)), ("kafka", "confluent-kafka", (2.0, 3.0)))
        for share, value in zip(("p50", "p99"), values, strict=True)
    ]
    assert "| Apache Kafka | confluent-kafka | paced | 2 / 3 [2 / 1.5] |" in table.render([made.found()]).splitlines()


def test_the_rate_that_was_sent_is_told_where_it_was_not_kept(tmp_path: Path, missing: Peer) -> None:
    made = suite(tmp_path, missing)
    made.rows = [
        (0, Row("latency", "qmq", "qmq", "paced", "fsync", f"{rate} k msg/s sent", value, "msg/s"))
        for rate, value in ((1, 999.0), (50, 31_000.0))
    ]
    lines = table.render([made.found()]).splitlines()
    assert "| broker | client | way | 50 k msg/s sent, msg/s |" in lines
    assert "| QMQ | qmq | paced | 31 k |" in lines


def test_the_goals_come_first_and_what_limits_them_is_kept(tmp_path: Path, missing: Peer) -> None:
    told = found(tmp_path, missing)
    places = tmp_path / "benchmarks"
    places.mkdir()
    (places / "limits.md").write_text("## What limits it\n\nThe speed of light.\n", "utf-8")
    saved = tmp_path / "run" / "found.json"
    saved.parent.mkdir()
    saved.write_text(json.dumps(told), "utf-8")
    published.keep(tmp_path, [saved])
    published.write(tmp_path, draws=False)
    text = (tmp_path / "BENCHMARKS.md").read_text("utf-8")
    assert "| at least 2.5 times | 2.25 | **no** |" in text
    goals, limits, reading, first = map(text.index, ("## Goals", "## What limits it", "## How to read", "## 20"))
    assert goals < limits < reading < first
