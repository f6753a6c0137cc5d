"""Orders from a database to committed work, while all is killed: ``python -m tests.sql.chaos --kills 200 --db all``

Writers commit orders with a message each, or roll back; relays send them; consumers do their work with an inbox. Each
of them, the broker and the database server is killed by kill -9 at random, and relays are frozen for longer than their
lease. At the end each committed order must have been worked on once, those of one key in order. Prints how often each
was killed, and ends with 1 if one never was, or anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

import qmq
from qmq.sql import create_tables
from tests.broker_process import BrokerProcess, broker_process
from tests.sql import chaos_worker
from tests.sql.servers import Database, MariaDB, PostgreSQL, Server, leaking_sockets, sqlite_database

KINDS: Final = ("sqlite", "mariadb", "postgresql")
_SETTLE_S: Final = 60.0
_processes: Final = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.sql.chaos_worker"])


class ChaosFailed(Exception):
    """An order was lost, done twice, or out of order; or something was never killed."""


class Worker:
    """A process that is started again after each kill."""

    def __init__(self, kind: str, target: Callable[..., None], arguments: Callable[[], tuple[Any, ...]]) -> None:
        self.kind = kind
        self._target = target
        self._arguments = arguments
        self._process: Any = None

    def start(self) -> None:
        self._process = _processes.Process(target=self._target, args=self._arguments(), daemon=True)
        self._process.start()

    def freeze(self, frozen: bool) -> None:
        os.kill(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            if not self._process.is_alive():
                raise ChaosFailed(f"a {self.kind} ended by itself, with exit code {self._process.exitcode}")
            self._process.kill()
            self._process.join()
            self._process = None


class Chaos:
    """One run on one database."""

    def __init__(
        self, database: Database, server: Server | None, broker: BrokerProcess, seed: int, *, freezes: bool
    ) -> None:
        self._random = random.Random(seed)
        self._database, self._server, self._broker = database, server, broker
        self._engine = sa.create_engine(database.url, poolclass=sa.NullPool)
        self.killed: Counter[str] = Counter()
        self.kinds = ["writer", "relay", "consumer", "broker"] + (["database"] if server else [])
        if freezes:
            self.kinds.append("frozen relay")
        url, async_url = database.url, database.async_url
        self._writers = [
            Worker("writer", chaos_worker.write, self._writer_arguments(number)) for number in range(2)
        ]  # fmt: skip
        self._relays = [Worker("relay", chaos_worker.relay, lambda: (url, broker.url)) for _ in range(2)]
        self._consumers = [Worker("consumer", chaos_worker.consume, lambda: (async_url, broker.url)) for _ in range(2)]

    def _writer_arguments(self, number: int) -> Callable[[], tuple[Any, ...]]:
        def arguments() -> tuple[Any, ...]:
            last = self._query(f"SELECT max(sequence) FROM chaos_orders WHERE writer = {number}")[0][0] or 0
            # A transaction of the writer that was killed may still commit.
            return number, last + 1_000, self._database.url, self._database.async_url, self._broker.url

        return arguments

    def _query(self, statement: str) -> list[Any]:
        with leaking_sockets(), self._engine.connect() as connection:
            return list(connection.execute(sa.text(statement)).fetchall())

    def run(self, kills: int) -> int:
        """Kill so often, then check; return how many orders were done. Raises ChaosFailed."""
        create_tables(self._engine)
        identity = {"sqlite": "INTEGER PRIMARY KEY", "mysql": "BIGINT AUTO_INCREMENT PRIMARY KEY"}
        with self._engine.begin() as tx:
            if tx.dialect.name == "sqlite":
                tx.exec_driver_sql("PRAGMA journal_mode = WAL")
            for table in ("chaos_orders", "chaos_done"):
                kind = identity.get(tx.dialect.name, "BIGSERIAL PRIMARY KEY")
                tx.exec_driver_sql(f"CREATE TABLE {table} (id {kind}, writer INTEGER, sequence INTEGER)")
        workers = [*self._writers, *self._relays, *self._consumers]
        for worker in workers:
            worker.start()
        try:
            self._until(lambda: self._query("SELECT count(*) FROM chaos_done")[0][0] > 0, "the first order")
            for name in self._targets(kills):
                self._strike(name)
                time.sleep(self._random.uniform(0.01, 0.15))
            for writer in self._writers:
                writer.kill()
            return self._check()
        finally:
            for worker in workers:
                if worker._process is not None:
                    worker._process.kill()
                    worker._process.join()

    def _targets(self, kills: int) -> list[str]:
        """Each thing as often as every other, in random order, so that a short run kills all."""
        kinds = self.kinds
        targets: list[str] = []
        while len(targets) < kills:
            targets += self._random.sample(kinds, len(kinds))
        return targets[:kills]

    def _strike(self, name: str) -> None:
        self.killed[name] += 1
        if name == "broker":
            if self._broker.kill() != -signal.SIGKILL:
                raise ChaosFailed(f"the broker ended by itself: {self._broker.log()[-2000:]}")
            time.sleep(self._random.uniform(0, 0.1))
            self._broker.start()
        elif name == "database":
            assert self._server is not None
            self._server.kill()
            time.sleep(self._random.uniform(0, 0.1))
            self._server.start()
        elif name == "frozen relay":
            relay = self._random.choice(self._relays)
            relay.freeze(True)
            time.sleep(chaos_worker.LEASE_S + self._random.uniform(0.1, 0.3))
            relay.freeze(False)
        else:
            workers = {"writer": self._writers, "relay": self._relays, "consumer": self._consumers}[name]
            worker = self._random.choice(workers)
            worker.kill()
            worker.start()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + _SETTLE_S
        while not condition():
            if time.monotonic() > ends:
                raise ChaosFailed(f"{what} did not come; outbox: " + str(self._query(
                    "SELECT state, count(*), min(reason) FROM qmq_outbox GROUP BY state")))  # fmt: skip
            time.sleep(0.02)

    def _check(self) -> int:
        orders = self._query("SELECT writer, sequence FROM chaos_orders ORDER BY id")
        self._until(lambda: self._query("SELECT count(*) FROM chaos_done")[0][0] >= len(orders), "all work")
        self._until(lambda: not self._query("SELECT 1 FROM qmq_outbox WHERE state <> 1 LIMIT 1"), "all rows sent")
        asyncio.run(self._until_idle())
        done = self._query("SELECT writer, sequence FROM chaos_done ORDER BY id")
        lost, more = Counter(map(tuple, orders)), Counter(map(tuple, done))
        if lost != more:
            raise ChaosFailed(f"lost: {list(lost - more)[:10]}, too often: {list(more - lost)[:10]}")
        for writer in {row[0] for row in done}:
            sequences = [row[1] for row in done if row[0] == writer]
            if sequences != sorted(sequences):
                raise ChaosFailed(f"the orders of writer {writer} were done out of order")
        stored = asyncio.run(self._stored())
        if stored != len(done):
            raise ChaosFailed(f"{len(done)} orders were committed, and the broker has {stored} messages of them")
        return len(done)

    async def _until_idle(self) -> None:
        async with qmq.connect(self._broker.url, wait=60) as client, asyncio.timeout(_SETTLE_S):
            while any(group.ready + group.in_flight + group.in_retry for group in await client.admin.groups("chaos")):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _stored(self) -> int:
        async with qmq.connect(self._broker.url, wait=60) as client:
            return sum([subject.messages async for subject in client.subjects("chaos.")])


def run(kind: str, kills: int, seed: int, directory: Path, *, freezes: bool = True) -> tuple[int, Counter[str]]:
    """Run on a database of that kind; return how many orders were done, and what was killed. Raises ChaosFailed."""
    with ExitStack() as stack:
        broker = stack.enter_context(broker_process(directory / "broker", reconnect_timeout_ms=500))
        server: Server | None = None
        if kind == "sqlite":
            database = sqlite_database(directory)
        else:
            server = stack.enter_context(MariaDB() if kind == "mariadb" else PostgreSQL())
            database = server.database()
        chaos = Chaos(database, server, broker, seed, freezes=freezes)
        done = chaos.run(kills)
    if never := [name for name in chaos.kinds if not chaos.killed[name]]:
        raise ChaosFailed(f"never killed: {', '.join(never)}")
    return done, chaos.killed


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--db", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    for kind in KINDS if chosen.db == "all" else (chosen.db,):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                done, killed = run(kind, chosen.kills, chosen.seed, Path(directory))
            except ChaosFailed as error:
                print(f"{kind}: {error}", flush=True)
                return 1
        counts = ", ".join(f"{name} {count}" for name, count in sorted(killed.items()))
        print(f"{kind}: {done:,} orders done once, in order; killed {sum(killed.values())} times ({counts}), in "
              f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
