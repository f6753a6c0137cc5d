"""Make Arrow columns of messages by numpy, without a loop over messages or a copy of bodies.

To collect bytes that are scattered in a window, it makes an Arrow array over all of the window whose offsets are the
starts and ends of the wanted ranges. Every other element is then a gap, and ``take`` selects the wanted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from qmq.errors import BadBatch
from qmq.format.lanes import priority_lanes_of, priority_of
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    HAS_CREATED_AT,
    HAS_ORIGIN_ID,
    HAS_SOURCE,
    LANE_LOW,
    MESSAGE_ID_SIZE,
    RUN_SIZE,
)
from qmq.format.run import read_header
from qmq.format.source import UNKNOWN_SOURCE, Source, source_in, sources_of, with_producer
from qmq_spark.headers import KEYS, ORDER_KEYS, PROPERTIES, TAGS, Texts, Walked, walk
from qmq_spark.heads import COLUMN_BYTES_BY_FLAGS, Heads, Ints, spread

#: The columns that need the columns and headers of messages; others need only the heads of batches.
OF_HEADERS: Final = frozenset(("key", "keys", "order_key", "tags", "properties"))
OF_MESSAGES: Final = OF_HEADERS | {"body"}

_FEW_A_RUN: Final = 32
#: The four hex digits of each two bytes.
_HEX: Final = np.frombuffer(np.arange(1 << 16, dtype=">u2").tobytes().hex().encode(), "<u4")
_ID_WORDS: Final = MESSAGE_ID_SIZE // 2

Flags = npt.NDArray[np.bool_]


class Undecodable(NamedTuple):
    """A message whose header cannot be decoded: its index, and the reason."""

    message: int
    reason: str


class MessageColumns:
    """The messages of the runs of *heads*, in their order; n of them."""

    def __init__(self, window: memoryview, heads: Heads, names: list[str]) -> None:
        self._window = window
        self._heads = heads
        self._names = names
        runs = heads.runs
        self.counts: Ints = runs["count"].astype(np.int64)
        #: For each run, the beginnings of its columns and of its payload in the window.
        self._columns = (heads.offsets + heads.data_starts)[heads.batch_of] + runs["offset"]
        flags = heads.headers["flags"][heads.batch_of].astype(np.int64)
        self._flags = flags
        self._payloads = self._columns + COLUMN_BYTES_BY_FLAGS[flags] * self.counts
        self.undecodable: list[Undecodable] = []
        self._lengths: Ints | None = None
        self._sources: tuple[list[Source], pa.Array] | None = None

    def __len__(self) -> int:
        return int(self.counts.sum())

    def record_batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return these messages with the columns of *schema*. Raises BadBatch if lengths are wrong.

        ``undecodable`` then has the messages that must be left out, if the schema has columns of headers.
        """
        made: dict[str, pa.Array] = {}
        wanted = set(schema.names)
        if wanted & OF_HEADERS:
            self._make_headers(schema, made)
        for field in schema:
            if field.name not in made:
                made[field.name] = _MAKERS[field.name](self)
        return pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)

    # --- what goes by run --------------------------------------------------------------------------------------------

    def _repeated(self, values: Any) -> Any:
        """Return a value for each message from one for each run."""
        return np.repeat(values, self.counts)

    def _by_batch(self, name: str, dtype: Any) -> Any:
        return self._repeated(self._heads.headers[name][self._heads.batch_of].astype(dtype))

    def subject(self) -> pa.Array:
        used, codes = np.unique(self._heads.subjects, return_inverse=True)
        names = pa.array([self._names[number] for number in used.tolist()], pa.string())
        return names.take(pa.array(self._repeated(codes.astype(np.int32))))

    def lane(self) -> pa.Array:
        return pa.array(self._repeated(self._heads.runs["lane"].astype(np.int32)))

    def priority(self) -> pa.Array:
        """Return the priorities."""
        codes = priority_lanes_of(self._heads.runs["lane"])
        return pa.array([priority_of(lane) for lane in range(LANE_LOW + 1)]).take(pa.array(self._repeated(codes)))

    def partition(self) -> pa.Array:
        return pa.array(self._by_batch("partition", np.int32))

    def positions(self) -> Ints:
        """Return the position of each message: int64[n]."""
        firsts = self._heads.headers["position"][self._heads.batch_of].astype(np.int64) + self._heads.ordinals
        return spread(firsts, self.counts)

    def position(self) -> pa.Array:
        return pa.array(self.positions())

    def sequence(self) -> pa.Array:
        return pa.array(spread(self._heads.runs["first_sequence"].astype(np.int64), self.counts))

    def created_at(self) -> pa.Array:
        """Return the creation times. A batch collected from others has a time for each message."""
        times = self._by_batch("created_at_us", np.int64)
        own = np.flatnonzero(self._flags & HAS_CREATED_AT)
        if len(own):
            counts = self.counts[own]
            columns = self._columns[own] + COLUMN_BYTES_BY_FLAGS[self._flags[own] & (HAS_CREATED_AT - 1)] * counts
            places = np.repeat(columns, counts) + 8 * spread(np.zeros(len(own), np.int64), counts)
            raw = np.frombuffer(self._window, np.uint8)
            firsts = np.cumsum(self.counts) - self.counts
            times[spread(firsts[own], counts)] = raw[places[:, None] + np.arange(8)].view("<u8").ravel()
        return pa.array(times).cast(pa.timestamp("us", "UTC"))

    def stored_at(self) -> pa.Array:
        return pa.array(self._by_batch("stored_at_us", np.int64)).cast(pa.timestamp("us", "UTC"))

    def message_id(self) -> pa.Array:
        """Return the ids in 32 hex digits; copies have those of their originals."""
        headers = self._heads.headers
        digits = np.empty((len(self), _ID_WORDS), "<u4")
        of_batches = np.empty((len(headers), 4), "<u4")
        of_batches[:, :3] = _HEX[np.frombuffer(headers["store_id"].tobytes(), ">u2").reshape(-1, 3)]
        of_batches[:, 3] = _HEX[headers["partition"]]
        digits[:, :4] = np.repeat(of_batches[self._heads.batch_of], self.counts, axis=0)
        positions = self.positions()
        for word in range(4):
            digits[:, 4 + word] = _HEX[(positions >> (48 - 16 * word)) & 0xFFFF]
        copies = np.flatnonzero(self._flags & HAS_ORIGIN_ID)
        if len(copies):
            counts = self.counts[copies]
            origins = self._columns[copies] + COLUMN_BYTES_BY_FLAGS[self._flags[copies] & (HAS_ORIGIN_ID - 1)] * counts
            places = np.repeat(origins, counts) + MESSAGE_ID_SIZE * spread(np.zeros(len(copies), np.int64), counts)
            raw = np.frombuffer(self._window, np.uint8)
            firsts = np.cumsum(self.counts) - self.counts
            digits[spread(firsts[copies], counts)] = _HEX[raw[places[:, None] + np.arange(MESSAGE_ID_SIZE)].view(">u2")]
        size = 2 * MESSAGE_ID_SIZE
        offsets = np.arange(0, size * (len(digits) + 1), size, dtype=np.int32)
        return pa.Array.from_buffers(pa.string(), len(digits), [None, pa.py_buffer(offsets), pa.py_buffer(digits)])

    # --- where messages came from ------------------------------------------------------------------------------------

    def source(self) -> pa.Array:
        return self._of_sources("address")

    def sender(self) -> pa.Array:
        return self._of_sources("sender")

    def producer(self) -> pa.Array:
        return self._of_sources("producer")

    def app(self) -> pa.Array:
        return self._of_sources("app")

    def _of_sources(self, name: str) -> pa.Array:
        if self._sources is None:
            self._sources = self._find_sources()
        found, numbers = self._sources
        return pa.array([getattr(source, name) for source in found], pa.string()).take(numbers)

    def _find_sources(self) -> tuple[list[Source], pa.Array]:
        """Return the sources of these messages, and for each message the index of its own."""
        heads, known = self._heads, dict[Source, int]()
        batches, batch_of = np.unique(heads.batch_of, return_inverse=True)
        of_batches, tables = list[list[int]](), heads.offsets[batches] + BATCH_HEADER_SIZE
        tables += RUN_SIZE * heads.headers["runs"][batches].astype(np.int64)
        ends = heads.offsets[batches] + heads.data_starts[batches]
        producers = heads.headers["producer_id"][batches].tolist()
        for table, end, producer_id in zip(tables.tolist(), ends.tolist(), producers, strict=True):
            source = with_producer(source_in(bytes(self._window[table:end])), producer_id)
            of_batches.append([known.setdefault(one, len(known)) for one in sources_of(source)])
        firsts = np.array([numbers[0] for numbers in of_batches], np.int32)
        numbers: Any = self._repeated(firsts[batch_of])
        begins = np.cumsum(self.counts) - self.counts
        for run in np.flatnonzero(self._flags & HAS_SOURCE).tolist():
            count, begin = int(self.counts[run]), int(begins[run])
            column = int(self._columns[run] + COLUMN_BYTES_BY_FLAGS[self._flags[run] & (HAS_SOURCE - 1)] * count)
            records = np.frombuffer(self._window, "<u4", count, column).astype(np.int64)
            of_records = np.array(of_batches[batch_of[run]], np.int32)
            unknown = known.setdefault(UNKNOWN_SOURCE, len(known))
            there = np.minimum(records, len(of_records) - 1)
            numbers[begin : begin + count] = np.where(records < len(of_records), of_records[there], unknown)
        return list(known), pa.array(numbers)

    # --- what goes by message ----------------------------------------------------------------------------------------

    def _column(self, dtype: str, within: int) -> Ints:
        """Return the column of that type that begins *within* bytes a message after the first one: int64[n]."""
        size = np.dtype(dtype).itemsize
        starts = self._columns + within * self.counts
        if len(self.counts) * _FEW_A_RUN <= len(self):
            views = [
                np.frombuffer(self._window, dtype, count, start)
                for start, count in zip(starts.tolist(), self.counts.tolist(), strict=True)
            ]
            return np.concatenate(views).astype(np.int64)
        # Every byte offset is seen as the start of an integer: one fancy index reads unaligned columns of many runs.
        every: Any = np.ndarray((len(self._window) - size + 1,), dtype, self._window, 0, (1,))
        within_run = spread(np.zeros(len(starts), np.int64), self.counts)
        column: Ints = every[self._repeated(starts) + size * within_run].astype(np.int64)
        return column

    def _places(self) -> tuple[Ints, Ints, Ints]:
        """Return where each message starts, where its body starts, and where it ends. Raises BadBatch."""
        lengths, header_sizes = self._column("<u4", 0), self._column("<u2", 4)
        ends = np.cumsum(lengths)
        behind = ends[np.cumsum(self.counts) - 1]  # the last of each run
        before = np.concatenate(([0], behind[:-1]))
        payload_ends = self._columns + self._heads.runs["size"]
        if not np.array_equal(behind - before, payload_ends - self._payloads) or (header_sizes > lengths).any():
            raise BadBatch("the lengths of a run do not sum to its payload")
        ends += self._repeated(self._payloads - before)
        starts = ends - lengths
        return starts, starts + header_sizes, ends

    def body(self) -> pa.Array:
        _, starts, ends = self._places()
        return gather(self._window, starts, ends, pa.binary())

    def _make_headers(self, schema: pa.Schema, made: dict[str, pa.Array]) -> None:
        starts, ends, body_ends = self._places()
        if "body" in schema.names:
            made["body"] = gather(self._window, ends, body_ends, pa.binary())
        keys, order_keys, tags, names, values = self._texts(starts, ends)
        n = len(starts)
        if "key" in schema.names:
            made["key"] = _key(keys, n)
        if "keys" in schema.names:
            offsets = _offsets(np.bincount(keys.message, minlength=n))
            made["keys"] = pa.ListArray.from_arrays(offsets, keys.values, type=schema.field("keys").type)
        if "order_key" in schema.names:
            made["order_key"] = _key(order_keys, n)
        if "tags" in schema.names:
            offsets = _offsets(np.bincount(tags.message, minlength=n))
            made["tags"] = pa.ListArray.from_arrays(offsets, tags.values, type=schema.field("tags").type)
        if "properties" in schema.names:
            offsets, kind = _offsets(np.bincount(names.message, minlength=n)), schema.field("properties").type
            made["properties"] = pa.MapArray.from_arrays(offsets, names.values, values.values, type=kind)

    def _texts(self, starts: Ints, ends: Ints) -> _AllTexts:
        """Return the texts of all headers, which lie from *starts* to *ends*."""
        walked = walk(self._window, starts, ends)
        found = _gathered(self._window, walked)
        odd = set(walked.odd.tolist()).union(*map(_without_text, found))
        if not odd:
            return found
        extra = bytearray()
        added: tuple[list[tuple[int, int, int]], ...] = ([], [], [], [])
        for message in sorted(odd):
            try:
                header = read_header(bytes(self._window[starts[message] : ends[message]]))
            except BadBatch as error:
                self.undecodable.append(Undecodable(message, str(error)))
                continue
            properties = [text for item in header.get("p", {}).items() for text in item]
            lists = ((KEYS, "k"), (ORDER_KEYS, "o"), (TAGS, "t"))
            for field, texts in (*((field, header.get(name, [])) for field, name in lists), (PROPERTIES, properties)):
                for text in texts:
                    first = len(self._window) + len(extra)
                    extra += text.encode()
                    added[field].append((message, first, len(self._window) + len(extra)))
        kept = [_merged(texts, more, odd) for texts, more in zip(walked.fields, added, strict=True)]
        window = memoryview(bytes(self._window) + extra)  # the texts that were decoded one by one follow the window
        return _gathered(window, Walked((kept[0], kept[1], kept[2], kept[3]), walked.odd))


