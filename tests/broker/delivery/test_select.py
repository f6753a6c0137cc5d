"""The choice of new messages: whole batches where a limit allows it, else some runs of a batch as one piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.effects import PulledMessages
from qmq.format.layout import BATCH_MAGIC, RUNS_MAGIC
from tests.broker.harness import Driven, bodies_of, runs_of_answer

RUNS = 10


def many_runs(tmp_path: Path, batches: int, partitions: int = 1) -> Driven:
    """Return a broker with batches of RUNS runs, of one message each."""
    driven = Driven(tmp_path, partitions=partitions)
    for batch in range(batches):
        driven.do(driven.send_command({f"a.{run % 2}.{run}": [b"%d" % (batch * RUNS + run)] for run in range(RUNS)}))
    return driven


def answers(
    driven: Driven, prefix: str, max_count: int, min_count: int = 1, max_bytes: int = 1 << 20
) -> list[PulledMessages]:
    """Pull all messages with these limits; return the answers that have some."""
    subscription, found = driven.subscribe(prefix, group="g"), list[PulledMessages]()
    while True:
        pull = driven.pull_command(subscription, max_count=max_count, max_bytes=max_bytes)
        pull = pull._replace(min_count=min_count, timeout_ms=1_000 if min_count > 1 else 0)
        answer = next((effect for effect in driven.do(pull) if isinstance(effect, PulledMessages)), None)
        if answer is None or not answer.messages:
            return found
        found.append(answer)
        driven.acknowledge(subscription, answer)


def parts_of(answer: PulledMessages) -> list[int]:
    """Return the magics of the batches and pieces of an answer."""
    payload, magics = b"".join(answer.buffers), list[int]()
    while payload:
        magics.append(int.from_bytes(payload[:4], "little"))
        payload = payload[int.from_bytes(payload[8:12], "little") :]
    return magics


def bodies(found: list[PulledMessages]) -> list[bytes]:
    return [body for answer in found for body in bodies_of(runs_of_answer(answer))]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    ("max_count", "counts"),
    [(60, [60]), (59, [50, 10]), (25, [20, 20, 20]), (10, [10] * 6), (19, [10] * 6), (20, [20] * 3)],
)
def test_a_limit_within_a_batch_takes_the_whole_batches_before_it(
    tmp_path: Path, max_count: int, counts: list[int], partitions: int
) -> None:
    driven = many_runs(tmp_path, 6, partitions)
    found = answers(driven, "a.", max_count)
    assert [answer.messages for answer in found] == counts
    assert {magic for answer in found for magic in parts_of(answer)} == {BATCH_MAGIC}
    assert bodies(found) == [b"%d" % number for number in range(60)]
    driven.close()


@pytest.mark.parametrize(("max_count", "counts"), [(5, [5, 5] * 6), (7, [7, 3, 7, 3, 7, 3, 7, 3, 7, 3, 7, 3])])
def test_a_limit_smaller_than_a_batch_cuts_it_into_few_pieces(
    tmp_path: Path, max_count: int, counts: list[int]
) -> None:
    driven = many_runs(tmp_path, 6)
    found = answers(driven, "a.", max_count)
    assert sum(answer.messages for answer in found) == 60
    assert max(answer.messages for answer in found) == max_count
    assert max(len(parts_of(answer)) for answer in found) <= 2
    assert {parts_of(answer)[0] for answer in found} == {RUNS_MAGIC}
    assert bodies(found) == [b"%d" % number for number in range(60)]
    driven.close()


def test_whole_batches_are_not_enough_where_the_consumer_asks_for_more(tmp_path: Path) -> None:
    driven = many_runs(tmp_path, 6)
    found = answers(driven, "a.", 15, min_count=15)
    assert [answer.messages for answer in found] == [15] * 4
    assert bodies(found) == [b"%d" % number for number in range(60)]
    driven.close()


def test_a_few_messages_before_a_large_batch_are_not_an_answer(tmp_path: Path) -> None:
    """The rest of a batch that was cut goes with a part of the next one rather than alone."""
    driven = Driven(tmp_path)
    driven.do(driven.send_command({f"a.{run}": [b"m"] for run in range(3)}))
    driven.do(driven.send_command({f"a.{run}": [b"m"] for run in range(30)}))
    found = answers(driven, "a.", 20)
    assert [answer.messages for answer in found] == [20, 13]
    assert [parts_of(answer) for answer in found] == [[BATCH_MAGIC, RUNS_MAGIC], [RUNS_MAGIC]]
    driven.close()


def test_a_limit_of_bytes_cuts_as_one_of_messages(tmp_path: Path) -> None:
    driven = many_runs(tmp_path, 6)
    found = answers(driven, "a.", 1_000, max_bytes=10_000)
    assert [answer.messages % RUNS for answer in found] == [0] * len(found)
    assert len(found) > 1
    assert bodies(found) == [b"%d" % number for number in range(60)]
    driven.close()


def test_every_second_run_of_a_batch_is_one_piece(tmp_path: Path) -> None:
    driven = many_runs(tmp_path, 6)
    (answer,) = answers(driven, "a.1.", 1_000)
    assert parts_of(answer) == [RUNS_MAGIC] * 6
    assert bodies([answer]) == [b"%d" % number for number in range(60) if number % 2]
    driven.close()
