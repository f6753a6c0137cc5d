"""A run in a client: messages of one subject out of one batch, decoded on first use."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate, chain, repeat
from operator import add, attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBatch
from qmq.format.batch import COLUMN_BYTES, FEW, Header
from qmq.format.bounded_msgpack import cause_of, unpack
from qmq.format.hashing import check_of
from qmq.format.ids import MessageId
from qmq.format.layout import (
    HAS_CREATED_AT,
    HAS_DELIVER_AT,
    HAS_EXPIRE_AT,
    HAS_KEY_HASH,
    HAS_ORIGIN_ID,
    HAS_SOURCE,
    HAS_TAGS,
    MESSAGE_ID,
    OPTIONAL_COLUMNS,
    PIECE_HEADER,
    RUNS_HEADER,
)
from qmq.format.source import NO_SOURCE, UNKNOWN_SOURCE, Source, records_in, source_in, sources_of, with_producer

_HEADER_SIZE: Final = struct.Struct("<H")
#: The columns that every message has: length u32 | header_size u16 | check u32
_ONE_MESSAGE: Final = struct.Struct("<IHI")
_WORD: Final = struct.Struct("<I")
#: No header was unpacked last.
_NO_HEADER: Final[tuple[int, dict[str, Any]]] = -1, {}
_COUNT: Final = attrgetter("count")
#: A message that a program keeps keeps its run, if that has up to so many bytes, or else the envelopes of up to so many
#: messages, and fewer where they have headers: never a large answer that it came in.
KEPT_BYTES: Final = 16 << 10
KEPT_ENVELOPES: Final = 1_024
KEPT_HEADERS: Final = 256


class PieceHeader(NamedTuple):
    """The fields of a piece's header, in file order; those that a batch header has too mean the same."""

    magic: int
    version: int
    whole: int
    flags: int
    size: int
    messages: int
    ordinal: int
    subject_size: int
    lane: int
    position: int
    stored_at_us: int
    created_at_us: int
    first_sequence: int
    partition: int
    store_id: bytes
    run_flags: int
    run: int
    data_crc: int
    table_size: int
    header_crc: int


class RunsHeader(NamedTuple):
    """The fields of the header of a piece of several runs, in its order."""

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
    reserved_too: int
    header_crc: int


assert len(RUNS_HEADER.unpack(bytes(RUNS_HEADER.size))) == len(RunsHeader._fields)
assert len(PIECE_HEADER.unpack(bytes(PIECE_HEADER.size))) == len(PieceHeader._fields)


