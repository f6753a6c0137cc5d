"""Shared by the format tests: contents of batches, stores that stamp them, and lies with checksums that fit."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from crc32c import crc32c
from hypothesis import strategies as st

from qmq.errors import BadBatch, MessageTooLarge
from qmq.format.batch import BatchLimits, Header, check_batch, header_crc_of, parse_header, runs_of, stamp
from qmq.format.build import NO_HEADER, RunContent, build_batch, make_header
from qmq.format.layout import BATCH_HEADER, BATCH_HEADER_SIZE, HEADER_CRC_OFFSET, RUN, RUN_SIZE
from qmq.format.pieces import Run
from qmq.format.source import NO_SOURCE, front_of, new_source, stamp_of, with_producer
from qmq.format.table import source_table

STORE = bytes.fromhex("7f0000015191")
SECRET = bytes(range(16))
PRODUCER = bytes(range(16, 32))
CREATED_US = 1_291_161_600_000_000
STORED_US = CREATED_US + 86_400_000_000
POSITION = 1 << 40
LIMITS = BatchLimits()
#: The source of the messages: from 10.0.0.7:51234, by shop-api.
SOURCE = new_source("shop-api")
SOURCE_STAMP = stamp_of(bytes((10, 0, 0, 7)), 51_234)
#: The bytes of the table of a piece of one run.
TABLE_SIZE = len(source_table(with_producer(SOURCE, PRODUCER)))


class Sent(NamedTuple):
    """One message as it is sent and as it must be read."""

    subject: str
    body: bytes
    keys: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()


Contents = Sequence[Sequence[Sent]]  # run by run

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
bodies = st.binary(max_size=24)


@st.composite
def contents(draw: st.DrawFn, max_runs: int = 5, max_count: int = 20) -> Contents:
    """Return one to *max_runs* runs of different subjects, with and without headers."""
    with_headers = draw(st.booleans())
    runs = []
    for number in range(draw(st.integers(1, max_runs))):
        subject = f"s.{number}"
        count = draw(st.one_of(st.just(1), st.integers(1, max_count)))
        if not with_headers or draw(st.booleans()):
            runs.append([Sent(subject, body) for body in draw(st.lists(bodies, min_size=count, max_size=count))])
            continue
        message = st.builds(
            Sent,
            st.just(subject),
            bodies,
            st.lists(keys, max_size=3, unique=True).map(tuple),
            st.lists(texts, max_size=3).map(tuple),
            st.dictionaries(texts, texts, max_size=2).map(lambda found: tuple(found.items())),
        )
        runs.append(draw(st.lists(message, min_size=count, max_size=count)))
    return runs


def plain(subject: str, count: int, size: int = 3) -> list[Sent]:
    """Return a run of messages without headers, each with another body."""
    return [Sent(subject, bytes([65 + index % 26]) * size) for index in range(count)]


def rich(subject: str, count: int) -> list[Sent]:
    """Return a run of messages with keys, tags and properties."""
    return [
        Sent(subject, b"body %d" % index, (f"key-{index}",), ("vip", "new")[: index % 3], (("price", str(index)),))
        for index in range(count)
    ]


def run_content(run: Sequence[Sent], bare: bool = True) -> RunContent:
    """Return a run for build_batch; with *bare*, headers are None when no message has one."""
    headers = [make_header(sent.keys, sent.tags, dict(sent.properties)) for sent in run]
    if bare and all(header is NO_HEADER for header in headers):
        return RunContent(run[0].subject, [sent.body for sent in run], None)
    return RunContent(run[0].subject, [sent.body for sent in run], headers)


def batch_of(runs: Contents, sequence: int = 7, bare: bool = True) -> memoryview:
    """Return a batch as a broker receives it: writable, not stamped."""
    parts = build_batch(
        [run_content(run, bare) for run in runs],
        created_at_us=CREATED_US,
        producer_id=PRODUCER,
        producer_sequence=sequence,
        source=SOURCE,
    )
    return memoryview(bytearray(b"".join(parts)))


def first_sequences_of(runs: Contents) -> list[int]:
    """Return the first sequences that `stored` gives, another one for each run."""
    return [1_000 * number + 5 for number in range(len(runs))]


def stored(runs: Contents, position: int = POSITION, secret: bytes = SECRET, bare: bool = True) -> memoryview:
    """Return a batch as it lies in a store."""
    view = batch_of(runs, bare=bare)
    firsts = first_sequences_of(runs)
    stamp(
        view,
        check_batch(view, LIMITS),
        position=position,
        stored_at_us=STORED_US,
        partition=3,
        store_id=STORE,
        secret=secret,
        first_sequences=firsts[0] if len(firsts) == 1 else np.array(firsts, np.uint64),
        source=SOURCE_STAMP,
    )
    return view


class Received(NamedTuple):
    """One message as it was read, with its position."""

    sent: Sent
    sequence: int
    id: str


def received(runs: Iterable[Run]) -> list[Received]:
    """Return every message of runs that were read."""
    found = []
    for run in runs:
        bodies = run.bodies()
        assert len(bodies) == run.count
        for index in range(run.count):
            header = run.header(index)
            assert bodies[index] == run.body(index)
            given, tags = tuple(header.get("k", ())), tuple(header.get("t", ()))
            sent = Sent(run.subject, bodies[index], given, tags, tuple(header.get("p", {}).items()))
            found.append(Received(sent, run.first_sequence + index, str(run.id(index))))
    return found


def expected(runs: Contents, position: int = POSITION) -> list[Received]:
    """Return the messages that reading `stored` must give."""
    found: list[Received] = []
    for run, first in zip(runs, first_sequences_of(runs), strict=True):
        for index, sent in enumerate(run):
            found.append(Received(sent, first + index, STORE.hex() + f"{3:04x}{position + len(found):016x}"))
    return found


def flips(view: memoryview) -> Iterable[tuple[int, memoryview]]:
    """Yield every copy of *view* with one bit flipped, and that bit's number."""
    copy = memoryview(bytearray(view))
    for bit in range(8 * len(view)):
        copy[bit >> 3] ^= 1 << (bit & 7)
        yield bit, copy
        copy[bit >> 3] ^= 1 << (bit & 7)


