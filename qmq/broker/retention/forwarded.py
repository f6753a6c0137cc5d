"""What a record says of messages that were carried forward: where they lie now, for all that points at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from qmq.broker.error_log.dead_letters import letters_of
from qmq.broker.error_log.error_log import Retries, RetryItem, packed, unpacked
from qmq.broker.groups.in_flight import InFlightRange, MessageRange, unflat
from qmq.broker.groups.member import Member
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.store import ItemLog

_LOST: Final = "it cannot be read any more"


def apply(
    waiting: Retries, dead: ItemLog, members: Mapping[int, Member], retries: list[Any], letters: list[Any],
    in_flight: list[Any], now_us: int,
) -> None:  # fmt: skip
    """*retries*: [as an item, whole (see Retries.replace), ranges that stand for it, ranges that nobody can read];
    *letters*: [as an item, range]; *in_flight*: [consumer, delivery sequence, ranges]. Fields of ranges are flat.
    """
    for item, whole, parts, lost in retries:
        retry = _unpacked(item)
        waiting.replace(retry, unflat(parts), whole=whole)
        for messages in unflat(lost):
            one = InFlightRange(messages, max(retry.attempt - 1, 1), retry.session_expiries)
            dead.add(letters_of(retry.consumer, retry.delivery_sequence, one, _LOST, now_us))
    for item, fields in letters:
        letter = _unpacked(item)
        if dead.take_out(letter.number, letter.number + 1):
            dead.add(packed([letter._replace(messages=MessageRange(*fields))]))
    for number, start, parts in in_flight:
        member, ranges = members.get(number), unflat(parts)
        end = start + sum(messages.total for messages in ranges)
        if member is None or not member.in_flight.holds(start, end):
            continue  # the record by which it had them is lost
        before = list(member.in_flight.between(start, end))
        if len(before) == 1:
            member.in_flight.replace(start, [before[0]._replace(messages=messages) for messages in ranges])


def _unpacked(item: bytes) -> RetryItem:
    (retry,) = unpacked(np.frombuffer(item, RETRY_DTYPE))
    return retry
