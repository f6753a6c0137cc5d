"""What the clients of a test know of what they sent, held against what the broker has in the end."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import qmq
from qmq import Message, Receipt, SendFailed

_NOISE: Final = random.Random(20_881).randbytes(1 << 20)
_NUMBER_DIGITS: Final = 12
_TIMEOUT_S: Final = 60
#: The smallest body: it says which message it is.
LEAST_BYTES: Final = _NUMBER_DIGITS


@dataclass(slots=True)
class Entry:
    """One message, from before it was handed to a client. ``state``: open, acknowledged, refused or unknown."""

    number: int
    subject: str
    size: int
    key: str | None
    state: str = "open"
    receipt: Receipt | None = None
    acknowledged_us: int = 0

    @property
    def body(self) -> bytes:
        """Its bytes, which no other message has."""
        start = self.number * 8_191 % (len(_NOISE) - self.size)
        return b"%0*d" % (_NUMBER_DIGITS, self.number) + _NOISE[start : start + self.size - _NUMBER_DIGITS]


@dataclass(slots=True)
class Tally:
    """What became of the messages of a test: how many are as they should be, and each that is not."""

    ok: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.duplicated or self.unexpected)

    def __str__(self) -> str:
        words = [f"{self.ok} ok"]
        for kind in ("lost", "duplicated", "unexpected"):
            found = getattr(self, kind)
            words.append(f"{len(found)} {kind}" + (f", the first: {found[:3]}" if found else ""))
        return "; ".join(words)


class Ledger:
    """Every message of a test. What is asserted is the clients' word: what was acknowledged to them."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._progress = asyncio.Event()

    def open(self, subject: str, size: int = 100, key: str | None = None) -> Entry:
        """A message that is about to be sent."""
        entry = Entry(len(self.entries), subject, max(size, LEAST_BYTES), key)
        self.entries.append(entry)
        return entry

    def acknowledged(self, entries: Iterable[Entry], receipts: Iterable[Receipt | None]) -> None:
        """The client was told that these are stored; a receipt is None where it got none."""
        now_us = time.time_ns() // 1_000
        for entry, receipt in zip(entries, receipts, strict=True):
            assert entry.state == "open", entry
            entry.state, entry.receipt, entry.acknowledged_us = "acknowledged", receipt, now_us
        self._progress.set()

    def failed(self, entries: Sequence[Entry], error: SendFailed) -> None:
        """The client was told that these failed; the failures name them by index."""
        assert len(error.failures) == len(entries), (error, len(entries))
        for failure in error.failures:
            entry = entries[failure.ticket]
            assert (failure.subject, failure.key) == (entry.subject, entry.key)
            entry.state = failure.outcome

    def count(self, state: str) -> int:
        """How many messages are in that state."""
        return sum(entry.state == state for entry in self.entries)

    async def acknowledgements(self, more: int) -> None:
        """Wait until so many more are acknowledged."""
        target = self.count("acknowledged") + more
        async with asyncio.timeout(_TIMEOUT_S):
            while self.count("acknowledged") < target:
                self._progress.clear()
                await self._progress.wait()

    def tally(self, messages: Iterable[Message], *, contiguous: bool = True) -> Tally:
        """Hold what a group got from the first to the last message against what was acknowledged.

        *contiguous*: sequences have no gaps either.
        """
        tally = Tally()
        times: Counter[int] = Counter()
        sequences: dict[str, list[int]] = defaultdict(list)
        ids: set[str] = set()
        for message in messages:
            try:
                entry = self.entry_of(message)
            except (AssertionError, ValueError) as error:
                tally.unexpected.append(str(error))
                continue
            times[entry.number] += 1
            sequences[message.subject].append(message.sequence)
            if message.id in ids:
                tally.unexpected.append(f"two messages have the id of {message}")
            ids.add(message.id)
            if entry.receipt is not None:
                receipt = entry.receipt
                if (message.id, message.sequence, message.stored_at_us) != (
                    receipt.id, receipt.sequence, receipt.stored_at_us,
                ):  # fmt: skip
                    tally.unexpected.append(f"{message} was told as {receipt}")
        for entry in self.entries:
            found = times[entry.number]
            if entry.state == "acknowledged" and not found:
                tally.lost.append(str(entry))
            elif found > 1:
                tally.duplicated.append(str(entry))
            elif entry.state == "refused" and found:
                tally.unexpected.append(f"{entry} is there")
            else:
                tally.ok += found
        for subject, found_sequences in sequences.items():
            for a, b in pairwise([-1, *found_sequences]):
                if a >= b or (contiguous and b != a + 1):
                    tally.unexpected.append(f"sequence {b} of {subject} comes after {a}")
        return tally

    def check(self, messages: Iterable[Message], *, contiguous: bool = True) -> None:
        """As ``tally``; fails when anything is not as it should be."""
        tally = self.tally(messages, contiguous=contiguous)
        assert tally.is_good, str(tally)

    def entry_of(self, message: Message) -> Entry:
        """The entry of a message that was received; everything in it is as it was sent."""
        body = message.body
        number = int(body[:_NUMBER_DIGITS])
        assert number < len(self.entries), f"nobody sent {message}"
        entry = self.entries[number]
        assert (message.subject, message.key) == (entry.subject, entry.key), (message, entry)
        assert body == entry.body, f"the body of {message} is not what was sent"
        return entry


def fresh_seed() -> int:
    """A seed, printed so that a failure shows it; QMQ_TEST_SEED gives one again."""
    seed = int(os.environ.get("QMQ_TEST_SEED") or random.randrange(1 << 32))
    print(f"QMQ_TEST_SEED={seed}")
    return seed


async def drain(where: str | qmq.Client, group: str, prefix: str = "") -> list[Message]:
    """Everything that a broker has under *prefix*, as a new group gets it from the first message on."""
    if isinstance(where, str):
        async with qmq.connect(where) as client:
            return await drain(client, group, prefix)
    messages: list[Message] = []
    total = sum([info.messages async for info in where.subjects(prefix)])
    async with where.subscribe(prefix, group=group, start="first") as consumer:
        while len(messages) < total:
            came = await consumer.pull(max_count=10_000, timeout=20)
            assert came, f"{len(messages)} of {total} messages came"
            for message in came:
                message.ack()
            messages += came
        assert await consumer.pull(timeout=0) == []
    return messages