class Envelopes:
    """Messages of one subject out of one batch without their bodies: all else that a message shows.

    ``origin`` is the header of that batch or piece, ``ordinal`` the first message's in the batch.
    """

    __slots__ = (
        "_header", "_packed", "_start", "_view", "attempt", "count", "delivery_sequence", "first_sequence", "in_flight",
        "lane", "lease", "ordinal", "origin", "run_flags", "subject", "table",
    )  # fmt: skip

    origin: Header | PieceHeader | RunsHeader
    subject: str
    count: int
    lane: int
    run_flags: int
    first_sequence: int
    ordinal: int
    table: bytes
    #: The object that takes dispositions of its messages (None: none does), by delivery sequences from this one on;
    #: ``attempt`` counts how often they were handed out.
    in_flight: Any
    delivery_sequence: int
    attempt: int
    #: Shared by runs that came together.
    lease: Any
    _header: tuple[int, dict[str, Any]]

    def __init__(self, run: Run, start: int, stop: int, packed: Sequence[bytes]) -> None:
        """Take messages [start, stop) of *run*, and copy their columns. *packed* has their headers, or nothing if all
        are empty.
        """
        self.table = run.table
        self.origin = run.origin
        self.subject = run.subject
        self.count = stop - start
        self.lane = run.lane
        self.run_flags = run.run_flags
        self.first_sequence = run.first_sequence + start
        self.ordinal = run.ordinal + start
        if self.count == run.count:
            columns = bytes(run.columns)
        else:
            data, places = run.data, column_offsets(run.flags, run.count)
            columns = b"".join([data[at + size * start : at + size * stop] for at, size in places])
        self._view = memoryview(columns)
        self._start = 0
        self.in_flight = run.in_flight
        self.lease = run.lease
        self.delivery_sequence = run.delivery_sequence + start
        self.attempt = run.attempt
        self._packed = packed
        self._header = _NO_HEADER

    @property
    def flags(self) -> int:
        """The flags of the batch: which optional columns it has."""
        return self.origin.flags

    @property
    def position(self) -> int:
        """The position of the batch in its partition."""
        return self.origin.position

    @property
    def stored_at_us(self) -> int:
        """The time at which the broker stored the batch."""
        return self.origin.stored_at_us

    @property
    def created_at_us(self) -> int:
        """The time at which its sender made the batch; for messages of several batches, the earliest."""
        return self.origin.created_at_us

    def created_us(self, index: int) -> int:
        """Return the time at which the sender of message *index* made its batch."""
        column = self.column(HAS_CREATED_AT)
        return self.origin.created_at_us if column is None else int(column[index])

    @property
    def partition(self) -> int:
        """The partition of the message log that holds the batch."""
        return self.origin.partition

    @property
    def store_id(self) -> bytes:
        """The id of the store that holds the batch."""
        return self.origin.store_id

    def column(self, flag: int) -> npt.NDArray[Any] | None:
        """Return the optional column of *flag*, or None: tags and sources are u32, origin ids 16 bytes, others u64."""
        if not self.flags & flag:
            return None
        offset = 10 * self.count
        for other, size in OPTIONAL_COLUMNS:
            if other == flag:
                kind = f"<u{size}" if size <= 8 else f"V{size}"
                return np.frombuffer(self._view, kind, self.count, self._start + offset)
            if self.flags & other:
                offset += size * self.count
        raise AssertionError(flag)

    def id(self, index: int) -> MessageId:
        """Return the message id of message *index*; of a copy, its origin id."""
        origin = self.origin
        if origin.flags & HAS_ORIGIN_ID:
            offset = self._start + COLUMN_BYTES[origin.flags & (HAS_ORIGIN_ID - 1)] * self.count
            return MessageId._make(MESSAGE_ID.unpack_from(self._view, offset + MESSAGE_ID.size * index))
        return MessageId(origin.store_id, origin.partition, origin.position + self.ordinal + index)

    def header(self, index: int) -> dict[str, Any]:
        """Return the unpacked header of message *index*: "k" keys, "o" order key, "t" tags, "p" properties; {} when it
        has none.

        Raises BadBatch when its sender packed something else: the broker does not look into headers.
        """
        last, header = self._header
        if last != index:
            try:
                header = read_header(self.packed_header(index))
            except BadBatch as error:
                raise BadBatch(f"message {self.id(index)} of {self.subject!r}: {error}") from None
            self._header = index, header  # programs read several fields of a message; all headers would be large
        return header

    def packed_header(self, index: int) -> bytes:
        """Return the header of message *index* as it was sent."""
        return self._packed[index] if self._packed else b""

    def with_body(self, index: int, body: bytes) -> Run:
        """Return message *index* as a run of its own, with its *body*."""
        header, view, size = self.packed_header(index), self._view, len(body)
        columns = [
            view[at : at + width]
            for at, width in (
                (self._start + offset + width * index, width)
                for offset, width in column_offsets(self.flags, self.count)
            )
        ]
        data = b"".join(((len(header) + size).to_bytes(4, "little"), *columns[1:], header, body))
        return self._part(index, 1, data)

    def _part(self, start: int, count: int, data: bytes) -> Run:
        """Return messages from number *start* on as a run, of which *data* are the columns and the payload."""
        run = Run(
            self.origin, self.subject, count, self.lane, self.run_flags, self.first_sequence + start,
            self.ordinal + start, memoryview(data), 0, len(data), self.table,
        )  # fmt: skip
        run.in_flight, run.delivery_sequence, run.attempt = self.in_flight, self.delivery_sequence + start, self.attempt
        run.lease = self.lease
        return run

    def packed_source(self) -> bytes:
        """Return the source of the messages, with their producer; empty if it is unknown. See ``format/source.py``."""
        try:
            source = source_in(self.table)
        except BadBatch:
            return b""
        producer_id = getattr(self.origin, "producer_id", b"")  # in a piece the source has it
        return with_producer(source, producer_id) if producer_id else source

    def source(self, index: int) -> Source:
        """Return where message *index* came from."""
        sources, number = sources_of(self.packed_source()), self._source_number(index)
        return sources[number] if number < len(sources) else UNKNOWN_SOURCE

    def source_record(self, index: int) -> bytes:
        """Return the record of the source of message *index*."""
        try:
            return records_in(self.packed_source())[self._source_number(index)]
        except (BadBatch, IndexError):
            return NO_SOURCE

    def _source_number(self, index: int) -> int:
        column = self.column(HAS_SOURCE)
        return 0 if column is None else int(column[index])


