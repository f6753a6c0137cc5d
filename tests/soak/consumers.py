"""The consumers of a soak, each a process: ``python -m tests.soak.consumers KIND LEDGER URL NAME SEED``.

They note in the ledger what they are handed, handle and are confirmed. One leaves when its stdin ends, and is cancelled
by SIGTERM, wherever it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import qmq
from tests.soak.ledger import Ledger
from tests.soak.plan import NAMED, Group
from tests.soak.samples import Meter
from tests.soak.senders import end_of_stdin

CONFIRM_S: Final = 0.3
_LAST_FLUSH_S: Final = 60.0
REJECTED: Final = "rejected by the soak"


class Hands:
    """What one consumer has in hand, and notes of it."""

    def __init__(self, ledger: Ledger, row: str, meter: Meter) -> None:
        self._ledger = ledger
        self._row = ledger.row(row)
        self._meter = meter
        self._acked: list[int] = []

    def got(self, message: qmq.Message) -> int:
        """It was handed this message; returns its number."""
        now_us = time.time_ns() // 1_000
        self._meter.count("got")
        if message.attempt == 1:
            self._meter.took(now_us - message.stored_at_us)
        return self._ledger.got(self._row, message, now_us)

    def handled(self, number: int) -> None:
        """It is about to acknowledge it."""
        self._row.handled[number] = 1
        self._meter.count("handled")
        self._acked.append(number)

    def begin_confirming(self) -> list[int]:
        """The numbers that a flush that is begun now will confirm."""
        asked, self._acked = self._acked, []
        return asked

    def confirmed(self, asked: list[int]) -> None:
        """The flush has returned."""
        if asked:
            self._ledger.confirmed(self._row, asked)
            self._meter.count("confirmed", len(asked))

    def fenced(self) -> None:
        """The flush was refused: which of the acknowledgements until now counted is not known."""
        self._acked.clear()
        self._meter.count("fenced")

    async def flush(self, consumer: qmq.Consumer) -> None:
        """Note what is confirmed by now."""
        asked = self.begin_confirming()
        try:
            await consumer.flush()
        except qmq.Fenced:
            self.fenced()
        else:
            self.confirmed(asked)

    async def flush_on(self, consumer: qmq.Consumer) -> None:
        """Flush again and again."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            await self.flush(consumer)


