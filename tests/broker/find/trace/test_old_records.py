"""Traces of records of version 2 of the pull log, which are kept for a while after an upgrade."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from qmq.broker.find.trace import records
from qmq.broker.find.trace.places import find_place
from qmq.broker.find.trace.records import RecordScan
from qmq.broker.journal.record_bytes import OF_VERSION_2, unpack
from qmq.storage.pull_log.log import PullLog
from tests.broker.find.trace import test_trace_consumer, test_traces
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, killed

OLD_NUMBERS = {kind: old for old, kind in OF_VERSION_2.items()}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Write records as version 2 did; return how many of which kinds."""
    write, found = PullLog.write, Counter[int]()

    def as_before(log: PullLog) -> None:
        for at, (kind, payload) in enumerate(log._staged):
            if kind in OLD_NUMBERS:
                _, fields = unpack(kind, memoryview(payload))
                log._staged[at] = OLD_NUMBERS[kind], msgpack.packb(fields)
                found[OLD_NUMBERS[kind]] += 1
        write(log)

    monkeypatch.setattr(PullLog, "write", as_before)
    return found


@pytest.mark.parametrize(
    "traced",
    [
        test_traces.test_three_groups_one_with_retries_one_dead_one_redriven,
        test_trace_consumer.test_all_that_a_consumer_did_stands_in_order,
    ],
)
def test_they_are_read_like_those_of_today(
    tmp_path: Path, written: Counter[int], traced: Callable[[Path, Any], None]
) -> None:
    traced(tmp_path, killed)
    assert written.total() > 5


def test_as_many_as_count_for_one_are_decoded(tmp_path: Path, written: Counter[int]) -> None:
    driven = Driven(tmp_path, **test_traces.KEPT)
    name = test_traces.id_of(driven, driven.send("a", b"it"))
    consumer = Consumer(driven, "one")
    consumer.pull()
    for number in range(50):
        driven.send("a", b"%d" % number)
        consumer.pull()
        consumer.ack(number)
    place = find_place(driven.store, name.partition, name.position)
    assert place is not None
    scan = RecordScan(driven.store.groups.scan_pulls(0), [place], {})
    while scan.step():
        pass
    assert scan.found.decoded.count == 1 + written.total() // records.OLD_AS_ONE
    assert written.total() > 100
    driven.close()