_MAKERS: Final[dict[str, Callable[[MessageColumns], pa.Array]]] = {
    "subject": MessageColumns.subject,
    "lane": MessageColumns.lane,
    "priority": MessageColumns.priority,
    "partition": MessageColumns.partition,
    "position": MessageColumns.position,
    "sequence": MessageColumns.sequence,
    "message_id": MessageColumns.message_id,
    "created_at": MessageColumns.created_at,
    "stored_at": MessageColumns.stored_at,
    "source": MessageColumns.source,
    "sender": MessageColumns.sender,
    "producer": MessageColumns.producer,
    "app": MessageColumns.app,
    "body": MessageColumns.body,
}


def gather(window: memoryview, starts: Ints, ends: Ints, kind: pa.DataType) -> pa.Array:
    """Return bytes or texts of a window as an array of their own. Raises pa.ArrowInvalid for invalid UTF-8."""
    n = len(starts)
    if not n:
        return pa.array([], kind)
    buffer = pa.py_buffer(window)
    if np.array_equal(starts[1:], ends[:-1]):  # adjacent: nothing to copy
        offsets = np.append(starts, ends[-1:]).astype(np.int32)
        return pa.Array.from_buffers(kind, n, [None, pa.py_buffer(offsets), buffer])
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    if len(gaps) * _FEW_A_RUN <= n:
        return _joined(window, starts, ends, gaps, kind)
    if (starts[1:] < ends[:-1]).any():
        order = np.argsort(starts, kind="stable")
        back = np.empty(n, np.int64)
        back[order] = np.arange(n)
        return gather(window, starts[order], ends[order], kind).take(pa.array(back))
    offsets = np.empty(2 * n, np.int32)
    offsets[::2], offsets[1::2] = starts, ends
    scattered = pa.Array.from_buffers(kind, 2 * n - 1, [None, pa.py_buffer(offsets), buffer])
    return scattered.take(pa.array(np.arange(0, 2 * n, 2, dtype=np.int32)))


