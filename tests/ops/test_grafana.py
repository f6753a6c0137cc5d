"""ops/grafana-dashboard.json: its queries are PromQL, a real scrape has their metrics and labels, no panel hides."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import qmq
from qmq.console.metrics import Metrics
from qmq.console.snapshot import make_snapshot
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.archive_receipt import ArchiveReceipt, write_receipt
from tests.broker_process import running
from tests.console.made_up import at
from tests.ops.test_prometheus import OPS, RULES, ran

DASHBOARD: dict[str, Any] = json.loads((OPS / "grafana-dashboard.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS: list[dict[str, str]] = [target for panel in PANELS for target in panel["targets"]]
VARIABLES: list[dict[str, Any]] = DASHBOARD["templating"]["list"]


def metrics_of(expressions: str) -> set[str]:
    return set(re.findall(r"\bqmq_\w+", expressions))


async def scrape(directory: Path) -> str:
    """The metrics of a broker with a consumer, a refused request, a group whose messages wait, and a segment that is in
    an archive.
    """
    async with running(directory) as broker, qmq.connect(broker.url) as client:
        await client.send("shop.order", b"x")
        partition = broker.store.partitions[0]
        partition.seal()
        base, end = partition.message_log.sealed[0]
        receipt = ArchiveReceipt(broker.store.store_id.hex(), 0, base, end, end - base, 0, "/backup/archive", 1)
        write_receipt(Disk(), partition.message_log.directory, receipt)
        async with client.subscribe("shop.", group="idle"):
            pass
        async with client.subscribe("shop.", group="billing") as consumer:
            (message,) = await consumer.pull(1)
            await message.ack()
            with pytest.raises(qmq.UnknownGroup):
                await client.admin.consumers("nobody")
            stats = await client.admin.stats()
    return Metrics().text(make_snapshot(1, at(0), stats, {}, None)).decode()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each metric of a real scrape."""
    labels = dict[str, set[str]]()
    text = asyncio.run(scrape(tmp_path_factory.mktemp("scraped")))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_a_real_scrape_has_every_metric_of_the_dashboard_and_of_the_rules(scraped: dict[str, set[str]]) -> None:
    shown = metrics_of(" ".join(target["expr"] for target in TARGETS))
    shown |= metrics_of(" ".join(variable["query"] for variable in VARIABLES))
    alerting = metrics_of(" ".join(re.findall(r"expr: (.*)", RULES)))
    assert (len(shown) >= 30, len(alerting) >= 15) == (True, True)
    assert (shown | alerting) - set(scraped) == set()


def test_series_have_the_labels_that_are_asked_for_and_shown(scraped: dict[str, set[str]]) -> None:
    for target in TARGETS:
        for metric, selector in re.findall(r"\b(qmq_\w+)\{(.*?)\}", target["expr"]):
            assert set(re.findall(r"(\w+)=~", selector)) <= scraped[metric], target
        known = set[str]().union(*(scraped[metric] for metric in metrics_of(target["expr"])))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, target


def test_every_query_is_promql(tmp_path: Path) -> None:
    """Prometheus has no command for a query alone, so each becomes a rule."""
    queries = [re.sub(r"\$__rate_interval", "5m", target["expr"]) for target in TARGETS]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    code, shown = ran("check", "rules", path)
    assert (code, f"{len(rules)} rules found" in shown) == (0, True), shown


def test_variables_are_known() -> None:
    used = set(re.findall(r"\$\{?([a-z]\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == {variable["name"] for variable in VARIABLES}


def test_panels_have_titles_and_units_and_places_of_their_own() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert (bool(panel["title"]), place["x"] + place["w"] <= 24, taken & cells) == (True, True, set())
        taken |= cells
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