class Run(Envelopes):
    """Messages of one subject out of one batch, decoded on first use.

    A run of one message is common (random subjects), so making one builds no view and no list.
    """

    __slots__ = ("_bodies", "_decoded", "_stop", "is_decodable")

    def __init__(
        self,
        origin: Header | PieceHeader | RunsHeader,
        subject: str,
        count: int,
        lane: int,
        run_flags: int,
        first_sequence: int,
        ordinal: int,
        view: memoryview,
        start: int,
        stop: int,
        table: bytes = b"",
        is_decodable: bool = False,
    ) -> None:
        """Columns and payload are bytes [start, stop) of *view*. *table* is that of the batch or piece, or its
        beginning with the source; *is_decodable*: it is known that the headers of all messages can be decoded.
        """
        self.is_decodable = is_decodable
        self.table = table
        self.origin = origin
        self.subject = subject
        self.count = count
        self.lane = lane
        self.run_flags = run_flags
        self.first_sequence = first_sequence
        self.ordinal = ordinal
        self._view = view
        self._start = start
        self._stop = stop
        self.in_flight = None
        self.lease = None
        self.delivery_sequence = 0
        self.attempt = 1
        self._bodies: list[bytes] | None = None
        #: The payload, and in it where each message starts, where its body starts, and where it ends.
        self._decoded: tuple[bytes, list[int], list[int], list[int]] | None = None
        self._header = _NO_HEADER

    @property
    def data(self) -> memoryview:
        """Columns and payload."""
        return self._view[self._start : self._stop]

    def lengths(self) -> npt.NDArray[np.uint32]:
        """Return header and body sizes in bytes: u32[count]."""
        return np.frombuffer(self.data, "<u4", self.count)

    def header_sizes(self) -> npt.NDArray[np.uint16]:
        """Return header sizes in bytes: u16[count]."""
        return np.frombuffer(self.data, "<u2", self.count, 4 * self.count)

    def first_header_size(self) -> int:
        """Return the header size of the first message."""
        size: int = _HEADER_SIZE.unpack_from(self._view, self._start + 4)[0]
        return size

    def has_no_headers(self) -> bool:
        """Return whether no message has a header; meant for few messages."""
        start = self._start + 4 * self.count
        return not any(self._view[start : start + 2 * self.count])

    def checks(self) -> npt.NDArray[np.uint32]:
        """Return the messages' own checksums: u32[count]."""
        return np.frombuffer(self.data, "<u4", self.count, 6 * self.count)

    @property
    def size(self) -> int:
        """The bytes of columns and payload."""
        return self._stop - self._start

    @property
    def columns(self) -> memoryview:
        """The columns without the payload."""
        return self._view[self._start : self._start + COLUMN_BYTES[self.origin.flags] * self.count]

    @property
    def payload(self) -> memoryview:
        """The messages one after another, each as header and body."""
        return self._view[self._start + COLUMN_BYTES[self.origin.flags] * self.count : self._stop]

    def is_sound_alone(self) -> bool:
        """Return whether the message of a run of one fits its own checksum, with the fold of its columns."""
        columns = COLUMN_BYTES[self.origin.flags]
        length, fold, check = _ONE_MESSAGE.unpack_from(self._view, self._start)
        if length != self._stop - self._start - columns or fold > length:
            return False
        for (word,) in _WORD.iter_unpack(self._view[self._start + _ONE_MESSAGE.size : self._start + columns]):
            fold ^= word
        fits: bool = check_of(self._view[self._start + columns : self._stop], fold) == check
        return fits

    def _decode(self) -> tuple[bytes, list[int], list[int], list[int]]:
        count = self.count
        if count < FEW:
            ends = list(accumulate(struct.unpack_from(f"<{count}I", self._view, self._start)))
            starts = [0, *ends[:-1]]
            header_sizes = struct.unpack_from(f"<{count}H", self._view, self._start + 4 * count)
            body_starts = list(map(add, starts, header_sizes))
        else:
            lengths = self.lengths()
            column = np.cumsum(lengths, dtype=np.int64)
            ends = column.tolist()
            column -= lengths
            starts = column.tolist()
            column += self.header_sizes()
            body_starts = column.tolist()
        return bytes(self.payload), starts, body_starts, ends

    def bodies(self) -> list[bytes]:
        """Return all bodies; the list belongs to the run."""
        bodies = self._bodies
        if bodies is None:
            bodies = self._bodies = self._read_bodies()
        return bodies

    def _read_bodies(self) -> list[bytes]:
        if self.count == 1:
            start = self._start + COLUMN_BYTES[self.origin.flags] + self.first_header_size()
            return [bytes(self._view[start : self._stop])]
        return self._read_parts()[1]

    def _read_parts(self) -> tuple[Sequence[bytes], list[bytes]]:
        """Return the headers, none if all are empty, and the bodies."""
        if self.count < FEW:
            payload, starts, body_starts, ends = self._decoded or self._decode()
            bodies = [payload[a:b] for a, b in zip(body_starts, ends, strict=True)]
            if starts == body_starts:
                return (), bodies
            return [payload[a:b] for a, b in zip(starts, body_starts, strict=True)], bodies
        # A file in memory returns one part after another in half the time of slices.
        read = BytesIO(self.payload).read
        lengths, header_sizes = self.lengths(), self.header_sizes()
        if not header_sizes.any():
            return (), list(map(read, lengths.tolist()))
        sizes = np.empty(2 * self.count, np.int64)
        sizes[::2] = header_sizes
        np.subtract(lengths, header_sizes, out=sizes[1::2], dtype=np.int64)
        parts = list(map(read, sizes.tolist()))
        return parts[::2], parts[1::2]

    def body(self, index: int) -> bytes:
        """Return the body of message *index*. The first call makes all bodies: one by one would cost four times as
        much.
        """
        return (self._bodies or self.bodies())[index]

    def packed_header(self, index: int) -> bytes:
        """Return the header of message *index* as it was sent."""
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = self._decode()
        payload, starts, body_starts, _ = decoded
        return payload[starts[index] : body_starts[index]]

    def slice(self, start: int, stop: int) -> Run:
        """Return messages [start, stop) as a run of their own; the columns are copied."""
        return self._part(start, stop - start, b"".join(cut_data(self.data, self.flags, self.count, start, stop)))

    def split(self) -> tuple[list[Envelopes], list[bytes]]:
        """Return the envelopes of the messages, some at a time, and the bodies. A message that a program keeps keeps
        these envelopes, and nothing else of a run that is not small.
        """
        if self._stop - self._start <= KEPT_BYTES:
            return [self], self.bodies()
        headers, bodies = self._read_parts()
        count, step = self.count, KEPT_HEADERS if headers else KEPT_ENVELOPES
        if count <= step:
            return [Envelopes(self, 0, count, headers)], bodies
        starts = range(0, count, step)
        return [Envelopes(self, at, min(at + step, count), headers[at : at + step]) for at in starts], bodies

    def views(self) -> tuple[Iterator[Envelopes], list[bytes]]:
        """Return for each message the envelopes that have its own, without end, and the bodies. See ``split``."""
        if self._stop - self._start <= KEPT_BYTES:
            bodies = self._bodies
            if bodies is None:
                bodies = self._bodies = self._read_bodies()
            return repeat(self), bodies
        envelopes, bodies = self.split()
        if len(envelopes) == 1:
            return repeat(envelopes[0]), bodies
        return chain.from_iterable(map(repeat, envelopes, map(_COUNT, envelopes))), bodies


