"""Brokers that are not meant to start, and what can be seen of those that do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple

import qmq
from tests.broker_process import BrokerProcess
from tests.forks import SHARED

TIMEOUT_S: Final = 60
#: Run as root, one may write where nobody may: this gives that up, and what cannot be given up was not there.
_WITHOUT_PRIVILEGE: Final = """
import ctypes
which, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert not ctypes.CDLL(None).capget(which, sets)
for number in range(3):
    sets[number] &= ~(1 << 1)  # to override what files permit: as effective, permitted and inheritable
assert not ctypes.CDLL(None).capset(which, sets)
"""
_SERVE: Final = "from qmq.cli.main import cli; cli()"


class Ended(NamedTuple):
    """A broker that did not start. ``error`` is its stderr."""

    code: int
    error: str


def serve_and_fail(path: Path, listen: str = "127.0.0.1:0", *arguments: str) -> Ended:
    """Run `qmq serve` on *path* as a user without privileges, where it is to end by itself at once."""
    command = ["-c", _WITHOUT_PRIVILEGE + _SERVE, "serve", "--data-dir", str(path), "--listen", listen, *arguments]
    with TemporaryFile("w+") as stderr, SHARED.python(command, stderr, text=True) as process:
        code = process.wait(TIMEOUT_S)
        assert process.stdout.read() == ""
        stderr.seek(0)
        return Ended(code, stderr.read())


@asynccontextmanager
async def broker_in(path: Path, **settings: Any) -> AsyncIterator[BrokerProcess]:
    """A started broker process for a test with a loop that must go on meanwhile."""
    broker = BrokerProcess(path, **settings)
    try:
        await asyncio.to_thread(broker.start)
        yield broker
    finally:
        broker.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until *condition* holds; fails, saying *what*, when it does not come to hold."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"for {TIMEOUT_S} s it has not come to hold that {what}"
        await asyncio.sleep(0.002)


async def stored(url: str, messages: int) -> None:
    """Wait until a broker has so many messages."""
    deadline = time.monotonic() + TIMEOUT_S
    async with qmq.connect(url) as client:
        while sum([info.messages async for info in client.subjects()]) < messages:
            assert time.monotonic() < deadline, f"the broker has fewer than {messages} messages"
            await asyncio.sleep(0.002)