def _joined(window: memoryview, starts: Ints, ends: Ints, gaps: Ints, kind: pa.DataType) -> pa.Array:
    """Do the same for ranges most of which are adjacent, except at *gaps*."""
    firsts, lasts = starts[np.append(0, gaps + 1)].tolist(), ends[np.append(gaps, len(ends) - 1)].tolist()
    data = b"".join([window[first:last] for first, last in zip(firsts, lasts, strict=True)])
    offsets = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(ends - starts, out=offsets[1:])
    return pa.Array.from_buffers(kind, len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _offsets(counts: Any) -> pa.Array:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.array(offsets)


class _OfMessages(NamedTuple):
    """Texts, and the message that each belongs to, ascending."""

    message: Ints
    values: pa.Array


#: The texts of keys, order keys and tags, and of names and values of properties.
_AllTexts = tuple[_OfMessages, _OfMessages, _OfMessages, _OfMessages, _OfMessages]


def _gathered(window: memoryview, walked: Walked) -> _AllTexts:
    """Return the texts of a window; they are not checked to be UTF-8."""
    keys, order_keys, tags, properties = walked.fields
    names, values = (Texts(*(column[first::2] for column in properties)) for first in (0, 1))
    made = [
        _OfMessages(texts.message, gather(window, texts.start, texts.end, pa.string()))
        for texts in (keys, order_keys, tags, names, values)
    ]
    return made[0], made[1], made[2], made[3], made[4]


def _key(keys: _OfMessages, n: int) -> pa.Array:
    """Return the first key of each message; null if it has none."""
    who, values = keys
    first = np.ones(len(who), np.bool_)
    first[1:] = who[1:] != who[:-1]
    if not first.all():
        who, values = who[first], values.filter(pa.array(first))
    if len(who) == n:
        return values
    places, missing = np.zeros(n, np.int32), np.ones(n, np.bool_)
    places[who], missing[who] = np.arange(len(who)), False
    return values.take(pa.array(places, mask=missing))


def _without_text(texts: _OfMessages) -> set[int]:
    """Return the messages with a text that is not UTF-8."""
    try:
        texts.values.validate(full=True)
    except pa.ArrowInvalid:
        found = set[int]()
        for message, raw in zip(texts.message.tolist(), texts.values.cast(pa.binary()).to_pylist(), strict=True):
            try:
                raw.decode()
            except UnicodeDecodeError:
                found.add(message)
        return found
    return set()


def _merged(texts: Texts, added: list[tuple[int, int, int]], odd: Collection[int]) -> Texts:
    kept = ~np.isin(texts.message, list(odd))
    more = np.array(added, np.int64).reshape(-1, 3)
    columns = [np.concatenate((column[kept], more[:, at])) for at, column in enumerate(texts)]
    order = np.argsort(columns[0], kind="stable")
    return Texts(*(column[order] for column in columns))
