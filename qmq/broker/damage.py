"""Bad bytes that a running broker finds: each place is counted, logged once, and not served any more.

Clients report messages that they could not verify; the broker reads these again from disk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Final

from qmq.broker.ports.commands import Checked, ReadDone, Report
from qmq.broker.ports.effects import Asker, CheckWanted, Effect, ReadWanted, Refused, Reported, first_number
from qmq.broker.ports.metrics import Counters, FoundBy
from qmq.broker.ports.rights import Rights
from qmq.errors import BadBytes, Overloaded, QmqError, StorageError
from qmq.format.layout import DELAY_PARTITION
from qmq.net.protocol.types import ReportOutcome
from qmq.storage.store import NotInMemory, PartitionDamage, Store

#: Places that are remembered as logged; beyond that the oldest is forgotten, and may be logged again.
MOST_POSITIONS: Final = 4_096


class LogRate:
    """Limits how many bad places are logged: *burst* at once, then one in *every_us* microseconds.

    A broken disk may have more bad places than fit in a log. All are counted, and `qmq verify` names all.
    """

    def __init__(self, burst: int, every_us: int) -> None:
        self._burst_us = burst * every_us
        self._every_us = every_us
        self._free_us = 0  # until when the places logged so far use up the rate

    def may_log(self, now_us: int) -> bool:
        """Return whether one more place may be logged now, and count it."""
        free_us = max(self._free_us, now_us) + self._every_us
        if free_us - now_us > self._burst_us:
            return False
        self._free_us = free_us
        return True


class Damages:
    """Collects all damage, found by pulls, the scrub and clients."""

    def __init__(self, store: Store, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        self._reported: OrderedDict[str, None] = OrderedDict()
        self._news: list[QmqError] = []

    def found(self, damage: PartitionDamage, by: FoundBy) -> None:
        """Mark bad bytes on disk as unreadable, and report them."""
        log = self._store.partition(damage.partition).message_log
        if damage.partition < DELAY_PARTITION:  # delayed messages are checked one by one when they are due
            marked = [log.unreadable.add(*mark) for mark in damage.marks]
            if marked and not any(marked):
                return
        place = log.file_offset_of(damage.start)
        self._add(BadBytes(f"{place}, {damage.end - damage.start} bytes: {damage.reason}"), by)

    def refused(self, error: QmqError, by: FoundBy = "pull") -> None:
        """Report an error that a read has met."""
        self._add(error, by)

    def take_news(self) -> list[QmqError]:
        """Return the damage found since the last call that was not reported before."""
        news, self._news = self._news, []
        return news

    def _add(self, error: QmqError, by: FoundBy) -> None:
        text = str(error)
        if text in self._reported:
            self._reported.move_to_end(text)
            return
        self._reported[text] = None
        if len(self._reported) > MOST_POSITIONS:
            self._reported.popitem(last=False)
        self._counters.damaged[by] += 1
        self._news.append(error)


#: Open reports of one connection, and of all.
MAX_REPORTS: Final = 16
MAX_ALL_REPORTS: Final = 1_024


class Reports:
    """Checks the places that clients report, and answers to *effects*."""

    def __init__(
        self, store: Store, effects: list[Effect], damages: Damages, counters: Counters, rights: Mapping[int, Rights]
    ) -> None:
        """*rights* are those of the connections that have a token."""
        self._store = store
        self._effects = effects
        self._damages = damages
        self._counters = counters
        self._rights = rights
        self._open: dict[int, Report] = {}
        self._by_connection: Counter[int] = Counter()
        self._last_number = first_number(Asker.REPORTS)

    def report(self, report: Report) -> None:
        """Begin the check of a reported place. Raises Overloaded."""
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
            size = self._batch_size(report)
        except NotInMemory as missing:
            self._effects.append(ReadWanted(number, missing.read))
            return
        except StorageError as error:
            self._close(number)
            self._effects.append(Refused(report.connection, report.request, error))
            return
        if size is None:
            self._close(number)
            self._effects.append(Reported(report.connection, report.request, ReportOutcome.UNKNOWN))
            return
        self._effects.append(
            CheckWanted(number, report.partition, report.position, size, report.first, report.messages)
        )

    def read_done(self, done: ReadDone) -> None:
        """Go on with a report whose entries were read, or refuse it where that has failed."""
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
        """Answer a report whose batch was checked."""
        report = self._close(checked.number)
        if checked.error is not None:
            self._effects.append(Refused(report.connection, report.request, checked.error))
            return
        damage = checked.damage
        if damage is not None:
            self._damages.found(damage, "report")
        self._counters.sound_reports += damage is None
        found = ReportOutcome.SOUND if damage is None else ReportOutcome.BAD
        self._effects.append(Reported(report.connection, report.request, found))

    def _batch_size(self, report: Report) -> int | None:
        """Return the size of the visible batch that begins at the position; None where none does, or none with a
        subject that the client may see.
        """
        store, partition, position = self._store, report.partition, report.position
        rights = self._rights.get(report.connection)
        if partition >= len(store.partitions):
            return None
        part = store.partitions[partition]
        row = part.consumer_log.row_at_position(position)
        if row >= part.consumer_log.visible_row:
            return None
        entry = part.consumer_log.read_entry(row)
        if entry[1] != position:
            return None
        runs = (part.consumer_log.read_entry(row + run)[3] for run in range(entry[7]))
        if rights is not None and not any(rights.may_see(store.subjects.name(number)) for number in runs):
            return None
        return entry[10]
