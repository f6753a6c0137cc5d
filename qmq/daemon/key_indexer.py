"""Makes key indexes while a broker runs: of segments soon after they are sealed, and of those that lack one at a start.

A thread does a little at a time, and then rests as long as that took, so sends hardly notice it. Meanwhile it covers
the segment that is being written with filters, in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from qmq.broker.ports.commands import Now
from qmq.daemon.scrubber import DiskThread
from qmq.errors import QmqError, StorageError
from qmq.storage.partition import Partition
from qmq.storage.store import Store

log = logging.getLogger("qmq.broker")

#: The time between two looks for work, and until an index is tried again that could not be made.
_LOOK_US: Final = 1_000_000
_AGAIN_US: Final = 30_000_000


class Work(Protocol):
    """Work in steps, for a thread: True while there is more."""

    def step(self) -> bool: ...
    def close(self) -> None: ...


class KeyIndexer:
    """Makes key indexes from when it is made until ``close``."""

    def __init__(self, store: Store, thread: DiskThread, clock: Callable[[], Now]) -> None:
        self._store = store
        self._thread = thread
        self._clock = clock
        self._refused: dict[tuple[int, int], int] = {}  # when to try again, by partition and base
        self._last_error: type[StorageError] | None = None
        self._task = asyncio.create_task(self._run(), name="qmq-key-index")

    async def close(self) -> None:
        """Stop without waiting for a step under way."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            for number in self._store.all_partitions():
                await self._check(self._store.partition(number))
            while True:
                has_built = False
                for number in self._store.all_partitions():  # one of each, since one may lack very many
                    await self._cover(number)
                    has_built |= await self._build_one(number)
                if not has_built:
                    await asyncio.sleep(_LOOK_US / 1_000_000)
        except Exception:
            log.exception("the key indexer failed unexpectedly; it resumes after a restart, look-ups read the log")

    async def _check(self, part: Partition) -> None:
        """Find the files that are not what they should be, such as those of an older version."""
        for span in reversed(list(part.message_log.sealed)):
            if span.base in part.key_index.indexed:
                await self._thread.run(partial(part.key_index.check, span))

    async def _cover(self, number: int) -> None:
        """Cover what was written with filters."""
        extension = self._store.partition(number).key_index.extension()
        if extension is not None:
            await self._work(number, -1, extension)

    async def _build_one(self, number: int) -> bool:
        """Make the newest key index that is missing; return False when there is none to make now."""
        part = self._store.partition(number)
        now_us = self._clock().monotonic_us
        for span in part.key_index.missing(part.removable()):
            if now_us < self._refused.get((number, span.base), 0):
                continue
            if await self._work(number, span.base, part.key_index.builder(span)):
                await self._built(part, span.base)
            return True
        return False

    async def _built(self, part: Partition, base: int) -> None:
        if not part.key_index.built(base):
            await self._thread.run(lambda: part.key_index.discard(base))

    async def _work(self, number: int, base: int, work: Work) -> bool:
        """Do all steps in the thread; return whether that succeeded."""
        key = number, base
        try:
            more, loop = True, asyncio.get_running_loop()
            while more:
                begun = loop.time()  # the clock may be one that a test moves
                more = await self._step(work)
                await asyncio.sleep(loop.time() - begun)
        except StorageError as error:
            self._refused[key] = self._clock().monotonic_us + _AGAIN_US
            part = self._store.partition(number)
            if base not in part.key_index.removed and type(error) is not self._last_error:  # each text names a file
                log.warning("a key index could not be made, it is tried again; look-ups read the log: %s", error)
                self._last_error = type(error)
            return False
        finally:
            self._thread.call(work.close, _ignore)  # after a step that may still be running
        self._refused.pop(key, None)
        if base >= 0:
            self._last_error = None
        return True

    async def _step(self, work: Work) -> bool:
        more = list[bool]()
        await self._thread.run(lambda: more.append(work.step()))
        return more[0]


def _ignore(error: QmqError | None) -> None:
    """Ignore the result of closing a file."""
