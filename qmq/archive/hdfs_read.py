"""Read a tree in HDFS by hdfs-native, which needs no Java and also runs in executors of Spark.

A call that does not return is given up after a time.
"""

from __future__ import annotations

import importlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from qmq.archive.hdfs_write import split_location
from qmq.errors import InvalidOption, StorageFailed

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class NoAnswer(Exception):
    """A call was given up; the same object makes no other."""


class BoundedCalls:
    """Makes calls one after another in a thread of its own, and waits for each at most *seconds*."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up = False
        weakref.finalize(self, self._calls.put, None)

    def __call__(self, function: Callable[[], T]) -> T:
        """Return or raise what *function* does. Raises NoAnswer if that takes too long."""
        if self._given_up:
            raise NoAnswer
        if self._thread is None:
            # A daemon thread, since one that waits for ever must not be waited for.
            self._thread = threading.Thread(target=_make, args=(self._calls,), daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._calls.put((answer, function))
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            if answer.done():  # the function raised it
                raise
            self._given_up = True
            raise NoAnswer from None


def _make(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        answer, function = call
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
        del call, answer, function  # or they would stay in memory until the next call


#: The longest time of a call, in seconds.
TIMEOUT_S: Final = 60.0
#: A NameNode that is away is asked twice, not for three minutes.
_SETTINGS: Final = {"dfs.client.failover.max.attempts": "2"}

T = TypeVar("T")


class HdfsReading:
    """A file of HDFS."""

    is_near = False

    def __init__(self, tree: HdfsFiles, path: str, reader: Any) -> None:
        self._tree = tree
        self._path = path
        self._reader = reader
        self._size = len(reader)

    def size(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        size = min(size, self._size - offset)
        if size <= 0:
            return b""
        return self._tree.ask("read", self._path, lambda: bytes(self._reader.read_range(offset, size)))

    def close(self) -> None:
        """Do nothing: nothing stays open."""


class HdfsFiles:
    """A directory in HDFS. The settings of HADOOP_CONF_DIR count."""

    def __init__(self, location: str) -> None:
        """Connect at the first call. Raises InvalidOption."""
        self._address, self._root = split_location(location)
        self.name = self._address + self._root
        self._calls = BoundedCalls(TIMEOUT_S)
        self._client: Any = None
        try:
            self._native = importlib.import_module("hdfs_native")
        except ImportError as error:
            raise InvalidOption(
                "hdfs-native, which reads hdfs://, is not installed; run: pip install 'qmq[hdfs]'"
            ) from error

    def names(self, path: str) -> list[str]:
        try:
            found = self.ask("list", path, lambda: list(self._connected().list_status(self._at(path))))
        except FileNotFoundError:
            return []
        above = f"{self._at(path).rstrip('/')}/"
        # HDFS lists a file as itself, but it has no names in it.
        return sorted(status.path.removeprefix(above) for status in found if status.path.startswith(above))

    def open(self, path: str) -> HdfsReading:
        return HdfsReading(self, path, self.ask("open", path, lambda: self._connected().read(self._at(path))))

    def read_whole(self, path: str) -> bytes:
        file = self.open(path)
        return file.read(0, file.size())

    def ask(self, what: str, path: str, function: Callable[[], T]) -> T:
        """Do *what* (such as "read") to a file. Raises FileNotFoundError, StorageFailed."""
        name = f"{self.name.rstrip('/')}/{path}" if path else self.name
        try:
            return self._calls(function)
        except FileNotFoundError:
            raise
        except NoAnswer as error:
            why = f"HDFS has not answered for {TIMEOUT_S:.0f} s; check that it runs"
            raise StorageFailed(f"cannot {what} {name}: {why}") from error
        except Exception as error:  # hdfs-native raises RuntimeError for most errors
            words = " ".join(str(error).split())[:300]
            why = f"{words}; check that HDFS runs and that the address is right"
            raise StorageFailed(f"cannot {what} {name}: {why}") from error

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        self._calls, self._client = BoundedCalls(TIMEOUT_S), None

    def _connected(self) -> Any:
        if self._client is None:
            self._client = self._native.Client(self._address, _SETTINGS)
        return self._client

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root
