"""Consumers in processes of their own, which end by kill -9, or stop for longer than the session timeout. Each asks
before each step (see ``public_child``), so the record has what it may have done.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from random import Random
from typing import Any, Final

from tests.sim.public_child import CHILD_WAYS, SYNC_CHILD_WAYS, ChildPlan, live
from tests.sim.public_people import Crew
from tests.sim.public_record import GroupRecord, Hand, Record, Session

#: The session timeout where processes are stopped, and the seconds for which they are.
STOPPED_SESSION_MS: Final = 300
STOPPED_S: Final = 0.45
#: What is counted of such consumers: how they end, and what they are.
KILLED: Final = ("kill -9", "SIGSTOP", "run", "for", "pull", "pull_batch", "sync")


class Processes:
    """Starts processes quickly: they are forked from one that has imported all they need."""

    _context: ForkServerContext | None = None

    @classmethod
    def start(cls, connection: Connection, plan: ChildPlan) -> ForkServerProcess:
        """[thread] Start a consumer."""
        if cls._context is None:
            cls._context = multiprocessing.get_context("forkserver")
            cls._context.set_forkserver_preload(["tests.sim.public_child"])
        process = cls._context.Process(target=live, args=(connection, plan), daemon=True)
        process.start()
        return process


class KilledWorker:
    """Starts one consumer after another, each in a process of its own, and kills each."""

    def __init__(
        self, crew: Crew, name: str, group_of: Callable[[str, int], GroupRecord], chance: Random, *,
        prefixes: tuple[str, ...], options: dict[str, Any], waits: tuple[tuple[str, str, float], ...], stops: bool,
    ) -> None:  # fmt: skip
        """*options* are those of ``subscribe``; *stops*: some are stopped for a while before."""
        self.name = name
        self._crew = crew
        self._record: Record = crew.record
        self._group_of = group_of
        self._chance = chance
        self._prefixes = prefixes
        self._options = options
        self._waits = waits
        self._stops = stops
        self._ended = asyncio.Event()
        self._lives = 0
        #: The first process has subscribed.
        self.entered = asyncio.Event()

    def stop(self) -> None:
        """[loop] End it: as always by a kill."""
        self._ended.set()

    async def run(self, url: str) -> None:
        """Let processes live and die until the crew is stopped."""
        self._crew.enter(self)
        try:
            while not self._crew.is_over.is_set():
                await self._live(url)
        finally:
            self._crew.leave(self)

    async def _live(self, url: str) -> None:
        chance, count, self._lives = self._chance, self._record.count, self._lives + 1
        way = chance.choice((*CHILD_WAYS, *SYNC_CHILD_WAYS))
        plan = ChildPlan(
            url, way, self._prefixes, self._options, f"{self.name} {self._lives} {chance.random()}",
            os.environ["QMQ_STATE_DIR"], self._waits,
        )  # fmt: skip
        mine, its = multiprocessing.Pipe()
        life = _Life(self._record, self._group_of, mine, chance.choice((0, 1, 1, 3, 8, 20)))
        process = await asyncio.to_thread(Processes.start, its, plan)
        its.close()
        self._record.note(f"{self.name} lives as process {process.pid} by {way}")
        loop = asyncio.get_running_loop()
        life.on_enough = partial(loop.call_soon_threadsafe, life.enough.set)
        life.on_entered = partial(loop.call_soon_threadsafe, self.entered.set)
        hearing = asyncio.ensure_future(asyncio.to_thread(life.hear))
        try:
            await self._wait(life.enough, chance.choice((0.05, 0.1)) if self.entered.is_set() else 5)
            if self._stops and chance.random() < 0.5 and life.session is not None:
                count["killed: SIGSTOP"] += 1
                os.kill(int(process.pid or 0), signal.SIGSTOP)
                self._record.note(f"{self.name} is stopped")
                await asyncio.sleep(STOPPED_S)
                os.kill(int(process.pid or 0), signal.SIGCONT)
                self._record.note(f"{self.name} goes on")
                await self._wait(asyncio.Event(), 0.05)
        finally:
            life.die()
            process.kill()
            await asyncio.to_thread(process.join)
            mine.close()
            await hearing
        if life.session is not None:
            count["killed: kill -9"] += 1
            count[f"killed: {way.removeprefix('sync ').partition(' ')[0]}"] += 1
            count["killed: sync"] += way.startswith("sync")

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait until the event comes, the crew is stopped, or so many seconds are over."""
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._ended.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class _Life:
    """One process from its start to its death."""

    def __init__(
        self, record: Record, group_of: Callable[[str, int], GroupRecord], connection: Connection, most: int
    ) -> None:  # fmt: skip
        """After *most* messages it has lived long enough."""
        self.session: Session | None = None
        self.enough = asyncio.Event()
        self.on_enough: Callable[[], object] = lambda: None
        self.on_entered: Callable[[], object] = lambda: None
        self._record = record
        self._group_of = group_of
        self._connection = connection
        self._left = most
        self._is_dead = False
        self._hands: list[Hand] = []

    def hear(self) -> None:
        """[thread] Note what it asks for, and answer, until it is dead."""
        while True:
            try:
                question = self._connection.recv()
                with self._record.lock:
                    if self._is_dead:
                        return
                    self._connection.send(self._note(*question))
            except (EOFError, OSError, TypeError):  # where it was closed meanwhile it may be any of them
                return

    def _note(self, question: str, *told: Any) -> Any:
        if question == "entered":
            self.session = Session(self._group_of(told[0], 0), told[0])
            self.session.has_threads = True  # nobody knows in which order it reached what it took
            self.on_entered()
        if question == "failed":
            self._record.wrong(f"a consumer in a process of its own has failed: {told[0]}")
            return None
        session = self.session
        assert session is not None
        match question:
            case "took":
                self._hands.append(session.took(told[0]))
                self._left -= 1
                if self._left <= 0:
                    self.on_enough()
                return len(self._hands) - 1
            case "decides":
                return bool(session.decides_all([self._hands[number] for number in told[0]], told[1]))
            case "confirmed":
                session.confirmed(*(self._hands[number] for number in told[0]))
        return None

    def die(self) -> None:
        """Note that it does nothing more from now on."""
        with self._record.lock:
            self._is_dead = True
            if self.session is not None:
                self.session.dies()
