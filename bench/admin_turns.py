"""Measure for how long each administrative call holds the broker's loop, beside very many subjects, slots and groups.

`python -m bench.admin_turns` makes 100,000 subjects, 200 more of 4,096 slots each, and 10,000 groups, which takes some
minutes. The broker is a process of its own; between two beats its loop counts the processor time of its thread, so
other programs on the machine do not matter much. A line has the answers of one call, and its longest and second longest
time between two beats.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import qmq
from qmq.broker.ports.commands import Now
from qmq.daemon.collector import CollectorBound
from qmq.daemon.main import RunningBroker
from qmq.format.hashing import hash_bytes
from qmq.format.lanes import lane_of_key_hash
from qmq.net.client.address import parse_url
from qmq.net.client.admin.admin import AdminOfOne
from qmq.net.client.log_reader import LogReader
from qmq.net.server import clock
from qmq.settings import Settings

#: The time between two beats of the broker's loop.
_BEAT_S: Final = 0.0005
#: Longest and second longest time between two beats in ms, and the count of beats longer than the goal.
_BEATS: Final = struct.Struct("<ddQ")
_GOAL_MS: Final = 20.0

#: What the broker is told by signals.
_SKIP_DAYS: Final = signal.SIGRTMIN
_SKIP_HOURS: Final = signal.SIGRTMIN + 1
_KEEP_FOR_AN_HOUR: Final = signal.SIGRTMIN + 2
#: A subject that all groups follow, with one message.
_ALL: Final = "followed.by.all"

Call = Callable[[], Awaitable[object]]


# --- the broker ------------------------------------------------------------------------------------------------------


class Stacks:
    """Samples where the loop's thread is, to print where the time of long turns goes."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._sampled = list[tuple[str, ...]]()
        sys.setswitchinterval(0.0005)
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            time.sleep(0.001)
            frame = sys._current_frames().get(self._thread)
            stack = list[str]()
            while frame is not None:
                if "/qmq/" in (path := frame.f_code.co_filename):
                    stack.append(f"{path.rpartition('/qmq/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
                frame = frame.f_back
            self._sampled.append(tuple(stack[:14]))

    def turn(self, took_ms: float) -> None:
        """End a turn, and print the most frequent stacks if it was long."""
        sampled, self._sampled = self._sampled, []
        if took_ms > _GOAL_MS:
            print(f"    {took_ms:.1f} ms, {len(sampled)} samples", file=sys.stderr)
            for stack, times in Counter(sampled).most_common(4):
                print(f"      {times:4}  {' < '.join(stack)}", file=sys.stderr)


class Clock:
    """The broker's clock, which goes on by a long time at once when it is told to."""

    def __init__(self) -> None:
        self._ahead_us = 0

    def __call__(self) -> Now:
        now = clock()
        return Now(now.monotonic_us + self._ahead_us, now.wall_us + self._ahead_us)

    def skip(self, hours: int) -> None:
        """Go on by some hours."""
        self._ahead_us += hours * 3_600_000_000


async def _serve(directory: Path, beats: mmap.mmap, *, shows_stacks: bool) -> None:
    skipping = Clock()
    settings = Settings.model_validate({"data_dir": directory, "listen": "127.0.0.1:0"})
    running = RunningBroker(settings, clock=skipping)
    await running.start()
    CollectorBound().begin()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, running._checkpointer.hurry)
    loop.add_signal_handler(signal.SIGUSR2, running._look_at_names)

    def skip(hours: int) -> None:
        skipping.skip(hours)
        running.server.turn()

    def keep_for_an_hour() -> None:
        task = asyncio.ensure_future(running.reload({"retention_max_ms": 3_600_000}))
        task.add_done_callback(lambda done: done.result())

    loop.add_signal_handler(_SKIP_DAYS, skip, 8 * 24)
    loop.add_signal_handler(_SKIP_HOURS, skip, 2)
    loop.add_signal_handler(_KEEP_FOR_AN_HOUR, keep_for_an_hour)
    print(running.url, flush=True)
    stacks = Stacks() if shows_stacks else None
    last = time.thread_time()
    while os.getppid() != 1:
        await asyncio.sleep(_BEAT_S)
        now = time.thread_time()
        longest, second, over = _BEATS.unpack_from(beats, 0)
        took, last = (now - last) * 1_000, now
        if stacks is not None:
            stacks.turn(took)
        if took > second:
            longest, second = max(longest, took), min(longest, took)
            _BEATS.pack_into(beats, 0, longest, second, over + (took > _GOAL_MS))


