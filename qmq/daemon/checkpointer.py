"""Decides when a running broker takes a checkpoint. The store writes it and defines its content."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Now
from qmq.daemon.threads import CallThread
from qmq.daemon.turns import in_turns
from qmq.errors import QmqError, StorageError
from qmq.settings import Settings
from qmq.storage.store import Store

log = logging.getLogger("qmq.broker")


class Checkpointer:
    """Takes a checkpoint when state has changed and its interval is over, or when many bytes are not on disk."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        broker: Broker,
        changes: Callable[[], int],
        done: Callable[[], None],
        clock: Callable[[], Now],
    ) -> None:
        """*changes* counts changes of the state that a checkpoint saves; *done* is called after each attempt."""
        self._interval_s = settings.checkpoint_ms / 1_000
        self._waiting: asyncio.Timeout | None = None
        self._store = store
        self._broker = broker
        self._changes = changes
        self._done = done
        self._clock = clock
        self.worker = CallThread("qmq-checkpoint")
        self._urgent = asyncio.Event()
        self._closing = asyncio.Event()
        self._done_changes = changes()
        self._last_error: StorageError | None = None
        self._saved_us = clock().monotonic_us  # then a checkpoint, or the start, had all state
        #: Whether a checkpoint is being written.
        self.running = False
        self._task = asyncio.create_task(self._run())

    def age_us(self) -> int:
        """Return for how long state may have changed that no checkpoint has."""
        return self._clock().monotonic_us - self._saved_us

    @property
    def error(self) -> StorageError | None:
        """The error of the last checkpoint; None if it was taken."""
        return self._last_error

    def set_interval(self, checkpoint_ms: int) -> None:
        """Set the longest time between two checkpoints."""
        self._interval_s = checkpoint_ms / 1_000
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time() + self._interval_s)

    def hurry(self) -> None:
        """Take a checkpoint now."""
        self._urgent.set()

    async def close(self, timeout_s: float) -> None:
        """Take a last checkpoint. Raises StorageError, or TimeoutError if the disk does not answer in *timeout_s*."""
        self._closing.set()
        self._urgent.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._task
                await self._take()
        except TimeoutError:
            timeout_s = 0
            raise
        finally:
            self.worker.stop(timeout_s)

    async def _run(self) -> None:
        while True:
            await self._pause(self._closing if self._last_error is not None else self._urgent)
            if self._closing.is_set():
                return
            self._urgent.clear()
            has_changed = self._changes() != self._done_changes or self._store.unsynced_bytes
            if not has_changed and not self._broker.wants_checkpoint():
                self._saved_us = self._clock().monotonic_us
                continue
            try:
                await self._take()
            except StorageError as error:
                self._broker.counters.failed_checkpoints += 1
                if type(error) is not type(self._last_error):  # its text names another file each time
                    log.error("no checkpoint could be taken, it is tried again: %s", error)
                self._last_error = error
            else:
                if self._last_error is not None:
                    log.info("checkpoints can be taken again")
                self._last_error = None

    async def _pause(self, event: asyncio.Event) -> None:
        """Wait for *event*, but no longer than until the next checkpoint is due."""
        try:
            async with asyncio.timeout(self._interval_s) as self._waiting:
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting = None

    async def _take(self) -> None:
        self.running = True
        try:
            await self.worker.run(self._store.check_there)
            await in_turns(self._broker.prepare_checkpoint())
            await asyncio.sleep(0)  # what follows is a turn of its own
            changes, now = self._changes(), self._clock()
            checkpoint = self._store.begin_checkpoint(self._broker.checkpoint_state(now), now.wall_us)
            try:
                await self.worker.run(checkpoint.write)
            except Exception as error:
                self._store.fail_checkpoint(checkpoint, error)
                raise
            self._store.finish_checkpoint(checkpoint)
            self._saved_us = now.monotonic_us
            for dropped in self._broker.take_dropped():
                log.log(logging.WARNING if dropped.skipped or dropped.lost else logging.INFO, "%s", dropped)
        except QmqError:
            raise
        except Exception as error:
            if self._last_error is None:
                log.exception("a checkpoint failed unexpectedly")
            raise StorageError(f"a checkpoint failed: {error!r}; the log of the broker has the details") from error
        finally:
            self.running = False
            self._done()
        self._done_changes = changes
