"""Check the heads of many batches at once, and return headers, runs and subjects as columns; messages are not read.

A **window** is a part of a segment; ``offsets`` are the beginnings of batches in it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES
from qmq.format.layout import (
    BATCH_HEADER_DTYPE,
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_PREFIX_SIZE,
    BATCH_VERSION,
    KNOWN_FLAGS,
    RUN_DTYPE,
    RUN_SIZE,
)
from qmq.format.table import names_of

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

#: The reason for bytes that are no batch at all.
NO_BATCH: Final = "no batch begins here"

COLUMN_BYTES_BY_FLAGS: Final = np.array(COLUMN_BYTES, np.int64)


class Heads(NamedTuple):
    """The batches of a window whose heads are good. ``headers`` is BATCH_HEADER_DTYPE[n]; ``runs`` RUN_DTYPE[m]."""

    #: The beginning of each batch in the window, and of its data in the batch: int64[n].
    offsets: Ints
    data_starts: Ints
    headers: Array
    runs: Array
    #: For each run: the index of its batch, the number of its subject, the ordinal of its first message: int64[m].
    batch_of: Ints
    subjects: Ints
    ordinals: Ints


class Subjects:
    """The names seen so far, numbered. Tables of batches repeat, so each is unpacked once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._tables: dict[bytes, list[int]] = {}

    def numbers(self, table: bytes) -> list[int]:
        """Return the numbers of the names in a table. Raises BadBatch."""
        known = self._tables.get(table)
        if known is None:
            known = [self._number(name) for name in names_of(table)]
            if len(self._tables) >= 65_536:
                self._tables.clear()
            self._tables[table] = known
        return known

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


def records(window: memoryview, offsets: Ints, dtype: np.dtype[Any]) -> Array:
    """Return the records of a type at *offsets*: dtype[n], copied."""
    raw = np.frombuffer(window, np.uint8)
    found: Array = raw[offsets[:, None] + np.arange(dtype.itemsize)].view(dtype).reshape(len(offsets))
    return found


def spread(firsts: Ints, counts: Ints) -> Ints:
    """Return first, first + 1, ... for each count: int64[sum of counts]."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Ints = np.arange(total, dtype=np.int64) + np.repeat(firsts - (ends - counts), counts)
    return numbers


def check_headers(
    window: memoryview, offsets: Ints, positions: Ints, store_id: bytes, *, data: bool
) -> tuple[Array, list[str | None]]:
    """Return the headers at *offsets*, and the reason why each batch is bad (None: it is good).

    Checked are header, runs and table; with *data*, also the checksum of the rest. A batch that the window cuts off is
    bad.
    """
    headers = records(window, offsets, BATCH_HEADER_DTYPE)
    starts = data_starts_of(headers)
    fits = (headers["magic"] == BATCH_MAGIC) & (headers["position"] == positions.astype(np.uint64))
    fits &= headers["store_id"] == np.void(store_id)
    fits &= (starts <= headers["size"]) & (headers["runs"] > 0) & (offsets + starts <= len(window))
    wrong: list[str | None] = []
    for fit, offset, start, size, header_crc, data_crc, version, flags in zip(
        fits.tolist(), offsets.tolist(), starts.tolist(), headers["size"].tolist(), headers["header_crc"].tolist(),
        headers["data_crc"].tolist(), headers["version"].tolist(), headers["flags"].tolist(), strict=True,
    ):  # fmt: skip
        reason = None
        if not fit:
            reason = NO_BATCH
        elif (
            crc32c(
                window[offset + BATCH_HEADER_SIZE : offset + start], crc32c(window[offset : offset + BATCH_PREFIX_SIZE])
            )
            != header_crc
        ):
            reason = "the checksum of header, runs and table is wrong"
        elif version != BATCH_VERSION or flags & ~KNOWN_FLAGS:
            reason = f"version {version} and flags {flags:#x} are of a newer QMQ"
        elif data and (offset + size > len(window) or crc32c(window[offset + start : offset + size]) != data_crc):
            reason = "the checksum of the data is wrong"
        wrong.append(reason)
    return headers, wrong


def _head_crc(head: memoryview) -> int:
    return crc32c(head[BATCH_HEADER_SIZE:], crc32c(head[:BATCH_PREFIX_SIZE]))


def data_starts_of(headers: Array) -> Ints:
    """Return the beginning of the data in each batch: int64[n]."""
    return BATCH_HEADER_SIZE + RUN_SIZE * headers["runs"].astype(np.int64) + headers["table_size"].astype(np.int64)


def read_heads(window: memoryview, offsets: Ints, headers: Array, names: Subjects) -> tuple[Heads, dict[int, str]]:
    """Return the runs of batches with good headers; and by index the reason for batches with impossible runs.

    The runs of these are left out.
    """
    counts = headers["runs"].astype(np.int64)
    runs = records(window, spread_bytes(offsets + BATCH_HEADER_SIZE, counts, RUN_SIZE), RUN_DTYPE)
    batch_of = np.repeat(np.arange(len(offsets)), counts)
    data_starts = data_starts_of(headers)
    bad = _impossible(headers, runs, batch_of, counts, data_starts)
    subjects = np.zeros(len(runs), np.int64)
    tables = (offsets + BATCH_HEADER_SIZE + RUN_SIZE * counts).tolist()
    ends = (offsets + data_starts).tolist()
    first = 0
    for at, (table, end, count) in enumerate(zip(tables, ends, counts.tolist(), strict=True)):
        try:
            found = names.numbers(bytes(window[table:end]))
            if count == 1:
                subjects[first] = found[0]
            else:
                subjects[first : first + count] = np.array(found)[runs["subject"][first : first + count]]
        except (BadBatch, IndexError) as error:
            bad[at] = str(error)
        first += count
    ends_of = np.cumsum(runs["count"], dtype=np.int64)
    ordinals = ends_of - runs["count"]
    firsts = np.cumsum(counts) - counts
    ordinals -= np.repeat(ordinals[firsts], counts) if len(firsts) else 0
    heads = Heads(offsets, data_starts, headers, runs, batch_of, subjects, ordinals)
    return (heads if not bad else without(heads, bad)), bad


def without(heads: Heads, bad: dict[int, str]) -> Heads:
    """Return the same batches without the runs of some."""
    kept = ~np.isin(heads.batch_of, list(bad))
    return with_runs(heads, kept)


def with_runs(heads: Heads, kept: npt.NDArray[np.bool_]) -> Heads:
    """Return the same batches with some of the runs: bool[m]."""
    return heads._replace(
        runs=heads.runs[kept],
        batch_of=heads.batch_of[kept],
        subjects=heads.subjects[kept],
        ordinals=heads.ordinals[kept],
    )


def spread_bytes(firsts: Ints, counts: Ints, size: int) -> Ints:
    """Return the offsets of *counts* records of *size* bytes from each of *firsts* on."""
    within = spread(np.zeros(len(counts), np.int64), counts)
    return np.repeat(firsts, counts) + size * within


def _impossible(headers: Array, runs: Array, batch_of: Ints, counts: Ints, data_starts: Ints) -> dict[int, str]:
    """Return the reasons, by index, for batches whose good checksums cover impossible values."""
    ends = runs["offset"].astype(np.int64) + runs["size"]
    columns = COLUMN_BYTES_BY_FLAGS[headers["flags"]][batch_of] * runs["count"]
    outside = (ends > (headers["size"] - data_starts)[batch_of]) | (columns > runs["size"]) | (runs["count"] == 0)
    return dict.fromkeys(batch_of[outside].tolist(), "a run points outside of the batch")
