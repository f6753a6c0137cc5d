"""The results: each number's median and spread over the rounds, and its ratio to QMQ's in the same round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from bench.peers.peer import Client, Peer, Tool
from bench.peers.running import Row

#: The units of which less is better.
_LESS: Final = ("ms", "s", "us a message", "bytes", "cores")
#: The units of which neither is better: they describe the work, and brokers did not all do as much.
_NEITHER: Final = ("cpu s", "messages", "consumers")
OURS: Final = "qmq"


class Number(NamedTuple):
    """The rounds of one number. ``values`` by round; ``beside`` is how many times better QMQ was in the same round."""

    row: Row
    values: Mapping[int, float]
    beside: float | None

    @property
    def median(self) -> float:
        """Return the median of the rounds."""
        return median(self.values.values())

    def as_json(self) -> dict[str, Any]:
        """Return the number in plain types."""
        told = {name: value for name, value in self.row._asdict().items() if name != "value"}
        values = list(self.values.values())
        return {
            **told,
            "median": self.median,
            "least": min(values),
            "most": max(values),
            "rounds": values,
            "in_rounds": list(self.values),
            "qmq_is_better_by": self.beside,
        }


def numbers(rounds: Iterable[tuple[int, Row]], peers: Sequence[Peer]) -> list[Number]:
    """Return the numbers of all rounds, in the order in which they first appear."""
    gathered: dict[Row, dict[int, float]] = {}
    for number, row in rounds:
        gathered.setdefault(row._replace(value=0.0), {})[number] = row.value
    likes = {
        (peer.name, client.package, way): likeness
        for peer in peers
        for client in peer.drivers
        for way, likeness in _likenesses(client)
    }
    return [Number(row, values, _beside(row, values, gathered, likes)) for row, values in gathered.items()]


def rows_of(saved: Iterable[Mapping[str, Any]]) -> list[tuple[int, Row]]:
    """Return the rounds that `Number.as_json` has saved."""
    return [
        (number, Row(**{name: one[name] for name in Row._fields if name != "value"}, value=value))
        for one in saved
        for number, value in zip(one["in_rounds"], one["rounds"], strict=True)
    ]


def _likenesses(client: Client | Tool) -> Iterable[tuple[str, str]]:
    for _, ways in client.ways_by_work():
        for name, way in ways.items():
            yield name, way.like or name


def _beside(
    row: Row,
    values: Mapping[int, float],
    all_rounds: Mapping[Row, Mapping[int, float]],
    likes: Mapping[tuple[str, str, str], str],
) -> float | None:
    """Return how many times better QMQ was: the median over the rounds that both have."""
    if row.peer == OURS or row.unit in _NEITHER or row.what.endswith(" sent"):
        return None
    like = likes.get((row.peer, row.client, row.way), row.way)
    asked = row._replace(peer=OURS, client="", way="", value=0.0)
    same = {
        other.way: found for other, found in all_rounds.items() if other._replace(client="", way="", value=0.0) == asked
    }
    # If only another way of QMQ has the number, take that one.
    ours = same.get(like) or next(iter(same.values()), {})
    both = [(ours[number], values[number]) for number in values if number in ours]
    ratios = [_times_better(one, other, row.unit) for one, other in both if one > 0 and other > 0]
    return median(ratios) if ratios else None


def _times_better(ours: float, theirs: float, unit: str) -> float:
    return theirs / ours if unit in _LESS else ours / theirs
