"""The traffic of a soak: the same for whoever asks, by number and by column."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak.plan import BLOCK, EXPIRY, GROUPS, SUBJECTS, TAG, Group, Plan

NUMBERS = np.arange(40_000, dtype=np.uint64)
PLAN = Plan(20_881)
MESSAGES = [PLAN.message(number) for number in range(len(NUMBERS))]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_columns_say_what_each_message_says(group: Group) -> None:
    chosen = PLAN.is_for(group, NUMBERS)
    by_message = [group.follows(message.subject) and (not group.tags or TAG in message.tags) for message in MESSAGES]
    assert chosen.tolist() == by_message
    assert 0.5 * group.share / (2 if group.tags else 1) < chosen.mean() <= 1.1 * group.share


def test_the_column_of_expiries_says_what_each_message_says() -> None:
    assert PLAN.expires(NUMBERS).tolist() == [message.expire == EXPIRY for message in MESSAGES]


def test_every_kind_of_message_is_sent() -> None:
    assert {message.subject for message in MESSAGES} == set(SUBJECTS)
    for kind in ("key", "tags", "delay", "expire"):
        share = sum(bool(getattr(message, kind)) for message in MESSAGES) / len(MESSAGES)
        assert 0.005 < share < 0.7, kind
    assert {message.durability for message in MESSAGES} == {"flush", "append"}
    assert any(PLAN.is_poison(number) for number in range(len(MESSAGES)))


def test_a_block_that_is_sent_at_once_has_one_subject_and_nothing_that_send_many_cannot_say() -> None:
    blocks = [block for block in range(len(MESSAGES) // BLOCK) if PLAN.is_many(block)]
    assert 0.2 < len(blocks) * BLOCK / len(MESSAGES) < 0.3
    for block in blocks:
        messages = MESSAGES[block * BLOCK : (block + 1) * BLOCK]
        assert len({(one.subject, one.durability) for one in messages}) == 1
        assert not any(one.key or one.tags or one.delay or one.expire for one in messages)


def test_a_body_begins_with_its_number_and_another_seed_sends_something_else() -> None:
    assert [PLAN.number_of(message.body) for message in MESSAGES] == list(range(len(MESSAGES)))
    assert [Plan(1).message(number) for number in range(100)] != MESSAGES[:100]
