"""kill -9 of broker and consumers at random under load, consumers stopped for longer than the session timeout, and a
count of what became of every message: by what the consumers, processes of their own, said of what they did and were
told.

A message is duplicated when a second acknowledgement of it was confirmed too: the broker had handed it out again. That
a consumer comes late to a message that it was given before it was stopped is no such thing: its disposition is refused.

``make consumer-kills ROUNDS=100``; everything random comes from the seed, as far as processes repeat themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import qmq
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import BrokerProcess
from tests.certificates import where_asked
from tests.faults.ledger import Tally
from tests.faults.worker import REASON
from tests.forks import Forks

GROUPS: Final = ("billing", "shipping")
SUBJECTS: Final = ("order.created", "order.paid", "order.sent", "stock")
#: Consumers of each group; the last one has no id of its own.
NAMES: Final = ("one", "two", "-")
SESSION_TIMEOUT_S: Final = 2.0
SETTINGS: Final[dict[str, Any]] = {
    "session_timeout_ms": int(SESSION_TIMEOUT_S * 1000),
    "checkpoint_ms": 50,
    "segment_bytes": "256 KiB",
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
    "checkpoint_bytes": "128 KiB",
}
FAULTS: Final = ("broker killed", "consumer killed", "consumer stopped")
_TIMEOUT_S: Final = 120.0


@dataclass
class Books:
    """What the consumers of one group said, over all their processes."""

    got: Counter[int] = field(default_factory=Counter)
    handled: set[int] = field(default_factory=set)
    rejecting: set[int] = field(default_factory=set)
    confirmed: Counter[int] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)

    def hear(self, what: str, *fields: Any) -> None:
        """Take down one line."""
        self.said[what] += 1
        if what == "got":
            self.got[fields[0]] += 1
        elif what in ("handled", "rejecting"):
            getattr(self, what).add(fields[0])
        elif what == "confirmed":
            self.confirmed.update(fields[0])

    def tally(self, sent: set[int], dead: dict[int, str]) -> Tally:
        """Hold it against what was sent, and what is dead, with its reason."""
        tally = Tally()
        for number in sorted(sent):
            if number not in self.handled and number not in dead:
                tally.lost.append(f"message {number}, got {self.got[number]} times")
            elif self.confirmed[number] > 1:
                tally.duplicated.append(f"message {number}: {self.confirmed[number]} acknowledgements were confirmed")
            else:
                tally.ok += 1
        tally.unexpected += [f"message {number} was never sent" for number in self.got.keys() - sent]
        tally.unexpected += [
            f"message {number} is dead: {reason}"
            for number, reason in dead.items()
            if reason != REASON or number not in self.rejecting
        ]
        return tally


class Worker:
    """One consumer of a group, over all the processes that are it."""

    def __init__(self, url: str, group: str, name: str, books: Books, chance: random.Random) -> None:
        self.group = group
        self.books = books
        self.failed: list[str] = []
        self._command = ["-m", "tests.faults.worker", url, group, name]
        self._chance = chance
        self._child: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it; returns once it follows."""
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, str(self._chance.randrange(1 << 30)), stdin=pipe, stdout=pipe, limit=1 << 22
        )
        assert self._child.stdout is not None
        async with asyncio.timeout(_TIMEOUT_S):
            assert await self._child.stdout.readline() == b'["following"]\n'
        self._listening = asyncio.create_task(self._listen(self._child.stdout))

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        while (line := await lines.readline()).endswith(b"\n"):  # killed, it may leave half a line
            self.books.hear(*json.loads(line))

    async def kill(self) -> None:
        """kill -9, and hear all that it had said."""
        await self._end(signal.SIGKILL)

    async def stop_for(self, seconds: float) -> None:
        """SIGSTOP for so long, unless it is killed meanwhile."""
        assert self._child is not None
        child = self._child
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            child.send_signal(signal.SIGCONT)

    async def leave(self) -> None:
        """Have it leave."""
        await self._end(None)

    async def _end(self, number: signal.Signals | None) -> None:
        child, listening = self._child, self._listening
        assert child is not None
        assert child.stdin is not None
        assert listening is not None
        if number is not None:
            with suppress(ProcessLookupError):
                child.send_signal(number)
        else:
            child.stdin.close()
        await listening
        code = await child.wait()
        if code != (0 if number is None else -number):
            self.failed.append(f"a consumer of {self.group} ended by itself with {code}")


@dataclass
class Outcome:
    """What one run did and found."""

    seed: int
    struck: Counter[str]
    said: Counter[str]
    sent: int
    tally: Tally

    def __str__(self) -> str:
        struck = ", ".join(f"{self.struck[fault]} times {fault}" for fault in FAULTS)
        said = ", ".join(f"{count} {what}" for what, count in sorted(self.said.items()))
        return f"seed {self.seed}: {struck}; {self.sent} sent; consumers said: {said}; {self.tally}"


