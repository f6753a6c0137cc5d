"""The one module that knows all parts: builds store, broker and server of one broker and runs them.

The loop's thread does everything but wait for disks: each partition has a thread for its syncs and one for reading what
is not in memory, so that a disk that stalls stalls only its own partition, and checkpoints have one.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from typing import Final

from qmq.broker.commands import Checked, CheckWanted, Now, ReadDone, ReadWanted, SyncBroken, Synced, SyncWanted
from qmq.broker.core import Broker
from qmq.broker.counters import Counters
from qmq.broker.damages import TellRate
from qmq.broker.limits import BrokerLimits
from qmq.errors import QmqError, StorageError, StorageFailed
from qmq.net.server import Server, ServerOptions, clock
from qmq.net.server.listening import bind, cannot_listen
from qmq.scrubbing import Scrubbing
from qmq.settings import Settings, parse_address
from qmq.storage.disk import Disk
from qmq.storage.store import Damage, Store, StoreOptions

log = logging.getLogger("qmq.broker")

#: How long a stop waits for disks and for clients that do not read, each.
_PATIENCE_S: Final = 3.0
#: How long a sync waits that could not begin, for want of a file descriptor.
_SYNC_AGAIN_S: Final = 0.1
#: A thread that comes back from the disk has to wait for the interpreter. Beside a loop that never pauses it waited
#: 5.4 ms (median) at the default of 5 ms, 0.7 ms at 0.5 ms and 0.26 ms at 0.1 ms; the loop did not become slower.
_SWITCH_INTERVAL_S: Final = 0.0001
#: A clock that shows less has not been set: 2000-01-01.
_EARLIEST_US: Final = 946_684_800_000_000
#: Bad places that a start names one by one.
_HOLES_SHOWN: Final = 100
#: So many bad places are named in the log at once, and one more each second.
_TOLD_AT_ONCE: Final = 500
_TOLD_EVERY_US: Final = 1_000_000
#: Files that a broker has open beside its connections, at most by far.
_OTHER_FILES: Final = 2_000


class ClockNotSet(QmqError):
    """The machine's clock shows a time before 2000: what is stored would bear it for good."""

    code = "clock_not_set"


class Worker:
    """A thread that makes calls in order; the outcome comes back in the loop.

    A call that returns True is made again, after those that wait.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], bool | None], Callable[[QmqError | None], None]] | None]
        self._calls = queue.SimpleQueue()
        # A daemon: a disk that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], bool | None], done: Callable[[QmqError | None], None]) -> None:
        """Have *work* called in the thread, then *done* in the loop, with the error or None."""
        self._calls.put((work, done))

    async def run(self, work: Callable[[], None]) -> None:
        """Call *work* in the thread; raises what it raised."""
        outcome: asyncio.Future[QmqError | None] = self._loop.create_future()
        self.call(work, lambda error: None if outcome.done() else outcome.set_result(error))
        error = await outcome
        if error is not None:
            raise error

    def stop(self, patience_s: float) -> None:
        """End the thread when its calls are made; wait for that, but not for ever."""
        self._calls.put(None)
        self._thread.join(patience_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, done = call
            outcome: QmqError | None = None
            try:
                if work():
                    self._calls.put(call)
                    continue
            except QmqError as error:
                outcome = error
            except Exception as error:
                log.exception("a call to the disk failed in a way that nobody foresaw")
                outcome = StorageError(f"a call to the disk failed: {error!r}; the log of the broker has the details")
            try:
                self._loop.call_soon_threadsafe(done, outcome)
            except RuntimeError:
                return  # the loop is closed: the broker has given up waiting for this disk


class Checkpoints:
    """Takes a checkpoint when something has changed and the time is up or many bytes are not on disk."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        broker: Broker,
        changes: Callable[[], int],
        done: Callable[[], None],
        clock: Callable[[], Now],
    ) -> None:
        """*changes* counts what a checkpoint would keep; *done* is called after each one, taken or failed."""
        self._settings = settings
        self._store = store
        self._broker = broker
        self._changes = changes
        self._done = done
        self._clock = clock
        self._worker = Worker("qmq-checkpoint")
        self._urgent = asyncio.Event()
        self._closing = asyncio.Event()
        self._done_changes = changes()
        self._last_error: StorageError | None = None
        #: One is being written.
        self.running = False
        self._task = asyncio.create_task(self._run())

    def hurry(self) -> None:
        """Take one now."""
        self._urgent.set()

    async def close(self) -> None:
        """Take a last one. Raises StorageError, or TimeoutError when the disk does not answer."""
        self._closing.set()
        self._urgent.set()
        patience_s = _PATIENCE_S
        try:
            async with asyncio.timeout(patience_s):
                await self._task
                await self._take()
        except TimeoutError:
            patience_s = 0
            raise
        finally:
            self._worker.stop(patience_s)

    async def _run(self) -> None:
        while True:
            await self._pause(self._closing if self._last_error is not None else self._urgent)
            if self._closing.is_set():
                return
            self._urgent.clear()
            if self._changes() == self._done_changes and not self._store.unsynced_bytes:
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
        """Until *event*, at most until the next checkpoint is due by time."""
        try:
            async with asyncio.timeout(self._settings.checkpoint_ms / 1_000):
                await event.wait()
        except TimeoutError:
            pass

    async def _take(self) -> None:
        changes, now = self._changes(), self._clock()
        self.running = True
        try:
            checkpoint = self._store.begin_checkpoint(self._broker.checkpoint_state(now), now.wall_us)
            await self._worker.run(checkpoint.write)
            self._store.finish_checkpoint(checkpoint)
        except QmqError:
            raise
        except Exception as error:
            if self._last_error is None:
                log.exception("a checkpoint failed in a way that nobody foresaw")
            raise StorageError(f"a checkpoint failed: {error!r}; the log of the broker has the details") from error
        finally:
            self.running = False
            self._done()
        self._done_changes = changes


