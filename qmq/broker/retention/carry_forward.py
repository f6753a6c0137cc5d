"""Carry messages forward that a group still refers to, before their segment goes.

They are copied to the end of the log as messages of that group alone, with the same ids, attempts, due times and
reasons. The copies are written and synced first; then one record of the group puts them in the place of the originals.
A crash between the two leaves copies that no record names, and retention begins again after the next start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from qmq.broker.delivery.tracker import DeliveryTracker
from qmq.broker.error_log.error_log import to_record
from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import prefix_of, ranges_of_batch
from qmq.broker.journal.record_types import MessageRange, flat
from qmq.broker.ports.commands import Now, ReadDone
from qmq.broker.ports.effects import Asker, Effect, ReadWanted, first_number
from qmq.broker.publish.publish import Intake
from qmq.broker.publish.staging import StagedBatch
from qmq.broker.retention.copy import CopiedBatch, CopyRead, CopyRequest, Pieces, UnreadableMessages
from qmq.broker.retention.references import (
    Found,
    FoundInFlight,
    FoundLetter,
    FoundRetry,
    GroupReferences,
    SegmentTarget,
)
from qmq.errors import QmqError, StorageError
from qmq.format.batch import ANY_MESSAGE_BYTES, BatchLimits, check_batch, runs_of
from qmq.format.layout import HAS_DELIVER_AT, KNOWN_FLAGS, RUN_REPLAYED
from qmq.storage.store import OldSegment, Store

#: The number of the reads of the copies.
COPY_NUMBER: Final = first_number(Asker.FORWARDING)
_LIMITS: Final = BatchLimits(ANY_MESSAGE_BYTES, KNOWN_FLAGS & ~HAS_DELIVER_AT, RUN_REPLAYED)
#: Pieces of a group's references that one tick looks at: about 0.1 ms each.
_PIECES: Final = 20
#: Failed reads and writes are tried again after this.
_AGAIN_US: Final = 1_000_000


class CarryForward:
    """Carries messages of one segment forward, for one group after another."""

    def __init__(
        self, store: Store, intake: Intake, tracker: DeliveryTracker, effects: list[Effect], old: OldSegment,
        target: SegmentTarget, next_base: int, groups: list[Group],
    ) -> None:  # fmt: skip
        """*next_base* is where the next segment begins."""
        self._store = store
        self._intake = intake
        self._tracker = tracker
        self._effects = effects
        self._old = old
        self._target = target
        self._next_base = next_base
        self._left = [group for group in groups if group.ledger is not None]
        self._group: Group | None = None
        self._references: GroupReferences | None = None
        self._pieces: Iterator[list[Found]] = iter(())
        self._requests: list[CopyRequest] = []
        self._copy_read: CopyRead | None = None
        self._storing: list[_Stored] | None = None
        self._again_us = 0
        #: How many messages were carried forward, in how many bytes, and how many could not be read.
        self.carried = 0
        self.carried_bytes = 0
        self.lost = 0

    def tick(self, now: Now) -> bool:
        """Go on; return True when no group refers to the segment any more."""
        if self._copy_read is not None and self._storing is None:
            return False  # the read is under way
        if now.monotonic_us < self._again_us:
            return False
        if self._storing is not None:
            self._finish(now)
            return False
        if self._requests:
            self._copy()
            return False
        try:
            return self._look()
        except StorageError:
            self._forget_group()
            self._again_us = now.monotonic_us + _AGAIN_US
            return False

    def look_again(self, groups: list[Group]) -> None:
        """Look at these groups again, at the end: they may have handed out messages of the segment since."""
        self._left[:0] = [group for group in groups if group.ledger is not None]

    def next_deadline_us(self, now: Now) -> int | None:
        """Return when to go on; None while a read or a sync is under way."""
        if self._copy_read is not None:
            return None
        return max(now.monotonic_us, self._again_us)

    def end(self) -> None:
        """Stop; the segment stays."""
        self._forget_group()

    def _forget_group(self) -> None:
        """Look at the current group again from the beginning, after the others."""
        if self._references is not None:
            self._references.end()
        if self._group is not None:
            self._left.append(self._group)
        self._group = self._references = None
        self._requests = []

    # --- references to the segment ------------------------------------------------------------------------------------

    def _look(self) -> bool:
        for _ in range(_PIECES):
            if self._group is None and not self._next_group():
                return True
            assert self._group is not None
            found = next(self._pieces, None) if self._is_there(self._group) else None
            if found is None:
                assert self._references is not None
                self._references.end()
                self._group = self._references = None
            elif found:
                self._requests = [CopyRequest(one, self._matches(self._group, one.messages)) for one in found]
                self._copy()
                break
        return False

    def _next_group(self) -> bool:
        if not self._left:
            return False
        self._group = self._left.pop()
        ledger = self._group.ledger
        assert ledger is not None
        self._references = GroupReferences(ledger, self._target)
        self._pieces = self._references.pieces()
        return True

    def _is_there(self, group: Group) -> bool:
        """Return whether the group still exists."""
        return group.ledger is not None and self._tracker.ledgers.get(group.ledger.number) is group.ledger

    def _matches(self, group: Group, messages: MessageRange) -> Any:
        number = prefix_of(messages)
        subject_filter = group.filter_of(number) if number else None
        return None if subject_filter is None else subject_filter.matches(self._store)

    # --- copies -------------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        assert self._group is not None
        assert self._group.name is not None
        copy_read = CopyRead(self._old, self._target, self._next_base, self._group.name, self._requests)
        self._copy_read = copy_read
        self._effects.append(ReadWanted(COPY_NUMBER, copy_read))

    def read_done(self, done: ReadDone, now: Now) -> None:
        """Store the copies, or look at the group again later when nothing could be read."""
        assert self._copy_read is not None
        if done.error is None and self._group is not None and self._is_there(self._group):
            self._storing = self._store_all(self._copy_read.made, now)
        else:
            self._copy_read = None
            self._forget_group()
            self._again_us = now.monotonic_us + (_AGAIN_US if done.error is not None else 0)

    def _store_all(self, made: list[tuple[Found, Pieces]], now: Now) -> list[_Stored]:
        stored = list[_Stored]()
        for _, pieces in made:
            for piece in pieces:
                if not isinstance(piece, CopiedBatch):
                    continue
                one = _Stored()
                stored.append(one)
                self.carried_bytes += len(piece.batch)
                try:
                    batch = check_batch(memoryview(piece.batch), _LIMITS)
                    runs = runs_of(memoryview(piece.batch), batch.header)
                    number = self._intake.numbering.of_private(batch.names, runs, forced=True)
                    assert isinstance(number, int), "a copy has one run"
                    self._intake.append(piece.batch, batch, one, now, number=number)
                except QmqError as error:
                    one.refused(error)
                    return stored
        self._intake.turn()
        return stored

    def _finish(self, now: Now) -> None:
        """Put the copies in the place of the originals, once they are on disk."""
        stored, copy_read = self._storing, self._copy_read
        assert stored is not None
        assert copy_read is not None
        if any(one.failed or self._store.partitions[one.partition].broken() is not None for one in stored):
            self._storing = self._copy_read = None
            self._forget_group()
            self._again_us = now.monotonic_us + _AGAIN_US
            return
        if any(self._intake.visible(one.partition) <= one.position for one in stored):
            return
        self._storing = self._copy_read = None
        group = self._group
        if group is None or not self._is_there(group):
            self._forget_group()
            return
        self._record(group, copy_read.made, iter(stored), now)
        self._requests = self._requests[len(copy_read.made) :]

    # --- the record that names the copies -----------------------------------------------------------------------------

    def _record(self, group: Group, made: list[tuple[Found, Pieces]], stored: Iterator[_Stored], now: Now) -> None:
        retries, letters, in_flight = list[Any](), list[Any](), list[Any]()
        assert self._references is not None
        assert group.ledger is not None
        for found, pieces in made:
            ranges, lost = self._ranges(pieces, stored)
            if not self._references.is_there(found):
                continue
            self.carried += sum(piece.messages for piece in pieces if isinstance(piece, CopiedBatch))
            self.lost += sum(messages.total for messages in lost)
            match found:
                case FoundRetry(retry, whole):
                    kept = [messages for messages in ranges if messages not in lost]
                    retries.append([to_record(retry), whole, flat(kept), flat(lost)])
                case FoundLetter(letter) if lost:
                    self._references.cannot_read(found, letter.number, letter.number)
                case FoundLetter(letter):
                    letters.append([to_record(letter), list(ranges[0])])
                case FoundInFlight(member, start, _):
                    in_flight.append([member.number, start, flat(ranges)])
                    for messages in ranges:
                        if messages in lost:
                            self._references.cannot_read(found, start, start + messages.total)
                        start += messages.total
        if retries or letters or in_flight:
            group.ledger.forward(retries, letters, in_flight, now.wall_us)
            self._tracker.members.look(group.ledger)

    def _ranges(self, pieces: Pieces, stored: Iterator[_Stored]) -> tuple[list[MessageRange], list[MessageRange]]:
        """Return the ranges that replace one range, in order, and those of them that cannot be read."""
        ranges, lost = list[MessageRange](), list[MessageRange]()
        for piece in pieces:
            if isinstance(piece, CopiedBatch):
                one = next(stored)
                ranges += ranges_of_batch(self._store, one.partition, one.position, piece.messages)
            elif isinstance(piece, UnreadableMessages):
                ranges.append(piece.messages)
                lost.append(piece.messages)
            else:
                ranges.append(piece)
        return ranges, lost


class _Stored:
    """A batch of copies, and the outcome of its write."""

    def __init__(self) -> None:
        self.partition = self.position = 0
        self.failed = False

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """Remember where the copies lie."""
        self.partition, self.position = partition, batch.position

    def refused(self, error: QmqError) -> None:
        """Note that the copies are not stored."""
        self.failed = True

    def unknown(self, error: QmqError) -> None:
        """Note that the copies may not be stored."""
        self.failed = True
