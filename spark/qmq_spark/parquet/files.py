"""Write the messages of one day to Parquet files: large subjects alone, the others together, sorted by subject.

Messages are collected until there are enough of them. A subject with many of these gets a file of its own, which also
takes its later messages. So a day has at most one small file however many subjects there are, and memory does not grow
with them. Files are written to unnamed local ones, which disappear with their process.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qmq.errors import StorageFailed, StorageFull

#: About how many bytes of messages are collected before they are written.
GATHERED_BYTES: Final = 64 << 20
#: The bytes among them that give a subject its own file.
OWN_BYTES: Final = 8 << 20
#: A file of this size is closed.
FILE_BYTES: Final = 256 << 20
#: The most open files; beyond that, the one that was unused for longest is closed.
MOST_OPEN: Final = 16
#: The messages of a row group, which readers skip or read as a whole.
GROUP_ROWS: Final = 65_536
#: About the bytes of a message besides its body.
_OTHER_BYTES: Final = 64
#: Hive's name for "none": no subject has this name.
NO_SUBJECT: Final = "__HIVE_DEFAULT_PARTITION__"

_FORMAT: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": [
        "subject",
        "lane",
        "priority",
        "partition",
        "tags.list.element",
        "properties.key_value.key",
        "source",
        "sender",
        "producer",
        "app",
    ],
    "column_encoding": {
        "position": "DELTA_BINARY_PACKED",
        "sequence": "DELTA_BINARY_PACKED",
        "created_at": "DELTA_BINARY_PACKED",
        "stored_at": "DELTA_BINARY_PACKED",
        "message_id": "DELTA_BYTE_ARRAY",
    },
    "write_statistics": ["subject", "partition", "position", "sequence", "key", "created_at", "stored_at"],
    "write_page_index": True,
    "write_page_checksum": True,
}


class ParquetFile:
    """A Parquet file that is being written to a local file without a name. ``subject`` is None for several subjects."""

    def __init__(self, subject: str | None, schema: pa.Schema) -> None:
        self.subject = subject
        self.messages = 0
        self.first_stored_at_us = 1 << 63
        self.last_stored_at_us = 0
        self._file = _Unnamed()
        self._writer = pq.ParquetWriter(self._file, schema, **_FORMAT)

    @property
    def size(self) -> int:
        """Return its bytes so far."""
        return self._file.tell()

    @property
    def path(self) -> Path:
        """Return a path by which processes of the same user can open it."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def write(self, messages: pa.Table) -> None:
        """Add messages. Raises StorageFull or StorageFailed."""
        try:
            self._writer.write_table(messages, row_group_size=GROUP_ROWS)
        except OSError as error:
            raise _failure(error) from error
        self.messages += messages.num_rows
        stamps = pc.min_max(messages["stored_at"].cast(pa.int64())).as_py()
        self.first_stored_at_us = min(self.first_stored_at_us, stamps["min"])
        self.last_stored_at_us = max(self.last_stored_at_us, stamps["max"])

    def finish(self) -> None:
        """Complete the file, and check its number of messages. Raises StorageFull or StorageFailed."""
        try:
            self._writer.close()
            found = pq.read_metadata(self.path).num_rows
        except OSError as error:
            raise _failure(error) from error
        if found != self.messages:
            raise StorageFailed(f"a Parquet file of {self.messages} messages says that it has {found}; archive again")

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.give_up()
        self._writer.close()  # or the writer would try it later, when errors cannot be reported


class _Unnamed:
    """A local file without a name, as Arrow writes one."""

    closed = False

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="qmq-archive-", buffering=0)  # noqa: SIM115 (closed by give_up)
        self._size = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        """Write all of *data*; after ``give_up``, nothing."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and not self._file.closed:
            done += self._file.write(view[done:])
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: everything is written at once."""

    def close(self) -> None:
        """Keep the file for readers; ``give_up`` closes it."""

    def give_up(self) -> None:
        """Close the file; later writes do nothing."""
        self._file.close()