def messages_in(runs: Iterable[Run]) -> int:
    """Return how many messages *runs* have."""
    return sum(map(_COUNT, runs))


#: The beginning of a header with only a short key: {"k": [str of up to 31 bytes]}, or with only such an order key; the
#: key's size is added to the last byte.
_KEY_ONLY: Final = b"\x81\xa1k\x91"
_ORDER_KEY_ONLY: Final = b"\x81\xa1o\x91"
_SHORT_KEYS: Final = {_KEY_ONLY: "k", _ORDER_KEY_ONLY: "o"}
_LETTERS: Final = tuple(b"ko")
_LETTER_AT: Final = 2
_SHORT_TEXT: Final = 0xA0
_KEY_AT: Final = 5
_MOST_SHORT: Final = _KEY_AT + 31


def undecodable(run: Run) -> list[int]:
    """Return the messages of a verified run whose headers cannot be decoded, ascending.

    The fault is the sender's: the broker does not look into headers. Most headers are empty or only a short key.
    """
    if run.is_decodable:
        return []
    if run.count == 1:
        size = run.first_header_size()
        return [] if not size or _is_decodable(bytes(run.payload[:size])) else [0]
    if run.count < FEW and run.has_no_headers():
        return []
    sizes = run.header_sizes()
    if not sizes.any():
        return []
    ends = np.cumsum(run.lengths(), dtype=np.int64)
    starts = ends - run.lengths()
    other = np.flatnonzero(~_have_only_keys(np.frombuffer(run.payload, np.uint8), starts, sizes) & (sizes > 0))
    payload = run.payload
    headers = [bytes(payload[a : a + n]) for a, n in zip(starts[other].tolist(), sizes[other].tolist(), strict=True)]
    good = {header for header in set(headers) if _is_decodable(header)}
    return [index for index, header in zip(other.tolist(), headers, strict=True) if header not in good]


