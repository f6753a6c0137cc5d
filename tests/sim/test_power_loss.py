"""Power is lost, or the broker killed, at every operation of a workload, and again at those of the recovery.

After each crash: what was acknowledged with flush is there, no place and no sequence that a client saw is another
message's, no send has made two messages, each group gets everything, and ``qmq verify`` finds no fault.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.effort import part_of
from tests.sim.client import Client
from tests.sim.disk import SimulatedDisk
from tests.sim.history import History, strikes_of, summary
from tests.sim.kinds import run
from tests.sim.life import Life
from tests.sim.platter import POWER_FAULTS

#: Thousands of histories: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

STRIKES = (
    *POWER_FAULTS,
    "power lost",
    "killed",
    "power lost in recovery",
    "killed in recovery",
    "write cut short",
)


SYNC_STRIKES = (
    "sync failed",
    "page of a failed sync",
    "sync of names failed",
    "page evicted",
    "checkpoint failed",
    "start failed",
    "sync beside a turn",
    "turn beside a sync",
)


def check_struck(histories: list[History], strikes: tuple[str, ...]) -> None:
    """Print how often each fault struck in all of them; each must have."""
    print(summary(histories))
    struck = strikes_of(histories)
    missed = [name for name in strikes if not struck[name]]
    assert not missed, f"these faults never struck: {missed}"


def test_a_crash_at_every_operation() -> None:
    histories = run("every-operation", 800_106)
    check_struck(histories, STRIKES)
    assert all(min(history.crashes.count) > 0 for history in histories)


def test_a_crash_at_every_operation_of_recoveries() -> None:
    check_struck(run("every-recovery", 800_109), ("power lost in recovery", "killed in recovery"))


def test_every_sync_fails() -> None:
    histories = [history for seed in (1, 2)[: part_of(2)] for history in run("every-sync", seed)]
    check_struck(histories, SYNC_STRIKES)
    assert len(histories) > 40


def test_calls_fail_in_many_lives() -> None:
    strikes = ("sync failed", "page of a failed sync", "write failed", "other call failed", "checkpoint failed")
    check_struck([history for seed in (2, 3) for history in run("failing", seed)], strikes)


@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False)
@given(kind=st.sampled_from(["every-sync", "long", "failing"]), seed=st.integers(0, 1 << 32))
def test_other_histories(kind: str, seed: int) -> None:
    run(kind, seed)


def test_a_disk_that_lies_is_found_out() -> None:
    """What the other tests would see if the broker did not sync."""
    disk, client = SimulatedDisk(1), Client()
    disk.is_lying = True
    life = Life(disk, client, 1, 1)
    for _ in range(10):
        life.send()
        life.sync_all()
    disk.stop(power=True)
    again = Life(disk, client, 1, 1)
    client.crash(power=True)
    with pytest.raises(AssertionError, match="lost"):
        client.check(again.messages())
