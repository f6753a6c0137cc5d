"""Where a consumer that follows alone goes on after a reconnect: the broker keeps nothing of it, so it knows itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qmq.format.pieces import Run

_KNOWN_MAX = 100_000


def without_covered(prefixes: Sequence[str]) -> list[str]:
    """Those prefixes that no other one covers: then each subject belongs to one of them."""
    unique = list(dict.fromkeys(prefixes))
    return [name for name in unique if not any(_covers(other, name) for other in unique if other != name)]


def _covers(prefix: str, name: str) -> bool:
    return prefix == "" or (prefix.endswith(".") and name.startswith(prefix))


class _Track:
    """What was received by one prefix: a broker serves it in the order of stamps, and a batch in its own order."""

    __slots__ = ("last_us", "next_ordinal", "resuming")

    def __init__(self) -> None:
        self.last_us = 0
        self.next_ordinal = 0  # in the batch with that stamp
        self.resuming = False

    def note(self, run: Run) -> None:
        """It was received, and what came before it."""
        if run.stored_at_us >= self.last_us:
            self.last_us = run.stored_at_us
            self.next_ordinal = run.ordinal + run.count

    def unseen(self, run: Run) -> Run | None:
        """That part of a run that was not received before the reconnect."""
        if run.stored_at_us > self.last_us:
            self.resuming = False
            return run
        skip = self.next_ordinal - run.ordinal
        if run.stored_at_us < self.last_us or skip >= run.count:
            return None
        return run.slice(skip, run.count) if skip > 0 else run


class Progress:
    """What a consumer received, in constant memory: for each prefix the last stamp, and how far in that batch."""

    def __init__(self, prefixes: Sequence[str], start_us: int | None) -> None:
        """*prefixes* do not cover each other. *start_us* is the stamp to begin at; None: as the subscription says."""
        self._tracks = [_Track() for _ in prefixes]
        self._whole = dict(zip(prefixes, self._tracks, strict=True))
        self._by_subject: dict[str, _Track] = {}
        self._start_us = start_us
        # The last stamp that had come after each of the last answers, one for each prefix.
        self._latest_us: deque[int] = deque(maxlen=len(prefixes))

    @property
    def floor_us(self) -> int | None:
        """The stamp to subscribe from: nothing before it is missing. None: begin as at first."""
        known = [track.last_us for track in self._tracks if track.last_us]
        if len(known) == len(self._tracks):
            return min(known)
        if len(self._latest_us) < len(self._tracks):
            return self._start_us
        # Each prefix was the first of one of these answers: one that brought nothing had nothing then.
        return min(*known, self._latest_us[0])

    def begin_at(self, start_us: int) -> None:
        """The subscription began at that time, as far as is known."""
        self._start_us = start_us

    def resume(self, same_store: bool) -> None:
        """A subscription begins anew: drop what comes again. Another store has nothing that came before."""
        self._start_us = self.floor_us
        self._latest_us.clear()
        if not same_store:
            for track in self._tracks:
                track.last_us = 0
        for track in self._tracks:
            track.resuming = track.last_us > 0

    def take(self, runs: list[Run]) -> list[Run]:
        """Note the runs of an answer; returns those that had not come before."""
        came = bool(runs)
        if any(track.resuming for track in self._tracks):
            fresh = [self._unseen(run) for run in runs]
            runs = [run for run in fresh if run is not None]
        if len(self._tracks) > 1:
            for run in runs:
                self._track_of(run.subject).note(run)
        elif runs:
            self._tracks[0].note(runs[-1])
        if came:
            self._latest_us.append(max(track.last_us for track in self._tracks))
        return runs

    def _unseen(self, run: Run) -> Run | None:
        track = self._track_of(run.subject)
        return track.unseen(run) if track.resuming else run

    def _track_of(self, subject: str) -> _Track:
        if len(self._tracks) == 1:
            return self._tracks[0]
        track = self._by_subject.get(subject)
        if track is None:
            if len(self._by_subject) >= _KNOWN_MAX:
                self._by_subject.clear()
            found = [self._whole[name] for name in self._whole if name == subject or _covers(name, subject)]
            track = self._by_subject[subject] = found[0]
        return track