class RunningBroker:
    """One broker, from its settings. Made: its directory is locked and recovered, its port bound. ``start`` serves."""

    def __init__(self, settings: Settings, disk: Disk | None = None, clock: Callable[[], Now] = clock) -> None:
        """Open everything; may take as long as recovery. Raises ClockNotSet, CannotListen and StorageError."""
        self.settings = settings
        self._clock = clock
        now = clock()
        _check_clock(now)
        self._sockets, self.address = bind(*parse_address(settings.listen))
        with ExitStack() as undo:
            undo.callback(self._close_sockets)
            options = _store_options(settings, self.address)
            self.store = Store.open(settings.data_dir, options, disk if disk is not None else Disk(), now.wall_us)
            undo.callback(self.store.close, clean=False)
            _log_recovery(settings, self.store)
            self.broker = Broker(self.store, _broker_limits(settings), now)
            self.counters.holes_in_recovery = sum(
                len(part.holes) + len(part.damaged) for part in self.store.recovery.partitions
            )
            undo.pop_all()
        self._tell_rate = TellRate(_TOLD_AT_ONCE, _TOLD_EVERY_US)
        self._untold = 0  # bad places since the last that was named
        self._stopping = False
        self._settled = asyncio.Event()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        host, port = self.address
        return f"qmq://[{host}]:{port}" if ":" in host else f"qmq://{host}:{port}"

    @property
    def counters(self) -> Counters:
        """What it has met since it was made."""
        return self.broker.counters

    async def start(self) -> None:
        """Serve. Raises CannotListen when another process has come to listen on the port."""
        self._scrub_worker = Worker("qmq-scrub")
        self._syncs = [Worker(f"qmq-sync-{partition}") for partition in range(self.store.partitions)]
        self._readers = [Worker(f"qmq-read-{partition}") for partition in range(self.store.partitions)]
        self.server = Server(
            self.broker, _server_options(self.settings, self.store), self._work, self._turned, self._clock
        )
        self._broken: set[int] = set()  # partitions
        self._delayed: set[int] = set()  # as well; told of once
        self._checkpoints = Checkpoints(
            self.settings, self.store, self.broker, lambda: self.server.changes, self._checkpointed, self._clock
        )
        self._scrubbing = None
        if self.settings.scrub_bytes_per_s:
            self._scrubbing = Scrubbing(
                self.settings, self.store, self.broker, self._scrub_worker, self._clock, self._tell_damage
            )
        try:
            self.server.listen(self._sockets)
        except OSError as error:
            await self.stop()
            raise cannot_listen(*self.address, error) from error

    async def stop(self) -> None:
        """Finish what clients wait for, say goodbye, and close with everything on disk.

        Raises StorageError when the last checkpoint can't be written: the next start then recovers as after a crash.
        """
        self._stopping = True
        if self._scrubbing is not None:
            await self._scrubbing.close()
        self.server.stop_reading()
        self.broker.stop()
        self.server.turn()
        patience_s, clean = _PATIENCE_S, False
        try:
            async with asyncio.timeout(patience_s):
                await self._settled.wait()
        except TimeoutError:
            log.error("the disk did not answer within %g s: some sends stay unanswered", patience_s)
            patience_s = 0
        await self.server.close(_PATIENCE_S)
        self._close_sockets()
        try:
            await self._checkpoints.close()
            clean = True
        except TimeoutError:
            patience_s = 0
            raise StorageError(
                f"the disk did not answer within {_PATIENCE_S:g} s; the next start recovers what was written"
            ) from None
        finally:
            for worker in [*self._syncs, self._scrub_worker]:
                worker.stop(patience_s)
            for worker in self._readers:
                worker.stop(0)  # nobody waits for what they read
            self.store.close(clean)
            log.info("in all: %s", self.counters.summary())

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    # --- called by the server ----------------------------------------------------------------------------------------

    def _work(self, wanted: SyncWanted | ReadWanted | CheckWanted) -> None:
        match wanted:
            case SyncWanted():
                self._sync(wanted)
            case ReadWanted(number, read):
                self._readers[read.partition].call(read.step, lambda error: self.server.submit(ReadDone(number, error)))
            case CheckWanted():
                self._check(wanted)

    def _check(self, wanted: CheckWanted) -> None:
        number, partition, position, *what = wanted
        reader = self.store.reader(partition, position)
        found = list[tuple[memoryview, Damage | None]]()

        def read() -> None:
            try:
                found.append(reader.read_batch(position, *what))
            finally:
                reader.close()

        def done(error: QmqError | None) -> None:
            batch, damage = found[0] if found else (memoryview(b""), None)
            self.server.submit(Checked(number, batch, damage, error))

        self._scrub_worker.call(read, done)

    def _sync(self, wanted: SyncWanted) -> None:
        partition, position = wanted

        def done(error: QmqError | None) -> None:
            if error is None:
                self.server.submit(Synced(partition, position))
            elif isinstance(error, StorageFailed):  # it could not begin
                self._tell_delayed(partition, error)
                asyncio.get_running_loop().call_later(_SYNC_AGAIN_S, self._sync, wanted)
            else:
                self._break(partition, error)

        self._syncs[partition].call(lambda: self.store.sync(partition), done)

    def _tell_delayed(self, partition: int, error: StorageFailed) -> None:
        if partition not in self._delayed:
            self._delayed.add(partition)
            log.error("partition %d cannot be synced now, it is tried again: %s", partition, error)

    def _break(self, partition: int, error: QmqError) -> None:
        if partition not in self._broken:
            self._broken.add(partition)
            self.counters.failed_syncs += 1
            log.error("partition %d takes nothing more until a restart: %s", partition, error)
        self.server.submit(SyncBroken(partition, error))

    def _checkpointed(self) -> None:
        """A checkpoint was taken or has failed; it syncs all partitions, so it may be the first to see one fail."""
        for partition in range(self.store.partitions):
            error = self.store.broken(partition)
            if error is not None and partition not in self._broken:
                self._break(partition, error)
        self._pace()

    def _turned(self) -> None:
        self._pace()
        self._tell_damage()
        if self._stopping and not self.broker.waiting_for_sync():
            self._settled.set()

    def _tell_damage(self) -> None:
        for error in self.broker.take_damaged():
            if not self._tell_rate.may_tell(clock().monotonic_us):
                self._untold += 1
                continue
            untold, self._untold = self._untold, 0
            others = f"; {untold} others before it were too many to name, `qmq verify` names all" if untold else ""
            log.error("what is bad is served no more: %s (%s%s)", error, self.counters.damage_totals(), others)

    def _pace(self) -> None:
        """Have the disk catch up when it is behind, and sends wait when it is far behind.

        They wait for nothing but a checkpoint that runs: when none can be taken, sends are refused where the disk
        refuses them.
        """
        store = self.store
        if store.unsynced_bytes >= self.settings.checkpoint_bytes:
            self._checkpoints.hurry()
        behind = self._checkpoints.running and self.settings.max_unsynced_bytes <= sum(
            store.end(partition) - store.synced(partition) for partition in range(store.partitions)
        )
        self.server.hold_sends(behind)


