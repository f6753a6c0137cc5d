"""An I/O error of each kind in a life of delayed messages, at operations all over it: sends, cancellations, what falls
due, checkpoints, segments that are removed. Once the disk is well again, and after a crash, nothing is lost, doubled or
early.
"""

from __future__ import annotations

import errno
from typing import Final

import pytest

from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import check_files, stop
from tests.sim.test_delays import Life, Record, check, crash

pytestmark = pytest.mark.no_cover

STEPS: Final = 70
#: Operations of each kind that fail, evenly over those there are.
SAMPLES: Final = 5
CODES: Final = {
    "pwritev": errno.ENOSPC,
    "create": errno.EMFILE,
    "unlink": errno.EIO,
    "rename": errno.EIO,
    "ftruncate": errno.EIO,
}


def lived(seed: int, kind: str = "", nth: int = 0) -> tuple[SimulatedDisk, Life]:
    """A life in which the *nth* operation of that *kind* from its start on fails, until the disk is well."""
    disk = SimulatedDisk(seed)
    life = Life(disk, Record(), seed)
    if kind:
        disk.fail(kind, nth, CODES[kind])
    for _ in range(STEPS):
        life.step()
    disk.heal()
    for _ in range(2):
        life.checkpoint()
    return disk, life


@pytest.mark.parametrize("kind", CODES)
def test_an_error_at_operations_all_over_a_life(kind: str) -> None:
    seed = sorted(CODES).index(kind)
    whole, _ = lived(seed)
    began = SimulatedDisk(seed)
    Life(began, Record(), seed)
    count = whole.calls[kind] - began.calls[kind]
    struck = 0
    for nth in sorted({max(1, count * place // SAMPLES) for place in range(1, SAMPLES + 1)}):
        disk, life = lived(seed, kind, nth)
        failed = disk.struck["write failed"] + disk.struck["other call failed"] + disk.struck["sync of names failed"]
        struck += failed
        crash(disk, life, Operation("fsync", "", (0,)), nth, again=False)
        life.drain()
        check(life, power=False)
        life.checkpoint()
        life.driven.store.close(clean=True)
        stop(disk, power=False)
        check_files(disk)
    print(f"{kind}: {struck} of {count} operations failed")
    assert struck
