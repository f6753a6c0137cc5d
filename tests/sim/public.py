"""Random histories of programs that use the public clients, with and without asyncio, in all their ways, at real
brokers over real sockets. What each program was given is held against the law: each message that a group wants is
acknowledged once, or is dead; nothing is lost, and nothing stays for ever.

All that a history draws comes from its seed. What the loop, the threads and the disks make of it may differ each time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

import qmq
from qmq.broker.groups.passed import wrongly_held, wrongly_passed
from qmq.broker.retention import retention
from qmq.net.client.consumer import acks, nacks, order_turns
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.net.several import Several, until
from tests.sim.public_boss import CALLS, FOLLOWED, Boss, Processes
from tests.sim.public_killed import KILLED, STOPPED_SESSION_MS, KilledWorker
from tests.sim.public_people import (
    DECISIONS,
    ENDS,
    SENDING,
    SYNC_SENDING,
    SYNC_WAYS,
    WAYS,
    Crew,
    Sender,
    Worker,
)
from tests.sim.public_record import GroupRecord, Record, Sent, Session

SUBJECTS: Final = ("a.x", "a.y", "b.z")
#: The last one has the bit of the first, so the broker cannot tell them apart.
TAGS: Final = ("red", "green", "blue", "tag16")
ORDER_KEYS: Final = ("one", "two", "three")
#: What some histories of many must have had.
FEATURES: Final = (
    *SENDING, *SYNC_SENDING, *WAYS, *SYNC_WAYS, *(f"end: {end}" for end in ENDS),
    *(f"decision: {decision}" for decision in DECISIONS), *(f"boss: {call}" for call in CALLS),
    *(f"mode: {mode}" for mode in ("reliable", "at_most_once", "broadcast")), "killed", "session cancelled",
    "connection lost", "consumer with an id", "with a key", "with tags", "with an order key", "with a priority",
    "with a unique text", "duplicate", "with a delay", "with expires_in", "cancelled", "empty body", "JSON body",
    "large body", "dead", "deleted",
    "expired", "filtered", "filtered by the client", "flush", "solo", "taken back",
    "ack of what was taken back", "sync admin", "looked at",
    "segments removed", "missed", "sessions expire",
    "consumers with one id", "named producer", "group looked at", "group is unknown",
    "seek to first", "seek to new", "seek to time", "seek to a sequence",
    "redriven", "refused", "resent", "order of a slot is checked", "order over subjects is checked",
    "order of a subject is checked", "back with an earlier one of its slot",
    *(f"killed: {name}" for name in KILLED), "in hand at a kill", "acks unknown at a kill", "came again after a kill",
    "quarantined alone is checked",
)  # fmt: skip
MAX_FRAME_BYTES: Final = 64 << 10
MAX_MESSAGE_BYTES: Final = 8 << 10
#: More than a history has programs.
_MOST_THREADS: Final = 64
#: Seconds that a history may take; it takes less than one.
TIMEOUT_S: Final = 60
#: Times which would make histories long.
WAITS: Final = (
    (acks, "ACK_DELAY", 0.002), (nacks, "HELD_FOR", 0.02), (nacks, "AGAIN_AFTER", 0.005),
    (nacks, "FIRST_RELEASE_US", 1_000), (nacks, "LAST_RELEASE_US", 8_000), (retention, "_LOOK_US", 3_000),
    (order_turns, "LEAST_BACK", 0.002),
    (order_turns, "MOST_BACK", 0.01),
)  # fmt: skip
#: How many of the histories have consumers that are killed.
KILLED_SHARE: Final = 0.15
#: The waits of clients.
CHILD_WAITS: Final = tuple(
    (module.__name__.rpartition(".")[2], constant, value)
    for module, constant, value in WAITS
    if module is not retention
)


@dataclass(frozen=True)
class GroupPlan:
    """The settings of a group, and its consumers."""

    name: str
    prefixes: tuple[str, ...]
    tags: tuple[str, ...]
    settings: dict[str, Any]
    #: For each consumer whether it is one without asyncio, and its id, if it has one.
    workers: tuple[tuple[bool, str | None], ...]
    mode: str = "reliable"
    #: Consumers may lose what they have: two have one id, or sessions expire with their connections.
    is_loose: bool = False


class History:
    """One history."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seed = seed
        self.chance = chance = Random(seed)
        self.directory = directory
        self.record = Record()
        self.has_processes = chance.random() < 0.15
        self.retains = not self.has_processes and chance.random() < 0.15
        #: Groups may miss messages that they have not taken.
        self.drops = self.retains and self._own_chance("drops").random() < 0.4
        self.brokers: Any = self._made_brokers(
            chance.choice((1, 1, 1, 2)), partitions=chance.choice((1, 1, 2, 3)),
            checkpoint_ms=10 if self.retains else chance.choice((10, 50, 1_000)),
            **({"retention_ms": chance.choice((1, 20))} if self.retains else {}),
            **({"retention_bytes": 12 << 10} if self.drops else {}),
        )  # fmt: skip
        self.count = self.record.count
        self.record.retains = self.retains
        self.record.has_several_brokers = len(self.brokers.brokers) > 1
        #: Whether there are programs without asyncio.
        self.has_threads = True
        self.has = {
            name: chance.random() < share
            for name, share in (
                ("tags", 0.4), ("order keys", 0.4), ("priorities", 0.4), ("expiry", 0.25), ("delays", 0.3),
                ("unique texts", 0.4),
            )
        }  # fmt: skip
        self.messages = [self._message(number) for number in range(chance.choice((10, 30, 60)))]
        self.groups = [self._group(f"g{number}") for number in range(chance.choice((1, 1, 2)))]
        self.senders = chance.choice((1, 1, 2))
        self.solos = tuple(chance.random() < 0.4 for _ in range(chance.choice((0, 0, 1))))
        self._kill_some()
        self.options = {
            "durability": chance.choice(("append", "flush")), "linger": chance.choice((0, 0, 0.002)),
            "failover_after": chance.choice((5, 0.05, None)), "send_timeout": 10,
        }  # fmt: skip

    def _made_brokers(self, count: int, **settings: Any) -> Any:
        return (Processes if self.has_processes else Several)(
            self.directory, count, segment_bytes="256 KiB", max_frame_bytes=MAX_FRAME_BYTES,
            max_message_bytes=MAX_MESSAGE_BYTES, scrub_bytes_per_s=0, **settings,
        )  # fmt: skip

    # --- what is drawn -----------------------------------------------------------------------------------------------

    def _message(self, number: int) -> Sent:
        chance, has = self.chance, self.has
        body = chance.choice((
            b"%d" % number, b"%d." % number + b"x" * chance.choice((100, 2_000)), b'{"n":%d}' % number, b""
        ))  # fmt: skip
        order_key = chance.choice(ORDER_KEYS) if has["order keys"] and chance.random() < 0.6 else None
        return Sent(
            number=number,
            subject=chance.choice(SUBJECTS),
            body=body,
            key=str(number) if not body or number % 7 == 0 or chance.random() < 0.3 else None,
            tags=tuple(tag for tag in TAGS if chance.random() < 0.4) if has["tags"] else (),
            priority=chance.choice(("low", "normal", "high")) if has["priorities"] else "normal",
            order_key=order_key,
            expires=has["expiry"] and chance.random() < 0.3,
            delay=chance.choice((0.001, 0.01, 0.03)) if has["delays"] and chance.random() < 0.3 else None,
            more_keys=("more", "keys") if number % 7 == 0 else (),
            properties={"of": str(number)} if number % 5 == 0 else {},
            unique=f"text {number}" if has["unique texts"] and chance.random() < 0.6 else None,
        )

    def _group(self, name: str) -> GroupPlan:
        chance, has = self.chance, self.has
        settings = {
            "max_attempts": chance.choice((1, 2, 3, 16)),
            "max_unacked": chance.choice((1, 2, 8, 100, None)),
            "max_unacked_bytes": chance.choice((None, None, None, 300)),
            "retry_delays": chance.choice(([0], [0.002], [0, 0.01])),
            "expire_after": 0.05 if has["expiry"] and chance.random() < 0.3 else None,
            "priority_share": chance.choice((None, 0, 0.5, 1)) if has["priorities"] else None,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        mode = chance.choice(("reliable",) * 5 + ("at_most_once", "broadcast"))
        workers = tuple(
            (chance.random() < 0.4, f"{name}-{number}" if mode == "broadcast" or chance.random() < 0.5 else None)
            for number in range(chance.choice((1, 2, 2, 3)))
        )
        shares, expires = mode == "reliable" and chance.random() < 0.1, chance.random() < 0.1
        if shares:
            workers = tuple((is_sync, f"{name}-shared") for is_sync, _ in workers)
            self.count["consumers with one id"] += len(workers) > 1
        if expires:
            given["reconnect_timeout"] = chance.choice((0, 0.005))
            given["max_session_expiries"] = chance.choice((1, 2, 3))
            self.count["sessions expire"] += 1
        tags = tuple(chance.sample(TAGS[:3], chance.choice((1, 2)))) if has["tags"] and chance.random() < 0.7 else ()
        return GroupPlan(name, chance.choice(FOLLOWED), tags, given, workers, mode, shares or expires)

    def _kill_some(self) -> None:
        """Choose groups some of whose consumers are killed. Where none is stopped, nobody else loses a connection, so
        that it is known who has lost what.
        """
        chance = self._own_chance("killed consumers")
        self.killed: dict[str, int] = {}
        self.stops = False
        if chance.random() >= KILLED_SHARE:
            return
        self.stops = not self.has_processes and chance.random() < 0.2
        if self.stops:
            self.brokers._settings["session_timeout_ms"] = STOPPED_SESSION_MS
        for number, plan in enumerate(self.groups):
            if plan.mode == "reliable":
                plan.settings["reconnect_timeout"] = chance.choice((0, 0.01, 0.05))
                plan.settings["max_session_expiries"] = chance.choice((1, 2, 3))
                self.killed[plan.name] = chance.choice((1, 1, 2))
            if self.stops:
                self.groups[number] = replace(plan, is_loose=True)

    def __repr__(self) -> str:
        has = [name for name, is_there in self.has.items() if is_there]
        settings = self.brokers._settings
        return f"{len(self.brokers.brokers)} brokers {settings}, with {has}, groups {self.groups}, {self.options}"

    # --- a history ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let the programs run, then others take what is left; check."""
        # Each program without asyncio has a thread all the time; the usual executor has few of them.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
        async with asyncio.timeout(TIMEOUT_S):
            for number in range(len(self.brokers.brokers)):
                await self.brokers.start(number)
            try:
                await self._live()
                await self._drain()
            finally:
                for number in range(len(self.brokers.brokers)):
                    await self.brokers.stop(number)
                if isinstance(self.brokers, Processes):
                    self.brokers.close()
        self._check_files()
        if self.record.wrongs:
            raise AssertionError("\n".join(self.record.wrongs[:8]))

    async def _live(self) -> None:
        """Some programs send, others consume, and decide what they like."""
        crew, chance = Crew(self.record), self.chance
        for plan in self.groups:
            if plan.mode != "broadcast":
                self._group_record(plan, plan.name)
        senders = list[Coroutine[Any, Any, Any]]()
        for number in range(self.senders):
            sender = Sender(self.record, self.messages[number :: self.senders], self._own_chance(f"sender {number}"))
            options = dict(self.options)
            if self._own_chance(f"producer {number}").random() < 0.3:
                options["producer"] = f"producer-{number}"
                self.count["named producer"] += 1
            if chance.random() < 0.3 and self.has_threads:
                senders.append(asyncio.to_thread(sender.run_sync, self.brokers.url, options))
            else:
                senders.append(sender.run(self.brokers.url, options))
        workers = [
            self._worker(crew, plan, f"{plan.name} worker {number}", consumer, is_sync=is_sync)
            for plan in self.groups
            for number, (is_sync, consumer) in enumerate(plan.workers)
        ]
        workers += [self._solo(crew, f"solo {number}", is_sync=is_sync) for number, is_sync in enumerate(self.solos)]
        killed = [
            self._killed(crew, plan, number) for plan in self.groups for number in range(self.killed.get(plan.name, 0))
        ]
        names = [plan.name for plan in self.groups if plan.mode == "reliable"]
        most = len(self.messages) * len(self.groups)
        boss = self._boss(crew, names, most)
        async with asyncio.TaskGroup() as tasks:
            for killed_worker in killed:
                tasks.create_task(killed_worker.run(self.brokers.url))
            for killed_worker in killed:  # they would come too late to get much
                await killed_worker.entered.wait()
            for worker in workers:
                tasks.create_task(worker.run(self.brokers.url, {}))
            try:
                async with asyncio.TaskGroup() as sending:
                    for call in senders:
                        sending.create_task(call)
                    sending.create_task(self._run_boss(boss))
                await self._taken(most // 2, 0.15)
            finally:
                crew.stop()

    def _boss(self, crew: Crew, names: list[str], most: int, **more: Any) -> Boss:
        return Boss(
            self.record, crew, self.brokers, self._own_chance("boss"), names, most, 4 * self.retains,
            keeps_connections=self.keeps_connections, **more,
        )  # fmt: skip

    async def _run_boss(self, boss: Boss) -> None:
        await boss.run(self.brokers.url, self._taken)

    def _group_record(self, plan: GroupPlan, name: str, **begin: int) -> GroupRecord:
        """Return the record of a group, or of a member of a broadcast; *begin*: the ticks when it began."""
        with self.record.lock:
            if name not in self.record.groups:
                self.record.groups[name] = GroupRecord(
                    self.record, name, plan.prefixes, tags=plan.tags, expires="expire_after" in plan.settings,
                    max_attempts=plan.settings["max_attempts"], mode=plan.mode, is_loose=plan.is_loose,
                    misses=self.drops, max_session_expiries=plan.settings.get("max_session_expiries", 3), **begin,
                )  # fmt: skip
            return self.record.groups[name]

    async def _taken(self, count: int, seconds: float) -> None:
        """Wait until so many messages were given to consumers, or for so many seconds."""
        came, loop = asyncio.Event(), asyncio.get_running_loop()

        def look() -> None:
            if self.count["taken"] >= count or self.record.wrongs:
                loop.call_soon_threadsafe(came.set)

        self.record.on_came.append(look)
        look()
        try:
            async with asyncio.timeout(seconds):
                await came.wait()
        except TimeoutError:
            pass
        finally:
            self.record.on_came.remove(look)

    def _worker(self, crew: Crew, plan: GroupPlan, name: str, consumer: str | None, **how: Any) -> Worker:
        options = {
            "group": plan.name, "consumer": consumer, "tags": plan.tags or None, "mode": plan.mode,
            "on_difference": self.chance.choice(("warn", "warn", "apply")),
        }  # fmt: skip
        settings, looks = plan.settings, self._own_chance(f"look {name}").random() < 0.2
        if looks and plan.mode == "reliable" and not how.get("is_calm") and not name.endswith("worker 0"):
            options, settings = {"group": plan.name, "consumer": consumer, "look": True}, {}
        self.count["consumer with an id"] += consumer is not None
        self.count[f"mode: {plan.mode}"] += 1

        def group_of(consumer: str, before: int) -> GroupRecord:
            if plan.mode != "broadcast":
                return self.record.groups[plan.name]
            # Of several brokers it has subscribed at one at least: at the others it may begin at any later time.
            begins = self.record.tick() if len(self.brokers.brokers) == 1 else sys.maxsize
            return self._group_record(plan, f"{plan.name}@{consumer}", begins=begins, subscribed=before)

        how["is_sync"] = how["is_sync"] and self.has_threads
        chance = self._own_chance(name)
        known = self.record.groups.get(plan.name)
        prefixes = plan.prefixes if known is None else known.prefixes  # somebody may have changed them
        how["keeps_connections"] = self.keeps_connections
        return Worker(crew, name, prefixes, {**options, **settings}, group_of, chance, **how)

    @property
    def keeps_connections(self) -> bool:
        """Whether nobody loses a connection but who is killed."""
        return bool(self.killed) and not self.stops

    def _killed(self, crew: Crew, plan: GroupPlan, number: int) -> KilledWorker:
        name = f"{plan.name} killed {number}"
        chance = self._own_chance(name)
        consumer = chance.choice((None, f"{plan.name}-killed-{number}"))
        options: dict[str, Any] = {"group": plan.name, "consumer": consumer, "tags": plan.tags or None, **plan.settings}
        return KilledWorker(
            crew, name, lambda consumer, before: self.record.groups[plan.name], chance, prefixes=plan.prefixes,
            options=options, waits=CHILD_WAITS, stops=self.stops,
        )  # fmt: skip

    def _solo(self, crew: Crew, name: str, *, is_sync: bool) -> Worker:
        """Return a consumer without a group, which gets everything once in each session."""
        self.count["solo"] += 1
        prefixes = self.chance.choice(FOLLOWED)

        def group_of(consumer: str, before: int) -> GroupRecord:
            return GroupRecord(self.record, f"solo {consumer} {before}", prefixes, mode="solo")

        options = {"group": None, "start": "first"}
        is_sync = is_sync and self.has_threads
        return Worker(crew, name, prefixes, options, group_of, self._own_chance(name), is_sync=is_sync)

    def _own_chance(self, name: str) -> Random:
        return Random(f"{self.seed} {name}")

    async def _drain(self) -> None:
        """Let consumers that acknowledge everything take all that is left; check what the brokers have then."""
        crew = Crew(self.record)
        workers = [
            self._worker(
                crew, plan, f"{plan.name} last {consumer}", consumer, is_sync=self.chance.random() < 0.3, is_calm=True
            )
            for plan in self.groups
            for consumer in self._last_consumers(plan)
        ]
        async with qmq.connect(self.brokers.url) as client, asyncio.TaskGroup() as tasks:
            for group in self.record.groups.values():
                if group.is_narrowed:  # what it has followed before goes on where it was
                    with suppress(qmq.UnknownGroup):  # it was deleted, and begins anew
                        await client.admin.set_group(group.name, follows=group.prefixes)
            for worker in workers:
                tasks.create_task(worker.run(self.brokers.url, {}))
            try:
                await until(partial(self._has_groups, client), "each group is there, also one that was deleted")
                await self._until_none(client, has_left, "something is left for ever")
            finally:
                crew.stop()
        async with qmq.connect(self.brokers.url) as client:
            await self._until_none(client, lambda row: bool(row.consumers), "consumers do not go")
            await until(partial(self._has_settled, client), "delayed messages are delivered")
            if not self.record.wrongs:
                await self._check(client)

    async def _has_settled(self, client: qmq.Client) -> bool:
        return bool(self.record.wrongs) or not any(broker.delayed for broker in await client.admin.stats())

    async def _has_groups(self, client: qmq.Client) -> bool:
        counts = Counter(row.name for row in await client.admin.groups())
        names = [plan.name for plan in self.groups if plan.mode != "broadcast"]
        return bool(self.record.wrongs) or all(counts[name] == len(self.brokers.brokers) for name in names)

    def _last_consumers(self, plan: GroupPlan) -> list[str | None]:
        """Return the ids of those that drain a group; each member of a broadcast has its own messages."""
        if plan.mode == "broadcast":
            return [consumer for _, consumer in plan.workers]
        return [None] * self.chance.choice((1, 2))

    async def _until_none(self, client: qmq.Client, has: Callable[[qmq.GroupInfo], bool], fault: str) -> None:
        """Wait until no group has that."""
        left = [row for row in await client.admin.groups() if has(row)]
        try:
            async with asyncio.timeout(20):
                while left and not self.record.wrongs:
                    await asyncio.sleep(0.003)
                    left = [row for row in await client.admin.groups() if has(row)]
        except TimeoutError:
            self.record.wrong(f"{fault}: {left}")

    # --- checks ------------------------------------------------------------------------------------------------------

    async def _check(self, client: qmq.Client) -> None:
        await self._find(client)
        await self._read_alone(client)
        by_id, died = self.record.ids, dict[str, int]()
        for name, group in self.record.groups.items():
            letters = [letter async for letter in client.admin.dead_letters(name)]
            # Nobody knows the ids of those that were removed before somebody has seen them.
            known = [letter for letter in letters if letter.id in by_id or not self.retains]
            dead = Counter(by_id[letter.id] for letter in known)
            group.check(dead, {by_id[one.id]: one.reason for one in known}, may_be_gone=self.retains)
            self.count["dead"] += len(letters)
            rows = await client.admin.groups(name)
            filtered = sum(
                group.follows(sent) and group.is_filtered(sent) and sent.state == "stored"
                for sent in self.record.sent.values()
            )
            found = {
                "dead": sum(row.dead for row in rows), "filtered": sum(row.filtered for row in rows),
                "skipped": sum(row.skipped for row in rows),
            }  # fmt: skip
            wanted = {"dead": len(letters), "filtered": filtered, "skipped": 0}
            self.count["missed"] += found["skipped"] if group.misses else 0
            if group.is_restarted and group.mode == "at_most_once":  # part of a block that was skipped at the start
                least = filtered - found["skipped"]
                found["filtered"] = filtered if least <= found["filtered"] <= filtered else found["filtered"]
            if group.mode == "at_most_once" or group.misses:
                found["skipped"] = 0  # what expired, and what came in an answer that maybe did not arrive
            are_twice = any(sent.may_be_twice for sent in self.record.sent.values())
            if group.begins or group.is_changed or group.is_loose or len(group.tag_sets) > 1 or are_twice:
                found["filtered"] = filtered
            if self.retains:  # what was stored before somebody followed it may have gone unseen
                early = sum(sent.begun < group.entered for sent in self.record.sent.values())
                if filtered - early <= found["filtered"] <= filtered:
                    found["filtered"] = filtered
            if found != wanted:
                self.record.wrong(f"group {name} has {found} in place of {wanted}")
            died[name] = len(letters)
        await self._check_reports(client, died)
        self._check_accounts()

    async def _check_reports(self, client: qmq.Client, dead: dict[str, int]) -> None:
        """What the brokers report is what the programs have done; *dead*: the dead letters of each group."""
        brokers = await client.admin.stats()
        self.count["segments removed"] += sum(broker.dropped_segments for broker in brokers)
        stats = {one.name: one for broker in brokers for one in broker.groups}
        for name, group in self.record.groups.items():
            self._check_stats(group, stats[name], dead[name])
        for info in await client.admin.info():
            for problem in info.problems:
                if problem.code == "unaccounted":
                    self.record.wrong(problem.message)

    async def _find(self, client: qmq.Client) -> None:
        """Find each message that was sent. What has just fallen due may not be found at once."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + 5
        while True:
            found = [message async for message in client.find(limit=None)]
            missing = {sent.number for sent in self.record.sent.values() if sent.state == "stored"} - {
                self.record.of(message).number for message in found
            }
            if not missing or self.retains or loop.time() > ends:
                break
            self.count["found late"] += 1
            await asyncio.sleep(0.003)
        self.record.check_stored(found, may_be_gone=self.retains)

    async def _read_alone(self, client: qmq.Client) -> None:
        """Whoever reads alone gets all that has not expired, once and in stored order."""
        group = GroupRecord(self.record, "alone", ("",), mode="solo")
        async with client.subscribe("", start="first") as consumer:
            session = Session(group, "alone")
            while messages := await consumer.pull(1_000, timeout=0):
                for message in messages:
                    session.took(message)
        for sent in self.record.sent.values():
            if sent.state == "stored" and not (sent.expires or self.retains or group.hands[sent.number]):
                self.record.wrong(f"{sent} did not come to one who reads alone")

    def _check_stats(self, group: GroupRecord, stats: qmq.GroupStats, dead: int) -> None:
        """What the broker has counted is what the programs have done."""
        if len(self.brokers.brokers) > 1 or group.is_changed or group.is_loose or group.is_restarted:
            return
        if group.mode == "at_most_once" or len(group.tag_sets) > 1 or group.kills:
            return
        died = dead + group.deleted.total()
        by_client = sum(
            group.follows(sent) and not group.may_want(sent) and not group.is_filtered(sent) and sent.state == "stored"
            for sent in self.record.sent.values()
        )
        if by_client and (group.begins or any(group.may_expire(sent) for sent in self.record.sent.values())):
            return
        states = Counter(hand.state for hands in group.hands.values() for hand in hands)
        counted = {"acked": stats.acked, "rejected": stats.rejected, "died": stats.died}
        wanted = {
            "acked": states["acking"] + states["acked"] + by_client,
            "rejected": states["rejecting"] + states["rejected"],
            "died": died,
        }
        if counted != wanted:
            self.record.wrong(f"group {group.name} has counted {counted} in place of {wanted}")

    def _check_accounts(self) -> None:
        for running in self.brokers.brokers:
            if running is None:
                continue
            for group in running.broker.groups.values():
                for found in (wrongly_held(group), wrongly_passed(running.store, group)):
                    if found is not None:
                        self.record.wrong(str(found))

    def _check_files(self) -> None:
        for number in range(len(self.brokers.brokers)):
            report = verify(self.directory / f"broker-{number}", Disk())
            for finding in report.findings:
                if finding.severity == "fault":
                    self.record.wrong(str(finding))


def has_left(row: qmq.GroupInfo) -> bool:
    """Return whether a group still has something to take."""
    return bool(row.ready or row.in_flight or row.in_retry or row.delayed)


@contextmanager
def patch_waits() -> Iterator[None]:
    """Within it, times that would make histories long are short."""
    with pytest.MonkeyPatch.context() as patch:
        for module, constant, value in WAITS:
            patch.setattr(module, constant, value)
        yield


def save_events(history: History) -> None:
    """Save what happened, if the environment names a file for it."""
    if name := os.environ.get("PUBLIC_EVENTS"):
        Path(name).write_text("\n".join(history.record.events))


def run(seed: int) -> Counter[str]:
    """One history, and what happened in it."""
    with (
        patch_waits(), pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="qmq-public-") as directory,
    ):  # fmt: skip
        patch.setenv("QMQ_STATE_DIR", str(Path(directory) / "state"))
        history = History(seed, Path(directory))
        try:
            asyncio.run(history.run())
        except BaseException as error:
            save_events(history)
            error.add_note(f"again: python -m tests.sim public {seed}: {history}")
            raise
    return history.count


def unused(counts: Counter[str], features: Sequence[str] = FEATURES) -> list[str]:
    """Return the features that no history has had."""
    return sorted({name for name in features if not counts[name]})
