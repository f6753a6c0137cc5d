"""A consumer of a group as a process that may be killed or stopped at any time. It says on stdout what it does.

    python -m tests.faults.worker URL GROUP NAME SEED

A NAME of "-" leaves the id to the client. A line is a JSON list: ["following"], ["got", number], ["handled",
number], ["nacked", number], ["rejecting", number], ["fenced"], and ["confirmed", numbers]: the broker has the
acknowledgements of these. Numbers are those that bodies begin with. It leaves when its stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections.abc import AsyncIterator
from typing import Final

import qmq

PREFIXES: Final = ("order.", "stock")
REASON: Final = "rejected by the test"


def say(*what: object) -> None:
    print(json.dumps(what), flush=True)


class Worker:
    """Gives each message some disposition."""

    def __init__(self, consumer: qmq.Consumer, chance: random.Random) -> None:
        self._consumer = consumer
        self._chance = chance
        self._acked: list[int] = []

    async def work(self) -> None:
        """Without end."""
        messages = self._one_by_one() if self._chance.random() < 0.5 else self._many()
        async for message in messages:
            number = int(message.body[:12])
            say("got", number)
            await asyncio.sleep(self._chance.choice((0, 0, 0, 0.002)))
            try:
                await self._judge(message, number)
            except qmq.Fenced:
                say("fenced")

    async def _one_by_one(self) -> AsyncIterator[qmq.Message]:
        async for message in self._consumer:
            yield message

    async def _many(self) -> AsyncIterator[qmq.Message]:
        while True:
            for message in await self._consumer.pull(max_count=self._chance.choice((1, 20, 100))):
                yield message

    async def _judge(self, message: qmq.Message, number: int) -> None:
        luck = self._chance.random()
        if luck < 0.10:
            await message.nack(delay=self._chance.choice((None, 0.0, 0.3)))
            say("nacked", number)
        elif luck < 0.15:
            message.release()
        elif luck < 0.17:
            say("rejecting", number)
            await message.reject(REASON)
        else:
            say("handled", number)
            message.ack()
            self._acked.append(number)

    async def confirm(self) -> None:
        """Say again and again which acknowledgements the broker has for sure."""
        while True:
            await asyncio.sleep(self._chance.choice((0.01, 0.1)))
            asked, self._acked = self._acked, []
            try:
                await self._consumer.flush()
            except qmq.Fenced:
                say("fenced")
                self._acked = []  # some of them it has not, or of those since
                continue
            if asked:
                say("confirmed", asked)


async def run(url: str, group: str, name: str | None, seed: int) -> None:
    """Follow until stdin ends."""
    chance = random.Random(seed)
    logging.getLogger("qmq").setLevel(logging.ERROR)
    async with (
        qmq.connect(url) as client,
        client.subscribe(
            *PREFIXES, group=group, consumer=name, max_attempts=10_000, max_session_expiries=255, retry_delays=[0.05]
        ) as consumer,
    ):
        say("following")
        worker = Worker(consumer, chance)
        tasks = [asyncio.create_task(worker.work()), asyncio.create_task(worker.confirm())]
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


if __name__ == "__main__":
    _, where, which_group, who, number = sys.argv
    asyncio.run(run(where, which_group, None if who == "-" else who, int(number)))
