"""The scrub of a running broker: reads all sealed segments and the files of groups, again and again, at a limited rate.

A thread reads a little at a time; in between, the loop waits as long as the pace asks. So a slow or stalled disk delays
only the scrub.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Now
from qmq.errors import QmqError, StorageError
from qmq.settings import Settings
from qmq.storage.key_index.check import KeyReader, KeyStep
from qmq.storage.store import Store
from qmq.storage.verify.scrub import GroupReader, GroupStep, Pace, ScrubStep, SegmentReader, group_readers

log = logging.getLogger("qmq.broker")

#: While there is nothing to scrub, the time until the scrub looks again.
_EMPTY_US: Final = 1_000_000


class DiskThread(Protocol):
    """A thread that makes calls in order: qmq.daemon.threads.CallThread."""

    def call(self, work: Callable[[], None], done: Callable[[QmqError | None], None]) -> None: ...
    async def run(self, work: Callable[[], None]) -> None: ...


class Scrubber:
    """Scrubs from when it is made until ``close``. *damage_found* is called after damage was reported to the broker."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        broker: Broker,
        thread: DiskThread,
        clock: Callable[[], Now],
        damage_found: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._broker = broker
        self._thread = thread
        self._clock = clock
        self._damage_found = damage_found
        self._pace = Pace(settings.scrub_bytes_per_s)
        self._last_error = ""
        self._task = asyncio.create_task(self._run(), name="qmq-scrub")

    async def close(self) -> None:
        """Stop without waiting for a read under way."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            await self._run_rounds()
        except Exception:
            log.exception("the scrub failed unexpectedly; it resumes after a restart")

    async def _run_rounds(self) -> None:
        # Start at an arbitrary segment, so that a broker that restarts often still scrubs every segment.
        skip = self._clock().wall_us // 1_000_000
        while True:
            begun_us = self._clock().monotonic_us
            segments = [
                (partition, span.base)
                for partition in self._store.all_partitions()
                for span in self._store.partition(partition).message_log.sealed
            ]
            first = skip % len(segments) if segments else 0
            for partition, base in segments[first:] + segments[:first]:
                await self._scrub(partition, base)
            files = group_readers(self._store.groups)
            for make in files:
                await self._scrub_group(make)
            skip = 0
            round_us = self._settings.scrub_round_ms * 1_000
            if segments or files:
                self._broker.counters.scrub_rounds += 1
            else:
                round_us = min(round_us, _EMPTY_US)
            await self._wait_until(begun_us + round_us)

    async def _scrub(self, partition: int, base: int) -> None:
        part = self._store.partition(partition)
        if part.message_log.segment_at(base) is None:
            return  # the segment was removed meanwhile
        reader = part.reader(base)
        try:
            while not (step := await self._step(reader, partition)).is_last:
                self._broker.counters.scrubbed_bytes += step.size
                await self._wait_until(self._pace.next_us(step.size, self._clock().monotonic_us))
        except StorageError as error:
            if part.message_log.segment_at(base) is not None:
                self._refused(reader.path, error)
        finally:
            self._thread.call(reader.close, lambda error: None)  # after a step that may still be running
        await self._scrub_keys(partition, base)

    async def _scrub_keys(self, partition: int, base: int) -> None:
        """Read the key index of a segment; have it made again where it is rotten."""
        part = self._store.partition(partition)
        span = part.message_log.segment_at(base)
        if span is None or base not in part.key_index.indexed:
            return
        reader = part.key_index.reader(span)
        try:
            while not (step := await self._key_step(reader)).is_last:
                self._broker.counters.scrubbed_bytes += step.size
                await self._wait_until(self._pace.next_us(step.size, self._clock().monotonic_us))
        except StorageError as error:
            self._refused(reader.path, error)
            return
        finally:
            self._thread.call(reader.close, lambda error: None)
        if not step.is_good and base in part.key_index.indexed:
            log.warning("%s is missing or rotten; it is made again", reader.path)
            await self._thread.run(lambda: part.key_index.distrust(base))

    async def _key_step(self, reader: KeyReader) -> KeyStep:
        steps = list[KeyStep]()
        await self._thread.run(lambda: steps.append(reader.step()))
        return steps[0]

    async def _scrub_group(self, make: Callable[[], GroupReader | None]) -> None:
        reader = make()
        if reader is None:
            return
        try:
            while not (step := await self._group_step(reader)).is_last:
                self._broker.counters.scrubbed_bytes += step.size
                await self._wait_until(self._pace.next_us(step.size, self._clock().monotonic_us))
        except StorageError as error:
            self._refused(reader.path, error)
            return
        finally:
            self._thread.call(reader.close, lambda error: None)
        if make() is None:
            return  # the file was removed, maybe while it was read
        for bad in step.found:
            self._broker.file_damaged(bad)
        if step.found:
            self._damage_found()

    async def _group_step(self, reader: GroupReader) -> GroupStep:
        steps = list[GroupStep]()
        await self._thread.run(lambda: steps.append(reader.step()))
        return steps[0]

    def _refused(self, path: Path, error: StorageError) -> None:
        if str(error) != self._last_error:
            log.error("%s could not be scrubbed, it is tried again in the next round: %s", path, error)
        self._last_error = str(error)

    async def _step(self, reader: SegmentReader, partition: int) -> ScrubStep:
        """Read once in the thread, and report the damage to the broker."""
        steps = list[ScrubStep]()
        await self._thread.run(lambda: steps.append(reader.step()))
        (step,) = steps
        for damage in step.found:
            self._broker.damage_found(damage._replace(partition=partition), "scrub")
        if step.found:
            self._damage_found()
        return step

    async def _wait_until(self, monotonic_us: int) -> None:
        await asyncio.sleep(max(0, monotonic_us - self._clock().monotonic_us) / 1_000_000)
