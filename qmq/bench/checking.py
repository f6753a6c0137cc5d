"""Compare received messages with what was sent; workers that read everything back after a measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, zip_longest
from typing import Any, Final

from qmq import connect
from qmq.bench.raw import bodies_of
from qmq.bench.sending import SPRAYED_BODIES, Fields, fields_of, sprayed_subjects
from qmq.bench.values import BenchFailed
from qmq.bench.worker import Gate
from qmq.net.client.consumer.consumer import Consumer
from qmq.net.client.consumer.message import MessageBatch

#: If no message arrives for this time in seconds, some are missing.
SILENCE_S = 10.0
_AT_ONCE: Final = 50_000
_NOTHING: Final[Iterator[Any]] = iter(())


def missing(came: int, messages: int) -> BenchFailed:
    """Return the error for a wrong number of messages."""
    return BenchFailed(f"{came} messages were received, {messages} were sent")


def compare(found: Sequence[Any], sent: Sequence[Any], at: int, subjects: Sequence[str] = ()) -> None:
    """Raise BenchFailed unless the messages received, from message number *at* on, equal those sent."""
    if found != sent:
        pairs = enumerate(zip_longest(found, sent))
        place, (one, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        where = f", of {subjects[place]}," if subjects else ""
        raise BenchFailed(f"message {at + place}{where} is not what was sent: {one!r:.90} instead of {other!r:.90}")


async def check_end(consumer: Consumer) -> None:
    """Raise BenchFailed if there are more messages."""
    for message in await consumer.pull(1, timeout=0):
        raise BenchFailed(f"more was received than was sent: {message.body!r:.90} to {message.subject}")


class Cycle:
    """Compares bodies that were sent over and over, within a timed pass: a slice and a comparison for up to *most*.

    The subject is not compared: there is only one.
    """

    def __init__(self, bodies: list[bytes], most: int) -> None:
        self.came = 0
        self._length = len(bodies)
        self._sent = bodies * (most // len(bodies) + 2)

    def check(self, found: list[bytes]) -> None:
        """Raise BenchFailed unless *found* continues the cycle where the last call ended."""
        start = self.came % self._length
        compare(found, self._sent[start : start + len(found)], self.came)
        self.came += len(found)


class SentLedger:
    """The messages sent to each of many subjects, crossed off as they arrive: none may be lost, repeated, moved or
    changed.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.came = 0
        self._left: dict[str, Iterator[Any]] = {}

    def expect(self, subject: str, messages: int, contents: Sequence[Any]) -> None:
        """Add *messages* messages to *subject* with *contents*, over and over."""
        self._left[subject] = islice(cycle(contents), messages)
        self.messages += messages

    def check(self, subjects: list[str], found: list[Any]) -> None:
        """Raise BenchFailed unless each message is the next one of its subject."""
        left = self._left
        compare(found, [next(left.get(subject, _NOTHING), None) for subject in subjects], self.came, subjects)
        self.came += len(found)


# ---------------------------------------------------------------------------------------------------------------------
# Workers


async def cycles(gate: Gate, *, url: str, subject: str, size: int, count: int, messages: int) -> dict[str, Any]:
    """Check that *subject* has *messages* messages of *count* bodies over and over, and its prefix no others."""
    ledger = SentLedger()
    ledger.expect(subject, messages, bodies_of(count, size))
    return await _read_back(gate, url, _parent(subject), ledger)


async def fields(
    gate: Gate, *, url: str, subject: str, size: int, messages: int, fields: Fields, count: int = 1_000
) -> dict[str, Any]:
    """Check messages with *fields* of `sending.nowait` or `sending.tasks`: the first *count* of 1,000 over and over."""
    ledger = SentLedger()
    ledger.expect(subject, messages, fields_of(size, fields)[:count])
    return await _read_back(gate, url, _parent(subject), ledger, _fields)


async def producers(gate: Gate, *, url: str, prefix: str, size: int, count: int, sent: list[int]) -> dict[str, Any]:
    """Check what each client of `sending.producers` sent."""
    ledger = SentLedger()
    for number, messages in enumerate(sent):
        ledger.expect(f"{prefix}{number:06}", messages, bodies_of(count, size, number * count))
    return await _read_back(gate, url, prefix, ledger)


async def spread(gate: Gate, *, url: str, prefix: str, subjects: int, size: int, messages: int) -> dict[str, Any]:
    """Check what `raw.ingest_many` sent, the same number of messages to each subject."""
    ledger = SentLedger()
    for number in range(subjects):
        ledger.expect(f"{prefix}{number:06}", messages // subjects, bodies_of(1, size, number))
    return await _read_back(gate, url, prefix, ledger)


async def sprayed(
    gate: Gate, *, url: str, prefix: str, subjects: int, size: int, messages: int, seed: int
) -> dict[str, Any]:
    """Check what `sending.spray` sent."""
    bodies = bodies_of(SPRAYED_BODIES, size)
    sent: defaultdict[str, list[bytes]] = defaultdict(list)
    for part in sprayed_subjects(prefix, subjects, messages, seed):
        for subject, body in zip(part, cycle(bodies), strict=False):
            sent[subject].append(body)
    ledger = SentLedger()
    for subject, contents in sent.items():
        ledger.expect(subject, len(contents), contents)
    return await _read_back(gate, url, prefix, ledger)


def _parent(subject: str) -> str:
    return subject.rpartition(".")[0] + "."


def _bodies(batch: MessageBatch) -> list[bytes]:
    return batch.bodies


def _fields(batch: MessageBatch) -> list[tuple[bytes, str | None, dict[str, str]]]:
    return [(message.body, message.key, message.properties) for message in batch]


async def _read_back(
    gate: Gate, url: str, prefix: str, ledger: SentLedger, contents: Callable[[MessageBatch], list[Any]] = _bodies
) -> dict[str, Any]:
    async with connect(url) as client, client.subscribe(prefix, start="first") as consumer:
        gate()
        while ledger.came < ledger.messages:
            batch = await consumer.pull_batch(_AT_ONCE, timeout=SILENCE_S)
            if not len(batch):
                raise missing(ledger.came, ledger.messages)
            ledger.check(batch.subjects, contents(batch))
        await check_end(consumer)
    return {"messages": ledger.came}
