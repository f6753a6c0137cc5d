"""Measure how soon a token ends for work that is under way: ``python -m bench.token_ends --rounds 5``.

Broker, workers and commands are processes of their own. A worker waits in a pull, iterates over messages, sends what
is in its spool, or is ``qmq restore``. Its token ends as somebody edits the file, by ``qmq tokens revoke``, or because
it expires. Times count from the change of the file, or from the time of expiry: until the last of the worker's clients
has Unauthorized, and until another consumer has all that was in flight there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import uvloop

import qmq
from qmq.tokens import TokenEntry, change_tokens, hash_of, new_secret
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq_process

_WAYS: Final = ("edited", "revoked", "expired")
_WORKS: Final = ("pull", "stream", "spool", "restore")
#: Failed messages in a spool, and MiB in an archive: to send them takes longer than to end a token.
_SPOOLED: Final = 3_000
_ARCHIVED: Final = 200
#: Small frames, each synced, so that a restore lasts.
_SMALL: Final = {"max_frame_bytes": 1 << 16, "max_message_bytes": 1 << 14}
_EXPIRES_S: Final = 2
_TIMEOUT_S: Final = 100
_RIGHTS: Final[dict[str, Any]] = {"consume": ("shop.",), "group": ("billing",)}

#: Seconds until the worker has Unauthorized, and until others have what was in flight.
Times = tuple[float, float | None]


# --- the worker -------------------------------------------------------------------------------------------------------


def say(**values: object) -> None:
    """Tell the measuring process."""
    print(json.dumps(values), flush=True)


async def work(kind: str, url: str, clients: int) -> None:
    """Work until each client has Unauthorized, and say when it had."""
    all_ready = asyncio.Barrier(clients)

    async def one() -> None:
        try:
            async with (
                qmq.connect(url, failover_after=0.1) as client,
                client.subscribe("shop.", group="billing", max_unacked=2 * _SPOOLED) as consumer,
            ):
                if kind == "spool":
                    await _fill_spool(consumer)
                    while True:
                        await client.admin.rights()
                        await asyncio.sleep(0.01)
                held = await consumer.pull(1)
                if await all_ready.wait() == 0:
                    say(ready=len(held))
                if kind == "pull":
                    await consumer.pull(1)
                async for _ in consumer:
                    pass
        except qmq.Unauthorized:
            say(unauthorized_at=time.time())

    await asyncio.gather(*(one() for _ in range(clients)))


async def _fill_spool(consumer: qmq.Consumer) -> None:
    """Have messages fail while the broker is away."""
    messages: list[qmq.Message] = []
    while len(messages) < _SPOOLED:
        messages += await consumer.pull(_SPOOLED - len(messages))
    say(ready=len(messages))
    sys.stdin.readline()
    await asyncio.gather(*(message.nack(delay=0.0) for message in messages))
    say(spooled=len(messages))


# --- the measurement --------------------------------------------------------------------------------------------------


class Tokens:
    """The file of tokens of a broker: those of an administrator, of the worker, and of who takes over from it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokens.toml"
        self._secrets = {name: new_secret() for name in ("ops", "worker", "heir")}
        rights = {"ops": {"admin": True}, "worker": _RIGHTS, "heir": _RIGHTS}
        tokens = {name: TokenEntry(**rights[name], secrets=(hash_of(self._secrets[name]),)) for name in rights}
        self._worker = tokens["worker"]
        change_tokens(self.path, lambda _: tokens)

    def text(self, name: str) -> str:
        """Return NAME:SECRET."""
        return f"{name}:{self._secrets[name]}"

    async def begin(self, **changes: object) -> None:
        """Have the worker's token hold, once the broker has looked at the file."""
        entry = self._worker.model_copy(update=changes)
        change_tokens(self.path, lambda tokens: tokens | {"worker": entry})
        await asyncio.sleep(1.5)

    def end(self, how: str) -> float:
        """End the worker's token; return when it ends, in seconds since 1970."""
        time.sleep(random.random())  # the broker looks at the file now and then
        if how == "expired":
            at = (datetime.now(UTC) + timedelta(seconds=_EXPIRES_S)).replace(microsecond=0)
            change_tokens(
                self.path, lambda tokens: tokens | {"worker": tokens["worker"].model_copy(update={"expires": at})}
            )
            return at.timestamp()
        if how == "revoked":
            with qmq_process("tokens", "revoke", "worker", "--yes", "--tokens-file", str(self.path)) as process:
                assert process.wait(_TIMEOUT_S) == 0
        else:
            change_tokens(self.path, lambda tokens: {name: tokens[name] for name in tokens if name != "worker"})
        return self.path.stat().st_ctime_ns / 1e9


