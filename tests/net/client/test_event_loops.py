"""A client works in every event loop that programs give it: piece by piece, with other tasks, and with eager ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import pytest
import uvloop

import qmq
from tests.broker_process import BrokerProcess, broker_process

COUNT: Final = 60
TIMEOUT_S: Final = 60
#: Messages whose handler fails at the first attempt.
FAILING: Final = {b"3", b"4", b"50"}

#: Task factories of loops. Python 3.11 has no eager tasks: `make test-pythons` runs later ones.
FACTORIES: Final[dict[str, Any]] = {
    "usual": None,
    "own": lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options),
}
if hasattr(asyncio, "eager_task_factory"):
    FACTORIES["eager"] = asyncio.eager_task_factory


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("loops") / "data") as started:
        yield started


class Program:
    """Uses a client, step by step, each of which may be a run of the loop, or a task, of its own."""

    def __init__(self, url: str, subject: str) -> None:
        self.url = url
        self.subject = subject
        self.client: qmq.Client
        self.steps: list[Callable[[], Awaitable[None]]] = [
            self.connect, self.send, self.run, self.iterate, self.pull, self.close,
        ]  # fmt: skip

    async def connect(self) -> None:
        self.client = await qmq.connect(self.url)

    async def send(self) -> None:
        sends = [self.client.send(self.subject, b"%d" % number, key="k") for number in range(COUNT // 2)]
        await asyncio.gather(*sends)
        await self.client.send_many(self.subject, [b"%d" % number for number in range(COUNT // 2, COUNT - 1)])
        self.client.send_nowait(self.subject, b"%d" % (COUNT - 1))
        await self.client.flush()

    async def run(self) -> None:
        attempts: dict[bytes, list[int]] = {}

        async def handle(message: qmq.Message) -> None:
            attempts.setdefault(message.body, []).append(message.attempt)
            if len(attempts) == COUNT and sum(map(len, attempts.values())) == COUNT + len(FAILING):
                consumer.stop()
            if message.body in FAILING and message.attempt == 1:
                raise ValueError("not yet")
            await asyncio.sleep(0)

        group = f"{self.subject}.run"
        async with self.client.subscribe(self.subject, group=group, start="first", retry_delays=[0.01]) as consumer:
            async with asyncio.timeout(TIMEOUT_S):
                await consumer.run(handle, concurrency=4)
        assert attempts == {b"%d" % n: [1, 2] if b"%d" % n in FAILING else [1] for n in range(COUNT)}

    async def iterate(self) -> None:
        bodies = []
        async with self.client.subscribe(self.subject, group=f"{self.subject}.for", start="first") as consumer:
            async with asyncio.timeout(TIMEOUT_S):
                async for message in consumer:
                    async with message:
                        bodies.append(message.body)
                    if len(bodies) == COUNT:
                        break
                await consumer.flush()
        assert len(set(bodies)) == COUNT

    async def pull(self) -> None:
        async with self.client.subscribe(self.subject, group=f"{self.subject}.pull", start="first") as consumer:
            batch = await consumer.pull_batch(COUNT, COUNT, timeout=TIMEOUT_S)
            assert len(batch) == COUNT
            await batch.ack()
            waiting = asyncio.ensure_future(consumer.pull(1))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await self.client.send(self.subject, b"last")
            (message,) = await consumer.pull(1, timeout=TIMEOUT_S)
            await message.ack()

    async def close(self) -> None:
        await self.client.close()


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("pieces", ["one", "runs", "tasks"])
def test_a_client_works_in_it(broker: BrokerProcess, new_loop: Any, factory: str, pieces: str) -> None:
    """``runs``: as IPython awaits, and tests with one loop for all; ``tasks``: as the cells of a notebook."""
    loop = new_loop()
    loop.set_task_factory(FACTORIES[factory])
    program = Program(broker.url, f"loops.{new_loop.__module__.partition('.')[0]}.{factory}.{pieces}")

    async def all_steps() -> None:
        for step in program.steps:
            await (step() if pieces == "one" else asyncio.ensure_future(step()))  # type: ignore[arg-type]

    try:
        if pieces == "runs":
            for step in program.steps:
                loop.run_until_complete(step())
        else:
            loop.run_until_complete(all_steps())
    finally:
        loop.close()


@pytest.mark.parametrize("scope", ["function", "module", "session"])
def test_a_fixture_of_pytest_asyncio_has_a_client_for_its_scope(
    broker: BrokerProcess, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    monkeypatch.setenv("QMQ_SERVER", broker.url)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        f"""
        import pytest
        import pytest_asyncio

        import qmq

        pytestmark = pytest.mark.asyncio(loop_scope={scope!r})

        @pytest_asyncio.fixture(scope={scope!r}, loop_scope={scope!r})
        async def client():
            async with qmq.connect() as client:
                yield client

        @pytest.mark.parametrize("number", range(3))
        async def test_a_message_arrives(client, number):
            await client.send("scopes.{scope}", b"%d" % number)
            async with client.subscribe("scopes.{scope}", group="scopes.{scope}", start="first") as consumer:
                (message,) = await consumer.pull(1, timeout=60)
                assert message.body == b"%d" % number
                await message.ack()
        """
    )
    result = pytester.runpytest_subprocess(
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_asyncio.plugin",
        "-o",
        f"asyncio_default_fixture_loop_scope={scope}",
    )
    result.assert_outcomes(passed=3)
