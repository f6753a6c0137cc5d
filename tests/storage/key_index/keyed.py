"""Stores with keys: what was stored under which key, and searches of it."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.format.build import RunContent, make_header
from qmq.format.hashing import key_hash
from qmq.storage.key_index.build import KeyIndexBuilder
from qmq.storage.key_index.search import KeySearch
from qmq.storage.partition import Partition
from qmq.storage.store import Store
from tests.storage.stores import Sender, Sent


def keyed_run(subject: str, keys: Sequence[str | None], body: bytes = b"body") -> RunContent:
    """Return a run with one message for each of *keys*."""
    return RunContent(subject, [body] * len(keys), [make_header(key, (), {}) for key in keys])


def send_keyed(sender: Sender, *keys: str | None, body: bytes = b"body", partition: int = 0) -> Sent:
    """Store one batch of one run, a message for each key."""
    sent = sender.stage(keyed_run("shop.order", keys, body), partition=partition)
    sender.write()
    return sent


def find_all(search: KeySearch) -> list[int]:
    """Return the positions that a search finds; check that it goes one way and ends."""
    found: list[int] = []
    try:
        while not (step := search.step()).is_last:
            found += step.positions
        return found + step.positions
    finally:
        search.close()


def find(part: Partition, key: str, start: int = 0, end: int | None = None, *, newest: bool = False) -> list[int]:
    """Return the positions of the batches that may have a key."""
    return find_all(part.key_index.search(key_hash(key), start, end, newest=newest))


def make(builder: KeyIndexBuilder) -> None:
    """Make an index at once."""
    try:
        while builder.step():
            pass
    finally:
        builder.close()


def make_all(store: Store) -> int:
    """Make all key indexes that are missing; return how many."""
    made = 0
    for number in store.all_partitions():
        part = store.partition(number)
        for span in part.key_index.missing(part.removable()):
            make(part.key_index.builder(span))
            assert part.key_index.built(span.base)
            made += 1
    return made


def cover(store: Store) -> None:
    """Cover with filters what has no index."""
    for number in store.all_partitions():
        while (work := store.partition(number).key_index.extension()) is not None:
            while work.step():
                pass
            work.close()
