"""What one task does: messages or damages of its part; nothing of an empty one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from qmq.errors import BadBytes
from qmq_spark.options import read_options
from qmq_spark.parts import Part, read_part
from qmq_spark.planning import open_source, plan
from tests.history.orders import rows_in, write_orders
from tests.storage.stores import damage


def test_messages_and_damages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sent = write_orders(tmp_path, 30)
    rows = rows_in(tmp_path)
    damage(tmp_path, sent[10], len(sent[10].data) - 1)
    (stretches,) = plan(open_source(str(tmp_path)), read_options({"path": "x"}).wanted, 1 << 30)
    part = Part(stretches)

    def found(**options: str) -> int:
        read = read_options({"path": str(tmp_path), **options})
        return sum(batch.num_rows for batch in read_part(read, read.schema, read.wanted, part))

    with pytest.raises(BadBytes, match="corrupt=skip"):
        found()
    with caplog.at_level(logging.WARNING, "qmq_spark"):
        assert found(corrupt="skip") == len(rows) - sum(count for _, _, count in sent[10].runs)
    assert "1 stretches of bad bytes were skipped" in caplog.text
    assert found(view="damages") == 1
    read = read_options({"path": str(tmp_path / "not looked at")})
    assert list(read_part(read, read.schema, read.wanted, Part([]))) == []
