"""One connection for all tests that break nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qmq.archive import hadoop
from qmq.archive.hdfs_write import WritableHdfsFiles
from tests.hdfs.cluster import Cluster
from tests.hdfs.trees import beside, connected


@pytest.fixture(scope="session")
def connection(hdfs: Cluster) -> Iterator[WritableHdfsFiles]:
    """By Hadoop's client, in Java. A server that is started on a loaded machine takes longer than users wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hadoop, "TIMEOUT_S", 240.0)
        tree = connected(hdfs)
    with tree:
        yield tree


@pytest.fixture
def tree(connection: WritableHdfsFiles) -> WritableHdfsFiles:
    """An empty directory in HDFS."""
    return beside(connection)
