"""Who means no good, as bare connections; who does, as a client beside them; and what a broker process takes."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import qmq
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import BrokerProcess
from tests.certificates import active, client_context
from tests.faults.brokers import TIMEOUT_S, broker_in, until
from tests.net.frames import HELLO

KIB: Final = 1 << 10
MIB: Final = 1 << 20
#: What docs/OPERATIONS.md says that a broker takes: by itself, for each connection, and beside max_buffered_bytes.
ITSELF_BYTES: Final = 100 * MIB
CONNECTION_BYTES: Final = 12 * KIB
#: Files that a broker, or this process, may need beside its connections.
_OTHER_FILES: Final = 2_500
_LOOK_S: Final = 0.01

BUFFERED: Final = 16 * MIB
#: Small bounds, so that they are reached.
SETTINGS: Final = {
    "max_frame_bytes": 1 * MIB,
    "max_message_bytes": 256 * KIB,
    "max_pull_bytes": 1 * MIB,
    "max_inflight_bytes": 1 * MIB,
    "max_buffered_bytes": BUFFERED,
    "segment_bytes": 32 * MIB,
}
HELLO_FRAME: Final = frames.encode_frame(FrameKind.HELLO, 1, HELLO)


class UntrustedClient(asyncio.Protocol):
    """One connection, which keeps what the broker says."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._frames: list[Frame] = []
        self.ended = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def end(self) -> None:
        """Send nothing more; TLS cannot close one direction."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._rest += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def send(self, *parts: bytes) -> None:
        """Without waiting until it is gone."""
        self.transport.write(b"".join(parts))

    def unsent(self) -> int:
        """Bytes that the broker has not taken."""
        return self.transport.get_write_buffer_size()

    def frames(self) -> list[Frame]:
        """What the broker has said so far, as far as frames are whole."""
        used = 0
        for frame in frames.split_frames(memoryview(bytes(self._rest)), 1 << 30):
            used += frames.FRAME_SIZE + len(frame.meta) + len(frame.payload)
            self._frames.append(frame)
        del self._rest[:used]
        return self._frames

    def errors(self) -> list[tuple[int, str, str]]:
        """Request, code and text of each error that the broker told."""
        told = []
        for frame in self.frames():
            if frame.kind == FrameKind.ERROR:
                fields = frames.unpack_meta(frame.meta)
                told.append((frame.request, fields["code"], fields["message"]))
        return told

    def last_word(self) -> tuple[str, str]:
        """Code and text of the error that the connection ended with."""
        request, code, text = self.errors()[-1]
        assert request == 0
        return code, text

    def leave(self) -> None:
        """Close it."""
        self.transport.abort()


class Regular:
    """A good client: it sends, pulls what it sent, acks, and goes on. ``rounds`` counts that."""

    def __init__(self) -> None:
        self.rounds = 0

    async def run(self, url: str) -> None:
        """Until it is cancelled. Raises AssertionError when anything else comes than was sent."""
        async with (
            qmq.connect(url, durability="append") as client,
            client.subscribe("regular.", group="regular") as consumer,
        ):
            await consumer.pull(timeout=0)
            while True:
                body = b"%d" % self.rounds
                await client.send("regular.one", body)
                messages = await consumer.pull(max_count=10, timeout=TIMEOUT_S)
                assert [message.body for message in messages] == [body]
                messages[0].ack()
                self.rounds += 1

    async def goes_on(self, rounds: int = 20) -> None:
        """Wait until it has done so many rounds more."""
        wanted = self.rounds + rounds
        await until(lambda: self.rounds >= wanted, f"the good client has done {rounds} rounds more")


class Memory:
    """The most that a process had as memory of its own."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.most = 0

    def look(self) -> int:
        """RssAnon now, in bytes."""
        line = next(line for line in self._status.read_text("ascii").splitlines() if line.startswith("RssAnon:"))
        now = int(line.split()[1]) * KIB
        self.most = max(self.most, now)
        return now

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)


