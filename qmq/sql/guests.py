"""A relay within a program that commits rows: a task of its loop, or a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Final

from qmq import Client, SyncClient
from qmq.errors import UsageError
from qmq.sql.relay import HOLD_S, ClientSender, Relay, RelayDatabase, Sender, SyncClientSender

_CLOSE_TIMEOUT_S: Final = 10.0
#: Commits wake it; this is for what it could not send at once.
_POLL_S: Final = 1.0
#: Programs are killed at each deployment; on SQLite their rows wait for so long then.
_LEASE_S: Final = 5.0


class GuestRelay:
    """A relay that begins at once, and ends with ``close``, the loop or the process."""

    def __init__(self, client: Client | SyncClient, database: Callable[[], RelayDatabase], keep: float) -> None:
        """*database* is made where the relay runs. Raises UsageError for an asyncio client without its loop."""
        self._pid = os.getpid()
        self._keep = keep
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._relay: Relay | None = None
        if isinstance(client, Client):
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                raise UsageError(
                    "an outbox with an asyncio client sends within its event loop; give it the client of "
                    "connect_sync in a program without one"
                ) from None
            self._task = loop.create_task(self._made(database(), ClientSender(client, HOLD_S)).run(), name="qmq-outbox")
            return
        started = threading.Event()

        def work() -> None:
            async def main() -> None:
                relay = self._made(database(), SyncClientSender(client, HOLD_S))
                asyncio.get_running_loop().call_soon(started.set)
                await relay.run()

            try:
                asyncio.run(main())
            finally:
                started.set()

        self._thread = threading.Thread(target=work, name="qmq-outbox", daemon=True)
        self._thread.start()
        started.wait()

    def _made(self, database: RelayDatabase, sender: Sender) -> Relay:
        self._relay = Relay(database, sender, lease=_LEASE_S, keep=self._keep, poll=_POLL_S, is_guest=True)
        return self._relay

    @property
    def lives(self) -> bool:
        """Whether it sends: neither the end of its loop nor a fork has ended it."""
        if self._pid != os.getpid():
            return False
        if self._task is not None:
            return not (self._task.done() or self._task.get_loop().is_closed())
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """[any thread] Look for rows now, and for a moment: a commit is under way."""
        if self._relay is not None and self.lives:
            self._relay.wake()

    def close(self) -> None:
        """Stop it, and wait for its thread."""
        if self._relay is None or not self.lives:
            return
        if self._thread is None:
            self._relay.stop()
        else:
            self._relay.stop_soon()
            self._thread.join(_CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        """Stop it, and wait for its task."""
        self.close()
        if self._task is not None and self.lives:
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT_S)
            self._task.cancel()
