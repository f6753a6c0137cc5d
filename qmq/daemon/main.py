"""Builds the store, the broker and the server of one broker, and runs them. No other module knows all three.

The loop's thread does all work that does not wait for disks. Each partition has one thread for syncs, one for reads of
waiting pulls and one for reads of history, so a stalled disk delays only its own partition. Checkpoints, the scrub and
key indexes have a thread each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, cast

from qmq import ping_socket
from qmq.broker.damage import LogRate
from qmq.broker.groups.untaken import LOOK_US
from qmq.broker.ports.commands import Checked, Fetched, Now, ReadDone, SyncBroken, Synced
from qmq.broker.ports.effects import (
    CheckpointWanted,
    CheckWanted,
    FetchWanted,
    InfoWanted,
    ReadWanted,
    StatsWanted,
    SyncWanted,
)
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.metrics import Counters
from qmq.daemon.checkpointer import Checkpointer
from qmq.daemon.collector import CollectorBound
from qmq.daemon.file_survey import FileSurvey, LogSegments
from qmq.daemon.fsyncs import Fsyncs
from qmq.daemon.info import BrokerFacts, DiskSpace, DiskSurvey, InfoAnswers, clock_problem
from qmq.daemon.key_indexer import KeyIndexer
from qmq.daemon.reload import changes_between
from qmq.daemon.scrubber import Scrubber
from qmq.daemon.startup import check_clock, log_start, open_broker
from qmq.daemon.stats import StatsAnswers
from qmq.daemon.systemd import ServiceManager
from qmq.daemon.threads import CallThread
from qmq.daemon.token_file import TokenFile, is_loopback, read_at_start
from qmq.daemon.turns import in_turns
from qmq.errors import QmqError, StorageError, StorageFailed
from qmq.format.layout import DELAY_PARTITION
from qmq.net.server import Server, ServerOptions, clock
from qmq.net.server.accept import Acceptor, bind_all, cannot_listen
from qmq.net.server.certificates import LOOK_S, ServerCertificates
from qmq.net.server.replies import DiskWork
from qmq.settings import Settings, parse_addresses, settings_text
from qmq.storage.disk.disk import Disk
from qmq.storage.store import PartitionDamage, Store, StoreOptions
from qmq.version import VERSION

log = logging.getLogger("qmq.broker")

#: Seconds that a stop waits for disks, and for clients that do not read.
_TIMEOUT_S: Final = 3.0
#: Seconds until a sync is tried again that could not start, for want of a file descriptor.
_SYNC_AGAIN_S: Final = 0.1
#: The interpreter's switch interval. A thread that returns from the disk waits for the interpreter: beside a loop that
#: never pauses it waited 5.4 ms (median) at the default of 5 ms, 0.7 ms at 0.5 ms and 0.26 ms at 0.1 ms; the loop did
#: not become slower.
_SWITCH_INTERVAL_S: Final = 0.0001
#: How many damages are logged at once, and one more in each such time.
_LOGGED_AT_ONCE: Final = 500
_LOGGED_EVERY_US: Final = 1_000_000
#: Files that a broker has open besides its connections; far fewer in practice.
_OTHER_FILES: Final = 2_000


class RunningBroker:
    """One broker with its store and server. When it is made, its directory is recovered and locked, and its port bound;
    ``start`` serves.
    """

    def __init__(self, settings: Settings, disk: Disk | None = None, clock: Callable[[], Now] = clock) -> None:
        """Open the directory and bind the port; this takes as long as recovery. Raises ClockNotSet, CannotListen,
        InvalidOption for files of TLS that cannot be used, and StorageError.
        """
        self.settings = settings
        self._clock = clock
        self._started = now = clock()
        check_clock(now)
        self._certificates: ServerCertificates | None = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            self._certificates = ServerCertificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._sockets, self.addresses = bind_all(parse_addresses(settings.listen))
        self.address = self.addresses[0]
        with ExitStack() as undo:
            undo.callback(self._close_sockets)
            self._tokens_read = read_at_start(settings, [sock.getsockname()[0] for sock in self._sockets])
            options = _store_options(settings)
            self._disk = disk = disk if disk is not None else Disk()
            self.store, self.broker = open_broker(settings.data_dir, options, disk, _broker_limits(settings), now)
            undo.callback(self.store.close, clean=False)
            self.counters.holes_in_recovery = sum(
                len(part.holes) + len(part.damaged) for part in self.store.recovery.partitions
            )
            undo.pop_all()
        self._log_rate = LogRate(_LOGGED_AT_ONCE, _LOGGED_EVERY_US)
        self._unlogged = 0  # damages since the last one that was logged
        self._stopping = False
        self._name_timer: asyncio.TimerHandle | None = None
        self._name_task: asyncio.Task[None] | None = None
        self._is_clock_behind = False
        self._certificate_timer: asyncio.TimerHandle | None = None
        self._settled = asyncio.Event()
        self._ping_acceptor: Acceptor | None = None

    @property
    def url(self) -> str:
        """The URL at which clients reach the broker; of several the first."""
        return self._url_of(*self.address)

    @property
    def shown_urls(self) -> str:
        """The URLs for people."""
        return " and ".join(self._url_of(*address) for address in self.addresses)

    def _url_of(self, host: str, port: int) -> str:
        scheme = "qmq" if self._certificates is None else "qmqs"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def counters(self) -> Counters:
        """The metrics of the broker since it was made."""
        return self.broker.counters

    async def start(self) -> None:
        """Serve. Raises CannotListen when another process has begun to listen on the port."""
        self._scrub_worker = CallThread("qmq-scrub")
        self._key_worker = CallThread("qmq-keys")
        self._fsyncs = Fsyncs(self.store, (*range(len(self.store.partitions)), DELAY_PARTITION))
        self._readers = [CallThread(f"qmq-read-{partition}") for partition in range(len(self.store.partitions))]
        self._tracer = CallThread("qmq-trace")
        self._fetchers = [CallThread(f"qmq-fetch-{partition}") for partition in range(len(self.store.partitions))]
        self.server = Server(
            self.broker, _server_options(self.settings, self.store), self._work, self._turned, self._clock,
            tls=None if self._certificates is None else self._certificates.context,
        )  # fmt: skip
        self._token_file = TokenFile(self.settings, self.server, self._tokens_read)
        self._broken: set[int] = set()  # partitions that failed a sync
        self._full: set[int] = set()  # partitions that refuse sends for want of room
        self._delayed: set[int] = set()  # partitions whose sync could not start; each is logged once
        self._is_paced = False  # whether a disk is far behind
        self._catching_up: set[int] = set()  # partitions that are synced to catch up, though no sender waits
        self._checkpointer = Checkpointer(
            self.settings, self.store, self.broker, lambda: self.server.changes, self._checkpointed, self._clock
        )
        survey = DiskSurvey(
            self._disk, (self.settings.data_dir, *self.settings.partition_dirs), self.settings.keep_free_bytes
        )
        self._info = InfoAnswers(
            self.store, self._started, self._clock, survey, self._facts, self.server.clients, self.server.submit
        )
        self._file_survey = FileSurvey(
            self._disk, (self.settings.data_dir, *self.settings.partition_dirs), self._log_segments, self._clock
        )
        self._stats = StatsAnswers(
            self.store, self._started, self._clock, survey, self._file_survey, self.server.times, self.server.traffic,
            self._checkpointer.age_us, self.server.submit,
        )  # fmt: skip
        self._scrubber: Scrubber | None = None
        self._begin_scrub()
        self._key_indexer = KeyIndexer(self.store, self._key_worker, self._clock)
        try:
            self.server.listen(self._sockets)
        except OSError as error:
            await self.stop()
            raise cannot_listen(*self.address, error) from error
        self._ping_acceptor = self._answer_pings()
        self.server.turn()  # starts the timers
        self._token_file.start()
        self._look_at_names()
        if self._certificates is not None:
            self._look_at_certificates(self._certificates)

    def _answer_pings(self) -> Acceptor | None:
        """Answer at the socket of the data directory, if the file system has sockets."""
        directory = self.settings.data_dir
        try:
            sock = ping_socket.bind(directory)
        except OSError as error:
            log.warning("probes with --data-dir %s get no answer: %s", directory, error.strerror or error)
            return None
        said = ping_socket.answer(VERSION)
        return Acceptor(asyncio.get_running_loop(), sock, lambda: _Pong(said), lambda: 0, lambda: False)

    def _look_at_certificates(self, certificates: ServerCertificates) -> None:
        """Take a renewed certificate, now and every LOOK_S seconds."""
        if not self._stopping:
            certificates.look()
            loop = asyncio.get_running_loop()
            self._certificate_timer = loop.call_later(LOOK_S, self._look_at_certificates, certificates)

    def _look_at_names(self) -> None:
        """Log names whose messages nobody takes, and a clock that is behind, once each, now and from time to time."""
        if not self._stopping:
            wall_us = self._clock().wall_us
            problem = clock_problem(self.store.last_stored_at_us - wall_us, wall_us)
            if problem is not None and not self._is_clock_behind:
                log.warning("%s", problem)
            self._is_clock_behind = problem is not None
            loop = asyncio.get_running_loop()
            self._name_task = loop.create_task(self._report_names())
            self._name_timer = loop.call_later(LOOK_US / 1e6, self._look_at_names)

    async def _report_names(self) -> None:
        try:
            for _, text in await in_turns(self.broker.untaken.look(self._clock().monotonic_us)):
                log.warning("%s", text)
        except Exception:
            log.exception("the look for names that nobody takes failed unexpectedly")

    def _log_segments(self) -> list[LogSegments]:
        logs = [part.message_log for part in self.store.partitions]
        return [LogSegments(log.owner, log.directory, log.spans()) for log in logs]

    def log_start(self) -> None:
        """Log the version and the settings that differ from the defaults."""
        is_open = not self.server.has_tokens
        log_start(self.settings, self.shown_urls, [sock.getsockname()[0] for sock in self._sockets] if is_open else [])

    def _begin_scrub(self) -> None:
        if self.settings.scrub_bytes_per_s:
            self._scrubber = Scrubber(
                self.settings, self.store, self.broker, self._scrub_worker, self._clock, self._log_damage
            )

    async def reload(self, taken: dict[str, Any]) -> None:
        """Apply changed settings, all among ``reload.RELOADABLE``; the caller applies those of the log."""
        self.settings = settings = self.settings.model_copy(update=taken)
        self._checkpointer.set_interval(settings.checkpoint_ms)
        if any(key.startswith("retention_") for key in taken):
            needs_archive = settings.retention_needs_archive == "yes"
            self.broker.set_retention(
                settings.retention_ms, settings.retention_max_ms, settings.retention_bytes, needs_archive=needs_archive
            )
        if taken.keys() & {"scrub_bytes_per_s", "scrub_round_ms"}:
            if self._scrubber is not None:
                await self._scrubber.close()
                self._scrubber = None
            self._begin_scrub()
        self.server.turn()  # timers may be due at other times now

    async def stop(self) -> None:
        """Answer the open requests as far as possible, end all connections, and close with all data on disk.

        Raises StorageError if the last checkpoint cannot be written: the next start then recovers as after a crash.
        """
        self._stopping = True
        if self._ping_acceptor is not None:
            self._ping_acceptor.close()
            ping_socket.remove(self.settings.data_dir)
        for timer in (self._name_timer, self._certificate_timer):
            if timer is not None:
                timer.cancel()
        if self._name_task is not None:
            self._name_task.cancel()
        if self._scrubber is not None:
            await self._scrubber.close()
        await self._key_indexer.close()
        self._token_file.close()
        self.server.stop_reading()
        self.broker.stop()
        self.server.turn()
        timeout_s, clean = _TIMEOUT_S, False
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            log.error("the disk did not answer within %g s: some sends stay unanswered", timeout_s)
            timeout_s = 0
        await self.server.close(_TIMEOUT_S)
        self._log_damage()
        self._close_sockets()
        try:
            await self._checkpointer.close(_TIMEOUT_S)
            clean = True
        except TimeoutError:
            timeout_s = 0
            raise StorageError(
                f"the disk did not answer within {_TIMEOUT_S:g} s; the next start recovers what was written"
            ) from None
        finally:
            self._fsyncs.close(timeout_s)
            self._scrub_worker.stop(timeout_s)
            self._key_worker.stop(timeout_s)
            for worker in [*self._readers, *self._fetchers, self._tracer]:
                worker.stop(0)  # their results are not used any more
            self._info.close()
            self._file_survey.close()
            self.server.end_turns()
            self._close_store(clean)
            if summary := self.counters.summary():
                log.info("in all: %s", summary)

    def _close_store(self, clean: bool) -> None:
        """Close the store, which unlocks its directory, once every thread that may write to it has ended."""
        workers = [*self._fsyncs.workers.values(), self._checkpointer.worker, self._key_worker]
        writing = [worker for worker in workers if worker.is_running]
        if not writing:
            self.store.close(clean)
            return

        def close() -> None:
            for worker in writing:
                worker.wait()
            self.store.close(clean=False)

        threading.Thread(target=close, name="qmq-close", daemon=True).start()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    # --- called by the server ----------------------------------------------------------------------------------------

    def _work(self, wanted: DiskWork) -> None:
        match wanted:
            case SyncWanted():
                self._sync(wanted)
            case ReadWanted(number, read):
                reader = self._tracer if read.partition < 0 else self._readers[read.partition]
                reader.call(read.step, lambda error: self.server.submit(ReadDone(number, error)))
            case FetchWanted(number, fetch):
                self._fetchers[fetch.partition].call(
                    fetch.run, lambda error: self.server.submit(Fetched(number, error))
                )
            case CheckWanted():
                self._check(wanted)
            case CheckpointWanted():
                self._checkpointer.hurry()
            case InfoWanted():
                self._info.answer(wanted)
            case StatsWanted():
                self._stats.answer(wanted)

    def _open_host(self) -> str:
        """Return an address that other machines reach, if the broker listens on one; else any."""
        hosts = [str(sock.getsockname()[0]) for sock in self._sockets]
        return next((host for host in hosts if not is_loopback(host)), hosts[0])

    def _facts(self, disks: tuple[DiskSpace, ...]) -> BrokerFacts:
        checkpointer = self._checkpointer
        return BrokerFacts(
            self.settings, self._open_host(), self.server.has_tokens, disks, self.counters,
            tuple(sorted(self._broken)), checkpointer.age_us(), checkpointer.error,
            tuple(self.broker.retention_holders()), self.broker.untaken.found,
            {"max_producers": self.broker.producer_count, "max_subjects": self.store.live_subjects},
            self._certificates.problem(self._clock().wall_us / 1e6) if self._certificates is not None else None,
            max(self.store.partition(partition).room.refused_bytes for partition in self.store.all_partitions()),
            clock_behind_us=self.store.last_stored_at_us - self._clock().wall_us, wall_us=self._clock().wall_us,
            subject_numbers=self.store.subjects.count,
            unaccounted=tuple(one.text for one in self.broker.unaccounted()),
            forgotten_texts=self.broker.unique_texts.forgotten,
        )  # fmt: skip

    def _check(self, wanted: CheckWanted) -> None:
        number, partition, position, *what = wanted
        reader = self.store.partition(partition).reader(position)
        found = list[tuple[memoryview, PartitionDamage | None]]()

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

        began_us = self._clock().monotonic_us

        def done(error: QmqError | None) -> None:
            self._catching_up.discard(partition)
            if error is None:
                self.server.times.fsync.add(self._clock().monotonic_us - began_us)
                self.server.submit(Synced(partition, position))
            elif isinstance(error, StorageFailed):  # the sync could not start
                self._log_delayed(partition, error)
                asyncio.get_running_loop().call_later(_SYNC_AGAIN_S, self._sync, wanted)
            else:
                self._break(partition, error)

        self._fsyncs.sync(partition, done)

    def _log_delayed(self, partition: int, error: StorageFailed) -> None:
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
        """React to a checkpoint, taken or failed. It syncs all partitions, so it may be first to find one broken."""
        for partition in self.store.all_partitions():
            error = self.store.partition(partition).broken()
            if error is not None and partition not in self._broken:
                self._break(partition, error)
        self._pace()
        if not self._stopping:
            self.server.turn()  # retention waits for checkpoints, and no request may cause a turn

    def _turned(self, looked: bool) -> None:
        if self._is_paced or self._checkpointer.running or self.store.unsynced_bytes >= self.settings.checkpoint_bytes:
            self._pace()
        if looked:  # work that no request waits for
            self._log_damage()
            self._log_full()
            for unreceipted in self.broker.take_unreceipted():
                log.warning("%s", unreceipted)
        if self._stopping and not self.broker.waiting_for_sync():
            self._settled.set()

    def _log_damage(self) -> None:
        for error in self.broker.take_damaged():
            if not self._log_rate.may_log(self._clock().monotonic_us):
                self._unlogged += 1
                continue
            unlogged, self._unlogged = self._unlogged, 0
            others = f"; {unlogged} more were not logged one by one; `qmq verify` names all" if unlogged else ""
            log.error("damaged messages are not served: %s (%s%s)", error, self.counters.damage_totals(), others)

    def _log_full(self) -> None:
        """Log which partitions begin or end to refuse sends for want of room."""
        for partition in self.store.all_partitions():
            full = self.store.partition(partition).room.full
            if full is not None and partition not in self._full:
                self._full.add(partition)
                log.error("partition %d refuses sends: %s", partition, full)
            elif full is None and partition in self._full:
                self._full.discard(partition)
                log.info("partition %d takes sends again", partition)

    def _pace(self) -> None:
        """Hurry checkpoints when the disk is behind; stop reading from senders when it is far behind.

        Senders wait only for a checkpoint under way: if none can be taken, the disk refuses their batches instead.
        """
        store = self.store
        if store.unsynced_bytes >= self.settings.checkpoint_bytes:
            self._checkpointer.hurry()
        sound: list[int] = []
        full: list[int] = []
        if self._checkpointer.running:
            sound = [partition for partition in range(len(store.partitions)) if partition not in self._broken]
            full = self._far_behind(sound)
        all_full = (bool(full) and full == sound) or self._is_delay_log_behind()
        if not all_full:
            self.broker.avoid(frozenset(full))
        self.server.hold_sends(all_full)
        self._is_paced = bool(full) or all_full

    def _is_delay_log_behind(self) -> bool:
        log = self.store.delay_log
        return self._checkpointer.running and log is not None and log.unsynced_bytes >= self.settings.max_unsynced_bytes

    def _far_behind(self, partitions: list[int]) -> list[int]:
        """Return the partitions that have used up their share of max_unsynced_bytes.

        Batches go to the other partitions meanwhile. Partitions behind get syncs of their own, since the checkpoint may
        wait for another disk that has stalled.
        """
        store, full = self.store, []
        share = self.settings.max_unsynced_bytes // max(1, len(partitions))
        for partition in partitions:
            part = store.partitions[partition]
            unsynced = part.message_log.end - part.message_log.synced
            if unsynced >= share:
                full.append(partition)
            if unsynced >= share // 2 and len(partitions) > 1 and partition not in self._catching_up:
                self._catching_up.add(partition)
                self._sync(SyncWanted(partition, part.message_log.end))
        return full


class _Pong(asyncio.Protocol):
    """A connection at the socket of the data directory: it gets one line, and the end."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass of it
        writing.write(self._said)
        writing.close()


