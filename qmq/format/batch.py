"""The batch: the broker checks and stamps it; recovery, verify and Spark validate it again.

No function here looks at a message. The work is for the batch as a whole; with several runs it is vectorised over the
runs. A batch of one run takes a ``struct`` path, and numpy adds up its lengths where they are many.

Stamps never go back. After the wall clock was set back, they run ahead of it, but delays and expiries count from the
real time at which a batch was stored. So the broker adds a field to the table, which says how far the stamp was ahead,
to batches for which that matters.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch, MessageTooLarge
from qmq.format.lanes import are_known, is_known
from qmq.format.layout import (
    BATCH_HEADER,
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_PREFIX_SIZE,
    BATCH_VERSION,
    CREATED_AT_END_US,
    DELIVER_UNIT_US,
    ENTRY_BATCH_FLAGS,
    ENTRY_DTYPE,
    FIXED_COLUMN_BYTES,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_MORE_KEYS,
    HAS_ORIGIN_ID,
    HAS_TAGS,
    KNOWN_FLAGS,
    LANE_NORMAL,
    MARK_SIZE,
    MAX_RUNS,
    OPTIONAL_COLUMNS,
    PRODUCER_SEQUENCE_END,
    RUN,
    RUN_DTYPE,
    RUN_FIRST_SEQUENCE_OFFSET,
    RUN_SIZE,
    SENT_FLAGS,
    STAMP_POSITION,
    STAMP_POSITION_OFFSET,
    STAMP_SEAL,
    STAMP_SEAL_OFFSET,
    STAMP_STORE,
    STAMP_STORE_OFFSET,
)
from qmq.format.source import SLOT_OFFSET, check_sent, records_in, source_in, stamp_source
from qmq.format.table import (
    AHEAD_FIELD,
    AHEAD_SIZE,
    TABLE_BYTES,
    TABLE_BYTES_A_RUN,
    names_of,
    sent_as,
    table_of,
    unique_field,
    with_field,
)

#: Bytes that a message takes in columns, by batch flags.
COLUMN_BYTES: Final = tuple(
    FIXED_COLUMN_BYTES + sum(size for flag, size in OPTIONAL_COLUMNS if flags & flag)
    for flags in range(KNOWN_FLAGS + 1)
)

#: Below this many messages ``struct`` beats numpy for a column.
FEW: Final = 16

_MARK_INPUT: Final = struct.Struct("<QI")
_FIRST_SEQUENCE: Final = struct.Struct("<Q")
#: The length and header size of a single message.
_FIRST_COLUMNS: Final = struct.Struct("<IH")
_NO_MARK: Final = bytes(MARK_SIZE)
#: Makes a NamedTuple in half the time of a call of its class.
made: Final = tuple.__new__

Runs = npt.NDArray[np.void]
RunRecord = tuple[int, int, int, int, int, int, int, int, int]  # in the order of layout.RUN
EntryRow = tuple[int, int, int, int, int, int, int, int, int, int, int]


class Header(NamedTuple):
    """The fields of a batch header, in file order."""

    magic: int
    version: int
    reserved: int
    flags: int
    size: int
    table_size: int
    messages: int
    runs: int
    position: int
    stored_at_us: int
    created_at_us: int
    partition: int
    store_id: bytes
    producer_id: bytes
    producer_sequence: int
    data_crc: int
    header_crc: int
    mark: bytes

    @property
    def data_start(self) -> int:
        """The offset of run 0 in the batch."""
        return BATCH_HEADER_SIZE + RUN_SIZE * self.runs + self.table_size


class CheckedBatch(NamedTuple):
    """A batch that has passed the check. ``run`` is set when it has one run, else ``runs`` is the record array.
    ``has_unique``: messages of it may have unique texts.
    """

    header: Header
    names: tuple[str, ...]
    run: RunRecord | None
    runs: Runs | None
    has_unique: bool = False


#: The limit for copies of stored messages: a limit lowered since must not stop them.
ANY_MESSAGE_BYTES: Final = 1 << 32


class BatchLimits(NamedTuple):
    """The batches that a broker accepts; ``max_message_bytes`` counts header and body. Subject names are checked
    elsewhere.
    """

    max_message_bytes: int = 4 << 20
    flags: int = SENT_FLAGS
    run_flags: int = 0
    #: The batch lies in a log: its table may have the field that only the broker adds.
    is_stored: bool = False


def parse_header(view: memoryview | bytes, offset: int = 0) -> Header:
    """Return the header at *offset*, unchecked. The view must hold 96 bytes from there."""
    return tuple.__new__(Header, BATCH_HEADER.unpack_from(view, offset))  # as _make, in half the time


def mark_maker(secret: bytes) -> Any:
    """Return the keyed hash that makes marks, without input: copying it costs less than to make one."""
    return blake2b(digest_size=MARK_SIZE, key=secret)


def mark_of(secret: bytes, position: int, header_crc: int) -> bytes:
    """Return the mark of a header: 8 bytes that only the store can make.

    By it, recovery tells a header from bytes in a body.
    """
    return blake2b(_MARK_INPUT.pack(position, header_crc), digest_size=MARK_SIZE, key=secret).digest()


def header_crc_of(view: memoryview, data_start: int) -> int:
    """Return the checksum over the header (except itself and the mark), the runs and the table."""
    return crc32c(view[BATCH_HEADER_SIZE:data_start], crc32c(view[:BATCH_PREFIX_SIZE]))


# ---------------------------------------------------------------------------------------------------------------------
# The broker's check


def check_batch(view: memoryview, limits: BatchLimits) -> CheckedBatch:
    """Check a batch as a client sent it: *view* is exactly the batch.

    Raises BadBatch when it contradicts itself, MessageTooLarge when a message is over the limit. Names are not checked.
    """
    if len(view) < BATCH_HEADER_SIZE + RUN_SIZE:
        raise BadBatch(f"a batch of {len(view)} bytes is shorter than its header and one run")
    header = parse_header(view)
    data_start = header.data_start
    if header.magic != BATCH_MAGIC or header.version != BATCH_VERSION:
        raise BadBatch(f"not a batch of version {BATCH_VERSION}: magic {header.magic:#x}, version {header.version}")
    if header.reserved or header.flags & ~limits.flags:
        raise BadBatch(f"unknown flags {header.flags:#x}; this broker takes {limits.flags:#x}")
    if header.flags & HAS_MORE_KEYS and not header.flags & HAS_KEY_HASH:
        raise BadBatch("a batch of messages with several keys has no key hashes")
    if header.size != len(view) or data_start > header.size or not 1 <= header.runs <= MAX_RUNS:
        raise BadBatch(f"sizes do not add up: size {header.size} of {len(view)}, {header.runs} runs")
    if header.table_size > TABLE_BYTES + TABLE_BYTES_A_RUN * header.runs:
        raise BadBatch(f"a table of {header.table_size} bytes is too large for {header.runs} runs")
    if header_crc_of(view, data_start) != header.header_crc:
        raise BadBatch("the checksum of header, runs and table is wrong")
    if header.producer_sequence + header.messages > PRODUCER_SEQUENCE_END or header.created_at_us >= CREATED_AT_END_US:
        raise BadBatch(
            f"numbers are too large: producer sequence {header.producer_sequence}, made at {header.created_at_us} us"
        )
    if header.mark != _NO_MARK:
        raise BadBatch("only the store makes the mark; send zeros")
    data = view[data_start:]
    if crc32c(data) != header.data_crc:
        raise BadBatch("the checksum of the data is wrong")
    table = bytes(view[BATCH_HEADER_SIZE + RUN_SIZE * header.runs : data_start])
    if limits.flags & HAS_ORIGIN_ID:
        records_in(source_in(table))
    else:
        check_sent(source_in(table))
    if table[-AHEAD_SIZE:].startswith(AHEAD_FIELD) and not limits.is_stored:
        raise BadBatch("only the store adds the field 'ahead' to a table; leave it out")
    names = names_of(table)
    if len(names) > header.runs:
        raise BadBatch(f"the table names {len(names)} subjects for {header.runs} runs")
    sent = sent_as(table)
    if sent is not None and not limits.is_stored:
        _check_unique(sent, header, limits)
    if header.runs == 1:
        return CheckedBatch(header, names, _check_run(view, data, header, limits), None, sent is not None)
    return CheckedBatch(header, names, None, _check_runs(view, data, header, limits, len(names)), sent is not None)


def _check_unique(sent: tuple[int, int], header: Header, limits: BatchLimits) -> None:
    if limits.flags & HAS_ORIGIN_ID:
        raise BadBatch("a batch of copies has no field 'unique' in its table; leave it out")
    if sent != (header.messages, header.data_crc):
        raise BadBatch(
            f"the field 'unique' of the table says {sent[0]} messages and data_crc {sent[1]:#x}, the header says "
            f"{header.messages} and {header.data_crc:#x}"
        )


def _check_run(view: memoryview, data: memoryview, header: Header, limits: BatchLimits) -> RunRecord:
    run: RunRecord = RUN.unpack_from(view, BATCH_HEADER_SIZE)
    subject, lane, flags, reserved, count, offset, size, crc, _ = run
    column_bytes = COLUMN_BYTES[header.flags] * count
    if subject or (lane and not is_known(lane)) or flags & ~limits.run_flags or reserved or offset:
        raise BadBatch(f"run 0 is not valid: subject {subject} of 1, lane {lane}, flags {flags:#x}, offset {offset}")
    if count != header.messages or not count or size != len(data) or column_bytes > size:
        raise BadBatch(f"run 0 does not add up: {count} messages of {header.messages} in {size} bytes")
    if crc != header.data_crc:
        raise BadBatch("the checksum of run 0 is wrong")
    total, longest, fits = _lengths(data, count)
    if total != size - column_bytes or not fits:
        raise BadBatch(f"the lengths of run 0 sum to {total}, its payload has {size - column_bytes} bytes")
    if longest > limits.max_message_bytes:
        raise _too_large(longest, limits)
    return run


def _lengths(data: memoryview, count: int) -> tuple[int, int, bool]:
    """Return the sum and the maximum of the lengths of a run's messages, and whether each header fits its message."""
    if count == 1:
        total, header_size = _FIRST_COLUMNS.unpack_from(data)
        return total, total, header_size <= total
    if count < FEW:
        lengths = struct.unpack_from(f"<{count}I", data)
        header_sizes = struct.unpack_from(f"<{count}H", data, 4 * count)
        return sum(lengths), max(lengths), all(map(int.__le__, header_sizes, lengths))
    column = np.frombuffer(data, "<u4", count)
    fits = not (np.frombuffer(data, "<u2", count, 4 * count) > column).any()
    return int(column.sum(dtype=np.uint64)), int(column.max()), fits


