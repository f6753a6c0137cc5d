"""The bare copy beside the brokers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers import loopback
from qmq.bench.processes import LoadWorker
from qmq.bench.values import BenchFailed


def test_a_copy_moves_what_was_asked_for(tmp_path: Path) -> None:
    assert loopback.rate(tmp_path, 100, 20_000) > 0


def test_a_copy_that_lost_bytes_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = LoadWorker.result

    def short(self: LoadWorker) -> dict[str, object]:
        return result(self) | {"bytes": 1 if "sink" in self.name else 2}

    monkeypatch.setattr(LoadWorker, "result", short)
    with pytest.raises(BenchFailed, match="received 1 of 2 bytes"):
        loopback.rate(tmp_path, 100, 1_000)
