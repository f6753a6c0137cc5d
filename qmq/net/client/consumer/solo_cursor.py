"""How far a solo consumer has come: the broker stores nothing about it, so the client remembers where to resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qmq.format.run import Run

_KNOWN_MAX = 100_000


def without_covered(prefixes: Sequence[str]) -> list[str]:
    """Return the prefixes that no other prefix covers, so that each subject belongs to one of them."""
    unique = list(dict.fromkeys(prefixes))
    return [name for name in unique if not any(_covers(other, name) for other in unique if other != name)]


def _covers(prefix: str, name: str) -> bool:
    return prefix == "" or (prefix.endswith(".") and name.startswith(prefix))


class _PrefixCursor:
    """How far the messages of one prefix were received. A broker serves each partition in the order of stamps, and may
    split a batch.
    """

    __slots__ = ("last_us", "received", "resuming")

    def __init__(self) -> None:
        self.last_us = 0
        #: By partition: the last stamp, and the next ordinal in the batch with that stamp.
        self.received: dict[int, tuple[int, int]] = {}
        #: Partitions that may send old messages again.
        self.resuming: set[int] = set()

    def note(self, run: Run) -> None:
        """Record that *run*, and all messages before it in its partition, were received."""
        self.received[run.partition] = run.stored_at_us, run.ordinal + run.count
        self.last_us = max(self.last_us, run.stored_at_us)

    def unseen(self, run: Run) -> Run | None:
        """Return the part of *run* that was not received before the reconnect, or None."""
        if run.partition not in self.resuming:
            return run
        last_us, next_ordinal = self.received[run.partition]
        if run.stored_at_us > last_us:
            self.resuming.remove(run.partition)
            return run
        skip = next_ordinal - run.ordinal
        if run.stored_at_us < last_us or skip >= run.count:
            return None
        return run.slice(skip, run.count) if skip > 0 else run


class SoloCursor:
    """Remembers which messages a solo consumer has received, in constant memory: for each prefix the last stamp, and
    how many messages of the batch with that stamp.
    """

    def __init__(self, prefixes: Sequence[str], start_us: int | None) -> None:
        """Make a cursor for *prefixes*, none of which covers another. *start_us*: the stamp to begin at; None: the
        start that the subscription asks for.
        """
        self._cursors = [_PrefixCursor() for _ in prefixes]
        self._whole = dict(zip(prefixes, self._cursors, strict=True))
        self._by_subject: dict[str, _PrefixCursor] = {}
        self._start_us = start_us
        # For each of the last answers, one per prefix, the stamp below which all messages had been received.
        self._latest_us: deque[int] = deque(maxlen=len(prefixes))
        self._left_us: int | None = None

    @property
    def floor_us(self) -> int | None:
        """The stamp to subscribe from so that no message is missed; None: the start that the subscription asks for."""
        floors = [cursor.last_us for cursor in self._cursors if cursor.last_us]
        if len(floors) < len(self._cursors):
            if len(self._latest_us) < len(self._cursors):
                return self._start_us
            # Each prefix was first in one of these answers, so a prefix that brought nothing had nothing then.
            floors.append(self._latest_us[0])
        if self._left_us is not None:
            floors.append(self._left_us)
        return min(floors)

    def begin_at(self, start_us: int) -> None:
        """Record that the subscription began at *start_us*."""
        self._start_us = start_us

    def resume(self, same_store: bool) -> None:
        """Prepare for a new subscription: drop messages that come again. Another store sends none again."""
        self._start_us = self.floor_us
        self._latest_us.clear()
        if not same_store:
            self._left_us = None
        for cursor in self._cursors:
            if not same_store:
                cursor.last_us = 0
                cursor.received.clear()
            cursor.resuming = set(cursor.received)

    def take(self, runs: list[Run], left_us: int | None = None) -> list[Run]:
        """Record the runs of an answer; return those that were not received before.

        *left_us*: the broker has sent all messages that were stored before this stamp.
        """
        came = bool(runs)
        self._left_us = left_us
        if any(cursor.resuming for cursor in self._cursors):
            fresh = [self._cursor_of(run.subject).unseen(run) for run in runs]
            runs = [run for run in fresh if run is not None]
        if len(self._cursors) > 1:
            for run in runs:
                self._cursor_of(run.subject).note(run)
        else:
            for run in {run.partition: run for run in runs}.values():
                self._cursors[0].note(run)
        if came:
            latest = max(cursor.last_us for cursor in self._cursors)
            self._latest_us.append(latest if left_us is None else min(latest, left_us))
        return runs

    def _cursor_of(self, subject: str) -> _PrefixCursor:
        if len(self._cursors) == 1:
            return self._cursors[0]
        cursor = self._by_subject.get(subject)
        if cursor is None:
            if len(self._by_subject) >= _KNOWN_MAX:
                self._by_subject.clear()
            found = [self._whole[name] for name in self._whole if name == subject or _covers(name, subject)]
            cursor = self._by_subject[subject] = found[0]
        return cursor
