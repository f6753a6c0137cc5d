"""The order in which rows are sent: behind each group's beginning lie exactly the rows that it lacks."""

from __future__ import annotations

import random

import pytest

from qmq.errors import InvalidOption
from qmq.sql.importing.levels import Offsets, RawPriority, levels_of


def rows_by_group(
    priorities: list[RawPriority], offsets: dict[str, Offsets], rows: int, *, allow_repeats: bool = False
) -> tuple[dict[str, list[tuple[RawPriority, int]]], list[tuple[RawPriority, int]]]:
    """Return the rows that lie behind the beginning of each group, and all that are sent."""
    sent, begins = list[tuple[RawPriority, int]](), dict[str, int]()
    for level in levels_of(priorities, offsets, allow_repeats=allow_repeats):
        begins |= dict.fromkeys(level.groups, len(sent))
        for section in level.sections:
            low, high = (int(bound) if bound is not None else None for bound in (section.low, section.high))
            sent += [
                (section.priority, number) for number in range((low or 0) + 1, (rows if high is None else high) + 1)
            ]
    return {group: sent[begin:] for group, begin in begins.items()}, sent


@pytest.mark.parametrize("seed", range(50))
def test_each_group_gets_what_it_lacks(seed: int) -> None:
    dice = random.Random(seed)
    priorities: list[RawPriority] = ["high", "middle", 0]
    # Groups that follow one another in every priority.
    places = {each: sorted(dice.choice([None, dice.randrange(1, 9)]) or 0 for _ in range(4)) for each in priorities}
    offsets = {
        f"g{at}": {each: places[each][at] for each in priorities if places[each][at]} for at in dice.sample(range(4), 4)
    }
    groups, sent = rows_by_group(priorities, offsets, 10)
    assert len(sent) == len(set(sent))
    for group, own in offsets.items():
        assert sorted(groups[group], key=repr) == sorted(
            ((each, number) for each in priorities for number in range(int(own.get(each, 0)) + 1, 11)), key=repr
        )
        for each in priorities:  # each priority in the order of ids
            numbers = [number for priority, number in sent if priority == each]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("seed", range(50))
def test_groups_that_cross_lack_nothing_where_repeats_are_allowed(seed: int) -> None:
    dice = random.Random(seed)
    priorities: list[RawPriority] = ["high", "low"]
    offsets = {f"g{at}": {each: dice.randrange(1, 9) for each in priorities} for at in range(3)}
    groups, sent = rows_by_group(priorities, offsets, 10, allow_repeats=True)
    assert len(sent) == len(set(sent))
    for group, own in offsets.items():
        lacks = {(each, number) for each in priorities for number in range(own[each] + 1, 11)}
        assert lacks <= set(groups[group])


def test_groups_that_cross_are_refused() -> None:
    with pytest.raises(InvalidOption, match=r"groups (b and a|a and b) are each ahead"):
        levels_of(["high", "low"], {"a": {"high": 5, "low": 1}, "b": {"high": 1, "low": 5}})
    with pytest.raises(InvalidOption, match="partly numbers and partly texts"):
        levels_of([None], {"a": {None: 5}, "b": {None: "x"}})


def test_without_groups_there_is_one_level() -> None:
    (level,) = levels_of(["low", None, "urgent", "high"], {})
    assert [section.priority for section in level.sections] == ["high", None, "low", "urgent"]
    assert {(section.low, section.high) for section in level.sections} == {(None, None)}
    assert len({section.name for section in level.sections}) == 4
