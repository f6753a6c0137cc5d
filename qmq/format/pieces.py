"""What a pull's answer is made of: whole batches as they lie, and pieces of one run each.

The broker makes pieces (`piece_of_run`); a client reads an answer back into runs (`read_answer`), checked.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES, Header, header_crc_of, parse_header, runs_of, stored_names
from qmq.format.ids import MessageId
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    HAS_KEY_HASH,
    HAS_TAGS,
    OPTIONAL_COLUMNS,
    PIECE_CRC_OFFSET,
    PIECE_HEADER,
    PIECE_HEADER_SIZE,
    PIECE_MAGIC,
    BATCH_VERSION,
    RUN,
    RUN_SIZE,
)

Buffer = bytes | memoryview


class Run:
    """Messages of one subject out of one batch, as a client holds them. ``data`` is columns and payload.

    The per-message columns are decoded when first asked for.
    """

    __slots__ = (
        "_body_starts", "_ends", "_headers", "_payload", "_starts", "count", "created_at_us", "data", "first_sequence",
        "flags", "lane", "ordinal", "partition", "position", "run_flags", "stored_at_us", "store_id", "subject",
    )  # fmt: skip

    def __init__(
        self,
        subject: str,
        count: int,
        flags: int,
        lane: int,
        run_flags: int,
        first_sequence: int,
        position: int,
        ordinal: int,
        stored_at_us: int,
        created_at_us: int,
        partition: int,
        store_id: bytes,
        data: memoryview,
    ) -> None:
        self.subject = subject
        self.count = count
        self.flags = flags
        self.lane = lane
        self.run_flags = run_flags
        self.first_sequence = first_sequence
        self.position = position
        self.ordinal = ordinal
        self.stored_at_us = stored_at_us
        self.created_at_us = created_at_us
        self.partition = partition
        self.store_id = store_id
        self.data = data
        self._payload: bytes | None = None
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._body_starts: list[int] = []
        self._headers: dict[int, dict[str, Any]] = {}

    def lengths(self) -> npt.NDArray[np.uint32]:
        """Header and body sizes in bytes: u32[count]."""
        return np.frombuffer(self.data, "<u4", self.count)

    def header_sizes(self) -> npt.NDArray[np.uint16]:
        """u16[count]."""
        return np.frombuffer(self.data, "<u2", self.count, 4 * self.count)

    def crcs(self) -> npt.NDArray[np.uint32]:
        """u32[count]."""
        return np.frombuffer(self.data, "<u4", self.count, 6 * self.count)

    def column(self, flag: int) -> npt.NDArray[Any] | None:
        """The optional column (tags u32 or key_hash u64) of that flag, or None."""
        if not self.flags & flag:
            return None
        offset = 10 * self.count
        for other, size in OPTIONAL_COLUMNS:
            if other == flag:
                return np.frombuffer(self.data, f"<u{size}", self.count, offset)
            if self.flags & other:
                offset += size * self.count
        raise AssertionError(flag)

    @property
    def payload(self) -> memoryview:
        """Message after message: header and body."""
        return self.data[COLUMN_BYTES[self.flags] * self.count :]

    def _decode(self) -> bytes:
        ends = np.cumsum(self.lengths(), dtype=np.int64)
        starts = ends - self.lengths()
        self._ends = ends.tolist()
        self._starts = starts.tolist()
        self._body_starts = (starts + self.header_sizes()).tolist()
        self._payload = payload = bytes(self.payload)
        return payload

    def bodies(self) -> list[bytes]:
        """All bodies."""
        payload = self._payload or self._decode()
        return [payload[a:b] for a, b in zip(self._body_starts, self._ends, strict=True)]

    def body(self, index: int) -> bytes:
        """The body of message *index* of this run."""
        payload = self._payload
        if payload is None:
            payload = self._decode()
        return payload[self._body_starts[index] : self._ends[index]]

    def header(self, index: int) -> dict[str, Any]:
        """The unpacked header of message *index*: "k" keys, "t" tags, "p" properties; {} when it has none."""
        header = self._headers.get(index)
        if header is None:
            payload = self._payload
            if payload is None:
                payload = self._decode()
            packed = payload[self._starts[index] : self._body_starts[index]]
            header = self._headers[index] = msgpack.unpackb(packed) if packed else {}
        return header

    def id(self, index: int) -> MessageId:
        """The message id of message *index*."""
        return MessageId(self.store_id, self.partition, self.position + self.ordinal + index)

    def slice(self, start: int, stop: int) -> Run:
        """The messages [start, stop) as a run of their own (columns are copied, it is for cuts)."""
        data = memoryview(b"".join(cut_data(self.data, self.flags, self.count, start, stop)))
        return Run(
            self.subject, stop - start, self.flags, self.lane, self.run_flags, self.first_sequence + start,
            self.position, self.ordinal + start, self.stored_at_us, self.created_at_us, self.partition, self.store_id,
            data,
        )  # fmt: skip


class Damage(NamedTuple):
    """Bytes of an answer that could not be verified: what, and where in the message log as far as known."""

    reason: str
    partition: int | None
    position: int | None


# ---------------------------------------------------------------------------------------------------------------------
# The broker's side


def cut_data(data: memoryview, flags: int, count: int, start: int, stop: int) -> list[memoryview]:
    """The slices of a run's data (of *count* messages) that messages [start, stop) need: columns, then payload."""
    slices = []
    offset = 0
    for size in _column_sizes(flags):
        slices.append(data[offset + size * start : offset + size * stop])
        offset += size * count
    lengths = np.frombuffer(data, "<u4", count)
    first = offset + int(lengths[:start].sum(dtype=np.uint64))
    slices.append(data[first : first + int(lengths[start:stop].sum(dtype=np.uint64))])
    return slices


