"""What the records of the pull log say, and the words in them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

#: Ranges of messages, or ranges of delivery sequences, that one record names: what is more goes into several, for a
#: record has an end.
MOST_RANGES_A_RECORD: Final = 8_192


class RecordKind(enum.IntEnum):
    """Kinds of records. Each payload is a msgpack list that begins with the group's number.

    In those that may make consumers, retries or dead letters the numbers that the next of each gets come next, so that
    one that is lost changes no number behind it.
    """

    JOIN = 1
    LEAVE = 2
    PULL = 3
    AGAIN = 4
    ACK = 5
    BACK = 6
    SETTINGS = 7
    REDRIVE = 8
    FORGET = 9
    GROUP = 10  # number, name, mode, prefix that it follows from now on, its ordinal, start, places
    SEEK = 11  # number, start, places, whether what waits to be handed out again goes too
    DELETE = 12
    RESERVE = 13  # number, skipped, blocks: [prefix, where it is, where a start is to go on]; written twice
    OVER = 14  # numbers, a range, attempt, disposition, reason, delay, now, name: a handover from another broker
    REWOUND = 15  # number, size of the holes to which a start has rewound the group: records behind count again
    RESTORED = 18  # numbers, ranges, run of a restore, which of its messages: from, up to; now
    PART = (
        16  # numbers, consumer, why it leaves, the delivery sequence up to which what it held comes again by this, now
    )
    MOVED = 17  # number, partition, position before which all is dropped, so many were skipped, [exact subject, cursor]
    UNFOLLOW = 20  # number, prefixes and subjects that it follows no more
    FORWARD = 19  # numbers, what pointed at dropped messages and now points at copies: retries, dead letters, held; now


class LeaveReason(enum.IntEnum):
    """Why a consumer holds nothing any more."""

    LEFT = 1
    EXPIRED = 2
    CLOSED = 3  # by a seek: what it held is dropped


#: Ranges of messages that are handed out again in one turn of who leaves with many. After an expired session each is up
#: to ten pieces: 0.12 ms in all. A turn may also have 25,000 of them written to a run, and the collector at work, 25 ms
#: each.
LEAVING_RANGES: Final = {LeaveReason.EXPIRED: 32, LeaveReason.LEFT: 128}


class MessageRange(NamedTuple):
    """Messages of one log in a row; the first ``skip`` of them are not meant, the ``total`` after them are.

    ``log`` below 2^31: a subject's number, and ``first`` a sequence of it. From there on: 2^31 + partition, ``first`` a
    batch's position, ``run`` the run in it, and ``end`` the position of the last batch.
    """

    log: int
    first: int
    run: int
    skip: int
    total: int
    end: int = 0

    def part(self, start: int, end: int) -> MessageRange:
        """Of its messages those from number *start* up to, not including, *end*."""
        if not start and end == self.total:
            return self
        log, first, run, skip, _, last = self
        return MessageRange(log, first, run, skip + start, end - start, last)

    def overlaps(self, other: MessageRange) -> bool:
        """Both are of one range, and have messages in common."""
        same = self[:3] == other[:3]
        return same and max(self.skip, other.skip) < min(self.skip + self.total, other.skip + other.total)


def flat(ranges: Sequence[MessageRange]) -> list[int]:
    """Their fields, six each, one after another."""
    if len(ranges) == 1:
        return list(ranges[0])
    return [field for messages in ranges for field in messages]


def unflat(fields: Sequence[int]) -> list[MessageRange]:
    """The ranges of what ``flat`` gave."""
    return [MessageRange(*fields[at : at + 6]) for at in range(0, len(fields), 6)]


class InFlightRange(NamedTuple):
    """A range with what every message of it has in common."""

    messages: MessageRange
    attempt: int
    session_expiries: int

    @classmethod
    def of(cls, fields: Sequence[int]) -> InFlightRange:
        """That of which ``flat`` gave the fields."""
        return cls(MessageRange(*fields[:6]), fields[6], fields[7])

    def flat(self) -> list[int]:
        """Its fields, eight."""
        return [*self.messages, self.attempt, self.session_expiries]

    def part(self, start: int, end: int) -> InFlightRange:
        """Of its messages those from number *start* up to, not including, *end*."""
        if not start and end == self.messages.total:
            return self
        return InFlightRange(self.messages.part(start, end), self.attempt, self.session_expiries)


def whole(value: object) -> int:
    """*value*, which a checkpoint says is a number from 0 to 2^64 - 1. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value
