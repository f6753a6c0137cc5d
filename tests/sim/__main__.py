"""``python -m tests.sim KIND SEED``: runs one history of a test again, or so many of some kinds."""

from __future__ import annotations

import logging
import sys

from tests.sim import brokers, consumption, modes
from tests.sim.consumption import told
from tests.sim.history import summary
from tests.sim.kinds import KINDS, run

logging.disable()
kind, *numbers = sys.argv[1:] or [""]
MANY = {"consumption": consumption.run_many, "modes": modes.run_many, "brokers": brokers.run_many}
if kind in MANY and numbers:
    print(told(MANY[kind](int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1)))
elif kind in KINDS and len(numbers) == 1:
    print(summary(run(kind, int(numbers[0]))))
else:
    sys.exit(f"usage: python -m tests.sim {{{'|'.join(KINDS)}}} SEED, or {{{'|'.join(MANY)}}} SEED [COUNT]")
