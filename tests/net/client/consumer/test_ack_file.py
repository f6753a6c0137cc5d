"""Acks that did not reach the broker are read from a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import qmq
from qmq.net.client.consumer import ack_file as keeping
from qmq.net.client.consumer import pull as pulling
from qmq.net.client.consumer.ack_file import StateFile, state_directory
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import KnownConsumer
from tests.net.client.consumer.test_pull import batch
from tests.net.scripted import START_US, STORE, Peer, scripted_broker


async def entered(client: qmq.Client, peer: Peer) -> tuple[qmq.Consumer, dict[str, object]]:
    consumer = client.subscribe("a.", group="g", consumer="c1")
    entering = asyncio.ensure_future(consumer.__aenter__())
    said = await peer.subscribed()
    await entering
    return consumer, said


async def test_the_next_process_announces_acks_that_were_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "WRITE_DELAY", 0.0)
    monkeypatch.setattr(pulling, "FLUSH_TIMEOUT", 0.05)
    async with scripted_broker() as broker:
        async with qmq.connect(broker.url) as client:
            peer = await broker.peer()
            consumer, said = await entered(client, peer)
            assert "known" not in said
            pulling_task = asyncio.ensure_future(consumer.pull())
            request, _ = await peer.pulled()
            peer.messages(request, batch(b"0", b"1", b"2"))
            messages = await pulling_task
            messages[1].ack()
            messages[2].ack()
            await peer.frame(FrameKind.ACK)  # which is not answered
            await consumer.__aexit__(None, None, None)
        file = StateFile.open(state_directory(), STORE, "g", "c1")
        assert file.read() == KnownConsumer(START_US, 1, 0, 3, (1, 3))
        file.close()
        async with qmq.connect(broker.url) as client:
            peer = await broker.peer()
            _, said = await entered(client, peer)
            assert said["known"] == [START_US, 1, 0, 3, 1, 3]
            assert said["known_crc"] == frames.pack_numbers([START_US, 1, 0, 3, 1, 3])[1]


async def test_a_consumer_whose_file_is_locked_works_without_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = StateFile.open(state_directory(), STORE, "g", "c1")
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        await entered(client, peer)
        peer.drop()
        await (await broker.peer()).subscribed()
    assert caplog.text.count("another process has it") == 1
    other.close()


async def test_a_consumer_that_cannot_write_its_file_works_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "file"))
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        await entered(client, await broker.peer())
    assert caplog.text.count("has no state file") == 1


async def test_a_consumer_without_a_given_id_keeps_no_file() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        consumer = client.subscribe("a.", group="g")
        entering = asyncio.ensure_future(consumer.__aenter__())
        await peer.subscribed()
        await entering
    assert not state_directory().exists() or not os.listdir(state_directory())
