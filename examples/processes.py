"""The processes of the demo: a broker and its consumers, each of which may be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import qmq

READY = "ready on "
START_TIMEOUT = 60.0
#: How long a consumer may be silent until the others get what it held. The default is 30 s: too long for a demo.
SESSION_TIMEOUT_MS = 5_000


class Broker:
    """``qmq serve`` as a child, on *data_dir* and, once it has one, always the same port."""

    def __init__(self, data_dir: Path) -> None:
        self.url = ""
        self._data_dir = data_dir
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves. Raises QmqError when it does not."""
        arguments = ["serve", "--data-dir", str(self._data_dir), "--set", f"session_timeout_ms={SESSION_TIMEOUT_MS}"]
        arguments += ["--listen", self.url.removeprefix("qmq://") or "127.0.0.1:0", "--log-level", "error"]
        # In a session of its own, Ctrl-C reaches the demo only, which then stops the broker last.
        self._child = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("qmq"), *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._child.stdout is not None
        async with asyncio.timeout(START_TIMEOUT):
            line = (await self._child.stdout.readline()).decode()
        if not line.startswith(READY):
            raise qmq.QmqError("the broker did not start; what it said stands above")
        self.url = line.removeprefix(READY).split(",")[0].strip()

    async def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self._child.kill()
        await self._child.wait()

    async def stop(self) -> None:
        """Ask it to stop, and wait until it has."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.terminate()
            await self._child.wait()


class Worker:
    """A consumer (examples/packer.py) as a child."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.killed = False
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, url: str, group: str, run: int, handling: float, prefixes: Sequence[str]) -> None:
        """Start it, and wait until it follows. Raises QmqError when it does not."""
        arguments = ["-m", "examples.packer", url, group, self.name, str(run), str(handling * 1000), *prefixes]
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, limit=1 << 20,
        )  # fmt: skip
        async with asyncio.timeout(START_TIMEOUT):
            if await anext(self.said(), None) != ["following"]:
                raise qmq.QmqError(f"{self.name} did not start; what it said stands above")

    async def said(self) -> AsyncIterator[list[Any]]:
        """What it says, until it ends."""
        assert self._child is not None
        assert self._child.stdout is not None
        while (line := await self._child.stdout.readline()).endswith(b"\n"):  # killed, it may leave half a line
            yield json.loads(line)

    async def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self.killed = True
        self._child.kill()
        await self._child.wait()

    async def stop(self) -> None:
        """Have it leave, and wait until it has."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            await self._child.wait()
