"""Write a data directory of orders by the project's own batch builder, and count its contents."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qmq.format.batch import BatchLimits, check_batch, entries_of, stamp
from qmq.format.build import MessageHeader, RunContent, build_batch, make_header
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store
from qmq.storage.types import StoreOptions

#: When the first batch was stored; each is a millisecond later than the one before.
_START_US: Final = 1_764_547_200_000_000
_STEP_US: Final = 1_000
#: How many different batches there are, which are repeated.
_KINDS: Final = 64
_PRODUCER: Final = bytes(range(16))
_WRITE_BYTES: Final = 8 << 20
_CHECKPOINT_BYTES: Final = 256 << 20
_COUNTRIES: Final = ("DE", "FR", "IT", "PL", "SE", "AT", "NL", "ES")


class Amount(NamedTuple):
    """How much to write. Sizes in bytes; ``runs`` of ``batch`` messages, each of another subject."""

    messages: int = 10_000_000
    body_bytes: int = 200
    subjects: int = 50
    batch: int = 1_000
    runs: int = 10
    #: Whether messages have a key, a tag and two properties.
    headers: bool = False
    segment_bytes: int = 256 << 20


class Tally(NamedTuple):
    """The contents of a subject: messages, bytes of their bodies, and the sum of the bodies' crc32."""

    messages: int
    body_bytes: int
    crcs: int

    def __add__(self, other: object) -> Tally:
        assert isinstance(other, Tally)
        return Tally(self.messages + other.messages, self.body_bytes + other.body_bytes, self.crcs + other.crcs)


Contents = dict[str, Tally]


def total(contents: Contents) -> Tally:
    """Return the sum over all subjects."""
    return sum(contents.values(), Tally(0, 0, 0))


def write_orders(directory: Path, amount: Amount, seed: int = 1) -> Contents:
    """Write a new data directory of a stopped broker; return its contents, counted before they were written."""
    kinds = [_Kind(amount, number, random.Random(seed * 1_000 + number)) for number in range(_KINDS)]
    options = StoreOptions(segment_bytes=amount.segment_bytes, reserve_bytes=max(1 << 30, amount.segment_bytes))
    store = Store.open(directory, options, Disk(), _START_US)
    contents: Contents = {}
    written = since_checkpoint = 0
    try:
        for number in range(-(-amount.messages // amount.batch)):
            kind = kinds[number % _KINDS]
            written += _stage(store, kind.runs, number)
            if written >= _WRITE_BYTES:
                _write(store)
                since_checkpoint += written
                written = 0
            if since_checkpoint >= _CHECKPOINT_BYTES:
                _checkpoint(store)
                since_checkpoint = 0
            for subject, tally in kind.contents.items():
                contents[subject] = contents.get(subject, Tally(0, 0, 0)) + tally
        _write(store)
        store.partitions[0].seal()  # or a plain copy would copy the whole length that a segment may reach
        _checkpoint(store)
    except BaseException:
        store.close(clean=False)
        raise
    store.close(clean=True)
    return contents


class _Kind:
    """The runs of a batch, made once, and their contents."""

    def __init__(self, amount: Amount, number: int, dice: random.Random) -> None:
        each, rest = divmod(amount.batch, amount.runs)
        self.runs: list[RunContent] = []
        self.contents: Contents = {}
        for run in range(amount.runs):
            shop = (number + 7 * run) % amount.subjects
            subject = f"orders.{_COUNTRIES[shop % len(_COUNTRIES)].lower()}.shop-{shop}"
            bodies = list(_bodies(dice, each + (run < rest), amount.body_bytes))
            headers = None if not amount.headers else [_header(dice) for _ in bodies]
            self.runs.append(RunContent(subject, bodies, headers))
            tally = Tally(len(bodies), sum(map(len, bodies)), sum(map(zlib.crc32, bodies)))
            self.contents[subject] = self.contents.get(subject, Tally(0, 0, 0)) + tally


def _bodies(dice: random.Random, count: int, size: int) -> Iterator[bytes]:
    for _ in range(count):
        text = (
            f'{{"order":{dice.randrange(10**7)},"country":"{dice.choice(_COUNTRIES)}","cents":{dice.randrange(10**5)}'
        )
        yield f'{text},"note":"{dice.randbytes(size // 2).hex()}'.encode()[: size - 2] + b'"}'


def _header(dice: random.Random) -> MessageHeader:
    key = f"order-{dice.randrange(10**7)}"
    return make_header(key, ["paid"], {"country": dice.choice(_COUNTRIES), "channel": "web"})


def _stage(store: Store, runs: Sequence[RunContent], number: int) -> int:
    """Stage a batch as the broker does; return its bytes."""
    stamp_us = _START_US + _STEP_US * (number + 1)
    count = sum(len(run.bodies) for run in runs)
    parts = build_batch(runs, created_at_us=stamp_us, producer_id=_PRODUCER, producer_sequence=number * count)
    buffer = bytearray(b"".join(parts))
    view = memoryview(buffer)
    batch = check_batch(view, BatchLimits())
    part = store.partitions[0]
    position = part.position_for(len(buffer))
    assert batch.runs is not None  # a batch has at least one
    by_run = np.array([_subject(store, name) for name in batch.names])[batch.runs["subject"]]
    firsts = store.subjects.ends[by_run]
    stamp(
        view, batch, first_sequences=firsts, position=position, stored_at_us=stamp_us, partition=0,
        store_id=store.store_id, secret=store.secret,
    )  # fmt: skip
    part.stage(position, buffer, entries_of(batch.runs, batch.header, position, stamp_us, by_run))
    store.subjects.ends[by_run] += batch.runs["count"].astype(np.uint64)
    return len(buffer)


def _subject(store: Store, name: str) -> int:
    number = store.subjects.number(name)
    return store.add_subject(name) if number is None else number


def _write(store: Store) -> None:
    part = store.partitions[0]
    part.write()
    part.consumer_log.publish(part.message_log.end)


def _checkpoint(store: Store) -> None:
    made = store.begin_checkpoint(store.state)
    made.write()
    store.finish_checkpoint(made)
