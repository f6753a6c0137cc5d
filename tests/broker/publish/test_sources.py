"""The broker stamps the source of a connection into its batches, and refuses what it cannot stamp."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Connected, Disconnected, Send
from qmq.broker.ports.effects import Refused, Sent
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.source import new_source, stamp_of
from tests.broker.harness import PRODUCER, START_US, Driven

HERE = stamp_of(bytes((10, 0, 0, 7)), 51_234)
WITH_TOKEN = stamp_of(bytes(15) + b"\1", 80, "billing")


def batch(sequence: int, source: bytes, deliver_at: int = 0, producer: bytes = PRODUCER) -> memoryview:
    run = RunContent("a", [b"x"], [make_header("k", deliver_at=deliver_at)])
    parts = build_batch([run], created_at_us=START_US, producer_id=producer, producer_sequence=sequence, source=source)
    return memoryview(bytearray(b"".join(parts)))


def sources(driven: Driven, count: int) -> list[tuple[str | None, ...]]:
    subscription = driven.subscribe("a", group="g")
    found = list[tuple[str | None, ...]]()
    while len(found) < count:
        for run in driven.pull(subscription):
            found += [run.source(index)[:2] for index in range(run.count)]
    return found


def test_each_connection_has_its_own(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    assert driven.do(Connected(1, HERE), Connected(2, WITH_TOKEN)) == []
    for number, connection in enumerate((1, 2, 3, 1)):
        (sent,) = driven.do(Send(connection, driven.request(), batch(number, new_source("app", 10)), False))
        assert isinstance(sent, Sent)
    driven.do(Disconnected(1))
    driven.do(Send(1, driven.request(), batch(4, new_source()), False))
    assert sources(driven, 5) == [
        ("10.0.0.7:51234", None), ("[::1]:80", "billing"), (None, None), ("10.0.0.7:51234", None), (None, None),
    ]  # fmt: skip
    driven.close()


def test_a_batch_without_room_for_the_sender_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(Connected(2, WITH_TOKEN))
    (refused,) = driven.do(Send(2, driven.request(), batch(0, new_source("app", 6)), False))
    assert isinstance(refused, Refused)
    assert "needs 7 bytes for the sender's name" in str(refused.error)
    (sent,) = driven.do(Send(2, driven.request(), batch(0, new_source("app", 7)), False))
    assert isinstance(sent, Sent)
    driven.close()


@pytest.mark.parametrize("count", [2, 200])
def test_delayed_messages_keep_the_source_of_each_sender(tmp_path: Path, count: int) -> None:
    driven = Driven(tmp_path)
    for number in range(count):
        driven.do(Connected(number, stamp_of(bytes((10, 0, 0, number)), 1_000 + number)))
        producer = number.to_bytes(16, "big")
        driven.do(Send(number, driven.request(), batch(0, new_source("app"), 1_000_000, producer), False))
    driven.advance(2_000_000)
    found = sources(driven, count)
    assert found == [(f"10.0.0.{number}:{1_000 + number}", None) for number in range(count)]
    driven.close()
