"""Counters of a broker since its start. Each part of the broker adds to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Literal

#: The finder of bad bytes: the scrub, a pull, or the report of a client that could not verify messages.
FoundBy = Literal["scrub", "pull", "report"]

#: Buckets of a histogram: up to 2^26 us, about a minute.
_BUCKETS: Final = 27


class Durations:
    """A histogram of durations: a bucket for each power of two of microseconds."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        #: At n: how many took less than 2^n us, and at least half of that; the last one has all longer ones.
        self.counts = [0] * _BUCKETS
        self.sum_us = 0

    def add(self, us: int) -> None:
        """Count one that took so long."""
        self.sum_us += us
        self.counts[min(us.bit_length(), _BUCKETS - 1)] += 1

    def packed(self) -> list[Any]:
        """Return the sum in microseconds and the buckets."""
        return [self.sum_us, self.counts]


class Times:
    """The durations that a broker measures, since its start."""

    __slots__ = ("fsync", "send", "turn")

    def __init__(self) -> None:
        #: A turn of the loop, with the answers that it writes.
        self.turn = Durations()
        #: From the arrival of a batch to the end of the turn that stores it, which answers it, or asks for its sync:
        #: one a turn, of the first batch.
        self.send = Durations()
        #: A sync that senders wait for.
        self.fsync = Durations()


@dataclass(slots=True)
class Counters:
    """The counters; all are 0 at the start of the process."""

    #: Bad places in the logs, each counted once, by their finder.
    damaged: Counter[FoundBy] = field(default_factory=Counter)
    #: Bad places that recovery found when the directory was opened.
    holes_in_recovery: int = 0
    #: Reports of clients, and those whose bytes are sound on disk.
    reports: int = 0
    sound_reports: int = 0
    failed_checkpoints: int = 0
    failed_syncs: int = 0
    #: Refused sends, by the code of the error.
    refused_sends: Counter[str] = field(default_factory=Counter)
    scrubbed_bytes: int = 0
    scrub_rounds: int = 0
    #: Segments that retention dropped, their messages, those carried forward and those that could not be read;
    #: and the messages that groups had not taken, counted for each group.
    dropped_segments: int = 0
    dropped_messages: int = 0
    carried_messages: int = 0
    lost_messages: int = 0
    skipped_messages: int = 0

    def damage_totals(self) -> str:
        """Return a sentence on the damage that was found so far, by each finder that found any."""
        by = ", ".join(f"{self.damaged[name]} by {name}" for name in ("scrub", "pull", "report") if self.damaged[name])
        return f"{sum(self.damaged.values())} bad places since the start: {by}"

    def summary(self) -> str:
        """Return the counters that are not 0 in one line, for the log; empty if all are."""
        refused = ", ".join(f"{count} {code}" for code, count in sorted(self.refused_sends.items()) if count)
        counts = (
            (self.holes_in_recovery, "bad places in recovery"),
            (self.reports, "reports of clients"),
            (self.sound_reports, "of them of bytes that are sound"),
            (self.failed_checkpoints, "failed checkpoints"),
            (self.failed_syncs, "failed syncs"),
            (self.scrubbed_bytes, "bytes scrubbed"),
            (self.scrub_rounds, "full rounds of the scrub"),
            (self.dropped_segments, "segments dropped"),
            (self.dropped_messages, "messages in them"),
            (self.carried_messages, "of them carried forward"),
            (self.lost_messages, "of them unreadable"),
            (self.skipped_messages, "messages dropped that groups had not taken"),
        )
        shown = [f"{count} {name}" for count, name in counts if count]
        if self.damaged.total():
            shown.insert(0, self.damage_totals())
        if refused:
            shown.append(f"refused sends: {refused}")
        return "; ".join(shown)
