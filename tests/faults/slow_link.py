"""A TCP relay with a limited rate: all its connections share the rate in each direction."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Final, Self

_BUFFER_BYTES: Final = 16 << 10
_STEP_BYTES: Final = 4 << 10


class _Pace:
    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def pass_on(self, size: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self.bytes_per_s
        await asyncio.sleep(self._free_at - now)


class SlowLink:
    """Listens on a port of its own and relays to *port*. ``up`` and ``down`` count the bytes that it has passed on.

    Of more than *most* connections it takes all that they send, and passes on nothing.
    """

    def __init__(self, port: int, bytes_per_s: float, most: int = 1_000) -> None:
        self._most = most
        self.up = self.down = self.connections = 0
        self._port = port
        self._paces = _Pace(bytes_per_s), _Pace(bytes_per_s)
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)  # sockets that it accepts have the same
        self._server = await asyncio.start_server(self._accept, sock=sock, limit=_BUFFER_BYTES)
        self.url = f"qmq://127.0.0.1:{sock.getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """End all connections at once; what is on its way is lost."""
        for pump in self._pumps:
            pump.cancel()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.connections > self._most:
            self._writers.append(writer)
            return
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        from_broker, to_broker = await asyncio.open_connection(sock=sock, limit=_BUFFER_BYTES)
        self._writers += [writer, to_broker]
        for pump in (self._pump(reader, to_broker, is_up=True), self._pump(from_broker, writer, is_up=False)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        pace = self._paces[0 if is_up else 1]
        try:
            while some := await reader.read(_STEP_BYTES):
                await pace.pass_on(len(some))
                writer.write(some)
                if is_up:
                    self.up += len(some)
                else:
                    self.down += len(some)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.transport.abort()
