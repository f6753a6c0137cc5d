"""Who lives keeps what it holds, who is silent does not: a real broker with a short session timeout, and real
processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process

#: Long enough for a loaded machine to get six heartbeats through, mostly.
SESSION_TIMEOUT_S: Final = 4.0
TIMEOUT_S: Final = 60

#: Takes one message, says so, does what it is told, acknowledges, and says what came of that.
WORKER: Final = """
import asyncio, ctypes, sys, time, qmq

async def main(url, name, work):
    async with qmq.connect(url) as client, client.subscribe("a", group="g", consumer=name) as consumer:
        while True:
            (message,) = await consumer.pull(1)
            print("took", message.body.decode(), message.attempt, flush=True)
            if work == "block":
                time.sleep(float(sys.stdin.readline()))
            elif work == "hold":  # a call into C that does not release the interpreter
                ctypes.PyDLL(None).usleep(int(1e6 * float(sys.stdin.readline())))
            else:
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            message.ack()
            try:
                await consumer.flush()
                print("confirmed", flush=True)
            except qmq.Fenced:
                print("fenced", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Worker:
    """A process of its own."""

    def __init__(self, url: str, name: str, work: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, url, name, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._out: IO[str] = self._process.stdout
        self._in: IO[str] = self._process.stdin

    async def says(self) -> str:
        """Its next line."""
        async with asyncio.timeout(TIMEOUT_S):
            return (await asyncio.to_thread(self._out.readline)).strip()

    def tell(self, line: str) -> None:
        self._in.write(line + "\n")
        self._in.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        self._in.close()
        self._out.close()


@contextmanager
def worker(url: str, name: str, work: str = "wait") -> Iterator[Worker]:
    made = Worker(url, name, work)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path / "data", session_timeout_ms=int(SESSION_TIMEOUT_S * 1_000)) as started:
        yield started


async def consumers(client: qmq.Client) -> dict[str, tuple[bool, int, float]]:
    """By name: online, held, stalled seconds."""
    return {row.name: (row.online, row.in_flight, row.stalled) for row in await client.admin.consumers("g")}


async def until_offline(client: qmq.Client, name: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await consumers(client))[name][0]:  # noqa: ASYNC110  # the broker tells who asks
            await asyncio.sleep(0.1)


async def test_a_killed_consumer_s_message_comes_at_once(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data", session_timeout_ms=3_600_000, reconnect_timeout_ms=0) as broker:
        async with qmq.connect(broker.url) as client:
            await client.send("a", b"deadly")
            with worker(broker.url, "killed") as killed:
                assert await killed.says() == "took deadly 1"
                killed.signal(signal.SIGKILL)
                async with client.subscribe("a", group="g", consumer="other") as other:
                    (message,) = await other.pull(1, timeout=TIMEOUT_S)
                    assert (message.body, message.attempt) == (b"deadly", 1)


async def test_a_stopped_consumer_s_message_stays_with_it(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data", session_timeout_ms=3_600_000, reconnect_timeout_ms=0) as broker:
        async with qmq.connect(broker.url) as client:
            await client.send("a", b"slow")
            with worker(broker.url, "stopped") as stopped:
                assert await stopped.says() == "took slow 1"
                stopped.signal(signal.SIGSTOP)
                async with client.subscribe("a", group="g", consumer="other") as other:
                    assert await other.pull(1, timeout=1.0) == []
                stopped.signal(signal.SIGCONT)
                stopped.tell("")
                assert await stopped.says() == "confirmed"


async def test_a_handler_that_blocks_the_loop_keeps_its_message(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send("a", b"long work")
        with worker(broker.url, "blocked", "block") as blocked:
            assert await blocked.says() == "took long work 1"
            blocked.tell(str(1.5 * SESSION_TIMEOUT_S))
            stalled = 0.0
            async with client.subscribe("a", group="g", consumer="other") as other:
                ended = asyncio.create_task(blocked.says())
                while not ended.done():
                    assert await other.pull(1, timeout=0.2) == [], "somebody lives who holds it"
                    online, _, now_stalled = (await consumers(client))["blocked"]
                    stalled = max(stalled, now_stalled)
                    assert online
                assert await ended == "confirmed"
                assert stalled > SESSION_TIMEOUT_S, "it says for how long its loop has not turned"
                assert await other.pull(1, timeout=0.2) == []


async def test_a_handler_that_blocks_the_loop_keeps_its_message_while_the_broker_is_started_again(
    broker: BrokerProcess,
) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send("a", b"long work")
        with worker(broker.url, "blocked", "block") as blocked:
            assert await blocked.says() == "took long work 1"
            blocked.tell(str(1.5 * SESSION_TIMEOUT_S))
            ended = asyncio.create_task(blocked.says())
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            async with client.subscribe("a", group="g", consumer="other") as other:
                while not ended.done():
                    assert await other.pull(1, timeout=0.2) == [], "a start takes no live consumer for dead"
                assert await ended == "confirmed"


async def test_one_that_was_stopped_for_longer_than_the_session_timeout_is_refused_and_goes_on(
    broker: BrokerProcess,
) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send("a", b"1")
        with worker(broker.url, "stopped") as stopped:
            assert await stopped.says() == "took 1 1"
            stopped.signal(signal.SIGSTOP)
            await until_offline(client, "stopped")
            async with client.subscribe("a", group="g", consumer="other") as other:
                (message,) = await other.pull(1, timeout=TIMEOUT_S)
                assert (message.body, message.attempt) == (b"1", 1), "an expired session is no attempt"
                stopped.tell("acknowledge it")
                stopped.signal(signal.SIGCONT)
                assert await stopped.says() == "fenced"
                message.ack()
                await other.flush()
            await client.send("a", b"2")
            assert await stopped.says() == "took 2 1", "after a blip it consumes again"
            stopped.tell("acknowledge it")
            assert await stopped.says() == "confirmed"
            assert (await consumers(client))["stopped"][:2] == (True, 0)


async def test_a_call_that_holds_the_interpreter_for_longer_than_the_session_timeout_expires(
    broker: BrokerProcess,
) -> None:
    """Not even the thread of the heartbeats runs meanwhile; the docs say so."""
    async with qmq.connect(broker.url) as client:
        await client.send("a", b"1")
        with worker(broker.url, "in_flight", "hold") as in_flight:
            assert await in_flight.says() == "took 1 1"
            in_flight.tell(str(2 * SESSION_TIMEOUT_S))
            await until_offline(client, "in_flight")
            async with client.subscribe("a", group="g", consumer="other") as other:
                (message,) = await other.pull(1, timeout=TIMEOUT_S)
                assert message.body == b"1"
                assert await in_flight.says() == "fenced"
                message.ack()
                await other.flush()


async def test_another_process_under_the_same_id_takes_over_at_once(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send("a", b"1")
        with worker(broker.url, "fixed") as first:
            assert await first.says() == "took 1 1"
            with worker(broker.url, "idle"), worker(broker.url, "fixed") as second:
                assert await second.says() == "took 1 1", "it holds what the one before held"
                first.tell("acknowledge it")
                assert await first.says() == "fenced"
                second.tell("acknowledge it")
                assert await second.says() == "confirmed"


async def test_a_client_out_of_touch_stops_its_handler_and_goes_on_later(broker: BrokerProcess) -> None:
    """The broker stands still: nobody hears of anybody."""
    async with qmq.connect(broker.url) as client, client.subscribe("a", group="g", consumer="c") as consumer:
        await client.send("a", b"1")
        began, stopped, came = asyncio.Event(), asyncio.Event(), asyncio.Queue[bytes]()

        async def work() -> None:
            async for message in consumer:
                async with message:
                    if not began.is_set():
                        began.set()
                        try:
                            await asyncio.sleep(1_000)
                        finally:
                            stopped.set()
                    came.put_nowait(message.body)

        working = asyncio.create_task(work())
        await began.wait()
        broker.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            await stopped.wait()
        broker.send_signal(signal.SIGCONT)
        async with asyncio.timeout(TIMEOUT_S):
            assert await came.get() == b"1"
            await client.send("a", b"2")
            assert await came.get() == b"2"
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
