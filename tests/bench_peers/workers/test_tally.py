"""Comparing messages received and sent."""

from __future__ import annotations

import random

import pytest

from bench.peers.workers.tally import Tally, bodies
from qmq.bench.values import BenchFailed

SENT = (bodies(20) * 3)[:2_500]


def tally(found: list[bytes], portion: int) -> Tally:
    made = Tally(20, len(SENT))
    for start in range(0, len(found), portion):
        made.add(found[start : start + portion])
    return made


@pytest.mark.parametrize("portion", [1, 7, 1_000, 2_500])
@pytest.mark.parametrize("shuffled", [False, True])
def test_all_that_was_sent_is_there_in_any_order(portion: int, shuffled: bool) -> None:
    found = list(SENT)
    if shuffled:
        random.Random(1).shuffle(found)
    tally(found, portion).check()


@pytest.mark.parametrize(
    "found",
    [
        SENT[:-1],
        [*SENT, SENT[0]],
        [*SENT[:-1], SENT[0]],
        [*SENT[:1_200], b"something else entirely", *SENT[1_201:]],
        [*SENT[:1_200], SENT[1_200][:-1] + b"!", *SENT[1_201:]],
        [],
    ],
)
def test_what_is_missing_doubled_or_changed_is_found(found: list[bytes]) -> None:
    with pytest.raises(BenchFailed, match="sent"):
        tally(found, 100).check()
