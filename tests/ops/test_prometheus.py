"""ops/prometheus.yml and its rules: Prometheus accepts them, they fire when they should, and their metrics exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.console.made_up import group_stats
from tests.console.test_metrics import TOOL, Scraped, full

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
    text = Scraped().text(full(group_stats("billing"))).decode()
    used = set(re.findall(r"qmq_\w+", " ".join(re.findall(r"expr: (.*)", RULES))))
    assert len(used) >= 15
    assert used <= set(re.findall(r"^(\w+)", text, re.MULTILINE))


def test_the_guide_says_what_to_do_for_each_alert() -> None:
    guide = (OPS.parent / "docs" / "production.md").read_text("utf-8")
    alerts = re.findall(r"alert: (\w+)", RULES)
    assert [name for name in alerts if f"`{name}`" not in guide] == []
