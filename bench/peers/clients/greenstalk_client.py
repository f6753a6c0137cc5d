"""greenstalk: one call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import greenstalk

from bench.peers.peer import Target
from bench.peers.workers.driving import FAILS_ONE_OF, Receiver, Sender

_TAKE: Final = 1_000
_LEASE_S: Final = 600


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Do nothing: tubes need not be created."""


def _connect(target: Target, use: str = "default", watch: str = "default") -> greenstalk.Client:
    host, port = target.address.split(":")
    return greenstalk.Client((host, int(port)), encoding=None, use=use, watch=watch)


class _Puts(Sender):
    async def open(self, topics: Sequence[str]) -> None:
        self._client = _connect(self.target, use=topics[0])
        self._used = topics[0]

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        self._use(topic)
        for body in bodies:
            self._client.put(body, ttr=_LEASE_S)

    def _use(self, topic: str) -> None:
        if topic != self._used:
            self._client.use(topic)
            self._used = topic

    async def flush(self) -> None:
        """Do nothing: each put has its answer."""

    def post(self, topic: str, body: bytes, number: int) -> None:
        self._use(topic)
        self._client.put(body, ttr=_LEASE_S)
        self.acked(number)

    async def close(self) -> None:
        self._client.close()


def sender(target: Target, way: str) -> Sender:
    """Return a sender; all ways are the same."""
    return _Puts(target)


class _Reserve(Receiver):
    """Consumes by reserve; a tube has one group."""

    blocks = True
    most = _TAKE

    async def open(self) -> None:
        self._client = _connect(self.target, watch=self.topic)

    async def take(self) -> Sequence[bytes]:
        found: list[bytes] = []
        wait = max(round(self.silence_s), 1)
        try:
            while len(found) < self.most:
                job = self._client.reserve(timeout=wait)
                self._client.delete(job)
                found.append(job.body)
                wait = 0
        except greenstalk.TimedOutError:
            pass
        return found

    async def flush(self) -> None:
        """Do nothing: each delete has its answer."""

    async def left(self) -> int:
        found = self._client.stats_tube(self.topic)
        return int(found["current-jobs-ready"]) + int(found["current-jobs-reserved"])

    async def close(self) -> None:
        self._client.close()


class _Failing(_Reserve):
    """Releases every tenth job the first time."""

    async def open(self) -> None:
        await super().open()
        self._released: set[int] = set()
        self._reserved = 0

    async def take(self) -> Sequence[bytes]:
        while True:
            try:
                job = self._client.reserve(timeout=max(round(self.silence_s), 1))
            except greenstalk.TimedOutError:
                return []
            self._reserved += 1
            if self._reserved % FAILS_ONE_OF or job.id in self._released:
                self._client.delete(job)
                return [job.body]
            self._released.add(job.id)
            self.refused += 1
            self._client.release(job)


class _Arriving(_Reserve):
    most = 1


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way."""
    return {"each": _Reserve, "paced": _Arriving, "failing": _Failing}[way](target, topic, group)
