"""qmq/cli/manage/stats.py: what a broker has done, for people and for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import qmq
from tests.broker_process import broker_process
from tests.cli.commands import qmq as run


def test_a_script_gets_all_of_it_in_one_object(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        with qmq.connect_sync(broker.url) as client:
            client.send_many("shop.order", [b"x"] * 5)
            with client.subscribe("shop.", group="billing") as consumer:
                consumer.pull(2)
                done = run("stats", "--json", server=broker.url)
        assert (done.exit_code, done.stderr) == (0, "")
        (row,) = [json.loads(line) for line in done.stdout.splitlines()]
        assert (row["received"], row["totals"]["delivered"]) == (5, 2)
        (group,) = row["groups"]
        assert (group["name"], group["ready"], group["in_flight"]) == ("billing", 3, 2)
        assert group["oldest_unacked"].endswith("Z")
        assert {one["name"]: one["count"] for one in row["durations"]}["send"] >= 1
        lines = [line.split("\t") for line in run("stats", server=broker.url).stdout.splitlines()]
        assert ["received", "5"] in lines
        assert all(len(line) == 2 for line in lines)