class Worker:
    """This program as a worker."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def hears(self, name: str) -> float:
        """Return the next value that it says, which must have this name."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker ended before it said {name}"
        return float(json.loads(line)[name])

    async def said(self, name: str) -> float:
        """Return the next value that it says."""
        return await asyncio.to_thread(self.hears, name)

    def go_on(self) -> None:
        """Tell it that the broker is away."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@contextmanager
def worker(kind: str, url: str, token: str, state: Path, clients: int) -> Iterator[Worker]:
    """Start a worker; it is gone at the end."""
    command = [sys.executable, "-m", "bench.token_ends", "--work", kind, "--url", url, "--clients", str(clients)]
    environment = {**os.environ, "QMQ_TOKEN": token, "QMQ_STATE_DIR": str(state)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


async def consuming(kind: str, how: str, broker: BrokerProcess, tokens: Tokens, state: Path, clients: int) -> Times:
    """End the token of clients that wait, each with a message in flight."""
    await tokens.begin()
    bodies = {b"%d" % number for number in range(clients)}
    with worker(kind, broker.url, tokens.text("worker"), state, clients) as started:
        async with qmq.connect(broker.url, token=tokens.text("ops")) as owner:
            await owner.admin.rights()
            for body in bodies:
                await owner.send("shop.a", body)
        await started.said("ready")
        async with (
            qmq.connect(broker.url, token=tokens.text("heir")) as client,
            client.subscribe("shop.", group="billing") as heir,
        ):
            others = asyncio.ensure_future(heir.pull(clients, min_count=clients))
            await asyncio.sleep(0.2)
            ended_at = await asyncio.to_thread(tokens.end, how)
            messages = await others
            had_at = time.time()
            assert {message.body for message in messages} == bodies
            for message in messages:
                await message.ack()
            times = [await started.said("unauthorized_at") for _ in bodies]
    return max(times) - ended_at, had_at - ended_at


async def spooling(how: str, broker: BrokerProcess, tokens: Tokens, state: Path) -> Times:
    """End the token of a client that sends what is in its spool."""
    await tokens.begin()
    with worker("spool", broker.url, tokens.text("worker"), state, 1) as started:
        async with qmq.connect(broker.url, token=tokens.text("ops")) as owner:
            await owner.send_many("shop.a", [b"%d" % number for number in range(_SPOOLED)])
        await started.said("ready")
        await asyncio.to_thread(broker.kill)
        started.go_on()
        await started.said("spooled")
        size = sum(path.stat().st_size for path in (state / "spool").iterdir())
        starting = asyncio.to_thread(broker.start)
        if how == "expired":  # its time comes soon after the start
            ended_at, _ = await asyncio.gather(asyncio.to_thread(tokens.end, how), starting)
        else:
            await starting
            ended_at = await asyncio.to_thread(tokens.end, how)
        unauthorized_at = await started.said("unauthorized_at")
    left = [path.stat().st_size for path in (state / "spool").glob("*.spool")]
    print(f"  {how}: {sum(left):,} of {size:,} bytes were left in the spool")
    os.environ["QMQ_STATE_DIR"] = str(state)
    async with (
        qmq.connect(broker.url, token=tokens.text("heir")) as client,
        client.subscribe("shop.", group="billing") as heir,
    ):
        found: list[qmq.Message] = []
        while len(found) < _SPOOLED:
            more = await heir.pull(_SPOOLED - len(found), timeout=_TIMEOUT_S)
            assert more
            for message in more:
                await message.ack()
            found += more
        assert len({message.body for message in found}) == _SPOOLED
    return unauthorized_at - ended_at, None


async def restoring(how: str, broker: BrokerProcess, tokens: Tokens, archive: Path) -> Times:
    """End the token of a restore."""
    await tokens.begin(admin=True)
    os.environ["QMQ_TOKEN"] = tokens.text("worker")
    arguments = ("restore", "--from", str(archive), "--again", "--yes", "--server", broker.url)
    with qmq_process(*arguments) as process:
        await asyncio.sleep(1.0)
        assert process.poll() is None
        ended_at = await asyncio.to_thread(tokens.end, how)
        assert process.stderr is not None
        told = await asyncio.to_thread(process.stderr.read)
        unauthorized_at = time.time()
        assert process.wait(_TIMEOUT_S) == 1
        assert b"worker" in told, told
    return unauthorized_at - ended_at, None


async def make_archive(scratch: Path) -> Path:
    """Return an archive of _ARCHIVED MiB."""
    with broker_process(scratch / "source", segment_bytes=64 << 20) as source:
        async with qmq.connect(source.url) as client:
            for _ in range(_ARCHIVED):
                await client.send_many("shop.a", [b"x" * 8_192] * 128)
    with qmq_process("archive", str(scratch / "source"), "--to", str(scratch / "archive")) as process:
        assert process.wait(_TIMEOUT_S) == 0
    return scratch / "archive"


async def measure(wanted: argparse.Namespace, scratch: Path) -> None:
    """Take all rounds, and print medians and the longest times."""
    found: dict[tuple[str, str], list[Times]] = {}
    archive = await make_archive(scratch) if "restore" in wanted.only else None
    for number in range(wanted.rounds):
        for kind in wanted.only:
            for how in _WAYS:
                home = scratch / f"{kind}-{how}-{number}"
                tokens = Tokens(home / "data")
                with broker_process(home / "data", **(_SMALL if kind == "restore" else {})) as broker:
                    if kind == "spool":
                        times = await spooling(how, broker, tokens, home / "state")
                    elif kind == "restore":
                        assert archive is not None
                        times = await restoring(how, broker, tokens, archive)
                    else:
                        times = await consuming(kind, how, broker, tokens, home / "state", wanted.clients)
                found.setdefault((kind, how), []).append(times)
                print(f"{kind} {how}: {times[0]:.3f} {times[1] or 0:.3f}", flush=True)
    print(f"{'seconds':18}{'Unauthorized':>24}{'others have it':>24}")
    for (kind, how), rounds in found.items():
        line = f"{kind + ', ' + how:18}"
        for values in zip(*rounds, strict=True):
            known = [value for value in values if value is not None]
            shown = f"{statistics.median(known):.2f} (at most {max(known):.2f})" if known else "-"
            line += f"{shown:>24}"
        print(line)


def main() -> None:
    """Run the measurement that the command line asks for, or be a worker of it."""
    parser = argparse.ArgumentParser(description="Measure how soon a token ends for work that is under way.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1, help="clients of a worker that pull or iterate")
    parser.add_argument("--only", nargs="+", choices=_WORKS, default=list(_WORKS), metavar="WORK")
    parser.add_argument("--work", choices=_WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.work:
        uvloop.run(work(wanted.work, wanted.url, wanted.clients))
        return
    with tempfile.TemporaryDirectory(prefix="qmq-bench-") as scratch:
        uvloop.run(measure(wanted, Path(scratch)))


if __name__ == "__main__":
    main()
