"""The connection is cut before, during and after every frame of every kind, in both directions: no loss, no double."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import qmq
from qmq import Message
from qmq.daemon.main import RunningBroker
from qmq.errors import UnknownGroup
from qmq.net.client import backoff
from qmq.net.client import broker_link as link
from qmq.net.client.options import Durability
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind
from qmq.settings import Settings
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
from tests.faults.brokers import until
from tests.faults.ledger import Ledger, drain, fresh_seed
from tests.faults.proxy import Passing
from tests.faults.wires import CUT_PORT, SPARED_PORT, Wires

#: A thousand sessions of what other tests do once: they run several times as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

CUT: Final = f"qmq://127.0.0.1:{CUT_PORT}"
SPARED: Final = f"qmq://127.0.0.1:{SPARED_PORT}"
DURABILITIES: Final[tuple[Durability, ...]] = ("append", "flush")
SMALL: Final[dict[str, Any]] = {
    "segment_bytes": "128 KiB",
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
}
#: More than any frame has.
WHOLE: Final = 1 << 30
#: So many frames of a kind share the places where to cut one in the middle.
MOST_SHARED: Final = 3
#: After so many sessions that start the broker again, it begins with an empty directory.
SESSIONS_OF_A_DIRECTORY: Final = 10
#: Messages that a pull is to bring.
AT_ONCE: Final = 4
#: The kinds of frames that look at what is stored.
LOOKS: Final = {
    FrameKind.GET,
    FrameKind.GOT,
    FrameKind.FIND,
    FrameKind.FOUND,
    FrameKind.TRACE,
    FrameKind.TRACED,
}
#: Heartbeats, readers of history and restores have connections of their own, which are not these wires; to be handed
#: over takes two brokers.
ELSEWHERE: Final = {
    FrameKind.HEARTBEAT,
    FrameKind.HEARTBEAT_SEEN,
    FrameKind.HAND_OVER,
    FrameKind.HANDED_OVER,
    FrameKind.SEGMENTS,
    FrameKind.SEGMENT_LIST,
    FrameKind.BATCHES,
    FrameKind.BATCH_LIST,
    FrameKind.READ_LOG,
    FrameKind.LOG_BYTES,
    FrameKind.RESTORE,
    FrameKind.RESTORED,
    *LOOKS,
}


class Cut(NamedTuple):
    """After so many bytes of that frame both sides lose the connection."""

    direction: str
    connection: int
    number: int
    passed: int


class World:
    """A broker, and clients that reach it over wires in memory. ``cuts`` are to come, the next one first."""

    def __init__(self, path: Path) -> None:
        self.wires = Wires()
        self.wires.plan = self._plan
        self.cuts: list[Cut] = []
        #: What becomes of the broker at a cut, if anything.
        self.after_cut: Callable[[], Awaitable[None]] | None = None
        self._root = path
        self._numbers = count()
        self._path = self._next_path()
        self._restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Have a broker on the directory."""
        settings = Settings.model_validate({"data_dir": self._path, "listen": "127.0.0.1:0", **SMALL})
        broker = RunningBroker(settings, FakeDisk())
        await broker.start()
        self.wires.broker = broker

    async def stop(self) -> None:
        """Stop it; its files must be faultless."""
        broker, self.wires.broker = self.wires.broker, None
        assert broker is not None
        await broker.stop()
        assert verify(broker.settings.data_dir, Disk()).is_good

    async def begin_anew(self) -> None:
        """Go on in an empty directory: each start replays what was done in one."""
        await self.stop()
        shutil.rmtree(self._path)
        self._path = self._next_path()
        await self.start()

    def killed(self) -> Awaitable[None]:
        """Have another broker on what a kill would leave of this one at this moment."""
        left, self._path = self._path, self._next_path()
        shutil.copytree(left, self._path, ignore=shutil.ignore_patterns("ping"))
        return self._replace(left)

    def stopped(self) -> Awaitable[None]:
        """Stop it and start it again."""
        return self._replace(None)

    async def ready(self) -> None:
        """Wait until a broker is there again."""
        if self._restart is not None:
            await self._restart
            self._restart = None

    async def _replace(self, left: Path | None) -> None:
        await self.stop()
        if left is not None:
            shutil.rmtree(left)
        await self.start()

    def _next_path(self) -> Path:
        return self._root / f"data-{next(self._numbers)}"

    def _plan(self, passing: Passing) -> int | None:
        if not self.cuts or self.cuts[0][:3] != passing[:3]:
            return None
        cut = self.cuts.pop(0)
        if self.after_cut is not None:
            self._restart = asyncio.ensure_future(self.after_cut())
        return min(cut.passed, passing.size)


