"""``python -m tests.sim KIND SEED``: runs one history of a test again."""

from __future__ import annotations

import sys

from tests.sim.history import summary
from tests.sim.kinds import KINDS, run

if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
    sys.exit(f"usage: python -m tests.sim {{{'|'.join(KINDS)}}} SEED")
print(summary(run(sys.argv[1], int(sys.argv[2]))))
