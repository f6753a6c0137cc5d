"""The totals of a group: what became of its messages in all, since it began.

Each record of the pull log changes them, now and when a start replays it; the checkpoint has them. They are a second
account of what cursors, messages in flight, retries and dead letters say, so that the two can be compared:

    messages that the cursors passed = handed + filtered + skipped
    begun + handed + handed_over + restored + resent
        = acked + filtered_later + dropped + deleted + in flight + in retry + dead letters

A redrive, a retry, and a copy that retention makes change no total: the message stays with the group. An at-most-once
group has no record of what it was handed, and a solo consumer has no totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: The totals by name, in the order of the checkpoint; new ones come behind these.
TOTAL_NAMES: Final = (
    "begun", "handed", "filtered", "skipped", "handed_over", "restored", "resent", "acked",
    "filtered_later", "dropped", "deleted",
)  # fmt: skip


class MessageTotals:
    """The totals of one group, counted by message.

    ``begun`` makes up for what was before the totals, or before a seek that clears retries. ``handed`` were handed out
    for the first time, ``filtered`` and ``skipped`` were passed by a pull. ``handed_over``, ``restored`` and ``resent``
    came as retries. ``filtered_later`` had none of the group's tags when they were to come again. A seek has
    ``dropped`` messages, and a person, or a resend in their place, has ``deleted`` dead letters.
    """

    __slots__ = (*TOTAL_NAMES, "passed_before")

    def __init__(self) -> None:
        self.begun = 0
        self.handed = self.filtered = self.skipped = 0
        self.handed_over = self.restored = self.resent = 0
        self.acked = self.filtered_later = self.dropped = self.deleted = 0
        #: What ``passed`` was when the group's cursors were packed last.
        self.passed_before = 0

    def begin(self, held: int) -> None:
        """Begin the account anew with *held* messages in flight, in retry and dead."""
        self.begun += held - self.held

    @property
    def passed(self) -> int:
        """How many messages the group's cursors have passed."""
        return self.handed + self.filtered + self.skipped

    @property
    def held(self) -> int:
        """How many messages must be in flight, in retry or dead."""
        came = self.begun + self.handed + self.handed_over + self.restored + self.resent
        return came - self.acked - self.filtered_later - self.dropped - self.deleted

    def packed(self) -> list[int]:
        """Return the totals for the checkpoint, in the order of TOTAL_NAMES."""
        return [getattr(self, name) for name in TOTAL_NAMES]

    def restore(self, packed: Sequence[int]) -> None:
        """Take over the totals that ``packed`` returned."""
        for name, total in zip(TOTAL_NAMES, packed, strict=False):
            setattr(self, name, total)
        self.passed_before = self.passed
