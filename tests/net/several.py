"""Several brokers in one process, each of which can stop and start again on its port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import qmq
from qmq.daemon.main import RunningBroker
from qmq.settings import Settings

TIMEOUT_S: Final = 60


class Several:
    """*count* brokers with directories under *path*."""

    def __init__(self, path: Path, count: int, **settings: Any) -> None:
        self._path = path
        self._settings = settings
        self._ports = [0] * count
        self.brokers: list[RunningBroker | None] = [None] * count

    @property
    def url(self) -> str:
        return "qmq://" + ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def one(self, number: int) -> str:
        """Return the URL of one broker."""
        return f"qmq://127.0.0.1:{self._ports[number]}"

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self._ports[number]}"

    async def start(self, number: int) -> None:
        listen = f"127.0.0.1:{self._ports[number]}"
        settings = {"data_dir": self._path / f"broker-{number}", "listen": listen, **self._settings}
        broker = RunningBroker(Settings.model_validate(settings))
        await broker.start()
        self._ports[number] = broker.address[1]
        self.brokers[number] = broker

    async def stop(self, number: int) -> None:
        broker, self.brokers[number] = self.brokers[number], None
        if broker is not None:
            await broker.stop()


@asynccontextmanager
async def several(path: Path, count: int = 2, **settings: Any) -> AsyncIterator[Several]:
    """Run *count* brokers."""
    found = Several(path, count, **settings)
    try:
        for number in range(count):
            await found.start(number)
        yield found
    finally:
        for number in range(count):
            await found.stop(number)


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until *condition* is true; fail with *what* if it stays false."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < deadline, f"for {TIMEOUT_S} s it has not come to hold that {what}"
        await asyncio.sleep(0.005)


def connections(client: qmq.Client) -> list[bool]:
    """Return the indexes of the brokers that the client is connected to."""
    return [link.connection is not None for link in client._brokers.links]


async def put(url: str, subject: str, bodies: list[bytes]) -> None:
    """Send to one broker, over a client of its own."""
    async with qmq.connect(url) as client:
        await client.send_many(subject, bodies)
