"""What a pull's answer is made of: whole batches as they lie, and pieces of one run each.

The broker makes pieces (`StoredBatch`); a client reads an answer back into runs (`read_answer`), checked.
"""

from __future__ import annotations

import struct
from itertools import pairwise, repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import (
    COLUMN_BYTES,
    Header,
    Runs,
    header_crc_of,
    parse_header,
    runs_of,
    stored_names,
)
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    HAS_KEY_HASH,
    HAS_TAGS,
    PIECE_CRC_OFFSET,
    PIECE_HEADER,
    PIECE_HEADER_SIZE,
    PIECE_MAGIC,
    RUN,
    RUN_SIZE,
    STAMP_PLACE_OFFSET,
)
from qmq.format.run import PieceHeader, cut_data
from qmq.format.run import Run as Run

Buffer = bytes | memoryview


class Damage(NamedTuple):
    """Bytes of an answer that could not be verified: what, and where in the message log as far as known."""

    reason: str
    partition: int | None
    position: int | None


# ---------------------------------------------------------------------------------------------------------------------
# The broker's side


class StoredBatch:
    """A stored batch from which pieces are cut; its header is checked once. *view* begins with it."""

    __slots__ = ("_data", "_firsts", "_names", "_view", "header")

    def __init__(self, view: memoryview) -> None:
        """Raises BadBatch when the header does not fit its checksum: what it says can't be relied on then."""
        self.header = header = parse_header(view)
        start = header.data_start
        if header.magic != BATCH_MAGIC or start > len(view) or header_crc_of(view, start) != header.header_crc:
            raise BadBatch(f"the header of the batch at position {header.position} does not fit its checksum")
        self._view = view
        self._data = view[start : header.size]
        self._names = stored_names(view, header)
        self._firsts: list[int] | None = None

    def piece(self, run_number: int, start: int, stop: int | None) -> tuple[list[Buffer], int]:
        """The buffers of a piece with messages [start, stop) of a run (None: to its end), and their size in bytes."""
        header = self.header
        record = RUN.unpack_from(self._view, BATCH_HEADER_SIZE + RUN_SIZE * run_number)
        subject_index, lane, run_flags, _, count, offset, size, crc, first_sequence = record
        subject = self._names[subject_index].encode()
        data = self._data[offset : offset + size]
        stop = count if stop is None else stop
        whole = start == 0 and stop == count
        slices: list[Buffer] = [data] if whole else list(cut_data(data, header.flags, count, start, stop))
        data_size = sum(map(len, slices))
        piece = bytearray(PIECE_HEADER_SIZE)
        PIECE_HEADER.pack_into(
            piece, 0, PIECE_MAGIC, BATCH_VERSION, whole, header.flags, PIECE_HEADER_SIZE + len(subject) + data_size,
            stop - start, self._ordinal(run_number) + start, len(subject), lane, header.position, header.stored_at_us,
            header.created_at_us, first_sequence + start, header.partition, header.store_id, run_flags, run_number,
            crc if whole else 0, 0, 0,
        )  # fmt: skip
        piece += subject
        seal = crc32c(piece[PIECE_HEADER_SIZE:], crc32c(piece[:PIECE_CRC_OFFSET]))
        piece[PIECE_CRC_OFFSET : PIECE_CRC_OFFSET + 4] = seal.to_bytes(4, "little")
        return [bytes(piece), *slices], len(piece) + data_size

    def lengths(self, run_number: int) -> npt.NDArray[np.uint32]:
        """Header and body sizes of the messages of a run, in bytes: u32[its count]."""
        record = RUN.unpack_from(self._view, BATCH_HEADER_SIZE + RUN_SIZE * run_number)
        return np.frombuffer(self._data, "<u4", record[4], record[5])

    def _ordinal(self, run_number: int) -> int:
        """Messages before that run in the batch."""
        if not run_number:
            return 0
        if self._firsts is None:
            counts = runs_of(self._view, self.header)["count"]
            self._firsts = (np.cumsum(counts, dtype=np.int64) - counts).tolist()
        return self._firsts[run_number]


def piece_of_run(batch: memoryview, run_number: int, start: int, stop: int | None) -> tuple[list[Buffer], int]:
    """One piece of the stored batch that begins *batch*: see StoredBatch."""
    return StoredBatch(batch).piece(run_number, start, stop)


