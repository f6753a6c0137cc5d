"""`qmq archive`: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.archive.archives import GONE
from tests.archive.orders import write_orders
from tests.cli.commands import qmq


def test_archives_and_sums_up(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "new" / "archive"
    sent = write_orders(source, 20)
    first = qmq("archive", str(source), "--to", str(to), "--json")
    assert first.exit_code == 0, first.output
    said = json.loads(first.output)
    assert said["messages"] == sum(count for batch in sent for _, _, count in batch.runs)
    assert said["receipts"] == said["copied"] == len(list(source.rglob("*.receipt")))
    again = qmq("archive", str(source), "--to", f"file://{to}", "--as", "segments")
    assert again.exit_code == 0
    assert f"0 segments copied (0 bytes, 0 messages), {said['copied']} there already\n" in again.output


def test_refuses_what_cannot_be(tmp_path: Path) -> None:
    wrong = qmq("archive", str(tmp_path), "--to", str(tmp_path / "archive"))
    assert (wrong.exit_code, "is no data directory" in wrong.output) == (2, True)
    write_orders(tmp_path / "data", 2)
    gopher = qmq("archive", str(tmp_path / "data"), "--to", "gopher://a/b")
    assert (gopher.exit_code, "gopher://a/b is no known kind" in gopher.output) == (2, True)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    write_orders(tmp_path / "data", 2)
    to = tmp_path / "archive"
    to.mkdir()
    held = {"host": "elsewhere", "process": 7, "started": "now", "renewed_at_us": 1 << 62}
    (to / "_lock").write_text(json.dumps(held))
    busy = qmq("archive", str(tmp_path / "data"), "--to", str(to))
    assert (busy.exit_code, "process 7 on elsewhere" in busy.output) == (1, True)
    (to / "_lock").write_text(json.dumps({**held, "host": GONE.host, "process": 2**30}))
    assert qmq("archive", str(tmp_path / "data"), "--to", str(to)).exit_code == 0
