"""What a record says of messages that were carried forward: where they lie now, for all that points at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from qmq.broker.error_log.dead_letters import letters_of
from qmq.broker.error_log.error_log import Retries, Retry, packed, unpacked
from qmq.broker.groups.in_flight import HeldRange, MessageRange, unflat
from qmq.broker.groups.member import Member
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.store import ItemLog

_LOST: Final = "it cannot be read any more"


def apply(
    waiting: Retries, dead: ItemLog, members: Mapping[int, Member], retries: list[Any], letters: list[Any],
    held: list[Any], now_us: int,
) -> None:  # fmt: skip
    """*retries*: [as an item, whole (see Retries.replace), ranges that stand for it, ranges that nobody can read];
    *letters*: [as an item, range]; *held*: [consumer, pull sequence, ranges]. Fields of ranges are flat.
    """
    for item, whole, parts, lost in retries:
        retry = _unpacked(item)
        waiting.replace(retry, unflat(parts), whole=whole)
        for messages in unflat(lost):
            one = HeldRange(messages, max(retry.attempt - 1, 1), retry.lapses)
            dead.add(letters_of(retry.consumer, retry.pull_sequence, one, _LOST, now_us))
    for item, fields in letters:
        letter = _unpacked(item)
        if dead.take_out(letter.number, letter.number + 1):
            dead.add(packed([letter._replace(messages=MessageRange(*fields))]))
    for number, start, parts in held:
        member, ranges = members.get(number), unflat(parts)
        end = start + sum(messages.total for messages in ranges)
        if member is None or not member.held.holds(start, end):
            continue  # the record by which it had them is lost
        before = list(member.held.between(start, end))
        if len(before) == 1:
            member.held.replace(start, [before[0]._replace(messages=messages) for messages in ranges])


def _unpacked(item: bytes) -> Retry:
    (retry,) = unpacked(np.frombuffer(item, RETRY_DTYPE))
    return retry
