"""The message logs of live brokers, as a tree that is read over the wire.

    <store id>-<partition>/<base>.messages, .index

The paths are those of an archive. An index is made when it is asked for, from what the broker knows.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import numpy as np
from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import INDEX_DTYPE, INDEX_ENTRY_SIZE
from qmq.history.files import Reading
from qmq.history.segments import INDEX, MESSAGES, SegmentSource
from qmq.net.address import Address, parse_url
from qmq.net.log_reading import LogReader, Span
from qmq.storage.index import pack_index_header
from qmq.storage.segment import Owner

SCHEME: Final = "qmq://"


class BrokerReading:
    """A segment of a broker, as long as it was when it was opened."""

    is_near = False

    def __init__(self, reader: LogReader, partition: int, span: Span) -> None:
        self._reader = reader
        self._partition = partition
        self._span = span

    def size(self) -> int:
        return self._span.end - self._span.base

    def read(self, offset: int, size: int) -> bytes:
        """As ``Reading.read``. Raises ConnectionLost, StorageError."""
        return self._reader.read(self._partition, self._span.base + offset, max(0, min(size, self.size() - offset)))

    def close(self) -> None:
        """The connection stays for others."""


class IndexReading:
    """An index that was made."""

    is_near = True

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        """As ``Reading.read``."""
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Nothing is open."""


class BrokerFiles:
    """The logs of all brokers of a URL. Not for several threads, nor over a fork."""

    def __init__(self, url: str) -> None:
        """Raises InvalidOption."""
        self.name = url
        self._left: list[Address] = parse_url(url)[::-1]
        self._readers: dict[bytes, LogReader] = {}

    def close(self) -> None:
        """Close the connections; they are made again when they are needed."""
        for reader in self._readers.values():
            reader.close()

    def segments(self) -> list[SegmentSource]:
        """What all of them have now. Raises ConnectionLost when one cannot be reached."""
        while self._left:
            self._meet()
        return [source for store_id, reader in self._readers.items() for source in _segments_of(store_id, reader)]

    def names(self, path: str) -> list[str]:
        """As ``Files.names``."""
        names = [source.path for source in self.segments()] + [str(source.index_path) for source in self.segments()]
        inside = [name[len(path) :].lstrip("/") for name in names if not path or name.startswith(f"{path}/")]
        return sorted({name.partition("/")[0] for name in inside})

    def open(self, path: str) -> Reading:
        """As ``Files.open``. Raises FileNotFoundError, ConnectionLost."""
        if path.endswith(INDEX):
            return IndexReading(self.read_whole(path))
        reader, partition, base, _ = self._parse(path, MESSAGES)
        return BrokerReading(reader, partition, self._span_of(reader, partition, base))

    def read_whole(self, path: str) -> bytes:
        """As ``Files.read_whole``: an index is made here."""
        if path.endswith(MESSAGES):
            reading = self.open(path)
            return reading.read(0, reading.size())
        reader, partition, base, store_id = self._parse(path, INDEX)
        span = self._span_of(reader, partition, base)
        body = reader.batches(partition, base, span.end)
        count = len(body) // INDEX_ENTRY_SIZE
        if count and not _ascends(body):
            raise BadBytes(f"{self.name}/{path}: what the broker says of its batches makes no sense")
        head = pack_index_header(
            Owner(store_id, partition), base, sealed=True, covered=span.end, count=count, body_crc=crc32c(body)
        )
        return head + body

    def _meet(self) -> None:
        """Connect to the next address. Raises ConnectionLost."""
        reader = LogReader(self._left[-1])
        store_id = reader.store_id
        self._left.pop()
        if store_id in self._readers:  # two addresses of one broker
            reader.close()
        else:
            self._readers[store_id] = reader

    def _span_of(self, reader: LogReader, partition: int, base: int) -> Span:
        """The segment at *base*. Raises FileNotFoundError when it is not there (any more), ConnectionLost."""
        _, spans = reader.segments(partition, base)
        if not spans or spans[0].base != base:
            raise FileNotFoundError(f"{self.name} has no segment at position {base} of partition {partition}")
        return spans[0]

    def _parse(self, path: str, suffix: str) -> tuple[LogReader, int, int, bytes]:
        directory, _, name = path.partition("/")
        store, _, partition = directory.partition("-")
        with suppress(ValueError):
            if name.endswith(suffix):
                store_id, base = bytes.fromhex(store), int(name.removesuffix(suffix), 16)
                while store_id not in self._readers and self._left:
                    self._meet()
                if store_id in self._readers:
                    return self._readers[store_id], int(partition), base, store_id
        raise FileNotFoundError(f"{self.name} has no {path}")


def _segments_of(store_id: bytes, reader: LogReader) -> list[SegmentSource]:
    partition, partitions, found = 0, 1, list[SegmentSource]()
    while partition < partitions:
        partitions, spans = reader.segments(partition)
        for span in spans:
            path = f"{store_id.hex()}-{partition}/{span.base:016x}"
            found.append(
                SegmentSource(
                    store_id, partition, span.base, span.end, path + MESSAGES, path + INDEX, None, span.sealed
                )
            )
        partition += 1
    return found


def _ascends(body: bytes) -> bool:
    positions = np.frombuffer(body, INDEX_DTYPE)["position"]
    return bool((positions[1:] > positions[:-1]).all())
