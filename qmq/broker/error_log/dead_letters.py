"""The dead letters of a group: what no consumer is given any more, each message a letter with its reason."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from qmq.broker.error_log.error_log import RetryItem, packed
from qmq.broker.groups.in_flight import InFlightRange
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.store import ItemLog


def letters_of(consumer: int, start: int, in_flight: InFlightRange, reason: str, now_us: int) -> NDArray[np.void]:
    """Each message is a letter of its own: they are handed out again or deleted one by one.

    It had them as that consumer, by delivery sequences from *start* on; 0 where nobody had them.
    """
    messages = in_flight.messages
    first = RetryItem(
        0, now_us, messages.part(0, 1), in_flight.attempt, in_flight.session_expiries, False, consumer, start, now_us,
        reason
    )  # fmt: skip
    letters, places = np.repeat(packed([first]), messages.total), np.arange(messages.total)
    letters["skip"] += places.astype(np.uint32)
    letters["delivery_sequence"] += places.astype(np.uint64)
    return letters


def numbers_between(dead: ItemLog, after: int, before: int, most: int) -> list[int]:
    """The numbers of the first dead letters between these, at most so many. Raises StorageFailed."""
    found = list[int]()
    for items in dead.after(after):
        found += items["number"].tolist()
        if len(found) >= most or (found and found[-1] >= before):
            break
    return [number for number in found[:most] if number < before]


def chosen(dead: ItemLog, numbers: Iterable[int]) -> NDArray[np.void]:
    """The dead letters with these numbers that are there, ascending. Only blocks that have some are read. Raises
    StorageFailed.
    """
    found, left = list[NDArray[np.void]](), np.unique(np.fromiter(numbers, np.uint64))
    while len(left):
        block = next(dead.after(int(left[0]) - 1), None)
        if block is None:
            break
        found.append(block[np.isin(block["number"], left)])
        last = block["number"].max(initial=left[0])
        left = left[int(np.searchsorted(left, last, "right")) :]
    return np.concatenate(found) if found else np.empty(0, RETRY_DTYPE)
