"""The interface of a broker that is measured: a new one is a `Peer` and a module of `bench.peers.clients`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.peers.processes import Server


class Promise(StrEnum):
    """What an acknowledgement of a send promises."""

    PAGE_CACHE = "page cache"
    FSYNC = "fsync"


class Absent(Exception):
    """A broker cannot be installed on this machine; the text says why, and what would help."""


class Way(NamedTuple):
    """One way to send or to consume with a client.

    ``says`` names the calls and settings. ``rate`` is about how many messages of 100 B it moves in a second: it decides
    how many are sent, so that slow and fast ones run for about as long. ``like`` is the way of QMQ that a user would
    choose instead, if it has another name.
    """

    says: str
    rate: int
    like: str = ""


class Client(NamedTuple):
    """A client library. ``package`` is its distribution, ``module`` the one of `bench.peers.clients` that drives it.

    ``paced`` are the ways to send on a schedule; the way to consume meanwhile is "paced" too. It is empty if the client
    cannot do that or nobody would. ``keyed`` are ways to send with keys. ``limited`` are ways to consume "at most" so
    many messages at once, ``spread`` those for one consumer of very many topics.
    """

    package: str
    module: str
    sends: Mapping[str, Way]
    consumes: Mapping[str, Way]
    paced: Mapping[str, Way] = {}
    keyed: Mapping[str, Way] = {}
    limited: Mapping[str, Way] = {}
    spread: Mapping[str, Way] = {}

    def ways_by_work(self) -> list[tuple[str, Mapping[str, Way]]]:
        """Return the works that have ways of their own, with these."""
        return [*_ways_by_work(self), ("keys", self.keyed), ("limits", self.limited), ("subjects", self.spread)]


class Tool(NamedTuple):
    """A broker's own load tool, in another language than Python.

    ``package`` names it and the language; ``module`` is the one of `bench.peers.tools` that runs it. Its ways are
    compared with those of QMQ's Python client that ``Way.like`` names.
    """

    package: str
    module: str
    sends: Mapping[str, Way]
    consumes: Mapping[str, Way]
    paced: Mapping[str, Way] = {}
    #: Whether its messages are only counted, since it makes its own bodies and comparing them would take too long.
    only_counts: bool = False

    def ways_by_work(self) -> list[tuple[str, Mapping[str, Way]]]:
        """Return the works that have ways of their own, with these."""
        return _ways_by_work(self)


def _ways_by_work(client: Client | Tool) -> list[tuple[str, Mapping[str, Way]]]:
    return [
        ("send", client.sends), ("consume", client.consumes), ("failing", client.consumes), ("latency", client.paced)
    ]  # fmt: skip


class Installed(NamedTuple):
    """An installed broker: its version, and the bytes of all that was installed to run it."""

    version: str
    size_bytes: int


class Peer(ABC):
    """A broker. ``promises`` has the setting for each promise it keeps, ``cannot`` the reason why it does not keep
    one.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    clients: ClassVar[tuple[Client, ...]]
    tools: ClassVar[tuple[Tool, ...]] = ()
    promises: ClassVar[Mapping[Promise, str]]
    cannot: ClassVar[Mapping[Promise, str]] = {}
    #: The works that it cannot do, with the reasons.
    lacks: ClassVar[Mapping[str, str]] = {}
    #: How many messages go through it before it is measured: compilers at run time need some.
    warm_messages: ClassVar[int] = 20_000

    @property
    def drivers(self) -> list[Client | Tool]:
        """Return all its clients and tools."""
        return [*self.clients, *self.tools]

    @abstractmethod
    def install(self, home: Path) -> Installed:
        """Make sure that the broker is installed, below *home* or as a package of the system. Raises Absent."""

    @abstractmethod
    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        """Start it on loopback with its data below *directory*, and return when it serves. Raises BenchFailed."""


class Target(NamedTuple):
    """A running broker as its clients see it: its address, its promise, and what else its client has to know."""

    address: str
    promise: Promise
    more: Mapping[str, Any]
