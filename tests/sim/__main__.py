"""``python -m tests.sim KIND SEED``: runs one history of a test again, or so many of some kinds."""

from __future__ import annotations

import logging
import sys

from tests.sim import brokers, consumption, law, modes, narrowing, public, public_world, retaining
from tests.sim.history import summary
from tests.sim.kinds import KINDS, run
from tests.sim.runs import count_many, told

logging.disable()
kind, *numbers = sys.argv[1:] or [""]
MANY = {
    "consumption": consumption.run,
    "modes": modes.run,
    "retaining": retaining.run,
    "brokers": brokers.run,
    "narrowing": narrowing.run,
    "law": law.run,
    "public": public.run,
    "world": public_world.run,
}
if kind in MANY and numbers:
    count = int(numbers[1]) if len(numbers) > 1 else 1
    counts = count_many(MANY[kind], int(numbers[0]), count)
    print(told(counts))
    features = {"public": public.FEATURES, "world": public_world.WORLD_FEATURES}.get(kind, ())
    if count >= (200 if kind == "public" else 1_000) and (unused := public.unused(counts, features)):
        sys.exit(f"no history had {', '.join(unused)}")
elif kind in KINDS and len(numbers) == 1:
    print(summary(run(kind, int(numbers[0]))))
else:
    sys.exit(f"usage: python -m tests.sim {{{'|'.join(KINDS)}}} SEED, or {{{'|'.join(MANY)}}} SEED [COUNT]")
