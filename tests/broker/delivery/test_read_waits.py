"""The number of a read says which part asked for it."""

from __future__ import annotations

import pytest

from qmq.broker.delay import reads as delay_reading
from qmq.broker.journal import durable_replies
from qmq.broker.ports.effects import Asker, asker_of, first_number
from qmq.broker.retention import carry_forward, retention
from qmq.broker.transfer import restore_lookup

LONG = 1_000_000 * 86_400 * 365 * 5  # a million reads a second for five years


@pytest.mark.parametrize("asker", Asker)
def test_each_has_numbers_enough_that_are_no_others(asker: Asker) -> None:
    assert asker_of(first_number(asker)) == asker_of(first_number(asker) + LONG) == asker


def test_who_has_one_read_at_a_time_has_one_number() -> None:
    numbers = {
        durable_replies.SYNC_NUMBER: Asker.PULL_LOG,
        delay_reading.READ_NUMBER: Asker.DUE,
        restore_lookup.READ_NUMBER: Asker.RESTORE,
        retention.LOOK_NUMBER: Asker.RETENTION,
        carry_forward.COPY_NUMBER: Asker.FORWARDING,
    }
    assert {number: asker_of(number) for number in numbers} == numbers
    with pytest.raises(ValueError, match="is not a valid Asker"):
        asker_of(-1)
