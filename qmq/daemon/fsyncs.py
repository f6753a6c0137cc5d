"""Syncs of partitions that senders wait for: started by asynchronous I/O where the system has it, else in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from qmq.daemon.threads import CallThread
from qmq.errors import QmqError
from qmq.storage.store import Store

Done = Callable[[QmqError | None], None]


class Fsyncs:
    """Syncs the partitions of one store, for one loop."""

    def __init__(self, store: Store, partitions: Iterable[int]) -> None:
        #: A thread per partition, so that a stalled disk delays only its own partition.
        self.workers: Final = {partition: CallThread(f"qmq-sync-{partition}") for partition in partitions}
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._begun: dict[int, Done] = {}  # by partition
        self._aio = store.aside()
        if self._aio is not None:
            self._loop.add_reader(self._aio.descriptor, self._finished)

    def sync(self, partition: int, done: Done) -> None:
        """Sync all bytes written so far to the disk, then call *done* in the loop, with the error or None."""
        if not self._begin(partition, done):
            self.workers[partition].call(lambda: self._store.partition(partition).sync(), done)

    def _begin(self, partition: int, done: Done) -> bool:
        """Start the sync asynchronously; return False if that needs more than one fdatasync, or one is running."""
        if self._aio is None:
            return False
        log = self._store.partition(partition).message_log
        descriptor = log.begin_sync()
        if descriptor is None:
            return False
        try:
            self._aio.begin(descriptor, partition)
        except OSError:
            log.end_sync(None)
            return False
        self._begun[partition] = done
        return True

    def _finished(self) -> None:
        assert self._aio is not None
        for partition, error in self._aio.finished():
            done = self._begun.pop(partition)
            part = self._store.partition(partition)
            part.message_log.end_sync(error)
            if error is None:
                done(None)
            else:  # the thread reports the error, and the log stays broken
                self.workers[partition].call(part.sync, done)

    def close(self, timeout_s: float) -> None:
        """End the threads, and start no more syncs."""
        if self._aio is not None:
            self._loop.remove_reader(self._aio.descriptor)
            if not self._begun:  # else closing would wait for a disk that does not answer
                self._aio.close()
            self._aio = None
        for worker in self.workers.values():
            worker.stop(timeout_s)