def refused(view: memoryview, limits: BatchLimits = LIMITS) -> str:
    """Return why check_batch refuses a batch; "" when it does not."""
    try:
        check_batch(view, limits)
    except (BadBatch, MessageTooLarge) as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Lies


def reseal(view: memoryview, run_crcs: bool = True) -> memoryview:
    """Make the checksums of runs, data and header fit the batch, as a hostile client would."""
    header = parse_header(view)
    data = view[header.data_start :]
    if run_crcs:
        for number in range(min(header.runs, (len(view) - BATCH_HEADER_SIZE) // RUN_SIZE)):
            place = BATCH_HEADER_SIZE + RUN_SIZE * number
            *_, offset, size, _, _ = RUN.unpack_from(view, place)
            struct.pack_into("<I", view, place + 20, crc32c(data[offset : offset + size]))
    struct.pack_into("<I", view, 80, crc32c(data))
    struct.pack_into("<I", view, HEADER_CRC_OFFSET, header_crc_of(view, header.data_start))
    return view


def set_header(view: memoryview, **fields: Any) -> None:
    """Overwrite fields of a batch's header."""
    BATCH_HEADER.pack_into(view, 0, *parse_header(view)._replace(**fields))


def set_run(view: memoryview, number: int, **fields: int) -> None:
    """Overwrite fields of a run record."""
    records = runs_of(view, parse_header(view))
    for name, value in fields.items():
        records[name][number] = value


def with_source(packed: bytes) -> bytes:
    """Return a small map with a source as its first field."""
    return bytes((packed[0] + 1,)) + front_of(NO_SOURCE) + packed[1:]


def table_with(fields: dict[str, object]) -> bytes:
    """Return a table with these fields behind the source."""
    return with_source(bytes(msgpack.packb(fields)))


def with_table(view: memoryview, table: bytes) -> memoryview:
    """Return the same batch with another table and checksums that fit."""
    header: Header = parse_header(view)
    start = BATCH_HEADER_SIZE + RUN_SIZE * header.runs
    changed = memoryview(bytearray(bytes(view[:start]) + table + bytes(view[header.data_start :])))
    set_header(changed, size=len(changed), table_size=len(table))
    return reseal(changed)
