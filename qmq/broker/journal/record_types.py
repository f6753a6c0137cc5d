"""What the records of the pull log say, and the words in them."""

from __future__ import annotations

import enum
from typing import Final

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
