"""The kinds of histories that the tests run, each from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.sim.crashes import Chances
from tests.sim.history import History


def _history(steps: int, chances: Chances, faults: float, ends: float, seed: int) -> list[History]:
    """One history of *steps*. *chances* of looking at a crash at an operation of the workload, of a recovery, and of
    the recovery after that; of a failing call, and of the end of the broker, at a step.
    """
    history = History(seed, _partitions(seed), chances, faults=faults, ends=ends)
    history.run(steps)
    return [history]


def _each_sync(seed: int) -> list[History]:
    """The same steps over and over, with the first sync failing, then the second, ...; then so with the start after
    them.
    """
    histories = []
    while not histories or _failed_syncs(histories[-1].disk.struck):
        number = len(histories) + 1
        history = History(seed, _partitions(seed), failing_sync=number)
        history.take(20)
        history.fail_to_recover(number)
        histories.append(history)
    return histories


def _failed_syncs(struck: Counter[str]) -> int:
    return struck["sync failed"] + struck["sync of names failed"]


def _partitions(seed: int) -> int:
    """Odd seeds have two."""
    return 1 + seed % 2


KINDS: Final[dict[str, Callable[[int], list[History]]]] = {
    "every-sync": _each_sync,
    "every-operation": partial(_history, 14, (1.0, 0.02, 0.02), 0.0, 0.0),
    "every-recovery": partial(_history, 20, (0.02, 1.0, 0.02), 0.0, 0.04),
    "long": partial(_history, 120, (0.02, 0.01, 0.01), 0.0, 0.05),
    "failing": partial(_history, 80, (0.02, 0.01, 0.01), 0.08, 0.05),
}


def run(kind: str, seed: int) -> list[History]:
    """The histories of a kind and a seed. A failure says how to run them again."""
    try:
        return KINDS[kind](seed)
    except Exception as error:
        error.add_note(f"again: python -m tests.sim {kind} {seed}")
        raise
