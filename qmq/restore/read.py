"""Read the segments of an archive for a restore: verify each batch, and select its messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
from crc32c import crc32c

from qmq.archive.archive import manifests
from qmq.archive.files import Files, Reading
from qmq.archive.manifest import Manifest
from qmq.archive.segments import INDEX, MESSAGES, Index, followed, index_pieces
from qmq.errors import BadBatch, BadBytes, StorageError
from qmq.format.batch import Header, header_crc_of, parse_header, runs_of, stored_names
from qmq.format.copies.restored import Part, ids_of
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, BATCH_VERSION, KNOWN_FLAGS, RUN_REPLAYED
from qmq.format.pieces import bad_messages, stored_runs
from qmq.format.private import is_private
from qmq.format.run import Run
from qmq.intervals import Intervals
from qmq.restore.selection import RestoreSelection

#: How many bytes are read at a time.
WINDOW_BYTES: Final = 8 << 20

#: Positions of source messages that are stored already, by store id and partition of their ids.
Found = dict[tuple[bytes, int], Intervals]


class ArchiveDamage(NamedTuple):
    """Bad bytes at positions [start, end) of an archived segment, with so many messages (None: unknown).

    If it is settled, it is not read again, since other messages of the same batch were good.
    """

    file: str
    start: int
    end: int
    messages: int | None
    reason: str
    is_settled: bool = False

    def __str__(self) -> str:
        count = "an unknown number of" if self.messages is None else f"{self.messages:,}"
        return f"{self.file}, positions {self.start} to {self.end}: {count} messages are left out: {self.reason}"


class RestoreStep(NamedTuple):
    """The contents of positions [start, end) of a log: messages of one batch to restore, and counts of those left out.

    ``is_settled``: the positions need not be read again. ``found``: messages that are stored already.
    """

    log: str
    start: int
    end: int
    parts: list[Part]
    created_at_us: int = 0
    found: int = 0
    private: int = 0
    replayed: int = 0
    damage: ArchiveDamage | None = None
    is_settled: bool = True


class Reader(Protocol):
    """The interface of a reader of an archive, in any form."""

    found: Found

    def left_bytes(self) -> int:
        """Return how much is left to read or to skip."""

    def steps(self) -> Iterator[RestoreStep]:
        """Yield the steps of everything that is left."""


class ArchiveReader:
    """Reads the segments of an archive, log by log in the order of their names, ascending."""

    def __init__(self, files: Files, selection: RestoreSelection, done: dict[str, Intervals]) -> None:
        """*done*: positions that need not be read, by log. Raises BadBytes, ForeignFile, StorageFailed."""
        self._files = files
        self._selection = selection
        #: The messages that are stored already, which are left out.
        self.found: Found = {}
        self._takes: dict[str, bool] = {}
        segments = sorted(manifests(files), key=lambda found: (found[0].rpartition("/")[0], found[1].base))
        self._left = [
            (path, manifest, start, end)
            for path, manifest in segments
            for start, end in done.get(log_of(manifest), Intervals()).missing(manifest.base, manifest.end)
        ]

    def left_bytes(self) -> int:
        """Return how much is left to read or to skip."""
        return sum(end - start for _, _, start, end in self._left)

    def steps(self) -> Iterator[RestoreStep]:
        """Yield the steps of everything that is left; each byte of each log is in one of them."""
        for left in self._left:
            yield from self._range(*left)

    # --- one segment -------------------------------------------------------------------------------------------------

    def _range(self, path: str, manifest: Manifest, start: int, end: int) -> Iterator[RestoreStep]:
        log, wanted = log_of(manifest), self._selection
        outside = manifest.last_stored_at_us < wanted.since_us or manifest.first_stored_at_us >= wanted.until_us
        if outside or not manifest.batches:
            yield RestoreStep(log, start, end, [])
            return
        try:
            for _ in self._pieces(path, manifest):
                """Read to its end, before its entries are used."""
            file = self._files.open(path + MESSAGES)
        except (BadBytes, FileNotFoundError) as error:
            yield self._unreadable(log, path, start, end, str(error))
            return
        try:
            behind = start
            for index, following in followed(self._pieces(path, manifest), manifest.end):
                stop = min(following, end)
                if behind < stop:
                    yield from self._batches(file, path, manifest, behind, stop, index, following)
                    behind = stop
            if behind < end:
                yield RestoreStep(log, behind, end, [])
        finally:
            file.close()

    def _pieces(self, path: str, manifest: Manifest) -> Iterator[Index]:
        store_id = bytes.fromhex(manifest.store_id)
        return index_pieces(
            self._files, path + INDEX, store_id, manifest.partition, manifest.base, manifest.end
        )  # fmt: skip

    def _unreadable(self, log: str, path: str, start: int, end: int, reason: str) -> RestoreStep:
        damage = ArchiveDamage(f"{self._files.name}/{path}{MESSAGES}", start, end, None, reason)
        return RestoreStep(log, start, end, [], damage=damage, is_settled=False)

    def _batches(
        self, file: Reading, path: str, manifest: Manifest, start: int, end: int, index: Index, following: int
    ) -> Iterator[RestoreStep]:
        """Yield the steps of [start, end), where the batches of *index* lie, each ending at its position in
        *following*.
        """
        log = log_of(manifest)
        positions = index["position"].astype(np.int64)
        ends = np.append(positions[1:], following)
        stamps = index["stored_at_us"]
        selection = self._selection
        in_time = (stamps >= np.uint64(selection.since_us)) & (stamps < np.uint64(selection.until_us))
        chosen = np.flatnonzero(in_time & (positions >= start) & (positions < end))
        behind = start
        for first, stop in _windows(positions[chosen], ends[chosen]):
            here = chosen[first:stop]
            low, high = int(positions[here[0]]), int(ends[here[-1]])
            if behind < low:
                yield RestoreStep(log, behind, low, [])
            try:
                window = memoryview(file.read(low - manifest.base, high - low))
            except StorageError as error:
                yield self._unreadable(log, path, low, high, str(error))
                behind = high
                continue
            for position, following in zip(positions[here].tolist(), ends[here].tolist(), strict=True):
                batch = window[position - low : following - low]
                yield self._batch(log, path, manifest, position, following, batch)
            behind = high
        if behind < end:
            yield RestoreStep(log, behind, end, [])

    def _batch(self, log: str, path: str, manifest: Manifest, start: int, end: int, view: memoryview) -> RestoreStep:
        try:
            header = _header_of(view, start, bytes.fromhex(manifest.store_id))
            names = stored_names(view, header)
            runs = self._wanted(view, header, names)
        except BadBatch as error:
            return self._unreadable(log, path, start, end, str(error))
        private = 0
        if any(map(is_private, names)):
            records = runs_of(view, header)
            own = np.array([is_private(names[subject]) for subject in records["subject"].tolist()], np.bool_)
            private = int(records["count"][own].sum())
        replayed = found = lost = 0
        parts = list[Part]()
        is_sound = not runs or crc32c(view[header.data_start : header.size]) == header.data_crc
        for run, crc in runs:
            if run.run_flags & RUN_REPLAYED and not self._selection.with_replayed:
                replayed += run.count
                continue
            sound = [run] if is_sound or crc32c(run.data) == crc else _sound_parts(run)
            lost += run.count - sum(part.count for part in sound)
            for part in sound:
                new = new_parts(part, self.found)
                found += part.count - sum(one.count for one in new)
                parts += [(self._selection.subject_for(part.subject), one) for one in new]
        damage = None
        is_settled = not lost or bool(parts or found)  # a batch without any good message may yet be repaired
        if lost:
            reason = "they do not fit their checksums"
            damage = ArchiveDamage(f"{self._files.name}/{path}{MESSAGES}", start, end, lost, reason, is_settled)
        return RestoreStep(log, start, end, parts, header.created_at_us, found, private, replayed, damage, is_settled)

    def _wanted(self, view: memoryview, header: Header, names: tuple[str, ...]) -> list[tuple[Run, int]]:
        """Return the runs of selected subjects, with their checksums, not verified."""
        takes = [self._is_taken(name) for name in names]
        if not any(takes):
            return []
        runs = stored_runs(view, header)
        crcs = runs_of(view, header)["crc"].tolist()
        return [(run, crc) for run, crc in zip(runs, crcs, strict=True) if self._is_taken(run.subject)]

    def _is_taken(self, name: str) -> bool:
        taken = self._takes.get(name)
        if taken is None:
            if len(self._takes) > 1 << 16:
                self._takes.clear()
            taken = self._takes[name] = self._selection.takes(name)
        return taken


def log_of(manifest: Manifest) -> str:
    """Return the name of the log of a segment."""
    return f"{manifest.store_id}-{manifest.partition}"


def new_parts(run: Run, found: Found) -> list[Run]:
    """Return the parts of a run that are not stored already."""
    if not found:
        return [run]
    ids = ids_of(run)
    kept = np.ones(run.count, np.bool_)
    for place in np.unique(ids["place"]):
        known = found.get((bytes(place)[:6], int.from_bytes(bytes(place)[6:], "big")))
        if known is None:
            continue
        mine = np.flatnonzero(ids["place"] == place)
        positions = ids["position"][mine].astype(np.int64)
        if known.overlaps(int(positions.min()), int(positions.max()) + 1):
            kept[mine[[position in known for position in positions.tolist()]]] = False
    return [run] if kept.all() else [run.slice(first, stop) for first, stop in _ranges(kept)]


def _header_of(view: memoryview, position: int, store_id: bytes) -> Header:
    """Return the header of the batch at the beginning of *view*. Raises BadBatch if it is wrong."""
    if len(view) < BATCH_HEADER_SIZE:
        raise BadBatch("the file ends before it")
    header = parse_header(view)
    if header.magic != BATCH_MAGIC or header.position != position or header.store_id != store_id:
        raise BadBatch("no batch begins there")
    if header.version != BATCH_VERSION or header.flags & ~KNOWN_FLAGS:
        raise BadBatch(f"it has version {header.version} and flags {header.flags:#x}; use a newer QMQ")
    if not header.runs or not header.data_start <= header.size <= len(view):
        raise BadBatch("its sizes do not add up")
    if header_crc_of(view, header.data_start) != header.header_crc:
        raise BadBatch("its header does not fit its checksum")
    return header


def _windows(positions: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, stop) of batches that are adjacent, as many as are read at a time."""
    first = 0
    while first < len(positions):
        stop = max(int(np.searchsorted(ends, int(positions[first]) + WINDOW_BYTES, "right")), first + 1)
        gaps = np.flatnonzero(positions[first + 1 : stop] != ends[first : stop - 1])
        if len(gaps):
            stop = first + 1 + int(gaps[0])
        yield first, stop
        first = stop


def _sound_parts(run: Run) -> list[Run]:
    """Return the good parts of a run whose checksum is wrong."""
    bad = bad_messages(run)
    if not bad:  # its lengths are wrong, or the bad bytes are outside of all messages
        return []
    kept = np.ones(run.count, np.bool_)
    kept[bad] = False
    return [run.slice(first, stop) for first, stop in _ranges(kept)]


def _ranges(kept: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges [first, stop) in which the flags are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