class DayFiles:
    """The files of a day. ``finished`` takes each complete file before it is closed.

    A thread writes the collected messages while the caller reads the next ones, so Arrow's encoder delays nobody.
    """

    def __init__(self, schema: pa.Schema, finished: Callable[[ParquetFile], None]) -> None:
        self._schema = schema
        self._finished = finished
        self._gathered: list[pa.RecordBatch] = []
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, "qmq-parquet")
        self._writing: Future[None] | None = None
        #: The open files by subject (None: several), the one unused for longest first.
        self._open: dict[str | None, ParquetFile] = {}
        #: The complete files that ``finished`` has not taken yet.
        self._whole: list[ParquetFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add messages. Raises StorageFull or StorageFailed, also for earlier calls."""
        self._gathered.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= GATHERED_BYTES:
            self._hand_over()

    def finish(self) -> None:
        """Write the remaining messages, and finish every file. Raises StorageFull or StorageFailed."""
        if self._gathered:
            self._hand_over()
        self._settle()
        while self._open:
            self._finish(next(iter(self._open)))
            self._give()

    def close(self) -> None:
        """Close files that were not finished."""
        self._thread.shutdown()
        for file in (*self._open.values(), *self._whole):
            file.close()
        self._open.clear()
        self._whole.clear()

    def _hand_over(self) -> None:
        """Have the thread write the collected messages after its earlier ones."""
        self._settle()
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        self._writing = self._thread.submit(self._write, gathered)

    def _settle(self) -> None:
        """Wait for the thread, and pass on the complete files."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        self._give()

    def _give(self) -> None:
        while self._whole:
            self._finished(self._whole[0])
            self._whole.pop(0).close()

    def _write(self, gathered: list[pa.RecordBatch]) -> None:
        """Write the messages of each large subject to its file, and the others, sorted by subject, to one."""
        messages = pa.Table.from_batches(gathered, self._schema).combine_chunks()
        gathered.clear()
        names, codes = _subjects_of(messages)
        sizes = _bytes_of(messages, codes, len(names))
        own = [
            name in self._open or (size >= OWN_BYTES and _may_have_own(name))
            for name, size in zip(names, sizes, strict=True)
        ]
        places = sorted(range(len(names)), key=lambda code: (not own[code], names[code]))
        messages, counts = _in_order(messages, codes, places)
        first = 0
        for code, count in zip(places, counts, strict=True):
            if not own[code]:
                break
            self._add_to(names[code], messages.slice(first, count))
            first += count
        if first < messages.num_rows:
            self._add_to(None, messages.slice(first))

    def _add_to(self, subject: str | None, messages: pa.Table) -> None:
        file = self._open.pop(subject, None) or ParquetFile(subject, self._schema)
        self._open[subject] = file
        file.write(messages)
        if file.size >= FILE_BYTES:
            self._finish(subject)
        elif len(self._open) > MOST_OPEN:
            self._finish(next(name for name in self._open if name is not None))

    def _finish(self, subject: str | None) -> None:
        self._open[subject].finish()
        self._whole.append(self._open.pop(subject))


def directory_of(day: str, subject: str | None) -> str:
    """Return the directory of files of a day (2010-12-31), below that of all files, named as by Hive.

    Nothing has to be escaped: only subjects that senders may use have a directory of their own.
    """
    return f"date={day}/only_subject={NO_SUBJECT if subject is None else subject}"


def _may_have_own(subject: str) -> bool:
    return not subject.startswith("~") and subject != NO_SUBJECT


def _subjects_of(messages: pa.Table) -> tuple[list[str], npt.NDArray[np.int32]]:
    """Return the subjects, and the number of each message's subject: int32[n]."""
    column = messages["subject"].combine_chunks()
    found = (column.chunk(0) if isinstance(column, pa.ChunkedArray) else column).dictionary_encode()
    return found.dictionary.to_pylist(), found.indices.to_numpy()


def _bytes_of(messages: pa.Table, codes: npt.NDArray[np.int32], count: int) -> list[float]:
    """Return about how many bytes each subject has."""
    sizes = pc.binary_length(messages["body"]).to_numpy() + _OTHER_BYTES
    found: list[float] = np.bincount(codes, sizes, count).tolist()
    return found


def _in_order(messages: pa.Table, codes: npt.NDArray[np.int32], places: list[int]) -> tuple[pa.Table, list[int]]:
    """Return the messages sorted by subject, in the order of *places*, otherwise unchanged; and the count of each
    subject.
    """
    counts: list[int] = np.bincount(codes, minlength=len(places))[places].tolist()
    if len(places) == 1:
        return messages, counts
    ranks: npt.NDArray[Any] = np.empty(len(places), np.uint16 if len(places) <= 1 << 16 else np.uint32)
    ranks[places] = np.arange(len(places))
    order = ranks[codes]
    if (order[1:] < order[:-1]).any():
        messages = messages.take(pa.array(np.argsort(order, kind="stable")))
    return messages, counts


def _failure(error: OSError) -> StorageFull | StorageFailed:
    place = tempfile.gettempdir()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"{place} is full, where Parquet files are written first; free some space, or set TMPDIR")
    return StorageFailed(f"cannot make a Parquet file in {place}: {error}; check the disk, or set TMPDIR")
