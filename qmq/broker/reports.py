"""What clients could not verify or decode: read again from disk and judged."""

from __future__ import annotations

from collections import Counter
from typing import Final

from qmq.broker.damage import Damages
from qmq.broker.delivery.read_numbers import Asker, first_number
from qmq.broker.ports.commands import Checked, ReadDone, Report
from qmq.broker.ports.effects import CheckWanted, Effect, ReadWanted, Refused, Reported
from qmq.broker.ports.metrics import Counters
from qmq.errors import Overloaded, StorageError
from qmq.storage.store import NotAtHand, Store

#: Reports without an answer, of one connection and of all.
MAX_REPORTS: Final = 16
MAX_ALL_REPORTS: Final = 1_024


class Reports:
    """Everything it has to say goes to *effects*."""

    def __init__(self, store: Store, effects: list[Effect], damages: Damages, counters: Counters) -> None:
        self._store = store
        self._effects = effects
        self._damages = damages
        self._counters = counters
        self._open: dict[int, Report] = {}
        self._by_connection: Counter[int] = Counter()
        self._last_number = first_number(Asker.REPORTS)

    def report(self, report: Report) -> None:
        """Have the place read. Raises Overloaded."""
        if self._by_connection[report.connection] >= MAX_REPORTS or len(self._open) >= MAX_ALL_REPORTS:
            raise Overloaded(
                f"at most {MAX_REPORTS} reports of a connection, and {MAX_ALL_REPORTS} of all, may wait for an answer"
            )
        self._counters.reports += 1
        self._last_number += 1
        self._open[self._last_number] = report
        self._by_connection[report.connection] += 1
        self._look(self._last_number)

    def _look(self, number: int) -> None:
        """Find the batch, then have it checked."""
        report = self._open[number]
        try:
            size = self._batch_size(report.partition, report.position)
        except NotAtHand as missing:
            self._effects.append(ReadWanted(number, missing.read))
            return
        except StorageError as error:
            self._close(number)
            self._effects.append(Refused(report.connection, report.request, error))
            return
        if size is None:
            self._close(number)
            self._effects.append(Reported(report.connection, report.request, "unknown"))
            return
        self._effects.append(
            CheckWanted(number, report.partition, report.position, size, report.first, report.messages)
        )

    def read_done(self, done: ReadDone) -> None:
        """What it takes to find a batch is in memory, or cannot be read."""
        report = self._open[done.number]
        if done.error is None:
            self._look(done.number)
            return
        self._close(done.number)
        self._effects.append(Refused(report.connection, report.request, done.error))

    def _close(self, number: int) -> Report:
        report = self._open.pop(number)
        self._by_connection[report.connection] -= 1
        if not self._by_connection[report.connection]:
            del self._by_connection[report.connection]
        return report

    def checked(self, checked: Checked) -> None:
        """The place was read."""
        report = self._close(checked.number)
        if checked.error is not None:
            self._effects.append(Refused(report.connection, report.request, checked.error))
            return
        damage = checked.damage
        if damage is not None:
            self._damages.found(damage, "report")
        self._counters.sound_reports += damage is None
        found = "sound" if damage is None else "bad"
        self._effects.append(Reported(report.connection, report.request, found))

    def _batch_size(self, partition: int, position: int) -> int | None:
        """The size of the batch that begins there, if one does that can be pulled."""
        store = self._store
        if partition >= store.partitions:
            return None
        row = store.row_at_position(partition, position)
        if row >= store.visible_row(partition):
            return None
        entry = store.read_entry(partition, row)
        return entry[10] if entry[1] == position else None