class Program:
    """One consumer process."""

    def __init__(self, ledger: Ledger, url: str, name: str, chance: random.Random) -> None:
        self.ledger, self.url, self.chance = ledger, url, chance
        self.meter = Meter(ledger.directory, name)

    async def stream(self, client: qmq.Client, ended: asyncio.Future[Any]) -> None:
        """Handle message after message, as they come; one of two in a group that is well."""
        await self._take_part(client, NAMED["billing"], self._one_by_one, ended)

    async def pulls(self, client: qmq.Client, ended: asyncio.Future[Any]) -> None:
        """The same, by single pulls."""
        await self._take_part(client, NAMED["billing"], self._by_pulls, ended)

    async def failing(self, client: qmq.Client, ended: asyncio.Future[Any]) -> None:
        """Handle messages of which a share fails, in each way in which it may."""
        settings: dict[str, Any] = {"max_attempts": 4, "retry_delays": [0.2, 0.5, 1.0]}
        await self._take_part(client, NAMED["shipping"], self._with_failures, ended, **settings)

    async def batches(self, client: qmq.Client, ended: asyncio.Future[Any]) -> None:
        """Take everything there is by whole batches."""
        await self._take_part(client, NAMED["copy"], self._by_batches, ended)

    async def broadcast(self, client: qmq.Client, ended: asyncio.Future[Any]) -> None:
        """Two members of a broadcast."""
        async with asyncio.TaskGroup() as members:
            for row in NAMED["news"].rows:
                options: dict[str, Any] = {"mode": "broadcast", "consumer": row.partition("@")[2], "row": row}
                members.create_task(self._take_part(client, NAMED["news"], self._one_by_one, ended, **options))
            await asyncio.wait([ended])

    async def slow(self, client: qmq.Client, ended: asyncio.Future[Any]) -> None:
        """Handle messages slowly, and leave and come again, in each way in which a program may leave."""
        is_first = True
        while not ended.done():
            stay = asyncio.create_task(
                self._take_part(
                    client, NAMED["audit"], self._slowly, ended, quiet=not is_first, max_session_expiries=255
                )
            )
            is_first = False
            seconds = self.chance.uniform(2.0, 12.0)
            try:
                if self.chance.random() < 0.5:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await stay
                else:
                    await asyncio.wait([stay, ended], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        await stay
            finally:
                stay.cancel()
                await asyncio.wait([stay])
            if stay.cancelled():
                self.meter.count("cancelled handlers")
            elif error := stay.exception():
                raise error

    def sync(self) -> None:
        """Handle messages in a program without asyncio."""
        group, ended = NAMED["mail"], end_of_stdin()
        hands = Hands(self.ledger, group.rows[0], self.meter)
        with (
            qmq.connect_sync(self.url) as client,
            client.subscribe(*group.prefixes, group=group.name, tags=group.tags, start="first") as consumer,
        ):
            print("ready", flush=True)
            flushed = time.monotonic()
            while not ended.is_set():
                for message in consumer.pull(max_count=100, timeout=0.2):
                    with message:
                        hands.handled(hands.got(message))
                if time.monotonic() > flushed + CONFIRM_S:
                    asked = hands.begin_confirming()
                    try:
                        consumer.flush()
                        hands.confirmed(asked)
                    except qmq.Fenced:
                        hands.fenced()
                    flushed = time.monotonic()

    async def _take_part(
        self,
        client: qmq.Client,
        group: Group,
        work: Callable[[qmq.Consumer, Hands], Coroutine[Any, Any, None]],
        ended: asyncio.Future[Any],
        *,
        row: str | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        """Work as a consumer of *group* until *ended*; then wait for what is confirmed, and leave."""
        hands = Hands(self.ledger, row or group.rows[0], self.meter)
        async with client.subscribe(*group.prefixes, group=group.name, start="first", **options) as consumer:
            if not quiet:
                print("ready", flush=True)
            tasks = [asyncio.create_task(work(consumer, hands)), asyncio.create_task(hands.flush_on(consumer))]
            try:
                await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            async with asyncio.timeout(_LAST_FLUSH_S):
                await hands.flush(consumer)

    # --- ways to work ------------------------------------------------------------------------------------------------

    async def _one_by_one(self, consumer: qmq.Consumer, hands: Hands) -> None:
        async for message in consumer:
            async with message:
                hands.handled(hands.got(message))

    async def _by_pulls(self, consumer: qmq.Consumer, hands: Hands) -> None:
        while True:
            for message in await consumer.pull(max_count=self.chance.choice((1, 20, 200)), timeout=1.0):
                hands.handled(hands.got(message))
                message.ack()

    async def _by_batches(self, consumer: qmq.Consumer, hands: Hands) -> None:
        while True:
            batch = await consumer.pull_batch(max_count=2_000, timeout=1.0)
            for message in batch:
                hands.handled(hands.got(message))
            batch.ack()
            await asyncio.sleep(0.02)  # so that batches are not of one message

    async def _slowly(self, consumer: qmq.Consumer, hands: Hands) -> None:
        while True:
            messages = await consumer.pull(max_count=200, timeout=1.0)
            for message in messages:
                hands.got(message)
            await asyncio.sleep(self.chance.uniform(0.05, 0.5))
            for message in messages:
                hands.handled(self.ledger.plan.number_of(message.body))
                message.ack()

    async def _with_failures(self, consumer: qmq.Consumer, hands: Hands) -> None:
        while True:
            messages = await consumer.pull(max_count=200, timeout=1.0)  # its dispositions wait for the disk
            async with asyncio.TaskGroup() as handlers:
                for message in messages:
                    handlers.create_task(self._handle(message, hands.got(message), hands))

    async def _handle(self, message: qmq.Message, number: int, hands: Hands) -> None:
        try:
            await self._judge(message, number, hands)
        except qmq.Fenced:
            self.meter.count("fenced")

    async def _judge(self, message: qmq.Message, number: int, hands: Hands) -> None:
        luck = self.chance.random()
        if self.ledger.plan.is_poison(number):
            luck *= 0.09
        if luck < 0.03:
            self.meter.count("nacked")
            await message.nack(delay=self.chance.choice((None, 0.0, 0.3)), reason="failed by the soak")
        elif luck < 0.06:
            self.meter.count("raised")
            with suppress(RuntimeError):
                async with message:
                    raise RuntimeError("raised by the soak")
        elif luck < 0.07:
            self.meter.count("asked for a retry")
            with suppress(qmq.Retry):
                async with message:
                    raise qmq.Retry(after=0.1)
        elif luck < 0.075:
            self.meter.count("rejected")
            await message.reject(REJECTED)
        elif luck < 0.08:
            self.meter.count("released")
            message.release()
        else:
            hands.handled(number)
            message.ack()


async def run(program: Program, kind: str) -> None:
    """Run a program of that kind until stdin ends or SIGTERM cancels it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    threading.Thread(target=_wait_for_end, args=(ended, asyncio.get_running_loop()), daemon=True).start()
    async with _reached(program.url) as client:
        await getattr(program, kind)(client, ended)


@asynccontextmanager
async def _reached(url: str) -> AsyncIterator[qmq.Client]:
    """A connected client, also where it comes while the only broker is away."""
    async with AsyncExitStack() as stack:
        client: qmq.Client | None = None
        while client is None:
            try:
                client = await stack.enter_async_context(qmq.connect(url))
            except qmq.ConnectionLost:
                await asyncio.sleep(0.2)
        yield client


def _wait_for_end(ended: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    sys.stdin.read()
    with suppress(RuntimeError):  # the loop has gone
        loop.call_soon_threadsafe(ended.set_result, None)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    _, what, directory, where, who, seed = sys.argv
    if what == "failing":
        logging.getLogger("qmq").setLevel(logging.ERROR)  # its failures are meant
    the_program = Program(Ledger(Path(directory)), where, who, random.Random(int(seed)))
    if what == "sync":
        the_program.sync()
    else:
        with suppress(asyncio.CancelledError):
            asyncio.run(run(the_program, what))
