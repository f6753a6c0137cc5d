"""Write an archive to a tree in HDFS, by Hadoop's client.

Java copies a file to HDFS piece by piece, so that there is progress, and computes its checksum; this process does not
touch the data. DataNodes sync blocks that are full or closed: otherwise a copy would survive the end of processes but
no power loss. The checksum of a file is that of HDFS over what its DataNodes have written, if it is crc32c; else the
file is read back.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from qmq.archive.files import COPY_BYTES, LocalReading, Progress, draft_of
from qmq.archive.hadoop import Hadoop
from qmq.errors import InvalidOption, StorageError, StorageFailed, StorageFull
from qmq.net.client.address import shown_location
from qmq.storage.disk.disk import Disk

SCHEME: Final = "hdfs://"
#: Data up to this size is passed to Java as it is; more goes through a file.
_SMALL_BYTES: Final = 64 << 10
#: The size of a buffer in Java: it is larger than what Hadoop's client collects, which then computes checksums without
#: copying.
_BUFFER_BYTES: Final = 128 << 10
Done = TypeVar("Done")
#: No name in an archive has this character.
_BETWEEN: Final = "\n"


def is_hdfs(location: str) -> bool:
    """Return whether a location is in HDFS, by its URL."""
    return location.startswith(SCHEME)


def split_location(location: str) -> tuple[str, str]:
    """Split a URL in HDFS into its address (hdfs://host:port) and its path (/path). Raises InvalidOption."""
    address, slash, path = location.removeprefix(SCHEME).partition("/")
    if not slash:
        raise InvalidOption(f"{shown_location(location)} has no path; give one: {shown_location(location)}/path")
    if shown_location(location) != location:
        raise InvalidOption(f"{shown_location(location)} has a user in it; set the user with HADOOP_USER_NAME")
    names = [name for name in path.split("/") if name]
    if any(name in (".", "..") or ":" in name for name in names):
        raise InvalidOption(
            f"{shown_location(location)} has a name that HDFS does not allow; give a path without . and .. and colons"
        )
    return SCHEME + address, "/" + "/".join(names)


class JavaReading:
    """A file of HDFS that is read through Java: for a few small files."""

    is_near = False

    def __init__(self, hadoop: Hadoop, name: str, size: int, stream: Any) -> None:
        self._hadoop = hadoop
        self._name = name
        self._size = size
        self._stream = stream

    def size(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Read as ``Reading.read``, in pieces, since Java makes several copies of what it returns."""
        end = min(offset + size, self._size)
        with self._hadoop.doing("read", self._name):
            self._stream.seek(min(offset, self._size))
            parts = [bytes(self._stream.readNBytes(min(COPY_BYTES, end - at))) for at in range(offset, end, COPY_BYTES)]
        return b"".join(parts)

    def close(self) -> None:
        with suppress(StorageError), self._hadoop.doing("close", self._name):
            self._stream.close()


class WritableHdfsFiles:
    """A directory in HDFS. *settings* are Hadoop's, besides those of HADOOP_CONF_DIR. Use it in a ``with`` block."""

    def __init__(self, location: str, settings: Mapping[str, str] | None = None) -> None:
        """Connect. Raises InvalidOption, StorageFailed."""
        address, self._root = split_location(location)
        self.name = address + self._root
        self._hadoop = Hadoop()
        try:
            self._fs = self._hadoop.open(address + "/", settings or {})
            with self._hadoop.doing("open", location):
                hadoop = self._hadoop.java.org.apache.hadoop
                self._path_class = hadoop.fs.Path
                self._rename_class = hadoop.fs.Options.Rename
                self._copy = self._hadoop.java.org.apache.commons.io.IOUtils.copyLarge
        except BaseException:
            self._hadoop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._hadoop.close()

    def names(self, path: str) -> list[str]:
        try:
            with self._hadoop.doing("list", self._at(path)):
                return self._names(path)
        except FileNotFoundError:
            return []

    def _names(self, path: str) -> list[str]:
        """Return the names in one text: each call to Java takes a fraction of a millisecond."""
        hadoop = self._hadoop.java.org.apache.hadoop
        paths = hadoop.fs.FileUtil.stat2Paths(self._fs.listStatus(self._path(path)))
        text = str(hadoop.util.StringUtils.join(_BETWEEN, self._hadoop.list_of(paths)))
        # HDFS lists a file as itself, but it has no names in it.
        directory = str(self._fs.makeQualified(self._path(path)).toString()).rstrip("/") + "/"
        return sorted(full.removeprefix(directory) for full in text.split(_BETWEEN) if full.startswith(directory))

    def open(self, path: str) -> JavaReading:
        name = self._at(path)
        with self._hadoop.doing("open", name):
            size = int(self._fs.getFileStatus(self._path(path)).getLen())
            return JavaReading(self._hadoop, name, size, self._fs.open(self._path(path)))

    def read_whole(self, path: str) -> bytes:
        file = self.open(path)
        try:
            return file.read(0, file.size())
        finally:
            file.close()

    def make_directory(self, path: str) -> None:
        with self._hadoop.doing("make the directory", self._at(path)):
            self._fs.mkdirs(self._path(path))

    def write(self, path: str, data: bytes) -> None:
        if len(data) > _SMALL_BYTES:
            self._write_by_file(path, data)
            return

        def write() -> None:
            with self._writing(path) as stream, self._hadoop.doing("write", self._at(path)):
                stream.write(data)

        self._twice(write)

    def _twice(self, do: Callable[[], Done]) -> Done:
        """Write or check a whole file, and repeat it once if HDFS aborts it: a DataNode that goes takes its part of the
        file along, and Hadoop's client may give up a good DataNode too.
        """
        try:
            return do()
        except (StorageFull, StorageFailed) as error:
            if not self._hadoop.may_pass(error):
                raise
            return do()

    def _write_by_file(self, path: str, data: bytes) -> None:
        """Pass data to Java through a file: passed directly, 20 MB would take a second."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            with LocalReading(Disk(), Path(file.name)) as source:
                self.copy_in(source, len(data), path, lambda _: None)

    def copy_in(self, source: LocalReading, size: int, path: str, progress: Progress) -> int:
        told = 0

        def tell(done: int) -> None:
            """Report bytes, but none twice when they are copied a second time."""
            nonlocal told
            progress(max(0, done - told))
            told = max(told, done)

        return self._twice(lambda: self._copy_in(source, size, path, tell))

    def _copy_in(self, source: LocalReading, size: int, path: str, tell: Callable[[int], None]) -> int:
        """Copy as ``copy_in``, in one try; *tell* takes the number of bytes copied so far."""
        with self._hadoop.doing("write", self._at(path)):
            buffer = self._hadoop.buffer(_BUFFER_BYTES)
        with self._writing(path) as stream, self._reading(source) as (file, crc):
            for done in range(0, size, COPY_BYTES):
                part = min(COPY_BYTES, size - done)
                try:
                    with self._hadoop.doing("write", self._at(path)):
                        copied = self._copy(file, stream, 0, part, buffer)
                except StorageFailed:
                    source.read(done, part)  # if the source is damaged, this raises the error that says so
                    raise
                if copied != part:
                    raise StorageFailed(f"{source.path} ends at {done + copied} of {size} bytes; run qmq verify")
                tell(done + part)
            with self._hadoop.doing("read", str(source.path)):
                return int(crc.getValue())

    @contextmanager
    def _reading(self, source: LocalReading) -> Iterator[tuple[Any, Any]]:
        """Open a local file for Java, with the crc32c of what is read. It is opened by this process's descriptor, since
        retention may remove its name meanwhile.
        """
        java = self._hadoop.java.java
        with self._hadoop.doing("read", str(source.path)):
            crc = java.util.zip.CRC32C()
            plain = java.io.FileInputStream(f"/proc/{os.getpid()}/fd/{source.fileno()}")
            file = java.util.zip.CheckedInputStream(plain, crc)
        try:
            yield file, crc
        finally:
            with suppress(StorageError), self._hadoop.doing("close", str(source.path)):
                file.close()

    @contextmanager
    def _writing(self, path: str) -> Iterator[Any]:
        """Create a new file, replacing an existing one; it is complete if the block ends without an error.

        After an error the file stays open for HDFS, until another one replaces it or its lease ends.
        """
        name = self._at(path)
        try:
            with self._hadoop.doing("write", name):
                stream = self._fs.createFile(self._path(path)).overwrite(True).syncBlock().build()
            yield stream
            with self._hadoop.doing("write", name):
                stream.close()
        except StorageFull:
            with suppress(StorageError):  # an incomplete file would take room
                self.remove(path)
            raise
        except FileNotFoundError as error:
            raise StorageFailed(f"cannot write {name}: {error}; its directory was removed, run this again") from error

    def checksum(self, path: str, progress: Progress) -> tuple[int, int]:
        return self._twice(lambda: self._checksum(path, progress))

    def _checksum(self, path: str, progress: Progress) -> tuple[int, int]:
        with self._hadoop.doing("check", self._at(path)):
            size = int(self._fs.getFileStatus(self._path(path)).getLen())
            found = self._fs.getFileChecksum(self._path(path)) if size else None
            if found is not None and str(found.getAlgorithmName()) == "COMPOSITE-CRC32C":
                return size, int.from_bytes(bytes(found.getBytes()), "big")
        return size, self._read_back(path, size, progress)

    def _read_back(self, path: str, size: int, progress: Progress) -> int:
        """Return the crc32c of a file by reading it."""
        name, java = self._at(path), self._hadoop.java.java
        with self._hadoop.doing("read", name):
            buffer = self._hadoop.buffer(_BUFFER_BYTES)
            crc = java.util.zip.CRC32C()
            sink = java.util.zip.CheckedOutputStream(java.io.OutputStream.nullOutputStream(), crc)
            stream = self._fs.open(self._path(path))
        for done in range(0, size, COPY_BYTES):
            part = min(COPY_BYTES, size - done)
            with self._hadoop.doing("read", name):
                copied = self._copy(stream, sink, 0, part, buffer)
            if copied != part:
                raise StorageFailed(f"{name} has become shorter while it was read; run this again")
            progress(part)
        with self._hadoop.doing("read", name):
            stream.close()
            return int(crc.getValue())

    def rename(self, path: str, to: str) -> None:
        try:
            with self._hadoop.doing("rename", self._at(path)):
                self._rename(path, to, self._rename_class.OVERWRITE)
        except FileNotFoundError as error:
            raise StorageFailed(f"cannot rename {self._at(path)}: {error}; it was removed, run this again") from error

    def _rename(self, path: str, to: str, how: Any) -> None:
        self._fs.rename(self._path(path), self._path(to), self._hadoop.array(self._rename_class, how))

    def remove(self, path: str) -> None:
        with self._hadoop.doing("remove", self._at(path)):
            self._fs.delete(self._path(path), False)

    def claim(self, path: str, data: bytes) -> bool:
        draft = draft_of(path, os.urandom(8))
        self.write(draft, data)
        try:
            with self._hadoop.doing("make", self._at(path)):
                self._rename(draft, path, self._rename_class.NONE)
        except FileExistsError:
            self.remove(draft)
            return False
        return True

    def _path(self, path: str) -> Any:
        return self._path_class(f"{self._root.rstrip('/')}/{path}" if path else self._root)

    def _at(self, path: str) -> str:
        return f"{self.name.rstrip('/')}/{path}" if path else self.name
