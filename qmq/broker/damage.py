"""What a running broker finds to be bad in its logs: counted, told of and served no more, each place once.

What clients could not verify or decode: read again from disk and judged.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from qmq.broker.ports.commands import Checked, ReadDone, Report
from qmq.broker.ports.effects import Asker, CheckWanted, Effect, ReadWanted, Refused, Reported, first_number
from qmq.broker.ports.metrics import Counters, FoundBy
from qmq.errors import BadBytes, Overloaded, QmqError, StorageError
from qmq.format.layout import DELAY_PARTITION
from qmq.net.protocol.types import ReportOutcome
from qmq.storage.store import NotAtHand, PartitionDamage, Store

#: Places that are told of once: beyond so many the one known longest may be told of again.
MOST_POSITIONS: Final = 4_096


class TellRate:
    """How many bad places are named in the log: *burst* at once, and then one in *every_us* microseconds.

    A disk that falls apart has more of them than a log can hold; all are counted, and `qmq verify` names all.
    """

    def __init__(self, burst: int, every_us: int) -> None:
        self._burst_us = burst * every_us
        self._every_us = every_us
        self._free_us = 0  # when what was told would be used up, had it been told one by one

    def may_tell(self, now_us: int) -> bool:
        """Whether one more may be told of now."""
        free_us = max(self._free_us, now_us) + self._every_us
        if free_us - now_us > self._burst_us:
            return False
        self._free_us = free_us
        return True


class Damages:
    """The one road of everything bad, whoever came upon it."""

    def __init__(self, store: Store, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        self._told: OrderedDict[str, None] = OrderedDict()
        self._news: list[QmqError] = []

    def found(self, damage: PartitionDamage, by: FoundBy) -> None:
        """Bytes on disk are bad: what is marked is served no more."""
        log, local = self._store.log_of(damage.partition)
        if damage.partition < DELAY_PARTITION:  # what is delayed is checked message by message when it is due
            marked = [log.mark_unreadable(local, *mark) for mark in damage.marks]
            if marked and not any(marked):
                return
        place = log.file_offset_of(local, damage.start)
        self._tell(BadBytes(f"{place}, {damage.end - damage.start} bytes: {damage.reason}"), by)

    def refused(self, error: QmqError, by: FoundBy = "pull") -> None:
        """Something could not be read, for that reason, or is bad."""
        self._tell(error, by)

    def take_news(self) -> list[QmqError]:
        """What was found since the last call and not told of before."""
        news, self._news = self._news, []
        return news

    def _tell(self, error: QmqError, by: FoundBy) -> None:
        text = str(error)
        if text in self._told:
            self._told.move_to_end(text)
            return
        self._told[text] = None
        if len(self._told) > MOST_POSITIONS:
            self._told.popitem(last=False)
        self._counters.damaged[by] += 1
        self._news.append(error)


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
            self._effects.append(Reported(report.connection, report.request, ReportOutcome.UNKNOWN))
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
        found = ReportOutcome.SOUND if damage is None else ReportOutcome.BAD
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
