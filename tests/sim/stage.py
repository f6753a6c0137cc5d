"""What the client library takes from its machine, in a simulated world: clocks, chance, files, and a thread that beats.

Files are real, in a directory of the history's own. A client may be killed at any operation on them.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from qmq.errors import QmqError
from qmq.net.client.address import Address
from qmq.net.client.connection import BrokerConnection
from qmq.net.client.heartbeat import HeartbeatSender
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.sim.world import START_US, Killed, Process, World


class Client(Process):
    """A process of a program that uses the client library."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.files: set[int] = set()
        #: So many operations on files, and it is killed; None: it is not.
        self.operations_left: int | None = None
        self.at_end.append(self._close_files)

    def _close_files(self) -> None:
        for file in self.files:
            os.close(file)
        self.files.clear()


class _Files:
    """``os`` for the modules that keep files of clients."""

    def __init__(self, world: World, directory: Path) -> None:
        self._world = world
        self.environ = {"QMQ_STATE_DIR": str(directory)}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _operation(self) -> Client:
        client = self._world.current
        if not isinstance(client, Client) or client.is_killed:
            raise Killed
        if client.operations_left is not None:
            client.operations_left -= 1
            if client.operations_left < 0:
                client.kill()
                raise Killed
        return client

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        client = self._operation()
        file = os.open(path, flags, mode)
        client.files.add(file)
        return file

    def open_file(self, path: Any, flags: int, mode: int) -> int:
        """As ``ownership`` opens one."""
        return self.open(path, flags, mode)

    def close(self, file: int) -> None:
        client = self._world.current
        if isinstance(client, Client) and file in client.files:
            client.files.remove(file)
            os.close(file)

    def write(self, file: int, data: bytes) -> int:
        client = self._world.current
        if isinstance(client, Client) and client.operations_left == 0:
            os.write(file, data[: self._world.chance.randrange(len(data) + 1)])
        self._operation()
        return os.write(file, data)

    def fdatasync(self, file: int) -> None:
        self._operation()

    def fsync(self, file: int) -> None:
        self._operation()

    def ftruncate(self, file: int, size: int) -> None:
        self._operation()
        os.ftruncate(file, size)

    def rename(self, source: Any, target: Any) -> None:
        self._operation()
        os.rename(source, target)

    def replace(self, source: Any, target: Any) -> None:
        self._operation()
        os.replace(source, target)

    def unlink(self, path: Any) -> None:
        self._operation()
        os.unlink(path)


class Clock:
    """``time`` there."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    def time_ns(self) -> int:
        return START_US * 1_000 + int(self._world.now * 1e9)


class _Chance:
    """``os.urandom``, ``secrets`` and ``random`` there."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.urandom = self.token_bytes = chance.randbytes

    def token_hex(self, size: int) -> str:
        return self._chance.randbytes(size).hex()

    def Random(self, seed: int | None) -> random.Random:  # noqa: N802  # as random calls it
        return random.Random(self._chance.getrandbits(32) if seed is None else seed)


class _Nobody:
    """Whom a connection that only beats belongs to."""

    def batch_stored(self, request: int, payload: memoryview) -> None: ...
    def batch_refused(self, request: int, error: QmqError) -> None: ...
    def writable(self) -> None: ...
    def lost(self, connection: BrokerConnection, error: QmqError) -> None: ...


class Beating(HeartbeatSender):
    """The heartbeats of a client, by a task in place of the thread; what they mean is the library's."""

    _task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; does nothing when it has begun."""
        if self._task is None:
            self._turned(loop)
            self._task = loop.create_task(self._beat_on(loop))

    def stop(self) -> None:
        """End."""
        super().stop()
        if self._task is not None:
            self._task.cancel()

    async def _beat_on(self, loop: asyncio.AbstractEventLoop) -> None:
        await asyncio.sleep(self._interval_s)
        while True:
            address = self._target().address
            connection = BrokerConnection(_Nobody(), str(address), loop)
            try:
                async with asyncio.timeout(self._interval_s):
                    await loop.create_connection(lambda: connection, address.host, address.port)  # noqa: B023
                    await connection.hello("qmq heartbeat")
                while True:
                    await self._beat_and_wait(connection, loop)
            except (OSError, QmqError):
                await asyncio.sleep(min(self._interval_s / 4, 0.5))
            finally:
                connection.close()

    async def _beat_and_wait(self, connection: BrokerConnection, loop: asyncio.AbstractEventLoop) -> None:
        sent_at = loop.time()
        async with asyncio.timeout(self._interval_s):
            await connection.request(FrameKind.HEARTBEAT, None, frames.HEARTBEAT.pack(self._client_id, 0))
        self._heard_at = max(self._heard_at, sent_at)
        await asyncio.sleep(self._interval_s)


async def _in_thread(call: Callable[[], Any], *, daemon: bool = False) -> Any:
    """``in_thread`` there: the world says when a thread is done, and one that is killed ends its process."""
    return await asyncio.get_running_loop().run_in_executor(None, call)


def _look_up(address: Address, flags: int = 0) -> list[tuple[Any, ...]]:
    """``look_up`` there: each host has one address, which is its name."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address.host, address.port))]


_MEMORY_ITEMS: Final = 4
#: As it ships: tests of real processes have a longer one, and a seed is one history in either.
_GRACE_S: Final = 0.5
_CLIENT: Final = "qmq.net.client"
_CLOCKS: Final = (
    "backoff", "failover.handover", "heartbeat", "broker_link", "consumer.feed", "consumer.pull", "options",
)  # fmt: skip
_THREADS: Final = (
    "in_thread", "connection", "broker_link", "failover.handover", "consumer.ack_file",
)  # fmt: skip


@contextmanager
def staged(world: World, directory: Path) -> Iterator[None]:
    """The client library runs in that world, and keeps its files there."""
    files, clock, chance = _Files(world, directory), Clock(world), _Chance(random.Random(world.chance.getrandbits(32)))
    pieces: list[tuple[str, object]] = [
        *((f"{_CLIENT}.{module}.time", clock) for module in _CLOCKS),
        *((f"{_CLIENT}.{module}.os", files) for module in ("failover.spool", "consumer.ack_file")),
        *((f"{_CLIENT}.{module}.ownership", files) for module in ("failover.spool", "consumer.ack_file")),
        *((f"{_CLIENT}.{module}.os", chance) for module in ("brokers", "failover.handover")),
        *((f"{_CLIENT}.{module}.secrets", chance) for module in ("brokers", "failover.spool", "consumer.subscribe")),
        *((f"{_CLIENT}.{module}.in_thread", _in_thread) for module in _THREADS),
        (f"{_CLIENT}.dial_in_loop.look_up", _look_up),
        ("qmq.net.client.backoff.random", chance),
        ("qmq.net.client.consumer.pull.GRACE", _GRACE_S),
        ("qmq.net.client.broker_link.HeartbeatSender", Beating),
        # What fails goes to files soon, also while a checkpoint is written.
        ("qmq.storage.error_log.item_file.MEMORY_ITEMS", _MEMORY_ITEMS),
        ("qmq.storage.error_log.timer_queue.MEMORY_ITEMS", _MEMORY_ITEMS),
    ]
    undo: list[Callable[[], None]] = []
    try:
        for name, piece in pieces:
            patching = patch(name, piece)
            patching.start()
            undo.append(patching.stop)
        yield
    finally:
        for call in undo:
            call()
