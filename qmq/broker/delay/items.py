"""What is scheduled of delayed messages: stretches of a batch that fall due together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.delay.places import Places
from qmq.broker.groups.group import Group
from qmq.format.layout import DELAY_DTYPE

Items = npt.NDArray[np.void]


class Stretch(NamedTuple):
    """Messages [start, stop) of the batch at *position* of the delay log, by ordinal; *due_us* of the first."""

    position: int
    start: int
    stop: int
    due_us: int

    def item(self) -> Items:
        """To be scheduled again: DELAY_DTYPE[1]."""
        first, count = self.position + self.start, self.stop - self.start
        return np.array([(self.due_us, first, self.position, count, 0)], DELAY_DTYPE)


def items_of(position: int, due: npt.NDArray[np.uint64]) -> Items:
    """The items of the batch at *position* whose messages fall due at these times: DELAY_DTYPE[n]."""
    if len(due) == 1:
        return np.array([(int(due[0]), position, position, 1, 0)], DELAY_DTYPE)
    starts = np.flatnonzero(np.concatenate([[True], due[1:] != due[:-1]]))
    items = np.zeros(len(starts), DELAY_DTYPE)
    items["due_us"] = due[starts]
    items["number"] = position + starts.astype(np.uint64)
    items["position"] = position
    items["count"] = np.diff(starts, append=len(due))
    return items


def stretches_of(items: Items) -> list[Stretch]:
    """Items in the order given, neighbours in a batch made one."""
    found = list[Stretch]()
    rows: list[tuple[Any, ...]] = items.tolist()
    for due_us, number, position, count, _ in rows:
        start = number - position
        last = found[-1] if found else None
        if last is not None and last.position == position and last.stop == start:
            found[-1] = last._replace(stop=start + count)
        else:
            found.append(Stretch(position, start, start + count, due_us))
    return found


def without(stretch: Stretch, gone: Places) -> list[Stretch]:
    """What is left of a stretch without those messages."""
    position = stretch.position
    if not len(gone):
        return [stretch]
    bad = gone.within(position + stretch.start, position + stretch.stop)
    if not len(bad):
        return [stretch]
    left, start = list[Stretch](), stretch.start
    for number in [*bad.tolist(), position + stretch.stop]:
        if number - position > start:
            left.append(stretch._replace(start=start, stop=number - position))
        start = number - position + 1
    return left


def delayed_for(group: Group, counts: Mapping[str, int]) -> int:
    """How many of the messages that wait, by subject, a group is going to get."""
    followings = group.followings.values()
    return sum(
        count
        for subject, count in counts.items()
        if any(subject == one.prefix if one.exact else subject.startswith(one.prefix) for one in followings)
    )
