"""One restore: killed at any moment and run again, it brings every message once.

What is known to be on disk at the broker is in the progress beside the archive; what was sent since is looked up there,
by the ids of the messages, before anything is sent again. All of a restore goes to one broker: another one is taken
only where nothing is in doubt.
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
from qmq.restore import progress as kept
from qmq.restore.frames import RestoreFrame, frames_of
from qmq.restore.progress import RestoreProgress
from qmq.restore.read import ArchiveDamage, ArchiveReader, Reader
from qmq.restore.selection import RestoreSelection
from qmq.restore.target import TargetBroker

#: A broker that cannot be reached, or refuses what may pass, for so long, in seconds, ends the run.
GIVE_UP_S: Final = 60.0
#: Progress is kept so often, in seconds: each time costs the disk a sync.
_KEEP_S: Final = 0.5
#: How long a broker or the archive is waited for before the lock is looked at: it is to be renewed meanwhile.
_HEAR_S: Final = 5.0

_Made = TypeVar("_Made")
_RUN_BYTES: Final = 16

Clock = Callable[[], int]
#: Told of bytes of the archive that were looked at, and of how many there are.
Shown = Callable[[int, int], None]


class Restoring:
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
        """*source*: the same tree, where it is read in another way than written to. *again*: begin anew what was
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
        self._away: dict[Address, QmqError] = {}
        self._path = ""
        self._progress = RestoreProgress("", [], 0, "")
        #: What was bad of what this run has read.
        self.damages: list[ArchiveDamage] = []

    async def run(self, shown: Shown | None = None) -> RestoreProgress:
        """Restore; *shown* hears of bytes of the archive that were looked at, and of how many there are.

        Raises QmqError: then nothing is lost, and running it again goes on.
        """
        try:
            await self._connect_all()
            self._files.make_directory(kept.DIRECTORY)
            self._choose()
            with ArchiveLock(self._files, self._clock, self._owner, f"{self._path}.lock") as lock:
                self._choose()  # as it is now that nobody else changes it
                reader = self._reader()
                if reader.left_bytes():
                    await self._restore(reader, lock, shown)
                    if all(damage.is_settled for damage in self.damages):
                        forms.settle(self._progress)
                    self._progress.finished_at_us = self._clock()
                    self._keep()
            return self._progress
        finally:
            for _, target in self._targets.values():
                await target.close()

    def bad_ranges(self) -> int:
        """Of the archive, in this run and before."""
        return self._progress.counts.damages + sum(not damage.is_settled for damage in self.damages)

    # --- which restore, and where ------------------------------------------------------------------------------------

    async def _connect_all(self) -> None:
        for address in self._addresses:
            try:
                target = await RestoreTarget.open(address)
            except ConnectionLost as error:
                self._away[address] = error
                continue
            store = target.welcome.store_id.hex()
            if store in self._targets:
                await target.close()
            else:
                self._targets[store] = address, target
        if not self._targets:
            raise next(iter(self._away.values()))

    def _choose(self) -> None:
        """Find the progress of this restore, or begin one. Raises InvalidOption, ConnectionLost, BadBytes."""
        digest = self._selection.digest()
        there = {
            path: progress
            for path, progress in kept.find(self._files, digest).items()
            if set(progress.stores) & set(self._targets)
        }
        if len(there) > 1:
            raise InvalidOption("these brokers were restored to one by one; go on with them so: name one of them")
        if there:
            ((self._path, self._progress),) = there.items()
            if not self._again:
                return
        if self._away:
            names = ", ".join(map(str, self._away))
            raise ConnectionLost(
                f"a restore begins only when all brokers that are named can be reached, and {names} can't: start it, "
                "or leave it out"
            )
        stores = list(self._targets)
        self._path = self._path or kept.path_of(digest, stores[0])
        self._progress = RestoreProgress(os.urandom(_RUN_BYTES).hex(), stores, self._clock(), stores[0])

    def _reader(self) -> Reader:
        """Of segments, and of Parquet for what these lack. Raises InvalidOption, BadBytes, StorageFailed."""
        files, progress = self._source, self._progress
        if not is_archive(files):
            raise InvalidOption(f"{files.name} is no archive; name what `qmq archive --to` named")
        table = read_table(files)  # before segments: what a run writes meanwhile is in these, if anywhere
        forms.assign(progress, table, [manifest for _, manifest in manifests(files)], files.name)
        of_segments = ArchiveReader(files, self._selection, forms.settled_with(progress))
        if not progress.by_files:
            return of_segments
        try:
            from qmq.restore.parquet import ParquetReader
        except ModuleNotFoundError as error:
            if error.name != "pyarrow":
                raise
            raise InvalidOption("to read Parquet takes pyarrow; run: pip install 'qmq[arrow]'") from None
        of_files = ParquetReader(files, self._selection, progress.done, progress.by_files)
        return forms.SeveralReaders([of_segments, of_files])

    def _keep(self) -> None:
        kept.write(self._files, self._path, self._progress)

    def _pick(self) -> None:
        """The broker to send to: the one that may have what is in doubt, else the first that is there."""
        progress = self._progress
        if progress.store in self._targets:
            return
        if progress.since is not None:
            raise ConnectionLost(
                f"the broker of store {progress.store} can't be reached, and may have messages of this restore that "
                "are not known to be there; start it, name it in --server, and run this again"
            )
        progress.store = next(iter(self._targets))
        progress.stores = [*dict.fromkeys([*progress.stores, *self._targets])]

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _restore(self, reader: Reader, lock: ArchiveLock, shown: Shown | None) -> None:
        self._pick()
        progress, loop = self._progress, asyncio.get_running_loop()
        address, target = self._targets[progress.store]
        broker = TargetBroker(address, target, progress, self._selection.group, self._give_up_s)
        await _called(broker.begin(), lock)
        if progress.since is None:  # nothing is sent before it is on disk since when that may be looked up
            progress.since, progress.finished_at_us = broker.ends, 0
            self._keep()
        reader.found = broker.found
        frames = frames_of(reader.steps(), target.most_bytes)
        total, looked, kept_at = reader.left_bytes(), 0, loop.time()
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
                if frame.is_whole and loop.time() - kept_at >= _KEEP_S:
                    progress.since, progress.following = broker.ends, broker.following
                    self._keep()
                    kept_at = loop.time()
        finally:
            await asyncio.wait([upcoming])
            await broker.close()
        progress.since, progress.following = None, broker.following

    def _settle(self, frame: RestoreFrame) -> None:
        """All of it is stored."""
        for log, start, end in frame.done:
            self._progress.done.setdefault(log, Intervals()).add(start, end)
        counts = self._progress.counts
        for name, count in vars(frame.counts).items():
            setattr(counts, name, getattr(counts, name) + count)
        self.damages += frame.damages


async def _renewing(doing: asyncio.Future[_Made], lock: ArchiveLock) -> _Made:
    """What that gives, with the lock renewed meanwhile. Raises what it does, and as ``ArchiveLock.renew``."""
    while not (await asyncio.wait([doing], timeout=_HEAR_S))[0]:
        lock.renew()
    return doing.result()


async def _called(call: Coroutine[Any, Any, None], lock: ArchiveLock) -> None:
    """The same, of a call that nobody waits for where this ends otherwise."""
    doing = asyncio.ensure_future(call)
    try:
        await _renewing(doing, lock)
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])
