"""The goals beside other brokers, and whether they are reached: the first table of docs/BENCHMARKS.md.

A goal that is a ratio compares two numbers of the same round, and takes the median of the rounds. Of several ways of
the other brokers, the best of that round counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from statistics import median
from typing import Any, Final, NamedTuple

from bench.peers.loopback import NAME as LOOPBACK
from bench.peers.report.results import OURS
from qmq.bench.values import shown

Found = Mapping[str, Any]
#: The numbers of one round, by broker, client and way.
Round = Mapping[tuple[str, str, str], float]
_MIB: Final = 1 << 20
_PAGE_CACHE: Final = "page cache"
_FSYNC: Final = "fsync"
_C_CLIENT: Final = "confluent-kafka"


class Who(NamedTuple):
    """Some ways of a broker: without *ways* all ways, without *client* those of all clients, without *broker* those of
    all brokers except QMQ.
    """

    broker: str = ""
    client: str = ""
    ways: tuple[str, ...] = ()

    def has(self, broker: str, client: str, way: str) -> bool:
        """Return whether a way is one of these."""
        is_his = broker == self.broker if self.broker else broker not in (OURS, LOOPBACK)
        return is_his and self.client in ("", client) and (not self.ways or way in self.ways)


class Goal(NamedTuple):
    """A goal: at most *most*, or, if that is None, at least *least*. ``figure`` finds its number in a run."""

    says: str
    figure: Callable[[Found], float | None]
    least: float = 0.0
    most: float | None = None
    unit: str = "times"

    def reached(self, figure: float) -> bool:
        """Return whether a number reaches the goal."""
        return figure <= self.most if self.most is not None else figure >= self.least

    def wanted(self) -> str:
        """Return the bound in words."""
        words = f"at most {shown(self.most)}" if self.most is not None else f"at least {shown(self.least)}"
        return f"{words} {self.unit}".rstrip()


def _values(found: Found, work: str, promise: str, what: str, who: Who) -> dict[int, list[float]]:
    """Return the numbers of these ways by round."""
    values: dict[int, list[float]] = {}
    for one in found["numbers"]:
        is_it = (one["work"], one["promise"], one["what"]) == (work, promise, what)
        if is_it and who.has(one["peer"], one["client"], one["way"]):
            for number, value in zip(one.get("in_rounds", count()), one["rounds"], strict=False):
                values.setdefault(number, []).append(value)
    return values


def _beside(
    work: str, promise: str, what: str, ours: Who, theirs: Who, less: bool = False
) -> Callable[[Found], float | None]:
    """Return a function for how many times better QMQ's best is than the best of others; more (or *less*) is better."""

    def figure(found: Found) -> float | None:
        best = min if less else max
        mine, others = _values(found, work, promise, what, ours), _values(found, work, promise, what, theirs)
        pairs = [(best(mine[number]), best(others[number])) for number in mine if number in others]
        ratios = [b / a if less else a / b for a, b in pairs if a > 0 and b > 0]
        return median(ratios) if ratios else None

    return figure


def _most(work: str, what: str, unit_size: float = 1.0, ending: bool = False) -> Callable[[Found], float | None]:
    """Return a function for the greatest of QMQ's medians of these numbers; *ending* selects them by name."""

    def figure(found: Found) -> float | None:
        values = [
            one["median"] / unit_size
            for one in found["numbers"]
            if (one["work"], one["peer"]) == (work, OURS)
            and (one["what"].endswith(what) if ending else one["what"] == what)
        ]
        return max(values, default=None)

    return figure


def _least(work: str, start: str, unit: str) -> Callable[[Found], float | None]:
    """Return a function for the least of QMQ's medians of the numbers of that unit; *start* selects them by name."""

    def figure(found: Found) -> float | None:
        values = [
            one["median"]
            for one in found["numbers"]
            if (one["work"], one["peer"], one["unit"]) == (work, OURS, unit) and one["what"].startswith(start)
        ]
        return min(values, default=None)

    return figure