# ---------------------------------------------------------------------------------------------------------------------
# The client's side

_MAGICS: Final = (struct.pack("<I", BATCH_MAGIC), struct.pack("<I", PIECE_MAGIC))
_SIZE: Final = struct.Struct("<I")
_SIZE_OFFSET: Final = 8  # in batches and pieces
_POSITION: Final = struct.Struct("<Q")


def read_answer(answer: memoryview) -> tuple[list[Run], list[Damage]]:
    """The runs of a pull's answer, each verified, and what could not be verified (and is left out)."""
    runs: list[Run] = []
    damaged: list[Damage] = []
    offset, end = 0, len(answer)
    while offset < end:
        try:
            offset += _read_one(answer[offset:], runs, damaged)
        except BadBatch as error:
            resumed = _resume(answer, offset)
            damaged.append(Damage(f"{error}; {resumed - offset} bytes of the answer are left out", None, None))
            offset = resumed
    return runs, damaged


def _read_one(rest: memoryview, runs: list[Run], damaged: list[Damage]) -> int:
    """Read what begins *rest*; returns its size. Raises BadBatch when nothing can be known of it, size included."""
    magic = bytes(rest[:4])
    if magic == _MAGICS[0] and len(rest) >= BATCH_HEADER_SIZE + RUN_SIZE:
        return _read_batch(rest, runs, damaged)
    if magic == _MAGICS[1] and len(rest) >= PIECE_HEADER_SIZE:
        return _read_piece(rest, runs, damaged)
    raise BadBatch("neither a batch nor a piece begins here")


def _resume(answer: memoryview, offset: int) -> int:
    """Where reading goes on after something at *offset* whose header is bad; the answer's end when nobody can say.

    A magic alone is not enough, since a body may hold a whole forged batch. So either the bad header's size leads to
    the next header, or a batch follows whose position is as far from the bad header's as their places are.
    """
    end = len(answer)
    if end - offset < BATCH_HEADER_SIZE:
        return end
    after = offset + _SIZE.unpack_from(answer, offset + _SIZE_OFFSET)[0]
    if offset < after < end and bytes(answer[after : after + 4]) in _MAGICS:
        return int(after)
    (position,) = _POSITION.unpack_from(answer, offset + STAMP_PLACE_OFFSET)
    rest = bytes(answer[offset:])
    place = rest.find(_MAGICS[0], 4)
    while 0 < place <= len(rest) - BATCH_HEADER_SIZE:
        if _POSITION.unpack_from(rest, place + STAMP_PLACE_OFFSET)[0] - position == place:
            return offset + place
        place = rest.find(_MAGICS[0], place + 4)
    return end


def _read_batch(rest: memoryview, runs: list[Run], damaged: list[Damage]) -> int:
    header = parse_header(rest)
    start, size = header.data_start, header.size
    if start > size or size > len(rest) or header_crc_of(rest, start) != header.header_crc:
        raise BadBatch("the header of a batch does not fit its checksum")
    if header.version != BATCH_VERSION or header.flags >= len(COLUMN_BYTES):
        raise BadBatch(f"a batch of version {header.version} with flags {header.flags:#x} is not known here")
    names = stored_names(rest, header)
    data = rest[start:size]
    sound = crc32c(data) == header.data_crc
    if header.runs == 1:
        subject, lane, run_flags, _, count, offset, size, crc, first_sequence = RUN.unpack_from(rest, BATCH_HEADER_SIZE)
        if subject or offset or size != len(data) or not 0 < count * COLUMN_BYTES[header.flags] <= size:
            raise BadBatch(_OUTSIDE)
        run = Run(header, names[0], count, lane, run_flags, first_sequence, 0, data, 0, size)
        if sound:
            runs.append(run)
        else:
            damaged.append(_damage(run, "a run", 0))
        return header.size
    records = runs_of(rest, header)
    found = _runs_of_batch(header, names, records, data)
    if sound:
        runs += found
        return header.size
    for run, crc in zip(found, records["crc"].tolist(), strict=True):
        if crc32c(run.data) == crc:
            runs.append(run)
        else:
            damaged.append(_damage(run, "a run", 0))
    return header.size


_OUTSIDE: Final = "a run of a batch points outside of it"


