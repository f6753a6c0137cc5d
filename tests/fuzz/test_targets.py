"""Every fuzz target on its seeds, on the inputs that are kept, and on mutations of both: the same each time.

`make fuzz` goes on from there, guided by coverage. QMQ_TEST_SEED=... mutates otherwise.
"""

from __future__ import annotations

import os
import random

import pytest

from fuzz.corpus import read_corpus
from fuzz.targets import TARGETS
from tests.effort import part_of

#: Mutated inputs of each target; a third of them by default.
MUTATIONS = {
    "wire": 2_500,
    "login": 1_500,
    "batches": 4_000,
    "answers": 2_000,
    "client": 2_000,
    "tables": 5_000,
    "files": 60,
    "groups": 30,
    "records": 1_000,
    "spool": 500,
    "state": 1_000,
}
#: Of seeds and kept inputs of those that open a store, which takes 30 ms each.
MOST_FILES = {"files": 90, "groups": 40}


def mutated(data: bytes, other: bytes, choose: random.Random) -> bytes:
    """*data* with a few bytes changed, cut out or doubled, and maybe a part of *other* behind it."""
    changed = bytearray(data)
    for _ in range(choose.randrange(1, 5)):
        place = choose.randrange(len(changed) + 1)
        match choose.randrange(4):
            case 0:
                changed[place : place + 1] = choose.randbytes(1)
            case 1:
                del changed[place : place + choose.randrange(1, 5)]
            case 2:
                changed[place:place] = choose.randbytes(choose.randrange(1, 9))
            case _:
                changed += other[choose.randrange(len(other) + 1) :]
    return bytes(changed)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_finds_nothing(name: str) -> None:
    seed = int(os.environ.get("QMQ_TEST_SEED", "20881"))
    print(f"QMQ_TEST_SEED={seed}")
    choose = random.Random(f"{seed} {name}")
    target = TARGETS[name].make()
    known = [*target.seeds(), *read_corpus(name)]
    given = choose.sample(known, min(MOST_FILES.get(name, len(known)), len(known)))
    longest = TARGETS[name].longest_input
    frames = 0
    for data in given:
        frames += once(target.once, data)
    mutations = part_of(MUTATIONS[name])
    for _ in range(mutations):
        frames += once(target.once, mutated(choose.choice(known), choose.choice(known), choose)[:longest])
    target.close()
    assert frames >= mutations


def once(take: object, data: bytes) -> int:
    """Run one input; a failure shows it."""
    assert callable(take)
    try:
        frames = take(data)
    except BaseException as error:
        error.add_note(f"the input: {data.hex()}")
        raise
    assert isinstance(frames, int)
    return frames
