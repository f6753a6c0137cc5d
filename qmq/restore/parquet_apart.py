"""Read a Parquet file that does not fit its checksum, in processes of their own.

A wrong bit in the header of a page, which no checksum covers, can end a process within pyarrow. Only such files pay for
it: the checksum of the whole file comes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from crc32c import crc32c

from qmq.archive.files import COPY_BYTES, Reading
from qmq.errors import BadBytes

#: The program of a process: file, number of the row group (-1: tell of all of them), columns. It imports nothing of
#: qmq, which may be in an archive of modules.
_PROGRAM: Final = """
import json, sys
import pyarrow as pa, pyarrow.parquet as pq
path, group, *columns = sys.argv[1:]
file = pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
if group == "-1":
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    starts = [[one.column(0).dictionary_page_offset, one.column(0).data_page_offset] for one in groups]
    print(json.dumps([[one.num_rows, min(x for x in start if x is not None)] for one, start in zip(groups, starts)]))
else:
    batches = file.iter_batches(4096, [int(group)], columns, use_threads=False)
    writer = None
    for batch in batches:
        writer = writer or pa.ipc.new_stream(sys.stdout.buffer, batch.schema)
        writer.write_batch(batch)
        sys.stdout.buffer.flush()
    if writer is not None:
        writer.close()
"""


class RowGroup(NamedTuple):
    """A row group: its rows, and where it begins in the file."""

    rows: int
    start: int


def checksum_of(reading: Reading, size: int) -> int:
    """Return the crc32c of a file of *size* bytes. Raises StorageFailed."""
    crc = done = 0
    while done < size and (piece := reading.read(done, min(COPY_BYTES, size - done))):
        crc = crc32c(piece, crc)
        done += len(piece)
    return crc


class ParquetApart:
    """A Parquet file that other processes read. Use it with ``with``."""

    def __init__(self, reading: Reading, size: int) -> None:
        """Copy the file, which may lie anywhere. Raises StorageFailed, OSError."""
        self._copy = tempfile.NamedTemporaryFile(prefix="qmq-parquet-")  # noqa: SIM115  (closed by the block)
        for offset in range(0, size, COPY_BYTES):
            self._copy.write(reading.read(offset, min(COPY_BYTES, size - offset)))
        self._copy.flush()

    def __enter__(self) -> ParquetApart:
        return self

    def __exit__(self, *_: object) -> None:
        self._copy.close()

    def groups(self) -> list[RowGroup]:
        """Return the row groups by the file's footer. Raises BadBytes."""
        with self._process(-1, ()) as process:
            output, errors = process.communicate()
        if process.returncode:
            raise BadBytes(_reason(process.returncode, errors))
        return [RowGroup(*group) for group in json.loads(output)]

    def batches(self, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group up to bad bytes. Raises BadBytes behind them."""
        with self._process(group, columns) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            is_cut = False
            try:
                yield from pa.ipc.open_stream(process.stdout)
            except (pa.ArrowException, OSError):
                is_cut = True
            errors = process.stderr.read()
        if is_cut or process.returncode:
            raise BadBytes(_reason(process.returncode, errors))

    def _process(self, group: int, columns: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _PROGRAM, self._copy.name, str(group), *columns]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _reason(code: int, errors: bytes) -> str:
    """Return why a process has not read all: what it said last."""
    lines: list[Any] = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"reading it ended a process with {code}"
