"""What befalls the programs of one history: administrators, lost connections, and brokers that end and start again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import qmq
from qmq.daemon.main import RunningBroker
from tests.broker_process import BrokerProcess
from tests.net.several import Several
from tests.sim.public_people import Crew
from tests.sim.public_record import GroupRecord, Record

#: What may befall a group, and all programs.
GROUP_CALLS: Final = (
    "seek", "redrive", "redrive", "resend", "resend", "set_group", "set_group", "delete_dead", "set tags",
    "set deadline", "set follows", "delete_group",
)  # fmt: skip
CALLS: Final = (*GROUP_CALLS, "roll", "lose", "lose", "restart", "look")
#: The names that groups follow.
FOLLOWED: Final = (("",), ("a.",), ("a.x", "b."), ("b.z",))
CHANGED: Final[dict[str, tuple[Any, ...]]] = {
    "max_attempts": (1, 2, 5),
    "max_unacked": (1, 3, 50),
    "max_unacked_bytes": (1, 500, 1 << 20),
    "retry_delays": ([0], [0.001, 0.004]),
    "priority_share": (0.0, 0.3, 1.0),
}


class Processes:
    """Brokers in processes of their own, which can be killed; else as ``tests.net.several``."""

    def __init__(self, path: Path, count: int, **settings: Any) -> None:
        self._processes = [BrokerProcess(path / f"broker-{number}", **settings) for number in range(count)]
        self._settings = settings
        self.brokers: list[RunningBroker | None] = [None] * count

    @property
    def url(self) -> str:
        return "qmq://" + ",".join(process.url.removeprefix("qmq://") for process in self._processes)

    async def start(self, number: int) -> None:
        await asyncio.to_thread(self._processes[number].start)

    async def stop(self, number: int) -> None:
        await asyncio.to_thread(self._processes[number].stop)

    async def kill(self, number: int) -> None:
        """As kill -9."""
        await asyncio.to_thread(self._processes[number].kill)

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _InThread:
    """An admin without asyncio, each call of which runs in a thread."""

    def __init__(self, admin: qmq.SyncAdmin) -> None:
        self.admin = admin

    def __getattr__(self, name: str) -> Any:
        return partial(asyncio.to_thread, getattr(self.admin, name))


async def letters_of(admin: Any, group: str) -> list[qmq.DeadLetter]:
    """Return the dead letters of a group, by either library."""
    if isinstance(admin, _InThread):
        return await asyncio.to_thread(list, admin.admin.dead_letters(group))
    return [letter async for letter in admin.dead_letters(group)]


class Boss:
    """Does things that its chance has chosen, each once so many messages were taken, or after a moment."""

    def __init__(
        self, record: Record, crew: Crew, brokers: Any, chance: Random, names: list[str], most: int, rolls: int, *,
        keeps_connections: bool = False, clock: Callable[[], datetime] | None = None, restarts: int = 0,
        fills: int = 0,
    ) -> None:  # fmt: skip
        """*names* are the groups that may be changed; *most*: how many messages may be taken. Logs are rolled *rolls*
        times at least, brokers end *restarts* times, and disks are full *fills* times. *clock*: that of a simulated
        world, where no threads are.
        """
        self._clock = clock
        self._record = record
        self._crew = crew
        self._brokers = brokers
        self._chance = chance
        self._names = names
        self._removes = rolls > 0
        calls, count = CALLS if names else CALLS[len(GROUP_CALLS) :], chance.choice((0, 1, 3, 5))
        several = [*["roll"] * rolls, *["restart"] * restarts, *(chance.choice(calls) for _ in range(count))]
        several += ["fill"] * fills
        self._plan = sorted((chance.randrange(most + 1), call) for call in several)
        if keeps_connections:
            self._plan = [(at, call) for at, call in self._plan if call not in ("lose", "restart")]

    async def run(self, url: str, taken: Callable[[int, float], Awaitable[None]]) -> None:
        """Do it all. *taken* waits until so many messages were taken, or for so many seconds."""
        async with qmq.connect(url, wait=30) as client:
            for at, call in self._plan:
                await taken(at, 0.02)
                self._record.note(f"boss: {call}")
                self._record.count[f"boss: {call}"] += 1
                match call:
                    case "roll":
                        await client.admin.roll()
                    case "lose":
                        if cuts := list(self._crew.cuts.values()):
                            self._chance.choice(cuts)()
                    case "restart":
                        await self._restart()
                    case "fill":
                        await self._brokers.fill(self._chance.randrange(len(self._brokers.brokers)))
                    case "look":
                        await self._look(client)
                    case _:
                        name = self._chance.choice(self._names)
                        with suppress(qmq.UnknownGroup):
                            await self._change(client, self._record.groups[name], call)

    async def _look(self, client: qmq.Client) -> None:
        """Look at a message, and at what became of it."""
        stored = [sent for sent in self._record.sent.values() if sent.state == "stored" and sent.id and not sent.delay]
        if not stored:
            return
        sent = self._chance.choice(stored)
        with suppress(qmq.UnknownMessage, qmq.BrokersMissed):  # a broker is away, or retention has removed it
            message = await client.get(str(sent.id))
            self._record.check_content(sent, message)
            trace = await client.trace(str(sent.id))
            if trace.message is not None:
                self._record.check_content(sent, trace.message)
            self._record.count["looked at"] += 1

    async def _restart(self) -> None:
        number = self._chance.randrange(len(self._brokers.brokers))
        for group in self._record.groups.values():
            group.is_restarted, group.is_calm = True, False
        if not isinstance(self._brokers, Several) and self._chance.random() < 0.7:
            self._record.count["killed"] += 1
            await self._brokers.kill(number)
        else:
            await self._brokers.stop(number)
        await self._brokers.start(number)

    async def _change(self, client: qmq.Client, group: GroupRecord, call: str) -> None:
        chance = self._chance
        if chance.random() < 0.3 and self._clock is None:
            self._record.count["sync admin"] += 1
            sync = qmq.connect_sync(self._brokers.url, wait=30)  # it connects at its first call, in a thread
            try:
                await self._change_by(_InThread(sync.admin), group, call)
            finally:
                await asyncio.to_thread(sync.close)
        else:
            await self._change_by(client.admin, group, call)

    async def _change_by(self, admin: Any, group: GroupRecord, call: str) -> None:
        chance = self._chance
        match call:
            case "set_group":
                name = chance.choice(sorted(CHANGED))
                value = chance.choice(CHANGED[name])
                if name == "max_attempts":
                    group.max_attempts = min(group.max_attempts, value)
                await admin.set_group(group.name, **{name: value})
            case "seek":
                to = chance.choice(("first", "first", "new", "time", 3))
                # What was removed, and was in retry or in flight only, is gone.
                group.change(seeks=True, loses=to != "first" or self._removes)
                group.least_sequence = max(group.least_sequence, to if isinstance(to, int) else 0)
                now = datetime.now(UTC) if self._clock is None else self._clock()
                at = now if to == "time" else to
                await admin.seek(group.name, at, clear_retries=chance.random() < 0.5)
                group.changed(for_good=True)  # a message comes again beside its retry, or its dead letter
                self._record.count[f"seek to {'a sequence' if to == 3 else to}"] += 1
            case "set tags":
                tags = chance.choice(((), ("red",), ("green", "blue")))
                group.tag_sets.append(tags)
                group.is_calm = False
                await admin.set_group(group.name, tags=tags)
            case "set follows":
                prefixes = chance.choice(FOLLOWED)
                group.prefixes = tuple(dict.fromkeys((*group.prefixes, *prefixes)))
                group.change()
                group.is_narrowed = True
                await admin.set_group(group.name, follows=prefixes)
                group.changed(for_good=True)
            case "delete_group":
                # Whoever subscribes next makes it anew, and it gets all that is stored.
                group.change(seeks=True, loses=self._removes)
                group.is_narrowed = True
                await admin.delete_group(group.name)
                group.changed(for_good=True)
                if self._removes:  # also what is stored before somebody makes it anew
                    group.may_miss()
            case "set deadline":
                group.is_loose, group.is_calm = True, False
                await admin.set_group(group.name, ack_deadline=chance.choice((0, 0.001, 0.01)))
            case "resend":
                prefix = chance.choice(("", "a.", "a.x"))
                group.change()
                with suppress(qmq.InvalidOption):  # there is nothing of the prefix, or the group does not follow it
                    self._record.count["resent"] += await admin.resend(prefix=prefix, group=group.name)
                group.changed()
            case "redrive":
                group.change()
                self._record.count["redriven"] += await admin.redrive(group.name, all=True)
                group.changed()
            case "delete_dead":
                by_id = {sent.id: sent.number for sent in self._record.sent.values()}
                letters = await letters_of(admin, group.name)
                ids = [letter.id for letter in letters if letter.id in by_id and chance.random() < 0.7]
                if ids:
                    deleted = await admin.delete_dead(group.name, [one for one in ids if one])
                    self._record.count["deleted"] += deleted
                    left: set[str | None] = set()
                    if deleted < len(ids):  # retention has given some another number meanwhile
                        self._record.count["dead letters moved meanwhile"] += 1
                        left = {letter.id for letter in await letters_of(admin, group.name)}
                    for one in ids:
                        group.deleted[by_id[one]] += one not in left
