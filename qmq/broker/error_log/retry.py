"""One retry: messages of a group that are to be handed out again, what is known of them, and its item in a schedule."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from qmq.broker.groups.in_flight import HeldRange, MessageRange
from qmq.format.layout import RETRY_DTYPE, RETRY_ISOLATED, RETRY_REASON_BYTES

#: A range that lapsed is handed out in so many pieces.
PIECES: Final = 10


class Retry(NamedTuple):
    """Messages that are to be handed out again, with what is known of them."""

    number: int
    due_us: int
    messages: MessageRange
    attempt: int
    lapses: int
    isolated: bool
    consumer: int
    pull_sequence: int
    failed_at_us: int
    reason: str


class Taken(NamedTuple):
    """What a pull took: the first ``total`` messages of a retry, and how the consumer holds them."""

    retry: Retry
    total: int
    held: HeldRange


def taken_of(retry: Retry, total: int) -> Taken:
    """Its first messages, so many."""
    return Taken(retry, total, HeldRange(retry.messages.part(0, total), retry.attempt, retry.lapses))


class Failure(NamedTuple):
    """Why messages come back, from whom, and when they are due."""

    reason: str
    consumer: int
    pull_sequence: int
    now_us: int
    due_us: int


def rest_of(messages: MessageRange, taken: list[MessageRange]) -> list[MessageRange]:
    """What is left of a range without all that was taken."""
    left = [messages]
    for one in taken:
        left = [part for messages in left for part in without(messages, one)]
    return left


def without(messages: MessageRange, taken: MessageRange) -> list[MessageRange]:
    """What is left of a range without those in another one."""
    if not messages.overlaps(taken):
        return [messages]
    start, end = max(taken.skip - messages.skip, 0), min(taken.skip + taken.total - messages.skip, messages.total)
    parts = (messages.part(0, start), messages.part(end, messages.total))
    return [part for part in parts if part.total]


def split(messages: MessageRange) -> list[MessageRange]:
    """*messages* in PIECES of nearly one size, or in fewer."""
    size = -(-messages.total // PIECES)
    return [messages.part(start, min(start + size, messages.total)) for start in range(0, messages.total, size)]


def packed(retries: list[Retry]) -> np.ndarray[Any, np.dtype[np.void]]:
    """As items of a schedule: RETRY_DTYPE[n]."""
    items = np.zeros(len(retries), RETRY_DTYPE)
    if not retries:
        return items
    number, due_us, messages, attempt, lapses, isolated, consumer, sequence, failed_us, reason = zip(
        *retries, strict=True
    )
    cut = {why: _cut(why) for why in set(reason)}
    columns = {
        "due_us": due_us, "number": number, "attempt": attempt, "lapses": lapses, "consumer": consumer,
        "pull_sequence": sequence, "failed_at_us": failed_us, "reason": [cut[why] for why in reason],
        **dict(zip(("log", "first", "run", "skip", "count", "end"), zip(*messages, strict=True), strict=True)),
    }  # fmt: skip
    for name, column in columns.items():
        items[name] = column
    items["flags"][np.array(isolated, np.bool_)] = RETRY_ISOLATED
    return items


def _cut(reason: str) -> bytes:
    return reason.encode()[:RETRY_REASON_BYTES].decode("utf-8", "ignore").replace("\0", "").encode()


def unpacked(items: np.ndarray[Any, np.dtype[np.void]]) -> list[Retry]:
    """Items of a schedule as retries."""
    found = []
    for item in items.tolist():
        due_us, number, log, run, first, skip, count, end, *rest, why, _ = item
        attempt, lapses, flags, consumer, sequence, failed_us = rest
        messages = MessageRange(log, first, run, skip, count, end)
        isolated, reason = bool(flags & RETRY_ISOLATED), why.decode("utf-8", "replace")
        found.append(Retry(number, due_us, messages, attempt, lapses, isolated, consumer, sequence, failed_us, reason))
    return found