def _of_few(found: Found) -> float | None:
    """Return QMQ's rate with the most subjects, relative to that with a hundredth of them."""
    rates = {
        int(one["what"].removesuffix(" subjects").replace(",", "")): one["median"]
        for one in found["numbers"]
        if (one["work"], one["peer"], one["unit"]) == ("subjects", OURS, "msg/s") and one["what"].endswith(" subjects")
    }
    most = max(rates, default=0)
    few = most // 100
    return rates[most] / rates[few] if few in rates else None


def _ours(*ways: str) -> Who:
    return Who(OURS, "", ways)


def _moving() -> Iterator[Goal]:
    kafka = Who("kafka", _C_CLIENT)
    for promise, times in ((_PAGE_CACHE, 2.5), (_FSYNC, 1.3)):
        for size in ("100 B", "1 KiB"):
            says = f"`send_many`, {size}, {promise}: Kafka's best bulk send from Python's C client"
            yield Goal(says, _beside("send", promise, size, _ours("bulk"), kafka), times)
    produce = Who("kafka", _C_CLIENT, ("queued",))
    yield Goal(
        "`send_nowait`, 100 B: Kafka's `produce`", _beside("send", _PAGE_CACHE, "100 B", _ours("queued"), produce), 1.3
    )
    for name, says in (("nats", "nats-py's awaited publish"), ("kafka", "aiokafka's `send_and_wait`")):
        client = {"nats": "nats-py", "kafka": "aiokafka"}[name]
        beside = _beside("send", _PAGE_CACHE, "100 B", _ours("awaited"), Who(name, client, ("awaited",)))
        yield Goal(f"`await send`, 1,000 in flight: {says}", beside, 2.5 if name == "nats" else 1.0)
    share, either = Who("kafka", _C_CLIENT, ("share each",)), Who("kafka", _C_CLIENT, ("each", "share each"))
    for says, ours, theirs, times in (
        ("`pull`, touched and acked: Kafka's better group", "each", either, 1.3),
        ("`async for`, touched and acked: Kafka's share group", "iterated", share, 1.0),
        ("`pull_batch`, acked: Kafka's better group", "bulk", Who("kafka", _C_CLIENT), 3.5),
        ("`pull_batch`, acked: Kafka's own Java consumer", "bulk", Who("kafka", "its Java tools"), 1.6),
    ):
        yield Goal(f"{says}, 100 B", _beside("consume", _PAGE_CACHE, "100 B", _ours(ours), theirs), times)
    copy = _beside("consume", _PAGE_CACHE, "1 KiB", _ours("bulk"), Who(LOOPBACK))
    yield Goal("`pull_batch`, acked, 1 KiB: a bare copy over loopback", copy, 0.7)


def _waiting() -> Iterator[Goal]:
    for promise in (_PAGE_CACHE, _FSYNC):
        for rate in ("1 k msg/s", "10 k msg/s"):
            for share in ("p50", "p99"):
                beside = _beside("latency", promise, f"{rate} end to end {share}", _ours(), Who(), less=True)
                yield Goal(f"end to end at {rate}, {share}, {promise}: the best of all others", beside, 1.0)
    memory = _most("server", ": most memory of its own", _MIB, ending=True)
    yield Goal("memory of the broker, at its most in any work", memory, most=150, unit="MiB")
    yield Goal("longest gap while consumers come and go", _most("churn", "longest gap"), most=100, unit="ms")
    alone = "of the same without"
    yield Goal("sends beside a backlog, of the same without", _least("backlog", "send", alone), 0.9)
    yield Goal("`pull` beside a backlog, of the same without", _least("backlog", "consume", alone), 0.9)
    yield Goal("rate with the most subjects, of that with a hundredth", _of_few, 0.8)


GOALS: Final = (*_moving(), *_waiting())


def summary(founds: Sequence[Found]) -> Iterator[str]:
    """Yield the lines of the table; each goal is looked up in the first run that has its numbers."""
    yield "| beside | wanted | figure | reached |"
    yield "|---|---|---|---|"
    for goal in GOALS:
        figures = [figure for found in founds if (figure := goal.figure(found)) is not None]
        if not figures:
            yield f"| {goal.says} | {goal.wanted()} | not measured | |"
            continue
        worst = max(figures) if goal.most is not None else figures[0]
        reached = "yes" if goal.reached(worst) else "**no**"
        yield f"| {goal.says} | {goal.wanted()} | {shown(worst, 3)} | {reached} |"
