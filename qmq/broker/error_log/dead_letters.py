"""The dead letters of groups: messages that no consumer gets any more, each one with its reason.

A redrive or a deletion of many letters takes some of them in each turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from qmq.broker.error_log.error_log import RetryItem, packed
from qmq.broker.journal.durable_replies import DurableReplies
from qmq.broker.journal.record_types import InFlightRange
from qmq.broker.ports.commands import Administer, Now
from qmq.broker.ports.effects import Administered, Effect, Refused
from qmq.errors import StorageError
from qmq.storage.store import RETRY_ITEMS, ItemLog


def letters_of(consumer: int, start: int, in_flight: InFlightRange, reason: str, now_us: int) -> NDArray[np.void]:
    """Return a dead letter for each message of a range.

    *consumer* had them by delivery sequences from *start* on; both are 0 where no consumer had them.
    """
    messages = in_flight.messages
    first = RetryItem(
        0, now_us, messages.part(0, 1), in_flight.attempt, in_flight.session_expiries, False, consumer, start, now_us,
        reason
    )  # fmt: skip
    letters, places = np.repeat(packed([first]), messages.total), np.arange(messages.total)
    letters["skip"] += places.astype(np.uint32)
    letters["delivery_sequence"] += places.astype(np.uint64)
    return letters


def numbers_between(dead: ItemLog, after: int, before: int, most: int) -> list[int]:
    """Return the first numbers of dead letters between *after* and *before*, at most *most*. Raise StorageFailed."""
    found = list[int]()
    for items in dead.after(after):
        found += items["number"].tolist()
        if len(found) >= most or (found and found[-1] >= before):
            break
    return [number for number in found[:most] if number < before]


def chosen(dead: ItemLog, numbers: Iterable[int]) -> NDArray[np.void]:
    """Return the dead letters with these numbers that exist, ascending; read only blocks that have some. Raise
    StorageFailed.
    """
    found, left = list[NDArray[np.void]](), np.unique(np.fromiter(numbers, np.uint64))
    while len(left):
        block = next(dead.after(int(left[0]) - 1), None)
        if block is None:
            break
        found.append(block[np.isin(block["number"], left)])
        last = block["number"].max(initial=left[0])
        left = left[int(np.searchsorted(left, last, "right")) :]
    return np.concatenate(found) if found else np.empty(0, RETRY_ITEMS)


#: Letters that one turn redrives: about 60 us each. Letters named by number may take a read each.
LETTERS: Final = 64
NAMED: Final = 64
#: Letters that one turn deletes.
DELETED: Final = 1_024


class GroupLetters(Protocol):
    """The dead letters of one group, and the changes to them that are records of the pull log."""

    number: int
    dead: ItemLog

    def redrive(self, numbers: list[int], now_us: int) -> int:
        """Hand out these dead letters again; return how many they were."""

    def forget_dead(self, numbers: list[int] | None, now_us: int) -> int:
        """Delete these dead letters (None: all); return how many they were."""


@dataclass(slots=True)
class _Work:
    """A command that redrives or deletes letters, and how far it is."""

    command: Administer
    group: GroupLetters
    #: Only letters with lower numbers take part: messages that die from now on get this number or a higher one.
    before: int
    #: The numbers of the letters, ascending, of which ``done`` are done; None: all letters.
    named: list[int] | None
    done: int = 0
    last: int = 0
    count: int = 0

    def next_some(self) -> tuple[list[int], bool]:
        """Return the letters for this turn, and whether there are more. Raise StorageFailed."""
        if self.named is None:
            found = numbers_between(self.group.dead, self.last, self.before, LETTERS)
            return found, len(found) == LETTERS
        most = DELETED if self.deletes else NAMED
        start, self.done = self.done, self.done + most
        return self.named[start : self.done], self.done < len(self.named)

    @property
    def deletes(self) -> bool:
        return self.command.action == "delete_dead"


class Redriving:
    """Redrives and deletes dead letters of all groups, one command after another."""

    def __init__(
        self, groups: Mapping[int, GroupLetters], redriven: Callable[[int], None], durable: DurableReplies,
        effects: list[Effect],
    ) -> None:  # fmt: skip
        """*groups* are by number; *redriven* is called with the number of a group whose letters wait again."""
        self._groups = groups
        self._redriven = redriven
        self._durable = durable
        self._effects = effects
        self._waiting: deque[_Work] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, command: Administer, group: GroupLetters, named: list[int] | None, now: Now) -> None:
        """Begin to redrive or delete these dead letters (None: all); answer *command* with their count at the end."""
        if named is not None:
            named = sorted(set(named))
        self._waiting.append(_Work(command, group, group.dead.next_number, named))
        if len(self._waiting) == 1:
            self.tick(now)

    def tick(self, now: Now) -> None:
        """Go on with the first command."""
        if self._waiting and self._do_some(self._waiting[0], now):
            self._waiting.popleft()

    def _do_some(self, work: _Work, now: Now) -> bool:
        """Do a part; return True when the command is done and answered."""
        group, command = work.group, work.command
        is_there = self._groups.get(group.number) is group  # else it was deleted meanwhile
        numbers, goes_on = list[int](), False
        try:
            if is_there and work.deletes and work.named is None:
                work.count = group.forget_dead(None, now.wall_us)
            elif is_there:
                numbers, goes_on = work.next_some()
            if numbers and work.deletes:
                work.count += group.forget_dead(numbers, now.wall_us)
            elif numbers:
                work.count += group.redrive(numbers, now.wall_us)
                work.last = numbers[-1]
                self._redriven(group.number)
        except StorageError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return True
        if goes_on:
            return False
        self._durable.answer(Administered(command.connection, command.request, {"messages": work.count}))
        return True
