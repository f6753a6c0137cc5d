"""A reader of a cold log, in real processes: the broker's loop waits for no disk."""

from __future__ import annotations

from pathlib import Path

from qmq.bench.backlog import cold
from qmq.bench.context import Bench
from tests.bench.conftest import TINY


def test_the_loop_does_not_wait_for_the_disk_of_a_cold_reader(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TINY._replace(restart_bytes=64 << 20), None, {"segment_bytes": "32MiB"})
    found = {value.what: value.value for value in cold(bench)}
    print(found)
    # One for each 8 MiB at the least when maps are read without asking. Another process may cause one.
    assert found["the cold reader, waits of the loop for the disk"] <= 1
    assert found["growth of RssAnon"] < 16
    assert found["the cold reader"] > 0
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
