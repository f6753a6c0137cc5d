"""``python -m tests.sim KIND SEED``: runs one history of a test again. With ``consumption SEED COUNT`` so many."""

from __future__ import annotations

import sys

from tests.sim.consumption import run_many, told
from tests.sim.history import summary
from tests.sim.kinds import KINDS, run

kind, *numbers = sys.argv[1:] or [""]
if kind == "consumption" and numbers:
    print(told(run_many(int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1)))
elif kind in KINDS and len(numbers) == 1:
    print(summary(run(kind, int(numbers[0]))))
else:
    sys.exit(f"usage: python -m tests.sim {{{'|'.join(KINDS)}}} SEED, or consumption SEED [COUNT]")