def run(settings: Settings, ready: Callable[[RunningBroker], None]) -> None:
    """Run a broker until SIGTERM or SIGINT; *ready* is called once it serves. Raises QmqError."""
    import uvloop

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    settings = settings.model_copy(update={"max_connections": _allow_files(settings.max_connections)})
    running = RunningBroker(settings)  # before the loop runs, so that a signal can end a long recovery
    uvloop.run(_serve(running, ready))


def _allow_files(connections: int) -> int:
    """Raise this process's limit of open files as far as it may: most systems begin at 1,024.

    Returns how many of *connections* it leaves room for, beside the files of the store.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= connections + _OTHER_FILES:
        return connections
    allowed = max(hard - _OTHER_FILES, hard // 2)
    log.warning(
        "this process may have %d files open, too few for max_connections = %d: it takes %d; raise ulimit -n",
        hard,
        connections,
        allowed,
    )
    return allowed


async def _serve(running: RunningBroker, ready: Callable[[RunningBroker], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await running.start()
    # What is there now stays: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    ready(running)
    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)  # a second one ends the process at once
    log.info("stopping")
    await running.stop()
    log.info("stopped")


def _log_recovery(settings: Settings, store: Store) -> None:
    report = store.recovery
    for note in report.notes:
        log.warning("%s", note)
    if report.created:
        log.info("made the data directory %s, store %s", settings.data_dir, store.store_id.hex())
        return
    messages = sum(part.replayed_messages for part in report.partitions)
    log.info(
        "opened %s, store %s, %d subjects, after a stop that was %s; %d messages behind the checkpoint were read again",
        settings.data_dir,
        store.store_id.hex(),
        store.subject_count,
        "clean" if report.clean else "not clean",
        messages,
    )
    _log_holes(store)
    if report.power_loss:
        log.warning(
            "unsynced data may be gone (the machine was started again, or a sync had failed): positions and sequences "
            "skip ahead"
        )
    elif report.raised_by:
        log.warning("it cannot be told which messages are lost: sequences skip ahead by %d", report.raised_by)


def _log_holes(store: Store) -> None:
    """Name what the start found to be bad or gone; it stands in the next checkpoint and is not named again."""
    holes = [(part.partition, hole) for part in store.recovery.partitions for hole in (*part.damaged, *part.holes)]
    for partition, hole in holes[:_HOLES_SHOWN]:
        place = store.place_of(partition, hole.start)
        log.error("%s, %d bytes are bad or gone: the messages in them are lost", place, hole.end - hole.start)
    if len(holes) > _HOLES_SHOWN:
        log.error("and at %d more places; qmq verify names them", len(holes) - _HOLES_SHOWN)


def _check_clock(now: Now) -> None:
    if now.wall_us < _EARLIEST_US:
        shown = datetime.fromtimestamp(now.wall_us / 1_000_000, UTC)
        raise ClockNotSet(
            f"the clock of this machine shows {shown:%Y-%m-%d %H:%M} UTC, which cannot be: set it (NTP, `date -s`), "
            "then start the broker again"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Settings to the parts' options


def _store_id_of(settings: Settings, address: tuple[str, int]) -> bytes | None:
    """The store id that a new directory gets: the IPv4 address that clients use, and the port. None: a random one."""
    host, port = parse_address(settings.advertise) if settings.advertise else address
    try:
        number = ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return None
    return None if number.is_unspecified else number.packed + port.to_bytes(2, "big")


def _store_options(settings: Settings, address: tuple[str, int]) -> StoreOptions:
    return StoreOptions(
        segment_bytes=settings.segment_bytes,
        partitions=settings.partitions,
        partition_dirs=settings.partition_dirs,
        reserve_bytes=settings.reserve_bytes,
        max_frame_bytes=settings.max_frame_bytes,
        max_subjects=settings.max_subjects,
        keep_free_bytes=settings.keep_free_bytes,
        store_id_hint=_store_id_of(settings, address),
    )


def _broker_limits(settings: Settings) -> BrokerLimits:
    return BrokerLimits(
        max_message_bytes=settings.max_message_bytes,
        max_groups=settings.max_groups,
        max_producers=settings.max_producers,
        producer_window=settings.producer_window,
        producer_ttl_ms=settings.producer_ttl_ms,
        max_parked_pulls=settings.max_parked_pulls,
        max_pull_count=settings.max_pull_count,
        max_pull_bytes=settings.max_pull_bytes,
    )


def _server_options(settings: Settings, store: Store) -> ServerOptions:
    return ServerOptions(
        store_id=store.store_id,
        version=metadata.version("qmq"),
        max_frame_bytes=settings.max_frame_bytes,
        max_message_bytes=settings.max_message_bytes,
        producer_window=settings.producer_window,
        producer_ttl_ms=settings.producer_ttl_ms,
        max_pull_count=settings.max_pull_count,
        max_pull_bytes=settings.max_pull_bytes,
        max_parked_pulls=settings.max_parked_pulls,
        max_connections=settings.max_connections,
        max_inflight_bytes=settings.max_inflight_bytes,
        max_buffered_bytes=settings.max_buffered_bytes,
        first_frame_timeout_ms=settings.first_frame_timeout_ms,
    )
