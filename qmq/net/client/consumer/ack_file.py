"""Keeps a consumer's state file up to date, in the background: what is acknowledged and not confirmed stands in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from qmq.net.client.consumer.in_flight import Known
from qmq.net.client.consumer.state_file import StateFile, state_directory
from qmq.net.client.sync.threads import taken_in_thread

log = logging.getLogger("qmq.client")

#: What the broker has not confirmed after so long is written; and at once, when it is so much.
WRITE_DELAY: Final = 0.2
WRITE_COUNT: Final = 10_000


class Keeping:
    """Of one consumer that was given its id. Without a file nothing is kept, which is said once."""

    def __init__(self, group: str, consumer: str, snapshot: Callable[[], tuple[Known | None, int]]) -> None:
        """*snapshot* gives what to write, and how many acknowledgements are not confirmed."""
        self._group = group
        self._consumer = consumer
        self._snapshot = snapshot
        self._store_id: bytes | None = None
        self._file: StateFile | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._written: Known | None = None

    async def open(self, store_id: bytes) -> Known | None:
        """Have the file of a store; what the process before has left there."""
        if self._store_id == store_id:
            return None
        self._store_id = store_id
        self._close_file()
        try:
            self._file = await taken_in_thread(
                lambda: StateFile.open(state_directory(), store_id, self._group, self._consumer), StateFile.close
            )
            return await asyncio.to_thread(self._file.read)
        except BlockingIOError:
            self._say("another process has it")
        except (OSError, RuntimeError) as error:  # of a home that is not known
            self._say(str(error))
        return None

    def _say(self, why: str) -> None:
        log.warning(
            "consumer %s keeps no state of its own in %s (%s): acknowledgements that are on their way when it ends may "
            "be lost, and their messages come again", self._consumer, state_directory(), why,
        )  # fmt: skip

    @property
    def has_file(self) -> bool:
        """It keeps what is acknowledged."""
        return self._file is not None

    def want_write(self) -> None:
        """Something was acknowledged."""
        if self._file is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_DELAY, self._due)

    def hurry(self) -> None:
        """So much was acknowledged that it is not waited for more."""
        if self._timer is not None:
            self._timer.cancel()
            self._due()

    def _due(self) -> None:
        self._timer = None
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="qmq-state")

    async def _write(self, *, again: bool = True) -> None:
        file, (known, unconfirmed) = self._file, self._snapshot()
        if file is None or known is None or not unconfirmed:
            return
        try:
            await asyncio.to_thread(file.write, known)
        except OSError as error:
            self._say(str(error))
            if self._file is file:
                self._close_file()
            return
        self._written = known
        if again and self._file is file:  # until all is confirmed
            self.want_write()

    async def save(self) -> None:
        """Write what is left; ``close`` then has nothing to do for the disk."""
        self._stop_timer()
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._stop_timer()
        await self._write(again=False)

    def close(self) -> None:
        """Let go of the file. What ``save`` has not written is written in the loop: there is no other time for it."""
        self._stop_timer()
        known, unconfirmed = self._snapshot()
        if self._file is not None and known is not None and unconfirmed and known != self._written:
            try:
                self._file.write(known)
            except OSError as error:
                self._say(str(error))
        self._close_file()
        self._store_id = self._written = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
