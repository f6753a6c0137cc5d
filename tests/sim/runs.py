"""Runs of histories, each from a seed: a failure says how to run it again; many are counted together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, Protocol

from tests.effort import part_of
from tests.sim.tally import Tally

#: The seeds of tests of histories: half of the first ones and half of today's; all of either, where all is tried.
SEEDS: Final = ("first", "of-today") if part_of(2) == 2 else ("both",)

#: So many times the histories asked for are run at most, until all has happened that is wanted.
_TIMES: Final = 5


class History(Protocol):
    """What happens to the consumers of one broker."""

    count: Counter[str]

    @property
    def tallies(self) -> Mapping[str, Tally]: ...

    def run(self, commands: int, /) -> None:
        """So many commands of clients at least; then the checks."""


def run_one(history: History, commands: int, again: str) -> Counter[str]:
    """What happened in it, and what became of the messages of all groups. *again* is what runs it again."""
    try:
        history.run(commands)
    except Exception as error:
        error.add_note(f"again: python -m tests.sim {again}")
        raise
    found = Counter(history.count)
    for tally in history.tallies.values():
        found.update(tally.counts)
    return found


def count_many(run: Callable[[int], Counter[str]], first: int, count: int, wanted: Iterable[str] = ()) -> Counter[str]:
    """Histories of so many seeds, counted together; and of more seeds while something *wanted* has not happened.

    A rare thing happens in other seeds after each change of what they try. At most _TIMES as many are run.
    """
    counts = Counter[str]()
    for seed in range(first, first + count * _TIMES):
        if seed >= first + count and all(counts[name] for name in wanted):
            break
        counts.update(run(seed))
    return counts


def count_seeds(run: Callable[[int], Counter[str]], seeds: str, count: int) -> Counter[str]:
    """Histories of so many seeds of SEEDS, counted together."""
    if seeds == "both":
        half = (count + 1) // 2
        return count_many(run, 0, half) + count_many(run, first_of_today(half), half)
    return count_many(run, 0 if seeds == "first" else first_of_today(count), count)


def first_of_today(count: int) -> int:
    """Return the first of so many seeds that no other day (of UTC) has."""
    return datetime.now(UTC).toordinal() * count


def told(counts: Counter[str]) -> str:
    """A line for each thing that happened, with how often."""
    return "\n".join(f"{count:9} {name}" for name, count in sorted(counts.items()))
