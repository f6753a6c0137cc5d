"""The numbers of the bench: values of one round, summaries of several rounds, goals, and the error of a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from qmq.errors import QmqError


class BenchFailed(QmqError):
    """A process of the bench ended early, or the messages received differ from those sent: its numbers do not count."""

    code = "bench_failed"


class Value(NamedTuple):
    """One number of one round. ``what`` tells the numbers of a measurement apart: "100 B append"."""

    what: str
    value: float
    unit: str


class Goal(NamedTuple):
    """A goal on two cores: a lower or upper bound."""

    value: float
    at_most: bool = False

    def reached(self, value: float) -> bool:
        """Return whether *value* reaches the goal."""
        return value <= self.value if self.at_most else value >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {shown(self.value)}"


#: No attack may cost a good client more than a tenth.
_ATTACKS: Final = (
    "come and go", "silent", "slow hellos", "slow frames", "never read", "read a byte a second", "http", "bombs",
    "random", "lies", "floods",
)  # fmt: skip

#: The goals by measurement and number. Rates are messages a second, times milliseconds, ratios 0 to 1.
GOALS: Final[dict[tuple[str, str], Goal]] = {
    ("ingest", "100 B append"): Goal(8e6),
    ("ingest", "1 KiB append, relative to a plain loop"): Goal(0.7),
    ("send_many", "100 B append"): Goal(2e6),
    ("send_many", "1 KiB append"): Goal(600e3),
    ("send_many", "100 B flush"): Goal(1.5e6),
    ("send_many", "1 KiB flush"): Goal(400e3),
    ("send_nowait", "100 B append"): Goal(1e6),
    ("send_nowait", "100 B append, key, drain every 500"): Goal(300e3),
    ("send_awaited", "100 B append"): Goal(120e3),
    ("send_awaited", "100 B append, key and property, tasks"): Goal(90e3),
    ("send_one", "append p50"): Goal(0.12, at_most=True),
    ("send_one", "flush p50"): Goal(0.6, at_most=True),
    ("send_one", "flush p99"): Goal(5, at_most=True),
    ("flush_under_load", "p50"): Goal(0.6, at_most=True),
    ("flush_under_load", "p99"): Goal(5, at_most=True),
    ("flush_under_load", "load"): Goal(450e3),
    ("pull", "100 B"): Goal(1.4e6),
    ("pull", "100 B, acked, window 100,000"): Goal(1.2e6),
    ("pull_batch", "100 B"): Goal(4e6),
    ("pull_batch", "100 B, acked, window 100,000"): Goal(3.5e6),
    ("pull_batch", "100 B, acked, max_count 5,000"): Goal(3e6),
    ("pull_batch", "100 B, acked, max_count 1,000"): Goal(1.5e6),
    ("pull_batch", "1 KiB, acked, max_count 5,000"): Goal(700e3),
    ("pull_batch", "1 KiB, acked, max_count 1,000"): Goal(500e3),
    ("pull_batch", "1 KiB, acked, max_count 100"): Goal(150e3),
    ("pull_batch", "1 KiB, relative to a loopback copy"): Goal(0.7),
    ("async_for", "100 B"): Goal(1e6),
    ("async_for", "100 B, acked, window 10,000"): Goal(1e6),
    ("async_for", "100 B, acked, window 100,000"): Goal(900e3),
    ("producers", "64, one at a time, flush relative to append"): Goal(0.7),
    ("end_to_end", "1 k msg/s append p50"): Goal(0.2, at_most=True),
    ("end_to_end", "1 k msg/s append p99"): Goal(0.8, at_most=True),
    ("end_to_end", "1 k msg/s append, acked, window 10,000 p50"): Goal(0.2, at_most=True),
    ("end_to_end", "1 k msg/s append, acked, window 10,000 p99"): Goal(0.8, at_most=True),
    ("end_to_end", "10 k msg/s append, acked, window 10,000 p50"): Goal(0.2, at_most=True),
    ("end_to_end", "10 k msg/s append, acked, window 10,000 p99"): Goal(0.8, at_most=True),
    ("end_to_end", "10 k msg/s append p50"): Goal(0.2, at_most=True),
    ("end_to_end", "10 k msg/s append p99"): Goal(0.8, at_most=True),
    ("subjects", "100,000 in"): Goal(200e3),
    ("subjects", "100,000 out"): Goal(500e3),
    ("subjects", "100,000 out, acked, max_count 5,000"): Goal(400e3),
    ("subjects", "100,000 out, acked, max_count 500"): Goal(200e3),
    ("subjects", "1,000 out, acked, max_count 5,000"): Goal(500e3),
    ("subjects", "1,000 out, acked, max_count 500"): Goal(300e3),
    ("subjects", "in, relative to 1,000 subjects"): Goal(0.8),
    ("subjects", "out, relative to 1,000 subjects"): Goal(0.8),
    ("subjects", "open files"): Goal(2_000, at_most=True),
    ("waiting_pulls", "1,000 pulls, cpu"): Goal(0.01, at_most=True),
    ("waiting_pulls", "1,000 consumers, cpu"): Goal(0.01, at_most=True),
    ("backlog", "pull and ack, p50, relative to none waiting"): Goal(1.05, at_most=True),
    ("backlog", "RssAnon"): Goal(64, at_most=True),
    ("ready_subjects", "cpu of the broker, relative to one subject"): Goal(2, at_most=True),
    ("errors", "fresh, relative to an empty error log"): Goal(0.9),
    ("restart", "to serving"): Goal(2_000, at_most=True),
    ("memory", "growth"): Goal(16, at_most=True),
    **{("untrusted_clients", f"{how}: rate, relative to alone"): Goal(0.9) for how in _ATTACKS},
    **{("untrusted_clients", f"{how}: cpu of the broker for the attack"): Goal(0.1, at_most=True) for how in _ATTACKS},
}


class Summary(NamedTuple):
    """The rounds of one number. ``goal`` may be None."""

    measurement: str
    what: str
    unit: str
    values: tuple[float, ...]
    goal: Goal | None

    @property
    def median(self) -> float:
        """Return the median of the rounds."""
        return median(self.values)

    @property
    def reached(self) -> bool | None:
        """Return whether the median reaches the goal; None without a goal."""
        return None if self.goal is None else self.goal.reached(self.median)

    def as_json(self) -> dict[str, Any]:
        """Return the summary in plain types, for the file."""
        return {
            "measurement": self.measurement,
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "least": min(self.values),
            "most": max(self.values),
            "rounds": list(self.values),
            "goal": None if self.goal is None else {"value": self.goal.value, "at_most": self.goal.at_most},
            "reached": self.reached,
        }


def summarize(rounds: Iterable[tuple[str, Value]]) -> list[Summary]:
    """Return the summaries of all rounds, each (measurement, value), in the order in which they first appear."""
    gathered: dict[tuple[str, str, str], list[float]] = {}
    for measurement, (what, value, unit) in rounds:
        gathered.setdefault((measurement, what, unit), []).append(value)
    return [
        Summary(measurement, what, unit, tuple(values), GOALS.get((measurement, what)))
        for (measurement, what, unit), values in gathered.items()
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that *share* (0 to 1) of the sorted values do not exceed."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def latencies(took_s: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of times in seconds, as workers report them."""
    ordered = sorted(took_s)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p99.9_ms": 0.999, "most_ms": 1.0}
    return {name: 1e3 * percentile(ordered, share) for name, share in shares.items()}


def shown(value: float, digits: int = 4) -> str:
    """Format a number for people, with *digits* significant digits and M or k."""
    rounded = float(f"{value:.{digits}g}")
    for limit, divisor, suffix in ((1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if abs(rounded) >= limit:
            return f"{float(f'{value / divisor:.{digits}g}'):,.10g}{suffix}"
    if rounded == int(rounded):
        return f"{int(rounded):,}"
    return f"{rounded:,.10g}" if abs(rounded) >= 1e-4 else f"{rounded:.{digits + 4}f}".rstrip("0")
