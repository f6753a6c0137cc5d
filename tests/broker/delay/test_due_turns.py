"""However much falls due at once, each tick delivers a bounded part of it, and none twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Send
from qmq.broker.publish.publish import Intake
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.layout import DELIVER_UNIT_US
from qmq.format.pieces import Run
from tests.broker.delay.test_delay import S, crash, follow
from tests.broker.harness import PRODUCER, START_US, Driven
from tests.broker.test_admin_turns import Opcodes
from tests.broker.test_retention_turns import count

#: Subjects of one batch.
SUBJECTS = 1_500
#: The most opcodes of a tick, which are about 10 ms: a run takes 2,200, a message that falls due alone 5,000.
MOST_OPCODES = 600_000
#: The most bytes of a tick beside those of the last batch.
MOST_BYTES = 8 << 20


def together(_number: int) -> int:
    return 50 * S


def one_by_one(number: int) -> int:
    """Return delays of which no two are equal; those of neighbours in a batch are far apart."""
    return 40 * S + number * 797 % SUBJECTS * DELIVER_UNIT_US


def send(driven: Driven, bodies: dict[str, bytes], *delays_us: int) -> None:
    """Send a batch with one message for each of these subjects, each with its delay."""
    runs = [
        RunContent(subject, [body], [make_header(None, deliver_at=delay_us)])
        for (subject, body), delay_us in zip(bodies.items(), delays_us, strict=True)
    ]
    parts = build_batch(runs, created_at_us=START_US, producer_id=PRODUCER, producer_sequence=driven.produced)
    driven.produced += len(runs)
    driven.do(Send(1, driven.request(), memoryview(bytearray(b"".join(parts))), True))


def send_many(driven: Driven, delay_of: Callable[[int], int]) -> None:
    """Send a message of each subject in one batch."""
    send(driven, {f"a.{number}": b"%d" % number for number in range(SUBJECTS)}, *map(delay_of, range(SUBJECTS)))


def pass_time(driven: Driven) -> None:
    driven.now = driven.now._replace(
        monotonic_us=driven.now.monotonic_us + 100 * S, wall_us=driven.now.wall_us + 100 * S
    )


def ticks(driven: Driven) -> Iterator[int]:
    """Tick as long as there is something to do at once; give the opcodes of each."""
    opcodes, deadlines = Opcodes(), list[int | None]()
    while not deadlines or deadlines[-1] == driven.now.monotonic_us:
        yield opcodes.of(lambda: deadlines.append(driven.broker.tick(driven.now)))
        driven.effects()


def pulled(driven: Driven, subscription: int) -> list[Run]:
    runs = list[Run]()
    while some := driven.pull(subscription):
        runs += some
    return runs


@pytest.mark.parametrize("delay_of", [together, one_by_one])
def test_no_tick_is_long_where_a_batch_has_many_subjects(tmp_path: Path, delay_of: Callable[[int], int]) -> None:
    driven = Driven(tmp_path)
    send_many(driven, delay_of)
    subscription = follow(driven)
    pass_time(driven)
    opcodes = list(ticks(driven))
    assert max(opcodes) < MOST_OPCODES
    assert sum(opcodes) < 8_000 * SUBJECTS, "no subject is looked at for each message"
    assert driven.broker.delayed() == {}
    expected = sorted(range(SUBJECTS), key=delay_of)
    assert [int(run.body(0)) for run in pulled(driven, subscription)] == expected
    driven.close()


@pytest.mark.parametrize("stop", ["clean", "kill", "kill behind a checkpoint"])
@pytest.mark.parametrize("delay_of", [together, one_by_one])
def test_what_a_tick_leaves_outlives_the_broker(tmp_path: Path, stop: str, delay_of: Callable[[int], int]) -> None:
    driven = Driven(tmp_path)
    send_many(driven, delay_of)
    pass_time(driven)
    for _ in range(3):
        next(ticks(driven))
        assert 0 < sum(driven.broker.delayed().values()) < SUBJECTS
        if "checkpoint" in stop:
            driven.checkpoint()
        if stop == "clean":
            driven.restart()
        else:
            crash(driven)
    for _ in ticks(driven):
        """Deliver the rest."""
    assert driven.broker.delayed() == {}
    assert sorted(int(run.body(0)) for run in pulled(driven, follow(driven))) == list(range(SUBJECTS))
    driven.close()


def test_so_many_bytes_are_delivered_in_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    size = 600_000
    for _ in range(40):
        send(driven, {"a": b"x" * size}, 50 * S)
    stored = count(monkeypatch, Intake, "append", lambda buffer, *_: len(buffer))
    pass_time(driven)
    for _ in ticks(driven):
        stored.counts.append(0)
    assert sum(stored.counts) > 40 * size
    assert stored.most < MOST_BYTES + size
    assert driven.broker.delayed() == {}
    driven.close()
