"""Measure archiving beside a plain copy of the same bytes, to a directory and to HDFS; and as Parquet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.history.watching import Memory, cpu_s
from qmq.archive.archive import archived_segments
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import Files
from qmq.archive.locations import files_at
from qmq.archive.write import archive_to, open_run
from qmq.bench.values import BenchFailed
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq_spark.parquet.archive import archive_parquet
from tests.hdfs.cluster import Cluster

#: The cost of something: seconds, processor seconds of all processes, and the most memory by process.
Taken = tuple[float, float, dict[str, int]]

#: The size of a block of HDFS, which is its default.
BLOCK_BYTES: Final = 128 << 20
_JARS: Final = Path(sys.prefix, "hdfs", "lib")
_COMPARED_BYTES: Final = 8 << 20


def taken(do: Callable[[], object]) -> Taken:
    """Measure *do*, after earlier writes have reached the disk, lest it wait for them."""
    os.sync()
    memory = Memory()
    with memory.watched():
        cpu, began = cpu_s(), time.perf_counter()
        do()
        seconds = time.perf_counter() - began
        return seconds, cpu_s() - cpu, memory.most


def segment_bytes(source: Path) -> int:
    """Return the bytes of the message logs of a data directory."""
    return sum(segment.end - segment.base for segment in open_data_directory(source).segments)


def copy_plainly(source: Path, directory: Path, *, synced: bool) -> Taken:
    """Copy the segments by the system's own means; with *synced*, they are on disk at the end."""
    paths = _segment_paths(source)
    directory.mkdir()

    def copy() -> None:
        for path in paths:
            with path.open("rb") as file, (directory / path.name).open("wb") as copied:
                shutil.copyfileobj(file, copied, 1 << 20)
                copied.flush()
                if synced:
                    os.fsync(copied.fileno())

    try:
        return taken(copy)
    finally:
        shutil.rmtree(directory)


def archive(source: Path, destination: str, settings: dict[str, str] | None = None) -> Taken:
    """Archive the segments; then check that each copy equals its source. Raises BenchFailed."""

    def run() -> None:
        archive_to(source, destination, lambda: time.time_ns() // 1_000, settings=settings)

    found = taken(run)
    _compare(source, files_at(destination))
    return found


def archive_as_parquet(source: Path, destination: Path) -> Taken:
    """Write all messages as Parquet, as `qmq archive --as parquet` does."""

    def run() -> None:
        with open_run(source, str(destination), lambda: time.time_ns() // 1_000) as one:
            archive_parquet(one.source.files, one.source.segments, one.files, one.lock, "bench")

    return taken(run)


class Hdfs:
    """An HDFS on loopback with blocks of the usual size."""

    def __init__(self, cluster: Cluster, conf: Path) -> None:
        self._conf = conf
        self.address = cluster.address
        self.settings = cluster.settings

    def put(self, source: Path, name: str) -> Taken:
        """Copy the segments as `hdfs dfs -put` does."""
        self._shell("-mkdir", "-p", f"/{name}")
        paths = [str(path) for path in _segment_paths(source)]
        return taken(lambda: self._shell("-put", *paths, f"/{name}/"))

    def remove(self, name: str) -> None:
        """Remove a directory, to make room."""
        self._shell("-rm", "-r", "-skipTrash", f"/{name}")

    def _shell(self, *arguments: str) -> None:
        main = "org.apache.hadoop.fs.FsShell"
        done = subprocess.run(
            ["java", "-Djava.net.preferIPv4Stack=true", "-cp", f"{self._conf}:{_JARS}/*", main, *arguments],
            env={**os.environ, "HADOOP_USER_NAME": "hdfs"},
            capture_output=True,
        )
        if done.returncode:
            raise BenchFailed(f"hdfs dfs {arguments[0]} ended with {done.returncode}: {done.stderr[-500:].decode()}")


@contextmanager
def hdfs(directory: Path, datanodes: int) -> Iterator[Hdfs]:
    """Start an HDFS; stop it at the end."""
    cluster = Cluster(directory, datanodes)
    cluster.settings["dfs.blocksize"] = str(BLOCK_BYTES)
    with cluster:
        yield Hdfs(cluster, directory / "namenode")


def _segment_paths(source: Path) -> list[Path]:
    """Return the segments that have messages; the last one is as long as it may become, and empty."""
    directory = open_data_directory(source)
    full = [segment for segment in directory.segments if segment.end > segment.base + SEGMENT_HEADER_SIZE]
    return [Path(directory.files.name, segment.path) for segment in full]


def _compare(source: Path, copies: Files) -> None:
    """Raise BenchFailed unless each copy equals its segment byte for byte."""
    directory = open_data_directory(source)
    there = {(segment.partition_key, segment.base): segment for segment in archived_segments(copies)}
    for segment in directory.segments:
        copied = there.get((segment.partition_key, segment.base))
        if copied is None or copied.end != segment.end:
            raise BenchFailed(f"{segment.path} was not archived as a whole")
        one, other = directory.files.open(segment.path), copies.open(copied.path)
        try:
            for offset in range(0, segment.end - segment.base, _COMPARED_BYTES):
                size = min(_COMPARED_BYTES, segment.end - segment.base - offset)
                if one.read(offset, size) != other.read(offset, size):
                    raise BenchFailed(f"{segment.path} was archived as other bytes, from {offset} on")
        finally:
            one.close()
            other.close()
    copies.close()
