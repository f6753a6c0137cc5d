"""Lanes: a priority, or the slot of an order key. Each run of a batch has one, and so has each subject number."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED, ORDER_SLOTS

#: The lane of a priority by its name, in the order in which they are handed out.
PRIORITIES: Final = {"high": LANE_HIGH, "normal": LANE_NORMAL, "low": LANE_LOW}
_NAMES: Final = {lane: name for name, lane in PRIORITIES.items()}
#: The bits of a lane of order keys that are its slot.
SLOT_BITS: Final = ORDER_SLOTS - 1
_LAST_LANE: Final = LANE_ORDERED + ORDER_SLOTS - 1


def is_known(lane: int) -> bool:
    """Return whether a lane is a priority or a slot."""
    return lane in _NAMES or LANE_ORDERED <= lane <= _LAST_LANE


def are_known(lanes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return ``is_known`` for each of many lanes: bool[n]."""
    known: npt.NDArray[np.bool_] = (lanes <= LANE_LOW) | ((lanes >= LANE_ORDERED) & (lanes <= _LAST_LANE))
    return known


def kind_of(lane: int) -> int:
    """Return the lane itself for a priority, LANE_ORDERED for a slot."""
    return lane if lane < LANE_ORDERED else LANE_ORDERED


def priority_of(lane: int) -> str:
    """Return the priority of messages in a lane: those with an order key have the normal one."""
    return _NAMES.get(lane, "normal")


def slot_of(lane: int) -> int:
    """Return the slot of a lane of order keys."""
    return lane & SLOT_BITS


def lane_of_key_hash(key_hash: int) -> int:
    """Return the lane of an order key by its hash."""
    return LANE_ORDERED | key_hash % ORDER_SLOTS


assert {LANE_NORMAL, LANE_HIGH, LANE_LOW} == set(range(LANE_LOW + 1))