def run(
    settings: Settings,
    ready: Callable[[RunningBroker], None],
    read_again: Callable[[], Settings] | None = None,
    hung_up: Callable[[], bool] = lambda: False,
) -> None:
    """Run a broker until SIGTERM or SIGINT; call *ready* once it serves. Raises QmqError.

    At SIGHUP the broker applies those settings from *read_again* that it can. *hung_up* returns whether a SIGHUP came
    before it served. The service manager that NOTIFY_SOCKET names hears of all this.
    """
    import uvloop

    manager = ServiceManager(os.environ)
    manager.status(f"opening {settings.data_dir}")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    allowed = settings.model_copy(update={"max_connections": _allow_files(settings.max_connections)})
    running = RunningBroker(allowed)  # before the loop runs, so that a signal can end a long recovery
    uvloop.run(_serve(running, ready, _Reload(running, settings, read_again), hung_up, manager))


def _allow_files(connections: int) -> int:
    """Raise this process's limit of open files as far as allowed: most systems start at 1,024.

    Returns how many of *connections* the limit leaves room for, besides the files of the store.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= connections + _OTHER_FILES:
        return connections
    allowed = max(hard - _OTHER_FILES, hard // 2)
    log.warning(
        "this process may have %d files open, too few for max_connections = %d: it accepts %d; raise ulimit -n",
        hard,
        connections,
        allowed,
    )
    return allowed


class _Reload:
    """Handles SIGHUP: reads the settings again, has the broker apply those that it can, and logs them."""

    def __init__(self, running: RunningBroker, settings: Settings, read_again: Callable[[], Settings] | None) -> None:
        self._running = running
        self._settings = settings
        self._read_again = read_again

    async def __call__(self) -> None:
        if self._read_again is None:
            log.warning("SIGHUP: there is nothing to reload, as this broker was started without --config")
            return
        try:
            read = self._read_again()
        except (QmqError, OSError) as error:
            log.error("SIGHUP: the settings stay as they are: %s", error)
            return
        taken, need_restart = changes_between(self._settings, read)
        levels = {logging.getLevelName(level.upper()) for level in (self._settings.log_level, read.log_level)}
        self._settings = self._settings.model_copy(update=taken)
        if taken:
            await self._running.reload(taken)
        if "log_level" in taken:
            logging.getLogger().setLevel(min(levels))  # so that the next lines are logged
        went_on = f"went on with {settings_text(taken)}" if taken else "nothing has changed that a running broker takes"
        log.info("SIGHUP: %s", went_on, extra={"settings": taken})
        if need_restart:
            log.warning("SIGHUP: %s changed, which needs a restart", ", ".join(need_restart))
        if "log_level" in taken:
            logging.getLogger().setLevel(read.log_level.upper())


async def _serve(
    running: RunningBroker,
    ready: Callable[[RunningBroker], None],
    reload: _Reload,
    hung_up: Callable[[], bool],
    manager: ServiceManager,
) -> None:
    stop, woken, reloading = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def wake(event: asyncio.Event) -> None:
        event.set()
        woken.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, wake, stop)
    loop.add_signal_handler(signal.SIGHUP, wake, reloading)
    if hung_up():
        wake(reloading)
    await running.start()
    CollectorBound().begin()
    running.log_start()
    ready(running)
    serving = f"serving on {running.shown_urls}"
    manager.ready(serving)
    _keep_watchdog(loop, manager)
    while not stop.is_set():
        await woken.wait()
        woken.clear()
        if reloading.is_set():
            reloading.clear()
            manager.reloading()
            await reload()
            manager.ready(serving)
    for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends the process at once
        if os.getpid() == 1:  # the system does not, in a container
            loop.add_signal_handler(number, os._exit, 128 + number)
        else:
            loop.remove_signal_handler(number)
    manager.stopping()
    log.info("stopping")
    await running.stop()
    log.info("stopped")


def _keep_watchdog(loop: asyncio.AbstractEventLoop, manager: ServiceManager) -> None:
    """Tell the service manager again and again that the loop turns, if it has asked for that."""
    if manager.watchdog_s is not None:
        manager.watchdog()
        loop.call_later(manager.watchdog_s, _keep_watchdog, loop, manager)


# ---------------------------------------------------------------------------------------------------------------------
# Options of the parts, from the settings


def _store_options(settings: Settings) -> StoreOptions:
    return StoreOptions(
        segment_bytes=settings.segment_bytes,
        partitions=settings.partitions,
        partition_dirs=settings.partition_dirs,
        reserve_bytes=settings.reserve_bytes,
        max_frame_bytes=settings.max_frame_bytes,
        max_subjects=settings.max_subjects,
        keep_free_bytes=settings.keep_free_bytes,
        pull_log_keep_us=settings.pull_log_keep_ms * 1_000,
        pull_log_keep_bytes=settings.pull_log_keep_bytes,
    )


def _broker_limits(settings: Settings) -> BrokerLimits:
    return BrokerLimits(
        max_message_bytes=settings.max_message_bytes,
        max_groups=settings.max_groups,
        max_producers=settings.max_producers,
        producer_window=settings.producer_window,
        producer_ttl_ms=settings.producer_ttl_ms,
        unique_for_ms=settings.unique_for_ms,
        max_unique_texts=settings.max_unique_texts,
        max_unique_bytes=settings.max_unique_bytes,
        max_waiting_pulls=settings.max_waiting_pulls,
        max_pull_count=settings.max_pull_count,
        max_pull_bytes=settings.max_pull_bytes,
        max_consumers_per_connection=settings.max_consumers_per_connection,
        session_timeout_ms=settings.session_timeout_ms,
        reconnect_timeout_ms=settings.reconnect_timeout_ms,
        broadcast_ttl_ms=settings.broadcast_ttl_ms,
        retention_ms=settings.retention_ms,
        retention_max_ms=settings.retention_max_ms,
        retention_bytes=settings.retention_bytes,
        retention_needs_archive=settings.retention_needs_archive == "yes",
    )


def _server_options(settings: Settings, store: Store) -> ServerOptions:
    return ServerOptions(
        store_id=store.store_id,
        version=VERSION,
        max_frame_bytes=settings.max_frame_bytes,
        max_batch_bytes=store.max_batch_bytes,
        max_message_bytes=settings.max_message_bytes,
        producer_window=settings.producer_window,
        producer_ttl_ms=settings.producer_ttl_ms,
        unique_for_ms=settings.unique_for_ms,
        max_pull_count=settings.max_pull_count,
        max_pull_bytes=settings.max_pull_bytes,
        session_timeout_ms=settings.session_timeout_ms,
        max_waiting_pulls=settings.max_waiting_pulls,
        max_connections=settings.max_connections,
        max_inflight_bytes=settings.max_inflight_bytes,
        max_buffered_bytes=max(settings.max_buffered_bytes, 2 * store.max_batch_bytes),
        first_frame_timeout_ms=settings.first_frame_timeout_ms,
        max_handshakes=settings.max_handshakes,
    )
