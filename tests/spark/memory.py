"""Measure the memory of processes, and archive or restore in one without Spark."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.peers.processes import descendants

_LOOK_EVERY_S: Final = 0.003
#: Processes are looked for less often: that takes longer.
_LOOKS: Final = 8

#: What a process of Python is to run, with the arguments of ``main``.
CODE: Final = "import sys; from tests.spark.memory import main; main(*sys.argv[1:])"


class Peak:
    """The most RssAnon of one of the processes, in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self.looks = 0


@contextmanager
def watched(root: int) -> Iterator[Peak]:
    """Sample the Python processes among *root* and its descendants until the block ends."""
    peak, ended = Peak(), threading.Event()
    thread = threading.Thread(target=_watch, args=(root, peak, ended), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _watch(root: int, peak: Peak, ended: threading.Event) -> None:
    pids = set[int]()
    while not ended.wait(_LOOK_EVERY_S):
        if peak.looks % _LOOKS == 0:
            pids = descendants({root})
        peak.looks += 1
        peak.size = max([peak.size, *map(_own_bytes, pids)])


def _own_bytes(pid: int) -> int:
    """Return the RssAnon of a process; 0 if it is not Python or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    told = dict(line.partition(":\t")[::2] for line in status.splitlines())
    return int(told.get("RssAnon", "0 kB").split()[0]) << 10 if told["Name"].startswith("python") else 0


def main(task: str, source: str, to: str) -> None:
    """Archive in a form, collecting few Parquet bytes in memory; or read all that a restore would send."""
    from qmq.archive.files import LocalFiles
    from qmq.archive.write import archive_to, open_run
    from qmq.restore.read import ArchiveReader
    from qmq.restore.selection import RestoreSelection
    from qmq_spark.parquet import files
    from qmq_spark.parquet.archive import archive_parquet

    if task == "segments":
        print(archive_to(Path(source), to, lambda: 0).messages)
    elif task == "parquet":
        files.GATHERED_BYTES = 8 << 20  # type: ignore[misc]
        with open_run(Path(source), to, lambda: 0) as run:
            print(archive_parquet(run.source.files, run.source.segments, run.files, run.lock, "run").messages)
    else:
        reader = ArchiveReader(LocalFiles(Path(source)), RestoreSelection(), {})
        print(sum(run.count for step in reader.steps() for _, run in step.parts))
    sys.stdout.flush()
