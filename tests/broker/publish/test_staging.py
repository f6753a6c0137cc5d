"""Several partitions: batches whose subjects lie in more than one of them, and writes that fail in one of them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.broker.ports.effects import PulledMessages, Refused, Sent
from tests.broker.harness import Driven, bodies_of, runs_of_answer
from tests.fake_disk import FakeDisk


def many(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def driven_by(disk: FakeDisk, directory: Path) -> Driven:
    """Return a broker with two partitions; subject a is 0 and in the first, b is 1 and in the second."""
    driven = Driven(directory, disk=disk, partitions=2)
    driven.do(driven.send_command({"a": [b"a0"], "b": [b"b0"]}))
    driven.send("b", b"b1")
    return driven


def test_an_exact_pull_skips_no_message_that_did_not_fit(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2)
    driven.do(driven.send_command({"a": [b"a"], "b": [b"first"]}))
    sent = [b"first"]
    for number in range(8):  # eight runs in the other partition; the sixth is large
        body = bytes(3_000) if number == 5 else b"small%d" % number
        driven.send("b", body)
        sent.append(body)
    driven.do(driven.send_command({"a": [b"a"], "b": [b"last"]}))
    sent.append(b"last")
    got: list[bytes] = []
    subscription = driven.subscribe("b")
    while runs := driven.pull(subscription, max_bytes=3_000):
        got += bodies_of(runs)
    assert got == sent
    driven.close()


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_whole_batches_are_sent_as_stored(tmp_path: Path, partitions: int) -> None:
    """Of a batch of which the group has taken some already, it gets the cut run as a piece, and the others as one."""
    driven = Driven(tmp_path, partitions=partitions)
    contents = {f"{letter}.x": [letter.encode() * 40] * 3 for letter in "abcdefgh"}
    for number in range(12):
        driven.do(driven.send_command(contents if number % 3 else dict(reversed(contents.items()))))
    whole, begun = driven.subscribe("", group="whole"), driven.subscribe("", group="begun")
    assert (
        sum(run.count for run in driven.pull(begun, max_count=4, min_count=4, timeout_ms=1)) == 4
    )  # a run and a third
    for subscription, pieces in ((whole, 0), (begun, 1)):
        (answer,) = [said for said in driven.do(driven.pull_command(subscription)) if isinstance(said, PulledMessages)]
        assert answer.messages == 12 * 24 - 4 * (pieces > 0)
        starts = [bytes(buffer[:4]) for buffer in answer.buffers if bytes(buffer[:3]) == b"QMQ"]
        assert starts.count(b"QMQp") == starts.count(b"QMQr") == pieces
        assert 1 <= starts.count(b"QMQb") <= 12
        assert len(bodies_of(runs_of_answer(answer))) == answer.messages
    driven.close()


def test_a_failed_write_leaves_no_sequence_twice(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = driven_by(disk, tmp_path)
    disk.fail("pwritev", 1, errno.ENOSPC)
    said = driven.do(
        driven.send_command({"a": [b"lost"], "b": [b"lost"]}, flush=False),
        driven.send_command({"b": [b"b2"]}, flush=False),
    )
    kept = [b"b2"] if any(isinstance(effect, Sent) for effect in said) else []
    assert [type(effect) for effect in said].count(Refused) == 2 - len(kept)
    driven.change_producer()
    driven.send("b", b"b3")
    assert bodies_of(driven.pull(driven.subscribe("b"))) == [b"b0", b"b1", *kept, b"b3"]
    driven.close()


def test_nothing_waits_for_a_batch_that_was_not_written(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = driven_by(disk, tmp_path)
    disk.fail("pwritev", 1, errno.ENOSPC)
    (refused,) = driven.do(driven.send_command({"a": [b"lost"], "b": [b"lost"]}, flush=False))
    assert isinstance(refused, Refused)
    driven.change_producer()
    driven.send("b", b"b2", flush=False)
    assert bodies_of(driven.pull(driven.subscribe("b"))) == [b"b0", b"b1", b"b2"]
    driven.close()
