"""The records of the pull log: their kinds, the words in them, and how they name messages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

from qmq.net.protocol.types import RESENT_BIT

#: The most ranges of messages, or of delivery sequences, in one record: more go into several records.
MOST_RANGES_A_RECORD: Final = 8_192


class RecordKind(enum.IntEnum):
    """The kinds of records. The fields of each are a list that begins with the group's number; record_bytes.py makes
    payloads of them.

    Records that may make consumers, retries or dead letters continue with the next number of each, so that a lost
    record changes no number in the records behind it.
    """

    JOIN = 1  # numbers, name, nonce, transient, now, client, least epoch, least delivery sequence, expired, program
    SETTINGS = 7  # numbers, all settings
    REDRIVE = 8  # numbers, dead letters, now
    FORGET = 9  # numbers, dead letters or None for all
    GROUP = 10  # number, name, mode, a prefix that it follows from now on, its ordinal, start, positions
    SEEK = 11  # number, start, positions, whether retries are cleared too
    DELETE = 12  # number
    RESERVE = 13  # number, skipped, blocks: [prefix, its cursor, the cursor after a start]; written twice
    OVER = 14  # numbers, a range, attempt, disposition, reason, delay, now, name: a handover from another broker
    REWOUND = 15  # number, size of the holes to which a start rewound the group: later records count again
    RESTORED = 18  # numbers, ranges, the run of a restore, its messages from, up to; now
    MOVED = 17  # number, partition, position behind what it was moved past, skipped messages, [subject, lane, cursor]
    UNFOLLOW = 20  # number, the prefixes and subjects that it no longer follows
    FORWARD = 19  # numbers, retries, dead letters and messages in flight that point at copies from now on; now
    RESENT = 21  # numbers, a resend, its selection, how far it is, its counts, dead letters, ranges, now
    PULL = 23  # number, consumer, first delivery sequence, bytes, now, ranges, positions of prefixes
    PASSED = 24  # number, consumer or 0, first delivery sequence, bytes, now, ranges, those of them that the consumer
    # has, how many of the others were filtered, how many skipped, positions of prefixes: a pull that left out messages
    AGAIN = 25  # number, consumer, first delivery sequence, bytes, now, quarantined, [retry, its InFlightRange]
    ACK = 26  # number, consumer, now, intervals of delivery sequences
    BACK = 27  # numbers, consumer, [start, end, disposition, delay, index of the reason], reasons, now
    LEAVE = 28  # numbers, consumer, reason, now
    PART = 29  # numbers, consumer, reason, the delivery sequence before which nothing stays in flight; now


class LeaveReason(enum.IntEnum):
    """The reasons why a consumer has nothing in flight any more."""

    LEFT = 1
    EXPIRED = 2
    CLOSED = 3  # a seek dropped its messages


#: The ranges of a leaving consumer that one turn makes retries of. After an expired session a range becomes up to ten
#: retries, 0.12 ms in all. A turn may also write 25,000 retries to a run and run the garbage collector, 25 ms each.
LEAVING_RANGES: Final = {LeaveReason.EXPIRED: 32, LeaveReason.LEFT: 128}


#: ``MessageRange.log`` is a subject's number below this, and a partition from here on.
PARTITIONS: Final = 1 << 31
#: ``MessageRange.end`` of a range by sequence whose messages a resend hands out again; of another it is 0. (No batch
#: has this position.)
RESENT: Final = 1


class MessageRange(NamedTuple):
    """Consecutive messages of one log: ``skip`` messages are left out, the ``total`` messages behind them are meant.

    ``log`` below 2^31 is the number of a subject, and ``first`` a sequence of it; ``end`` is RESENT or 0. From 2^31 on
    it is 2^31 + partition; ``first`` is then the position of a batch, ``run`` the run in it, and ``end`` the position
    of the last batch.
    """

    log: int
    first: int
    run: int
    skip: int
    total: int
    end: int = 0

    def part(self, start: int, end: int) -> MessageRange:
        """Return its messages from number *start* up to, not including, *end*."""
        if not start and end == self.total:
            return self
        log, first, run, skip, _, last = self
        return MessageRange(log, first, run, skip + start, end - start, last)

    @property
    def resent(self) -> bool:
        """Whether a resend hands these messages out again. (Copies of them are marked in the log itself.)"""
        return self.end == RESENT

    def overlaps(self, other: MessageRange) -> bool:
        """Return whether both are parts of one range and have messages in common."""
        same = self[:3] == other[:3]
        return same and max(self.skip, other.skip) < min(self.skip + self.total, other.skip + other.total)


def flat(ranges: Sequence[MessageRange]) -> list[int]:
    """Return the fields of the ranges, six each, one after another."""
    if len(ranges) == 1:
        return list(ranges[0])
    return list(chain.from_iterable(ranges))


def unflat(fields: Sequence[int]) -> list[MessageRange]:
    """Return the ranges whose fields ``flat`` returned."""
    return [MessageRange(*fields[at : at + 6]) for at in range(0, len(fields), 6)]


class InFlightRange(NamedTuple):
    """A range of messages that have the same attempt and the same count of session expiries."""

    messages: MessageRange
    attempt: int
    session_expiries: int

    @classmethod
    def of(cls, fields: Sequence[int]) -> InFlightRange:
        """Return the range whose fields ``InFlightRange.flat`` returned."""
        return cls(MessageRange(*fields[:6]), fields[6], fields[7])

    @property
    def marked_attempt(self) -> int:
        """The attempt, with the bit RESENT_BIT for messages that a resend hands out again."""
        return self.attempt | RESENT_BIT if self.messages.resent else self.attempt

    def flat(self) -> list[int]:
        """Return its eight fields."""
        return [*self.messages, self.attempt, self.session_expiries]

    def part(self, start: int, end: int) -> InFlightRange:
        """Return its messages from number *start* up to, not including, *end*."""
        if not start and end == self.messages.total:
            return self
        return InFlightRange(self.messages.part(start, end), self.attempt, self.session_expiries)


def whole(value: object) -> int:
    """Return *value*, which a checkpoint says is a number from 0 to 2^64 - 1. Raise ValueError if it is none."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value
