"""A broker of a simulated world: its machine with a disk, and on it one process after another that serves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Checked, Fetched, Now, ReadDone, Synced
from qmq.broker.ports.effects import CheckWanted, FetchWanted, ReadWanted, ReadWork, SyncWanted
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import QmqError, StorageError
from qmq.net.server import Server, ServerOptions
from qmq.net.server.replies import DiskWork
from qmq.storage.store import Store, StoreOptions
from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, check_files
from tests.sim.wires import End
from tests.sim.world import START_US, Killed, Process, World

SESSION_TIMEOUT_MS: Final = 2_000
LIMITS: Final = BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS, producer_ttl_ms=1_000_000_000)
_CHECKPOINT_S: Final = 1.0
#: What a disk takes at most.
_WORK_S: Final = 0.004
#: How many of the starts are not left in peace, and within how many operations.
_DISTURBED: Final = 0.2
_START_OPERATIONS: Final = 40
_CHECKED: Final = 0.1


class Machine:
    """Of one broker, *number* of its world; clients know it by that, as a port."""

    def __init__(
        self, world: World, number: int, options: StoreOptions | None = None, limits: BrokerLimits = LIMITS,
        checkpoint_s: float = _CHECKPOINT_S,
    ) -> None:  # fmt: skip
        self.world = world
        self.number = number
        self.limits = limits
        self._checkpoint_s = checkpoint_s
        self.disk = SimulatedDisk(world.chance.getrandbits(32))
        if options is None:
            options = StoreOptions(
                partitions=1 + world.chance.randrange(2), segment_bytes=16 << 10, max_frame_bytes=2_400,
                reserve_bytes=60_000,
            )  # fmt: skip
        self.options = replace(options, store_id=bytes([127, 0, 0, 1, 0, number]))
        self.process: Process | None = None
        self.store: Store
        self.broker: Broker
        self.server: Server
        #: When the last checkpoint that is on disk was begun, and the last loss of power was.
        self.kept_at = 0.0
        self.power_lost_at = -1.0
        #: The first time at which it takes connections.
        self.reached_at = 0.0
        self.started_at = -1.0
        #: Of its first start on.
        self.store_id = b""
        #: Its directory was made: before, a stop may leave next to nothing.
        self.has_served = False
        self._set_us = 0
        self._work: deque[DiskWork] = deque()
        self.ends: list[End] = []

    def clock(self) -> Now:
        """The time there."""
        us = int(self.world.now * 1e6)
        return Now(us, START_US + us + self._set_us)

    def set_clock(self, jump_us: int, most_us: int = 3_500_000) -> None:
        """Somebody sets its wall clock."""
        self._set_us += jump_us if abs(self._set_us + jump_us) <= most_us else -jump_us

    @property
    def is_up(self) -> bool:
        """A process serves it."""
        return self.process is not None

    @property
    def is_reached(self) -> bool:
        """It takes connections."""
        return self.is_up and self.world.now >= self.reached_at

    # --- a process ---------------------------------------------------------------------------------------------------

    def start(self, *, in_peace: bool = False) -> bool:
        """Begin to serve; False where its process has ended before it did."""
        if not in_peace and self.world.chance.random() < _DISTURBED:
            self.crash_soon(_START_OPERATIONS)
        process = Process(self.world, f"broker {self.number}")
        try:
            self.store = Store.open(DIRECTORY, self.options, self.disk, self.clock().wall_us)
            self.broker = Broker(self.store, self.limits, self.clock())
        except Killed:
            process.kill()
            return False
        self.disk.before = None
        self.process, self.started_at, self.store_id = process, self.world.now, self.store.store_id
        self.has_served = True
        self._work.clear()
        self.server = Server(
            self.broker, self._server_options(), self._want, lambda looked: None, self.clock, process, process.time
        )
        process.call_later(self._checkpoint_s, self._checkpoint, process)
        process.call_soon(self.server.turn)
        return True

    def crash_soon(self, operations: int = 6) -> None:
        """End its process at one of its next operations."""
        left = self.world.chance.randrange(operations)

        def before(operation: Operation) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                self.disk.before = _dead
                self.disk.interrupt(operation)
                if self.process is not None:
                    self.process.kill()
                raise Killed

        self.disk.before = before

    def crash(self) -> None:
        """End its process now, between two operations."""
        assert self.process is not None
        self.process.kill()

    def stopped(self, *, power: bool) -> None:
        """Its process is gone, with the power or without."""
        self.process = None
        self.disk.before = None
        self.disk.stop(power=power)
        if power:
            self.power_lost_at = self.world.now
        if self.world.chance.random() < _CHECKED and self.has_served:
            check_files(self.disk)

    def close(self) -> None:
        """Stop, with everything on disk: there is no fault in it."""
        assert self.process is not None
        self.process.kill()
        checkpoint = self.store.begin_checkpoint(self.broker.checkpoint_state(self.clock()))
        checkpoint.write()
        self.store.finish_checkpoint(checkpoint)
        self.store.close(clean=True)
        self.disk.stop(power=False)
        check_files(self.disk)

    # --- what its threads do -----------------------------------------------------------------------------------------

    def _want(self, work: DiskWork) -> None:
        assert self.process is not None
        self._work.append(work)
        if len(self._work) == 1:
            self._work_soon()

    def _work_soon(self) -> None:
        assert self.process is not None
        self.process.call_later(self.world.chance.random() * _WORK_S, self._work_next)

    def _work_next(self) -> None:
        match self._work[0]:
            case SyncWanted(partition, position):
                self.store.partition(partition).sync()
                self.server.submit(Synced(partition, position))
            case ReadWanted(number, read):
                self.server.submit(ReadDone(number, _error_of(partial(_read_all, read))))
            case FetchWanted(number, fetch):
                self.server.submit(Fetched(number, _error_of(fetch.run)))
            case CheckWanted() as wanted:
                self.server.submit(self._checked(wanted))
        self._work.popleft()
        if self._work:
            self._work_soon()

    def _checked(self, wanted: CheckWanted) -> Checked:
        reader = self.store.partition(wanted.partition).reader(wanted.position)
        try:
            batch, damage = reader.read_batch(wanted.position, wanted.size, wanted.first, wanted.messages)
        finally:
            reader.close()
        return Checked(wanted.number, batch, damage, None)

    def _checkpoint(self, process: Process) -> None:
        def again() -> None:
            process.call_later(self._checkpoint_s, self._checkpoint, process)

        try:
            checkpoint, began_at = (
                self.store.begin_checkpoint(self.broker.checkpoint_state(self.clock())),
                self.world.now,
            )
        except StorageError:  # the disk is full
            again()
            return

        def write() -> None:
            try:
                checkpoint.write()
            except StorageError as error:
                self.store.fail_checkpoint(checkpoint, error)
            else:
                self.store.finish_checkpoint(checkpoint)
                self.kept_at = began_at
            again()

        process.call_later(self.world.chance.random() * _WORK_S, write)

    def _server_options(self) -> ServerOptions:
        limits = self.limits
        return ServerOptions(
            store_id=self.store.store_id,
            version="simulated",
            max_frame_bytes=self.options.max_frame_bytes,
            max_batch_bytes=self.store.max_batch_bytes,
            max_message_bytes=limits.max_message_bytes,
            producer_window=limits.producer_window,
            producer_ttl_ms=limits.producer_ttl_ms,
            unique_for_ms=limits.unique_for_ms,
            max_pull_count=limits.max_pull_count,
            max_pull_bytes=limits.max_pull_bytes,
            session_timeout_ms=limits.session_timeout_ms,
            max_waiting_pulls=limits.max_waiting_pulls,
            max_connections=1_000,
            max_inflight_bytes=16 << 20,
            max_buffered_bytes=64 << 20,
            first_frame_timeout_ms=10_000,
        )


def _dead(operation: Operation) -> None:
    raise Killed


def _read_all(read: ReadWork) -> None:
    while read.step():
        pass


def _error_of(work: Callable[[], object]) -> QmqError | None:
    """Do it; return why it failed: retention may have removed what is read."""
    try:
        work()
    except QmqError as error:
        return error
    return None
