"""The works by name, in their order: what every broker is asked to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from bench.peers.measure import crowds, moving, timing, waiting
from bench.peers.peer import Peer, Promise
from bench.peers.running import Row, Running
from qmq.errors import InvalidOption


class Work(NamedTuple):
    """A work of a peer while it runs. ``both``: under both promises, else under the first that it keeps.

    ``needs`` names the ways that a client must have for it.
    """

    do: Callable[[Running], Iterator[Row]]
    both: bool
    needs: str = ""

    def promises(self, peer: Peer) -> list[Promise]:
        """Return the promises under which a peer does the work; none if its clients have no way to do it."""
        if self.needs and not any(getattr(client, self.needs) for client in peer.clients):
            return []
        kept = [promise for promise in Promise if promise in peer.promises]
        return kept if self.both else kept[:1]


#: ``send`` and ``consume`` are one run, since what was sent is checked by consuming it.
WORKS: Final[dict[str, Work]] = {
    "move": Work(moving.move, both=True),
    "keys": Work(moving.keys, both=False, needs="keyed"),
    "limits": Work(moving.limits, both=False, needs="limited"),
    "latency": Work(timing.latency, both=True),
    "backlog": Work(waiting.backlog, both=False),
    "subjects": Work(crowds.subjects, both=False),
    "neighbours": Work(waiting.neighbours, both=False),
    "failing": Work(waiting.failing, both=False),
    "churn": Work(crowds.churn, both=False),
    "idle": Work(crowds.idle, both=False),
}
_ALSO: Final = {"send": "move", "consume": "move"}


def chosen(names: Sequence[str]) -> list[str]:
    """Return the works of these names, or all. Raises InvalidOption."""
    for name in names:
        if name not in WORKS and name not in _ALSO:
            raise InvalidOption(f"there is no work {name!r}; there are {', '.join([*WORKS, *_ALSO])}")
    wanted = {_ALSO.get(name, name) for name in names}
    return [name for name in WORKS if not names or name in wanted]
