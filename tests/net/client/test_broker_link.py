"""A link connects, and connects again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import Any

import pytest

import qmq
from qmq.errors import BrokerStopping, ConnectionLost, InvalidOption, ProtocolError, UnsupportedVersion, UsageError
from qmq.net.client import broker_link as link_module
from qmq.net.client.backoff import FIRST_DELAY
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.net.scripted import STORE, TIMEOUT_S, scripted_broker


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_it_says_hello_and_closes() -> None:
    async with scripted_broker() as broker:
        async with qmq.connect(broker.url):
            peer = await broker.peer()
        await peer.gone()
        assert peer.hello["protocol"] == frames.PROTOCOL_VERSION
        assert peer.hello["client"].startswith("qmq-python/")


async def test_an_unreachable_broker_is_a_clear_error() -> None:
    ports = [free_port(), free_port()]
    with pytest.raises(ConnectionLost, match=rf"{ports[0]}.*{ports[1]}.*qmq serve"):
        async with qmq.connect(",".join(f"qmq://127.0.0.1:{port}" for port in ports)):
            pass


async def test_a_client_waits_for_a_broker_that_starts_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qmq.client")
    async with scripted_broker() as broker:
        await broker.close()

        async def connected() -> qmq.Client:
            return await qmq.connect(broker.url, wait=30)

        connecting = asyncio.create_task(connected())
        while "waiting for one" not in caplog.text:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.001)
        await broker.listen()
        client = await connecting
        await broker.peer()
        await client.close()


async def test_a_client_waits_no_longer_than_it_is_told() -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"within 0\.01 s.*qmq serve"):
        await qmq.connect(f"qmq://127.0.0.1:{free_port()}", wait=0.01)
    assert time.monotonic() - began >= 0.01


async def test_a_client_may_be_awaited_and_closed() -> None:
    async with scripted_broker() as broker:
        client = await qmq.connect(broker.url, name="billing", app="shop")
        peer = await broker.peer()
        assert (peer.hello["name"], peer.hello["app"]) == ("billing", "shop")
        await client.close()
        await client.close()
        await peer.gone()
        with pytest.raises(UsageError, match="closed"):
            await client.send("a", b"1")
        async with await qmq.connect(broker.url) as client:
            await broker.peer()
            with pytest.raises(UsageError, match="one `async with` block"):
                await client.__aenter__()


async def test_a_host_that_does_not_exist_is_a_clear_error() -> None:
    with pytest.raises(ConnectionLost, match="no broker can be reached"):
        async with qmq.connect("qmq://no-such-host.invalid"):
            pass


async def test_a_server_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = qmq.connect(f"qmq://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
            await client.__aenter__()


async def test_a_server_that_is_reached_and_silent_gets_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = qmq.connect(f"qmq://127.0.0.1:{silent.getsockname()[1]}", wait=1.5)
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.(1|2) s"):
            await client.__aenter__()


async def test_the_first_address_that_answers_is_used() -> None:
    async with scripted_broker() as broker, qmq.connect(f"qmq://127.0.0.1:{free_port()},{broker.url}"):
        await broker.peer()


@pytest.mark.parametrize("refusal", [UnsupportedVersion("speak 2"), ProtocolError("no")])
async def test_a_refusal_for_good_is_raised(refusal: qmq.QmqError) -> None:
    async with scripted_broker() as broker:
        broker.refusal = refusal
        with pytest.raises(type(refusal), match=str(refusal)):
            async with qmq.connect(broker.url):
                pass


async def test_a_refusal_that_can_pass_names_its_cause() -> None:
    async with scripted_broker() as broker:
        broker.refusal = BrokerStopping("shutting down")
        with pytest.raises(ConnectionLost, match="shutting down"):
            async with qmq.connect(broker.url):
                pass


async def test_send_timeout_must_be_well_below_the_brokers_memory_of_producers() -> None:
    async with scripted_broker(producer_ttl_ms=60_000) as broker:
        with pytest.raises(InvalidOption, match="producer_ttl_ms 60000"):
            async with qmq.connect(broker.url, send_timeout=30):
                pass
        async with qmq.connect(broker.url, send_timeout=29.9):
            pass


async def test_a_client_is_used_once_and_inside_its_block() -> None:
    async with scripted_broker() as broker:
        client = qmq.connect(broker.url)
        with pytest.raises(UsageError, match="async with"):
            await client.send("a", b"")
        with pytest.raises(UsageError, match="async with"):
            client.send_nowait("a", b"")
        async with client:
            with pytest.raises(UsageError, match="call connect again"):
                await client.__aenter__()
        for call in (client.send("a", b""), client.flush(), client.last_sequence()):
            with pytest.raises(UsageError, match="closed"):
                await call


async def test_it_connects_again_and_sends_the_same_bytes() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        sending = asyncio.ensure_future(client.send("a", b"body"))
        peer = await broker.peer()
        before = bytes((await peer.batch())[0].payload)
        peer.drop()
        peer = await broker.peer()
        frame, _ = await peer.batch()
        assert bytes(frame.payload) == before
        peer.stored(frame, first_sequence=5)
        assert (await sending).sequence == 5


async def test_it_waits_for_a_broker_that_is_down_and_sends_then() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        await broker.peer()
        await broker.close()
        sending = asyncio.ensure_future(client.send("a", b"body"))
        await asyncio.sleep(0)
        await broker.listen()
        peer = await broker.peer()
        frame, _ = await peer.batch()
        peer.stored(frame)
        await sending


async def test_a_welcome_that_is_none_is_waited_out_on_the_way_back() -> None:
    """One may have been damaged on the way; three in a row are final."""
    async with scripted_broker() as broker, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(qmq.connect(broker.url))
        peer = await broker.peer()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        await peer.batch()
        broker.welcome["store_id"] = "damaged"
        peer.drop()
        peer = await broker.peer()
        broker.welcome["store_id"] = STORE
        await peer.gone()
        peer = await broker.peer()
        frame, _ = await peer.batch()
        peer.stored(frame)
        await sending
        sending = asyncio.ensure_future(client.send("a", b"x"))
        await peer.batch()
        broker.welcome["store_id"] = "damaged"
        peer.drop()
        for _ in range(3):
            await (await broker.peer()).gone()
        with pytest.raises(qmq.SendUnknown, match="WELCOME"):
            await sending
        with pytest.raises(ProtocolError, match="WELCOME"):
            await stack.aclose()


async def test_a_refusal_for_good_on_the_way_back_ends_the_client() -> None:
    async with scripted_broker() as broker, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(qmq.connect(broker.url))
        peer = await broker.peer()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        await peer.batch()
        broker.refusal = UnsupportedVersion("speak 2")
        peer.drop()
        with pytest.raises(qmq.SendUnknown, match="speak 2"):
            await sending
        for call in (client.send("a", b"x"), client.last_sequence(), client.flush()):
            with pytest.raises(UnsupportedVersion, match="speak 2"):
                await call
        with pytest.raises(UnsupportedVersion):
            client.send_nowait("a", b"x")
        with pytest.raises(UnsupportedVersion):
            await stack.aclose()


async def test_a_client_whose_token_has_ended_logs_in_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """A broker lets failed logins wait, all the longer the more clients there are on a machine."""
    async with scripted_broker() as broker:
        client = await qmq.connect(broker.url, token="billing:secret")
        peer = await broker.peer()
        asked = asyncio.ensure_future(client.admin.rights())
        await peer.frame(FrameKind.ADMINISTER)
        peer.refuse(0, qmq.Unauthorized("token 'billing' was revoked"))
        peer.transport.close()
        for call in (asked, client.admin.rights(), client.send("a", b"x")):
            with pytest.raises(qmq.Unauthorized, match="was revoked"):
                async with asyncio.timeout(TIMEOUT_S):
                    await call
        await client.close()
        assert len(broker.transports) == 1
    assert "connecting again" not in caplog.text
    assert caplog.text.count("was revoked") == 1


async def test_a_silent_broker_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_TICK", 0.02)
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        await peer.batch()
        monkeypatch.setattr(link_module, "SILENCE", 0.1)
        await peer.gone()
        monkeypatch.setattr(link_module, "SILENCE", 60.0)
        peer = await broker.peer()
        frame, _ = await peer.batch()
        peer.stored(frame)
        await sending


async def test_a_request_is_asked_again_while_that_can_help() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        asking = asyncio.ensure_future(client.last_sequence("job"))
        peer = await broker.peer()
        frame = await peer.frame(FrameKind.LAST_SEQUENCE)
        peer.refuse(frame.request, BrokerStopping("in a moment"))
        frame = await peer.frame(FrameKind.LAST_SEQUENCE)
        peer.drop()
        peer = await broker.peer()
        frame = await peer.frame(FrameKind.LAST_SEQUENCE)
        peer.answer(FrameKind.LAST_SEQUENCE_IS, frame.request, {"sequence": 7})
        assert await asking == 7


async def test_connections_that_end_at_once_are_made_again_ever_more_slowly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    async with scripted_broker() as broker, qmq.connect(broker.url):
        begun, count = loop.time(), 5
        for _ in range(count):
            (await broker.peer()).drop()
        await broker.peer()
        least = sum(FIRST_DELAY * 2**tried / 2 for tried in range(1, count))
        assert loop.time() - begun > least
    told = [record.message for record in caplog.records if "connecting again" in record.message]
    assert len(told) == 1, told


@pytest.mark.parametrize("answer", [{"sequence": "7"}, {"sequence": 1.5}])
async def test_an_answer_of_another_kind_is_refused(answer: dict[str, Any]) -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        asking = asyncio.ensure_future(client.last_sequence("job"))
        peer = await broker.peer()
        frame = await peer.frame(FrameKind.LAST_SEQUENCE)
        peer.answer(FrameKind.LAST_SEQUENCE_IS, frame.request, answer)
        with pytest.raises(ProtocolError, match="LAST_SEQUENCE_IS"):
            await asking


async def test_an_answer_to_a_batch_that_is_too_short_ends_the_connection() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        sending = asyncio.ensure_future(client.send("a", b"x"))
        peer = await broker.peer()
        frame, _ = await peer.batch()
        peer.answer(FrameKind.SENT, frame.request, payload=frames.SENT.pack(1, 1, 0, b"store1", 2) + bytes(8))
        await peer.gone()
        peer = await broker.peer()
        frame, _ = await peer.batch()
        peer.stored(frame)
        await sending


async def test_a_broker_that_reads_slowly_is_written_to_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        peer.transport.pause_reading()
        connection = client._brokers.connection
        assert connection is not None
        paused = asyncio.Event()
        pause = connection.pause_writing
        monkeypatch.setattr(connection, "pause_writing", lambda: (pause(), paused.set()))
        sending = asyncio.ensure_future(client.send_many("a", [bytes(1 << 20)] * 40))
        await paused.wait()
        transport = connection._transport
        assert transport is not None
        for _ in range(20):
            await asyncio.sleep(0)
        assert transport.get_write_buffer_size() < 8 << 20
        peer.transport.resume_reading()
        for number in range(40):
            frame, _ = await peer.batch()
            peer.stored(frame, first_sequence=number)
        assert [receipt.sequence for receipt in await sending] == list(range(40))