def _check_runs(view: memoryview, data: memoryview, header: Header, limits: BatchLimits, names: int) -> Runs:
    runs: Runs = np.frombuffer(view, RUN_DTYPE, header.runs, BATCH_HEADER_SIZE)
    subjects, counts = runs["subject"], runs["count"].astype(np.int64)
    sizes, offsets = runs["size"].astype(np.int64), runs["offset"].astype(np.int64)
    ends = np.cumsum(sizes)
    unknown_flags = runs["flags"] & np.uint16(0xFFFF & ~limits.run_flags)
    if (unknown_flags | runs["reserved"]).any() or int(subjects.max()) >= names:
        raise BadBatch("a run names a subject that the table does not have, or uses a reserved field")
    by_subject = np.bincount(subjects, minlength=names)
    if runs["lane"].any():
        unknown = runs["lane"][~are_known(runs["lane"])]
        if len(unknown):
            raise BadBatch(f"lane {unknown[0]} of a run is neither a priority nor a slot of order keys")
        pairs = subjects.astype(np.uint32) << np.uint32(16) | runs["lane"]
        if not (pairs[1:] > pairs[:-1]).all() and len(np.unique(pairs)) < len(runs):  # most clients send them sorted
            raise BadBatch("two runs of one batch have the same subject and lane")
    elif int(by_subject.max()) > 1:
        raise BadBatch("two runs of one batch have the same subject")
    if not by_subject.all():
        raise BadBatch("the table names a subject that no run has")
    if int(ends[-1]) != len(data) or not np.array_equal(offsets, ends - sizes):
        raise BadBatch("the runs do not lie one after another")
    if not counts.all() or int(counts.sum()) != header.messages:
        raise BadBatch(f"the runs do not have {header.messages} messages in all")
    payload_bytes = sizes - counts * COLUMN_BYTES[header.flags]
    if (payload_bytes < 0).any():
        raise BadBatch("a run is shorter than its columns")
    if [crc32c(data[a:b]) for a, b in zip(offsets.tolist(), ends.tolist(), strict=False)] != runs["crc"].tolist():
        raise BadBatch("the checksum of a run is wrong")
    lengths, header_sizes = gather_lengths(data, offsets, counts)
    sums = lengths
    if len(lengths) != len(counts):
        sums = np.add.reduceat(lengths, np.cumsum(counts) - counts)
    if not np.array_equal(sums, payload_bytes) or (header_sizes > lengths).any():
        raise BadBatch("the lengths of a run do not sum to its payload")
    longest = int(lengths.max())
    if longest > limits.max_message_bytes:
        raise _too_large(longest, limits)
    return runs


