"""ops/prometheus.yml and its rules: Prometheus accepts them, they fire when they should, and their metrics exist."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import qmq
from tests.broker_process import running_broker
from tests.console.consoles import running_console
from tests.console.made_up import group_stats
from tests.console.test_metrics import TOOL, Scraped, full, series

OPS = Path(__file__).parents[2] / "ops"
RULES = (OPS / "qmq-rules.yml").read_text("utf-8")


def ran(*arguments: str | Path) -> tuple[int, str]:
    assert TOOL is not None, "make env-ops installs promtool"
    done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_prometheus_accepts_them(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "qmq-rules.yml"):
        shutil.copy(OPS / name, tmp_path)
    code, shown = ran("check", "config", tmp_path / "prometheus.yml")
    assert (code, "SUCCESS" in shown) == (0, True), shown


def test_alerts_fire_when_they_should() -> None:
    code, shown = ran("test", "rules", OPS / "qmq-rules-test.yml")
    assert code == 0, shown


def test_each_alert_is_seen_to_fire() -> None:
    firing = re.findall(r"alertname: (\w+)\n +exp_alerts:\n", (OPS / "qmq-rules-test.yml").read_text("utf-8"))
    assert set(firing) == set(re.findall(r"alert: (\w+)", RULES))


def test_every_metric_of_the_rules_is_in_a_scrape() -> None:
    text = Scraped().text(full(group_stats("billing", ready=1))).decode()
    used = set(re.findall(r"qmq_\w+", " ".join(re.findall(r"expr: (.*)", RULES))))
    assert len(used) >= 15
    assert used <= set(re.findall(r"^(\w+)", text, re.MULTILINE))


def test_the_guide_says_what_to_do_for_each_alert() -> None:
    guide = (OPS.parent / "docs" / "production.md").read_text("utf-8")
    alerts = re.findall(r"alert: (\w+)", RULES)
    assert [name for name in alerts if f"`{name}`" not in guide] == []


#: A program that takes a message of the group "dead", says so, and waits to be killed.
WORKER = """
import sys, time, qmq
with qmq.connect_sync(sys.argv[1]) as client, client.subscribe("shop.", group="dead") as consumer:
    (message,) = consumer.pull(10, timeout=60)
    print("took", flush=True)
    time.sleep(600)
"""
#: The rules with times of some seconds in place of minutes.
QUICK = RULES.replace("> 300", "> 3").replace("for: 5m", "for: 2s")
#: Seconds between two scrapes, and for how long they go on.
EVERY_S, SCRAPED_S = 0.5, 9


async def test_a_group_whose_workers_died_is_behind_and_has_no_consumer(tmp_path: Path) -> None:
    settings = {"session_timeout_ms": 500, "reconnect_timeout_ms": 100}
    async with running_broker(tmp_path / "data", **settings) as url, qmq.connect(url) as client:
        await client.send("shop.order", b"1")
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, url, stdout=pipe)
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"took\n"
        worker.kill()
        await worker.wait()
        async with running_console(url) as console:
            browser, scrapes = await console.browser(), list[dict[tuple[str, ...], float]]()
            names = (
                "qmq_group_consumers",
                *(f"qmq_group_{name}_messages" for name in ("ready", "retrying", "returned")),
            )
            names += ("qmq_group_oldest_unacked_age_seconds",)
            end = asyncio.get_running_loop().time() + SCRAPED_S
            while asyncio.get_running_loop().time() < end:
                await browser.get("/api/overview")  # somebody looks, so snapshots come each second
                found = series((await browser.ask("GET", "/metrics")).body)
                scrapes.append({key: found[key] for name in names if (key := (name, "dead")) in found})
                await asyncio.sleep(EVERY_S)
        (info,) = await client.admin.groups("dead")
    assert (info.ready, info.in_retry, info.consumers) == (0, 1, 0), "its message is to come again"
    evaluated(tmp_path, scrapes, {"QmqGroupBehind", "QmqNobodyConsumes"})


def evaluated(path: Path, scrapes: list[dict[tuple[str, ...], float]], firing: set[str]) -> None:
    """Prometheus says that these alerts fire for the group "dead" after the last scrape, and no others of groups."""
    (path / "rules.yml").write_text(QUICK)
    keys = sorted({key for scrape in scrapes for key in scrape})
    lines = [
        "rule_files: [rules.yml]",
        "evaluation_interval: 500ms",
        "tests:",
        "  - interval: 500ms",
        "    input_series:",
    ]
    for name, group in keys:
        values = " ".join(f"{scrape[name, group]:g}" if (name, group) in scrape else "_" for scrape in scrapes)
        lines.append(f"""      - {{series: '{name}{{group="{group}"}}', values: "{values}"}}""")
    lines += [
        "    promql_expr_test:", "      - expr: sum by (alertname) (ALERTS{group=~'.+', alertstate='firing'})",
        f"        eval_time: {500 * (len(scrapes) - 1)}ms", "        exp_samples:",
    ]  # fmt: skip
    lines += [f"""          - {{labels: '{{alertname="{name}"}}', value: 1}}""" for name in sorted(firing)]
    (path / "test.yml").write_text("\n".join(lines))
    code, shown = ran("test", "rules", path / "test.yml")
    assert code == 0, (shown, scrapes)
