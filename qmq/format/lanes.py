"""Lanes: a priority, or a priority and the slot of an order key. Each run of a batch has one, and so has each subject
number.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.format.layout import (
    LANE_HIGH,
    LANE_LOW,
    LANE_NORMAL,
    LANE_ORDERED,
    LANE_ORDERED_HIGH,
    LANE_ORDERED_LOW,
    ORDER_SLOTS,
)

#: The lane of a priority by its name, in the order in which they are handed out.
PRIORITIES: Final = {"high": LANE_HIGH, "normal": LANE_NORMAL, "low": LANE_LOW}
_NAMES: Final = {lane: name for name, lane in PRIORITIES.items()}
#: The kinds of lanes with slots.
ORDERED_KINDS: Final = (LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW)
#: The bits of a lane of order keys that are its slot.
SLOT_BITS: Final = ORDER_SLOTS - 1
_KIND_SHIFT: Final = SLOT_BITS.bit_length()
_LAST_LANE: Final = LANE_ORDERED_LOW + SLOT_BITS


def is_known(lane: int) -> bool:
    """Return whether a lane is a priority, or that of a slot."""
    return lane in _NAMES or LANE_ORDERED <= lane <= _LAST_LANE


def are_known(lanes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return ``is_known`` for each of many lanes: bool[n]."""
    known: npt.NDArray[np.bool_] = (lanes <= LANE_LOW) | ((lanes >= LANE_ORDERED) & (lanes <= _LAST_LANE))
    return known


def kind_of(lane: int) -> int:
    """Return the lane itself for a priority, and for a slot the one of ORDERED_KINDS with its priority."""
    return lane if lane < LANE_ORDERED else lane & ~SLOT_BITS


def kinds_of(lanes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return ``kind_of`` for each of many lanes: i64[n]."""
    lanes = lanes.astype(np.int64)
    return np.where(lanes < LANE_ORDERED, lanes, lanes & ~SLOT_BITS)


def priority_lane_of(lane: int) -> int:
    """Return the lane of the priority that messages of a lane have."""
    return lane if lane < LANE_ORDERED else (lane >> _KIND_SHIFT) - 1


def priority_lanes_of(lanes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return ``priority_lane_of`` for each of many lanes: i64[n]."""
    lanes = lanes.astype(np.int64)
    return np.where(lanes < LANE_ORDERED, lanes, (lanes >> _KIND_SHIFT) - 1)


def priority_of(lane: int) -> str:
    """Return the priority of messages in a lane."""
    return _NAMES.get(priority_lane_of(lane), "normal")


def slot_of(lane: int) -> int:
    """Return the slot of a lane of order keys."""
    return lane & SLOT_BITS


def ordered_kind_of(priority_lane: int) -> int:
    """Return the one of ORDERED_KINDS for the lane of a priority."""
    return (priority_lane + 1) << _KIND_SHIFT


def lane_of_key_hash(key_hash: int, priority_lane: int = LANE_NORMAL) -> int:
    """Return the lane of an order key by its hash."""
    return ordered_kind_of(priority_lane) | key_hash % ORDER_SLOTS


assert {LANE_NORMAL, LANE_HIGH, LANE_LOW} == set(range(LANE_LOW + 1))
assert tuple(map(ordered_kind_of, range(LANE_LOW + 1))) == ORDERED_KINDS
