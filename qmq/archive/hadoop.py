"""Run Hadoop's client for HDFS in a Java process of its own, and talk to it through py4j.

Its jars come with PySpark. The Java process ends when this one does, in whatever way. No call takes longer than
``TIMEOUT_S``: if HDFS does not answer, the Java process is ended, with all its calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from qmq.errors import InvalidOption, StorageError, StorageFailed, StorageFull

#: The longest time of a call, in seconds; the lock on an archive stays valid a little longer without renewal.
TIMEOUT_S: Final = 45.0
_START_S: Final = 60.0
_STOP_S: Final = 5.0

_JAVA: Final = ("-Xmx256m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
#: Hadoop's client needs only these jars besides its own; searching all 250 jars of Spark takes half a second.
_JARS: Final = (
    "hadoop-client-api", "hadoop-client-runtime", "commons-io", "py4j", "slf4j-api", "jcl-over-slf4j", "log4j-api",
    "log4j-core", "log4j-1.2-api", "log4j-slf4j2-impl",
)  # fmt: skip
_GATEWAY: Final = ("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0")
#: Errors are returned to the caller, so nothing is logged.
_QUIET: Final = ("-Dorg.apache.logging.log4j.level=OFF", "-Dlog4j2.StatusLogger.level=OFF")

#: Settings for what the user's files (HADOOP_CONF_DIR) leave open. A NameNode may be away for half a minute, as during
#: a restart; a DataNode that does not answer is replaced by another within seconds.
_SETTINGS: Final = {
    "dfs.bytes-per-checksum": "4096",  # not 512: a DataNode then returns the checksum of a file in a fifth of the time
    "dfs.checksum.combine.mode": "COMPOSITE_CRC",
    "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "20",
    "dfs.client.retry.policy.enabled": "true",
    "dfs.client.retry.policy.spec": "500,60",
    "dfs.client.socket-timeout": "8000",
    "ipc.client.connect.timeout": "5000",
    "ipc.client.connect.max.retries.on.timeouts": "1",
    "ipc.client.rpc-timeout.ms": "8000",
}
#: Words in an error that mean that repeating the write is useless: there is no DataNode, or the write is refused.
_FOR_GOOD: Final = (
    "Call From ",
    "ConnectException",
    "There are 0 datanode(s)",
    "AccessControl",
    "afe mode",
    "Quota",
    "quota",
)
#: The first call does not wait for a NameNode that is being restarted.
_AT_FIRST: Final = {
    "dfs.client.retry.policy.enabled": "false",
    "dfs.client.failover.max.attempts": "2",
    "ipc.client.connect.max.retries": "0",
    "ipc.client.connect.max.retries.on.timeouts": "0",
}

_FULL: Final = ("QuotaExceededException", "minReplication nodes", "DiskOutOfSpace", "No space left")
#: The py4j clients of the processes that this module started.
_OWN: Final[WeakSet[Any]] = WeakSet()
_NEED: Final = "hdfs:// needs Java 17 or later and the packages of qmq[hdfs]: pip install 'qmq[hdfs]'"


class Hadoop:
    """The Java process. Several threads may call it at once, each with streams of its own."""

    def __init__(self) -> None:
        """Start the process. Raises InvalidOption if Java or its jars are missing, StorageFailed if it does not
        start.
        """
        command = [_java(), *_JAVA, *_QUIET, "-cp", _class_path(), *_GATEWAY]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (close does)
        self._gateway: Any = None
        self._drain: threading.Thread | None = None
        #: Why the process cannot be called any more.
        self._gone = ""
        self._losing = threading.Lock()
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process, which has to release its lock
            )
        except OSError as error:
            self._errors.close()
            raise InvalidOption(f"cannot start Java ({error.strerror}); {_NEED}") from error
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        port, token = self._first_lines()
        py4j = _py4j()
        parameters = py4j.java_gateway.GatewayParameters(port=int(port), auth_token=token, read_timeout=TIMEOUT_S)
        self._gateway = py4j.java_gateway.JavaGateway(gateway_parameters=parameters)
        self._py4j = py4j
        _OWN.add(self._gateway._gateway_client)
        self._java_error = py4j.protocol.Py4JJavaError
        logging.getLogger().addFilter(_is_not_of_py4j)
        self._any_error = py4j.protocol.Py4JError

    def _first_lines(self) -> tuple[str, str]:
        """Return the port and the token. Raises StorageFailed with the last words of the process."""
        stdout = self._process.stdout
        assert stdout is not None
        text, deadline = b"", time.monotonic() + _START_S
        while text.count(b"\n") < 2:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            more = stdout.read(1 << 10) if ready else b""
            if not more:
                self._errors.seek(0)
                words = " ".join(self._errors.read().decode("utf-8", "replace").split())[-300:]
                raise StorageFailed(f"Java has not started correctly ({words or 'without an error text'}); {_NEED}")
            text += more
        self._drain = threading.Thread(target=_drain, args=(stdout,), daemon=True)
        self._drain.start()
        port, token, *_ = text.decode("ascii").split("\n")
        return port, token

    @property
    def java(self) -> Any:
        """Return the namespace of Java classes by their full names."""
        return self._gateway.jvm

    def buffer(self, size: int) -> Any:
        """Return a Java array of *size* bytes."""
        return self._gateway.new_array(self.java.byte, size)

    def array(self, kind: Any, *items: Any) -> Any:
        """Return a Java array."""
        made = self._gateway.new_array(kind, len(items))
        for index, item in enumerate(items):
            made[index] = item
        return made

    def list_of(self, array: Any) -> Any:
        """Return the items of a Java array as a Java list. (py4j finds no method that takes object arrays.)"""
        objects = self._gateway.new_array(self.java.java.lang.Object, len(array))
        self.java.java.lang.System.arraycopy(array, 0, objects, 0, len(array))
        return self.java.java.util.Arrays.asList(objects)

    @contextmanager
    def doing(self, what: str, name: str) -> Iterator[None]:
        """Call Java in the block, to do *what* (such as "write") to the file *name*.

        Raises for its exceptions FileNotFoundError, FileExistsError, StorageFull, StorageFailed.
        """
        if self._gone:
            raise StorageFailed(f"cannot {what} {name}: {self._gone}")
        _keep_apart(self._py4j)
        try:
            yield
        except self._java_error as error:
            raise _failure(self._words(error), what, name) from error
        except self._any_error as error:
            if "Trace:" not in str(error):  # there was no answer
                raise self._lost(what, name) from error
            # Java has no such method: the versions differ.
            raise StorageFailed(f"cannot {what} {name}: {error}; install the versions that qmq[hdfs] names") from error

    def may_pass(self, error: BaseException) -> bool:
        """Return whether a repetition of the write may succeed, as after a DataNode has gone.

        It is False if HDFS does not answer at all, or refuses.
        """
        cause = error.__cause__
        if self._gone or not isinstance(cause, self._java_error):
            return False
        words = self._words(cause)
        return not any(sign in words for sign in _FOR_GOOD)

    def _words(self, error: Any) -> str:
        """Return what an exception says, in one line, with its class."""
        try:
            text = str(error.java_exception.toString())
        except self._any_error:
            text = str(error)
        return text.partition("\n")[0].partition("; For more details")[0]

    def _lost(self, what: str, name: str) -> StorageError:
        """End the process after a call without an answer, so that it does not complete the call later. Return the
        error.
        """
        with self._losing:  # a second caller would only see that the process was ended
            if not self._gone:
                ended = self._process.poll()
                self._process.kill()
                if ended is None:
                    self._gone = f"HDFS has not answered for {TIMEOUT_S:.0f} s; check that it runs, and run this again"
                else:
                    self._gone = f"the Java process ended with {ended}; run this again"
        return StorageFailed(f"cannot {what} {name}: {self._gone}")

    def open(self, place: str, settings: Mapping[str, str]) -> Any:
        """Return the file system of a URL. Raises StorageFailed, soon if there is no server."""
        with self.doing("open", place):
            uri = self.java.java.net.URI.create(place)
            file_system = self.java.org.apache.hadoop.fs.FileSystem
            first = file_system.newInstance(uri, self._configuration({**settings, **_AT_FIRST}))
            first.getFileStatus(self.java.org.apache.hadoop.fs.Path("/"))
            first.close()
            return file_system.newInstance(uri, self._configuration(settings))

    def _configuration(self, settings: Mapping[str, str]) -> Any:
        configuration = self.java.org.apache.hadoop.conf.Configuration()
        for name, value in _SETTINGS.items():
            sources = configuration.getPropertySources(name)
            if sources is None or str(sources[-1]).endswith("-default.xml"):
                configuration.set(name, value)
        for name, value in settings.items():
            configuration.set(name, value)
        return configuration

    def close(self) -> None:
        """End the process."""
        self._gone = self._gone or "the connection to HDFS was closed"
        if self._gateway is not None:
            self._gateway.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._drain is not None:
            self._drain.join()
        self._process.stdout.close()
        self._errors.close()


def _failure(words: str, what: str, name: str) -> OSError | StorageError:
    """Return the error that stands for an exception of Hadoop."""
    kind, _, text = words.partition(": ")
    if kind.endswith("FileNotFoundException"):
        return FileNotFoundError(text)
    if kind.endswith(("FileAlreadyExistsException", "FileAlreadyExists")):
        return FileExistsError(text)
    told = f"cannot {what} {name}: {kind.rpartition('.')[2]}: {text}"
    if "There are 0 datanode(s) running" in text:
        return StorageFailed(f"{told}; start the DataNodes, and run this again")
    if "minReplication nodes" in words and "no node(s) are excluded" not in text:  # it does not say why
        return StorageFull(f"{told}; make room in HDFS, or start the DataNodes that do not answer, and run this again")
    if text.startswith("All datanodes "):  # each DataNode has aborted its part of a block, and none says why
        return StorageFailed(f"{told}; make room in HDFS, start the DataNodes that do not answer, and run this again")
    if any(sign in words for sign in _FULL):
        return StorageFull(f"{told}; make room in HDFS or raise the quota, and run this again")
    if "SafeModeException" in words or "safe mode" in text:
        return StorageFailed(f"{told}; wait until the NameNode has left its safe mode, and run this again")
    if "AccessControlException" in words:
        return StorageFailed(f"{told}; give this user the right to write there, or choose another path")
    return StorageFailed(f"{told}; check that HDFS runs and that the address is right, and run this again")


def _keep_apart(py4j: Any) -> None:
    """Keep PySpark from asking Spark's Java process about errors of the processes of this module, also in sessions that
    were started later.
    """
    others = py4j.java_gateway.get_return_value
    if getattr(others, "keeps_apart", False):
        return

    def get_return_value(answer: Any, client: Any, target_id: Any = None, name: Any = None) -> Any:
        chosen = py4j.protocol.get_return_value if client in _OWN else others
        return chosen(answer, client, target_id, name)

    get_return_value.keeps_apart = True  # type: ignore[attr-defined]
    py4j.java_gateway.get_return_value = get_return_value


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Return whether a log record is not from py4j, which logs missing answers; here they become errors."""
    return record.module != "java_gateway"


