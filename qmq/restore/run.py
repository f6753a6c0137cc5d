"""Run a restore, which may be killed at any moment and repeated, and restores every message once.

The progress beside the archive names what the broker has on disk. Messages that were sent later are looked up in the
broker by their ids, before anything is sent again. All messages of a restore go to one broker; another broker is chosen
only if no message is in doubt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from qmq.archive.archive import is_archive, manifests
from qmq.archive.file_table import read_table
from qmq.archive.files import Files, WritableFiles
from qmq.archive.lock import ArchiveLock, LockOwner
from qmq.errors import ConnectionLost, InvalidOption, QmqError
from qmq.intervals import Intervals
from qmq.net.client.address import Address
from qmq.net.client.restore import RestoreTarget
from qmq.restore import forms
from qmq.restore import progress as saved
from qmq.restore.frames import RestoreFrame, frames_of
from qmq.restore.progress import RestoreProgress
from qmq.restore.read import ArchiveDamage, ArchiveReader, Reader
from qmq.restore.selection import RestoreSelection
from qmq.restore.target import TargetBroker

#: A broker that cannot be reached, or refuses for a passing reason, for this time in seconds ends the run.
GIVE_UP_S: Final = 60.0
#: The seconds between two writes of progress, each of which costs a sync of the disk.
_SAVE_EVERY_S: Final = 0.5
#: The longest wait for a broker or the archive, in seconds, before the lock is renewed.
_RENEW_EVERY_S: Final = 5.0

_Made = TypeVar("_Made")
_RUN_BYTES: Final = 16

Clock = Callable[[], int]
#: A function that takes the bytes of the archive read so far, and in all.
Shown = Callable[[int, int], None]


class RestoreRun:
    """One run of ``qmq restore``. ``clock`` gives microseconds since 1970."""

    def __init__(
        self,
        files: WritableFiles,
        selection: RestoreSelection,
        addresses: Sequence[Address],
        clock: Clock,
        owner: LockOwner,
        *,
        source: Files | None = None,
        again: bool = False,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        """*source*: the same tree, if it is read in another way than it is written. *again*: restore anew what was
        restored already.
        """
        self._files = files
        self._source = source if source is not None else files
        self._selection = selection
        self._addresses = addresses
        self._clock = clock
        self._owner = owner
        self._again = again
        self._give_up_s = give_up_s
        self._targets: dict[str, tuple[Address, RestoreTarget]] = {}  # by store
        self._unreachable: dict[Address, QmqError] = {}
        self._path = ""
        self._progress = RestoreProgress("", [], 0, "")
        #: The bad bytes that this run has read.
        self.damages: list[ArchiveDamage] = []

    async def run(self, shown: Shown | None = None) -> RestoreProgress:
        """Restore; *shown* takes the bytes of the archive read so far, and in all.

        Raises QmqError: then nothing is lost, and another run continues.
        """
        try:
            await self._connect_all()
            self._files.make_directory(saved.DIRECTORY)
            self._find_or_begin()
            with ArchiveLock(self._files, self._clock, self._owner, f"{self._path}.lock") as lock:
                self._find_or_begin()  # read again under the lock
                reader = self._reader()
                if reader.left_bytes():
                    await self._restore(reader, lock, shown)
                    if all(damage.is_settled for damage in self.damages):
                        forms.settle(self._progress)
                    self._progress.finished_at_us = self._clock()
                    self._save()
            return self._progress
        finally:
            for _, target in self._targets.values():
                await target.close()

    def bad_ranges(self) -> int:
        """Return how many ranges of the archive were bad, in this run and the earlier ones."""
        return self._progress.counts.damages + sum(not damage.is_settled for damage in self.damages)

    # --- which restore, and where ------------------------------------------------------------------------------------

    async def _connect_all(self) -> None:
        for address in self._addresses:
            try:
                target = await RestoreTarget.open(address)
            except ConnectionLost as error:
                self._unreachable[address] = error
                continue
            store = target.welcome.store_id.hex()
            if store in self._targets:
                await target.close()
            else:
                self._targets[store] = address, target
        if not self._targets:
            raise next(iter(self._unreachable.values()))

    def _find_or_begin(self) -> None:
        """Find the progress of this restore, or begin one. Raises InvalidOption, ConnectionLost, BadBytes."""
        digest = self._selection.digest()
        there = {
            path: progress
            for path, progress in saved.find(self._files, digest).items()
            if set(progress.stores) & set(self._targets)
        }
        if len(there) > 1:
            raise InvalidOption(
                "these brokers have a restore of their own each; continue one at a time: name one of them"
            )
        if there:
            ((self._path, self._progress),) = there.items()
            if not self._again:
                return
        if self._unreachable:
            names = ", ".join(map(str, self._unreachable))
            raise ConnectionLost(
                f"a restore begins only if all brokers that are named can be reached, and {names} cannot: start it, "
                "or leave it out"
            )
        stores = list(self._targets)
        self._path = self._path or saved.path_of(digest, stores[0])
        self._progress = RestoreProgress(os.urandom(_RUN_BYTES).hex(), stores, self._clock(), stores[0])

    def _reader(self) -> Reader:
        """Return a reader of segments, and of Parquet for what they lack. Raises InvalidOption, BadBytes,
        StorageFailed.
        """
        files, progress = self._source, self._progress
        if not is_archive(files):
            raise InvalidOption(f"{files.name} is no archive; give --from the DEST of `qmq archive --to`")
        # Read before the manifests: these then have all that a run of `qmq archive` adds meanwhile.
        table = read_table(files)
        forms.assign(progress, table, [manifest for _, manifest in manifests(files)], files.name)
        of_segments = ArchiveReader(files, self._selection, forms.not_from_segments(progress))
        if not progress.by_files:
            return of_segments
        try:
            from qmq.restore.parquet import ParquetReader
        except ModuleNotFoundError as error:
            if error.name != "pyarrow":
                raise
            raise InvalidOption(
                "pyarrow, which reads Parquet, is not installed; run: pip install 'qmq[arrow]'"
            ) from None
        of_files = ParquetReader(files, self._selection, progress.done, progress.by_files)
        return forms.CombinedReader([of_segments, of_files])

    def _save(self) -> None:
        saved.write(self._files, self._path, self._progress)

    def _choose_target(self) -> None:
        """Choose the broker to send to: the one that may have messages in doubt, else the first that can be reached."""
        progress = self._progress
        if progress.store in self._targets:
            return
        if progress.since is not None:
            raise ConnectionLost(
                f"the broker of store {progress.store} cannot be reached, and may have messages of this restore that "
                "no progress names; start it, name it in --server, and run this again"
            )
        progress.store = next(iter(self._targets))
        progress.stores = [*dict.fromkeys([*progress.stores, *self._targets])]

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _restore(self, reader: Reader, lock: ArchiveLock, shown: Shown | None) -> None:
        self._choose_target()
        progress, loop = self._progress, asyncio.get_running_loop()
        address, target = self._targets[progress.store]
        broker = TargetBroker(address, target, progress, self._selection.group, self._give_up_s)
        await _called(broker.begin(), lock)
        if progress.since is None:  # the point from which to look up messages is on disk before any message is sent
            progress.since, progress.finished_at_us = broker.ends, 0
            self._save()
        reader.found = broker.found
        frames = frames_of(reader.steps(), target.most_bytes)
        total, looked, saved_at = reader.left_bytes(), 0, loop.time()
        upcoming = loop.run_in_executor(None, next, frames, None)
        try:
            while (frame := await _renewing(upcoming, lock)) is not None:
                upcoming = loop.run_in_executor(None, next, frames, None)  # made while the broker works
                await _called(broker.store(frame), lock)
                self._settle(frame)
                lock.renew()
                looked += frame.read
                if shown is not None:
                    shown(looked, total)
                if frame.is_whole and loop.time() - saved_at >= _SAVE_EVERY_S:
                    progress.since, progress.following = broker.ends, broker.following
                    self._save()
                    saved_at = loop.time()
        finally:
            await asyncio.wait([upcoming])
            await broker.close()
        progress.since, progress.following = None, broker.following

    def _settle(self, frame: RestoreFrame) -> None:
        """Record a frame that is stored."""
        for log, start, end in frame.done:
            self._progress.done.setdefault(log, Intervals()).add(start, end)
        counts = self._progress.counts
        for name, count in vars(frame.counts).items():
            setattr(counts, name, getattr(counts, name) + count)
        self.damages += frame.damages


async def _renewing(doing: asyncio.Future[_Made], lock: ArchiveLock) -> _Made:
    """Return the result of *doing*, and renew the lock meanwhile. Raises its errors, and as ``ArchiveLock.renew``."""
    while not (await asyncio.wait([doing], timeout=_RENEW_EVERY_S))[0]:
        lock.renew()
    return doing.result()


async def _called(call: Coroutine[Any, Any, None], lock: ArchiveLock) -> None:
    """Wait for a call, and renew the lock meanwhile; cancel the call if the wait ends early."""
    doing = asyncio.ensure_future(call)
    try:
        await _renewing(doing, lock)
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])
