"""Measure what a unique text costs a send: ``python -m bench.unique``.

Sends with and without one take turns, in one client, to a broker of its own; the last two columns are the medians of
the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import qmq
from qmq import Durability
from tests.broker_process import broker_process

_BODY: Final = b"x" * 100
_MANY: Final = 1_000
_AT_ONCE: Final = 100
KINDS: Final = ("plain", "key", "unique")
#: Sends so many messages of a kind, to a subject; the text is that of the round.
Way = Callable[[qmq.Client, str, str, str], Awaitable[int]]


async def _send(client: qmq.Client, kind: str, subject: str, text: str) -> int:
    for number in range(500):
        await client.send(subject, _BODY, **_options(kind, f"{text}-{number}-charge"))
    return 500


async def _at_once(client: qmq.Client, kind: str, subject: str, text: str) -> int:
    for turn in range(10):
        texts = (f"{text}-{turn}-{number}-charge" for number in range(_AT_ONCE))
        await asyncio.gather(*(client.send(subject, _BODY, **_options(kind, one)) for one in texts))
    return 10 * _AT_ONCE


async def _send_many(client: qmq.Client, kind: str, subject: str, text: str) -> int:
    for turn in range(15):
        texts = [f"{text}-{turn}-{number}-charge" for number in range(_MANY)]
        named: dict[str, Any] = {"plain": {}, "key": {"keys": texts}, "unique": {"unique": texts}}[kind]
        await client.send_many(subject, [_BODY] * _MANY, **named)
    return 15 * _MANY


async def _send_nowait(client: qmq.Client, kind: str, subject: str, text: str) -> int:
    for turn in range(15):
        for number in range(_MANY):
            client.send_nowait(subject, _BODY, **_options(kind, f"{text}-{turn}-{number}-charge"))
        await client.drain()
    await client.flush()
    return 15 * _MANY


def _options(kind: str, text: str) -> dict[str, Any]:
    return {} if kind == "plain" else {kind: text}


WAYS: Final[dict[str, Way]] = {
    "send, one after another": _send,
    f"send, {_AT_ONCE} at once": _at_once,
    f"send_many of {_MANY:,}": _send_many,
    "send_nowait": _send_nowait,
}


async def measure(rounds: int, durability: Durability) -> dict[tuple[str, str], list[float]]:
    """Return microseconds a message by way and kind, one for each round."""
    found = defaultdict[tuple[str, str], list[float]](list)
    with tempfile.TemporaryDirectory() as directory, broker_process(Path(directory)) as broker:
        async with qmq.connect(broker.url, durability=durability) as client:
            for number in range(rounds):
                for name, way in WAYS.items():
                    for kind in random.sample(KINDS, len(KINDS)):
                        begun = time.perf_counter()
                        count = await way(client, kind, f"bench.{kind}", f"{name}-{number}")
                        found[name, kind].append((time.perf_counter() - begun) / count * 1e6)
    return found


def main() -> None:
    """Print the table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--durability", choices=("append", "flush"), default="append")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.rounds, arguments.durability))
    print(f"{'100 B, microseconds a message':<30}{'plain':>8}{'key':>8}{'unique':>8}{'by plain':>10}{'by key':>8}")
    for name in WAYS:
        plain, key, unique = (found[name, kind] for kind in KINDS)
        by_plain, by_key = (
            statistics.median(one / other for one, other in zip(unique, others, strict=True)) for others in (plain, key)
        )
        medians = "".join(f"{statistics.median(one):>8.2f}" for one in (plain, key, unique))
        print(f"{name:<30}{medians}{by_plain:>10.2f}{by_key:>8.2f}")


if __name__ == "__main__":
    main()
