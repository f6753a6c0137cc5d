"""kill -9 of a broker under load, again and again, and a count of what became of every message after a drain.

A **session** is one data directory, a random load on it, and some rounds; in each the broker is killed at a random
moment of some kind, and started again. Everything random comes from the session's seed, so a seed replays as far as
processes and the system's scheduler repeat themselves. Many sessions: ``make kills ROUNDS=1000``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import qmq
from qmq import Client, Message
from qmq.net.client import broker_link as link
from qmq.net.client.options import Durability
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import BrokerProcess
from tests.certificates import where_asked
from tests.faults.ledger import Ledger, Tally, drain
from tests.forks import Forks

SUBJECTS: Final = ("order.created", "order.paid", "order.sent", "stock.counted", "log")
FOLLOWING: Final = (("",), ("order.", "stock.", "log"))
#: The moments of kills: under load; while a checkpoint is written; while a segment is rolled; while the broker starts
#: (and recovers from the kill before); while it stops.
MOMENTS: Final = ("load", "checkpoint", "roll", "start", "stop")
#: Small, so that kills strike while segments are rolled, reserves renewed, checkpoints written.
SETTINGS: Final[dict[str, Any]] = {
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
    "checkpoint_bytes": "128 KiB",
}
ROUNDS_PER_SESSION: Final = 25
TIMEOUT_S: Final = 60
#: A follower that gets nothing for so long has got all that it will get: far more than a starved machine takes to
#: connect a client and to answer its pull.
SILENCE_S: Final = 240
#: A silence that is told, though messages may follow it.
_LONG_S: Final = 30
#: The longest that a broker is given to stop before it is killed; half of it after each that had stopped by then.
_STOP_S: Final = 0.08
#: How long a checkpoint or a roll is waited for before the broker is killed all the same.
_WATCH_S: Final = 20.0


@dataclass
class Session:
    """What one session did, and what it found."""

    seed: int
    partitions: int
    rounds: int
    #: Kills by the moment that they really struck.
    struck: Counter[str] = field(default_factory=Counter)
    #: For each kill that came between send and answer: how many messages were, and when it was.
    in_flight: list[int] = field(default_factory=list)
    killed_us: list[int] = field(default_factory=list)
    sent: int = 0
    #: Messages that were stored before a kill and acknowledged after it.
    repeated: int = 0
    segments: int = 0
    tally: Tally = field(default_factory=Tally)


class Load:
    """Producers and consumers that know nothing of kills: their clients have to bear them."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self.url = url
        self.random = chance
        self.following = chance.choice(FOLLOWING)
        self.ledger = Ledger()
        self.ended = asyncio.Event()
        self.arrival = asyncio.Event()
        self.followed: list[Message] = []
        self.shared: list[Message] = []
        kinds = (self.in_turn, self.in_flight, self.many, self.unawaited, self.once)
        #: At least one that sends many at once, and a few more.
        self.producers = [self.in_flight, *chance.choices(kinds, k=chance.randrange(1, 6))]
        self._sizes = chance.choice(((12, 100), (12, 100, 100, 3_000, 30_000), (100, 3_000), (20, 30_000)))
        self._durabilities: tuple[Durability, ...] = chance.choice((("flush",), ("append",), ("flush", "append")))

    async def caught_up(self) -> None:
        """Wait until the one that follows has as many messages as were sent."""
        while len(self.followed) < len(self.ledger.entries):
            self.arrival.clear()
            began = time.monotonic()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self.arrival.wait()
            except TimeoutError:
                return  # what is missing will be named
            finally:
                silence = time.monotonic() - began
                if silence > _LONG_S:
                    missing = len(self.ledger.entries) - len(self.followed)
                    print(f"one who follows {self.following} got nothing for {silence:.0f} s; {missing} are missing")

    async def in_turn(self, client: Client) -> None:
        """One send after another."""
        while not self.ended.is_set():
            await self._send(client)

    async def in_flight(self, client: Client) -> None:
        """Many sends at once."""
        while not self.ended.is_set():
            await asyncio.gather(*(self._send(client) for _ in range(self.random.randrange(1, 40))))

    async def many(self, client: Client) -> None:
        """send_many, of one message up to several batches."""
        while not self.ended.is_set():
            subject, size = self.random.choice(SUBJECTS), self.random.choice((20, 100, 1_000))
            entries = [self.ledger.open(subject, size) for _ in range(self.random.choice((1, 7, 50, 120)))]
            bodies = [entry.body for entry in entries]
            self.ledger.acknowledged(entries, await client.send_many(subject, bodies, durability=self._durability()))

    async def unawaited(self, client: Client) -> None:
        """send_nowait with drain, and a flush now and then."""
        while not self.ended.is_set():
            entries = []
            for _ in range(self.random.randrange(1, 200)):
                entry = self.ledger.open(self.random.choice(SUBJECTS), self.random.choice((12, 200)), self._key())
                client.send_nowait(entry.subject, entry.body, key=entry.key, durability=self._durability())
                entries.append(entry)
                await client.drain()
            await client.flush()
            self.ledger.acknowledged(entries, [None] * len(entries))

    async def once(self, client: Client) -> None:
        """The same message by several sends of two clients, as of programs that start again: it is stored once."""
        async with qmq.connect(self.url, wait=60, send_timeout=TIMEOUT_S) as other:
            while not self.ended.is_set():
                entries = [
                    self.ledger.open(self.random.choice(SUBJECTS), self.random.choice(self._sizes))
                    for _ in range(self.random.randrange(1, 20))
                ]
                sends = [
                    one.send(entry.subject, entry.body, unique=f"once {entry.number}", durability=self._durability())
                    for one in (client, other, client)
                    for entry in entries
                ]
                receipts = await asyncio.gather(*sends)
                for number, entry in enumerate(entries):
                    mine = receipts[number :: len(entries)]
                    assert len({receipt.id for receipt in mine}) == 1, mine
                    assert [receipt.duplicate for receipt in mine].count(False) == 1, mine
                    self.ledger.acknowledged([entry], [mine[0]])

    async def follow(self, client: Client) -> None:
        """A consumer alone: it remembers over every restart of the broker where it was."""
        async with client.subscribe(*self.following, start="first") as consumer:
            while True:
                self.followed += await consumer.pull(max_count=1_000)
                self.arrival.set()

    async def share(self, client: Client) -> None:
        """One of two consumers of a group."""
        async with client.subscribe("order.", "log", group="shared") as consumer:
            while True:
                self.shared += await consumer.pull(max_count=200, timeout=self.random.choice((0.05, None)))

    async def _send(self, client: Client) -> None:
        entry = self.ledger.open(self.random.choice(SUBJECTS), self.random.choice(self._sizes), self._key())
        receipt = await client.send(entry.subject, entry.body, key=entry.key, durability=self._durability())
        self.ledger.acknowledged([entry], [receipt])

    def _durability(self) -> Durability:
        return self.random.choice(self._durabilities)

    def _key(self) -> str | None:
        return self.random.choice((None, "k", f"order-{self.random.randrange(1_000)}"))


