"""Plan the order of all steps: round after round, and within a round all peers for each work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.peers.peer import Peer, Promise
from bench.peers.works import WORKS


class Step(NamedTuple):
    """Starting a peer, doing one work under one promise, and stopping it."""

    number: int
    work: str
    peer: Peer
    promise: Promise

    def as_json(self) -> list[Any]:
        """Return the step in plain types."""
        return [self.number, self.work, self.peer.name, str(self.promise)]


def steps(peers: Sequence[Peer], works: Sequence[str], rounds: int) -> Iterator[Step]:
    """Yield all steps. Each round begins with another peer, so that none always comes after the same one."""
    for number in range(rounds):
        shift = number % len(peers) if peers else 0
        for work in works:
            for peer in (*peers[shift:], *peers[:shift]):
                for promise in () if work in peer.lacks else WORKS[work].promises(peer):
                    yield Step(number, work, peer, promise)
