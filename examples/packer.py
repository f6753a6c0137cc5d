"""One consumer of the demo, in a process of its own so that it can be killed. It reports on stdout.

    python -m examples.packer URL GROUP NAME RUN HANDLING_MS PREFIX...

A line is a JSON list: ["following"], ["began", key], ["failed", key], ["handled", subject, key, digest, attempt, is it
of this run], and ["confirmed", keys]: the broker has acknowledged these. The process ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from zlib import crc32

import qmq

#: The label printer jams for one invoice in so many at its first attempt; it comes again after JAM seconds.
JAMS_ONE_IN = 25
JAM = 0.5


def digest(body: bytes) -> str:
    """Return a digest that tells two bodies apart."""
    return hashlib.sha256(body).hexdigest()


def say(*what: object) -> None:
    print(json.dumps(what), flush=True)


class Packer:
    """What a consumer has handled of its run, and what of that the broker is known to have acknowledged."""

    def __init__(self, run: str, handling: float) -> None:
        self._run = run
        self._handling = handling
        self._handled: list[str] = []

    async def work(self, consumer: qmq.Consumer) -> None:
        """Handle messages one after another. If handling one raises, it comes again; otherwise it is acknowledged."""
        await consumer.run(self._pack)

    async def _pack(self, message: qmq.Message) -> None:
        key = message.key or ""
        say("began", key)
        await asyncio.sleep(self._handling)
        if message.attempt == 1 and crc32(key.encode()) % JAMS_ONE_IN == 0:
            say("failed", key)
            raise qmq.Retry("the label printer jams", after=JAM)
        this_run = message.properties.get("run") == self._run
        say("handled", message.subject, key, digest(message.body), message.attempt, this_run)
        if this_run:
            self._handled.append(key)

    async def confirm(self, consumer: qmq.Consumer) -> None:
        """Report regularly which acknowledgements the broker has for certain."""
        while True:
            await asyncio.sleep(0.05)
            # The last message is acknowledged only when its handler has returned.
            asked, self._handled = self._handled[:-1], self._handled[-1:]
            try:
                await consumer.flush()
            except qmq.Fenced:
                self._handled = []  # some of these or later ones are not acknowledged, and come again
                continue
            if asked:
                say("confirmed", asked)


async def run(url: str, group: str, name: str, number: str, handling: float, prefixes: list[str]) -> None:
    """Consume until stdin ends."""
    packer = Packer(number, handling)
    async with qmq.connect(url) as client, client.subscribe(*prefixes, group=group, consumer=name) as consumer:
        say("following")
        tasks = [asyncio.create_task(packer.work(consumer)), asyncio.create_task(packer.confirm(consumer))]
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def main() -> None:
    logging.getLogger("qmq").setLevel(logging.ERROR)
    url, group, name, number, handling_ms, *prefixes = sys.argv[1:]
    asyncio.run(run(url, group, name, number, float(handling_ms) / 1000, prefixes))


if __name__ == "__main__":
    main()
