"""What a running broker finds to be bad in its logs: counted, told of and served no more, each place once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from qmq.broker.ports.metrics import Counters, FoundBy
from qmq.errors import BadBytes, QmqError
from qmq.format.layout import DELAY_PARTITION
from qmq.storage.store import Damage, Store

#: Places that are told of once: beyond so many the one known longest may be told of again.
PLACES_KEPT: Final = 4_096


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

    def found(self, damage: Damage, by: FoundBy) -> None:
        """Bytes on disk are bad: what is marked is served no more."""
        log, local = self._store.log_of(damage.partition)
        if damage.partition < DELAY_PARTITION:  # what is delayed is checked message by message when it is due
            marked = [log.mark_unreadable(local, *mark) for mark in damage.marks]
            if marked and not any(marked):
                return
        place = log.place_of(local, damage.start)
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
        if len(self._told) > PLACES_KEPT:
            self._told.popitem(last=False)
        self._counters.damaged[by] += 1
        self._news.append(error)