def gather_lengths(
    data: memoryview, offsets: npt.NDArray[np.int64], counts: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return lengths and header sizes of all messages of runs that begin at *offsets* of *data*: int64[n] each."""
    # Every byte offset seen as the start of an integer: one fancy index then reads unaligned columns of many runs.
    u4 = np.ndarray((max(len(data) - 3, 0),), "<u4", data, 0, (1,))
    u2 = np.ndarray((max(len(data) - 1, 0),), "<u2", data, 0, (1,))
    total = int(counts.sum())
    if total == len(counts):
        lengths, header_sizes = u4[offsets], u2[offsets + 4]
    else:
        counts = counts.astype(np.int64)
        within = np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(offsets, counts)
        lengths = u4[starts + 4 * within]
        header_sizes = u2[starts + 4 * np.repeat(counts, counts) + 2 * within]
    return lengths.astype(np.int64), header_sizes.astype(np.int64)


def _too_large(longest: int, limits: BatchLimits) -> MessageTooLarge:
    return MessageTooLarge(
        f"a message of {longest} bytes (header and body) is over the broker's max_message_bytes of "
        f"{limits.max_message_bytes}; send it in parts or raise the limit"
    )


#: A batch of one run as a client sends it: magic to flags, size, table size, messages, runs, created at, producer,
#: producer sequence, data crc, header crc, mark; subject to reserved of the run, its count, offset, size, crc.
_PLAIN: Final = struct.Struct("<QIIII16xQ8x16sQIIQQIIII8x")
PLAIN_SIZE: Final = BATCH_HEADER_SIZE + RUN_SIZE
assert _PLAIN.size == PLAIN_SIZE
#: STAMP_POSITION and STAMP_STORE with what lies between: when the batch was created.
_STAMP: Final = struct.Struct("<QQQH6s")
assert STAMP_POSITION_OFFSET + _STAMP.size == STAMP_STORE_OFFSET + STAMP_STORE.size
_PLAIN_SOURCE: Final = PLAIN_SIZE + SLOT_OFFSET
_PLAIN_FIRST: Final = BATCH_HEADER_SIZE + RUN_FIRST_SEQUENCE_OFFSET
_PLAIN_FLAGS: Final = tuple(
    tags | keys for tags in (0, HAS_TAGS) for keys in (0, HAS_KEY_HASH, HAS_KEY_HASH | HAS_MORE_KEYS)
)
#: The bytes that a message takes in columns, by magic to flags: batches with other columns are not plain.
_PLAIN_COLUMNS: Final = {BATCH_MAGIC | BATCH_VERSION << 32 | flags << 48: COLUMN_BYTES[flags] for flags in _PLAIN_FLAGS}


class PlainBatch(NamedTuple):
    """A checked batch of one run without times. The check leaves its table to the caller, who knows it already."""

    table: bytes
    messages: int
    created_at_us: int
    producer_id: bytes
    producer_sequence: int
    data_crc: int
    flags: int
    run_size: int


def check_plain(view: memoryview, size: int, max_message_bytes: int) -> PlainBatch | None:
    """Check a batch of one run as a client sent it: *view* is exactly the batch, of *size* bytes, at least PLAIN_SIZE.

    Return None where it is not plain or has a fault; then ``check_batch`` says which. A batch whose table is known to
    be valid passes only if ``check_batch`` takes it.
    """
    (
        head, batch_size, table_size, messages, runs, created_at_us, producer_id, sequence, data_crc, header_crc, mark,
        run_head, count, offset, run_size, run_crc,
    ) = _PLAIN.unpack_from(view)  # fmt: skip
    columns = _PLAIN_COLUMNS.get(head)
    if (
        columns is None or batch_size != size or runs != 1 or mark or run_head or offset or count != messages
        or PLAIN_SIZE + table_size + run_size != size or run_crc != data_crc
        or sequence + messages > PRODUCER_SEQUENCE_END or created_at_us >= CREATED_AT_END_US
    ):  # fmt: skip
        return None
    data_start = size - run_size
    data = view[data_start:]
    if (
        crc32c(view[BATCH_HEADER_SIZE:data_start], crc32c(view[:BATCH_PREFIX_SIZE])) != header_crc
        or crc32c(data) != data_crc
    ):
        return None
    if count == 1:
        if run_size < columns:
            return None
        length, header_size = _FIRST_COLUMNS.unpack_from(data)
        if length != run_size - columns or header_size > length or length > max_message_bytes:
            return None
    elif not _fits_columns(data, count, run_size, columns, max_message_bytes):
        return None
    return made(
        PlainBatch,
        (
            bytes(view[PLAIN_SIZE:data_start]), messages, created_at_us, producer_id, sequence, data_crc, head >> 48,
            run_size,
        ),
    )  # fmt: skip


def _fits_columns(data: memoryview, count: int, size: int, columns: int, max_message_bytes: int) -> bool:
    """Return whether the lengths of the messages of a run fit its size and the limit."""
    if not count or count * columns > size:
        return False
    total, longest, fits = _lengths(data, count)
    return fits and total == size - count * columns and longest <= max_message_bytes


def stamp_plain(
    view: memoryview, data_start: int, created_at_us: int, position: int, stored_at_us: int, partition: int,
    store_id: bytes, mark: Any, first_sequence: int, front: bytes,
) -> None:  # fmt: skip
    """Write the stamp into a plain batch, as ``stamp``. *mark* is a keyed blake2b without input (``mark_maker``),
    *front* is the source as ``source.stamped_front`` returns it.
    """
    view[_PLAIN_SOURCE : _PLAIN_SOURCE + len(front)] = front
    _STAMP.pack_into(view, STAMP_POSITION_OFFSET, position, stored_at_us, created_at_us, partition, store_id)
    _FIRST_SEQUENCE.pack_into(view, _PLAIN_FIRST, first_sequence)
    crc = crc32c(view[BATCH_HEADER_SIZE:data_start], crc32c(view[:BATCH_PREFIX_SIZE]))
    digest = mark.copy()
    digest.update(_MARK_INPUT.pack(position, crc))
    STAMP_SEAL.pack_into(view, STAMP_SEAL_OFFSET, crc, digest.digest())


# ---------------------------------------------------------------------------------------------------------------------
# Stamping


def stamp(
    view: memoryview,
    batch: CheckedBatch,
    *,
    position: int,
    stored_at_us: int,
    partition: int,
    store_id: bytes,
    secret: bytes,
    first_sequences: int | npt.NDArray[np.uint64],
    source: bytes | None = None,
) -> None:
    """Write the stamp into the batch, in place: position, time, store, sequences, source, checksum and mark.

    *first_sequences* is one int for a batch of one run, else u64[runs]. *source* is what ``source.stamp_of`` makes, and
    must have room; None: the batch has copies, which keep theirs.
    """
    if source is not None:
        stamp_source(view, BATCH_HEADER_SIZE + RUN_SIZE * batch.header.runs, source)
    STAMP_POSITION.pack_into(view, STAMP_POSITION_OFFSET, position, stored_at_us)
    STAMP_STORE.pack_into(view, STAMP_STORE_OFFSET, partition, store_id)
    if batch.runs is None:
        _FIRST_SEQUENCE.pack_into(view, BATCH_HEADER_SIZE + RUN_FIRST_SEQUENCE_OFFSET, first_sequences)
    else:
        batch.runs["first_sequence"] = first_sequences  # writes through to the received buffer
    crc = header_crc_of(view, batch.header.data_start)
    STAMP_SEAL.pack_into(view, STAMP_SEAL_OFFSET, crc, mark_of(secret, position, crc))


# ---------------------------------------------------------------------------------------------------------------------
# Stored batches


class UnknownBatchVersion(BadBatch):
    """A batch with the store's mark has a format version that this program does not read."""

    code = "unknown_batch_version"


def validate_stored(view: memoryview, position: int, secret: bytes, store_id: bytes | None = None) -> Header:
    """Check the stored batch at the start of *view*, which should lie at *position*; return its header.

    Raises BadBatch with the reason: a wrong checksum of header or data, another position or store, a wrong mark.
    """
    header = validate_stored_header(view, position, secret, store_id)
    if crc32c(view[header.data_start : header.size]) != header.data_crc:
        raise BadBatch("the checksum of the data is wrong")
    return header


def validate_stored_header(view: memoryview, position: int, secret: bytes, store_id: bytes | None = None) -> Header:
    """As validate_stored, but without the data's checksum; recovery looks for headers by it after bad bytes."""
    if len(view) < BATCH_HEADER_SIZE + RUN_SIZE:
        raise BadBatch("cut short in the header")
    header = parse_header(view)
    if header.magic != BATCH_MAGIC:
        raise BadBatch("no batch begins here")
    if header.position != position or (store_id is not None and header.store_id != store_id):
        raise BadBatch(f"the batch says that it lies at {header.position} of store {header.store_id.hex()}")
    if not header.runs or header.data_start > header.size:
        raise BadBatch("sizes do not add up")
    if header.size > len(view):
        raise BadBatch(f"cut short: {len(view)} of {header.size} bytes")
    if header_crc_of(view, header.data_start) != header.header_crc:
        raise BadBatch("the checksum of header, runs and table is wrong")
    if mark_of(secret, position, header.header_crc) != header.mark:
        raise BadBatch("the mark is not this store's")
    if header.version != BATCH_VERSION:
        raise UnknownBatchVersion(
            f"the batch at position {position} has format version {header.version}; this QMQ reads {BATCH_VERSION}: "
            "use a newer one"
        )
    return header


def runs_of(view: memoryview, header: Header) -> Runs:
    """Return the run records of the batch at the start of *view*: RUN_DTYPE[runs], not copied."""
    return np.frombuffer(view, RUN_DTYPE, header.runs, BATCH_HEADER_SIZE)


def numbers_by_run(names: Sequence[str], runs: Runs, number_of: Callable[[str, int], int]) -> npt.NDArray[np.int64]:
    """Return the number of each run's subject and lane: *number_of* returns it, maybe a new one, by name and lane.

    Broker, recovery and verify number new subjects in the same order: by the table, and by the runs where a batch has
    lanes.
    """
    subjects, lanes = runs["subject"], runs["lane"]
    if not lanes.any():
        numbers = np.fromiter((number_of(name, LANE_NORMAL) for name in names), np.int64, len(names))
        return np.asarray(numbers[subjects])
    by_run = map(names.__getitem__, subjects.tolist())
    return np.fromiter(map(number_of, by_run, lanes.tolist()), np.int64, len(runs))


def stored_names(view: memoryview, header: Header) -> tuple[str, ...]:
    """Return the subjects in the table of the batch at the start of *view*."""
    return names_of(stored_table(view, header))


def stored_table(view: memoryview, header: Header) -> bytes:
    """Return the table of the batch at the start of *view*."""
    return bytes(view[BATCH_HEADER_SIZE + RUN_SIZE * header.runs : header.data_start])


def entry_flags(run: int, batch: int) -> int:
    """Return the flags of an entry, made of those of its run and of its batch."""
    return run | (batch & ENTRY_BATCH_FLAGS) << 8


def entry_of(
    batch: CheckedBatch, position: int, stored_at_us: int, subject_number: int, first_sequence: int
) -> EntryRow:
    """Return the consumer-log entry of a batch of one run, in the order of layout.ENTRY."""
    run = batch.run
    assert run is not None
    header = batch.header
    return (
        first_sequence, position, stored_at_us, subject_number, run[4], 0, run[1], 1, entry_flags(run[2], header.flags),
        run[6], header.size,
    )  # fmt: skip


def entries_of(
    runs: Runs, header: Header, position: int, stored_at_us: int, subject_numbers: npt.NDArray[Any]
) -> npt.NDArray[np.void]:
    """Return the consumer-log entries of a stamped batch: ENTRY_DTYPE[runs]. *subject_numbers* goes by run."""
    entries = np.empty(len(runs), ENTRY_DTYPE)
    entries["first_sequence"] = runs["first_sequence"]
    entries["position"] = position
    entries["stored_at_us"] = stored_at_us
    entries["subject"] = subject_numbers
    entries["count"] = runs["count"]
    entries["run"] = np.arange(len(runs), dtype=np.uint16)
    entries["lane"] = runs["lane"]
    entries["runs"] = len(runs)
    entries["flags"] = runs["flags"] | np.uint16(entry_flags(0, header.flags))
    entries["run_size"] = runs["size"]
    entries["batch_size"] = header.size
    return entries


#: Flags of messages that are delayed, expire, or were delayed and are delivered now.
_TIMED_FLAGS: Final = HAS_DELIVER_AT | HAS_EXPIRE_AT | HAS_ORIGIN_ID


def with_ahead(view: memoryview, batch: CheckedBatch, ahead_us: int) -> tuple[memoryview, CheckedBatch]:
    """Return the batch for a stamp that is *ahead_us* ahead of the wall clock: with the field if it needs one, else as
    it is.
    """
    header = batch.header
    if ahead_us < DELIVER_UNIT_US or not header.flags & _TIMED_FLAGS:
        return view, batch
    stored = stored_table(view, header)
    table = table_of(batch.names, source_in(stored))
    if (sent := sent_as(stored)) is not None:
        table = with_field(table, unique_field(*sent))
    table = with_field(table, AHEAD_FIELD + ahead_us.to_bytes(8, "big"))
    records = bytes(view[BATCH_HEADER_SIZE : BATCH_HEADER_SIZE + RUN_SIZE * header.runs])
    data = view[header.data_start : header.size]
    size = BATCH_HEADER_SIZE + len(records) + len(table) + len(data)
    fields = header._replace(size=size, table_size=len(table))
    buffer = memoryview(bytearray(b"".join((BATCH_HEADER.pack(*fields), records, table, data))))
    runs = None
    if batch.runs is not None:
        runs = np.frombuffer(buffer, RUN_DTYPE, header.runs, BATCH_HEADER_SIZE)
    return buffer, CheckedBatch(parse_header(buffer), batch.names, batch.run, runs, batch.has_unique)


def clock_us_of(view: memoryview, header: Header, stored_at_us: int | None = None) -> int:
    """Return when the batch at the start of *view* was stored, by the broker's wall clock.

    *stored_at_us* is its stamp, for a *header* that was read before the batch had one.
    """
    stamp_us, end = header.stored_at_us if stored_at_us is None else stored_at_us, header.data_start
    field = bytes(view[end - AHEAD_SIZE : end])
    if not field.startswith(AHEAD_FIELD):
        return stamp_us
    return max(stamp_us - int.from_bytes(field[len(AHEAD_FIELD) :], "big"), 0)
