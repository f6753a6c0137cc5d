"""RocketMQ's own Python client, through the proxy."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any, Final

# It logs below the home directory, which is set to another one so that the user's stays clean.
os.environ["HOME"] = tempfile.mkdtemp(prefix="rocketmq-client-")

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

from bench.peers.peer import Target
from bench.peers.workers.driving import FAILS_ONE_OF, Receiver, Sender
from qmq.bench.values import BenchFailed

_IN_FLIGHT: Final = 1_000
#: The proxy returns no more at a time.
_RECEIVE: Final = 32
_THREADS: Final = 16
_LEASE_S: Final = 300
_REFUSED_S: Final = 1
_ANSWER_S: Final = 30
_WAIT_S: Final = 5
_TRIES: Final = 5
_AGAIN_S: Final = 0.05
_GROUPS: Final = ("one", "stuck", "churn", "check")
_QUEUES: Final = 8
_READ_AND_WRITE: Final = 6


def _plain(name: str) -> str:
    """Replace the dots of a name, which are not allowed."""
    return name.replace(".", "-")


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Create topics of 8 queues, and their groups, without which receiving fails. All at once, since the tool starts a
    JVM.
    """
    described = [
        {
            "topicName": _plain(topic),
            "perm": _READ_AND_WRITE,
            "readQueueNums": _QUEUES,
            "writeQueueNums": _QUEUES,
            "attributes": {"+message.type": "NORMAL"},
        }
        for topic in topics
    ]
    _make(target, "updateTopicList", described)
    _make_groups(target, [_group(topic, group) for topic in topics for group in _GROUPS])


def _make_groups(target: Target, names: Sequence[str]) -> None:
    _make(target, "updateSubGroupList", [{"groupName": name} for name in names])


def _make(target: Target, command: str, described: Sequence[Mapping[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / command
        file.write_text(json.dumps(described), "utf-8")
        _admin(target, command, "-f", str(file), "-c", "DefaultCluster")


def _group(topic: str, group: str) -> str:
    return f"{_plain(topic)}-{group}"


def _admin(target: Target, *words: str, says: str = "success") -> None:
    environment = {**os.environ, "ROCKETMQ_HOME": str(target.more["home"])}
    command = [*target.more["admin"], *words, "-n", str(target.more["names"])]
    told = ""
    for _ in range(_TRIES):
        # It gives up after seconds, which a busy machine may take.
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        if says in done.stdout:
            return
        told = done.stdout + done.stderr
    raise BenchFailed(f"RocketMQ's {words[0]} failed {_TRIES} times: {told[-300:]}")


def _configuration(target: Target) -> Any:
    return ClientConfiguration(target.address, Credentials(), request_timeout=_ANSWER_S)


class _Async(Sender):
    async def open(self, topics: Sequence[str]) -> None:
        self._producer = Producer(_configuration(self.target), [_plain(topic) for topic in topics])
        self._producer.startup()
        self._sent: set[Future[Any]] = set()

    def _send(self, topic: str, body: bytes) -> Future[Any]:
        message = Message()
        message.topic = _plain(topic)
        message.body = body
        sent: Future[Any] = self._producer.send_async(message)
        self._sent.add(sent)
        return sent

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        for body in bodies:
            if len(self._sent) >= _IN_FLIGHT:
                self._settle(*wait(self._sent, return_when=FIRST_COMPLETED))
            self._send(topic, body)

    def _settle(self, done: set[Future[Any]], left: set[Future[Any]]) -> None:
        for one in done:
            one.result()
        self._sent = left

    async def flush(self) -> None:
        self._settle(*wait(self._sent, timeout=60))
        if self._sent:
            raise BenchFailed(f"{len(self._sent)} messages were not acknowledged in 60 s")

    def post(self, topic: str, body: bytes, number: int) -> None:
        self._send(topic, body).add_done_callback(lambda done: None if done.exception() else self.acked(number))

    async def close(self) -> None:
        self._producer.shutdown()


def sender(target: Target, way: str) -> Sender:
    """Return a sender; all ways are the same."""
    return _Async(target)


class _Receiving(Receiver):
    """Receives and acks one by one in threads: an ack costs a round trip, and ``ack_async`` does not report its end."""

    blocks = True

    async def open(self) -> None:
        if self.group not in _GROUPS:
            self._make_group()
        self._consumer = SimpleConsumer(
            _configuration(self.target),
            _group(self.topic, self.group),
            {_plain(self.topic): FilterExpression("*")},
            await_duration=_WAIT_S,
        )
        self._consumer.startup()
        self._pool = ThreadPoolExecutor(_THREADS)
        self._some = threading.Condition()
        self._came: list[tuple[int, bytes]] = []
        self._errors: list[BaseException] = []
        self._ends = threading.Event()
        self._started = False

    def _make_group(self) -> None:
        """Create a group that begins with the first message, even if the broker no longer has all of them in memory; by
        default it would begin with the last.
        """
        group = _group(self.topic, self.group)
        _make_groups(self.target, [group])
        words = ("-g", group, "-t", _plain(self.topic), "-s", "0")
        _admin(self.target, "resetOffsetByTime", *words, says="#brokerName")

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                received = self._consumer.receive(_RECEIVE, _LEASE_S) or []
                messages = [message for message in received if self._handles(message)]
            except Exception as error:
                if "no new message" in str(error).lower() or time.monotonic() < self._patient_until:
                    time.sleep(_AGAIN_S)
                    continue
                self._errors.append(error)
                return
            if messages:
                now = time.monotonic_ns()
                with self._some:
                    self._came += [(now, message.body) for message in messages]
                    self._some.notify()

    def _handles(self, message: Any) -> bool:
        """Acknowledge a message; return False if it is to fail instead."""
        self._consumer.ack(message)
        return True

    async def take(self) -> Sequence[bytes]:
        if not self._started:
            self._started = True
            # The proxy refuses until it knows this client by another connection.
            self._patient_until = time.monotonic() + _ANSWER_S
            for _ in range(_THREADS):
                self._pool.submit(self._work)
        deadline = time.monotonic() + self.silence_s
        with self._some:
            while not self._came and not self._errors and time.monotonic() < deadline:
                self._some.wait(0.5)
            found, self._came = self._came, []
        if self._errors:
            raise BenchFailed(f"receiving failed: {self._errors[0]!r}")
        return [body for _, body in found]

    async def rest(self) -> Sequence[tuple[int, bytes]]:
        """Return the remaining messages; threads that are receiving acknowledge what arrives."""
        self._ends.set()
        self._pool.shutdown()
        return self._came

    async def flush(self) -> None:
        """Do nothing: each ack had its answer before its message was returned."""

    async def close(self) -> None:
        self._ends.set()
        self._pool.shutdown()
        self._consumer.shutdown()


class _Failing(_Receiving):
    """Fails every tenth message the first time: there is no nack, only a lease of a second."""

    async def open(self) -> None:
        await super().open()
        self._numbers = count()

    def _handles(self, message: Any) -> bool:
        if message.delivery_attempt > 1 or next(self._numbers) % FAILS_ONE_OF:
            return super()._handles(message)
        self._consumer.change_invisible_duration(message, _REFUSED_S)
        with self._some:
            self.refused += 1
        return False


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver; except for failures all ways are the same."""
    return (_Failing if way == "failing" else _Receiving)(target, topic, group)