def _runs_of_batch(header: Header, names: tuple[str, ...], records: Runs, data: memoryview) -> list[Run]:
    """The runs of a batch of several, unverified. Raises BadBatch when its sound header says what can't be."""
    counts = records["count"].astype(np.int64)
    starts = records["offset"].astype(np.int64)
    ends = starts + records["size"]
    column_ends = starts + counts * COLUMN_BYTES[header.flags]
    subjects = records["subject"]
    if int(subjects.max()) >= len(names) or (ends > len(data)).any() or (column_ends > ends).any() or not counts.all():
        raise BadBatch(_OUTSIDE)
    ordinals = np.cumsum(counts)
    ordinals -= counts
    return list(
        map(
            Run,
            repeat(header),
            map(names.__getitem__, subjects.tolist()),
            counts.tolist(),
            records["lane"].tolist(),
            records["flags"].tolist(),
            records["first_sequence"].tolist(),
            ordinals.tolist(),
            repeat(data),
            starts.tolist(),
            ends.tolist(),
        )
    )


def _read_piece(rest: memoryview, runs: list[Run], damaged: list[Damage]) -> int:
    header = PieceHeader._make(PIECE_HEADER.unpack_from(rest))
    start, size = PIECE_HEADER_SIZE + header.subject_size, header.size
    if start > size or size > len(rest):
        raise BadBatch("the sizes of a piece do not add up")
    if crc32c(rest[PIECE_HEADER_SIZE:start], crc32c(rest[:PIECE_CRC_OFFSET])) != header.header_crc:
        raise BadBatch("the header of a piece does not fit its checksum")
    if header.version != BATCH_VERSION or header.flags >= len(COLUMN_BYTES):
        raise BadBatch(f"a piece of version {header.version} with flags {header.flags:#x} is not known here")
    if not 0 < header.messages * COLUMN_BYTES[header.flags] <= size - start:
        raise BadBatch("a piece is shorter than its columns")
    try:
        subject = str(rest[PIECE_HEADER_SIZE:start], "utf-8")
    except UnicodeDecodeError:
        raise BadBatch("the subject of a piece is not text") from None
    run = Run(
        header, subject, header.messages, header.lane, header.run_flags, header.first_sequence, header.ordinal,
        rest, start, size,
    )  # fmt: skip
    if not header.whole:
        _read_cut(run, runs, damaged)
    elif crc32c(run.data) == header.data_crc:
        runs.append(run)
    else:
        damaged.append(_damage(run, "a run", 0))
    return size


def _damage(run: Run, what: str, index: int) -> Damage:
    reason = f"{what} of {run.subject!r} does not fit its checksum"
    return Damage(reason, run.partition, run.position + run.ordinal + index)


def _read_cut(run: Run, runs: list[Run], damaged: list[Damage]) -> None:
    """Check a cut run message by message; keep the stretches that are sound."""
    payload = run.payload
    lengths = run.lengths()
    if int(lengths.sum(dtype=np.uint64)) != len(payload) or (run.header_sizes() > lengths).any():
        damaged.append(_damage(run, "the lengths in a part", 0))
        return
    ends = np.cumsum(lengths, dtype=np.int64)
    bounds = zip((ends - lengths).tolist(), ends.tolist(), _seeds(run).tolist(), strict=True)
    crcs = np.fromiter((crc32c(payload[a:b], seed) for a, b, seed in bounds), np.uint32, run.count)
    bad = np.flatnonzero(crcs != run.crcs()).tolist()
    if not bad:
        runs.append(run)
        return
    for before, after in pairwise([-1, *bad, run.count]):
        if after - before > 1:
            runs.append(run.slice(before + 1, after))
    damaged += [_damage(run, "a message", index) for index in bad]


def _seeds(run: Run) -> npt.NDArray[np.uint32]:
    """What each message's crc starts from, see build.seed_of: u32[count]."""
    seeds = run.header_sizes().astype(np.uint32)
    tags, keys = run.column(HAS_TAGS), run.column(HAS_KEY_HASH)
    if tags is not None:
        seeds ^= tags
    if keys is not None:
        seeds ^= keys.astype(np.uint32)
        seeds ^= (keys >> np.uint64(32)).astype(np.uint32)
    return seeds
