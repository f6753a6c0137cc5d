"""A real HDFS on loopback: a NameNode and DataNodes, each a Java process of its own that can be killed by itself.

They end with the process that started them. `make env-hdfs` brings the jars.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self
from xml.sax.saxutils import escape

#: As long as a machine with other work may need.
TIMEOUT_S: Final = 120.0
_HDFS: Final = Path(sys.prefix, "hdfs")
_JARS: Final = _HDFS / "lib"
_JAVA: Final = (
    "-Xmx256m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
)  # fmt: skip
#: Java says nothing of an archive of classes that does not fit it, and does without.
_QUIET: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
_NAMENODE: Final = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE: Final = "org.apache.hadoop.hdfs.server.datanode.DataNode"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listened to a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def archive_of(name: str) -> Path:
    """Return where Java keeps the classes of a server: a start takes half the processor time with it."""
    return _HDFS / f"{name.partition('-')[0]}.jsa"


class Cluster:
    """One HDFS. Use it in a ``with`` block."""

    def __init__(self, directory: Path, datanodes: int = 2, disk_bytes: int | None = None) -> None:
        """With *disk_bytes* each DataNode has a disk of that size, in memory."""
        self._directory = directory
        self._disk_bytes = disk_bytes
        self._rpc, self._http = free_ports(2)
        self._namenode: subprocess.Popen[bytes] | None = None
        self._datanodes: list[subprocess.Popen[bytes] | None] = [None] * datanodes
        self.address = f"hdfs://127.0.0.1:{self._rpc}"
        #: What clients are told beside the address.
        self.settings = {"dfs.replication": str(datanodes), "dfs.blocksize": str(1 << 20)}

    def __enter__(self) -> Self:
        try:
            self._configure()
            subprocess.run(self._command("namenode", _NAMENODE, "-format", "-nonInteractive", "-force"), check=True,
                           env=self._environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            self.heal()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def heal(self) -> None:
        """Start what does not run, and wait until all of it serves."""
        if self._namenode is None:
            self._namenode = self._start("namenode", _NAMENODE)
        for number, process in enumerate(self._datanodes):
            if process is None:
                self._datanodes[number] = self._start(f"datanode-{number}", _DATANODE)
        self._wait(self._is_whole, "serve")
        self._wait(self._has_all_blocks, "have told of all blocks")

    def kill_namenode(self) -> None:
        """kill -9."""
        assert self._namenode is not None
        _kill(self._namenode)
        self._namenode = None

    def start_namenode(self) -> None:
        """Start it again, without waiting for it."""
        self._namenode = self._start("namenode", _NAMENODE)

    def freeze_namenode(self, *, frozen: bool) -> None:
        """Let it stand still, or go on."""
        assert self._namenode is not None
        os.kill(self._namenode.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def freeze_datanode(self, number: int, *, frozen: bool) -> None:
        """Let it stand still, or go on."""
        process = self._datanodes[number]
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def kill_datanode(self, number: int) -> None:
        """kill -9."""
        process = self._datanodes[number]
        assert process is not None
        _kill(process)
        self._datanodes[number] = None

    def stop(self) -> None:
        """End all."""
        for process in (*self._datanodes, self._namenode):
            if process is not None:
                _kill(process)
        self._namenode, self._datanodes = None, [None] * len(self._datanodes)

    def _start(self, name: str, main: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.out").open("ab") as out:
            return subprocess.Popen(
                self._command(name, main), env=self._environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _command(self, name: str, *main: str) -> list[str]:
        conf = self._directory / name
        # Of the jars alone, which come first, is known to Java what is in them.
        java = ["java", *_JAVA, *self._archive(name), "-cp", f"{_JARS}/*:{conf}", *main]
        if self._disk_bytes is not None and name.startswith("datanode"):
            # A mount that nobody else sees, and that ends with the process.
            own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
            mount = f'mount -t tmpfs -o size={self._disk_bytes} none "$0" && exec "$@"'
            java = [*own, "sh", "-c", mount, str(conf / "data"), *java]
        return ["setpriv", "--pdeathsig", "KILL", *java]

    def _archive(self, name: str) -> list[str]:
        """Return the options of Java to start from the archive of its classes, if there is one."""
        archive = archive_of(name)
        return [*_QUIET, f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HADOOP_USER_NAME": "hdfs"}

    def _configure(self) -> None:
        names = ["namenode", *(f"datanode-{number}" for number in range(len(self._datanodes)))]
        for name in names:
            conf = self._directory / name
            for part in ("webapps/hdfs", "webapps/datanode", "webapps/static", "tmp", "data"):
                (conf / part).mkdir(parents=True)
            core = {
                "fs.defaultFS": self.address,
                "hadoop.tmp.dir": conf / "tmp",
                "ipc.client.connect.retry.interval": 100,
                "ipc.client.connect.max.retries": 600,
            }
            (conf / "core-site.xml").write_text(_xml(core), "utf-8")
            (conf / "hdfs-site.xml").write_text(_xml(self._hdfs_site(conf)), "utf-8")

    def _hdfs_site(self, conf: Path) -> dict[str, Any]:
        return {
            **self.settings,
            "dfs.namenode.rpc-address": f"127.0.0.1:{self._rpc}",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            "dfs.namenode.name.dir": conf / "name",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.fs-limits.min-block-size": 4096,
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.redundancy.interval.seconds": "1s",
            "dfs.namenode.heartbeat.recheck-interval": 1000,
            "dfs.namenode.stale.datanode.interval": 3000,
            "dfs.namenode.avoid.read.stale.datanode": "true",
            "dfs.namenode.avoid.write.stale.datanode": "true",
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.datanode.data.dir": conf / "data",
            "dfs.datanode.round-robin-volume-choosing-policy.additional-available-space": 0,
        }

    def _is_whole(self) -> bool:
        """Whether all DataNodes are heard of, and take data."""
        try:
            told = self._told()
        except (OSError, LookupError):  # it does not listen yet, or has nothing to tell
            return False
        live = json.loads(told["LiveNodes"])
        # One that was killed counts as alive for a while: but it was not heard of within the last second.
        fresh = [node for node in live.values() if int(node["lastContact"]) <= 1 and int(node["capacity"]) > 0]
        return len(fresh) == len(self._datanodes) and not told["Safemode"]

    def _has_all_blocks(self) -> bool:
        """A DataNode that was away serves before the NameNode has heard what it has."""
        return int(self._told()["NumberOfMissingBlocks"]) == 0

    def _told(self) -> dict[str, Any]:
        query = "jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/{query}", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["beans"][0]
        return found

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            for name, process in self._running():
                assert process.poll() is None, f"{name} ended with {process.returncode}: {self._last_words(name)}"
            assert time.monotonic() < deadline, f"HDFS did not {what}: {self._last_words('namenode')}"
            time.sleep(0.05)

    def _running(self) -> list[tuple[str, subprocess.Popen[bytes]]]:
        named = [("namenode", self._namenode)]
        named += [(f"datanode-{number}", process) for number, process in enumerate(self._datanodes)]
        return [(name, process) for name, process in named if process is not None]

    def _last_words(self, name: str) -> str:
        return (self._directory / f"{name}.out").read_text("utf-8", "replace")[-2_000:]


class _Archived(Cluster):
    """One whose servers write their archives when they end."""

    def _archive(self, name: str) -> list[str]:
        return [*_QUIET, f"-XX:ArchiveClassesAtExit={archive_of(name).with_suffix('.tmp')}"]

    def end(self) -> None:
        """Let them end by themselves, which takes as long as to write the archives."""
        for _, process in self._running():
            process.terminate()
            process.wait()


def main() -> None:
    """``python -m tests.hdfs.cluster``: write the archives, as `make env-hdfs` does."""
    from qmq.archive.hdfs_write import WritableHdfsFiles

    with tempfile.TemporaryDirectory() as directory, _Archived(Path(directory), datanodes=1) as cluster:
        with WritableHdfsFiles(f"{cluster.address}/a", cluster.settings) as files:
            files.make_directory("")
            files.write("b", bytes(1 << 20))
            files.rename("b", "c")
            files.checksum("c", lambda _: None)
            files.read_whole("c")
        cluster.end()
    for name in ("namenode", "datanode"):
        archive_of(name).with_suffix(".tmp").replace(archive_of(name))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _xml(settings: dict[str, Any]) -> str:
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in settings.items()
    )
    return f"<configuration>\n{properties}</configuration>\n"


if __name__ == "__main__":
    main()
