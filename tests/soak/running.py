"""One soak: a stage of processes under a steady load, faults, samples of everything, and the account at the end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import qmq
from tests.soak.flatness import Series
from tests.soak.ledger import Account, Ledger, id_number
from tests.soak.plan import GROUPS, NAMED
from tests.soak.samples import Meter, disk, machine_load, percentile_ms, process
from tests.soak.senders import SENDERS
from tests.soak.stage import SLOW, STEADY, Stage, broker_settings, kept_seconds

log = logging.getLogger("soak")

#: Each of these must have struck.
FAULTS: Final = (
    "broker killed",
    "consumer left",
    "consumer cancelled",
    "consumer killed",
    "nacked",
    "raised",
    "asked for a retry",
    "rejected",
    "released",
    "redriven",
    "deleted",
    "expired",
    "segments dropped",
)
_MEASURE_S: Final = 12.0
_WARM_UP_S: Final = 4.0
#: Messages that the groups may be behind while it is measured how many can be carried.
_BEHIND: Final = 3_000
_MOST_RATE: Final = 50_000.0
_KEEP_DEAD_S: Final = 5.0
_ASK_S: Final = 30.0
_DRAIN_S: Final = 180.0
_GONE_S: Final = 20.0
#: Meters whose latencies count: of sends, and from end to end of the group that is well.
_LATENCIES: Final = {"send": ("asyncio",), "end to end": ("billing-stream", "billing-pulls")}


class Wanted(NamedTuple):
    """What was asked for. ``rate`` 0: half of what can be carried, measured first."""

    seconds: float
    brokers: int
    seed: int
    rate: float


class Soak:
    """A run in the directory *path*."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.path = path
        self.wanted = wanted
        self.rate = wanted.rate
        self.struck: Counter[str] = Counter()
        self.faults: list[str] = []
        self.kills: list[tuple[float, int]] = []
        #: Points one behind the other, (time, value, life) each: an hour has many.
        self.series: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))
        self._chance = random.Random(wanted.seed)
        self._every = min(5.0, wanted.seconds / 60)
        self._began = time.monotonic()
        self._over = asyncio.Event()
        self._deleted: defaultdict[str, array[int]] = defaultdict(lambda: array("Q"))
        self._before: dict[str, Any] = {}
        self._segments: dict[str, frozenset[str]] = {}

    async def run(self) -> Account:
        """The whole soak; what is wrong besides messages stands in ``faults``. One that broke off has no account."""
        try:
            return await self._run()
        except Exception:  # of any kind: what was seen until then is reported all the same
            self.faults.append(f"the soak broke off: {traceback.format_exc()}")
            return Account()

    async def _run(self) -> Account:
        if not self.rate:
            self.rate = await self._measure() / 2
        print(f"{self.rate:,.0f} messages a second for {self.wanted.seconds / 60:g} minutes", flush=True)
        stage = self._stage(self.path, self.rate)
        try:
            await stage.start()
            self._began = time.monotonic()
            async with qmq.connect(stage.url()) as client:
                await self._under_load(stage, client)
                await self._drain(stage, client)
                await stage.stop_consumers()
                await self._all_gone(client)
                await self._bury_what_is_left(stage.ledger, client)
            await stage.stop_brokers()
        finally:
            stage.close()
        self._count_consumers(stage.ledger)
        for number in range(self.wanted.brokers):
            self._verify(self.path / f"broker-{number + 1}")
        account = stage.ledger.check()
        self.struck["expired"] = sum(counts["never handed out, expired"] for counts in account.rows.values())
        self.faults += [f"did not strike: {fault}" for fault in FAULTS if not self.struck[fault]]
        return account

    def _stage(self, path: Path, rate: float) -> Stage:
        seconds = self.wanted.seconds + _MEASURE_S
        ledger = Ledger.create(path / "ledger", self.wanted.seed, len(SENDERS), int(rate * seconds * 1.2))
        settings = broker_settings(rate, self.wanted.seconds, self.wanted.brokers)
        return Stage(path, ledger, settings, self.wanted.brokers, self._chance)

    async def _measure(self) -> float:
        """How many messages a second all groups together keep up with: send as long as they are not behind."""
        stage = self._stage(self.path / "measuring", _MOST_RATE)
        meters = {name: Meter(stage.ledger.directory, name) for name in (*SENDERS, *STEADY)}

        def total(what: str, *names: str) -> float:
            return sum(meters[name].counts()[what] for name in names)

        def carried_by_now() -> float:
            """Messages that the slower has handled of the group that takes everything and the one that fails."""
            ordered = total("handled", "shipping-1", "shipping-2") / NAMED["shipping"].share
            return min(total("handled", "copy-batches"), ordered)

        try:
            await stage.start()
            start, since, at_start = time.monotonic(), 0.0, 0.0
            while (passed := time.monotonic() - start) < _MEASURE_S:
                if passed < _WARM_UP_S:
                    at_start, since = carried_by_now(), passed
                behind = total("sends begun", *SENDERS) - carried_by_now()
                stage.set_rate(_MOST_RATE if behind < _BEHIND else 0.0)
                await asyncio.sleep(0.02)
            carried = (carried_by_now() - at_start) / (passed - since)
        finally:
            stage.close()
            shutil.rmtree(stage.path)
        print(f"measured for {_MEASURE_S:g} s: {carried:,.0f} messages a second can be carried", flush=True)
        return carried

    # --- under load --------------------------------------------------------------------------------------------------

    async def _under_load(self, stage: Stage, client: qmq.Client) -> None:
        with (self.path / "samples.jsonl").open("a", buffering=1) as sink:
            stage.set_rate(self.rate)
            works = [self._kill_brokers(stage), self._keep_dead_letters(client), self._sample(stage, client, sink)]
            works += [self._come_and_go(stage, name) for name in SLOW]
            async with asyncio.TaskGroup() as tasks:
                for work in works:
                    tasks.create_task(work)
                await asyncio.sleep(self.wanted.seconds)
                self._over.set()
        stage.set_rate(0)

    async def _pause(self, seconds: float) -> bool:
        """Wait so long, or until the time of the soak is up; whether it goes on."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return True
        return False

    async def _kill_brokers(self, stage: Stage) -> None:
        """Every five minutes, or each sixth of a shorter run; of two brokers each once in the first quarter."""
        every = min(300.0, self.wanted.seconds / 6 / len(stage.brokers))
        turn = 0
        while await self._pause(every) and self._passed() + every / 2 < self.wanted.seconds:
            number = turn % len(stage.brokers)
            away = self._chance.choice((0.0, 1.0, 3.0))
            if len(stage.brokers) > 1 and turn % 4 == 3:
                away = 8.0  # longer than clients wait before they send elsewhere
            print(f"after {self._passed() / 60:.1f} minutes: kill -9 of broker {number + 1}", flush=True)
            self.kills.append((self._passed(), number))
            await stage.restart_broker(number, away)
            self.struck["broker killed"] += 1
            turn += 1

    async def _come_and_go(self, stage: Stage, name: str) -> None:
        """A slow consumer's process: it ends in one way or another, and another one comes."""
        ways = ["left", "cancelled", "killed"]
        for turn in range(1 << 30):
            way = ways[turn % len(ways)] if turn < len(ways) else self._chance.choice(ways)
            if not await self._pause(self._chance.uniform(0.5, 1.5) * min(20.0, self.wanted.seconds / 10)):
                return
            child = stage.children[name]
            if way == "left":
                await child.leave()
            else:
                await child.end(signal.SIGTERM if way == "cancelled" else signal.SIGKILL)
            self.struck[f"consumer {way}"] += 1
            await asyncio.sleep(self._chance.uniform(0.0, 2.0))
            await stage.consumer(name, "slow").start()

    async def _keep_dead_letters(self, client: qmq.Client) -> None:
        """Hand half of the dead letters out again, and delete the other half."""
        while await self._pause(_KEEP_DEAD_S):
            for group in (row for one in GROUPS for row in one.rows):
                try:
                    async with asyncio.timeout(_ASK_S):
                        letters = [letter.id async for letter in client.admin.dead_letters(group) if letter.id]
                        self._chance.shuffle(letters)
                        again, gone = letters[::2], letters[1::2]
                        # A delete that the broker's end cut short may have been done.
                        self._deleted[group].extend(map(id_number, gone))
                        if again:
                            self.struck["redriven"] += await client.admin.redrive(group, again)
                        if gone:
                            self.struck["deleted"] += await client.admin.delete_dead(group, gone)
                except (TimeoutError, qmq.QmqError) as error:
                    self.struck["dead letters not reached"] += 1
                    log.warning("dead letters of %s: %r", group, error)

    # --- samples -----------------------------------------------------------------------------------------------------

    async def _sample(self, stage: Stage, client: qmq.Client, sink: Any) -> None:
        meters = {name: Meter(stage.ledger.directory, name) for name in (*SENDERS, *STEADY, *SLOW)}
        turn, kills = 1, 0
        while await self._pause(max(turn * self._every - self._passed(), 0.01)):
            turn += 1
            if ended := stage.ended_by_itself():
                raise AssertionError(f"ended by itself: {'; '.join(ended)}")
            row = await asyncio.to_thread(self._look, stage, meters)
            row["groups"] = await self._groups(client)
            self._hold_back(stage, row["groups"])
            row["kills"], kills = [round(at, 2) for at, _ in self.kills[kills:]], len(self.kills)
            sink.write(json.dumps(row) + "\n")

    def _look(self, stage: Stage, meters: dict[str, Meter]) -> dict[str, Any]:
        at = round(self._passed(), 2)
        row: dict[str, Any] = {"at": at, "processes": {}, "disk": {}, "latency": {}, "load": machine_load()}
        row["state files"] = len(list((self.path / "state").rglob("*")))
        self._point("files", "files that clients keep", at, row["state files"])
        for name, pid in {"soak": os.getpid(), **stage.pids()}.items():
            if (seen := process(pid)) is None:
                if name.startswith("broker") and stage.pids().get(name) == pid:
                    raise AssertionError(f"{name} ended by itself: {stage.last_words(name)}")
            else:
                row["processes"][name] = seen._asdict()
                if name not in SLOW:
                    self._point("memory", f"memory {name}", at, seen.rss_anon, pid)
                    self._point("files", f"files {name}", at, seen.files, pid)
                    self._point("threads", f"threads {name}", at, seen.threads, pid)
        for number, broker in enumerate(stage.brokers):
            name, seen_disk = f"broker-{number + 1}", disk(broker.path)
            self.struck["segments dropped"] += len(self._segments.get(name, frozenset()) - seen_disk.segments)
            self._segments[name] = seen_disk.segments
            row["disk"][name] = {"files": seen_disk.files, "bytes": seen_disk.bytes}
            for kind, size in seen_disk.bytes.items():
                self._point("disk", f"disk {name} {kind}", at, size)
                self._point("disk files", f"disk files {name} {kind}", at, seen_disk.files[kind])
        for what, names in _LATENCIES.items():
            total = sum((meters[name].latencies() for name in names), np.zeros(1, np.int64))
            since = total - self._before.get(what, 0)
            self._before[what] = total
            row["latency"][what] = {f"p{percent}": percentile_ms(since, percent) for percent in (50, 99)}
            for label, value in row["latency"][what].items():
                if value is not None:
                    self._point("latency", f"{what} {label}", at, value)
        row["counts"] = {name: meter.counts() for name, meter in meters.items()}
        return row

    async def _groups(self, client: qmq.Client) -> dict[str, Any]:
        """What waits in each group, at all brokers together; None while that cannot be had."""
        try:
            async with asyncio.timeout(self._every):
                infos = await client.admin.groups()
        except (TimeoutError, qmq.QmqError):
            return {}
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for info in infos:
            for what in ("consumers", "ready", "in_flight", "in_retry", "delayed", "dead", "skipped"):
                found[info.name][what] += getattr(info, what)
        at = self._passed()
        for name, counts in found.items():
            waiting = counts["ready"] + counts["in_flight"] + counts["in_retry"]
            self._point("waiting", f"waiting {name}", at, waiting)
            self._point("waiting", f"dead {name}", at, counts["dead"])
            self._point("consumers", f"consumers {name}", at, counts["consumers"])
        return {name: dict(counts) for name, counts in found.items()}

    def _hold_back(self, stage: Stage, groups: dict[str, Any]) -> None:
        """Send less while a group is far behind, as where others have the machine: retention would overtake it."""
        if not groups:  # no broker could be asked
            return
        behind = max(counts["ready"] + counts["in_flight"] + counts["in_retry"] for counts in groups.values())
        far = self.rate * kept_seconds(self.wanted.seconds, self.wanted.brokers) / 4
        stage.set_rate(self.rate / 4 if behind > far else self.rate)
        self.struck["samples at a quarter of the rate"] += behind > far

    def _point(self, kind: str, name: str, at: float, value: float, life: int = 0) -> None:
        self.series[kind, name].extend((at, value, life))

    def all_series(self) -> list[Series]:
        """Everything that is to be flat."""
        return [
            Series(name, kind, [(at, value, int(life)) for at, value, life in np.array(points).reshape(-1, 3).tolist()])
            for (kind, name), points in sorted(self.series.items())
        ]

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _drain(self, stage: Stage, client: qmq.Client) -> None:
        """Stop sending; wait until nothing is ready, in flight or to come again, as long as anything moves."""
        await stage.stop_senders()
        for name in SLOW:
            if not stage.children[name].pid:
                await stage.consumer(name, "slow").start()
        seen, until = "", 0.0
        while True:
            infos = await client.admin.groups()
            counts = [(i.name, i.broker, i.ready, i.in_flight, i.in_retry, i.delayed) for i in infos]
            waiting = [count for count in counts if any(count[2:])]
            if not waiting:
                self._note_skipped(infos)
                return
            if repr(waiting) != seen:
                seen, until = repr(waiting), time.monotonic() + _DRAIN_S
            if time.monotonic() > until:
                self.faults.append(
                    f"nothing moves any more (group, broker, ready, in flight, in retry, delayed): {seen}"
                )
                return
            await asyncio.sleep(0.5)

    def _note_skipped(self, infos: Sequence[qmq.GroupInfo]) -> None:
        """Note what groups missed. Tags pass what they do not take; no other group may miss anything."""
        skipped: Counter[str] = Counter()
        for info in infos:
            if not info.settings.get("tags"):
                skipped[info.name] += info.skipped
        for name, count in (+skipped).items():
            self.faults.append(
                f"retention took {count:,} messages that {name} had not got: it was too slow for this rate"
            )

    async def _all_gone(self, client: qmq.Client) -> None:
        """Wait until no consumer is online; those that were killed are so for a session timeout."""
        until = time.monotonic() + _GONE_S
        while online := {info.name: info.consumers for info in await client.admin.groups() if info.consumers}:
            if time.monotonic() > until:
                self.faults.append(f"consumers are online that have left: {online}")
                return
            await asyncio.sleep(0.5)

    async def _bury_what_is_left(self, ledger: Ledger, client: qmq.Client) -> None:
        """Note what is dead at the end, and what was deleted."""
        for group in GROUPS:
            for row in group.rows:
                left = [id_number(letter.id) async for letter in client.admin.dead_letters(row) if letter.id]
                unknown = ledger.bury(ledger.row(row), [*left, *self._deleted[row]])
                if unknown:
                    self.struck["dead letters without a receipt"] += unknown

    def _count_consumers(self, ledger: Ledger) -> None:
        for name in (*SENDERS, *STEADY, *SLOW):
            self.struck.update(+Meter(ledger.directory, name).counts())

    def _verify(self, directory: Path) -> None:
        command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", "verify", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.faults.append(f"qmq verify {directory.name} ended with {done.returncode}: {done.stdout[-2_000:]}")

    def _passed(self) -> float:
        return time.monotonic() - self._began
