"""A part of a batch that a client has built is a batch of its messages."""

from __future__ import annotations

import pytest

from qmq.format.batch import BatchLimits, check_batch
from qmq.format.build import RunContent, build_batch, cut_batch, make_header
from qmq.format.pieces import bad_messages, stored_runs
from tests.broker.harness import PRODUCER

CONTENTS = {"a.b": 4, "c": 1, "d": 3}
MESSAGES = [(subject, index) for subject, count in CONTENTS.items() for index in range(count)]


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("stop", range(1, 9))
@pytest.mark.parametrize("start", range(8))
def test_a_part_is_a_batch_of_these_messages(start: int, stop: int, headers: bool) -> None:
    if start >= stop:
        start, stop = stop - 1, start + 1
    runs = [
        RunContent(
            subject,
            [f"{subject} {index}".encode() for index in range(count)],
            [make_header(f"k{index}", ("t",), deliver_at=index) for index in range(count)] if headers else None,
        )
        for subject, count in CONTENTS.items()
    ]
    whole = b"".join(build_batch(runs, created_at_us=9, producer_id=PRODUCER, producer_sequence=70))
    part = memoryview(bytearray(b"".join(cut_batch(memoryview(whole), start, stop, 1_000))))
    header = check_batch(part, BatchLimits()).header
    assert (header.created_at_us, header.producer_id, header.producer_sequence) == (9, PRODUCER, 1_000)
    found = list[tuple[str, bytes, str]]()
    for run in stored_runs(part, header):
        assert bad_messages(run) == []
        found += [(run.subject, run.body(at), run.header(at).get("k", [""])[0]) for at in range(run.count)]
    assert found == [
        (subject, f"{subject} {index}".encode(), f"k{index}" if headers else "")
        for subject, index in MESSAGES[start:stop]
    ]
