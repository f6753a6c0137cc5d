"""The record that histories are held to notices what it is for."""

from __future__ import annotations

import pytest

from tests.sim.tally import Holder, Tally

ANN, BOB = ("g", "ann", 1, 1, 1), ("g", "bob", 1, 1, 2)


def given(attempt: int = 1) -> Tally:
    """Ann has message 7."""
    tally = Tally("g")
    assert tally.delivered(7, Holder(ANN, 0), attempt, 0) is None
    return tally


def test_a_message_that_comes_again_after_its_ack_is_seen() -> None:
    tally = given()
    tally.confirmed([7], ANN)
    with pytest.raises(AssertionError, match="came again after"):
        tally.delivered(7, Holder(BOB, 0), 1, 0)
    tally.power_lost()
    assert tally.delivered(7, Holder(BOB, 0), 1, 0) is None


def test_an_ack_that_a_checkpoint_knows_survives_the_power() -> None:
    tally = given()
    tally.confirmed([7], ANN)
    tally.checkpoint_begins()
    tally.checkpoint_done()
    tally.power_lost()
    with pytest.raises(AssertionError, match="came again after"):
        tally.delivered(7, Holder(BOB, 0), 1, 0)


def test_who_had_it_before_is_told() -> None:
    tally = given()
    assert tally.delivered(7, Holder(BOB, 3), 1, 0) == Holder(ANN, 0)
    with pytest.raises(AssertionError, match="and bob has it"):
        tally.confirmed([7], ANN)


def test_attempts_and_delays_are_exact() -> None:
    tally = given()
    tally.nacking(7, 1)
    tally.nacked(7, 1, 500, Holder(ANN, 0))
    with pytest.raises(AssertionError, match="attempt 1"):
        tally.delivered(7, Holder(BOB, 0), 1, 900)
    with pytest.raises(AssertionError, match="1 us early"):
        tally.delivered(7, Holder(BOB, 1), 2, 499)


def test_who_is_lost_and_who_is_dead_without_a_reason() -> None:
    tally = given()
    with pytest.raises(AssertionError, match="has lost"):
        tally.check_all([7], {})
    with pytest.raises(AssertionError, match="nobody has given it up"):
        tally.check_dead({7: "broke"})
    tally.nacking(7, 4)
    tally.check_dead({7: "broke"})
    tally.nacked(7, 4, 0, Holder(ANN, 0))
    with pytest.raises(AssertionError, match="is not among the dead"):
        tally.check_dead({})
