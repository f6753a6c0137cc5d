"""Types that clients and brokers exchange: dispositions, states of consumers, modes of groups, outcomes of reports."""

from __future__ import annotations

import enum
from typing import Final, Literal, NamedTuple, get_args

from qmq.format.layout import REASON_BYTES

Mode = Literal["reliable", "at_most_once", "broadcast"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
RELIABLE: Final = "reliable"
AT_MOST_ONCE: Final = "at_most_once"
BROADCAST: Final = "broadcast"

#: What a subscription asks of its group: to follow its prefixes from now on; the same once more, on another connection;
#: or only to take messages of its prefixes that the group follows already.
FOLLOW: Final = "follow"
AGAIN: Final = "again"
LOOK: Final = "look"
ASKS: Final = (FOLLOW, AGAIN, LOOK)

#: In the attempt of a range of MESSAGES: somebody had the broker hand out these messages again, with a resend.
RESENT_BIT: Final = 1 << 31

#: A RESTORE frame has at most this many batches.
MAX_RESTORE_BATCHES: Final = 1_024


def cut_reason(reason: str) -> str:
    """Return as much of a reason as is kept: REASON_BYTES of UTF-8, up to the end of a letter, without zero bytes."""
    if len(reason) * 4 > REASON_BYTES:
        reason = reason.encode("utf-8", "replace")[:REASON_BYTES].decode("utf-8", "ignore")
    return reason.replace("\0", "")


class Disposition(enum.IntEnum):
    """How messages are handed back. The numbers are those in HAND_BACK, HAND_OVER and in the pull log."""

    NACK = 1
    RELEASE = 2
    REJECT = 3
    #: By the broker alone: they have none of the group's tags any more.
    FILTER = 4


#: Those that a client may ask for.
DISPOSITIONS: Final = (Disposition.NACK, Disposition.RELEASE, Disposition.REJECT)


class ReportOutcome(enum.StrEnum):
    """The broker's finding about messages that a client reported as damaged."""

    #: The bytes on disk are those that were written: they were damaged on the way.
    SOUND = "sound"
    #: Some bytes on disk are bad, or no client can decode them.
    BAD = "bad"
    #: No batch begins there.
    UNKNOWN = "unknown"


class ConsumerState(NamedTuple):
    """A consumer of a group as the broker knows it. Its delivery sequences begin at ``ack_floor`` (all before it are
    acknowledged) and end before ``next_sequence``.

    Delivery sequences of two states mean the same messages only while two fields are the same: ``since_us``, the time
    at which the consumer first subscribed, and ``generation``, which changes when a start may have lost records of the
    pull log.
    """

    consumer: int
    epoch: int
    ack_floor: int
    next_sequence: int
    generation: int
    since_us: int

    def is_that_of(self, other: ConsumerState) -> bool:
        """Return whether the delivery sequences of both mean the same messages, with the same ones in flight."""
        return self[:2] == other[:2] and self[4:] == other[4:]


class KnownConsumer(NamedTuple):
    """A consumer as its client knows it, also from before the client was started again.

    ``since_us`` and ``generation`` are those of ConsumerState. ``epoch`` is that of this subscription (0: it is new).
    ``expected`` is the delivery sequence behind the last message that came. ``handled`` are the acknowledged
    delivery sequences: start, end, start, end, ...
    """

    since_us: int
    generation: int
    epoch: int
    expected: int
    handled: tuple[int, ...] = ()
