"""What every test shares: one hypothesis profile, and patience."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from coverage import Coverage
from hypothesis import settings

from qmq.net.client.consumer import pull as pulling
from tests.broker.harness import closing_left_open
from tests.certificates import where_asked
from tests.effort import EXAMPLES
from tests.forks import SHARED
from tests.hdfs.cluster import Cluster
from tests.scratch import factory_on_disk, use_memory
from tests.spark.session import running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: For tests of the fixture that QMQ gives to others.
pytest_plugins = ["pytester"]

# A loaded machine may be slow without a fault: time per example is no disposition here.
# `make sim` has more examples, and so have mutants, which one example in many may catch.
settings.register_profile("qmq", deadline=None, print_blob=True, max_examples=EXAMPLES)
settings.load_profile("qmq")

# A shell's background jobs, and what nohup starts, ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process.

    Of those who count lines, three start in a worker of xdist. Leave one: else ``no_cover`` stops just the third.
    The first comes with the process, as with every one that a test starts, the second because a worker reads the
    options of its master. What they saw so far counts.
    """
    gc.disable()  # half of the time of collecting tests went into visiting what stays anyway
    if not hasattr(config, "workerinput"):
        use_memory()
        return
    while (counting := Coverage.current()) is not None:
        counting.stop()
        counting.save()


def pytest_collection_finish() -> None:
    """Never visit the tests and modules again that are there now: a full collection took 0.3 s."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that need Spark come first, so that one worker has all of them, and with them the one session; then those
    that need HDFS, likewise. Then those that are so long that they are not counted: else one worker might end with one,
    alone.
    """
    for item in items:
        if _needs_spark(item):
            item.add_marker("no_cover")  # Spark's workers end as they please: nobody waits for their counts
    items.sort(
        key=lambda item: (not _needs_spark(item), not _needs_hdfs(item), item.get_closest_marker("no_cover") is None)
    )


def _needs_spark(item: pytest.Item) -> bool:
    return "spark" in getattr(item, "fixturenames", ())


def _needs_hdfs(item: pytest.Item) -> bool:
    return "hdfs" in getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True)
def _close_left_open() -> Iterator[None]:
    """Some tests end with a broker as it is."""
    with closing_left_open():
        yield


@pytest.fixture(scope="session")
def hdfs(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A NameNode and two DataNodes, on the disk: in memory an archive ends before a fault has struck it. One for all
    tests: whoever breaks it heals it.
    """
    with factory_on_disk(request.session) as factory, Cluster(factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores, with the data source registered. One for all tests."""
    with running(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def shared_forks() -> Iterator[None]:
    """The process that brokers are forked from ends with the tests."""
    yield
    SHARED.close()


@pytest.fixture(scope="session", autouse=True)
def tls_where_asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With QMQ_TEST_TLS=1 brokers of tests take connections by TLS only."""
    with where_asked(tmp_path_factory.getbasetemp() / "tls"):
        yield


@pytest.fixture(autouse=True)
def uncounted_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anybody count lines in what a test starts that is not counted."""
    if request.node.get_closest_marker("no_cover") is not None:
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers keep their state where no other test's do."""
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path_factory.getbasetemp() / "state" / uuid4().hex))


@pytest.fixture(autouse=True)
def patient_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull of any timeout waits for the broker's answer: a loaded machine may be late with it without a fault."""
    monkeypatch.setattr(pulling, "GRACE", 30.0)