@asynccontextmanager
async def world_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A world with a broker that runs, in this loop."""
    world = World(path)
    monkeypatch.setattr(link, "GOOD_AFTER", 0.0)  # clients come back at once
    monkeypatch.setattr(link, "CLAIM_TIMEOUT", 0.0)
    monkeypatch.setattr(backoff, "FIRST_DELAY", 0.0005)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", world.wires.connect)
    await world.start()
    yield world
    await world.stop()


async def session(world: World, name: str) -> list[Passing]:
    """Everything that a client can ask for, under subjects that begin with *name*, then a count of it all.

    The first connection is refused, the second one does the work. Returns the frames that passed.
    """
    ledger, wires = Ledger(), world.wires
    wires.passed.clear()
    wires.connections, wires.was_cut = 0, False
    async with qmq.connect(SPARED, producer=f"rival-{name}") as rival:
        await rival.send(f"x.{name}", b"the first of that producer")
        with pytest.raises((qmq.ProducerInUse, qmq.ConnectionLost)) as caught:
            async with qmq.connect(CUT, producer=f"rival-{name}"):
                pass
        assert isinstance(caught.value, qmq.ProducerInUse) or wires.was_cut
    async with qmq.connect(CUT, producer=name) as client:
        with pytest.raises(UnknownGroup):
            await client.admin.set_group(f"no-{name}", max_attempts=3)
        await send(client, ledger, name)
        assert await client.last_sequence(name) == len(ledger.entries) - 1
        infos = [(info.name, info.messages) async for info in client.subjects(f"{name}.")]
        assert infos == [(f"{name}.a", 3), (f"{name}.b", 6), (f"{name}.c", 1)]
        await follow(client, world, ledger, name)
        await share(client, world, ledger, name)
    await world.ready()
    assert not world.cuts, f"nothing was cut: {world.cuts}"
    async with qmq.connect(SPARED) as other:
        ledger.check(await drain(other, f"check-{name}", f"{name}."))
        assert len(await drain(other, f"check-x.{name}", f"x.{name}")) == 1
        for group in (f"check-{name}", f"check-x.{name}"):
            await other.admin.delete_group(group)
    return wires.passed.copy()


async def send(client: qmq.Client, ledger: Ledger, name: str) -> None:
    """One by one, many, and without waiting."""
    for durability in DURABILITIES:
        entry = ledger.open(f"{name}.a", 40, "key")
        receipt = await client.send(entry.subject, entry.body, key="key", durability=durability)
        ledger.acknowledged([entry], [receipt])
    entries = [ledger.open(f"{name}.b", 50) for _ in range(5)]
    ledger.acknowledged(entries, await client.send_many(f"{name}.b", [entry.body for entry in entries]))
    entries = [ledger.open(f"{name}.{letter}", 30) for letter in "abc"]
    for entry in entries:
        client.send_nowait(entry.subject, entry.body)
    await client.flush()
    ledger.acknowledged(entries, [None] * len(entries))


async def follow(client: qmq.Client, world: World, ledger: Ledger, name: str) -> None:
    """Alone: everything comes, once, also after a pull that was cancelled."""
    got: list[Message] = []
    async with client.subscribe(f"{name}.", start="first") as consumer:
        while len(got) < len(ledger.entries):
            came = await consumer.pull(max_count=AT_ONCE, timeout=60)
            assert came, f"{len(got)} of {len(ledger.entries)} came"
            got += came
        asked = pulls_in(world.wires.passed)
        pull = asyncio.create_task(consumer.pull())
        await until(lambda: pulls_in(world.wires.passed) > asked, "the pull is on its way")
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        assert pull.cancelled()
        entry = ledger.open(f"{name}.c")
        ledger.acknowledged([entry], [await client.send(entry.subject, entry.body)])
        got += await consumer.pull(timeout=60)
    ledger.check(got)


def pulls_in(frames: Iterable[Passing]) -> int:
    return sum(passing.kind == FrameKind.PULL for passing in frames)


async def share(client: qmq.Client, world: World, ledger: Ledger, name: str) -> None:
    """In a group: nothing is missing, also not what is damaged on the way, and nothing acknowledged comes twice."""
    handled: list[Message] = []
    back: list[Message] = []
    wanted = {entry.number for entry in ledger.entries if not entry.subject.endswith("c")}
    world.wires.damages = True
    async with client.subscribe(f"{name}.a", f"{name}.b", group=name, start="first") as consumer:
        while len(handled) < AT_ONCE or not back:
            first, *others = await consumer.pull(max_count=AT_ONCE, timeout=60)
            if back:
                others.append(first)
            else:
                await first.nack(delay=0)
                back.append(first)
            for message in others:
                message.ack()
            handled += others
        await consumer.flush()
    assert world.wires.was_cut or any(passing.kind == FrameKind.REPORT for passing in world.wires.passed)
    await world.ready()
    assert [row.name for row in await client.admin.groups(name)] == [name]
    await world.ready()
    async with qmq.connect(SPARED) as other, other.subscribe(f"{name}.a", f"{name}.b", group=name) as consumer:
        while came := await consumer.pull(timeout=0):
            handled += came
            for message in came:
                message.ack()
    numbers = [ledger.entry_of(message).number for message in handled]
    assert len(numbers) == len(set(numbers)), "something came twice"
    assert set(numbers) == wanted
    with suppress(UnknownGroup):  # the first try, whose answer was cut off
        await client.admin.delete_group(name)  # many would make starts slow


#: What every connection begins with.
GREETING: Final = {FrameKind.HELLO, FrameKind.WELCOME, FrameKind.CLAIM, FrameKind.CLAIMED}


def places_in(frames: Iterable[Passing]) -> Iterator[Cut]:
    """Cuts of each of these frames: after none of its bytes, after all, and after one, its header but one, its header,
    one more, half, all but one. Frames of a kind share those in between: each is tried with one of them at least.
    """
    by_kind: dict[tuple[str, int], list[Passing]] = {}
    for passing in frames:
        by_kind.setdefault((passing.direction, passing.kind), []).append(passing)
    for alike in by_kind.values():
        for place, passing in enumerate(alike):
            size = passing.size
            inside = {1, FRAME_SIZE - 1, FRAME_SIZE, FRAME_SIZE + 1, size // 2, size - 1}
            mine = sorted(inside & set(range(1, size)))[place % MOST_SHARED :: min(len(alike), MOST_SHARED)]
            for passed in (0, *mine, WHOLE):
                yield Cut(*passing[:3], passed)


def at_work(frames: list[Passing]) -> list[Passing]:
    """The frames of the second connection, without those that it begins with: hello, claim, the last sequence."""
    return [passing for passing in frames if passing.connection == 1 and passing.number > 2]


def in_turn(frames: list[Passing]) -> Iterator[tuple[Passing, list[int]]]:
    """Frames with when to cut them: 0 before, 1 during, 2 after. Those of a kind take turns, where there are enough."""
    total, seen = Counter(passing.kind for passing in frames), Counter[int]()
    for passing in frames:
        yield passing, [seen[passing.kind] % 3] if total[passing.kind] >= 3 else [0, 1, 2]
        seen[passing.kind] += 1


def assert_struck(wires: Wires, greeting: bool) -> None:
    """Every kind was cut before, during and after."""
    print(f"{wires.struck.total()} cuts: {dict(wires.struck)}")
    kinds = set(FrameKind) - ELSEWHERE - (set() if greeting else GREETING)
    missed = {(kind.name, where) for kind in kinds for where in ("before", "during", "after")}
    assert missed <= {(kind, where) for _, kind, where in wires.struck}


async def looks(world: World, message_id: str) -> list[Passing]:
    """Look at one message by its id, at what has become of it, and at all of its key; return the frames that passed."""
    wires = world.wires
    wires.passed.clear()
    wires.connections, wires.was_cut = 0, False
    async with qmq.connect(CUT) as client:
        assert (await client.get(message_id)).body == b"looked at"
        trace = await client.trace(message_id)
        assert trace.message is not None
        assert [one.body async for one in client.find("looks.", key="key")] == [b"looked at"]
    assert not world.cuts, f"nothing was cut: {world.cuts}"
    return wires.passed.copy()


async def test_a_cut_at_any_frame_of_a_look_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_on(tmp_path, monkeypatch) as world:
        async with qmq.connect(SPARED) as client:
            receipt = await client.send("looks.at", b"looked at", key="key")
        frames = await looks(world, receipt.id)
        for cut in places_in(one for one in frames if one.kind in LOOKS):
            world.cuts = [cut]
            await looks(world, receipt.id)
        struck = {(kind, where) for _, kind, where in world.wires.struck}
        assert {(kind.name, where) for kind in LOOKS for where in ("before", "during", "after")} <= struck


async def test_a_cut_at_any_frame_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (f"n{number:03}" for number in count())
    async with world_on(tmp_path, monkeypatch) as world:
        frames = await session(world, next(names))
        greeting = [passing for passing in frames if passing.connection == 0]
        for cut in places_in((*greeting, *at_work(frames))):
            world.cuts = [cut]
            await session(world, next(names))
        # And of the connection that is made after a cut.
        for cut in places_in(one for one in frames if one.connection == 1 and one.kind in GREETING):
            world.cuts = [Cut(*at_work(frames)[0][:3], 0), cut._replace(connection=2)]
            await session(world, next(names))
        assert_struck(world.wires, greeting=True)


@pytest.mark.parametrize("how", [World.killed, World.stopped])
async def test_a_cut_at_any_frame_is_borne_while_the_broker_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[World], Awaitable[None]]
) -> None:
    chance = random.Random(fresh_seed())
    names = (f"n{number:03}" for number in count())
    async with world_on(tmp_path, monkeypatch) as world:
        frames = await session(world, next(names))
        world.after_cut = getattr(world, how.__name__)
        for passing, whens in in_turn(at_work(frames)):
            for place in [(0, chance.randrange(1, passing.size), WHOLE)[when] for when in whens]:
                world.cuts = [Cut(*passing[:3], place)]
                await session(world, next(names))
                if world.wires.struck.total() % SESSIONS_OF_A_DIRECTORY == 0:
                    await world.begin_anew()
        assert_struck(world.wires, greeting=False)
