"""Stopping a broker that is busy: it answers what it has, ends with 0 soon, and nobody loses or doubles anything."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

import qmq
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FLUSH, FrameKind
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import BrokerProcess, running
from tests.certificates import active, client_context
from tests.faults.brokers import TIMEOUT_S, broker_in, until
from tests.faults.ledger import Ledger, drain
from tests.net.frames import HELLO, RawClient, batch, frame, on_uvloop, pull, sent_fields

#: What "within seconds" means here: 3 s each for the disk, for readers and for the checkpoint, and a loaded machine.
SOON_S: Final = 20
SOLO: Final = {"group": None, "prefixes": ["a"], "consumer": "c", "start": None}
#: What a start says after such a stop.
CLEAN: Final = "after a stop that was clean; 0 messages after"
#: Batches that one producer may have in flight.
WINDOW: Final = 64


async def stopped_soon(broker: BrokerProcess, number: signal.Signals = signal.SIGTERM) -> None:
    """Stop it, and see that it ends well and soon, with nothing in its log that should not be there."""
    began = time.monotonic()
    code = await asyncio.to_thread(broker.stop, number)
    took_s = time.monotonic() - began
    assert code == 0, broker.log()
    assert took_s < SOON_S
    assert not re.search("ERROR|WARNING|Traceback", broker.log()), broker.log()
    assert verify(broker.path, Disk()).findings == []
    print(f"stopped in {took_s:.2f} s")


async def test_a_stop_under_load_answers_what_is_in(tmp_path: Path) -> None:
    ledger, ended = Ledger(), asyncio.Event()

    async def produce(url: str, durability: str) -> None:
        async with qmq.connect(url, durability="flush" if durability == "flush" else "append") as client:
            while not ended.is_set():
                entries = [ledger.open(f"{durability}.{number % 3}", 300) for number in range(20)]
                sends = [client.send(entry.subject, entry.body) for entry in entries]
                ledger.acknowledged(entries, await asyncio.gather(*sends))

    async def consume(url: str, timeout: float | None) -> None:
        async with qmq.connect(url) as client, client.subscribe("", group="g") as consumer:
            while True:
                for message in await consumer.pull(timeout=timeout):
                    ledger.entry_of(message)

    async with broker_in(tmp_path / "data") as broker:
        async with asyncio.TaskGroup() as consuming:
            consumers = [consuming.create_task(consume(broker.url, timeout)) for timeout in (None, 0.1, 5.0)]
            async with asyncio.TaskGroup() as producing:
                for durability in ("flush", "append", "flush"):
                    producing.create_task(produce(broker.url, durability))
                for number in (signal.SIGTERM, signal.SIGINT):
                    await ledger.acknowledgements(300)
                    await stopped_soon(broker, number)
                    await asyncio.to_thread(broker.start)
                    # A thread writes the log.
                    await until(lambda: CLEAN in broker.log().rpartition("stopped")[2], "the broker says so")
                ended.set()
            for consumer in consumers:
                consumer.cancel()
        ledger.check(await drain(broker.url, "all"))


async def test_waiting_pulls_end_with_a_clean_error_and_clients_move_on(tmp_path: Path) -> None:
    async with (
        broker_in(tmp_path / "data") as broker,
        qmq.connect(broker.url) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        pulling = asyncio.create_task(consumer.pull())
        answers: list[object] = []
        connection = client._brokers.connection
        assert connection is not None
        subscription = (await connection.request(FrameKind.SUBSCRIBE, SOLO)).meta["subscription"]
        connection.ask(
            FrameKind.PULL,
            answers.append,
            payload=frames.PULL.pack(subscription, 1, 1, 1 << 20, 60_000, frames.NOT_EXPECTED),
        )
        assert await asyncio.to_thread(broker.stop) == 0
        await asyncio.to_thread(broker.start)
        assert [type(answer) for answer in answers] == [qmq.BrokerStopping]
        assert "shutting down" in str(answers[0])
        assert not pulling.done()
        await client.send("a", b"after the restart")
        assert [message.body for message in await pulling] == [b"after the restart"]


class Producer:
    """Keeps batches of one message in flight until the broker says goodbye. ``told`` is what it was answered."""

    def __init__(self, name: int, client: RawClient) -> None:
        self.name = name
        self.sent = 0
        self.told: dict[int, object] = {}
        self._client = client

    async def produce(self) -> None:
        """Send, and go on sending as answers come."""
        for _ in range(WINDOW // 2):
            self._send()
        while (answer := await self._client.read()).request:
            self.told[answer.request - 1] = sent_fields(answer)
            self._send()
        assert code_of(answer) == "broker_stopping"
        assert await self._client.ended()
        await self._client.close()

    async def send_again(self, client: RawClient) -> None:
        """Send the last ones on another connection: answers are what they were."""
        again = range(max(0, self.sent - WINDOW), self.sent)
        client.send(*(frame(FrameKind.SEND, 1 + number, self._batch(number), flags=FLUSH) for number in again))
        for number in again:
            answer = sent_fields(await client.read())
            assert self.told.get(number, answer) == answer
        await client.close()

    def bodies(self) -> list[bytes]:
        """All that it sent."""
        return [self._body(number) for number in range(self.sent)]

    def _send(self) -> None:
        self._client.send(frame(FrameKind.SEND, 1 + self.sent, self._batch(self.sent), flags=FLUSH * (self.sent % 2)))
        self.sent += 1

    def _batch(self, number: int) -> bytes:
        return batch(self._body(number), producer=bytes([self.name] * 16), sequence=number)

    def _body(self, number: int) -> bytes:
        return b"%d of %d" % (number, self.name)


async def test_many_producers_waiting_pulls_and_slow_readers_keep_no_stop_from_ending(tmp_path: Path) -> None:
    """Everybody has requests in flight; what was answered stands, and the rest can be sent again."""
    async with broker_in(tmp_path / "data") as broker:
        async with qmq.connect(broker.url, durability="append") as client:
            await client.send_many("big", [b"x" * 1_000_000] * 40)
        address = ("127.0.0.1", int(broker.url.rpartition(":")[2]))
        waiting_pulls = [await waiting_client(address) for _ in range(20)]
        slow = [slow_reader(address) for _ in range(5)]
        producers = [Producer(name, await RawClient.connect(address)) for name in range(20)]
        async with asyncio.TaskGroup() as producing:
            for producer in producers:
                producing.create_task(producer.produce())
            await until(lambda: all(producer.told for producer in producers), "each was answered something")
            await stopped_soon(broker)
        for waiting in waiting_pulls:
            assert await waiting.error() == (2, "broker_stopping")
            assert await waiting.error() == (0, "broker_stopping")
            await waiting.close()
        for sock in slow:
            sock.close()
        await asyncio.to_thread(broker.start)
        for producer in producers:
            await producer.send_again(await RawClient.connect(address))
        bodies = [message.body for message in await drain(broker.url, "all", "a.b")]
        assert sorted(bodies) == sorted(body for producer in producers for body in producer.bodies())
    unanswered = sum(producer.sent - len(producer.told) for producer in producers)
    print(f"{unanswered} of {len(bodies)} sends were not answered before the end")
    assert unanswered


async def waiting_client(address: tuple[str, int]) -> RawClient:
    """A connection with a pull that waits."""
    client = await RawClient.connect(address)
    client.send(frame(FrameKind.SUBSCRIBE, 1, meta={**SOLO, "prefixes": ["silent"]}))
    subscription = frames.unpack_meta((await client.read()).meta)["subscription"]
    client.send(pull(2, subscription, timeout_ms=3_600_000))
    return client


def code_of(answer: frames.Frame) -> object:
    """The code of an error."""
    assert answer.kind == FrameKind.ERROR, answer
    return frames.unpack_meta(answer.meta)["code"]


def slow_reader(address: tuple[str, int]) -> socket.socket:
    """A connection that asks for 40 MB and reads what fits into its buffer, which is little."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(address)
    files = active()
    if files is not None:
        sock = client_context(files).wrap_socket(sock, server_hostname=address[0])
    sock.sendall(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
    sock.sendall(
        frame(FrameKind.SUBSCRIBE, 2, meta={"group": None, "prefixes": ["big"], "consumer": "c", "start": "first"})
    )
    for request in range(3, 40):  # the broker numbers the subscriptions of a connection from 1
        sock.sendall(pull(request, 1))
    return sock


async def test_a_second_signal_ends_it_at_once_and_loses_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    async with broker_in(tmp_path / "data") as broker, qmq.connect(broker.url) as client:
        entries = [ledger.open("a") for _ in range(50)]
        ledger.acknowledged(entries, await client.send_many("a", [entry.body for entry in entries]))
        await client.send_many("big", [b"x" * 1_000_000] * 40, durability="append")
        sock = slow_reader(("127.0.0.1", int(broker.url.rpartition(":")[2])))
        with sock:
            assert sock.recv(1)
            broker.send_signal(signal.SIGTERM)
            await until(lambda: broker.log().endswith("stopping\n"), "it stops, and waits for one who does not read")
            assert await asyncio.to_thread(broker.stop) == -signal.SIGTERM
        await asyncio.to_thread(broker.start)
        assert broker.logs("after a stop that was not clean")
        ledger.check(await drain(broker.url, "all", "a"))


_OPENS_LONG: Final = (
    "import time; from qmq.daemon import main as wiring; "
    "wiring.Store.open = lambda *rest: print('opening', flush=True) or time.sleep(600); "
    "from qmq.cli.main import cli; cli()"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_while_the_directory_is_opened_is_one_too(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OPENS_LONG, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        assert await process.stdout.readline() == b"opening\n"
        process.send_signal(number)
        assert await process.wait() == 0
        assert (await process.stderr.read()).endswith(b"stopped while the data directory was opened\n")


async def _stop_while_clients_leave(path: Path) -> None:
    async with running(path) as broker:
        connections = [socket.create_connection(broker.address) for _ in range(5)]
        for connection in connections:
            connection.sendall(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
            connection.setblocking(False)
        for connection in connections:
            assert await asyncio.get_running_loop().sock_recv(connection, 4_096)
        for connection in connections:
            connection.close()
        # and before the broker has seen that, it stops
    assert verify(path, Disk()).findings == []


async def test_a_stop_bears_clients_that_leave_in_the_same_moment(tmp_path: Path) -> None:
    await _stop_while_clients_leave(tmp_path / "data")


@on_uvloop
async def test_a_stop_bears_clients_that_leave_in_the_same_moment_on_its_own_loop(tmp_path: Path) -> None:
    await _stop_while_clients_leave(tmp_path / "data")
