"""A sender for storage tests: builds, stamps, stages and writes batches as the broker does, and remembers them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qmq.format.batch import BatchLimits, check_batch, entries_of, entry_of, numbers_by_run, parse_header, stamp
from qmq.format.build import RunContent, build_batch
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.identity import Identity, read_copies
from qmq.storage.store import Store
from qmq.storage.types import StoreOptions
from qmq.storage.verify.verify import verify

NOW_US = 1_700_000_000_000_000
PRODUCER = bytes(range(16))


def options(**changes: Any) -> StoreOptions:
    """Small segments, so that tests roll."""
    given: dict[str, Any] = {"segment_bytes": 64 << 10, "max_frame_bytes": 32 << 10, "reserve_bytes": 1 << 20}
    return StoreOptions(**(given | changes))


class Sent(NamedTuple):
    """A batch that was staged: where, what, its runs as (subject, first sequence, count), and their lanes."""

    partition: int
    position: int
    data: bytes
    runs: tuple[tuple[str, int, int], ...]
    lanes: tuple[int, ...]


class Sender:
    """Sends into a store. ``sent`` are the batches that are written, ``staged`` those that are not yet."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sent: list[Sent] = []
        self.staged: list[Sent] = []
        self._stamp_us = max(store.last_stored_at_us, NOW_US)
        self._sequence = 0

    @property
    def now_us(self) -> int:
        """When the last batch was stored."""
        return self._stamp_us

    def pass_time(self, us: int) -> None:
        """What is sent from now on is stored so much later."""
        self._stamp_us += us

    def stage(self, *runs: tuple[str, Sequence[bytes]] | RunContent, partition: int = 0) -> Sent:
        """Stage one batch of (subject, bodies) runs, or of runs with headers or lanes."""
        store = self.store
        contents = [run if isinstance(run, RunContent) else RunContent(run[0], list(run[1]), None) for run in runs]
        parts = build_batch(contents, created_at_us=NOW_US, producer_id=PRODUCER, producer_sequence=self._sequence)
        buffer = bytearray(b"".join(parts))
        self._sequence += sum(len(run[1]) for run in runs)
        view = memoryview(buffer)
        batch = check_batch(view, BatchLimits())
        position = store.partitions[partition].position_for(len(buffer))
        self._stamp_us = stamp_us = self._stamp_us + 1
        where: dict[str, Any] = {
            "position": position,
            "stored_at_us": stamp_us,
            "partition": partition,
            "store_id": store.store_id,
            "secret": store.secret,
        }
        if batch.run is not None:
            number, count = self._number(batch.names[batch.run[0]], batch.run[1]), batch.run[4]
            first = int(store.subjects.ends[number])
            stamp(view, batch, first_sequences=first, **where)
            store.partitions[partition].stage(position, buffer, entry_of(batch, position, stamp_us, number, first))
            store.subjects.ends[number] = first + count
            given, lanes = ((batch.names[batch.run[0]], first, count),), (batch.run[1],)
        else:
            assert batch.runs is not None
            by_run = numbers_by_run(batch.names, batch.runs, self._number)
            firsts = store.subjects.ends[by_run]
            stamp(view, batch, first_sequences=firsts, **where)
            store.partitions[partition].stage(
                position, buffer, entries_of(batch.runs, batch.header, position, stamp_us, by_run)
            )
            counts = batch.runs["count"].astype(np.uint64)
            store.subjects.ends[by_run] += counts
            names = [batch.names[place] for place in batch.runs["subject"].tolist()]
            given = tuple(zip(names, firsts.tolist(), counts.tolist(), strict=True))
            lanes = tuple(batch.runs["lane"].tolist())
        sent = Sent(partition, position, bytes(buffer), given, lanes)
        self.staged.append(sent)
        return sent

    def write(self) -> None:
        """Write and publish what is staged, in every partition."""
        for part in self.store.partitions:
            part.write()
            part.consumer_log.publish(part.message_log.end)
        self.sent += self.staged
        self.staged = []

    def take_back(self) -> None:
        """What the broker does when a write failed."""
        for sent in reversed(self.staged):
            for (name, _, count), lane in zip(sent.runs, sent.lanes, strict=True):
                number = self.store.subjects.number(name, lane)
                assert number is not None
                self.store.subjects.ends[number] -= np.uint64(count)
        self.staged = []

    def send(self, subject: str, *bodies: bytes, partition: int = 0) -> Sent:
        """Store one batch of one run."""
        sent = self.stage((subject, bodies), partition=partition)
        self.write()
        return sent

    def _number(self, name: str, lane: int) -> int:
        number = self.store.subjects.number(name, lane)
        return self.store.add_subject(name, lane) if number is None else number