def are_decodable(
    data: memoryview,
    payloads: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Return for which runs it is known that all headers can be decoded, since each is empty or only a short key:
    bool[runs].

    All are looked at with the same calls: one by one they would cost more than everything else that is done with a run.
    *payloads* is where the payload of each run begins in *data*, *counts* how many messages it has; *lengths* and
    *sizes* are those of all messages and of their headers. Nothing needs to be verified.
    """
    if not sizes.any():
        return np.ones(len(counts), np.bool_)
    firsts, starts = np.cumsum(counts) - counts, np.cumsum(lengths) - lengths
    starts += np.repeat(payloads - starts[firsts], counts)
    fits = _have_only_keys(np.frombuffer(data, np.uint8), starts, sizes) | (sizes == 0)
    found: npt.NDArray[np.bool_] = np.logical_and.reduceat(fits, firsts)
    return found


def why_undecodable(run: Run, index: int) -> str:
    """Return why the header of message *index* cannot be decoded."""
    try:
        run.header(index)
    except BadBatch as error:
        return str(error)
    raise AssertionError(index)


def _have_only_keys(
    payload: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Return which headers are certainly a short ASCII key or order key and nothing else: bool[count]. None that reach
    beyond the end of *payload* are.
    """
    found: npt.NDArray[np.bool_] = (sizes >= _KEY_AT) & (sizes <= _MOST_SHORT) & (starts + sizes <= len(payload))
    places = np.flatnonzero(found)
    at, size = starts[places], sizes[places].astype(np.int64)
    fits = payload[at + _KEY_AT - 1] == _SHORT_TEXT + size - _KEY_AT
    for offset, byte in enumerate(_KEY_ONLY):
        letters = payload[at + offset]
        fits &= (letters == byte) if offset != _LETTER_AT else (letters == _LETTERS[0]) | (letters == _LETTERS[1])
    for offset in range(_KEY_AT, int(size.max(initial=0))):
        # Bytes behind the end of a header do not count.
        fits &= (payload[np.minimum(at + offset, len(payload) - 1)] < 0x80) | (size <= offset)
    found[places] = fits
    return found


def _is_decodable(header: bytes) -> bool:
    try:
        read_header(header)
    except BadBatch:
        return False
    return True


def read_header(packed: bytes) -> dict[str, Any]:
    """Return a message's header unpacked; an empty one is {}. Unknown names are left in. Raises BadBatch for other
    bytes.
    """
    if not packed:
        return {}
    name = _SHORT_KEYS.get(packed[: _KEY_AT - 1])
    if name is not None:  # most headers: unpacking would take several times as long
        text = packed[_KEY_AT:]
        if 0 < len(text) < 32 and packed[_KEY_AT - 1] == _SHORT_TEXT + len(text) and text.isascii():
            return {name: [text.decode()]}
    try:
        fields = unpack(packed)
    except Exception as error:  # msgpack raises several kinds; each is the sender's fault
        raise BadBatch(f"its header is not valid msgpack: {cause_of(error)}") from None
    if type(fields) is not dict:
        raise BadBatch("its header is not a map")
    for name, value in fields.items():
        if name == "p":
            fits = type(value) is dict and set(map(type, value)) == {str} == set(map(type, value.values()))
        else:
            fits = name not in ("k", "o", "t") or (type(value) is list and set(map(type, value)) == {str})
        if not fits:
            raise BadBatch(f"its header's {name!r} is not made of text")
    return fields


def folds_of(run: Run) -> npt.NDArray[np.uint32]:
    """Return build.fold_of for each message: u32[count]."""
    folds = run.header_sizes().astype(np.uint32)
    tags = run.column(HAS_TAGS)
    if tags is not None:
        folds ^= tags
    for flag in (HAS_KEY_HASH, HAS_DELIVER_AT, HAS_EXPIRE_AT, HAS_CREATED_AT, HAS_ORIGIN_ID, HAS_SOURCE):
        column = run.column(flag)
        if column is not None:
            folds ^= np.bitwise_xor.reduce(column.view("<u4").reshape(run.count, -1), axis=1)
    return folds


def column_offsets(flags: int, count: int) -> list[tuple[int, int]]:
    """Return offset and entry size of each column in a run's data; the payload follows them."""
    places, offset = [], 0
    for size in (4, 2, 4, *(size for flag, size in OPTIONAL_COLUMNS if flags & flag)):
        places.append((offset, size))
        offset += size * count
    return places


def cut_data(data: memoryview, flags: int, count: int, start: int, stop: int) -> list[memoryview]:
    """Return the slices of a run's data (of *count* messages) for messages [start, stop): columns, then payload."""
    slices = [data[offset + size * start : offset + size * stop] for offset, size in column_offsets(flags, count)]
    lengths = np.frombuffer(data, "<u4", count)
    first = COLUMN_BYTES[flags] * count + (int(lengths[:start].sum(dtype=np.uint64)) if start else 0)
    slices.append(data[first : first + int(lengths[start:stop].sum(dtype=np.uint64))])
    return slices