def _column_sizes(flags: int) -> list[int]:
    return [4, 2, 4, *(size for flag, size in OPTIONAL_COLUMNS if flags & flag)]


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

_MAGIC_BYTES: Final = (BATCH_MAGIC.to_bytes(4, "little"), PIECE_MAGIC.to_bytes(4, "little"))


def read_answer(answer: memoryview) -> tuple[list[Run], list[Damage]]:
    """The runs of a pull's answer, each verified, and what could not be verified (and is left out)."""
    runs: list[Run] = []
    damaged: list[Damage] = []
    offset = 0
    while offset < len(answer):
        try:
            offset += _read_one(answer[offset:], runs, damaged)
        except BadBatch as error:
            damaged.append(Damage(str(error), None, None))
            offset = _next_magic(answer, offset + 4)
    return runs, damaged


def _read_one(rest: memoryview, runs: list[Run], damaged: list[Damage]) -> int:
    """Read what begins *rest*; returns its size. Raises BadBatch when nothing can be known of it, size included."""
    magic = bytes(rest[:4])
    if magic == _MAGIC_BYTES[0] and len(rest) >= BATCH_HEADER_SIZE + RUN_SIZE:
        return _read_batch(rest, runs, damaged)
    if magic == _MAGIC_BYTES[1] and len(rest) >= PIECE_HEADER_SIZE:
        return _read_piece(rest, runs, damaged)
    raise BadBatch("neither a batch nor a piece begins here")


def _next_magic(answer: memoryview, offset: int) -> int:
    rest = bytes(answer[offset:])
    places = [place for magic in _MAGIC_BYTES if (place := rest.find(magic)) >= 0]
    return offset + min(places) if places else len(answer)


def _read_batch(rest: memoryview, runs: list[Run], damaged: list[Damage]) -> int:
    header = parse_header(rest)
    start = header.data_start
    if start > header.size or header.size > len(rest) or header_crc_of(rest, start) != header.header_crc:
        raise BadBatch("the header of a batch does not fit its checksum")
    data = rest[start : header.size]
    sound = crc32c(data) == header.data_crc
    names = stored_names(rest, header)
    if header.runs == 1:
        records = [RUN.unpack_from(rest, BATCH_HEADER_SIZE)]
    else:
        records = runs_of(rest, header).tolist()
    ordinal = 0
    for subject, lane, run_flags, _, count, offset, size, crc, first_sequence in records:
        piece = data[offset : offset + size]
        if sound or crc32c(piece) == crc:
            runs.append(
                Run(
                    names[subject], count, header.flags, lane, run_flags, first_sequence, header.position, ordinal,
                    header.stored_at_us, header.created_at_us, header.partition, header.store_id, piece,
                )
            )  # fmt: skip
        else:
            damaged.append(_damage(header, f"run of {names[subject]!r} does not fit its checksum"))
        ordinal += count
    return header.size


def _damage(header: Header, reason: str) -> Damage:
    return Damage(reason, header.partition, header.position)


def _read_piece(rest: memoryview, runs: list[Run], damaged: list[Damage]) -> int:
    (
        _, version, whole, flags, size, count, ordinal, subject_size, lane, position, stored_at_us, created_at_us,
        first_sequence, partition, store_id, run_flags, _, data_crc, _, header_crc,
    ) = PIECE_HEADER.unpack_from(rest)  # fmt: skip
    start = PIECE_HEADER_SIZE + subject_size
    if start > size or size > len(rest) or version != BATCH_VERSION:
        raise BadBatch("the sizes of a piece do not add up")
    if crc32c(rest[PIECE_HEADER_SIZE:start], crc32c(rest[:PIECE_CRC_OFFSET])) != header_crc:
        raise BadBatch("the header of a piece does not fit its checksum")
    subject = bytes(rest[PIECE_HEADER_SIZE:start]).decode()
    run = Run(
        subject, count, flags, lane, run_flags, first_sequence, position, ordinal, stored_at_us, created_at_us,
        partition, store_id, rest[start:size],
    )  # fmt: skip
    if whole:
        if crc32c(run.data) == data_crc:
            runs.append(run)
        else:
            damaged.append(Damage(f"run of {subject!r} does not fit its checksum", partition, position))
    else:
        _read_cut(run, runs, damaged)
    return int(size)


def _read_cut(run: Run, runs: list[Run], damaged: list[Damage]) -> None:
    """Check a cut run message by message; keep the stretches that are sound."""
    payload = run.payload
    lengths = run.lengths()
    if int(lengths.sum(dtype=np.uint64)) != len(payload) or (run.header_sizes() > lengths).any():
        damaged.append(Damage(f"lengths of a cut run of {run.subject!r} do not add up", run.partition, run.position))
        return
    ends = np.cumsum(lengths, dtype=np.int64)
    bounds = zip((ends - lengths).tolist(), ends.tolist(), _seeds(run).tolist(), strict=True)
    crcs = np.fromiter((crc32c(payload[a:b], seed) for a, b, seed in bounds), np.uint32, run.count)
    bad = np.flatnonzero(crcs != run.crcs())
    if not len(bad):
        runs.append(run)
        return
    edges = [-1, *bad.tolist(), run.count]
    for before, after in zip(edges, edges[1:], strict=False):
        if after - before > 1:
            runs.append(run.slice(before + 1, after))
    for index in bad.tolist():
        place = run.position + run.ordinal + index
        damaged.append(Damage(f"a message of {run.subject!r} does not fit its checksum", run.partition, place))


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
