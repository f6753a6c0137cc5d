"""The kinds of histories that the tests run, each from a seed."""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.sim.crashes import Chances
from tests.sim.history import History


class Kind(NamedTuple):
    """How a history goes."""

    steps: int
    #: Of looking at a crash at an operation of the workload, of a recovery, and of the recovery after that.
    chances: Chances
    #: Of a failing call, and of the end of the broker, at a step.
    faults: float
    ends: float


KINDS: Final = {
    "every-operation": Kind(16, (1.0, 0.02, 0.02), 0.0, 0.0),
    "every-recovery": Kind(20, (0.02, 1.0, 0.02), 0.0, 0.04),
    "long": Kind(120, (0.02, 0.01, 0.01), 0.0, 0.05),
    "failing": Kind(120, (0.02, 0.01, 0.01), 0.08, 0.05),
}


def run(kind: str, seed: int) -> History:
    """One history; odd seeds have two partitions. A failure says how to run it again."""
    how = KINDS[kind]
    try:
        history = History(seed, 1 + seed % 2, how.chances, faults=how.faults, ends=how.ends)
        history.run(how.steps)
    except Exception as error:
        error.add_note(f"again: python -m tests.sim {kind} {seed}")
        raise
    return history
