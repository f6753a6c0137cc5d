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
#: The session timeout of consumers. The default of 30 s would be too long for a demo.
SESSION_TIMEOUT_MS = 5_000


class Broker:
    """``qmq serve`` as a child process, on *data_dir* and, after its first start, always on the same port."""

    def __init__(self, data_dir: Path) -> None:
        self.url = ""
        self._data_dir = data_dir
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves. Raises QmqError if it does not."""
        arguments = ["serve", "--data-dir", str(self._data_dir), "--set", f"session_timeout_ms={SESSION_TIMEOUT_MS}"]
        arguments += ["--listen", self.url.removeprefix("qmq://") or "127.0.0.1:0", "--log-level", "error"]
        # In a session of its own, so that Ctrl-C reaches only the demo, which stops the broker last.
        self._child = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("qmq"), *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._child.stdout is not None
        async with asyncio.timeout(START_TIMEOUT):
            line = (await self._child.stdout.readline()).decode()
        if not line.startswith(READY):
            raise qmq.QmqError("the broker did not start; its error is above")
        self.url = line.removeprefix(READY).split(",")[0].strip()

    async def kill(self) -> None:
        """Kill it with kill -9."""
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
    """A consumer (examples/packer.py) as a child process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.killed = False
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, url: str, group: str, run: int, handling: float, prefixes: Sequence[str]) -> None:
        """Start it, and wait until it has subscribed. Raises QmqError if it does not."""
        arguments = ["-m", "examples.packer", url, group, self.name, str(run), str(handling * 1000), *prefixes]
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, limit=1 << 20,
        )  # fmt: skip
        async with asyncio.timeout(START_TIMEOUT):
            if await anext(self.said(), None) != ["following"]:
                raise qmq.QmqError(f"{self.name} did not start; its error is above")

    async def said(self) -> AsyncIterator[list[Any]]:
        """Yield its reports until it ends."""
        assert self._child is not None
        assert self._child.stdout is not None
        while (line := await self._child.stdout.readline()).endswith(b"\n"):  # a killed consumer may leave half a line
            yield json.loads(line)

    async def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self.killed = True
        self._child.kill()
        await self._child.wait()

    async def stop(self) -> None:
        """Have it leave the group, and wait until it has."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            await self._child.wait()
