"""`qmq archive --seal`: everything stored before is archived, whether a broker runs or not."""

from __future__ import annotations

import json
from pathlib import Path

import qmq as client
from tests.archive.orders import write_orders
from tests.broker_process import broker_process
from tests.cli.commands import qmq


def archived(source: Path, to: Path, *options: str, server: str | None = None) -> dict[str, int]:
    done = qmq("archive", str(source), "--to", str(to), "--json", *options, server=server)
    assert done.exit_code == 0, done.output
    found: dict[str, int] = json.loads(done.output)
    return found


def test_a_broker_closes_what_it_writes_and_is_told_from_another(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    with broker_process(source) as broker, client.connect_sync(broker.url) as sender:
        assert archived(source, to, "--seal", server=broker.url)["messages"] == 0, "nothing to close is no error"
        sender.send_many("order", [b"1", b"2", b"3"])
        assert archived(source, to)["messages"] == 0
        assert archived(source, to, "--seal", server=broker.url)["messages"] == 3
        assert archived(source, to, "--seal", server=broker.url)["copied"] == 0
        sender.send("order", b"4")
        assert archived(source, to, "--seal", server=broker.url)["messages"] == 1
        with broker_process(tmp_path / "other") as other:
            wrong = qmq("archive", str(source), "--to", str(to), "--seal", server=other.url)
            assert (wrong.exit_code, "has another data directory" in wrong.output) == (2, True)


def test_of_a_stopped_broker_all_is_closed(tmp_path: Path) -> None:
    sent = write_orders(tmp_path / "data", 5)
    done = archived(tmp_path / "data", tmp_path / "archive", "--seal", server="qmq://127.0.0.1:1")
    assert done["messages"] == sum(count for batch in sent for _, _, count in batch.runs)
