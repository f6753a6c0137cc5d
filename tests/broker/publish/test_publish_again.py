"""Messages whose rows cannot be read when they are to become visible are visible a moment later."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import StorageFailed
from qmq.storage.consumer_log.partition_index import ConsumerLog
from tests.broker.harness import Driven, bodies_of


def test_what_could_not_be_read_is_published_by_a_later_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.", group="g")
    publish, failures = ConsumerLog.publish, list[int]()

    def failing(log: ConsumerLog, position: int) -> None:
        if len(failures) < 2:
            failures.append(position)
            raise StorageFailed("the disk cannot read this now")
        publish(log, position)

    monkeypatch.setattr(ConsumerLog, "publish", failing)
    driven.send("a.x", b"1")
    assert len(failures) >= 1
    driven.do()
    driven.do()
    assert bodies_of(driven.pull(subscription)) == [b"1"]
    driven.close()