class Killer:
    """Kills one broker, at moments of every kind, and starts it again."""

    def __init__(self, broker: BrokerProcess, chance: random.Random, session: Session) -> None:
        self._broker = broker
        self._random = chance
        self._session = session
        self._start_s = 0.5
        self._stop_s = _STOP_S

    def start(self) -> None:
        """Start the broker."""
        began = time.monotonic()
        self._broker.start()
        self._start_s = time.monotonic() - began

    def kill(self, moment: str, in_flight: Callable[[], int]) -> None:
        """Kill it when that moment comes; *in_flight* says how many messages are on their way."""
        struck = moment
        if moment in ("checkpoint", "roll"):
            struck = moment if self._watch(moment) else "load"
        elif moment == "stop":
            self._broker.send_signal(signal.SIGTERM)
            time.sleep(self._random.uniform(0, self._stop_s))
        self._session.in_flight.append(in_flight())
        self._session.killed_us.append(time.time_ns() // 1_000)
        code = self._broker.kill()
        if moment == "stop" and code == 0:
            struck = "stopped before"
            self._stop_s /= 2
        elif moment == "stop":
            self._stop_s = min(self._stop_s * 2, _STOP_S)
        assert code in (0, -signal.SIGKILL), f"the broker ended by itself with {code}: {self._broker.log()}"
        self._session.struck[struck] += 1

    def kill_starts(self) -> None:
        """Start it a few times, each time killed before it serves."""
        for _ in range(self._random.randrange(1, 4)):
            self._broker.spawn()
            time.sleep(self._random.uniform(0, self._start_s))
            code = self._broker.kill()
            assert code == -signal.SIGKILL, f"the broker did not start and ended with {code}: {self._broker.log()}"

    def _watch(self, moment: str) -> bool:
        """Wait for a checkpoint to be begun, or a segment; whether it came."""
        deadline = time.monotonic() + _WATCH_S
        known = self.segments()
        while time.monotonic() < deadline:
            if moment == "checkpoint" and any(self._broker.path.glob("checkpoint-*.tmp")):
                return True
            if moment == "roll" and self.segments() > known:
                return True
            time.sleep(0.0002)
        return False

    def segments(self) -> int:
        """Segments that there are now."""
        return sum(1 for _ in self._broker.path.glob("log-*/*.messages"))


async def run_session(path: Path, seed: int, rounds: int, forks: Forks) -> Session:
    """One session in the directory *path*; the log of the broker is left beside it. What was found is for the caller;
    what it raises is a fault as well.
    """
    chance = random.Random(seed)
    session = Session(seed, chance.choice((1, 1, 2, 3)), rounds)
    settings = {
        **SETTINGS,
        "partitions": session.partitions,
        "segment_bytes": chance.choice(("128 KiB", "192 KiB", "512 KiB")),
        "checkpoint_ms": chance.choice((20, 50, 300)),
    }
    broker = BrokerProcess(path, forks, **settings)
    # A client is back at once even where its last connection was a short one: more kills in less time.
    with ExitStack() as undo, mock.patch.object(link, "GOOD_AFTER", 0.0):
        undo.callback(broker.close)
        killer = Killer(broker, chance, session)
        undo.callback(lambda: path.with_suffix(".log").write_text(broker.log()))
        await asyncio.to_thread(killer.start)
        load = Load(broker.url, chance)
        await _under_load(load, killer, session)
        await _count(broker.url, load, session)
        assert broker.stop() == 0, broker.log()
    report = verify(path, Disk())
    session.tally.unexpected += [str(finding) for finding in report.findings if report.faults]
    session.segments = killer.segments()
    return session


async def _under_load(load: Load, killer: Killer, session: Session) -> None:
    """Run producers and a group while the broker is killed; then let the producers come to an end."""
    async with asyncio.TaskGroup() as consumers:
        consuming = [consumers.create_task(_with_client(load, work)) for work in (load.share, load.share, load.follow)]
        async with asyncio.TaskGroup() as sending:
            for producer in load.producers:
                sending.create_task(_with_client(load, producer))
            for number in range(session.rounds):
                moment = MOMENTS[number % len(MOMENTS)]
                await load.ledger.acknowledgements(load.random.choice((1, 20, 100, 400)))
                await asyncio.sleep(load.random.uniform(0, 0.02))
                await asyncio.to_thread(killer.kill, moment, lambda: load.ledger.count("open"))
                if moment == "start":
                    await asyncio.to_thread(killer.kill_starts)
                await asyncio.to_thread(killer.start)
            await load.ledger.acknowledgements(1)
            load.ended.set()
        await load.caught_up()
        for task in consuming:
            task.cancel()


async def _with_client(load: Load, work: Callable[[Client], Awaitable[None]]) -> None:
    async with qmq.connect(load.url, send_timeout=TIMEOUT_S) as client:
        await work(client)


async def _count(url: str, load: Load, session: Session) -> None:
    """Everything is acknowledged: hold it against what a new group gets, and what the others got meanwhile."""
    ledger = load.ledger
    assert all(entry.state == "acknowledged" for entry in ledger.entries)
    # A kill between the writes to two partitions may lose a sequence, with the message that nobody was told of.
    contiguous = session.partitions == 1
    messages = await drain(url, "afterwards")
    session.tally = ledger.tally(messages, contiguous=contiguous)
    followed = ledger.tally(load.followed, contiguous=contiguous)
    follower = f"one who follows {load.following} on {session.partitions} partitions"
    for name in ("lost", "duplicated", "unexpected"):
        getattr(session.tally, name).extend(f"{follower}: {what}" for what in getattr(followed, name))
    by_id = {message.id: message.body for message in messages}
    for message in load.shared:
        ledger.entry_of(message)
        if by_id.get(message.id) != message.body:
            session.tally.unexpected.append(f"{message} was delivered, and is not what is there now")
    session.sent = len(ledger.entries)
    for entry in ledger.entries:
        if entry.receipt is not None:
            stored_us = entry.receipt.stored_at_us
            session.repeated += any(stored_us < killed < entry.acknowledged_us for killed in session.killed_us)


def table(sessions: list[Session]) -> str:
    """What all sessions did and found, one line a session and one for all."""
    struck: Counter[str] = sum((session.struck for session in sessions), Counter())
    moments = [*MOMENTS, "stopped before"]
    rows = [["seed", "partitions", "rounds", *moments, "in flight", "repeated", "segments", "sent"]]
    rows[0] += ["ok", "lost", "duplicated", "unexpected"]
    total = Session(0, 0, sum(session.rounds for session in sessions), struck)
    for session in sessions:
        rows.append([str(session.seed), str(session.partitions), *_cells(session, moments)])
        for name in ("in_flight", "repeated", "segments", "sent"):
            setattr(total, name, getattr(total, name) + getattr(session, name))
        total.tally.ok += session.tally.ok
        for name in ("lost", "duplicated", "unexpected"):
            getattr(total.tally, name).extend(getattr(session.tally, name))
    rows.append(["all", "", *_cells(total, moments)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _cells(session: Session, moments: list[str]) -> list[str]:
    tally = session.tally
    numbers = [session.rounds, *(session.struck[moment] for moment in moments), sum(map(bool, session.in_flight))]
    numbers += [session.repeated, session.segments, session.sent, tally.ok]
    return [str(number) for number in (*numbers, len(tally.lost), len(tally.duplicated), len(tally.unexpected))]


def main() -> int:
    """``python -m tests.faults.kills --rounds N [--seed S]``: many sessions; ends with 1 when one finds a fault."""
    parser = argparse.ArgumentParser(description="Kill a broker under load, and count what became of every message.")
    parser.add_argument("--rounds", type=int, default=1_000, help="kills in all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of the first session")
    wanted = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="qmq-kills-"))
    sessions: list[Session] = []
    began = time.monotonic()
    done = failed = 0
    with where_asked(directory / "tls"), Forks() as forks:
        while done < wanted.rounds:
            seed, rounds = wanted.seed + len(sessions), min(ROUNDS_PER_SESSION, wanted.rounds - done)
            path = directory / str(seed)
            session = _one_of_many(path, seed, rounds, forks)
            sessions.append(session)
            done += rounds
            print(f"{done} of {wanted.rounds} kills, {time.monotonic() - began:.0f} s: {session.tally}", flush=True)
            if session.tally.is_good:
                shutil.rmtree(path)
                path.with_suffix(".log").unlink()
            else:
                failed += 1
                print(f"its files are in {path}; again: make kills ROUNDS={rounds} SEED={seed}", flush=True)
    print(table(sessions))
    if not failed:
        shutil.rmtree(directory)
    return int(failed > 0)


def _one_of_many(path: Path, seed: int, rounds: int, forks: Forks) -> Session:
    """One session; what it raises is counted as unexpected, so that the others go on."""
    try:
        return asyncio.run(run_session(path, seed, rounds, forks))
    except Exception as error:
        traceback.print_exc()
        session = Session(seed, 0, rounds)
        session.tally.unexpected.append(repr(error))
        return session


if __name__ == "__main__":
    sys.exit(main())
