"""The processes of a soak: brokers, senders and consumers, started, killed and watched."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path
from typing import Any, Final, Self

from tests.broker_process import BrokerProcess, executed
from tests.soak.ledger import Ledger
from tests.soak.plan import MEAN_BYTES
from tests.soak.senders import SENDERS, rates

#: Consumers that stay, by name: the kind of each.
STEADY: Final = {
    "billing-stream": "stream",
    "billing-pulls": "pulls",
    "shipping-1": "failing",
    "shipping-2": "failing",
    "mail-sync": "sync",
    "copy-batches": "batches",
    "news": "broadcast",
}
#: Consumers that come and go.
SLOW: Final = ("audit-1", "audit-2")
_SESSION_TIMEOUT_MS: Final = 5_000
_MIB: Final = 1 << 20
_START_S: Final = 60.0
#: For so long messages are kept at least, but in the shortest runs.
_LEAST_KEPT_S: Final = 50.0
#: Longer than a last flush takes.
_LEAVE_S: Final = 90.0


def kept_seconds(seconds: float, brokers: int) -> float:
    """For how long a broker that gets all messages keeps each: an eighth of the run, in a short one up to a quarter.

    Of two brokers one gets nearly all, until it is killed; so each keeps half as much, or the second one would fill up
    for half of the run.
    """
    return max(seconds / 8, min(_LEAST_KEPT_S, seconds / 4)) / brokers


def broker_settings(rate: float, seconds: float, brokers: int) -> dict[str, Any]:
    """Small segments, and a retention that drops them during the run."""
    kept = max(int(rate * MEAN_BYTES * kept_seconds(seconds, brokers)), 6 * _MIB)
    return {
        "partitions": 2,
        "checkpoint_ms": 1_000,
        "checkpoint_bytes": "64 MiB",
        "segment_bytes": min(max(kept // 12, _MIB), 64 * _MIB),
        "reserve_bytes": "64 MiB",
        "retention_bytes": kept,
        "scrub_bytes_per_s": "4 MiB",
        "scrub_round_ms": 10_000,
        "max_frame_bytes": "256 KiB",
        "max_message_bytes": "64 KiB",
        "session_timeout_ms": _SESSION_TIMEOUT_MS,
        "log_level": "warning",
    }


class Child:
    """A process of the soak, over all its starts."""

    def __init__(self, name: str, arguments: list[str], logs: Path) -> None:
        self.name = name
        self.pid = 0
        self._arguments = arguments
        self._log = logs / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        """Start it; returns once it is ready."""
        pipe = asyncio.subprocess.PIPE
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._arguments, stdin=pipe, stdout=pipe, stderr=log
            )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = await self._process.stdout.readline()
        assert line == b"ready\n", f"{self.name} did not start: {self.last_words()}"
        return self

    async def leave(self) -> None:
        """Have it come to its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        self.pid = 0
        self._process.stdin.close()
        await self._ended(0)

    async def end(self, number: signal.Signals) -> None:
        """Kill it, or cancel it by SIGTERM."""
        assert self._process is not None
        self.pid = 0
        self._process.send_signal(number)
        await self._ended(-number if number == signal.SIGKILL else 0)

    async def _ended(self, expected: int) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(_LEAVE_S):
                code = await self._process.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} did not end within {_LEAVE_S:g} s: {self.last_words()}") from None
        assert code == expected, f"{self.name} ended with {code}: {self.last_words()}"

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self.pid != 0 and self._process is not None and self._process.returncode is not None

    def destroy(self) -> None:
        """Kill it if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2_000:]


class Stage:
    """All processes of one run, in one directory."""

    def __init__(
        self, path: Path, ledger: Ledger, settings: dict[str, Any], brokers: int, chance: random.Random
    ) -> None:
        self.path = path
        self.ledger = ledger
        self.chance = chance
        self.logs = path / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.brokers = [BrokerProcess(path / f"broker-{n + 1}", executed, **settings) for n in range(brokers)]
        self.away: set[int] = set()
        self.starts = 0
        self.children: dict[str, Child] = {}

    async def start(self) -> None:
        """Start everything; nothing is sent yet."""
        rates(self.ledger)[:] = 0
        await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in self.brokers))
        await asyncio.gather(*(self.consumer(name, kind).start() for name, kind in STEADY.items()))
        await asyncio.gather(*(self.consumer(name, "slow").start() for name in SLOW))
        for number, kind in enumerate(SENDERS):
            await self._child(kind, ["tests.soak.senders", kind], self._url(number), str(number)).start()

    def url(self) -> str:
        """Of all brokers."""
        return self._url(0)

    def _url(self, first: int) -> str:
        brokers = [broker.url for broker in self.brokers]
        first %= len(brokers)
        return ",".join(brokers[first:] + brokers[:first])

    def consumer(self, name: str, kind: str) -> Child:
        """A consumer that is not started yet; it has chances of its own each time."""
        arguments = ["tests.soak.consumers", kind]
        return self._child(name, arguments, self._url(len(self.children)), name, str(self.chance.randrange(1 << 30)))

    def _child(self, name: str, arguments: list[str], *more: str) -> Child:
        child = Child(name, ["-m", *arguments, str(self.ledger.directory), *more], self.logs)
        self.children[name] = child
        return child

    def set_rate(self, rate: float) -> None:
        """Have so many messages a second be sent; a tenth of them, at most 200, by the sync sender."""
        by_sync = min(rate / 10, 200.0)
        rates(self.ledger)[:] = (rate - by_sync, by_sync)

    async def restart_broker(self, number: int, away_s: float) -> None:
        """kill -9 of a broker; it is back after so many seconds."""
        broker = self.brokers[number]
        self.away.add(number)
        code = await asyncio.to_thread(broker.kill)
        assert code == -signal.SIGKILL, f"broker {number + 1} ended by itself with {code}: {broker.log()[-2_000:]}"
        await asyncio.sleep(away_s)
        await asyncio.to_thread(broker.start)
        self.away.discard(number)
        self.starts += 1

    def pids(self) -> dict[str, int]:
        """The processes that run now, by name."""
        pids = {f"broker-{n + 1}": broker.pid for n, broker in enumerate(self.brokers) if n not in self.away}
        return pids | {name: child.pid for name, child in self.children.items() if child.pid}

    def ended_by_itself(self) -> list[str]:
        """Children that ended though nobody had asked them to."""
        return [f"{name}: {child.last_words()}" for name, child in self.children.items() if child.has_ended]

    def last_words(self, broker: str) -> str:
        """The end of a broker's log."""
        return self.brokers[int(broker.rpartition("-")[2]) - 1].log()[-2_000:]

    async def stop_senders(self) -> None:
        """Have the senders wait for all answers, and end."""
        await asyncio.gather(*(self.children[kind].leave() for kind in SENDERS))

    async def stop_consumers(self) -> None:
        """Have all consumers leave."""
        await asyncio.gather(*(self.children[name].leave() for name in (*STEADY, *SLOW) if self.children[name].pid))

    async def stop_brokers(self) -> None:
        """Stop the brokers cleanly."""
        for broker in self.brokers:
            code = await asyncio.to_thread(broker.stop)
            assert code == 0, f"a broker ended with {code}: {broker.log()[-2_000:]}"

    def close(self) -> None:
        """Kill whatever runs, and leave the brokers' logs."""
        for child in self.children.values():
            child.destroy()
        for number, broker in enumerate(self.brokers):
            (self.logs / f"broker-{number + 1}.log").write_text(broker.log())
            broker.close()