def open_store(path: Path, disk: Disk | None = None, **changes: Any) -> Store:
    """Open a store with small segments."""
    return Store.open(path, options(**changes), disk if disk is not None else Disk(), NOW_US)


def checkpoint(store: Store, state: dict[str, bytes] | None = None) -> None:
    """Take a checkpoint at once."""
    made = store.begin_checkpoint(state if state is not None else {})
    made.write()
    store.finish_checkpoint(made)


def close_cleanly(store: Store) -> None:
    """A last checkpoint, then close."""
    checkpoint(store, store.state)
    store.close(clean=True)


def kill(store: Store) -> None:
    """Let go of a store as if its process had been killed: nothing more is written."""
    store.close(clean=False)


def positions(store: Store) -> list[tuple[int, int]]:
    """(partition, position) of every batch that can be read, in the order in which they were stored."""
    return [(partition, header.position) for partition, header in store.headers_since([])]


def check_stored(store: Store, batches: Sequence[Sent]) -> None:
    """All of *batches* are there, byte for byte, and nothing else is."""
    found = positions(store)
    assert sorted(found) == sorted((sent.partition, sent.position) for sent in batches)
    for sent in batches:
        assert bytes(store.partitions[sent.partition].message_log.view(sent.position, len(sent.data))) == sent.data
    expected = [
        (sent.partition, sent.position, store.subjects.number(name, lane), first, count)
        for sent in batches
        for (name, first, count), lane in zip(sent.runs, sent.lanes, strict=True)
    ]
    rows = []
    for partition in range(len(store.partitions)):
        row = store.partitions[partition].consumer_log.first_row
        while len(part := store.partitions[partition].consumer_log.rows(row, 1_000)):
            row += len(part)
            rows += [(partition, entry[1], entry[3], entry[0], entry[4]) for entry in part.tolist()]
    assert sorted(rows) == sorted(expected)
    check_counts(store, batches)


def check_counts(store: Store, batches: Sequence[Sent]) -> None:
    """Of each lane of a subject as many messages are counted as are in *batches*."""
    counts: Counter[tuple[str, int]] = Counter()
    for sent in batches:
        named = zip(sent.runs, sent.lanes, strict=True)
        counts.update({(name, lane): count for (name, _, count), lane in named})
    for number in range(store.subjects.count):
        name = store.subjects.name(number), store.subjects.lane(number)
        assert (
            store.subjects.message_count(number, int(store.subjects.firsts[number]), int(store.subjects.ends[number]))
            == counts[name]
        ), name


def header_at(store: Store, sent: Sent) -> Any:
    """The header that is stored where a batch was sent."""
    return parse_header(store.partitions[sent.partition].message_log.view(sent.position, 96))


def verified(path: Path) -> None:
    """A stopped store has no fault."""
    report = verify(path, Disk())
    assert report.is_good, "\n".join(map(str, report.findings))


def segment_files(path: Path, partition: int = 0) -> list[Path]:
    """The segments of a partition, ascending."""
    return sorted((path / f"log-{partition}").glob("*.messages"))


def file_of(path: Path, sent: Sent) -> tuple[Path, int]:
    """The segment in which a batch lies, and where in it."""
    found = [file for file in segment_files(path, sent.partition) if int(file.stem, 16) <= sent.position]
    return found[-1], sent.position - int(found[-1].stem, 16)


def damage(path: Path, sent: Sent, offset: int, data: bytes | None = None) -> None:
    """Overwrite bytes of a stored batch from *offset* in it on; without *data*, change one byte."""
    file, start = file_of(path, sent)
    with file.open("r+b") as opened:
        opened.seek(start + offset)
        new = data if data is not None else bytes([opened.read(1)[0] ^ 0x41])
        opened.seek(start + offset)
        opened.write(new)


def identity_of(path: Path) -> Identity:
    """What the first copy of the identity says."""
    copy = read_copies(Disk(), path)[0]
    assert copy.identity is not None
    return copy.identity