class Run:
    """One broker, its consumers and a load."""

    def __init__(self, broker: BrokerProcess, chance: random.Random) -> None:
        self._broker = broker
        self._chance = chance
        self._books = {group: Books() for group in GROUPS}
        self._workers = [
            Worker(broker.url, group, name, self._books[group], chance) for group in GROUPS for name in NAMES
        ]
        self._numbers = 0
        self._sent: set[int] = set()
        self._struck: Counter[str] = Counter()

    async def rounds(self, count: int) -> Outcome:
        """So many faults; then wait until nothing is left, and count."""
        await asyncio.gather(*(worker.start() for worker in self._workers))
        async with qmq.connect(self._broker.url, send_timeout=_TIMEOUT_S) as client:
            producing = asyncio.create_task(self._produce(client))
            for number in range(count):
                await self._strike(FAULTS[number % len(FAULTS)])
            producing.cancel()
            with suppress(asyncio.CancelledError):
                await producing
            await self._drained(client)
            await asyncio.gather(*(worker.leave() for worker in self._workers))
            tally = await self._count(client)
        said: Counter[str] = sum((books.said for books in self._books.values()), Counter())
        return Outcome(0, self._struck, said, len(self._sent), tally)

    async def _produce(self, client: qmq.Client) -> None:
        while True:
            numbers = range(self._numbers, self._numbers + self._chance.choice((1, 5, 40)))
            self._numbers = numbers.stop
            subject, size = self._chance.choice(SUBJECTS), self._chance.choice((12, 100, 1_000))
            # Under a shield: what is cancelled half way may be stored, and would be nobody's.
            await asyncio.shield(self._send(client, subject, numbers, size))
            await asyncio.sleep(self._chance.choice((0, 0.01, 0.03)))

    async def _send(self, client: qmq.Client, subject: str, numbers: range, size: int) -> None:
        await client.send_many(subject, [b"%012d" % number + bytes(size - 12) for number in numbers])
        self._sent.update(numbers)

    async def _strike(self, fault: str) -> None:
        before = self._progress()
        async with asyncio.timeout(_TIMEOUT_S):
            while self._progress() < before + self._chance.choice((20, 200)):  # noqa: ASYNC110  # what children say
                await asyncio.sleep(0.005)
        worker = self._chance.choice(self._workers)
        if fault == "broker killed":
            await asyncio.to_thread(self._broker.kill)
            await asyncio.to_thread(self._broker.start)
        elif fault == "consumer killed":
            await worker.kill()
            await worker.start()
        else:
            await worker.stop_for(SESSION_TIMEOUT_S * 1.3)
        self._struck[fault] += 1

    def _progress(self) -> int:
        return sum(books.said["got"] for books in self._books.values())

    async def _drained(self, client: qmq.Client) -> None:
        """Wait until nothing is ready, held or to be handed out again; as long as something moves."""
        seen, until = -1, 0.0
        while True:
            infos = [info for info in await client.admin.groups() if info.name in GROUPS]
            if not any(info.ready + info.in_flight + info.in_retry for info in infos):
                return
            if self._progress() != seen:
                seen, until = self._progress(), time.monotonic() + _TIMEOUT_S
            assert time.monotonic() < until, f"nothing moves any more: {infos}"
            await asyncio.sleep(0.1)

    async def _count(self, client: qmq.Client) -> Tally:
        total = Tally(unexpected=[what for worker in self._workers for what in worker.failed])
        numbers = {}
        async with client.subscribe("order.", "stock", start="first") as everything:
            while messages := await everything.pull(max_count=10_000, timeout=1.0):
                numbers.update({message.id: int(message.body[:12]) for message in messages})
        for group, books in self._books.items():
            letters = [letter async for letter in client.admin.dead_letters(group)]
            dead = {numbers[letter.id]: letter.reason for letter in letters if letter.id is not None}
            tally = books.tally(self._sent, dead)
            total.ok += tally.ok
            for name in ("lost", "duplicated", "unexpected"):
                getattr(total, name).extend(f"{group}: {what}" for what in getattr(tally, name))
        return total


async def run(path: Path, seed: int, rounds: int, forks: Forks) -> Outcome:
    """One run in the directory *path*; the broker's log is left beside it. What was found is for the caller."""
    broker = BrokerProcess(path, forks, **SETTINGS)
    try:
        await asyncio.to_thread(broker.start)
        outcome = await Run(broker, random.Random(seed)).rounds(rounds)
        assert broker.stop() == 0, broker.log()
    finally:
        path.with_suffix(".log").write_text(broker.log())
        broker.close()
    outcome.seed = seed
    report = verify(path, Disk())
    outcome.tally.unexpected += [str(finding) for finding in report.findings if report.faults]
    return outcome


def main() -> int:
    """``python -m tests.faults.consumer_kills --rounds N [--seed S]``; ends with 1 when it finds a fault."""
    parser = argparse.ArgumentParser(description="Kill broker and consumers under load; count what became of messages.")
    parser.add_argument("--rounds", type=int, default=100, help="faults in all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    wanted = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="qmq-consumer-kills-"))
    with where_asked(directory / "tls"), Forks() as forks:
        outcome = asyncio.run(run(directory / "data", wanted.seed, wanted.rounds, forks))
    print(outcome)
    if outcome.tally.is_good:
        shutil.rmtree(directory)
        return 0
    print(f"its files are in {directory}; again: make consumer-kills ROUNDS={wanted.rounds} SEED={wanted.seed}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
