"""The senders of a soak, each a process: ``python -m tests.soak.senders asyncio|sync LEDGER URL NUMBER``.

A sender sends whole blocks of the plan at the rate that stands in the ledger's control file, until its stdin ends; then
it waits for every answer. What is not sent in time, while a broker is away, is not made up for.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import qmq
from tests.soak.ledger import FAILED, OPEN, UNKNOWN, Ledger, column
from tests.soak.plan import BLOCK, Planned
from tests.soak.samples import Meter

log = logging.getLogger("soak")

SENDERS: Final = ("asyncio", "sync")
#: Longer than any broker is away.
TIMEOUT_S: Final = 120.0
_TICK_S: Final = 0.01
#: Sends without an answer beyond which a sender waits: more than a broker that keeps up leaves open, and so few that
#: each kill reaches it, or its memory would go by the longest one.
_MOST_OPEN: Final = 2_000
#: What is due for longer than this is not sent any more.
_LATEST_S: Final = 0.25


def rates(ledger: Ledger) -> NDArray[np.float64]:
    """Messages a second, of each sender: written by the soak, read by the senders."""
    return column(ledger.directory, "rates", np.float64, len(SENDERS))


class Sender:
    """Blocks that are due, and what is noted of each message."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self.ledger = ledger
        self.plan = ledger.plan
        self.meter = Meter(ledger.directory, SENDERS[number])
        self.open = 0
        self._rate = rates(ledger)[number:]
        self._next, self._end = number * ledger.region, (number + 1) * ledger.region
        self._due = 0.0
        self._looked = time.monotonic()

    def blocks(self) -> list[range]:
        """What is to be sent now."""
        now, rate = time.monotonic(), float(self._rate[0])
        self._due += rate * (now - self._looked)
        self._looked = now
        most = rate * _LATEST_S + BLOCK
        if self._due > most:
            self.meter.count("sends held back", int(self._due - most))
            self._due = most
        blocks = []
        while self._due >= BLOCK and self._next < self._end and self.open < _MOST_OPEN:
            blocks.append(range(self._next, self._next + BLOCK))
            self._next += BLOCK
            self._due -= BLOCK
        return blocks

    def begin(self, numbers: Sequence[int]) -> list[Planned]:
        """They are about to be sent."""
        self.open += len(numbers)
        self.meter.count("sends begun", len(numbers))
        self.ledger.sent[numbers[0] : numbers[-1] + 1] = OPEN
        return [self.plan.message(number) for number in numbers]

    def stored(self, numbers: Sequence[int], receipts: Sequence[qmq.Receipt], began: float) -> None:
        """They were acknowledged."""
        took_us = (time.monotonic() - began) * 1e6
        for number, receipt in zip(numbers, receipts, strict=True):
            self.ledger.acknowledged(number, receipt.id, receipt.maybe_duplicate)
            self.meter.took(took_us)
        self.open -= len(numbers)
        self.meter.count("sends acknowledged", len(numbers))

    def failed(self, numbers: Sequence[int], error: qmq.SendFailed) -> None:
        """They failed. The rest of a block has no receipts then, so its outcome counts as unknown too."""
        log.warning("%d sends failed: %r", len(numbers), error)
        self.ledger.sent[numbers[0] : numbers[-1] + 1] = UNKNOWN
        for failure in error.failures:
            if failure.outcome == "refused" and failure.ticket is not None:
                self.ledger.sent[numbers[failure.ticket]] = FAILED
        self.open -= len(numbers)
        self.meter.count("sends failed", len(numbers))


def end_of_stdin() -> threading.Event:
    """Set once stdin has ended: a process without asyncio is to leave then."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


async def send_by_asyncio(ledger: Ledger, url: str, number: int) -> None:
    """Send one by one, all at once, and whole blocks by `send_many`."""
    sender = Sender(ledger, number)
    async with qmq.connect(url, send_timeout=TIMEOUT_S) as client:

        async def one(at: int) -> None:
            began, [planned] = time.monotonic(), sender.begin([at])
            try:
                receipt = await client.send(
                    planned.subject, planned.body, key=planned.key, tags=planned.tags, delay=planned.delay or None,
                    expires_in=planned.expire or None, durability=planned.durability,
                )  # fmt: skip
            except qmq.SendFailed as error:
                sender.failed([at], error)
            else:
                sender.stored([at], [receipt], began)

        async def many(block: range) -> None:
            began, planned = time.monotonic(), sender.begin(block)
            try:
                receipts = await client.send_many(
                    planned[0].subject, [one.body for one in planned], durability=planned[0].durability
                )
            except qmq.SendFailed as error:
                sender.failed(block, error)
            else:
                sender.stored(block, list(receipts), began)

        print("ready", flush=True)
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        tasks = set[asyncio.Task[None]]()
        while not ended.done():
            for block in sender.blocks():
                calls = [many(block)] if sender.plan.is_many(block.start // BLOCK) else [one(at) for at in block]
                for task in map(asyncio.create_task, calls):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            await asyncio.sleep(_TICK_S)
            for task in [task for task in tasks if task.done()]:
                task.result()
        await asyncio.gather(*tasks)


def send_by_sync(ledger: Ledger, url: str, number: int) -> None:
    """Send one after another, and whole blocks by `send_many`, in a program without asyncio."""
    sender = Sender(ledger, number)
    ended = end_of_stdin()
    with qmq.connect_sync(url, send_timeout=TIMEOUT_S) as client:
        print("ready", flush=True)
        while not ended.wait(_TICK_S):
            for block in sender.blocks():
                is_many = sender.plan.is_many(block.start // BLOCK)
                for numbers in [block] if is_many else [range(at, at + 1) for at in block]:
                    began, planned = time.monotonic(), sender.begin(numbers)
                    first = planned[0]
                    try:
                        if is_many:
                            bodies = [one.body for one in planned]
                            receipts = list(client.send_many(first.subject, bodies, durability=first.durability))
                        else:
                            receipts = [
                                client.send(
                                    first.subject, first.body, key=first.key, tags=first.tags,
                                    delay=first.delay or None, expires_in=first.expire or None,
                                    durability=first.durability,
                                )
                            ]  # fmt: skip
                    except qmq.SendFailed as error:
                        sender.failed(numbers, error)
                    else:
                        sender.stored(numbers, receipts, began)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    _, kind, directory, where, which = sys.argv
    if kind == "sync":
        send_by_sync(Ledger(Path(directory)), where, int(which))
    else:
        asyncio.run(send_by_asyncio(Ledger(Path(directory)), where, int(which)))
