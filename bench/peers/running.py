"""A running peer, and the workers that the works send to it."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.peers import loopback
from bench.peers.peer import Client, Peer, Promise, Tool
from bench.peers.processes import Server
from qmq.bench.processes import Child, warm_memory
from qmq.bench.values import BenchFailed

#: The names of body sizes.
SIZES: Final = {100: "100 B", 1_024: "1 KiB", 16_384: "16 KiB"}
#: More bytes a second than any broker moves, which bounds runs with large bodies.
_BYTES_PER_S: Final = 200e6
_SMALL: Final = 100
_SAMPLE_EVERY_S: Final = 0.5
_PORTION: Final = 1_000


class Amount(NamedTuple):
    """How much a run sends.

    ``seconds`` is about how long one run takes; ``sizes`` of bodies in bytes; ``rates`` of messages a second on a
    schedule; ``backlog`` and ``own_backlog`` (QMQ's alone) messages that wait; ``subjects`` numbers of subjects;
    ``consumers`` that wait; after ``timeout_s`` seconds it gives up filling a backlog, making topics or joining.
    """

    seconds: float = 2.0
    sizes: tuple[int, ...] = (100, 1_024, 16_384)
    rates: tuple[int, ...] = (1_000, 10_000, 50_000)
    backlog: int = 10_000_000
    own_backlog: int = 100_000_000
    subjects: tuple[int, ...] = (1, 1_000, 100_000)
    consumers: int = 1_000
    timeout_s: float = 60.0

    def messages(self, rate: int, size: int) -> int:
        """Return how many messages of *size* bytes to send in a way that moves *rate* small ones a second."""
        most = min(rate, _BYTES_PER_S / size)
        return max(round(self.seconds * most / _PORTION), 2) * _PORTION


class Row(NamedTuple):
    """One number of one round."""

    work: str
    peer: str
    client: str
    way: str
    promise: str
    what: str
    value: float
    unit: str


class Running:
    """A peer that serves under one promise, for one work of one round."""

    def __init__(self, peer: Peer, promise: Promise, server: Server, scratch: Path, amount: Amount) -> None:
        self.peer = peer
        self.promise = promise
        self.server = server
        self.amount = amount
        self._scratch = scratch

        self.most_memory = server.memory()
        #: How many messages were sent to a topic to wait there.
        self.filled: dict[str, int] = {}
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def _sample(self) -> None:
        """Record the most memory that the server has had, since it goes up and down."""
        while not self._ends.wait(_SAMPLE_EVERY_S):
            self.most_memory = max(self.most_memory, self.server.memory())

    def end(self) -> None:
        """Stop sampling."""
        self._ends.set()
        self._sampler.join()

    def topic(self, what: str) -> str:
        """Return the name of a topic that nothing was sent to yet."""
        return f"bench.{what}-{secrets.token_hex(3)}"

    def run(self, *jobs: tuple[str, Client, Mapping[str, Any]], writes_bytes: int = 0) -> list[dict[str, Any]]:
        """Prepare workers one after another, start them together, and return their results. Raises BenchFailed."""
        with ExitStack() as stack:
            workers = [stack.enter_context(self.worker(job, client, options)) for job, client, options in jobs]
            warm_memory(self._scratch, writes_bytes)
            for worker in workers:
                worker.write_line("go")
            return [self.result(worker) for worker in workers]

    def result(self, worker: Child) -> dict[str, Any]:
        """Return the result of a worker."""
        found: dict[str, Any] = json.loads(worker.read_line())
        return found

    def worker(self, job: str, client: Client, options: Mapping[str, Any]) -> Child:
        """Return a worker that is prepared, and starts when it is told "go"."""
        return self.prepared(job, client, options)[0]

    def prepared(self, job: str, client: Client, options: Mapping[str, Any]) -> tuple[Child, dict[str, Any]]:
        """Return a prepared worker, and the values that it printed before its start."""
        told = {"module": client.module, "target": self.server.target, **options}
        errors = self._scratch / f"worker-{time.monotonic_ns():x}.errors"
        child = Child(
            f"{self.peer.name}'s worker {job} ({told.get('way', '')})",
            ["-m", "bench.peers.workers.worker", job, json.dumps(told)],
            errors,
        )
        try:
            return child, json.loads(child.read_line())
        except BenchFailed:
            child.end()
            raise

    def make(self, client: Client, *topics: str) -> float:
        """Create topics; return the seconds that it took."""
        (made,) = self.run(("make", client, {"topics": topics}))
        return float(made["seconds"])

    def send(self, client: Client, way: str, topic: str, size: int, messages: int) -> float:
        """Send to a topic; return messages a second."""
        options = {"way": way, "topic": topic, "size": size, "messages": messages}
        (sent,) = self.run(("send", client, options), writes_bytes=size * messages)
        return _rate(sent)

    def consume(
        self,
        client: Client,
        way: str,
        topic: str,
        size: int,
        messages: int,
        group: str = "one",
        there: int | None = None,
        text: str = "",
    ) -> float:
        """Consume all of a topic, or *messages* if more are *there*; return messages a second.

        Messages that were only counted are read again and compared.
        """
        options = {"topic": topic, "size": size, "messages": messages, "there": there, "text": text}
        (came,) = self.run(("consume", client, {**options, "way": way, "group": group}))
        if not came["checked"]:
            self.run(("consume", client, {**options, "way": "each", "group": f"{group}-check"}))
        return _rate(came)

    def warm(self, client: Client) -> None:
        """Send and consume some messages that are not measured."""
        if not client.sends or not client.consumes:
            return
        topic, messages = self.topic("warm"), self.peer.warm_messages
        self.make(client, topic)
        send, consume = next(iter(client.sends)), next(iter(client.consumes))
        self.send(client, send, topic, _SMALL, messages)
        self.consume(client, consume, topic, _SMALL, messages)

    def copy(self, size: int, messages: int) -> float:
        """Return the messages a second that a plain copy over loopback moves while the broker is idle."""
        return loopback.rate(self._scratch, size, messages)

    def backlogs(self) -> list[int]:
        """Return the sizes of backlogs to measure; QMQ has one more."""
        return [self.amount.backlog, *([self.amount.own_backlog] if self.peer.name == "qmq" else [])]

    def row(self, work: str, client: Client | Tool, way: str, what: str, value: float, unit: str) -> Row:
        """Return a number of this peer."""
        return Row(work, self.peer.name, client.package, way, str(self.promise), what, value, unit)


@contextmanager
def running(peer: Peer, promise: Promise, home: Path, scratch: Path, amount: Amount) -> Iterator[Running]:
    """Start a peer on a new directory below *scratch*; stop it and delete the directory at the end."""
    directory = scratch / f"{peer.name}-{time.monotonic_ns():x}"
    try:
        with peer.start(home, directory, promise) as server:
            started = Running(peer, promise, server, scratch, amount)
            try:
                yield started
            finally:
                started.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _rate(result: Mapping[str, Any]) -> float:
    return float(result["messages"] / result["seconds"])
