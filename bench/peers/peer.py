"""What a broker has to tell and to do to be measured: a new one is a `Peer` and a module of `bench.peers.clients`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.peers.processes import Server


class Promise(StrEnum):
    """What an acknowledgement of a send means."""

    PAGE_CACHE = "page cache"
    FSYNC = "fsync"


class Absent(Exception):
    """A peer can't be had on this machine; the text says why, and what would help."""


class Way(NamedTuple):
    """One way to send or to consume with a client.

    ``says`` names the calls and settings. ``rate`` is about how many messages of 100 B it moves in a second: it decides
    how many are sent, so that slow and fast ones run for about as long. ``like`` is the way of QMQ that a user would
    take instead, where it has another name.
    """

    says: str
    rate: int
    like: str = ""


class Client(NamedTuple):
    """A client library. ``package`` is its distribution, ``module`` the one of `bench.peers.clients` that drives it.

    ``paced`` are the ways to send on a schedule; the one to consume meanwhile is "paced" too. Empty where the client
    can't (or nobody would).
    """

    package: str
    module: str
    sends: Mapping[str, Way]
    consumes: Mapping[str, Way]
    paced: Mapping[str, Way] = {}


class Tool(NamedTuple):
    """A broker's own load tool, in another language than Python. ``package`` says which, and the language;
    ``module`` is the one of `bench.peers.tools` that runs it.

    Its ways are held against those of QMQ's Python client: ``Way.like`` says which.
    """

    package: str
    module: str
    sends: Mapping[str, Way]
    consumes: Mapping[str, Way]
    paced: Mapping[str, Way] = {}
    #: Its bodies are of its own making, and the usual client would take too long over them: they are only counted.
    only_counts: bool = False


class Installed(NamedTuple):
    """What is on the machine: the broker's version, and the bytes of all that was installed to run it."""

    version: str
    size_bytes: int


class Peer(ABC):
    """A broker. ``promises`` says by which setting it keeps each promise, ``cannot`` why it does not keep one."""

    name: ClassVar[str]
    title: ClassVar[str]
    clients: ClassVar[tuple[Client, ...]]
    tools: ClassVar[tuple[Tool, ...]] = ()
    promises: ClassVar[Mapping[Promise, str]]
    cannot: ClassVar[Mapping[Promise, str]] = {}
    #: Works that it can't do, and why.
    lacks: ClassVar[Mapping[str, str]] = {}
    #: Messages that go through it before it is measured: compilers at run time need some.
    warm_messages: ClassVar[int] = 20_000

    @property
    def drivers(self) -> list[Client | Tool]:
        """All that sends to it and consumes from it."""
        return [*self.clients, *self.tools]

    @abstractmethod
    def install(self, home: Path) -> Installed:
        """See to it that the broker is there, under *home* or as the system's package. Raises Absent."""

    @abstractmethod
    def start(self, home: Path, directory: Path, promise: Promise) -> Server:
        """Start it on loopback with its data under *directory*, and return when it serves. Raises BenchFailed."""


class Target(NamedTuple):
    """A broker that runs, as its clients see it: where, what it promises, and what else its client has to know."""

    address: str
    promise: Promise
    more: Mapping[str, Any]
