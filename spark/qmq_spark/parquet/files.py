"""Messages of one day as Parquet files: large subjects by themselves, the others together, sorted by subject.

Messages are gathered until they are worth writing. A subject that has much among them gets a file of its own, and all
that comes later of it goes there too; so of a day there is at most one file with little in it, however many subjects
there are, and what is in memory does not grow with them. Files are made in a local one without a name, which is gone
when its process is.
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

#: Messages that are looked at together, about.
GATHERED_BYTES: Final = 64 << 20
#: What a subject must have among them to get a file of its own.
OWN_BYTES: Final = 8 << 20
#: A file that has reached this many bytes is closed.
FILE_BYTES: Final = 256 << 20
#: Files that are open at once; the one that got nothing for longest is closed when there are more.
MOST_OPEN: Final = 16
#: Messages of a row group, which is what readers pass over or read as a whole.
GROUP_ROWS: Final = 65_536
#: What a message has besides its body, about.
_OTHER_BYTES: Final = 64
#: As Hive says that there is none: it would be no name of a directory that tells.
NO_SUBJECT: Final = "__HIVE_DEFAULT_PARTITION__"

_FORMAT: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": ["subject", "lane", "partition", "tags.list.element", "properties.key_value.key"],
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
    """A file that is being written: to a local one, which has no name. ``subject`` is None where it has several."""

    def __init__(self, subject: str | None, schema: pa.Schema) -> None:
        self.subject = subject
        self.messages = 0
        self.first_stored_at_us = 1 << 63
        self.last_stored_at_us = 0
        self._file = _Unnamed()
        self._writer = pq.ParquetWriter(self._file, schema, **_FORMAT)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    @property
    def path(self) -> Path:
        """Where this process, and those of its user, can open it."""
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
        """Write what makes it whole, and see that it has what was written. Raises StorageFull or StorageFailed."""
        try:
            self._writer.close()
            found = pq.read_metadata(self.path).num_rows
        except OSError as error:
            raise _failure(error) from error
        if found != self.messages:
            raise StorageFailed(f"a Parquet file of {self.messages} messages says that it has {found}; archive again")

    def close(self) -> None:
        """Let go of it: it is gone then."""
        self._file.give_up()
        self._writer.close()  # or it would be tried when nobody listens any more


class _Unnamed:
    """A local file without a name, as Arrow writes one."""

    closed = False

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="qmq-archive-", buffering=0)  # noqa: SIM115 (closed by give_up)
        self._size = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        """Write all of it; once it was given up, nothing."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and not self._file.closed:
            done += self._file.write(view[done:])
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Everything is written already."""

    def close(self) -> None:
        """It is read yet: ``give_up`` ends it."""

    def give_up(self) -> None:
        """Let go of what was written. What comes later goes nowhere."""
        self._file.close()


class DayFiles:
    """The files of a day. ``finished`` gets each, whole, before it is closed.

    What was gathered is written by a thread, while its caller reads what comes next: Arrow's encoder holds nobody up.
    """

    def __init__(self, schema: pa.Schema, finished: Callable[[ParquetFile], None]) -> None:
        self._schema = schema
        self._finished = finished
        self._gathered: list[pa.RecordBatch] = []
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, "qmq-parquet")
        self._writing: Future[None] | None = None
        #: Those that are open, by subject (None: of several), the one that got nothing for longest first.
        self._open: dict[str | None, ParquetFile] = {}
        #: Those that are whole, and that nobody has got yet.
        self._whole: list[ParquetFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take messages. Raises StorageFull or StorageFailed, for those of earlier calls too."""
        self._gathered.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= GATHERED_BYTES:
            self._hand_over()

    def finish(self) -> None:
        """Write what is left, and finish every file. Raises StorageFull or StorageFailed."""
        if self._gathered:
            self._hand_over()
        self._settle()
        while self._open:
            self._finish(next(iter(self._open)))
            self._give()

    def close(self) -> None:
        """Let go of files that were not finished."""
        self._thread.shutdown()
        for file in (*self._open.values(), *self._whole):
            file.close()
        self._open.clear()
        self._whole.clear()

    def _hand_over(self) -> None:
        """Have the thread write what was gathered, once it has done with what was before."""
        self._settle()
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        self._writing = self._thread.submit(self._write, gathered)

    def _settle(self) -> None:
        """Wait for the thread, and give away what is whole."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        self._give()

    def _give(self) -> None:
        while self._whole:
            self._finished(self._whole[0])
            self._whole.pop(0).close()

    def _write(self, gathered: list[pa.RecordBatch]) -> None:
        """Write messages, those of each large subject to its file, and the others, by name, to one."""
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
    """Where files of a day (2010-12-31) lie, below that of all, as Hive names directories.

    Nothing has to be escaped: only names that senders may give have a directory of their own.
    """
    return f"date={day}/only_subject={NO_SUBJECT if subject is None else subject}"


def _may_have_own(subject: str) -> bool:
    return not subject.startswith("~") and subject != NO_SUBJECT


def _subjects_of(messages: pa.Table) -> tuple[list[str], npt.NDArray[np.int32]]:
    """The subjects that there are, and of each message the number of its own: int32[n]."""
    column = messages["subject"].combine_chunks()
    found = (column.chunk(0) if isinstance(column, pa.ChunkedArray) else column).dictionary_encode()
    return found.dictionary.to_pylist(), found.indices.to_numpy()


def _bytes_of(messages: pa.Table, codes: npt.NDArray[np.int32], count: int) -> list[float]:
    """About how much each subject has."""
    sizes = pc.binary_length(messages["body"]).to_numpy() + _OTHER_BYTES
    found: list[float] = np.bincount(codes, sizes, count).tolist()
    return found


def _in_order(messages: pa.Table, codes: npt.NDArray[np.int32], places: list[int]) -> tuple[pa.Table, list[int]]:
    """Messages subject by subject, in the order of *places*, those of one as they came; and how many each has."""
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
        return StorageFull(f"{place} is full, where Parquet files are made; free some space, or set TMPDIR")
    return StorageFailed(f"cannot make a Parquet file in {place}: {error}; check the disk, or set TMPDIR")