def serve(directory: Path, beats: Path, *, shows_stacks: bool) -> None:
    """Run a broker that counts its beats in a file, until its parent ends."""
    import uvloop

    with beats.open("r+b") as file, mmap.mmap(file.fileno(), _BEATS.size) as mapped:
        uvloop.run(_serve(directory, mapped, shows_stacks=shows_stacks))


# --- the state -------------------------------------------------------------------------------------------------------


def keys_of_slots() -> list[str]:
    """Return one order key for each slot."""
    found = dict[int, str]()
    number = 0
    while len(found) < 4_096:
        found.setdefault(lane_of_key_hash(hash_bytes(b"%d" % number)), str(number))
        number += 1
    return list(found.values())


class Sizes(argparse.Namespace):
    """How much there is of everything."""

    subjects: int
    ordered: int
    groups: int
    members: int
    dead: int
    delayed: int
    directory: Path | None
    only: str
    stacks: bool
    serve: list[Path] | None


async def fill(url: str, sizes: Sizes) -> None:
    """Make the subjects, the groups, the members of a broadcast, dead letters and delayed messages."""
    async with qmq.connect(url, durability="append", send_timeout=600) as client:
        for number in range(sizes.subjects):
            client.send_nowait(f"family{number % 10}.{number}", b"x")
            if number % 10_000 == 0:
                await client.drain()
        await client.flush()
        keys = keys_of_slots()
        for number in range(sizes.ordered):
            await client.send_many(f"ordered.{number}", [b"x"] * len(keys), order_keys=keys)
        for number in range(sizes.delayed):
            client.send_nowait(f"family{number % 10}.{number}", b"x", delay=86_400)
            if number % 10_000 == 0:
                await client.drain()
        await client.flush()
        followed = ("", "ordered.", "family1.")

        async def make(number: int) -> None:
            prefix = followed[number] if number < len(followed) else f"family{number % 10}.{number}"
            async with client.subscribe(*dict.fromkeys((prefix, _ALL if prefix else "")), group=f"group-{number:05}"):
                pass

        plain = sizes.groups - sizes.members - 1
        for first in range(0, plain, 100):
            await asyncio.gather(*map(make, range(first, min(first + 100, plain))))
        for _ in range(0, sizes.dead, 10_000):
            await client.send_many("dead.letters", [b"x"] * min(sizes.dead, 10_000))
        async with client.subscribe("dead.letters", group="dead") as consumer:
            left = sizes.dead
            while left:
                batch = await consumer.pull_batch(1_000, timeout=5)
                await batch.reject("no use")
                left -= len(batch)
        await client.send(_ALL, b"a message of all groups", key="of-all")
        for group in ("broadcast", "leaving"):
            for first in range(0, sizes.members // 2, 100):
                members = range(first, min(first + 100, sizes.members // 2))
                await asyncio.gather(*(_member(client, group, number) for number in members))


async def _member(client: qmq.Client, group: str, number: int) -> None:
    async with client.subscribe(
        "family2.2", group=group, mode="broadcast", consumer=f"member-{number:05}", start="first"
    ):
        pass


# --- the calls -------------------------------------------------------------------------------------------------------


async def _pages(do: Callable[..., Awaitable[dict[str, Any]]], action: str, first: object, **fields: object) -> int:
    """Ask for all pages of a list; return how many rows they have."""
    rows, after = 0, first
    while after is not None:
        page = await do(action, after=after, **fields)
        rows += len(page["rows"])
        after = page["after"]
    return rows


async def _subjects(client: qmq.Client, prefix: str) -> int:
    return len([subject async for subject in client.subjects(prefix)])


def _checkpoints(directory: Path) -> set[Path]:
    return set(directory.glob("checkpoint-*"))


async def _checkpoint(client: qmq.Client, pid: int, directory: Path) -> str:
    """Have the broker take a checkpoint, and wait until it is written."""
    await client.send("dead.letters", b"x")  # without a change there is none
    known = _checkpoints(directory)
    os.kill(pid, signal.SIGUSR1)
    for _ in range(600):
        await asyncio.sleep(0.1)
        if _checkpoints(directory) - known:
            return "written"
    return "not written"


async def _look_at_names(pid: int) -> None:
    os.kill(pid, signal.SIGUSR2)
    await asyncio.sleep(3)


async def _pull(client: qmq.Client) -> int:
    """Join the group of everything, pull, acknowledge and leave."""
    async with client.subscribe("", group="group-00000", consumer="worker") as consumer:
        batch = await consumer.pull_batch(10_000, timeout=5)
        await batch.ack()
        return len(batch)


async def _first(client: qmq.Client, prefix: str, **terms: Any) -> qmq.StoredMessage:
    async for message in client.find(prefix, limit=1, **terms):
        return message
    raise LookupError(prefix)


async def _trace(client: qmq.Client, prefix: str, **terms: Any) -> str:
    trace = await client.trace((await _first(client, prefix, **terms)).id)
    return f"{len(trace.groups)} groups"


async def _get(client: qmq.Client) -> str:
    return (await client.get((await _first(client, _ALL)).id)).subject


async def _find(client: qmq.Client, prefix: str, **terms: Any) -> int:
    return len([message async for message in client.find(prefix, stop_after=None, **terms)])


def _read_log(url: str) -> str:
    """[thread] Read the log as an archive does."""
    reader = LogReader(parse_url(url)[0])
    try:
        _, segments = reader.segments(0)
        batches = sum(1 for span in segments for _ in reader.batches(0, span.base, span.end))
        size = sum(len(reader.read(0, span.base, span.end - span.base)) for span in segments)
    finally:
        reader.close()
    return f"{len(segments)} segments, {batches} pages of batches, {size} bytes"


async def _peek(url: str, *arguments: str) -> str:
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", "peek", "--server", url]
    process = await asyncio.create_subprocess_exec(
        *command, "--timeout", "60", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    shown, _ = await process.communicate()
    return f"{len(shown.splitlines())} lines"


async def _skip_days(client: qmq.Client, pid: int) -> str:
    """Let the time of the broadcast's members, delayed messages and producers pass."""
    os.kill(pid, _SKIP_DAYS)
    for _ in range(60):
        await asyncio.sleep(1)
        try:
            await client.admin.groups("leaving")
        except qmq.UnknownGroup:
            return "all gone"
    return "not all gone"


async def _drop_segments(pid: int, directory: Path) -> str:
    """Have retention drop all segments but the last."""
    os.kill(pid, _KEEP_FOR_AN_HOUR)
    for _ in range(60):
        await asyncio.sleep(1)
        if _segments(directory) == 1:
            break
    return f"{_segments(directory)} segments left"


def _segments(directory: Path) -> int:
    return len(list(directory.glob("log-0/*.messages")))


async def _forget_subjects(client: qmq.Client, pid: int) -> str:
    """Let hours pass after which subjects without messages are forgotten."""
    for _ in range(3):
        os.kill(pid, _SKIP_HOURS)
        await asyncio.sleep(5)
    return f"{(await client.admin.info())[0].subjects} subjects left"


async def _come_and_go(url: str, consumers: int) -> int:
    """Have a client with many consumers come, and end without a word to them."""
    async with qmq.connect(url) as client:
        several = [client.subscribe(f"family{n % 10}.{n}", group=f"group-{n:05}") for n in range(10, 10 + consumers)]
        for first in range(0, consumers, 100):
            await asyncio.gather(*(one.__aenter__() for one in several[first : first + 100]))
    return consumers


def calls(client: qmq.Client, url: str, pid: int, directory: Path) -> dict[str, Call]:
    """Return the calls by name, in the order in which to make them: the last ones delete things."""
    link = client._brokers.links[0]
    do = AdminOfOne(link).do
    admin = client.admin

    def resend(**fields: object) -> Call:
        return lambda: admin.resend(**fields)  # type: ignore[arg-type]

    since = datetime.now(UTC) - timedelta(days=1)  # all that is stored
    return {
        "first checkpoint": lambda: _checkpoint(client, pid, directory),
        "look at names": lambda: _look_at_names(pid),
        "first info": admin.info,
        "first stats": admin.stats,
        "first groups": admin.groups,
        "first subjects ''": lambda: _subjects(client, ""),
        "subjects ''": lambda: _subjects(client, ""),
        "subjects 'ordered.'": lambda: _subjects(client, "ordered."),
        "subjects 'none.'": lambda: _subjects(client, "none."),
        "info": admin.info,
        "rights": admin.rights,
        "stats": admin.stats,
        "groups": admin.groups,
        "groups ''": lambda: admin.groups("group-00000"),
        "groups broadcast": lambda: admin.groups("broadcast"),
        "consumers broadcast": lambda: admin.consumers("broadcast"),
        "waiting ''": lambda: _pages(do, "waiting", 0, group="group-00000"),
        "get": lambda: _get(client),
        "trace, 10,000 groups": lambda: _trace(client, _ALL),
        "trace of a slot": lambda: _trace(client, "ordered.1"),
        "find a key": lambda: _find(client, "", key="of-all"),
        "find a text": lambda: _find(client, "", contains="message of all"),
        "find the newest": lambda: _find(client, "", newest=True, limit=1_000),
        "peek ''": lambda: _peek(url, "--group", "group-00000"),
        "peek broadcast": lambda: _peek(url, "--group", "broadcast"),
        "peek 'ordered.'": lambda: _peek(url, "ordered."),
        "read the log": lambda: asyncio.to_thread(_read_log, url),
        "dead_letters": lambda: _pages(do, "dead_letters", 0, group="dead"),
        "dead_letters, 1,000 a page": lambda: _pages(do, "dead_letters", 0, group="dead", limit=1_000),
        "set_group ''": lambda: admin.set_group("group-00000", max_attempts=7),
        "set_group broadcast": lambda: admin.set_group("broadcast", max_unacked=99),
        "set_group follows": lambda: admin.set_group("group-00001", follows=["ordered.", "family3."]),
        "set_group broadcast follows": lambda: admin.set_group("broadcast", follows=["family3.", "family2.2"]),
        "seek_group ''": lambda: admin.seek("group-00000", "new"),
        "seek_group broadcast": lambda: admin.seek("broadcast", since),
        "groups after a seek": admin.groups,
        "stats after a seek": admin.stats,
        "resend to a group": resend(prefix="ordered.1", group="group-00000", dry_run=True),
        "resend to all": resend(prefix="family1.", since=since, all_groups=True, dry_run=True),
        "redrive": lambda: admin.redrive("dead", all=True),
        "delete_dead": lambda: admin.delete_dead("dead", all=True),
        "roll": admin.roll,
        "pull of ''": lambda: _pull(client),
        "trace of a consumer": lambda: client.trace_consumer("worker"),
        "1,000 consumers come and go": lambda: _come_and_go(url, 1_000),
        "checkpoint": lambda: _checkpoint(client, pid, directory),
        "delete_group ''": lambda: admin.delete_group("group-00000"),
        "delete_group broadcast": lambda: admin.delete_group("broadcast"),
        "8 days pass": lambda: _skip_days(client, pid),
        "segments are dropped": lambda: _drop_segments(pid, directory),
        "subjects are forgotten": lambda: _forget_subjects(client, pid),
    }


async def measure(url: str, pid: int, directory: Path, beats: mmap.mmap, only: str) -> None:
    """Make all calls, and print what the broker's loop says of each."""
    print(f"{'call':28} {'s':>7} {'longest ms':>11} {'second':>8} {'over 20 ms':>11}  answer", flush=True)
    async with qmq.connect(url, admin_timeout=600) as client:
        await client.admin.rights()
        for name, call in calls(client, url, pid, directory).items():
            if not any(part in name for part in only.split(",")):
                continue
            await asyncio.sleep(0.3)  # what the call before has left to do
            _BEATS.pack_into(beats, 0, 0.0, 0.0, 0)
            began = time.perf_counter()
            try:
                answer = await call()
            except qmq.QmqError as error:
                answer = f"{type(error).__name__}: {error}"
            took = time.perf_counter() - began
            await asyncio.sleep(0.05)
            longest, second, over = _BEATS.unpack_from(beats, 0)
            shown = len(answer) if isinstance(answer, list) else answer
            print(f"{name:28} {took:7.3f} {longest:11.1f} {second:8.1f} {over:11}  {shown!s:.60}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, type=Path, metavar=("DIRECTORY", "BEATS"), help=argparse.SUPPRESS)
    parser.add_argument("--subjects", type=int, default=100_000)
    parser.add_argument("--ordered", type=int, default=200, help="subjects of 4,096 slots each")
    parser.add_argument("--groups", type=int, default=10_000, help="groups, the members of a broadcast among them")
    parser.add_argument("--members", type=int, default=2_000)
    parser.add_argument("--dead", type=int, default=20_000, help="dead letters")
    parser.add_argument("--delayed", type=int, default=20_000, help="delayed messages")
    parser.add_argument("--directory", type=Path, help="a directory that is kept, and whose copy is used again")
    parser.add_argument("--only", default="", help="calls with one of these in their names")
    parser.add_argument("--stacks", action="store_true", help="print where the time of long turns goes (that slows it)")
    sizes = parser.parse_args(namespace=Sizes())
    if sizes.serve is not None:
        serve(*sizes.serve, shows_stacks=sizes.stacks)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = sizes.directory or Path(temporary) / "data"
        is_new = not directory.exists()
        if is_new:
            with _broker(directory, Path(temporary) / "beats") as (url, *_):
                began = time.perf_counter()
                asyncio.run(fill(url, sizes))
                print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
        measured = directory
        if sizes.directory is not None:  # calls change what is kept
            measured = Path(temporary) / "copy"
            shutil.copytree(directory, measured, ignore=shutil.ignore_patterns("ping"))  # a socket
        with _broker(measured, Path(temporary) / "beats", shows_stacks=sizes.stacks) as (url, pid, beats):
            asyncio.run(measure(url, pid, measured, beats, sizes.only))
            most = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line)
            print(f"the broker took at most {int(most.split()[1]) >> 10:,} MiB")


@contextmanager
def _broker(directory: Path, beats: Path, *, shows_stacks: bool = False) -> Iterator[tuple[str, int, mmap.mmap]]:
    """A broker in a process of its own; gives its url, its process id, and the file of its beats."""
    beats.write_bytes(bytes(_BEATS.size))
    command = [sys.executable, "-m", "bench.admin_turns", "--serve", str(directory), str(beats)]
    command += ["--stacks"] if shows_stacks else []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        beats.open("r+b") as file,
        mmap.mmap(file.fileno(), _BEATS.size) as mapped,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid, mapped
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