class Warnings(logging.Handler):
    """What clients of this process complain of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


class Siege:
    """A broker process under attack, the good client, and who attacks."""

    def __init__(self, broker: BrokerProcess, regular: Regular) -> None:
        self.broker = broker
        self.regular = regular
        self.untrusted_clients: list[UntrustedClient] = []
        host, _, port = broker.url.partition("://")[2].partition(":")
        self.address = (host, int(port))
        files = active()
        self._tls: dict[str, Any] = {}
        if files is not None:
            self._tls = {"ssl": client_context(files), "server_hostname": host}

    async def untrusted(self, hello: bool = False, receive_bytes: int = 0) -> UntrustedClient:
        """One more connection. *receive_bytes*: how much the system is to keep of what the untrusted client has not
        read.
        """
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, self.address)
        _, untrusted = await loop.create_connection(UntrustedClient, sock=sock, **self._tls)
        self.untrusted_clients.append(untrusted)
        if hello:
            untrusted.send(HELLO_FRAME)
            await until(lambda: bool(untrusted.frames()), "an untrusted client is greeted")
            assert untrusted.frames().pop().kind == FrameKind.WELCOME
        return untrusted

    async def solo(self, receive_bytes: int) -> tuple[UntrustedClient, int]:
        """One that is subscribed to all of ``large.``, from the first message, and the number of that."""
        untrusted = await self.untrusted(hello=True, receive_bytes=receive_bytes)
        fields = {"group": None, "prefixes": ["large."], "consumer": "c", "start": "first"}
        untrusted.send(frames.encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))
        await until(lambda: bool(untrusted.frames()), "an untrusted client is subscribed")
        return untrusted, frames.unpack_meta(untrusted.frames().pop().meta)["subscription"]

    async def crowd(self, count: int, hello: bool = False, receive_bytes: int = 0) -> list[UntrustedClient]:
        """So many more, a few at a time."""
        gate = asyncio.Semaphore(200)

        async def one() -> UntrustedClient:
            async with gate:
                return await self.untrusted(hello, receive_bytes)

        return list(await asyncio.gather(*(one() for _ in range(count))))


def connections_at_most(wanted: int) -> int:
    """How many connections this process may have, *wanted* at most: the limit of open files is raised for it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - _OTHER_FILES)


@asynccontextmanager
async def siege(path: Path, connections: int = 1_000, silent: int = 0, **settings: Any) -> AsyncIterator[Siege]:
    """A broker process on *path* and a good client that goes on all the while, or the test fails.

    *silent* untrusted clients are there before it. At the end: the broker took no more memory than docs/OPERATIONS.md
    says for so many *connections*, wrote nothing to its log meanwhile, stops with exit code 0, and its files are
    faultless.
    """
    async with broker_in(path, **{**SETTINGS, **settings}) as broker:
        regular, memory, warnings = Regular(), Memory(broker.pid), Warnings()
        logging.getLogger("qmq.client").addHandler(warnings)
        tasks = [asyncio.create_task(memory.watch())]
        under = Siege(broker, regular)
        try:
            await under.crowd(silent)  # before the good client comes: beside one, connections are taken slowly
            tasks.append(asyncio.create_task(regular.run(broker.url)))
            await regular.goes_on()
            said_before = len(broker.log().splitlines())
            yield under
            await regular.goes_on()
            assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
        finally:
            logging.getLogger("qmq.client").removeHandler(warnings)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for untrusted in under.untrusted_clients:
                untrusted.leave()
        memory.look()
        bound = ITSELF_BYTES + BUFFERED + connections * CONNECTION_BYTES
        print(f"{regular.rounds} rounds of the good client, RssAnon {memory.most >> 20} of {bound >> 20} MiB at most")
        assert memory.most <= bound
        said = [line for line in broker.log().splitlines()[said_before:] if " is refused: it speaks TLS" not in line]
        code = await asyncio.to_thread(broker.stop)
        assert said == [], "\n".join(said[:20])
        assert warnings.records == [], "the good client lost its connection"
        assert code == 0, (code, broker.log())
        report = verify(path, Disk())
        assert not report.faults, report.faults