def _drain(stream: Any) -> None:
    """Read and discard output: a full pipe would block its writer."""
    while stream.read(1 << 10):
        pass


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else "java"


def _class_path() -> str:
    """Return Hadoop's jars, with the user's settings before them. Raises InvalidOption."""
    for directory in _directories():
        jars = [str(path) for name in _JARS for path in sorted(directory.glob(f"{name}-[0-9]*.jar"))]
        if len(jars) >= len(_JARS):
            settings = os.environ.get("HADOOP_CONF_DIR")
            return os.pathsep.join([settings, *jars] if settings else jars)
    raise InvalidOption(f"PySpark is not installed, and its jars are needed; {_NEED}")


def _directories() -> Iterator[Path]:
    """Yield the directories that may have Spark's jars: of the Spark that runs this process, then of the package."""
    home = os.environ.get("SPARK_HOME")
    if home:
        yield Path(home, "jars")
    found = importlib.util.find_spec("pyspark")
    if found is not None and found.submodule_search_locations:
        yield Path(found.submodule_search_locations[0], "jars")


def _py4j() -> Any:
    try:
        importlib.import_module("py4j.java_gateway")
        return importlib.import_module("py4j")
    except ImportError as error:
        raise InvalidOption(f"py4j is not installed; {_NEED}") from error
