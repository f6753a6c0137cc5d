"""Brokers that are not meant to start, and what can be seen of those that do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import qmq
from tests.broker_process import BrokerProcess

PATIENCE_S: Final = 60
#: Run as root, one may write where nobody may: this gives that up, and what cannot be given up was not there.
_WITHOUT_PRIVILEGE: Final = "import ctypes; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); "
_EXEC_SERVE: Final = (
    "import os, sys; "
    "os.execv(sys.executable, [sys.executable, '-c', 'from qmq.cli.main import cli; cli()', 'serve', *sys.argv[1:]])"
)


class Ended(NamedTuple):
    """A broker that did not start. ``error`` is its stderr."""

    code: int
    error: str


def serve_and_fail(path: Path, listen: str = "127.0.0.1:0", *arguments: str) -> Ended:
    """Run `qmq serve` on *path* as a user without privileges, where it is to end by itself at once."""
    script = _WITHOUT_PRIVILEGE + _EXEC_SERVE
    command: Sequence[str] = [sys.executable, "-c", script, "--data-dir", str(path), "--listen", listen, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == ""
    return Ended(done.returncode, done.stderr)


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
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"for {PATIENCE_S} s it has not come to hold that {what}"
        await asyncio.sleep(0.002)


async def stored(url: str, messages: int) -> None:
    """Wait until a broker has so many messages."""
    deadline = time.monotonic() + PATIENCE_S
    async with qmq.connect(url) as client:
        while sum([info.messages async for info in client.subjects()]) < messages:
            assert time.monotonic() < deadline, f"the broker has fewer than {messages} messages"
            await asyncio.sleep(0.002)
