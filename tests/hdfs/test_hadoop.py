"""The Java process: it ends when it should, calls end in time, and what it cannot do is said."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qmq.archive import hadoop
from qmq.archive.hadoop import Hadoop, _failure
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.errors import InvalidOption, StorageFailed, StorageFull
from tests.hdfs.cluster import Cluster, free_ports
from tests.hdfs.trees import connected


def test_nobody_there_is_said_at_once() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StorageFailed, match=rf"cannot open hdfs://127.0.0.1:{port}/: Connect.*check that HDFS runs"):
        WritableHdfsFiles(f"hdfs://127.0.0.1:{port}/a")


def test_a_namenode_that_does_not_answer_is_given_up(hdfs: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the process: nothing happens later that nobody waits for any more."""
    monkeypatch.setattr(hadoop, "TIMEOUT_S", 3.0)
    with connected(hdfs) as tree:
        process = tree._hadoop._process
        monkeypatch.setattr(hadoop, "TIMEOUT_S", 1.0)
        hdfs.freeze_namenode(frozen=True)
        try:
            with pytest.raises(StorageFailed, match=f"cannot list {tree.name}: HDFS has not answered for 1 s"):
                tree.names("")
        finally:
            hdfs.freeze_namenode(frozen=False)
        process.wait()
        with pytest.raises(StorageFailed, match=f"cannot make the directory {tree.name}: HDFS has not answered"):
            tree.make_directory("")


def test_errors_stay_what_they_are_beside_a_session_of_spark(
    tree: WritableHdfsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PySpark asks its own Java process about every error of py4j, which knows nothing of this one."""
    answers = importlib.import_module("py4j.java_gateway")
    protocol = importlib.import_module("py4j.protocol")
    asked = list[str]()

    def as_pyspark_does(*answer: Any) -> Any:
        try:
            return protocol.get_return_value(*answer)
        except protocol.Py4JJavaError:
            asked.append("spark")
            raise RuntimeError("Spark has no such object") from None

    monkeypatch.setattr(answers, "get_return_value", as_pyspark_does)
    assert tree.names("nothing") == []
    with pytest.raises(FileNotFoundError):
        tree.open("nothing")
    assert asked == []


def test_it_ends_with_the_process_that_started_it() -> None:
    """Killed, that closes nothing; the pipe to its child ends with it."""
    code = (
        "import os\nfrom qmq.archive.hadoop import Hadoop\n"
        "print(Hadoop()._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -9
    java = int(done.stdout)
    while Path(f"/proc/{java}").exists() and _state(java) != "Z":
        os.sched_yield()


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InvalidOption, match=r"cannot start Java .*pip install 'qmq\[hdfs\]'"):
        Hadoop()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\necho 'the wrong one' >&2; exit 1\n")
    (tmp_path / "bin" / "java").chmod(0o755)
    with pytest.raises(StorageFailed, match=r"Java has not started correctly \(the wrong one\)"):
        Hadoop()
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(InvalidOption, match=r"PySpark is not installed, .*pip install 'qmq\[hdfs\]'"):
        Hadoop()


def test_settings_of_the_user_count_and_an_end_is_said(
    hdfs: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before those that are set where nobody says anything, and behind those that are given."""
    (tmp_path / "hdfs-site.xml").write_text(
        "<configuration><property><name>dfs.client.socket-timeout</name><value>77</value></property>"
        "<property><name>dfs.client.retry.policy.spec</name><value>1,1</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with WritableHdfsFiles(f"{hdfs.address}/a", {"dfs.client.retry.policy.spec": "2,2"}) as tree:
        found = tree._fs.getConf()
        assert found.get("dfs.client.socket-timeout") == "77"
        assert found.get("dfs.client.retry.policy.spec") == "2,2"
        assert found.get("ipc.client.rpc-timeout.ms") == "8000"
        check_its_end_is_said(tree)


def check_its_end_is_said(tree: WritableHdfsFiles) -> None:
    """Where the Java process ends by itself."""
    tree._hadoop._process.kill()
    tree._hadoop._process.wait()
    with pytest.raises(StorageFailed, match=f"cannot list {tree.name}: the Java process ended with -9"):
        tree.names("")


_OF_HDFS = "org.apache.hadoop.hdfs."
_NOT_WRITTEN = "java.io.IOException: /a could only be written to 0 of the 1 minReplication nodes. There are"


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (_OF_HDFS + "protocol.DSQuotaExceededException: The DiskSpace quota", StorageFull, "raise the quota"),
        (_OF_HDFS + "protocol.NSQuotaExceededException: The NameSpace quota", StorageFull, "raise the quota"),
        (
            _NOT_WRITTEN + " 2 datanode(s) running and no node(s) are excluded",
            StorageFull,
            "make room in HDFS or raise",
        ),
        (
            _NOT_WRITTEN + " 1 datanode(s) running and 2 node(s) are excluded",
            StorageFull,
            "DataNodes that do not answer",
        ),
        ("java.io.IOException: All datanodes [a, b] are bad. Aborting", StorageFailed, "make room in HDFS, start"),
        (_NOT_WRITTEN + " 0 datanode(s) running", StorageFailed, "start the DataNodes"),
        (_OF_HDFS + "server.namenode.SafeModeException: Cannot create", StorageFailed, "left its safe mode"),
        ("org.apache.hadoop.security.AccessControlException: Denied", StorageFailed, "give this user the right"),
        ("java.net.ConnectException: Connection refused", StorageFailed, "check that HDFS runs"),
        ("java.io.FileNotFoundException: File does not exist", FileNotFoundError, "File does not exist"),
        ("org.apache.hadoop.fs.FileAlreadyExistsException: rename to", FileExistsError, "rename to"),
    ],
)
def test_what_hadoop_says_becomes_an_error_with_a_way_out(words: str, kind: type[Exception], said: str) -> None:
    found = _failure(words, "write", "hdfs://host/a")
    assert type(found) is kind
    assert said in str(found)
