"""The last hour of the console's snapshots: columns of rates and counts, of all groups together and of each group."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.console.snapshot import GroupNow, Snapshot

Column = npt.NDArray[np.float64]

#: An hour of rows, one every 5 s.
KEPT_SECONDS: Final = 3600
EVERY_SECONDS: Final = 5
#: The most groups to keep. If there are more, those whose messages have waited longest are kept.
MOST_GROUPS: Final = 1_000

_MEASURES: Final = (
    "received_rate", "delivered_rate", "acked_rate", "failed_rate", "ready", "in_flight", "in_retry", "dead",
    "oldest_age",
)  # fmt: skip


class Columns(NamedTuple):
    """Measures over time, a column each: rates in messages a second, counts of messages, and ``oldest_age`` in seconds.

    ``times`` are seconds since 1970. A value is NaN when no broker answered or the group did not exist. For a group all
    of ``received_rate`` is NaN.
    """

    times: Column
    received_rate: Column
    delivered_rate: Column
    acked_rate: Column
    failed_rate: Column
    ready: Column
    in_flight: Column
    in_retry: Column
    dead: Column
    oldest_age: Column


class History:
    """Keeps a row every 5 s for an hour, in memory of a fixed size: 26 MB with 1,000 groups.

    Each row has the rates since the row before, so the area under a rate is a count of messages.

        history = History()
        history.add(snapshot)
        history.columns("billing", 600).ready
    """

    def __init__(self, most_groups: int = MOST_GROUPS) -> None:
        self._most_groups = most_groups
        self._rows = KEPT_SECONDS // EVERY_SECONDS
        self._times: Column = np.full(self._rows, np.nan)
        self._whole = np.full((len(_MEASURES), self._rows), np.nan, np.float32)
        self._groups: dict[str, npt.NDArray[np.float32]] = {}
        self._seen: dict[str, int] = {}  # by group: the count of rows when it was last among those that are kept
        self._count = 0
        self._last: Snapshot | None = None

    @property
    def group_names(self) -> list[str]:
        """The names of the groups that have columns."""
        return sorted(self._groups)

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot, unless one of the last 5 s is kept."""
        if self._last is not None and 0 <= (snapshot.at - self._last.at).total_seconds() < EVERY_SECONDS - 0.5:
            return
        row = snapshot.since(self._last)
        self._last = snapshot
        at = self._count % self._rows
        self._times[at] = snapshot.at.timestamp()
        self._whole[:, at] = np.nan
        if snapshot.brokers:
            oldest = snapshot.oldest
            age = 0.0 if oldest is None else max(0.0, (snapshot.at - oldest).total_seconds())
            self._whole[:, at] = (
                row.received_rate, row.delivered_rate, row.acked_rate, row.failed_rate, row.ready, row.in_flight,
                row.in_retry, row.dead, age,
            )  # fmt: skip
        for column in self._groups.values():
            column[:, at] = np.nan
        chosen = self._chosen(row)
        self._seen.update((group.name, self._count) for group in chosen if group.name in self._groups)
        for group in chosen:
            self._column(group.name)[:, at] = (
                np.nan, group.delivered_rate, group.acked_rate, group.failed_rate, group.ready, group.in_flight,
                group.in_retry, group.dead, group.oldest_age(snapshot.at),
            )  # fmt: skip
            self._seen[group.name] = self._count
        self._count += 1
        for name in [name for name, seen in self._seen.items() if seen <= self._count - self._rows]:
            del self._seen[name], self._groups[name]

    def columns(self, group: str | None, seconds: int) -> Columns:
        """Return the columns of the last *seconds*, at most an hour, for a group or (None) for all groups together.
        They are empty if nothing is kept.
        """
        kept = self._whole if group is None else self._groups.get(group)
        if kept is None or not self._count:
            return Columns(*(np.empty(0) for _ in range(len(_MEASURES) + 1)))
        order = np.arange(max(0, self._count - self._rows), self._count) % self._rows
        times = self._times[order]
        wanted = order[times > times[-1] - min(seconds, KEPT_SECONDS)]
        return Columns(self._times[wanted], *kept[:, wanted].astype(np.float64))

    def _chosen(self, row: Snapshot) -> list[GroupNow]:
        """Return the groups to keep: all, or those that are furthest behind."""
        groups = list(row.groups.values())
        if len(groups) <= self._most_groups:
            return groups
        groups.sort(key=lambda group: (-group.oldest_age(row.at), -group.ready, group.name))
        return groups[: self._most_groups]

    def _column(self, name: str) -> npt.NDArray[np.float32]:
        """Return the columns of a group. If there are too many, a new group takes those of the one not seen for
        longest.
        """
        column = self._groups.get(name)
        if column is None:
            if len(self._groups) >= self._most_groups:
                oldest = min(self._seen, key=self._seen.__getitem__)
                column = self._groups.pop(oldest)
                del self._seen[oldest]
                column[:] = np.nan
            else:
                column = np.full((len(_MEASURES), self._rows), np.nan, np.float32)
            self._groups[name] = column
        return column
