"""How far each resend to one group is: in the pull log and in checkpoints, so that it goes on after any end.

A resend hands out a selection of stored messages again (broker/find/resend.py). It goes by subject number and sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

#: Resends that have ended, to remember for the client that asks again; the last ones.
MOST_ENDED: Final = 1_000


class ResendCounts(NamedTuple):
    """The messages of a resend to one group: those that it hands out again, and those that it leaves alone."""

    #: Messages that are handed out again.
    resent: int = 0
    #: Those of them that were dead letters.
    redriven: int = 0
    #: Messages that no consumer of the group had yet.
    waiting: int = 0
    in_flight: int = 0
    retrying: int = 0
    #: Messages that have gone, by retention.
    gone: int = 0

    def plus(self, other: ResendCounts) -> ResendCounts:
        """Return the sums of both."""
        return ResendCounts(*map(int.__add__, self, other))


class ResendProgress(NamedTuple):
    """How far a resend is: all messages before (subject number, sequence) ``upto`` are done.

    ``selection`` is what to select, for a start that goes on; None once the resend has ended.
    """

    selection: dict[str, Any] | None
    upto: tuple[int, ...] = (0, 0)
    counts: tuple[int, ...] = ResendCounts()


class GroupResends:
    """The resends to one group, by the number that the client gave each."""

    def __init__(self) -> None:
        self._by_run: dict[bytes, ResendProgress] = {}

    def get(self, run: bytes) -> ResendProgress | None:
        """Return how far a resend is; None for an unknown one."""
        return self._by_run.get(run)

    def note(self, run: bytes, progress: ResendProgress) -> None:
        """Note how far a resend is."""
        self._by_run[run] = progress
        if len(self._by_run) > MOST_ENDED:
            ended = next((one for one, known in self._by_run.items() if known.selection is None), None)
            if ended is not None:
                del self._by_run[ended]

    def unfinished(self) -> Iterator[tuple[bytes, ResendProgress]]:
        """Return the resends that have not ended."""
        return ((run, progress) for run, progress in self._by_run.items() if progress.selection is not None)

    def stop(self) -> None:
        """End all resends where they are."""
        for run, progress in list(self.unfinished()):
            self._by_run[run] = progress._replace(selection=None)

    def packed(self) -> list[Any]:
        """Return the state for the checkpoint: [run, selection, upto, counts] each."""
        return [[run, *progress] for run, progress in self._by_run.items()]

    def restore(self, packed: list[Any]) -> None:
        """Take over a state from ``packed``."""
        for run, selection, upto, counts in packed:
            self.note(run, ResendProgress(selection, tuple(upto), tuple(counts)))
