"""One connection for all tests that break nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qmq.history.hdfs_files import WritableHdfsFiles
from tests.hdfs.cluster import Cluster
from tests.hdfs.trees import beside, connected


@pytest.fixture(scope="session")
def connection(hdfs: Cluster) -> Iterator[WritableHdfsFiles]:
    """By Hadoop's client, in Java."""
    with connected(hdfs) as tree:
        yield tree


@pytest.fixture
def tree(connection: WritableHdfsFiles) -> WritableHdfsFiles:
    """An empty directory in HDFS."""
    return beside(connection)
