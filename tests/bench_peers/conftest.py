"""A peer that is absent, one that does nothing, and QMQ itself as a peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.brokers.qmq import Qmq
from bench.peers.peer import Absent, Client, Installed, Peer, Promise, Way
from bench.peers.processes import Server


class Missing(Peer):
    """A peer that cannot be installed."""

    name = "missing"
    title = "Missing MQ"
    clients = (Client("missing-py", "missing", {"bulk": Way("all at once", 1_000)}, {"each": Way("one", 1_000)}),)
    promises = {Promise.FSYNC: "always"}  # noqa: RUF012
    cannot = {Promise.PAGE_CACHE: "it always syncs"}  # noqa: RUF012

    def install(self, home: Path) -> Installed:
        raise Absent("nobody publishes it")

    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        raise AssertionError("a peer that is absent is not started")


@pytest.fixture
def missing() -> Missing:
    return Missing()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("peers")
    with Qmq().start(directory, directory / "broker", Promise.PAGE_CACHE) as started:
        yield started
