"""The message logs of running brokers, as a tree of files that is read over the network.

    <store id>-<partition>/<base>.messages

The paths are those of an archive. Each broker tells where its batches begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np

from qmq.archive.files import Reading
from qmq.archive.segments import MESSAGES, Index, SegmentSource
from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import INDEX_DTYPE, INDEX_ENTRY_SIZE
from qmq.net.client.address import BROKER_SCHEMES, Address, check_used, parse_url, tls_files
from qmq.net.client.log_reader import LogReader, Span

#: The beginnings of the URL of a broker.
SCHEMES: Final = BROKER_SCHEMES
#: The arguments tls_ca, tls_cert and tls_key of BrokerFiles.
TlsPaths = tuple[str | None, str | None, str | None]
NO_TLS: Final[TlsPaths] = (None, None, None)


class BrokerReading:
    """A segment of a broker, with the size that it had when it was opened."""

    is_near = False

    def __init__(self, reader: LogReader, partition: int, span: Span) -> None:
        self._reader = reader
        self._partition = partition
        self._span = span

    def size(self) -> int:
        return self._span.end - self._span.base

    def read(self, offset: int, size: int) -> bytes:
        """Read as ``Reading.read``. Raises ConnectionLost, StorageError."""
        return self._reader.read(self._partition, self._span.base + offset, max(0, min(size, self.size() - offset)))

    def close(self) -> None:
        """Keep the connection, which other files share."""


class BrokerFiles:
    """The logs of all brokers of a URL. It must not be shared by threads or used after a fork."""

    def __init__(
        self, url: str, tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None
    ) -> None:
        """*tls_ca* and the others are as in ``qmq.connect``. Raises InvalidOption for a wrong URL."""
        self.name = url
        self._left: list[Address] = parse_url(url, tls_files(tls_ca, tls_cert, tls_key))[::-1]
        check_used(self._left, {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key})
        self._readers: dict[bytes, LogReader] = {}

    def close(self) -> None:
        """Close the connections; later calls open them again."""
        for reader in self._readers.values():
            reader.close()

    def segments(self) -> list[SegmentSource]:
        """Return the segments that all brokers have now. Raises ConnectionLost if one cannot be reached, ForeignFile if
        two have the same store id.
        """
        while self._left:
            self._connect_next()
        return [source for store_id, reader in self._readers.items() for source in _segments_of(store_id, reader)]

    def names(self, path: str) -> list[str]:
        """List as ``Files.names``."""
        names = [source.path for source in self.segments()]
        inside = [name[len(path) :].lstrip("/") for name in names if not path or name.startswith(f"{path}/")]
        return sorted({name.partition("/")[0] for name in inside})

    def open(self, path: str) -> Reading:
        """Open as ``Files.open``. Raises FileNotFoundError, ConnectionLost."""
        reader, partition, base = self._parse(path)
        return BrokerReading(reader, partition, self._span_of(reader, partition, base))

    def read_whole(self, path: str) -> bytes:
        """Read as ``Files.read_whole``."""
        reading = self.open(path)
        return reading.read(0, reading.size())

    def pieces(self, segment: SegmentSource, start: int, until: int) -> Iterator[Index]:
        """Yield as ``ProvidesIndex.pieces``. Raises BadBytes if the segment is gone or the broker's answer is wrong;
        ConnectionLost.
        """
        try:
            reader, partition, base = self._parse(segment.path)
            self._span_of(reader, partition, base)
        except FileNotFoundError as error:
            raise BadBytes(f"{error}: it was removed; plan the read again") from error
        start, until = max(start, base), min(until, segment.end)
        yield np.empty(0, INDEX_DTYPE)
        for data in reader.batches(partition, start, until) if start < until else ():
            piece = np.frombuffer(data[: len(data) // INDEX_ENTRY_SIZE * INDEX_ENTRY_SIZE], INDEX_DTYPE)
            bounds = np.concatenate(([start - 1], piece["position"].astype(np.int64), [until]))
            if data.nbytes != piece.nbytes or (bounds[1:] <= bounds[:-1]).any():
                raise BadBytes(f"{self.name}/{segment.path}: the broker's list of its batches is wrong")
            yield piece
            start = int(bounds[-2]) + 1

    def _connect_next(self) -> None:
        """Connect to the next address. Raises ConnectionLost; ForeignFile if its broker has the store id of another
        one.
        """
        reader = LogReader(self._left[-1])
        store_id = reader.store_id
        known = self._readers.get(store_id)
        if known is None:
            self._readers[store_id] = reader
        else:
            try:
                if reader.started_us() != known.started_us():
                    raise ForeignFile(
                        f"{known.address} and {reader.address} are two brokers of one store, {store_id.hex()}: the "
                        "directory of one is a copy of the other's, and has other messages under the same ids. Stop "
                        "one of the two, and give its directory another id with qmq repair --new-id"
                    )
            finally:
                reader.close()
        self._left.pop()

    def _span_of(self, reader: LogReader, partition: int, base: int) -> Span:
        """Return the segment at *base*. Raises FileNotFoundError if it does not exist (any more), ConnectionLost."""
        _, spans = reader.segments(partition, base)
        if not spans or spans[0].base != base:
            raise FileNotFoundError(f"{self.name} has no segment at position {base} of partition {partition}")
        return spans[0]

    def _parse(self, path: str) -> tuple[LogReader, int, int]:
        directory, _, name = path.partition("/")
        store, _, partition = directory.partition("-")
        with suppress(ValueError):
            if name.endswith(MESSAGES):
                store_id, base = bytes.fromhex(store), int(name.removesuffix(MESSAGES), 16)
                while store_id not in self._readers and self._left:
                    self._connect_next()
                if store_id in self._readers:
                    return self._readers[store_id], int(partition), base
        raise FileNotFoundError(f"{self.name} has no {path}")


def _segments_of(store_id: bytes, reader: LogReader) -> list[SegmentSource]:
    partition, partitions, found = 0, 1, list[SegmentSource]()
    while partition < partitions:
        partitions, spans = reader.segments(partition)
        for span in spans:
            path = f"{store_id.hex()}-{partition}/{span.base:016x}{MESSAGES}"
            found.append(SegmentSource(store_id, partition, span.base, span.end, path, None, None, span.sealed))
        partition += 1
    return found
